//! [`ResumeHold`]: prevents the start of paused sandboxes on this host while it is drained. A
//! *drain* moves all sandboxes of a host to other hosts, for example before its maintenance.

use super::entry::SandboxEntry;
use super::{OperationError, Sandboxes};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Time after which a client should repeat a resume: the sandbox may be on another host then.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// While this value exists, the host starts no sandbox that is not running. Running ones continue.
#[derive(Debug)]
pub struct ResumeHold(Arc<AtomicUsize>);

impl Drop for ResumeHold {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Sandboxes {
    /// Rejects resumes until the returned value is dropped, also resumes that already wait for the
    /// pause of their sandbox.
    #[must_use]
    pub fn hold_resumes(&self) -> ResumeHold {
        let holds = self.0.resume_holds.clone();
        holds.fetch_add(1, Ordering::SeqCst);
        ResumeHold(holds)
    }

    /// Check before the start of a sandbox that is not running. The caller must hold `op_lock`. A
    /// resume that waits for a running pause is thus checked only after the pause, and is rejected
    /// if a hold began meanwhile.
    pub(super) fn expect_no_hold(&self, entry: &SandboxEntry) -> Result<(), OperationError> {
        if self.0.resume_holds.load(Ordering::SeqCst) == 0 {
            return Ok(());
        }
        let has_volumes = entry.with_record(|record| !record.settings.volumes.is_empty());
        let next = if has_volumes {
            "starts here only after the drain, because its volumes are on this host"
        } else {
            "moves to another host"
        };
        Err(OperationError::Busy {
            what: format!(
                "this host is being drained and does not start sandbox {}, which {next}",
                entry.id()
            ),
            retry_after: RETRY_AFTER,
        })
    }
}
