//! [`SandboxObserver`]: receives each change of a sandbox. A member of a fleet reports the changes
//! to the other hosts, so that they find the sandbox (`crates/api/src/fleet/rows.rs`).
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox. A host *claims* the head before it resumes the sandbox.

use super::Sandboxes;
use crate::sandbox::Sandbox;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// Receiver of changes. It is called while the sandbox is locked, and must not block or call
/// [`Sandboxes`].
pub trait SandboxObserver: Send + Sync {
    /// A sandbox was added (no `before`), changed, or removed (no `now`).
    fn changed(&self, before: Option<&Sandbox>, now: Option<&Sandbox>);

    /// The head of a sandbox has this revision. If the sandbox was paused and its snapshot is in
    /// the store, `stored` is the id of the snapshot. `None` if this host claimed the sandbox.
    fn head_changed(&self, sandbox: &Sandbox, revision: u64, stored: Option<&str>);
}

/// Observer, if one was set.
#[derive(Default)]
pub(crate) struct ObserverSlot(OnceLock<Arc<dyn SandboxObserver>>);

impl fmt::Debug for ObserverSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ObserverSlot")
            .field(&self.0.get().is_some())
            .finish()
    }
}

impl ObserverSlot {
    pub fn changed(&self, before: Option<&Sandbox>, now: Option<&Sandbox>) {
        if let Some(observer) = self.0.get() {
            observer.changed(before, now);
        }
    }

    pub fn head_changed(&self, sandbox: &Sandbox, revision: u64, stored: Option<&str>) {
        if let Some(observer) = self.0.get() {
            observer.head_changed(sandbox, revision, stored);
        }
    }
}

impl Sandboxes {
    /// Sets the observer of all sandboxes, and reports the existing ones. Only the first call has
    /// an effect.
    pub fn set_observer(&self, observer: Arc<dyn SandboxObserver>) {
        if self.0.indexes.observer.0.set(observer).is_err() {
            return;
        }
        let entries: Vec<_> = self.0.entries.lock().values().cloned().collect();
        for entry in entries {
            // The sandbox is locked, so that a concurrent change is reported before or after.
            entry.with_record(|record| self.0.indexes.observer.changed(None, Some(record)));
        }
    }
}
