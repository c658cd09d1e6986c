//! Sandboxes of one build.

use jiffy_sandbox_manager::{
    CreateSpec, ErrorKind, OperationError, QuotaPermit, Sandbox, Sandboxes,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::task::TaskTracker;

/// Maximum time that the end of a build waits for creations in flight.
const CREATION_LIMIT: Duration = Duration::from_secs(60);

/// Sandboxes of one build, including those that are being created.
pub(super) struct BuildSandboxes {
    host: Sandboxes,
    state: Arc<Mutex<State>>,
    /// Tasks that create sandboxes. They outlive a cancelled build, since the host completes a
    /// creation that its caller abandoned.
    creations: TaskTracker,
}

#[derive(Default)]
struct State {
    ids: Vec<String>,
    /// The build has ended: a sandbox whose creation completes is removed.
    ended: bool,
}

impl BuildSandboxes {
    pub(super) fn new(host: &Sandboxes) -> Self {
        Self {
            host: host.clone(),
            state: Arc::default(),
            creations: TaskTracker::new(),
        }
    }

    /// Creates a sandbox. If the returned future is dropped, the creation continues, and its
    /// sandbox is removed at the end of the build. `room` is released when the creation has ended.
    pub(super) async fn create(
        &self,
        spec: CreateSpec,
        room: Arc<QuotaPermit>,
    ) -> Result<Sandbox, OperationError> {
        let (host, state) = (self.host.clone(), self.state.clone());
        let creation = self.creations.spawn(async move {
            let record = host.create(spec).await?;
            drop(room);
            let has_ended = {
                let mut state = state.lock();
                if !state.ended {
                    state.ids.push(record.id().to_owned());
                }
                state.ended
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
    /// remove theirs. Returns the sandboxes that remain, with the reasons.
    pub(super) async fn remove_all(&self) -> Vec<(String, OperationError)> {
        let ids = {
            let mut state = self.state.lock();
            state.ended = true;
            std::mem::take(&mut state.ids)
        };
        let mut remaining = Vec::new();
        for id in ids {
            if let Err(e) = remove(&self.host, &id).await {
                remaining.push((id, e));
            }
        }
        self.creations.close();
        let ended = tokio::time::timeout(CREATION_LIMIT, self.creations.wait()).await;
        if ended.is_err() {
            tracing::warn!("a sandbox of an ended build is removed once its creation completes");
        }
        remaining
    }
}

/// Removes a sandbox, unless there is none.
async fn remove(host: &Sandboxes, id: &str) -> Result<(), OperationError> {
    match host.remove(id).await {
        Err(e) if e.kind() != ErrorKind::Unknown => Err(e),
        _ => Ok(()),
    }
}
