//! Sandboxes of one build. All of them are removed when the build ends, including sandboxes whose
//! creation the build no longer awaits.
//!
//! A *permit* counts towards a limit until it is dropped.

use jiffy_sandbox_manager::{
    CreateSpec, ErrorKind, OperationError, QuotaPermit, Sandbox, Sandboxes,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::task::TaskTracker;

/// Maximum wait for creations in flight at the end of a build.
const CREATION_LIMIT: Duration = Duration::from_secs(60);

/// Sandboxes of one build, including sandboxes that are being created.
pub(super) struct BuildSandboxes {
    host: Sandboxes,
    state: Arc<Mutex<State>>,
    /// Tasks that create sandboxes. They continue after a cancellation of the build, because the
    /// host completes a creation that its caller abandoned.
    creations: TaskTracker,
}

/// Sandboxes of a build.
#[derive(Default)]
struct State {
    ids: Vec<String>,
    /// True after the end of the build: sandboxes that are created later are removed at once.
    has_ended: bool,
}

impl BuildSandboxes {
    pub(super) fn new(host: &Sandboxes) -> Self {
        Self {
            host: host.clone(),
            state: Arc::default(),
            creations: TaskTracker::new(),
        }
    }

    /// Creates a sandbox. If the returned future is dropped, the creation continues, and the
    /// sandbox is removed at the end of the build. `permit` is released when the creation has
    /// completed.
    pub(super) async fn create(
        &self,
        spec: CreateSpec,
        permit: Arc<QuotaPermit>,
    ) -> Result<Sandbox, OperationError> {
        let (host, state) = (self.host.clone(), self.state.clone());
        let creation = self.creations.spawn(async move {
            let record = host.create(spec).await?;
            // The sandbox itself now counts towards the quota.
            drop(permit);
            // The flag is read and the id is added under one lock: `remove_all` either finds the
            // id, or this task sees its flag.
            let has_ended = {
                let mut state = state.lock();
                if !state.has_ended {
                    state.ids.push(record.id().to_owned());
                }
                state.has_ended
            };
            if has_ended {
                remove(&host, record.id()).await?;
            }
            Ok(record)
        });
        match creation.await {
            Ok(created) => created,
            Err(e) => Err(OperationError::Lost(e.to_string())),
        }
    }

    /// Removes one sandbox.
    pub(super) async fn remove(&self, id: &str) -> Result<(), OperationError> {
        remove(&self.host, id).await?;
        self.state.lock().ids.retain(|other| other != id);
        Ok(())
    }

    /// Removes all sandboxes at the end of the build, and waits for creations in flight, which
    /// remove their sandboxes. Returns the sandboxes that could not be removed, with the errors.
    pub(super) async fn remove_all(&self) -> Vec<(String, OperationError)> {
        let ids = {
            let mut state = self.state.lock();
            state.has_ended = true;
            std::mem::take(&mut state.ids)
        };
        let mut remaining = Vec::new();
        for id in ids {
            if let Err(e) = remove(&self.host, &id).await {
                // Continue: a failure must not leave the other sandboxes running.
                remaining.push((id, e));
            }
        }
        self.creations.close();
        let ended = tokio::time::timeout(CREATION_LIMIT, self.creations.wait()).await;
        // After a timeout, the creating task still removes its sandbox.
        if ended.is_err() {
            tracing::warn!("timed out waiting for the creation of a sandbox of a finished build");
        }
        remaining
    }
}

/// Removes a sandbox if it exists.
async fn remove(host: &Sandboxes, id: &str) -> Result<(), OperationError> {
    match host.remove(id).await {
        Err(e) if e.kind() != ErrorKind::Unknown => Err(e),
        _ => Ok(()),
    }
}
