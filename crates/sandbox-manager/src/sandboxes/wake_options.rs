//! Reasons for restoring a sandbox that exists, and settings that change with it.

use crate::sandbox_settings::SandboxSettings;
use jiffy_api_types::OnTimeout;
use std::time::Duration;

/// Time limit of a sandbox from the moment it is woken or reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AwakeTime {
    /// The time the sandbox was given last begins anew.
    #[default]
    Own,
    /// At least this long; a running sandbox that has more keeps it.
    AtLeast(Duration),
    /// No limit.
    Unlimited,
}

/// Settings that take effect in the same step as a sandbox's waking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WakeOptions {
    /// Time limit from now on.
    pub time: AwakeTime,
    /// Action at the end of that time, if it changes.
    pub on_timeout: Option<OnTimeout>,
}

impl WakeOptions {
    /// Changes the settings of a sandbox that is about to wake.
    pub(super) fn apply(self, settings: &mut SandboxSettings) {
        match self.time {
            AwakeTime::Own => {}
            AwakeTime::AtLeast(time) => settings.timeout_s = Some(time.as_secs()),
            AwakeTime::Unlimited => settings.timeout_s = None,
        }
        if let Some(action) = self.on_timeout {
            settings.on_timeout = action;
        }
    }
}

/// Reason for restoring a sandbox that exists.
#[derive(Debug, Clone, Copy)]
pub(super) enum ReviveReason {
    /// It is put back to a snapshot, after which it had gone on.
    Rollback,
    /// It slept in its snapshot.
    Wake(WakeOptions),
}
