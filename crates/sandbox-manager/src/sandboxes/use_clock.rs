//! [`UseClock`]: records uses of a sandbox: the time of the last use, and the number of uses in
//! progress. The idle timeout reads it.

use super::Sandboxes;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Returns the time since the first call in milliseconds, at least 1. Unlike the system time, this
/// time is not adjusted, so an adjustment neither delays nor causes a pause.
pub(super) fn clock_ms() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let since = START.get_or_init(Instant::now).elapsed();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// Uses of a sandbox. A use costs one atomic write and no timer.
#[derive(Debug, Default)]
pub(crate) struct UseClock {
    /// Time of the last use ([`clock_ms`]). 0 before the first use.
    last_ms: AtomicU64,
    /// Number of uses in progress.
    in_progress: AtomicUsize,
}

impl UseClock {
    /// Records a use now.
    pub fn record(&self) {
        self.record_at(clock_ms());
    }

    /// Records a use at `at_ms`. A later use takes precedence.
    pub fn record_at(&self, at_ms: u64) {
        self.last_ms.fetch_max(at_ms, Ordering::Relaxed);
    }

    /// Returns the time of the last use ([`clock_ms`]).
    pub fn last_ms(&self) -> u64 {
        self.last_ms.load(Ordering::Relaxed)
    }

    /// Returns whether a use is in progress.
    pub fn is_in_progress(&self) -> bool {
        // This load pairs with the release in `UseInProgress::drop`: the use that ended is visible
        // as the last use.
        self.in_progress.load(Ordering::Acquire) > 0
    }
}

/// Records uses of one sandbox. Does not keep the sandbox alive.
#[derive(Debug, Clone, Default)]
pub struct SandboxUse(Arc<UseClock>);

/// Use in progress, from its creation until it is dropped.
#[derive(Debug)]
pub struct UseInProgress(Arc<UseClock>);

impl SandboxUse {
    /// Records a use now.
    pub fn record(&self) {
        self.0.record();
    }

    /// Starts a use.
    #[must_use]
    pub fn begin(&self) -> UseInProgress {
        self.0.in_progress.fetch_add(1, Ordering::AcqRel);
        self.0.record();
        UseInProgress(self.0.clone())
    }

    /// Returns whether a use was recorded since the last call.
    #[cfg(test)]
    pub(crate) fn take_use(&self) -> bool {
        self.0.last_ms.swap(0, Ordering::Relaxed) > 0
    }
}

impl Drop for UseInProgress {
    fn drop(&mut self) {
        self.0.record();
        self.0.in_progress.fetch_sub(1, Ordering::Release);
    }
}

impl Sandboxes {
    /// Returns the recorder of uses of the sandbox with this complete id. `None` if the sandbox
    /// does not exist. Uses are recorded also without an idle timeout, because the timeout may be
    /// set while a stream is open.
    pub fn uses_of(&self, id: &str) -> Option<SandboxUse> {
        let entry = self.0.entries.lock().get(id).cloned()?;
        Some(SandboxUse(entry.uses().clone()))
    }
}
