//! Reasons for restoring the guest of an existing sandbox, and settings that a resume changes.

use crate::sandbox::Sandbox;
use crate::sandbox_settings::SandboxSettings;
use jiffy_api_types::{OnTimeout, SandboxState};
use std::time::Duration;

/// Timeout of a sandbox that is resumed or used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ResumeTimeout {
    /// The configured timeout, starting now.
    #[default]
    Own,
    /// At least this duration. A later deadline of a running sandbox does not change.
    AtLeast(Duration),
    /// No timeout.
    Unlimited,
}

/// Settings that take effect together with a resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResumeOptions {
    /// Timeout, starting now.
    pub time: ResumeTimeout,
    /// New action at the timeout. `None` if it does not change.
    pub on_timeout: Option<OnTimeout>,
    /// True to discard the memory of the pause: the sandbox boots from its disk.
    pub reboot: bool,
}

impl ResumeOptions {
    /// Changes the settings of a sandbox that is about to be resumed.
    pub(super) fn apply(self, settings: &mut SandboxSettings) {
        match self.time {
            ResumeTimeout::Own => {}
            ResumeTimeout::AtLeast(time) => settings.timeout_s = Some(time.as_secs()),
            ResumeTimeout::Unlimited => settings.timeout_s = None,
        }
        if let Some(action) = self.on_timeout {
            settings.on_timeout = action;
        }
    }
}

/// Reason for restoring an existing sandbox.
#[derive(Debug, Clone, Copy)]
pub(super) enum RestoreReason {
    /// The sandbox is rolled back to a snapshot. A guest may already have run from that state, so
    /// the restored guest receives a new clock and entropy.
    Rollback,
    /// The sandbox is resumed from the snapshot of its pause. A sandbox that broke because memory
    /// was missing is restarted from its latest snapshot.
    Resume(ResumeOptions),
}

/// Returns whether the guest resumes from a state from which a guest has already run: after a
/// rollback or the loss of a guest. It then receives a new clock and entropy.
pub(super) fn is_rewound(before: &Sandbox, restore_reason: Option<&RestoreReason>) -> bool {
    matches!(restore_reason, Some(RestoreReason::Rollback))
        || matches!(before.state, SandboxState::Broken { .. })
}
