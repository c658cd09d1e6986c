//! Removal of all resources of a revoked API key: sandboxes, builds, functions, secrets, volumes
//! and webhooks. `jiffy key revoke --end` and the API request it. The request is stored with the
//! key, so that a restarted daemon continues.

use crate::app::App;
use crate::error::ApiError;
use jiffy_sandbox_manager::OperationError;
use jiffy_template_builder::BuildRecord;
use std::collections::HashMap;
use std::time::Duration;

/// Interval at which the background task polls for revoked keys.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of passes over the builds of a key, one per [`POLL_INTERVAL`]: 10 s in total. A
/// later pass finds a build that was being started while the key was revoked. New requests of the
/// key are rejected, so a build cannot start long after the revocation.
const MAX_BUILD_PASSES: u32 = 20;
/// Time limit for a cancelled build and its sandboxes to terminate.
const BUILD_END_LIMIT: Duration = Duration::from_secs(30);

/// Number of terminated resources.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ended {
    /// Sandboxes, running or paused.
    pub sandboxes: usize,
    /// Builds of templates, waiting or running.
    pub builds: usize,
}

impl App {
    /// Kills all sandboxes of a key. Continues after an error. Returns the number of killed
    /// sandboxes, or the last error.
    pub(crate) async fn kill_sandboxes_of(&self, key: &str) -> Result<usize, ApiError> {
        let mut killed = 0;
        let mut failed = None;
        for id in self.sandboxes.index().of_owner(key) {
            match self.sandboxes.kill(&id).await {
                Ok(_) => killed += 1,
                // The sandbox of a build terminated together with its build.
                Err(OperationError::Unknown { .. }) => {}
                // Continue with the others: as few sandboxes as possible must remain.
                Err(e) => failed = Some(e),
            }
        }
        match failed {
            None => Ok(killed),
            Some(e) => Err(e.into()),
        }
    }

    /// Cancels the builds of a key. Returns their ids.
    pub(crate) fn cancel_builds_of(&self, key: &str) -> Result<Vec<String>, ApiError> {
        let Some(builder) = &self.builder else {
            return Ok(Vec::new());
        };
        let failed = |e: jiffy_template_builder::RecordError| ApiError::internal(e.to_string());
        let mut cancelled = Vec::new();
        let templates = builder.records().templates().map_err(failed)?;
        // Builds of a key with the scope `admin`, which acts for the host's owner, belong to
        // templates of the host. Therefore the templates of all owners are searched.
        for template in templates {
            let builds = builder.records().builds(&template.id).map_err(failed)?;
            // A finished build cannot be cancelled.
            let own = |b: &&BuildRecord| b.caller.as_deref() == Some(key) && !b.status.is_final();
            for build in builds.iter().filter(own) {
                builder.cancel(build)?;
                cancelled.push(build.id.clone());
            }
        }
        Ok(cancelled)
    }

    /// Terminates the builds and sandboxes of a key and removes its functions, secrets, volumes
    /// and webhooks.
    pub(crate) async fn remove_resources_of(&self, key: &str) -> Result<Ended, ApiError> {
        // Builds first: the sandboxes of a build terminate with the build.
        let builds = self.cancel_builds_of(key)?;
        let sandboxes = self.kill_sandboxes_of(key).await?;
        self.remove_functions_of(key).await;
        self.remove_secrets_of(key).await?;
        self.remove_volumes_of(key).await?;
        self.remove_volume_snapshots_of(key).await?;
        self.remove_webhooks_of(key).await?;
        // Wait last: the builds terminate concurrently.
        for build in &builds {
            self.await_build_end(build).await?;
        }
        Ok(Ended {
            sandboxes,
            builds: builds.len(),
        })
    }

    /// Removes the functions of a key.
    async fn remove_functions_of(&self, key: &str) {
        if let Some(functions) = &self.functions {
            functions.functions.remove_all(Some(key)).await;
        }
    }

    /// Waits until a cancelled build has terminated.
    pub(crate) async fn await_build_end(&self, build: &str) -> Result<(), ApiError> {
        let ended = tokio::time::timeout(BUILD_END_LIMIT, self.builder()?.ended(build)).await;
        ended.map_err(|_| {
            let limit = BUILD_END_LIMIT.as_secs();
            let message =
                format!("build {build} was cancelled, but is still running after {limit} s");
            ApiError::internal(message)
        })
    }
}

/// Background task that terminates the resources of keys whose revocation requested this. The task
/// also finds keys that another process revoked, or that were revoked before this daemon started.
/// Never returns.
pub async fn end_revoked(app: App) {
    let mut passes: HashMap<String, u32> = HashMap::new();
    loop {
        for key in app.keys.ended() {
            let pass = passes.entry(key.clone()).or_default();
            // Each pass reads all templates, which is expensive.
            if *pass < MAX_BUILD_PASSES {
                *pass += 1;
                if let Err(e) = app.cancel_builds_of(&key) {
                    tracing::error!(key = %key, error = %e.message, "cannot cancel the builds of a revoked key");
                }
            }
            app.remove_functions_of(&key).await;
            if let Err(e) = app.remove_secrets_of(&key).await {
                tracing::error!(key = %key, error = %e.message, "cannot remove the secrets of a revoked key");
            }
            if let Err(e) = app.remove_volumes_of(&key).await {
                tracing::error!(key = %key, error = %e.message, "cannot remove the volumes of a revoked key");
            }
            if let Err(e) = app.remove_volume_snapshots_of(&key).await {
                tracing::error!(key = %key, error = %e.message, "cannot remove the snapshots of volumes of a revoked key");
            }
            // Kill the sandboxes in every pass: an operation in flight may still create a sandbox
            // for the key.
            match app.kill_sandboxes_of(&key).await {
                Ok(0) => {}
                Ok(killed) => {
                    tracing::info!(key = %key, sandboxes = killed, "killed the sandboxes of a revoked key")
                }
                Err(e) => {
                    tracing::error!(key = %key, error = %e.message, "cannot kill the sandboxes of a revoked key");
                }
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
