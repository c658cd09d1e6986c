//! [`BootSpec`]: specification of a microVM: open files, size and network interface. The engine
//! crate fills it in.
//!
//! The VMM opens no files: it is confined, and receives each file as a descriptor.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.

use crate::vmm::Vmm;
use jiffy_engine_api::SandboxSize;
use jiffy_proto::agent::Identity;
use jiffy_proto::snapshot::LayerFiles;
use jiffy_proto::vm::{DiskConfig, FdIndex, NetConfig, VmConfig, VsockConfig};
use jiffy_proto::{agent, vm};
use jiffy_snapshot::{Hold, Lineage, SnapshotError, SnapshotLayer};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

/// Kernel parameters of all guests:
/// - The console is quiet.
/// - A panic reboots at once (`panic=-1`) through the keyboard controller (`reboot=k`), so that the
///   VMM detects it.
/// - Huge pages are enabled because they make guests faster.
/// - Bounce buffers (swiotlb) are off: they would take 64 MiB from every guest with more than 4 GiB
///   of memory, and no device needs them.
const CMDLINE: &str = "console=ttyS0 quiet loglevel=3 panic=-1 reboot=k noreplace-smp swiotlb=noforce \
    transparent_hugepage=always thp_anon=64K:always rdinit=/init";

/// Specification of a cold boot. The caller opens the files: the VMM receives only descriptors.
#[derive(Debug)]
pub struct BootSpec {
    /// VMM program.
    pub vmm: Vmm,
    /// Uncompressed guest kernel.
    pub kernel: File,
    /// Initial RAM file system with the agent as `/init`.
    pub initrd: File,
    /// Modules of the kernel. `None` without modules.
    pub modules: Option<ModulesImage>,
    /// Read-only images of the root file system, lowest first. At least one.
    pub rootfs: Vec<File>,
    /// Formatted blank disk below the overlay, shared by all sandboxes with this disk size.
    pub blank_disk: File,
    /// Empty file for the sandbox's writes.
    pub overlay: File,
    /// Snapshot of the disk from which the guest boots. `None` for an empty disk.
    pub disk: Option<BootDisk>,
    /// Resources.
    pub size: SandboxSize,
    /// Network interface. `None` without a network.
    pub net: Option<NetSpec>,
    /// Identity for the agent.
    pub identity: Identity,
    /// Parameters appended to the kernel command line.
    pub extra_cmdline: String,
}

/// Disk of a snapshot, from which a guest boots.
#[derive(Debug)]
pub struct BootDisk {
    /// Layers of the disk, oldest first.
    layers: Vec<SnapshotLayer>,
    /// Snapshot, held so that it is not removed. `None` once the guest boots.
    pub(crate) parent: Option<(String, Hold)>,
}

impl BootDisk {
    /// Opens the disk of the newest snapshot of `lineage`.
    pub fn open(lineage: &Lineage) -> Result<Self, SnapshotError> {
        let newest = lineage
            .newest()
            .ok_or_else(|| SnapshotError::Missing(String::new()))?;
        // Hold the snapshot before its files are opened, so that they are not removed in between.
        let hold = newest.hold()?;
        Ok(Self {
            parent: Some((newest.id().to_owned(), hold)),
            layers: lineage.disk(0)?,
        })
    }
}

/// Read-only image with the modules of a guest kernel.
#[derive(Debug)]
pub struct ModulesImage {
    /// Image file.
    pub file: File,
    /// Checksum of the image. A restore needs exactly the image that was mounted when the snapshot
    /// was taken.
    pub sha256: String,
}

/// Network interface with its TAP device.
#[derive(Debug)]
pub struct NetSpec {
    /// TAP device opened with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`. Used by one guest only.
    pub tap: File,
    /// MAC address that the guest sees.
    pub mac: [u8; 6],
    /// Maximum frame payload in bytes, at least 68.
    pub mtu: u16,
}

/// Boot configuration with the descriptors to which it refers.
pub(crate) struct BootRequest<'a> {
    pub config: VmConfig,
    pub fds: Vec<BorrowedFd<'a>>,
}

/// Returns the disks of a guest in this order: the lowest image, the writable disk, the other
/// images, and the image with kernel modules.
pub(crate) fn disk_stack(
    images: Vec<FdIndex>,
    written: DiskConfig,
    modules: Option<FdIndex>,
) -> Vec<DiskConfig> {
    let images = images.into_iter();
    let mut disks: Vec<_> = images.map(|image| DiskConfig::ReadOnly { image }).collect();
    // The position of the writable disk is fixed, so that the agent finds it for any number of
    // images.
    disks.insert(disks.len().min(1), written);
    disks.extend(modules.map(|image| DiskConfig::ReadOnly { image }));
    disks
}

impl BootSpec {
    /// Returns the command line of the guest's kernel.
    fn cmdline(&self) -> String {
        let images = match self.rootfs.len() {
            0 | 1 => String::new(),
            // The agent must know which disks are images. Without the parameter, it assumes one
            // image.
            n => format!(" {}={n}", agent::IMAGES),
        };
        let modules = match &self.modules {
            Some(_) => format!(" {}=1", agent::MODULES),
            None => String::new(),
        };
        format!("{CMDLINE}{images}{modules} {}", self.extra_cmdline)
            .trim_end()
            .to_owned()
    }

    /// Converts the specification to the VMM's configuration.
    pub(crate) fn request<'a>(&'a self, kvm: &'a File, console: BorrowedFd<'a>) -> BootRequest<'a> {
        let mut fds: Vec<BorrowedFd<'a>> = Vec::new();
        let mut add = |fd: BorrowedFd<'a>| {
            fds.push(fd);
            // The number of descriptors is far below 256.
            FdIndex((fds.len() - 1) as u8)
        };
        let config = VmConfig {
            vcpus: self.size.vcpus,
            memory_mib: self.size.memory_mib,
            kvm: add(kvm.as_fd()),
            kernel: add(self.kernel.as_fd()),
            initrd: Some(add(self.initrd.as_fd())),
            cmdline: self.cmdline(),
            disks: disk_stack(
                self.rootfs.iter().map(|image| add(image.as_fd())).collect(),
                match &self.disk {
                    None => DiskConfig::Overlay {
                        base: add(self.blank_disk.as_fd()),
                        overlay: add(self.overlay.as_fd()),
                    },
                    Some(disk) => DiskConfig::Layered {
                        base: add(self.blank_disk.as_fd()),
                        layers: disk
                            .layers
                            .iter()
                            .map(|layer| LayerFiles {
                                file: add(layer.file.as_fd()),
                                index: add(layer.index.as_fd()),
                            })
                            .collect(),
                        overlay: add(self.overlay.as_fd()),
                    },
                },
                self.modules.as_ref().map(|image| add(image.file.as_fd())),
            ),
            disk_limits: self.vmm.disk_limits(),
            vsock: Some(VsockConfig {
                guest_cid: agent::GUEST_CID,
                host_ports: vec![agent::HELLO_PORT],
            }),
            net: self.net.as_ref().map(|net| NetConfig {
                tap: add(net.tap.as_fd()),
                mac: net.mac,
                mtu: net.mtu,
            }),
            rng: true,
            balloon: true,
            cpu_level: self.vmm.cpu_level(),
            console: add(console),
        };
        debug_assert!(config.disks.len() <= vm::limits::MAX_DISKS);
        BootRequest { config, fds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_writable_disk_is_the_second_and_modules_are_the_last() {
        let written = || DiskConfig::Overlay {
            base: FdIndex(8),
            overlay: FdIndex(9),
        };
        let image = |n| DiskConfig::ReadOnly { image: FdIndex(n) };
        assert_eq!(
            disk_stack(vec![FdIndex(1)], written(), None),
            [image(1), written()]
        );
        assert_eq!(
            disk_stack(vec![FdIndex(1)], written(), Some(FdIndex(2))),
            [image(1), written(), image(2)]
        );
        let three = (1..=3).map(FdIndex).collect();
        assert_eq!(
            disk_stack(three, written(), Some(FdIndex(4))),
            [image(1), written(), image(2), image(3), image(4)]
        );
    }
}
