//! Time limits: what happens to a sandbox when its time is over, and to the records of those that
//! ended long ago.

use super::entry::SandboxEntry;
use super::wake_options::AwakeTime;
use super::{OperationError, Sandboxes, SandboxesInner};
use crate::journal::JournalChange;
use crate::sandbox::Sandbox;
use jiffy_api_types::{OnTimeout, SandboxState};
use jiffy_engine_api::now_ms;
use smol_str::SmolStr;
use std::ops::Bound;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Timeouts of sandboxes.
#[derive(Clone, Copy)]
pub struct Timeouts<'a>(pub(super) &'a Arc<SandboxesInner>);

impl Sandboxes {
    /// Timeouts of sandboxes.
    pub fn timeouts(&self) -> Timeouts<'_> {
        Timeouts(&self.0)
    }
}

/// Records of killed sandboxes stay this long.
const REMEMBERED: Duration = Duration::from_secs(3600);
/// The longest the keeper sleeps.
const NAP: Duration = Duration::from_secs(60);
/// A pause at the end of its time that fails is tried again after this long.
const RETRY: Duration = Duration::from_secs(30);

/// `timeout` from now, in milliseconds since 1970.
pub(super) fn deadline_in(timeout: Duration) -> u64 {
    let ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
    now_ms().saturating_add(ms)
}

impl Sandboxes {
    /// Gives a running sandbox its time. Needs the turn.
    pub(super) fn give_time(
        &self,
        entry: &SandboxEntry,
        time: AwakeTime,
    ) -> Result<Sandbox, OperationError> {
        match time {
            AwakeTime::Unlimited => self.limit(entry, None),
            AwakeTime::AtLeast(time) => self.extend(entry, time),
            AwakeTime::Own => match entry.record().settings.timeout_s {
                Some(own) => self.extend(entry, Duration::from_secs(own)),
                None => Ok(entry.record()),
            },
        }
    }

    /// Moves the deadline of a running sandbox, never to an earlier time. Needs the turn.
    fn extend(&self, entry: &SandboxEntry, time: Duration) -> Result<Sandbox, OperationError> {
        let record = entry.record();
        match record.deadline_ms {
            Some(before) if before < deadline_in(time) => self.limit(entry, Some(time)),
            _ => Ok(record),
        }
    }

    /// Ends a sandbox's time `timeout` from now, or never. Needs the turn.
    fn limit(
        &self,
        entry: &SandboxEntry,
        timeout: Option<Duration>,
    ) -> Result<Sandbox, OperationError> {
        let mut record = entry.record();
        // No time at all ends it now; what it wakes to afterwards is the time it had before.
        if timeout != Some(Duration::ZERO) {
            record.settings.timeout_s = timeout.map(|t| t.as_secs());
        }
        record.deadline_ms = timeout.map(deadline_in);
        self.commit(entry, record.clone(), &[])?;
        self.0.deadlines.notify_one();
        Ok(record)
    }

    /// Keeps time for as long as the sandboxes are there.
    pub(super) fn keep_time(&self) {
        let (inner, changed) = (Arc::downgrade(&self.0), self.0.deadlines.clone());
        tokio::spawn(keep(inner, changed));
    }

    /// The first deadline that is not being acted upon.
    fn next_deadline(&self) -> Option<u64> {
        let mut from = Bound::Unbounded;
        loop {
            let deadlines = self.0.indexes.deadlines.lock();
            let next = deadlines.range((from, Bound::Unbounded)).next().cloned()?;
            drop(deadlines);
            if self.deadline_of(&next.1).is_some() {
                return Some(next.0);
            }
            from = Bound::Excluded(next);
        }
    }

    fn deadline_of(&self, id: &str) -> Option<u64> {
        let entry = self.0.entries.lock().get(id).cloned();
        entry?.deadline()
    }

    fn expire_due(&self) {
        let now = now_ms();
        let deadlines = self.0.indexes.deadlines.lock();
        let over = deadlines.iter().take_while(|(at, _)| *at <= now);
        let ids: Vec<SmolStr> = over.map(|(_, id)| id.clone()).collect();
        drop(deadlines);
        let entries = self.0.entries.lock();
        let due = ids.iter().filter_map(|id| entries.get(id).cloned());
        let due: Vec<_> = due
            .filter(|e| e.deadline().is_some_and(|d| d <= now))
            .collect();
        drop(entries);
        for entry in due {
            if entry.begin_expiring() {
                let this = self.clone();
                tokio::spawn(async move {
                    this.expire(&entry).await;
                    entry.end_expiring();
                    this.0.deadlines.notify_one();
                });
            }
        }
    }

    async fn expire(&self, entry: &Arc<SandboxEntry>) {
        let _op_guard = entry.op_lock().lock().await;
        // An operation that was ahead may have given it more time.
        let record = entry.record();
        let over = record.deadline_ms.is_some_and(|d| d <= now_ms());
        if record.state != SandboxState::Running || !over {
            return;
        }
        let done = match record.settings.on_timeout {
            OnTimeout::Kill => self.kill_held(entry).await,
            OnTimeout::Pause => self.pause_held(entry).await,
        };
        match done {
            Ok(now) => tracing::info!(sandbox = now.id, "its time is over: {}", now.state.name()),
            Err(e) => {
                tracing::error!(sandbox = record.id, "its time is over, but: {e}");
                let mut later = entry.record();
                later.deadline_ms = Some(deadline_in(RETRY));
                entry.set_record(later);
            }
        }
    }

    /// Forgets sandboxes that were killed long ago. Looks at those only.
    fn forget_killed(&self) {
        let limit = now_ms().saturating_sub(u64::try_from(REMEMBERED.as_millis()).unwrap_or(0));
        let killed = self.0.indexes.killed.lock();
        let old = killed.iter().take_while(|(at, _)| *at < limit);
        let old: Vec<SmolStr> = old.map(|(_, id)| id.clone()).collect();
        drop(killed);
        let changes = old
            .iter()
            .map(|id| JournalChange::NoSandbox(id.to_string()));
        let changes: Vec<_> = changes.collect();
        // Nothing else brings back one that was killed.
        self.0.journal.commit_write_behind(&changes);
        for id in &old {
            // It goes without the lock, for the sake of its indexes.
            let forgotten = self.0.entries.lock().remove(id);
            drop(forgotten);
        }
    }
}

impl Timeouts<'_> {
    /// Ends a sandbox's time `timeout` from now, or never. What happens then is in its settings.
    pub async fn set(self, id: &str, timeout: Option<Duration>) -> Result<Sandbox, OperationError> {
        let this = Sandboxes(self.0.clone());
        let entry = self.0.entry(id)?;
        this.clone()
            .perform("set_timeout", &entry.id(), async move {
                let _op_guard = entry.op_lock().lock().await;
                if matches!(entry.record().state, SandboxState::Killed) {
                    return Err(entry.refuse("set the time limit of"));
                }
                this.limit(&entry, timeout)
            })
            .await
    }

    /// Gives a sandbox at least `timeout` from now; one that has more, or no limit, keeps it.
    pub async fn extend(self, id: &str, timeout: Duration) -> Result<Sandbox, OperationError> {
        let this = Sandboxes(self.0.clone());
        let entry = self.0.entry(id)?;
        this.clone()
            .perform("extend_timeout", &entry.id(), async move {
                let _op_guard = entry.op_lock().lock().await;
                match entry.record().state {
                    SandboxState::Killed => Err(entry.refuse("extend the time of")),
                    // A deadline counts only while it runs: asleep, the time it wakes to is what
                    // there is.
                    SandboxState::Running => this.extend(&entry, timeout),
                    _ => match entry.record().settings.timeout_s {
                        Some(own) if own < timeout.as_secs() => this.limit(&entry, Some(timeout)),
                        _ => Ok(entry.record()),
                    },
                }
            })
            .await
    }
}

async fn keep(inner: Weak<SandboxesInner>, changed: Arc<Notify>) {
    let mut forgotten: Option<Instant> = None;
    loop {
        let nap = {
            let Some(inner) = inner.upgrade() else {
                return;
            };
            let this = Sandboxes(inner);
            this.expire_due();
            // Changes that are owed.
            this.0.journal.commit_write_behind(&[]);
            if forgotten.is_none_or(|at| at.elapsed() >= NAP) {
                this.forget_killed();
                forgotten = Some(Instant::now());
            }
            this.next_deadline().map_or(NAP, |at| {
                Duration::from_millis(at.saturating_sub(now_ms()))
                    .clamp(Duration::from_millis(1), NAP)
            })
        };
        tokio::select! {
            () = tokio::time::sleep(nap) => {}
            () = changed.notified() => {}
        }
    }
}
