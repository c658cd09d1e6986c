//! Adoption of gVisor sandboxes that an earlier daemon detached and that continued to run.
//!
//! The *helper* is the process `jiffy-gvisor` that starts and drives the sandboxes of a daemon.

use super::Sandbox;
use super::body::SandboxBody;
use super::spec::AdoptSpec;
use crate::error::GvisorError;
use crate::helper::{Helper, HelperRequest};
use crate::sentry_process::SentryProcess;
use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Length of a sandbox id, in characters.
const ID_LEN: usize = 20;

impl Sandbox {
    /// Adopts a sandbox that an earlier process detached. Removes the sandbox if the adoption
    /// fails.
    pub async fn adopt(helper: &Helper, spec: AdoptSpec) -> Result<Self, GvisorError> {
        let id = spec.boot.id.clone();
        let adopted = Self::adopt_running(helper, spec).await;
        if adopted.is_err() {
            helper.send_in_background(&id, HelperRequest::Destroy);
        }
        adopted
    }

    /// Connects to the running sandbox of `spec`.
    async fn adopt_running(helper: &Helper, spec: AdoptSpec) -> Result<Self, GvisorError> {
        let process = SentryProcess::watch(spec.mark.pid)?;
        // The mark is the process id with the start time. Another process may have received the id.
        if process.mark != spec.mark {
            return Err(GvisorError::Process(io::ErrorKind::NotFound.into()));
        }
        let body = SandboxBody {
            helper: helper.clone(),
            directory: helper.directory().join(&spec.boot.id),
            process: Arc::new(process),
            detached: AtomicBool::new(true),
            stopped: AtomicBool::new(false),
            removed: tokio::sync::Mutex::default(),
            spec: spec.boot,
        };
        // The helper of this process does not know the sandbox yet.
        body.request(&HelperRequest::Load).await?;
        Ok(Self {
            body,
            report: spec.report,
            _greeting: None,
            snapshot_lock: tokio::sync::Mutex::default(),
        })
    }

    /// Terminates all sandboxes in the helper's directory whose ids are not among `known`. Returns
    /// their number.
    pub async fn end_unadopted(helper: &Helper, known: &[String]) -> Result<usize, GvisorError> {
        let mut ended = 0;
        let directory = helper.directory();
        for entry in fs::read_dir(directory)
            .map_err(GvisorError::file(directory))?
            .flatten()
        {
            let name = entry.file_name();
            let Some(id) = name.to_str().filter(|id| is_id(id)) else {
                continue;
            };
            if known.iter().any(|k| k == id) {
                continue;
            }
            match helper.request(id, &HelperRequest::Destroy).await {
                Ok(_) => ended += 1,
                // The directory remains, so that the next daemon tries again.
                Err(e) => tracing::warn!(sandbox_id = id, error = %e, "cannot remove a sandbox"),
            }
        }
        Ok(ended)
    }
}

/// Returns whether `name` is the name of a sandbox directory.
fn is_id(name: &str) -> bool {
    name.len() == ID_LEN
        && name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
}
