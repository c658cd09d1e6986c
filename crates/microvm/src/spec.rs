//! What a microVM is made of.

use crate::jail::Vmm;
use jiffy_engine::SandboxSize;
use jiffy_proto::agent::Identity;
use jiffy_proto::vm::{DiskConfig, FdIndex, NetConfig, VmConfig, VsockConfig};
use jiffy_proto::{agent, vm};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

/// Quiet boot; panics reboot at once so that they are noticed; huge pages as our guests profit from them; no bounce buffers, which
/// would take 64 MiB from every guest with memory above 4 GiB and which none of our devices needs.
const CMDLINE: &str = "console=ttyS0 quiet loglevel=3 panic=-1 reboot=k noreplace-smp swiotlb=noforce \
    transparent_hugepage=always thp_anon=64K:always rdinit=/init";

/// Everything a cold boot needs. Files are opened by the caller; the VMM gets descriptors only.
#[derive(Debug)]
pub struct BootSpec {
    /// The `jiffy-vmm` program.
    pub vmm: Vmm,
    /// Uncompressed guest kernel.
    pub kernel: File,
    /// Initial RAM file system with the agent as `/init`.
    pub initrd: File,
    /// Modules of this kernel, if it has any.
    pub modules: Option<ModulesImage>,
    /// What its root file system is made of, read-only, the lowest first; 1 or more.
    pub rootfs: Vec<File>,
    /// Formatted blank disk below the writable one, shared by all sandboxes of that size.
    pub blank_disk: File,
    /// Empty file for this sandbox's writes.
    pub overlay: File,
    /// Resources.
    pub size: SandboxSize,
    /// Network card; none unless given.
    pub net: Option<NetSpec>,
    /// What the agent is told to be.
    pub identity: Identity,
    /// Words added to the kernel command line.
    pub extra_cmdline: String,
}

/// Read-only image with the modules of a guest kernel.
#[derive(Debug)]
pub struct ModulesImage {
    /// The image.
    pub file: File,
    /// Its checksum: snapshots need the very image that was mounted when they were taken.
    pub sha256: String,
}

/// A network card and the tap it is wired to.
#[derive(Debug)]
pub struct NetSpec {
    /// Opened and named with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`. It makes no sense to give it to two guests.
    pub tap: File,
    /// Address the guest sees.
    pub mac: [u8; 6],
    /// Largest frame payload in bytes, 68 or more.
    pub mtu: u16,
}

/// A configuration together with the descriptors it names.
pub(crate) struct Wire<'a> {
    pub config: VmConfig,
    pub fds: Vec<BorrowedFd<'a>>,
}

/// The disks of a guest: the lowest image, the disk it writes to, what lies on that image, and
/// the modules of its kernel, in this order.
pub(crate) fn stack(
    images: Vec<FdIndex>,
    written: DiskConfig,
    modules: Option<FdIndex>,
) -> Vec<DiskConfig> {
    let images = images.into_iter();
    let mut disks: Vec<_> = images.map(|image| DiskConfig::ReadOnly { image }).collect();
    disks.insert(disks.len().min(1), written);
    disks.extend(modules.map(|image| DiskConfig::ReadOnly { image }));
    disks
}

impl BootSpec {
    fn cmdline(&self) -> String {
        let images = match self.rootfs.len() {
            0 | 1 => String::new(),
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

    /// Puts the specification into the VMM's terms.
    pub(crate) fn wire<'a>(&'a self, kvm: &'a File, console: BorrowedFd<'a>) -> Wire<'a> {
        let mut fds: Vec<BorrowedFd<'a>> = Vec::new();
        let mut add = |fd: BorrowedFd<'a>| {
            fds.push(fd);
            // At most a handful are ever added.
            FdIndex((fds.len() - 1) as u8)
        };
        let config = VmConfig {
            vcpus: self.size.vcpus,
            memory_mib: self.size.memory_mib,
            kvm: add(kvm.as_fd()),
            kernel: add(self.kernel.as_fd()),
            initrd: Some(add(self.initrd.as_fd())),
            cmdline: self.cmdline(),
            disks: stack(
                self.rootfs.iter().map(|image| add(image.as_fd())).collect(),
                DiskConfig::Overlay {
                    base: add(self.blank_disk.as_fd()),
                    overlay: add(self.overlay.as_fd()),
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
            console: add(console),
        };
        debug_assert!(config.disks.len() <= vm::limits::MAX_DISKS);
        Wire { config, fds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_that_is_written_is_the_second_and_modules_are_the_last() {
        let written = || DiskConfig::Overlay {
            base: FdIndex(8),
            overlay: FdIndex(9),
        };
        let image = |n| DiskConfig::ReadOnly { image: FdIndex(n) };
        assert_eq!(
            stack(vec![FdIndex(1)], written(), None),
            [image(1), written()]
        );
        assert_eq!(
            stack(vec![FdIndex(1)], written(), Some(FdIndex(2))),
            [image(1), written(), image(2)]
        );
        let three = (1..=3).map(FdIndex).collect();
        assert_eq!(
            stack(three, written(), Some(FdIndex(4))),
            [image(1), written(), image(2), image(3), image(4)]
        );
    }
}
