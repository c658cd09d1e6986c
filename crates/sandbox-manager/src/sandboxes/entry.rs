//! [`SandboxEntry`]: a sandbox in memory, with its record, guest, operation lock and history.
//!
//! The *head* of a sandbox, to which some fields refer, is a record in the store. It decides which
//! host of a fleet may run the sandbox (`shared.rs`).

mod agent;
mod meter;

use super::connection_history::ConnectionHistory;
use super::entry_indexes::{EntryIndexes, running_deadline};
use super::use_clock::UseClock;
use crate::admission::Reservation;
use crate::operation_error::OperationError;
use crate::operation_times::{OperationTimes, SandboxTimes};
use crate::sandbox::{Sandbox, SandboxOperation};
use crate::usage::History;
use jiffy_api_types::SandboxState;
use jiffy_engine_api::{ConnectionLog, Guest, SandboxSize, now_ms};
use parking_lot::{Mutex, MutexGuard};
use smol_str::SmolStr;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::sync::watch;

/// Maximum number of bytes that are retained of the console of a guest that exited by itself.
const MAX_EXIT_CONSOLE_BYTES: usize = 16 << 10;

/// Sandboxes by id.
pub(super) type Entries = BTreeMap<SmolStr, Arc<SandboxEntry>>;

/// Sandbox in memory: its record, its guest if it is running, and its operation lock.
///
/// The mutexes are held for single reads and writes only, and never while another mutex of the
/// entry is taken. The locks of the indexes may be taken while `record` is locked. Consistency
/// across several fields comes from `op_lock`.
pub(crate) struct SandboxEntry {
    id: SmolStr,
    record: Mutex<Box<Sandbox>>,
    indexes: Arc<EntryIndexes>,
    /// True if the store may have a head of the sandbox.
    may_be_stored: AtomicBool,
    /// True if the sandbox must be compared with its head before it is used.
    uncompared: AtomicBool,
    /// Revision of the head that this process wrote or read last. Zero if unknown.
    head_revision: AtomicU64,
    /// True if another host stored the sandbox, and its first resume here has not succeeded yet.
    /// This is unrelated to the adoption of guests of an earlier daemon.
    adopted: AtomicBool,
    /// True if the next resume may use a stored state that is older than the last state on the lost
    /// host of the sandbox.
    from_stored: AtomicBool,
    /// Created at the first use: most sandboxes of a large host are paused and do not need it.
    activity: OnceLock<Box<Activity>>,
}

/// Guest, history and locks of a sandbox.
struct Activity {
    /// Running guest. `None` if the sandbox has none.
    guest: Mutex<Option<Arc<dyn Guest>>>,
    /// Resources of the host, from before the guest starts until the record has a state without a
    /// guest.
    reservation: Mutex<Option<Reservation>>,
    /// Resource usage over time.
    history: Mutex<History>,
    /// Connections of earlier guests.
    connection_history: Mutex<ConnectionHistory>,
    /// Durations of the create and of the last operation.
    times: Mutex<SandboxTimes>,
    /// End of the console of a guest that exited by itself.
    exit_console: Mutex<Option<String>>,
    /// Uses of the sandbox, for its idle timeout.
    uses: Arc<UseClock>,
    /// True while the deadline is being handled.
    expiring: AtomicBool,
    /// True while the sandbox is being killed.
    ending: watch::Sender<bool>,
    /// Notified after each change of the record.
    changed: watch::Sender<()>,
    /// Held by the operation that is changing the sandbox.
    op_lock: tokio::sync::Mutex<()>,
}

impl Default for Activity {
    fn default() -> Self {
        Self {
            guest: Mutex::default(),
            reservation: Mutex::default(),
            history: Mutex::default(),
            connection_history: Mutex::default(),
            times: Mutex::default(),
            exit_console: Mutex::default(),
            uses: Arc::default(),
            expiring: AtomicBool::new(false),
            ending: watch::Sender::default(),
            changed: watch::Sender::default(),
            op_lock: tokio::sync::Mutex::default(),
        }
    }
}

impl Drop for SandboxEntry {
    fn drop(&mut self) {
        // The removal also releases the name of a sandbox whose create failed.
        self.indexes.remove(&self.id, self.record.get_mut());
    }
}

impl SandboxEntry {
    /// Creates an entry and adds it to the indexes. The caller must have claimed the name, if there
    /// is one. The sandbox counts as not stored until [`Self::set_may_be_stored`] is called.
    pub fn new(record: Sandbox, indexes: Arc<EntryIndexes>) -> Self {
        let id = SmolStr::new(&*record.id);
        indexes.add(&id, &record);
        let entry = Self::indexed(id, Box::new(record), indexes);
        entry.may_be_stored.store(false, Ordering::Relaxed);
        entry
    }

    /// Creates the entry of a record that was read from the journal. The indexes must already
    /// contain the record. An earlier daemon may have stored the sandbox.
    pub fn indexed(id: SmolStr, record: Box<Sandbox>, indexes: Arc<EntryIndexes>) -> Self {
        Self {
            id,
            record: Mutex::new(record),
            indexes,
            may_be_stored: AtomicBool::new(true),
            uncompared: AtomicBool::new(false),
            head_revision: AtomicU64::new(0),
            adopted: AtomicBool::new(false),
            from_stored: AtomicBool::new(false),
            activity: OnceLock::new(),
        }
    }

    fn activity(&self) -> &Activity {
        self.activity.get_or_init(Box::default)
    }

    /// Lock of the operation that changes the sandbox.
    pub fn op_lock(&self) -> &tokio::sync::Mutex<()> {
        &self.activity().op_lock
    }

    /// Returns whether the store may have a head of the sandbox.
    pub fn may_be_stored(&self) -> bool {
        self.may_be_stored.load(Ordering::SeqCst)
    }

    pub fn set_may_be_stored(&self) {
        self.may_be_stored.store(true, Ordering::SeqCst);
    }

    /// Returns whether the sandbox must be compared with its head before it is used.
    pub fn is_uncompared(&self) -> bool {
        self.uncompared.load(Ordering::SeqCst)
    }

    pub fn set_uncompared(&self, uncompared: bool) {
        self.uncompared.store(uncompared, Ordering::SeqCst);
    }

    /// Returns the revision of the head that this process wrote or read last.
    pub fn head_revision(&self) -> Option<u64> {
        Some(self.head_revision.load(Ordering::SeqCst)).filter(|&revision| revision > 0)
    }

    pub fn set_head_revision(&self, revision: u64) {
        self.head_revision.store(revision, Ordering::SeqCst);
    }

    /// Returns whether another host stored the sandbox and this host has not resumed it yet.
    pub fn is_adopted(&self) -> bool {
        self.adopted.load(Ordering::SeqCst)
    }

    pub fn set_adopted(&self, adopted: bool) {
        self.adopted.store(adopted, Ordering::SeqCst);
    }

    /// Returns whether the next resume may use an older stored state.
    pub fn is_from_stored(&self) -> bool {
        self.from_stored.load(Ordering::SeqCst)
    }

    pub fn set_from_stored(&self, from_stored: bool) {
        self.from_stored.store(from_stored, Ordering::SeqCst);
    }

    /// Resource usage over time.
    pub fn history(&self) -> MutexGuard<'_, History> {
        self.activity().history.lock()
    }

    /// Connections of earlier guests.
    pub fn connection_history(&self) -> MutexGuard<'_, ConnectionHistory> {
        self.activity().connection_history.lock()
    }

    /// Uses of the sandbox.
    pub fn uses(&self) -> &Arc<UseClock> {
        &self.activity().uses
    }

    /// Returns the idle timeout in milliseconds. `None` if the sandbox has none.
    pub fn idle_timeout_ms(&self) -> Option<u64> {
        let seconds = self.with_record(|record| record.settings.idle_timeout_s)?;
        Some(seconds.saturating_mul(1000))
    }

    pub fn record(&self) -> Sandbox {
        (**self.record.lock()).clone()
    }

    /// Calls `read` with the record, without copying it.
    pub fn with_record<T>(&self, read: impl FnOnce(&Sandbox) -> T) -> T {
        read(&self.record.lock())
    }

    pub fn id(&self) -> String {
        self.id.to_string()
    }

    /// Returns the id in the form that the indexes share.
    pub fn shared_id(&self) -> &SmolStr {
        &self.id
    }

    pub fn size(&self) -> SandboxSize {
        self.record.lock().size
    }

    /// Returns the deadline if the sandbox is running and its deadline is not being handled.
    pub fn deadline(&self) -> Option<u64> {
        // An entry without activity was not used by any operation, so no deadline is being handled.
        let activity = self.activity.get();
        // Acquire: pairs with the release in `end_expiring`, so that the result of the handling is
        // visible.
        let counts = !activity.is_some_and(|a| a.expiring.load(Ordering::Acquire));
        running_deadline(&self.record.lock()).filter(|_| counts)
    }

    /// Marks the deadline as being handled. Returns `true` to the one caller that must handle it.
    pub fn begin_expiring(&self) -> bool {
        !self.activity().expiring.swap(true, Ordering::AcqRel)
    }

    /// Makes the deadline count again. Called by the caller of [`Self::begin_expiring`].
    pub fn end_expiring(&self) {
        self.activity().expiring.store(false, Ordering::Release);
    }

    /// Returns whether the sandbox is running or paused and its agent's token matches.
    pub fn has_token(&self, fits: impl Fn(&str) -> bool) -> bool {
        let record = self.record.lock();
        matches!(record.state, SandboxState::Running | SandboxState::Paused)
            && record.agent_token.as_deref().is_some_and(fits)
    }

    /// Sets whether the sandbox is being killed.
    pub fn set_ending(&self, ending: bool) {
        self.activity().ending.send_replace(ending);
    }

    pub fn is_ending(&self) -> bool {
        let activity = self.activity.get();
        activity.is_some_and(|activity| *activity.ending.borrow())
    }

    /// Waits until no operation is in flight or the sandbox is being killed.
    pub async fn wait_decided(&self) {
        let mut ending = self.activity().ending.subscribe();
        tokio::select! {
            _op_guard = self.op_lock().lock() => {}
            _ = ending.wait_for(|ending| *ending) => {}
        }
    }

    /// Waits until the record satisfies `condition`, and returns it.
    pub async fn until(&self, condition: impl Fn(&Sandbox) -> bool) -> Sandbox {
        let mut changes = self.activity().changed.subscribe();
        loop {
            // The change is marked as seen before the record is read, so that no later one is
            // missed.
            changes.borrow_and_update();
            let record = self.record();
            // The sender lives as long as this entry.
            if condition(&record) || changes.changed().await.is_err() {
                return record;
            }
        }
    }

    /// Replaces the record. Releases the reservation if the new state has no guest.
    pub fn set_record(&self, record: Sandbox) {
        let has_guest = matches!(record.state, SandboxState::Creating | SandboxState::Running);
        if record.state == SandboxState::Killed {
            // The connections of the last guest are discarded too: many sandboxes are killed, and
            // each record is retained for an hour.
            self.connection_history().clear();
            self.activity().exit_console.lock().take();
        }
        // The indexes change while the record is locked, so that they always agree with it.
        let mut current = self.record.lock();
        self.indexes.change(&self.id, &current, &record);
        **current = record;
        drop(current);
        // The record is unlocked, so that woken tasks can read it at once.
        self.activity().changed.send_replace(());
        if !has_guest {
            self.set_reservation(None);
        }
    }

    /// Returns whether the sandbox has a reservation.
    pub fn has_reservation(&self) -> bool {
        let activity = self.activity.get();
        activity.is_some_and(|activity| activity.reservation.lock().is_some())
    }

    pub fn set_reservation(&self, reservation: Option<Reservation>) {
        *self.activity().reservation.lock() = reservation;
    }

    /// Marks the guest of the reservation as started. A guest taken over from an earlier daemon has
    /// no reservation yet and receives one from `reserve`.
    pub fn reserve_for_guest(&self, reserve: impl FnOnce(SandboxSize) -> Reservation) {
        let size = self.record.lock().size;
        self.activity()
            .reservation
            .lock()
            .get_or_insert_with(|| reserve(size))
            .mark_started();
    }

    /// Returns the record with `state` as its new state.
    pub fn record_in(&self, state: SandboxState) -> Sandbox {
        Sandbox {
            state,
            pause_cause: None,
            changed_ms: now_ms(),
            ..self.record()
        }
    }

    pub fn guest(&self) -> Option<Arc<dyn Guest>> {
        self.activity.get()?.guest.lock().clone()
    }

    /// Replaces the guest and returns the previous one.
    pub fn replace_guest(&self, guest: Option<Arc<dyn Guest>>) -> Option<Arc<dyn Guest>> {
        if guest.is_some() {
            // The previous guest still runs.
            self.meter();
        }
        // The guard is dropped at the end of this statement, before the history is locked.
        let before = std::mem::replace(&mut *self.activity().guest.lock(), guest);
        if let Some(log) = before.as_ref().and_then(|guest| guest.connections()) {
            // The connections of the previous guest remain visible after it has stopped.
            self.connection_history().add(log);
        }
        if before.is_some()
            && let Some(ledger) = self.indexes.usage.get()
        {
            // The guest may have stopped: its counters cannot be read.
            ledger.stop(&self.id);
        }
        before
    }

    /// Returns the durations of operations, as far as this daemon performed them.
    pub fn times(&self) -> SandboxTimes {
        let activity = self.activity.get();
        activity.map_or_else(SandboxTimes::default, |a| a.times.lock().clone())
    }

    /// Stores the durations of the create.
    pub fn set_create(&self, times: OperationTimes) {
        let times = Some(Arc::new(times));
        *self.activity().times.lock() = SandboxTimes {
            create: times.clone(),
            last: times,
        };
    }

    /// Stores the durations of the last operation.
    pub fn set_last_operation(&self, times: OperationTimes) {
        self.activity().times.lock().last = Some(Arc::new(times));
    }

    /// Retains the end of the console of a guest that exited by itself.
    pub fn retain_console(&self, console: &str) {
        // The end of a console is the interesting part. A character is not cut into parts.
        let mut begin = console.len().saturating_sub(MAX_EXIT_CONSOLE_BYTES);
        while !console.is_char_boundary(begin) {
            begin += 1;
        }
        *self.activity().exit_console.lock() = Some(console[begin..].to_owned());
    }

    /// Returns the console of the guest, or of the last guest if it exited by itself.
    pub fn console(&self) -> Option<String> {
        match self.guest() {
            Some(guest) => Some(guest.console_tail()),
            None => self.activity.get()?.exit_console.lock().clone(),
        }
    }

    /// Returns the connection record of the guest.
    pub fn connections(&self) -> Option<Arc<dyn ConnectionLog>> {
        self.guest()?.connections()
    }

    pub fn is_guest(&self, guest: &Arc<dyn Guest>) -> bool {
        self.guest().is_some_and(|g| Arc::ptr_eq(&g, guest))
    }

    /// Returns the record if the state allows `operation`.
    pub fn allow(
        &self,
        operation: SandboxOperation,
        verb: &'static str,
    ) -> Result<Sandbox, OperationError> {
        let record = self.record();
        if operation.is_allowed(&record.state) {
            return Ok(record);
        }
        Err(self.refuse(verb))
    }

    /// Returns the error of operation `verb`, which the state does not allow.
    pub fn refuse(&self, verb: &'static str) -> OperationError {
        let record = self.record();
        OperationError::State {
            operation: verb,
            id: record.id,
            state: record.state,
        }
    }

    /// Returns the guest if the state allows `operation` and there is a guest.
    pub fn running(
        &self,
        operation: SandboxOperation,
        verb: &'static str,
    ) -> Result<Arc<dyn Guest>, OperationError> {
        self.allow(operation, verb)?;
        self.guest().ok_or_else(|| self.refuse(verb))
    }
}
