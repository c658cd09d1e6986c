//! [`UsageLedger`]: usage of each owner on each day.
//!
//! Running sandboxes are measured when they start and stop, and periodically in between. All
//! durations are from a clock without steps. The amounts are written to `<home>/usage.db`
//! periodically, together with the measurements: a later ledger continues from them, and counts
//! nothing twice. No operation waits for a write.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

mod amounts;
mod database;
mod day_clock;
mod meter;

#[cfg(test)]
mod tests;

pub use amounts::UsageAmounts;
pub use day_clock::{UsageClock, UsageMoment};

use amounts::DAY_MS;
use database::{EarlierLedger, UsageDatabase, UsageRows};
use day_clock::{DayClock, HostClock};
use jiffy_engine_api::GuestCounters;
use meter::Meter;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Owner under which usage is counted if too many rows are pending (`MAX_PENDING`).
pub const OTHER_OWNERS: &str = "other";
/// Maximum number of pending rows. A row is the usage of one owner on one day that is not written
/// yet.
const MAX_PENDING: usize = 50_000;

/// Day in UTC: the number of days since 1970.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Day(pub u32);

impl Day {
    fn at(time_ms: u64) -> Self {
        Self(u32::try_from(time_ms / DAY_MS).unwrap_or(u32::MAX))
    }
}

/// The ledger cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// SQLite failed.
    #[error("the usage in {} cannot be read or written: {source}; check that the disk is writable \
        and not full", path.display())]
    Database {
        /// Path of the database.
        path: PathBuf,
        /// Cause.
        source: rusqlite::Error,
    },
    /// The file cannot be created.
    #[error("cannot create {}: {source}; check that the disk is writable and not full", path.display())]
    File {
        /// Path of the database.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The file has an unknown schema version.
    #[error("{} has version {version}, which this program cannot read: use the version of jiffy \
        that wrote it, or move it away", path.display())]
    Version {
        /// Path of the database.
        path: PathBuf,
        /// Version in the file.
        version: i64,
    },
}

/// Selection of usage, ordered by day and owner.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsageQuery {
    /// Only this owner: a key, or empty for the host's owner. `None` selects all owners.
    pub owner: Option<String>,
    /// First day.
    pub from: Day,
    /// Last day.
    pub to: Day,
    /// Only rows after this day and owner.
    pub after: Option<(Day, String)>,
    /// Maximum number of rows.
    pub limit: usize,
}

/// Usage of one owner on one day.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DayUsage {
    /// Day.
    pub day: Day,
    /// Key. `None` for the host's owner.
    pub owner: Option<String>,
    /// Amounts.
    pub amounts: UsageAmounts,
}

/// Rows of a [`UsageQuery`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsagePage {
    /// Rows.
    pub rows: Vec<DayUsage>,
    /// True if further rows follow.
    pub more: bool,
}

/// Ledger of a host. Clones share the ledger.
#[derive(Clone)]
pub struct UsageLedger(Arc<Ledger>);

impl fmt::Debug for UsageLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UsageLedger").finish_non_exhaustive()
    }
}

/// State of a ledger, shared by its clones.
struct Ledger {
    clock: Arc<dyn UsageClock>,
    /// Id of the current boot of the host, which distinguishes its clocks.
    boot: String,
    /// Locked before `state`. `None` for a ledger in memory.
    database: Mutex<Option<UsageDatabase>>,
    state: Mutex<State>,
}

/// Measurements since the last write.
struct State {
    day_clock: DayClock,
    /// Running sandboxes by id.
    meters: HashMap<String, Meter>,
    /// Measurements of an earlier daemon.
    earlier: EarlierLedger,
    /// Usage that is not written yet.
    pending: UsageRows,
}

impl State {
    fn add(&mut self, owner: &str, elapsed_ms: u64, amounts: UsageAmounts, now: UsageMoment) {
        if amounts.is_zero() {
            return;
        }
        let end_ms = self.day_clock.time_ms(now);
        for (day, part) in amounts.by_day(end_ms.saturating_sub(elapsed_ms), end_ms) {
            let mut key = (day, owner.to_owned());
            if self.pending.len() >= MAX_PENDING && !self.pending.contains_key(&key) {
                OTHER_OWNERS.clone_into(&mut key.1);
            }
            self.pending.entry(key).or_default().add(&part);
        }
    }
}

impl UsageLedger {
    /// Opens or creates the ledger in the file `path`.
    pub fn open(path: &Path) -> Result<Self, UsageError> {
        Self::open_with(path, Arc::new(HostClock))
    }

    /// Like [`Self::open`], with another clock.
    pub fn open_with(path: &Path, clock: Arc<dyn UsageClock>) -> Result<Self, UsageError> {
        let boot = clock.boot();
        let (database, earlier) = UsageDatabase::open(path, &boot)?;
        Ok(Self::new(clock, boot, Some(database), earlier))
    }

    /// Creates a ledger that is not stored.
    #[must_use]
    pub fn in_memory() -> Self {
        let clock = Arc::new(HostClock);
        Self::new(clock, String::new(), None, EarlierLedger::default())
    }

    fn new(
        clock: Arc<dyn UsageClock>,
        boot: String,
        database: Option<UsageDatabase>,
        earlier: EarlierLedger,
    ) -> Self {
        let day_clock = DayClock::new(earlier.clock.unwrap_or_else(|| clock.now()));
        Self(Arc::new(Ledger {
            clock,
            boot,
            database: Mutex::new(database),
            state: Mutex::new(State {
                day_clock,
                meters: HashMap::new(),
                earlier,
                pending: UsageRows::new(),
            }),
        }))
    }

    /// Starts to count a sandbox with `memory_mib` MiB of memory. Measures the sandbox if it is
    /// counted already. Without a reading, the first measurement is the basis of later ones.
    pub fn start(
        &self,
        sandbox: &str,
        owner: Option<&str>,
        memory_mib: u32,
        reading: Option<GuestCounters>,
    ) {
        let now = self.0.clock.now();
        let mut state = self.0.state.lock();
        if state.meters.contains_key(sandbox) {
            drop(state);
            return self.sample(sandbox, reading);
        }
        let meter = Meter {
            owner: owner.unwrap_or_default().to_owned(),
            memory_mib,
            up_ms: now.up_ms,
            cpu_us: reading.map(|reading| reading.cpu_us),
            sent_bytes: reading.and_then(|reading| reading.sent_bytes),
        };
        state.meters.insert(sandbox.to_owned(), meter);
    }

    /// Continues to count a sandbox that ran while no daemon was running. If its guest was started
    /// after the last write, the sandbox counts from `started_ms`, in milliseconds since 1970.
    pub fn adopt(&self, sandbox: &str, owner: Option<&str>, memory_mib: u32, started_ms: u64) {
        let now = self.0.clock.now();
        let mut state = self.0.state.lock();
        let written = state.earlier.meters.remove(sandbox);
        let clock = state.earlier.clock.map(DayClock::new);
        let started = clock.and_then(|clock| clock.up_ms_at(started_ms));
        let meter = match (written, started) {
            (Some(mut meter), Some(up_ms)) => {
                // This guest was started after the last write, so the written values may belong to
                // an earlier guest. Count time only from the start of this guest. The next
                // measurement counts only the part of a counter above its written value: counting
                // less is better than counting twice.
                meter.up_ms = up_ms.min(now.up_ms);
                meter
            }
            (Some(meter), None) => meter,
            (None, Some(up_ms)) => Meter {
                owner: owner.unwrap_or_default().to_owned(),
                memory_mib,
                up_ms: up_ms.min(now.up_ms),
                // The process of the guest was started for this sandbox.
                cpu_us: Some(0),
                sent_bytes: Some(0),
            },
            // Without a known start, nothing is counted until [`Self::start`], which the caller
            // calls next.
            (None, None) => return,
        };
        state.meters.insert(sandbox.to_owned(), meter);
    }

    /// Forgets sandboxes of an earlier daemon that were not adopted: their guests were lost.
    pub fn forget_unadopted(&self) {
        self.0.state.lock().earlier.meters.clear();
    }

    /// Counts the usage of a sandbox until now.
    pub fn sample(&self, sandbox: &str, reading: Option<GuestCounters>) {
        let now = self.0.clock.now();
        let mut state = self.0.state.lock();
        let Some(meter) = state.meters.get_mut(sandbox) else {
            return;
        };
        let (amounts, elapsed_ms) = meter.measure(now.up_ms, reading);
        let owner = meter.owner.clone();
        state.add(&owner, elapsed_ms, amounts, now);
    }

    /// Sets the counters of a sandbox whose guest may have other counters than before.
    pub fn reset(&self, sandbox: &str, reading: GuestCounters) {
        if let Some(meter) = self.0.state.lock().meters.get_mut(sandbox) {
            meter.reset(reading);
        }
    }

    /// Counts the usage of a sandbox until now, and stops counting.
    pub fn stop(&self, sandbox: &str) {
        self.sample(sandbox, None);
        self.0.state.lock().meters.remove(sandbox);
    }

    /// Adds amounts that an owner has used during the last `period`.
    pub fn add(&self, owner: Option<&str>, period: Duration, amounts: UsageAmounts) {
        let now = self.0.clock.now();
        let elapsed_ms = u64::try_from(period.as_millis()).unwrap_or(u64::MAX);
        let mut state = self.0.state.lock();
        state.add(owner.unwrap_or_default(), elapsed_ms, amounts, now);
    }

    /// Returns the present day.
    #[must_use]
    pub fn today(&self) -> Day {
        let now = self.0.clock.now();
        Day::at(self.0.state.lock().day_clock.time_ms(now))
    }

    /// Writes the usage so far. Blocks.
    ///
    /// # Errors
    /// The usage remains in memory, and the next call writes it.
    pub fn write(&self) -> Result<(), UsageError> {
        let now = self.0.clock.now();
        let mut database = self.0.database.lock();
        let Some(database) = &mut *database else {
            return Ok(());
        };
        let (pending, meters, anchor) = {
            let mut state = self.0.state.lock();
            // Updates the anchor of the clock, which is written below ([`DayClock::anchor`]).
            state.day_clock.time_ms(now);
            let pending = std::mem::take(&mut state.pending);
            (pending, state.meters.clone(), state.day_clock.anchor())
        };
        let written = database.write(&pending, &meters, &self.0.boot, anchor);
        if written.is_err() {
            let mut state = self.0.state.lock();
            for (key, amounts) in &pending {
                let sum = state.pending.entry(key.clone()).or_default();
                sum.add(amounts);
            }
        }
        written
    }

    /// Reads a page. Blocks.
    pub fn page(&self, query: &UsageQuery) -> Result<UsagePage, UsageError> {
        // A write in progress must not move usage from memory to the file meanwhile.
        let database = self.0.database.lock();
        let mut rows = match &*database {
            Some(database) => database.rows(query)?,
            None => UsageRows::new(),
        };
        {
            let state = self.0.state.lock();
            let selected = state.pending.iter().filter(|((day, owner), _)| {
                (query.from..=query.to).contains(day)
                    && query.owner.as_ref().is_none_or(|only| only == owner)
            });
            for (key, amounts) in selected.filter(|(key, _)| Some(*key) > query.after.as_ref()) {
                rows.entry(key.clone()).or_default().add(amounts);
            }
        }
        drop(database);
        let more = rows.len() > query.limit;
        let rows = rows.into_iter().take(query.limit);
        let rows = rows.map(|((day, owner), amounts)| DayUsage {
            day,
            owner: Some(owner).filter(|owner| !owner.is_empty()),
            amounts,
        });
        Ok(UsagePage {
            rows: rows.collect(),
            more,
        })
    }
}
