//! gVisor of our own, beside a daemon's: its sandboxes end when this process does.

use anyhow::Context;
use jiffy_engine::{AfterSnapshot, Arrival, Engine, EngineError, Persona, SandboxSize};
use jiffy_host::{GvisorEngine, GvisorGuest, Host, Prepared, new_id};
use nix::fcntl::{Flock, FlockArg};
use std::fs::File;
use tempfile::TempDir;

/// Sandboxes of one template and their snapshots, in a directory of their own.
pub struct Apart {
    engine: GvisorEngine,
    template: String,
    directory: TempDir,
    /// Says that the directory is in use, however old it grows.
    _lock: Flock<File>,
}

impl Apart {
    /// For sandboxes of `template`, which was opened on `host`.
    pub async fn open(host: &Host, template: &str, prepared: Prepared) -> anyhow::Result<Self> {
        let run = host.home().run();
        let directory = tempfile::tempdir_in(&run);
        let directory = directory
            .with_context(|| format!("cannot make a directory for gVisor in {}", run.display()))?;
        let lock = Flock::lock(File::open(directory.path())?, FlockArg::LockExclusive)
            .map_err(|(_, e)| e)?;
        let engine = GvisorEngine::apart(host.clone(), directory.path().to_owned()).await?;
        engine.hold(template, prepared)?;
        Ok(Self {
            engine,
            template: template.to_owned(),
            directory,
            _lock: lock,
        })
    }

    /// Boots a fresh sandbox and returns when its agent has answered.
    pub async fn boot(&self, size: SandboxSize) -> Result<GvisorGuest, EngineError> {
        let arrival = self.engine.boot(&self.template, size).await?;
        arrival.welcome(&somebody()?).await
    }

    /// Ends a sandbox and makes it snapshot `id`.
    pub async fn save(&self, guest: &GvisorGuest, id: &str) -> Result<(), EngineError> {
        let saved = self
            .engine
            .snapshot(guest, id, None, AfterSnapshot::Stop, None);
        saved.await.map(drop)
    }

    /// Makes a sandbox of a snapshot and returns when its agent has taken a new identity.
    pub async fn restore(&self, id: &str) -> Result<GvisorGuest, EngineError> {
        let arrival = self.engine.restore(&self.template, id).await?;
        arrival.welcome(&somebody()?).await
    }

    /// Ends what there is, and returns when nothing is left.
    pub async fn close(self) {
        self.engine.close().await;
        // The helper removed it, unless it was killed.
        let _ = self.directory.close();
    }
}

fn somebody() -> Result<Persona, EngineError> {
    Ok(Persona {
        id: new_id().map_err(EngineError::failed)?,
        ..Persona::default()
    })
}
