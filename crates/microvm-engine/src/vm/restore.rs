//! Restore of a microVM from a snapshot, in a new VMM process.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used. The *lineage* of a snapshot is the snapshot and the chain of its
//! ancestors. A *layer* is the part of a memory or disk that one snapshot stores: the content that
//! differs from its ancestors. The *first use* is the first request or command of a user.

use crate::boot_error::BootError;
use crate::boot_steps::BootStep;
use crate::host_kvm;
use crate::snapshot_context::add_fd;
use crate::spec::{ModulesImage, NetSpec, disk_stack};
use crate::vm::{LaunchSpec, MicroVm, console_ring};
use crate::vmm::Vmm;
use crate::vmm_limits::VmmLimits;
use jiffy_engine_api::{BootMode, steps};
use jiffy_proto::agent::{GUEST_CID, HELLO_PORT, Identity};
use jiffy_proto::snapshot::{
    LaterPages, LayerFiles, LazyConfig, LazyLayer, MemorySource, PopulateMoment, RestoreConfig,
};
use jiffy_proto::vm::{DiskConfig, FdIndex, NetConfig, Request, VsockConfig};
use jiffy_snapshot::{Hold, Lineage, SnapshotError, SnapshotLayer};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Source of a restored VM's memory.
#[derive(Debug)]
pub enum MemoryPolicy {
    /// Memory is mapped: pages are read on first access, and guests share them until they write.
    Map,
    /// All memory of the snapshot is read before the guest starts.
    CopyAll,
    /// The working set recorded by [`MicroVm::working_set`] is read before the guest starts. The
    /// rest is mapped.
    CopyWorkingSet(File),
}

/// Specification of a restore. The caller opens all files.
#[derive(Debug)]
pub struct RestoreSpec {
    /// VMM program.
    pub vmm: Vmm,
    /// Snapshot with its ancestors.
    pub lineage: Lineage,
    /// Images of the root file system with which the guest was booted, lowest first.
    pub rootfs: Vec<File>,
    /// Kernel modules with which the guest was booted, according to the snapshot's manifest.
    pub modules: Option<ModulesImage>,
    /// Blank disk with which the guest was booted.
    pub blank_disk: File,
    /// Empty file for the sandbox's disk writes. A later snapshot of the sandbox hard-links this
    /// file if it was created by [`jiffy_snapshot::Store::overlay`], and copies it otherwise.
    pub overlay: File,
    /// Network interface with the MAC address that the guest knows. `None` if the guest has none.
    pub net: Option<NetSpec>,
    /// Identity for the agent.
    pub identity: Identity,
    /// Source of memory.
    pub memory: MemoryPolicy,
    /// Index of the pages that are made private to the guest before it runs: pages that it writes
    /// first ([`crate::WorkingSet::written`]).
    pub populate: Option<File>,
    /// Pages of which the VMM makes private copies when the first use starts. If no other guest is
    /// starting, the VMM copies them during the start instead.
    pub populate_later: Option<FirstUsePages>,
    /// Memory that is not stored on this host. `None` if all layers are complete.
    pub lazy: Option<LazyMemory>,
}

/// Pages that a guest writes until the end of its first use.
#[derive(Debug)]
pub struct FirstUsePages {
    /// Index of the pages. It may include pages that the guest writes earlier.
    pub index: File,
    /// Event that marks the start of the first use.
    pub used_by: PopulateMoment,
}

impl FirstUsePages {
    /// Converts the pages to the VMM's format and adds their file to `fds`.
    pub(crate) fn request<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) -> LaterPages {
        LaterPages {
            pages: add_fd(fds, &self.index),
            from: self.used_by,
        }
    }
}

/// Memory that is not stored on this host, and the connection to its source.
#[derive(Debug)]
pub struct LazyMemory {
    /// `/dev/userfaultfd`.
    pub userfaultfd: File,
    /// Listening socket to which the fetcher connects. The *fetcher* is the process that obtains
    /// the missing memory.
    pub listener: OwnedFd,
    /// Incomplete memory layers: position in the lineage, and an index whose `stored` chunks are on
    /// this host.
    pub layers: Vec<(u32, File)>,
    /// Timeout of a chunk. The guest is terminated if a chunk is not fetched in time.
    pub timeout: Duration,
}

impl LazyMemory {
    /// Returns the request for memory that is fetched later, and adds its descriptors to `fds`.
    fn config<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) -> LazyConfig {
        let layers = self.layers.iter().map(|(layer, present)| LazyLayer {
            layer: *layer,
            present: add_fd(fds, present),
        });
        let layers = layers.collect();
        fds.push(self.listener.as_fd());
        LazyConfig {
            // If the index does not fit, sending fails because the channel limits the number of
            // descriptors.
            listener: FdIndex(u8::try_from(fds.len() - 1).unwrap_or(u8::MAX)),
            userfaultfd: add_fd(fds, &self.userfaultfd),
            layers,
            timeout_ms: u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

/// Open files of a lineage.
pub(crate) struct LineageFiles {
    pub state: File,
    pub memory: Vec<SnapshotLayer>,
    pub disk: Vec<SnapshotLayer>,
}

impl LineageFiles {
    /// Opens the state of the newest snapshot, and the layers of all snapshots.
    pub fn open(lineage: &Lineage) -> Result<Self, SnapshotError> {
        let newest = lineage
            .newest()
            .ok_or_else(|| SnapshotError::Missing(String::new()))?;
        Ok(Self {
            state: newest.state()?,
            memory: lineage.memory()?,
            disk: lineage.disk(0)?,
        })
    }
}

impl MemoryPolicy {
    /// Converts the source to the VMM's format and adds its file to `fds`.
    pub(crate) fn source<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) -> MemorySource {
        match self {
            Self::Map => MemorySource::Map,
            Self::CopyAll => MemorySource::Copy { working_set: None },
            Self::CopyWorkingSet(set) => MemorySource::Copy {
                working_set: Some(add_fd(fds, set)),
            },
        }
    }
}

impl RestoreSpec {
    /// Returns the request to the VMM, and the descriptors to which it refers by index.
    fn request<'a>(
        &'a self,
        kvm: &'a File,
        files: &'a LineageFiles,
        console: BorrowedFd<'a>,
    ) -> (RestoreConfig, Vec<BorrowedFd<'a>>) {
        let mut fds = vec![console];
        let config = RestoreConfig {
            console: FdIndex(0),
            kvm: add_fd(&mut fds, kvm),
            state: add_fd(&mut fds, &files.state),
            memory: layers(&mut fds, &files.memory),
            source: self.memory.source(&mut fds),
            populate: self.populate.as_ref().map(|pages| add_fd(&mut fds, pages)),
            populate_later: self.populate_later.as_ref().map(|later| LaterPages {
                // If no other guest is starting, copying during this start delays no other guest.
                from: if self.vmm.starts_alone() {
                    PopulateMoment::Start
                } else {
                    later.used_by
                },
                ..later.request(&mut fds)
            }),
            disks: {
                let images = self.rootfs.iter();
                let images = images.map(|image| add_fd(&mut fds, image)).collect();
                let written = DiskConfig::Layered {
                    base: add_fd(&mut fds, &self.blank_disk),
                    layers: layers(&mut fds, &files.disk),
                    overlay: add_fd(&mut fds, &self.overlay),
                };
                let modules = self.modules.as_ref();
                let modules = modules.map(|image| add_fd(&mut fds, &image.file));
                disk_stack(images, written, modules)
            },
            disk_limits: self.vmm.disk_limits(),
            vsock: Some(VsockConfig {
                guest_cid: GUEST_CID,
                host_ports: vec![HELLO_PORT],
            }),
            net: self.net.as_ref().map(|net| NetConfig {
                tap: add_fd(&mut fds, &net.tap),
                mac: net.mac,
                mtu: net.mtu,
            }),
            paused: false,
            lazy: self.lazy.as_ref().map(|lazy| lazy.config(&mut fds)),
        };
        (config, fds)
    }
}

/// Adds the descriptors of layers to `fds`. Returns their indexes in `fds`.
pub(crate) fn layers<'a>(
    fds: &mut Vec<BorrowedFd<'a>>,
    list: &'a [SnapshotLayer],
) -> Vec<LayerFiles> {
    list.iter()
        .map(|layer| LayerFiles {
            file: add_fd(fds, &layer.file),
            index: add_fd(fds, &layer.index),
        })
        .collect()
}

impl MicroVm {
    /// Starts a VMM and restores the guest. Returns when the agent has sent a new greeting and
    /// taken its identity.
    pub async fn restore(spec: RestoreSpec) -> Result<Self, BootError> {
        let requested_at = Instant::now();
        let mut step = steps::begin("spawn");
        let (mut vm, mut boot) = Self::begin_restore(&spec, Some(spec.identity.clone()))?;
        step.next("restore");
        vm.wait_until_up_in_time(requested_at, &mut boot, &mut step)
            .await?;
        Ok(vm)
    }

    /// Starts a VMM and sends it the restore request. `identity` replaces the identity in `spec`,
    /// and is `None` if the identity is assigned later.
    pub(crate) fn begin_restore(
        spec: &RestoreSpec,
        identity: Option<Identity>,
    ) -> Result<(Self, mpsc::Receiver<BootStep>), BootError> {
        let newest = spec
            .lineage
            .newest()
            .ok_or_else(|| SnapshotError::Missing(String::new()))?;
        if spec.lazy.is_none() && !spec.lineage.is_complete() {
            return Err(SnapshotError::Incomplete(newest.id().to_owned()).into());
        }
        // Hold the snapshot before its files are opened, so that they are not removed in between.
        let hold = newest.hold()?;
        let parent = (newest.id().to_owned(), hold);
        let limits = VmmLimits {
            memory: newest.manifest().memory.bytes,
        };
        let files = LineageFiles::open(&spec.lineage)?;
        let kvm = host_kvm::open()?;
        Self::start_restored(spec, identity, parent, limits, &files, &kvm)
    }

    /// Starts a VMM process, and sends it the request for the restore with all descriptors.
    fn start_restored(
        spec: &RestoreSpec,
        identity: Option<Identity>,
        parent: (String, Hold),
        limits: VmmLimits,
        files: &LineageFiles,
        kvm: &File,
    ) -> Result<(Self, mpsc::Receiver<BootStep>), BootError> {
        let console = console_ring()?;
        // The VMM receives one descriptor. The other is for the next snapshot.
        let overlay = spec.overlay.try_clone().map_err(|source| BootError::Host {
            what: "cannot duplicate a descriptor",
            source,
        })?;
        let console_fd = console
            .fd()
            .try_clone_to_owned()
            .map_err(|source| BootError::Host {
                what: "cannot duplicate a descriptor",
                source,
            })?;
        let (config, fds) = spec.request(kvm, files, std::os::fd::AsFd::as_fd(&console_fd));
        let launch = LaunchSpec {
            vmm: &spec.vmm,
            limits,
            identity,
            mode: BootMode::Snapshot,
            parent: Some(parent),
            net: spec.net.is_some(),
            modules: spec.modules.as_ref().map(|image| image.sha256.clone()),
        };
        let request = Request::Restore(Box::new(config));
        Self::launch(launch, &request, &fds, console, overlay)
    }
}
