//! The engine `microvm` in the host's terms: templates, snapshots and programs of a data directory.

use crate::host::{CreateError, Host, Prepared};
use crate::identity::identity;
use jiffy_engine::{
    AfterSnapshot, Arrival, BootReport, Engine, EngineError, Guest, Persona, SandboxEnd,
    SandboxSize, SnapshotTimes,
};
use jiffy_microvm::{BootError, BootSpec, MicroVm, RestoreSpec, SaveError, SnapshotSpec, Waiting};
use jiffy_proto::agent::Identity;
use jiffy_proto::snapshot::AfterSnapshot as Then;
use jiffy_snapshot::{Durability, Lineage, Store};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Directory of the snapshots in the data directory.
const SNAPSHOTS: &str = "snapshots";
/// Layers from which on a restore merges them first: each costs every restore a little, merging costs one restore more.
const LONG_LINEAGE: usize = 16;

/// What shows that a file was replaced: inode and change time.
type Stamp = [(u64, i64, i64); 3];

/// MicroVMs made from the templates and snapshots of one host.
pub struct MicroVmEngine {
    host: Host,
    store: Store,
    prepared: Mutex<HashMap<String, (Stamp, Arc<Prepared>)>>,
    /// Held by whoever merges; one at a time, since it reads and writes a lot.
    merging: tokio::sync::Mutex<()>,
}

impl MicroVmEngine {
    /// The engine of `host`.
    pub fn new(host: Host) -> Result<Self, EngineError> {
        let store = Store::open(host.home().path().join(SNAPSHOTS)).map_err(EngineError::failed)?;
        Ok(Self {
            host,
            store,
            prepared: Mutex::default(),
            merging: tokio::sync::Mutex::default(),
        })
    }

    /// Its host.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// The lineage of snapshot `id`; one that has become long is merged first.
    async fn short_lineage(&self, id: &str) -> Result<Lineage, EngineError> {
        let lineage = self.store.lineage(id).map_err(EngineError::failed)?;
        if lineage.snapshots().len() <= LONG_LINEAGE {
            return Ok(lineage);
        }
        let _turn = self.merging.lock().await;
        let (store, owned) = (self.store.clone(), id.to_owned());
        // Whoever waited for the turn may find it merged already, which costs nothing.
        tokio::task::spawn_blocking(move || store.merge(&owned))
            .await
            .map_err(EngineError::failed)?
            .map_err(EngineError::failed)?;
        self.store.lineage(id).map_err(EngineError::failed)
    }

    fn stamp(&self, template: &str) -> io::Result<Stamp> {
        let of = |path: &Path| {
            let metadata = fs::metadata(path)?;
            Ok::<_, io::Error>((metadata.ino(), metadata.ctime(), metadata.ctime_nsec()))
        };
        let manifest = self.host.home().path().join("templates").join(template);
        let programs = self.host.programs();
        Ok([
            of(&manifest.join("template.json"))?,
            of(&programs.vmm)?,
            of(&programs.agent)?,
        ])
    }

    async fn prepare(&self, template: &str) -> Result<Arc<Prepared>, EngineError> {
        let cached = || self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        // A template that is not built yet has no stamp.
        if let Ok(stamp) = self.stamp(template)
            && let Some((found, prepared)) = cached().get(template)
            && *found == stamp
        {
            return Ok(prepared.clone());
        }
        let (host, name) = (self.host.clone(), template.to_owned());
        let prepared = tokio::task::spawn_blocking(move || host.prepare(&name, &mut |_| ()))
            .await
            .map_err(EngineError::failed)?
            .map_err(chain)?;
        let prepared = Arc::new(prepared);
        let stamp = self.stamp(template).map_err(EngineError::failed)?;
        cached().insert(template.to_owned(), (stamp, prepared.clone()));
        Ok(prepared)
    }
}

/// An error with its causes, in one line.
fn chain(error: CreateError) -> EngineError {
    let mut reason = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        let text = cause.to_string();
        if !reason.contains(&text) {
            reason = format!("{reason}: {text}");
        }
        source = cause.source();
    }
    EngineError::Failed { reason }
}

fn boot_error(error: BootError) -> EngineError {
    match error {
        BootError::Ended { end, .. } => EngineError::Ended { end },
        other => EngineError::failed(other),
    }
}

/// The name under which a snapshot remembers its template: it runs with that very image only.
fn image_name(prepared: &Prepared) -> String {
    let manifest = &prepared.template().manifest;
    format!("{}@{}", manifest.name, manifest.image.sha256)
}

/// A guest on its way.
pub enum MicroVmArrival {
    /// Restored, and waiting.
    Restored(Box<Waiting>, Arc<Prepared>),
    /// To be booted when it is known who it is.
    Bootable(Box<BootSpec>, Arc<Prepared>),
}

/// A running guest.
pub struct MicroVmGuest {
    vm: MicroVm,
    image: String,
}

impl MicroVmGuest {
    fn new(vm: MicroVm, prepared: &Prepared) -> Self {
        Self {
            vm,
            image: image_name(prepared),
        }
    }
}

impl Engine for MicroVmEngine {
    type Guest = MicroVmGuest;
    type Arrival = MicroVmArrival;

    async fn fingerprint(&self, template: &str, size: SandboxSize) -> Result<String, EngineError> {
        let prepared = self.prepare(template).await?;
        let [_, vmm, _] = self.stamp(template).map_err(EngineError::failed)?;
        Ok(format!(
            "{} {} vmm {}.{}.{} {}c{}m{}d",
            image_name(&prepared),
            prepared.version(),
            vmm.0,
            vmm.1,
            vmm.2,
            size.vcpus,
            size.memory_mib,
            size.disk_mib
        ))
    }

    async fn boot(&self, template: &str, size: SandboxSize) -> Result<MicroVmArrival, EngineError> {
        let prepared = self.prepare(template).await?;
        let overlay = self.store.overlay().map_err(EngineError::failed)?;
        let spec = prepared
            .boot_spec(size, overlay, Identity::default())
            .map_err(chain)?;
        Ok(MicroVmArrival::Bootable(Box::new(spec), prepared))
    }

    async fn restore(&self, template: &str, id: &str) -> Result<MicroVmArrival, EngineError> {
        let prepared = self.prepare(template).await?;
        let lineage = self.short_lineage(id).await?;
        let newest = lineage.newest().ok_or_else(|| EngineError::Failed {
            reason: format!("there is no snapshot {id}"),
        })?;
        let manifest = newest.manifest();
        if manifest.template != image_name(&prepared) {
            return Err(EngineError::Failed {
                reason: format!(
                    "snapshot {id} was taken with another image of template `{template}` than the one there is now; build that one again"
                ),
            });
        }
        let disk_mib = manifest.disks.first().map_or(0, |disk| disk.bytes >> 20);
        let overlay = self.store.overlay().map_err(EngineError::failed)?;
        let spec: RestoreSpec = prepared
            .restore_spec(lineage, disk_mib, overlay)
            .map_err(chain)?;
        let waiting = MicroVm::restore_waiting(spec).await.map_err(boot_error)?;
        Ok(MicroVmArrival::Restored(Box::new(waiting), prepared))
    }

    async fn snapshot(
        &self,
        guest: &MicroVmGuest,
        id: &str,
        _parent: Option<&str>,
        then: AfterSnapshot,
    ) -> Result<SnapshotTimes, EngineError> {
        let spec = SnapshotSpec {
            id: id.to_owned(),
            template: guest.image.clone(),
            then: match then {
                AfterSnapshot::Resume => Then::Resume,
                AfterSnapshot::Stop => Then::Stop,
            },
            durability: Durability::PageCache,
        };
        let saved = guest.vm.snapshot(&self.store, &spec).await;
        let (_, report) = saved.map_err(|e| match (e, guest.vm.end()) {
            (SaveError::Gone, Some(end)) => EngineError::Ended { end },
            (e, _) => EngineError::failed(e),
        })?;
        Ok(SnapshotTimes {
            stopped_us: report.stopped_us,
            total_us: report.total_us,
        })
    }

    fn snapshots(&self) -> Result<Vec<String>, EngineError> {
        self.store.sweep().map_err(EngineError::failed)?;
        self.store.ids().map_err(EngineError::failed)
    }

    fn is_independent(&self, id: &str) -> bool {
        self.store
            .get(id)
            .is_ok_and(|snapshot| snapshot.manifest().parent.is_none())
    }

    fn remove_snapshot(&self, id: &str) -> Result<(), EngineError> {
        match self.store.remove(id) {
            Ok(()) | Err(jiffy_snapshot::SnapshotError::Missing(_)) => Ok(()),
            Err(e) => Err(EngineError::failed(e)),
        }
    }
}

impl Arrival for MicroVmArrival {
    type Guest = MicroVmGuest;

    fn waits(&self) -> bool {
        match self {
            Self::Restored(waiting, _) => waiting.waits(),
            Self::Bootable(..) => true,
        }
    }

    async fn welcome(self, persona: &Persona) -> Result<MicroVmGuest, EngineError> {
        let tell = |prepared: &Prepared| {
            let defaults = &prepared.template().manifest.defaults;
            let mut env = defaults.env.clone();
            env.extend(persona.env.clone());
            let workdir = Some(defaults.workdir.clone()).filter(|d| !d.is_empty());
            identity(&persona.id, env, defaults.user.clone(), workdir).map_err(EngineError::failed)
        };
        match self {
            Self::Restored(waiting, prepared) => {
                let identity = tell(&prepared)?;
                let vm = waiting.welcome(identity).await.map_err(boot_error)?;
                Ok(MicroVmGuest::new(vm, &prepared))
            }
            Self::Bootable(mut spec, prepared) => {
                spec.identity = tell(&prepared)?;
                let vm = MicroVm::boot(*spec).await.map_err(boot_error)?;
                Ok(MicroVmGuest::new(vm, &prepared))
            }
        }
    }
}

impl Guest for MicroVmGuest {
    fn report(&self) -> BootReport {
        self.vm.report()
    }

    fn pid(&self) -> Option<u32> {
        Some(self.vm.vmm_pid())
    }

    async fn connect(&self, port: u32) -> io::Result<UnixStream> {
        let stream = self.vm.connector().connect(port).await;
        stream.map_err(io::Error::other)
    }

    async fn ended(&self) -> SandboxEnd {
        self.vm.ended().await
    }

    fn console_tail(&self) -> String {
        self.vm.console_tail()
    }

    async fn stop(&self) {
        self.vm.end_now().await;
    }
}
