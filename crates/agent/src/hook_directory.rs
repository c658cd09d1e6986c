//! Directory with the hooks of the guest. A *hook* is an executable in the guest that the agent
//! runs before the state of the guest is stored, or after the guest continues.
//!
//! The agent reports to the host whether the directory exists. The host requests hooks only from
//! guests with the directory: a snapshot of a guest without hooks must not wake that guest.

use jiffy_proto::agent::HOOKS;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use tokio::sync::watch;

/// Result of the checks for the directory. A later removal is not noticed.
#[derive(Debug)]
pub struct HookDirectory(watch::Sender<bool>);

impl Default for HookDirectory {
    fn default() -> Self {
        Self(watch::Sender::new(false))
    }
}

impl HookDirectory {
    /// Checks whether the directory exists. Called after each event by which a client may have
    /// created it: the exit of a process and a completed request.
    pub fn check(&self) {
        // A mounted file system may not answer, so none is entered.
        let resolve = ResolveFlags::NO_XDEV;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        if !self.exist() && openat2(CWD, HOOKS, flags, Mode::empty(), resolve).is_ok() {
            self.0.send_replace(true);
        }
    }

    /// Returns whether the directory existed at a check.
    pub fn exist(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until the directory exists.
    pub async fn appear(&self) {
        // The sender cannot be dropped while it is borrowed.
        let _ = self.0.subscribe().wait_for(|exists| *exists).await;
    }
}
