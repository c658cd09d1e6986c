//! Volumes of sandboxes: mounted when a guest starts or continues.
//!
//! A *volume* is a directory of files that sandboxes share. A process of the host serves it, and
//! the agent mounts it in the guest.

use super::entry::SandboxEntry;
use super::{OperationError, Sandboxes, WeakSandboxes};
use crate::sandbox::Sandbox;
use crate::{MountError, SandboxSettings, VolumeMount};
use jiffy_api_types::SandboxState;
use jiffy_engine_api::{EngineError, Guest, MICROVM, steps};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Pauses between the attempts to serve the mounts of a sandbox again.
const RETRIES: [Duration; 3] = [
    Duration::from_millis(200),
    Duration::from_secs(2),
    Duration::from_secs(10),
];
/// Time for which a server must run before its exit is handled without a pause.
const STABLE: Duration = Duration::from_secs(60);
/// First and maximum pause after repeated exits of a server.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LAST_PAUSE: Duration = Duration::from_secs(20);

impl Sandboxes {
    /// Checks that an engine can mount the volumes of a sandbox.
    pub(super) fn check_volumes(
        settings: &SandboxSettings,
        engine: &'static str,
    ) -> Result<(), OperationError> {
        if settings.volumes.is_empty() || engine == MICROVM {
            return Ok(());
        }
        let failed = OperationError::engine("mount volumes");
        Err(failed(EngineError::Unsupported {
            engine,
            what: "mount volumes",
            instead: Some("the engine microvm"),
        }))
    }

    /// Mounts the volumes of a sandbox in its guest. The caller must hold `op_lock`. With
    /// `only_if_lost`, only volumes whose server has ended are mounted.
    pub(super) async fn mount_volumes(
        &self,
        sandbox: &Sandbox,
        guest: &dyn Guest,
        only_if_lost: bool,
    ) -> Result<(), OperationError> {
        let volumes = &sandbox.settings.volumes;
        if volumes.is_empty() {
            return Ok(());
        }
        Self::check_volumes(&sandbox.settings, guest.engine())?;
        let _step = steps::begin("mount_volumes");
        let mounted = match &self.0.volumes {
            Some(mounter) => {
                let mount = VolumeMount {
                    sandbox: &sandbox.id,
                    owner: sandbox.settings.owner.as_deref(),
                    volumes,
                    guest,
                    only_if_lost,
                };
                mounter.mount(mount).await
            }
            None => Err(MountError::Failed("this host has no volumes".to_owned())),
        };
        mounted.map_err(|e| match e {
            MountError::Path(reason) => OperationError::MountPath(reason),
            MountError::Unknown(name) => OperationError::NoVolume(name),
            MountError::Failed(reason) => {
                let failed = OperationError::engine(format!("mount the volumes of {}", sandbox.id));
                failed(EngineError::Failed { reason })
            }
        })
    }

    /// Returns the guest of a sandbox with its volumes. Stops the guest if a mount fails. Called
    /// before the start command, which may need the volumes.
    pub(super) async fn with_volumes(
        &self,
        entry: &SandboxEntry,
        guest: Arc<dyn Guest>,
    ) -> Result<Arc<dyn Guest>, OperationError> {
        if entry.with_record(|record| record.settings.volumes.is_empty()) {
            return Ok(guest);
        }
        // The future is boxed, because it is large.
        // `false`: all volumes are mounted. The guest is new, so no server has been lost.
        let mounted = Box::pin(self.mount_volumes(&entry.record(), &*guest, false)).await;
        if let Err(e) = mounted {
            guest.stop().await;
            return Err(e);
        }
        Ok(guest)
    }

    /// Starts a task that serves the mounts of a sandbox again if their server has exited.
    pub(super) fn serve_lost_volumes(&self, entry: &Arc<SandboxEntry>) {
        if entry.with_record(|record| record.settings.volumes.is_empty()) {
            return;
        }
        let (this, entry) = (self.downgrade(), entry.clone());
        tokio::spawn(async move {
            let mut retries = RETRIES.into_iter();
            while let Err(e) = serve_lost(&this, &entry).await {
                let sandbox = entry.id();
                tracing::warn!(sandbox, error = %e, "cannot serve the volumes of a sandbox");
                match retries.next() {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => return,
                }
            }
        });
    }

    /// Starts the task that replaces servers of volumes that have exited.
    pub(super) fn spawn_volume_servers(&self) {
        let lost = self.0.volumes.as_ref().and_then(|v| v.take_lost());
        if let Some(lost) = lost {
            tokio::spawn(replace_servers(self.downgrade(), lost));
        }
    }

    /// Returns the sandboxes that have mounted a volume, running or paused.
    fn entries_with_volume(&self, volume: &str) -> Vec<Arc<SandboxEntry>> {
        let entries: Vec<_> = self.0.entries.lock().values().cloned().collect();
        let has_volume = |entry: &Arc<SandboxEntry>| {
            entry.with_record(|record| {
                let mut volumes = record.settings.volumes.iter();
                record.state != SandboxState::Killed && volumes.any(|v| v.volume == volume)
            })
        };
        entries.into_iter().filter(has_volume).collect()
    }

    /// Returns the ids of sandboxes that have mounted a volume, running or paused.
    pub fn sandboxes_with_volume(&self, volume: &str) -> Vec<String> {
        let entries = self.entries_with_volume(volume);
        let mut ids: Vec<_> = entries.iter().map(|entry| entry.id()).collect();
        ids.sort();
        ids
    }
}

/// Serves the mounts of a running sandbox whose server has exited.
async fn serve_lost(this: &WeakSandboxes, entry: &SandboxEntry) -> Result<(), OperationError> {
    // An operation in progress may replace the guest, and mounts its volumes then.
    let _op_guard = entry.op_lock().lock().await;
    let (Some(this), Some(guest)) = (this.upgrade(), entry.guest()) else {
        return Ok(());
    };
    let record = entry.record();
    if record.state != SandboxState::Running {
        return Ok(());
    }
    // `true`: the guest still has its mounts, and only their lost servers are replaced.
    this.mount_volumes(&record, &*guest, true).await
}

/// Serves the mounts of sandboxes again after the exit of a server. A server that exits repeatedly,
/// for example because of a request that is repeated, is started after growing pauses.
async fn replace_servers(sandboxes: WeakSandboxes, mut lost: mpsc::Receiver<String>) {
    let mut exits: HashMap<String, (Instant, Duration)> = HashMap::new();
    while let Some(volume) = lost.recv().await {
        let now = Instant::now();
        exits.retain(|_, (last, pause)| now.duration_since(*last) < STABLE + *pause);
        let pause = match exits.get(&volume) {
            Some((_, pause)) => (*pause * 2).clamp(FIRST_PAUSE, LAST_PAUSE),
            None => Duration::ZERO,
        };
        exits.insert(volume.clone(), (now, pause));
        let sandboxes = sandboxes.clone();
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            let Some(sandboxes) = sandboxes.upgrade() else {
                return;
            };
            for entry in sandboxes.entries_with_volume(&volume) {
                sandboxes.serve_lost_volumes(&entry);
            }
        });
    }
}
