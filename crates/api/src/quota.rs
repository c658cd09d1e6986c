//! What the limits of a key leave room for.

use crate::error::ApiError;
use crate::keys::{Key, Keys, Limits};
use jiffy_build::{Admitted, Door};
use jiffy_engine::{Engine, SandboxSize};
use jiffy_host::{Sandboxes, State};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// A minute, for creates per minute.
const WINDOW: Duration = Duration::from_secs(60);
/// How long a request at the limit waits to see what becomes of those before it.
const PATIENCE: Duration = Duration::from_secs(10);

/// A number of sandboxes and what they have together.
#[derive(Debug, Clone, Copy, Default)]
struct Amount {
    sandboxes: u64,
    vcpus: u64,
    memory_mib: u64,
}

impl Amount {
    fn of(size: SandboxSize, count: usize) -> Self {
        let count = count as u64;
        Self {
            sandboxes: count,
            vcpus: count * u64::from(size.vcpus),
            memory_mib: count * u64::from(size.memory_mib),
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            sandboxes: self.sandboxes + other.sandboxes,
            vcpus: self.vcpus + other.vcpus,
            memory_mib: self.memory_mib + other.memory_mib,
        }
    }

    /// What it has too much of.
    fn beyond(self, limits: &Limits) -> Option<ApiError> {
        let over = |used: u64, limit: Option<u32>| limit.map(u64::from).filter(|l| used > *l);
        let refuse = |code, what: &str, limit: u64| {
            let message = format!(
                "this key may have {limit} {what} at once: kill or pause a sandbox, or raise the limit"
            );
            // Nothing changes by waiting a moment.
            Some(ApiError::too_many(code, message).permanent())
        };
        if let Some(limit) = over(self.sandboxes, limits.max_sandboxes) {
            return refuse("max_sandboxes", "running sandboxes", limit);
        }
        if let Some(limit) = over(self.vcpus, limits.max_vcpus) {
            return refuse("max_vcpus", "vCPUs", limit);
        }
        if let Some(limit) = over(self.memory_mib, limits.max_memory_mib) {
            return refuse("max_memory", "MiB of memory", limit);
        }
        None
    }
}

#[derive(Debug, Default)]
struct Ledger {
    /// What requests under way will add, by key.
    promised: HashMap<String, Amount>,
    /// When sandboxes were made in the last minute, by key.
    made: HashMap<String, VecDeque<Instant>>,
}

/// What is promised to requests under way.
#[derive(Debug, Default)]
pub(crate) struct Quota {
    ledger: Mutex<Ledger>,
    changed: Notify,
}

/// Room for sandboxes that are about to run. Dropped when they do, or will not.
#[derive(Debug)]
pub(crate) struct Room {
    quota: Arc<Quota>,
    key: String,
    amount: Amount,
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut ledger = self.quota.lock();
        if let Some(promised) = ledger.promised.get_mut(&self.key) {
            promised.sandboxes -= self.amount.sandboxes;
            promised.vcpus -= self.amount.vcpus;
            promised.memory_mib -= self.amount.memory_mib;
            if promised.sandboxes == 0 {
                ledger.promised.remove(&self.key);
            }
        }
        drop(ledger);
        self.quota.changed.notify_waiters();
    }
}

impl Quota {
    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for `count` sandboxes of `size` for `key`; `new` ones also count for its creates per minute.
    pub async fn room<E: Engine>(
        self: &Arc<Self>,
        sandboxes: &Sandboxes<E>,
        key: &Key,
        size: SandboxSize,
        count: usize,
        new: bool,
    ) -> Result<Room, ApiError> {
        let wanted = Amount::of(size, count);
        let give_up = Instant::now() + PATIENCE;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From here on no change is missed.
            changed.as_mut().enable();
            match self.try_room(sandboxes, key, wanted, new.then_some(count)) {
                Ok(room) => return Ok(room),
                Err((refusal, false)) => return Err(refusal),
                // Those before us may fail, or be counted both as promised and as running for a moment.
                Err((refusal, true)) => {
                    let left = give_up.saturating_duration_since(Instant::now());
                    if tokio::time::timeout(left, changed).await.is_err() {
                        return Err(refusal);
                    }
                }
            }
        }
    }

    /// The same at once; a refusal says whether requests under way are its reason.
    fn try_room<E: Engine>(
        self: &Arc<Self>,
        sandboxes: &Sandboxes<E>,
        key: &Key,
        amount: Amount,
        new: Option<usize>,
    ) -> Result<Room, (ApiError, bool)> {
        let mut ledger = self.lock();
        let mut running = amount;
        for record in sandboxes.list() {
            let own = record.terms.owner.as_deref() == Some(key.id.as_str());
            if own && record.state == State::Running {
                running = running.plus(Amount::of(record.size, 1));
            }
        }
        if let Some(refusal) = running.beyond(&key.limits) {
            return Err((refusal, false));
        }
        let promised = ledger.promised.get(&key.id).copied().unwrap_or_default();
        if let Some(refusal) = running.plus(promised).beyond(&key.limits) {
            return Err((refusal, true));
        }
        if let Some(count) = new {
            ledger.note(key, count).map_err(|e| (e, false))?;
        }
        let now = promised.plus(amount);
        ledger.promised.insert(key.id.clone(), now);
        drop(ledger);
        Ok(Room {
            quota: self.clone(),
            key: key.id.clone(),
            amount,
        })
    }
}

/// The limits of keys, for the sandboxes that their builds take.
pub(crate) struct BuildRoom<E: Engine> {
    pub sandboxes: Sandboxes<E>,
    pub keys: Arc<Keys>,
    pub quota: Arc<Quota>,
}

impl<E: Engine> BuildRoom<E> {
    /// Room for one sandbox of `owner`; a `new` build also counts for its creates per minute.
    pub async fn room(
        &self,
        owner: &str,
        size: SandboxSize,
        new: bool,
    ) -> Result<Option<Room>, ApiError> {
        let key = self.keys.in_force(owner);
        // Whose key is no more has no limits; only the host's owner can still build for them.
        let Some(key) = key.map_err(|e| ApiError::internal(e.to_string()))? else {
            return Ok(None);
        };
        let room = self.quota.room(&self.sandboxes, &key, size, 1, new);
        room.await.map(Some)
    }
}

impl<E: Engine> Door for BuildRoom<E> {
    fn admit<'a>(&'a self, owner: &'a str, size: SandboxSize) -> Admitted<'a> {
        Box::pin(async move {
            let room = self.room(owner, size, false).await;
            let room = room.map_err(|e| e.message)?;
            Ok(Box::new(room) as jiffy_build::Room)
        })
    }
}

impl Ledger {
    /// Counts `count` creates, unless they are too many for this minute.
    fn note(&mut self, key: &Key, count: usize) -> Result<(), ApiError> {
        let Some(limit) = key.limits.creates_per_minute else {
            return Ok(());
        };
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let refuse = || {
            ApiError::too_many(
                "creates_per_minute",
                format!("this key may make {limit} sandboxes per minute"),
            )
        };
        if count > limit {
            return Err(refuse().permanent());
        }
        let now = Instant::now();
        let made = self.made.entry(key.id.clone()).or_default();
        while made
            .front()
            .is_some_and(|at| now.duration_since(*at) >= WINDOW)
        {
            made.pop_front();
        }
        let over = (made.len() + count).saturating_sub(limit);
        if over > 0 {
            // The wait is over when enough of the oldest have left the window.
            let oldest = made.get(over - 1).copied().unwrap_or(now);
            let wait = WINDOW.saturating_sub(now.duration_since(oldest));
            return Err(refuse().after(wait.as_secs() + 1));
        }
        made.extend(std::iter::repeat_n(now, count));
        Ok(())
    }
}
