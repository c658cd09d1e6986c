//! Task that handles timeouts: pauses or kills running sandboxes whose deadline has passed, and
//! removes the records of sandboxes that were killed long ago.
//!
//! The `op_lock` of a sandbox serialises the operations on it.

use super::entry::SandboxEntry;
use super::resume_options::ResumeTimeout;
use super::use_clock::clock_ms;
use super::{OperationError, Sandboxes, SandboxesInner, WeakSandboxes};
use crate::journal::JournalChange;
use crate::sandbox::Sandbox;
use jiffy_api_types::{OnTimeout, SandboxState};
use jiffy_engine_api::now_ms;
use smol_str::SmolStr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Timeouts of sandboxes.
#[derive(Clone, Copy)]
pub struct Timeouts<'a>(pub(super) &'a Arc<SandboxesInner>);

impl Sandboxes {
    /// Returns the operations on timeouts of sandboxes.
    pub fn timeouts(&self) -> Timeouts<'_> {
        Timeouts(&self.0)
    }
}

/// Retention time of the records of killed sandboxes.
const KILLED_RETENTION: Duration = Duration::from_secs(3600);
/// Maximum interval of the task that handles timeouts.
const MAX_INTERVAL: Duration = Duration::from_secs(60);
/// Delay after which a failed pause or kill at a timeout is retried.
const RETRY_DELAY: Duration = Duration::from_secs(30);

/// Returns the time `timeout` from now, in milliseconds since 1970.
pub(super) fn deadline_in(timeout: Duration) -> u64 {
    let ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
    now_ms().saturating_add(ms)
}

impl Sandboxes {
    /// Sets the deadline of a running sandbox according to `time`. The caller must hold its
    /// `op_lock`.
    pub(super) fn set_resume_timeout(
        &self,
        entry: &SandboxEntry,
        time: ResumeTimeout,
    ) -> Result<Sandbox, OperationError> {
        match time {
            ResumeTimeout::Unlimited => self.set_deadline(entry, None),
            ResumeTimeout::AtLeast(time) => self.extend(entry, time),
            ResumeTimeout::Own => match entry.record().settings.timeout_s {
                Some(own) => self.extend(entry, Duration::from_secs(own)),
                None => Ok(entry.record()),
            },
        }
    }

    /// Moves the deadline of a running sandbox, never to an earlier time. The caller must hold its
    /// `op_lock`.
    fn extend(&self, entry: &SandboxEntry, time: Duration) -> Result<Sandbox, OperationError> {
        let record = entry.record();
        // `None`: the sandbox runs without limit, and a deadline would shorten that time.
        match record.deadline_ms {
            Some(before) if before < deadline_in(time) => self.set_deadline(entry, Some(time)),
            _ => Ok(record),
        }
    }

    /// Sets the deadline of a sandbox to `timeout` from now, or removes it. The caller must hold
    /// its `op_lock`.
    fn set_deadline(
        &self,
        entry: &SandboxEntry,
        timeout: Option<Duration>,
    ) -> Result<Sandbox, OperationError> {
        self.set_timeouts(entry, Some(timeout), None)
    }

    /// Changes the deadline and the idle timeout with one write of the record. `None` retains
    /// either. The caller must hold the `op_lock` of the sandbox.
    fn set_timeouts(
        &self,
        entry: &SandboxEntry,
        timeout: Option<Option<Duration>>,
        idle_timeout_s: Option<Option<u64>>,
    ) -> Result<Sandbox, OperationError> {
        let mut record = entry.record();
        if let Some(timeout) = timeout {
            // A timeout of zero applies now only; a later resume uses the earlier timeout.
            if timeout != Some(Duration::ZERO) {
                record.settings.timeout_s = timeout.map(|t| t.as_secs());
            }
            record.deadline_ms = timeout.map(deadline_in);
        }
        if let Some(idle_timeout_s) = idle_timeout_s {
            let settings = &mut record.settings;
            settings.auto_resume |= settings.idle_timeout_s.is_none() && idle_timeout_s.is_some();
            settings.idle_timeout_s = idle_timeout_s;
        }
        self.commit(entry, record.clone(), &[])?;
        if idle_timeout_s.is_some() && record.state == SandboxState::Running {
            // Replaces the scheduled check, which may be later than the new timeout.
            self.start_idle_timeout(entry);
        }
        self.0.deadlines.notify();
        Ok(record)
    }

    /// Starts the task that handles timeouts while the sandboxes exist.
    pub(super) fn spawn_timeouts(&self) {
        // A weak reference, so that the task does not keep the sandboxes alive.
        tokio::spawn(handle_timeouts(
            self.downgrade(),
            self.0.deadlines.has_changed(),
        ));
    }

    /// Handles the deadlines that have passed, each in a task of its own.
    fn expire_due(&self) {
        for entry in self.0.deadlines.begin_due() {
            let this = self.clone();
            tokio::spawn(async move {
                this.expire(&entry).await;
                this.0.deadlines.finish(&entry);
            });
        }
    }

    /// Pauses or kills a sandbox whose deadline has passed. After a failure, sets a later deadline.
    async fn expire(&self, entry: &Arc<SandboxEntry>) {
        let _op_guard = entry.op_lock().lock().await;
        // An earlier operation may have moved the deadline.
        let record = entry.record();
        let is_over = record.deadline_ms.is_some_and(|d| d <= now_ms());
        if record.state != SandboxState::Running || !is_over {
            return;
        }
        let result = match record.settings.on_timeout {
            OnTimeout::Kill => self.kill_locked(entry).await,
            OnTimeout::Pause => {
                self.pause_locked(entry, record.settings.pause_content)
                    .await
            }
        };
        match result {
            Ok(now) => {
                tracing::info!(
                    sandbox = now.id,
                    state = now.state.name(),
                    "the timeout of a sandbox expired"
                );
            }
            Err(error) => {
                // The new deadline is in memory only: after a restart the old one is due at once.
                tracing::error!(sandbox = record.id, %error, "cannot handle a timeout");
                let mut later = entry.record();
                later.deadline_ms = Some(deadline_in(RETRY_DELAY));
                entry.set_record(later);
            }
        }
    }

    /// Removes the records of sandboxes that were killed long ago. Reads no other records.
    fn remove_killed(&self) {
        let limit =
            now_ms().saturating_sub(u64::try_from(KILLED_RETENTION.as_millis()).unwrap_or(0));
        let killed = self.0.indexes.killed.lock();
        // The index is ordered by time, so the scan ends at the first recent one.
        let old = killed.iter().take_while(|(at, _)| *at < limit);
        let old: Vec<SmolStr> = old.map(|(_, id)| id.clone()).collect();
        drop(killed);
        let changes = old
            .iter()
            .map(|id| JournalChange::NoSandbox(id.to_string()));
        let changes: Vec<_> = changes.collect();
        // No operation changes the record of a killed sandbox, so the `op_lock` is not required.
        self.0.journal.commit_write_behind(&changes);
        for id in &old {
            // The entry is dropped after `entries` is unlocked: the drop locks the indexes.
            let removed = self.0.entries.lock().remove(id);
            drop(removed);
        }
    }
}

impl Timeouts<'_> {
    /// Sets the deadline of a sandbox to `timeout` from now, or removes it. The settings of the
    /// sandbox determine the action at the deadline.
    pub async fn set(self, id: &str, timeout: Option<Duration>) -> Result<Sandbox, OperationError> {
        self.change(id, Some(timeout), None).await
    }

    /// Changes the deadline as [`Self::set`] does, and the idle timeout in seconds, which starts
    /// now. The inner `None` removes a timeout, and the outer `None` retains it.
    ///
    /// A sandbox that had no idle timeout is resumed by requests from now on, as if it had been
    /// created with one.
    pub async fn change(
        self,
        id: &str,
        timeout: Option<Option<Duration>>,
        idle_timeout_s: Option<Option<u64>>,
    ) -> Result<Sandbox, OperationError> {
        let this = Sandboxes(self.0.clone());
        let entry = self.0.entry(id)?;
        this.clone()
            .perform("set_timeout", &entry.id(), async move {
                let _op_guard = entry.op_lock().lock().await;
                if matches!(entry.record().state, SandboxState::Killed) {
                    return Err(entry.refuse("set the timeout of"));
                }
                let record = this.set_timeouts(&entry, timeout, idle_timeout_s)?;
                if timeout.is_some() {
                    this.report_deadline(&record);
                }
                Ok(record)
            })
            .await
    }

    /// Moves the deadline of a sandbox to at least `timeout` from now. A later or missing deadline
    /// does not change.
    pub async fn extend(self, id: &str, timeout: Duration) -> Result<Sandbox, OperationError> {
        let this = Sandboxes(self.0.clone());
        let entry = self.0.entry(id)?;
        this.clone()
            .perform("extend_timeout", &entry.id(), async move {
                let _op_guard = entry.op_lock().lock().await;
                let before = entry.record();
                let extended = match before.state {
                    SandboxState::Killed => Err(entry.refuse("extend the timeout of")),
                    // Only the deadline of a running sandbox has an effect. For a paused sandbox,
                    // compare with the timeout of its next resume.
                    SandboxState::Running => this.extend(&entry, timeout),
                    _ => match entry.record().settings.timeout_s {
                        Some(own) if own < timeout.as_secs() => {
                            this.set_deadline(&entry, Some(timeout))
                        }
                        _ => Ok(entry.record()),
                    },
                }?;
                if extended.deadline_ms != before.deadline_ms {
                    this.report_deadline(&extended);
                }
                Ok(extended)
            })
            .await
    }

    /// Sets the deadline of a running sandbox according to `time`. Returns `None` if the sandbox is
    /// not running.
    pub async fn renew(
        self,
        id: &str,
        time: ResumeTimeout,
    ) -> Result<Option<Sandbox>, OperationError> {
        let this = Sandboxes(self.0.clone());
        let entry = self.0.entry(id)?;
        this.clone()
            // Metrics and traces contain this name, so it must not change.
            .perform("keep_awake", &entry.id(), async move {
                let _op_guard = entry.op_lock().lock().await;
                match entry.record().state {
                    SandboxState::Running => this.set_resume_timeout(&entry, time).map(Some),
                    _ => Ok(None),
                }
            })
            .await
    }
}

/// Handles timeouts, and removes old records, until the sandboxes are dropped.
async fn handle_timeouts(sandboxes: WeakSandboxes, has_changed: Arc<Notify>) {
    let mut removed_killed: Option<Instant> = None;
    loop {
        let interval = {
            let Some(this) = sandboxes.upgrade() else {
                return;
            };
            this.expire_due();
            this.check_idle_due();
            // An empty commit writes changes that could not be written earlier.
            this.0.journal.commit_write_behind(&[]);
            if removed_killed.is_none_or(|at| at.elapsed() >= MAX_INTERVAL) {
                this.remove_killed();
                removed_killed = Some(Instant::now());
            }
            let deadline = this.0.deadlines.next();
            let deadline = deadline.map(|at| at.saturating_sub(now_ms()));
            let check = this.0.indexes.idle_checks.next();
            let check = check.map(|at| at.saturating_sub(clock_ms()));
            // A deadline may have passed since `expire_due`. It is then handled in 1 ms.
            deadline
                .into_iter()
                .chain(check)
                .min()
                .map_or(MAX_INTERVAL, |ms| {
                    Duration::from_millis(ms).clamp(Duration::from_millis(1), MAX_INTERVAL)
                })
        };
        // A notification and the end of the interval have the same effect.
        let _ = tokio::time::timeout(interval, has_changed.notified()).await;
    }
}
