//! A microVM made from a snapshot.

use crate::cgroup::Limits;
use crate::driver::Step;
use crate::host_kvm;
use crate::jail::Vmm;
use crate::saving::add;
use crate::spec::{ModulesImage, NetSpec, stack};
use crate::vm::{BootError, Launch, MicroVm, ring};
use jiffy_engine::BootMode;
use jiffy_proto::agent::{GUEST_CID, HELLO_PORT, Identity};
use jiffy_proto::snapshot::{LayerFiles, MemorySource, RestoreConfig};
use jiffy_proto::vm::{DiskConfig, FdIndex, NetConfig, Request, VsockConfig};
use jiffy_snapshot::{Hold, Layer, Lineage, SnapshotError};
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::time::Instant;
use tokio::sync::mpsc;

/// Where a restored VM's memory comes from.
#[derive(Debug)]
pub enum MemoryPolicy {
    /// Mapped: pages come as they are touched, and siblings share them until they write.
    Map,
    /// Everything the snapshot holds is read at once.
    CopyAll,
    /// What [`MicroVm::working_set`] wrote down is read at once, the rest mapped.
    CopyWorkingSet(File),
}

/// Everything a restore needs.
#[derive(Debug)]
pub struct RestoreSpec {
    /// The `jiffy-vmm` program.
    pub vmm: Vmm,
    /// The snapshot and all below it.
    pub lineage: Lineage,
    /// Images of the root file system it was booted with, the lowest first.
    pub rootfs: Vec<File>,
    /// Modules of its kernel it was booted with, as the snapshot's manifest says.
    pub modules: Option<ModulesImage>,
    /// Blank disk it was booted with.
    pub blank_disk: File,
    /// Empty file for this sandbox's writes; one of [`jiffy_snapshot::Store::overlay`] makes snapshots cheap.
    pub overlay: File,
    /// Network card, if it had one; with the address that the guest knows.
    pub net: Option<NetSpec>,
    /// What the agent is told to be.
    pub identity: Identity,
    /// Where memory comes from.
    pub memory: MemoryPolicy,
}

/// Open files of a lineage.
struct Files {
    state: File,
    memory: Vec<Layer>,
    disk: Vec<Layer>,
}

impl RestoreSpec {
    fn wire<'a>(
        &'a self,
        kvm: &'a File,
        files: &'a Files,
        console: BorrowedFd<'a>,
    ) -> (RestoreConfig, Vec<BorrowedFd<'a>>) {
        let mut fds = vec![console];
        let config = RestoreConfig {
            console: FdIndex(0),
            kvm: add(&mut fds, kvm),
            state: add(&mut fds, &files.state),
            memory: layers(&mut fds, &files.memory),
            source: match &self.memory {
                MemoryPolicy::Map => MemorySource::Map,
                MemoryPolicy::CopyAll => MemorySource::Copy { working_set: None },
                MemoryPolicy::CopyWorkingSet(set) => MemorySource::Copy {
                    working_set: Some(add(&mut fds, set)),
                },
            },
            disks: {
                let images = self.rootfs.iter();
                let images = images.map(|image| add(&mut fds, image)).collect();
                let written = DiskConfig::Layered {
                    base: add(&mut fds, &self.blank_disk),
                    layers: layers(&mut fds, &files.disk),
                    overlay: add(&mut fds, &self.overlay),
                };
                let modules = self.modules.as_ref();
                let modules = modules.map(|image| add(&mut fds, &image.file));
                stack(images, written, modules)
            },
            disk_limits: self.vmm.disk_limits(),
            vsock: Some(VsockConfig {
                guest_cid: GUEST_CID,
                host_ports: vec![HELLO_PORT],
            }),
            net: self.net.as_ref().map(|net| NetConfig {
                tap: add(&mut fds, &net.tap),
                mac: net.mac,
                mtu: net.mtu,
            }),
            paused: false,
        };
        (config, fds)
    }
}

fn layers<'a>(fds: &mut Vec<BorrowedFd<'a>>, list: &'a [Layer]) -> Vec<LayerFiles> {
    list.iter()
        .map(|layer| LayerFiles {
            file: add(fds, &layer.file),
            index: add(fds, &layer.index),
        })
        .collect()
}

impl MicroVm {
    /// Starts a VMM, restores the guest, and returns when its agent has greeted anew and taken its identity.
    pub async fn restore(spec: RestoreSpec) -> Result<Self, BootError> {
        let asked = Instant::now();
        let (mut vm, mut steps) = Self::begin_restore(&spec, Some(spec.identity.clone()))?;
        vm.come_up_in_time(asked, &mut steps).await?;
        Ok(vm)
    }

    pub(crate) fn begin_restore(
        spec: &RestoreSpec,
        identity: Option<Identity>,
    ) -> Result<(Self, mpsc::Receiver<Step>), BootError> {
        let newest = spec
            .lineage
            .newest()
            .ok_or_else(|| SnapshotError::Missing(String::new()))?;
        let hold = newest.hold()?;
        let parent = (newest.id().to_owned(), hold);
        let limits = Limits {
            memory: newest.manifest().memory.bytes,
        };
        let files = Files {
            state: newest.state()?,
            memory: spec.lineage.memory()?,
            disk: spec.lineage.disk(0)?,
        };
        let kvm = host_kvm::open()?;
        Self::launch_restored(spec, identity, parent, limits, &files, &kvm)
    }

    fn launch_restored(
        spec: &RestoreSpec,
        identity: Option<Identity>,
        parent: (String, Hold),
        limits: Limits,
        files: &Files,
        kvm: &File,
    ) -> Result<(Self, mpsc::Receiver<Step>), BootError> {
        let console = ring()?;
        let overlay = spec.overlay.try_clone().map_err(|source| BootError::Host {
            what: "duplicating a descriptor",
            source,
        })?;
        let ours = console
            .fd()
            .try_clone_to_owned()
            .map_err(|source| BootError::Host {
                what: "duplicating a descriptor",
                source,
            })?;
        let (config, fds) = spec.wire(kvm, files, std::os::fd::AsFd::as_fd(&ours));
        let launch = Launch {
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
