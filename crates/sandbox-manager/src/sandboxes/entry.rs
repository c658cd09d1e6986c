//! One sandbox in memory.

use super::connection_history::ConnectionHistory;
use super::entry_indexes::{EntryIndexes, ends_at};
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
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::sync::watch;

/// Bytes of a console that are kept when its guest has ended by itself.
const MAX_EXIT_REASON_BYTES: usize = 16 << 10;

/// Sandboxes by id.
pub(super) type Entries = BTreeMap<SmolStr, Arc<SandboxEntry>>;

/// A sandbox: its record, its guest while it has one, and whose turn it is to change them.
pub(crate) struct SandboxEntry {
    id: SmolStr,
    record: Mutex<Box<Sandbox>>,
    indexes: Arc<EntryIndexes>,
    /// Made when something is done with it first: most of many sleep and are left alone.
    activity: OnceLock<Box<Activity>>,
}

/// Guest, history and locks of a sandbox.
struct Activity {
    guest: Mutex<Option<Arc<dyn Guest>>>,
    /// Resources that it takes of the host, from before its guest comes up until that is gone.
    reservation: Mutex<Option<Reservation>>,
    /// Resources that it used over time.
    history: Mutex<History>,
    /// Connections of its earlier guests.
    reached: Mutex<ConnectionHistory>,
    /// Durations of its create and of its last operation.
    times: Mutex<SandboxTimes>,
    /// Console of a guest that ended by itself, as far as it is kept.
    exit_console: Mutex<Option<String>>,
    /// True while its timeout is being acted upon.
    expiring: AtomicBool,
    /// True while it is being killed.
    ending: watch::Sender<bool>,
    /// Told whenever its record changes.
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
            reached: Mutex::default(),
            times: Mutex::default(),
            exit_console: Mutex::default(),
            expiring: AtomicBool::new(false),
            ending: watch::Sender::default(),
            changed: watch::Sender::default(),
            op_lock: tokio::sync::Mutex::default(),
        }
    }
}

impl Drop for SandboxEntry {
    fn drop(&mut self) {
        self.indexes.remove(&self.id, self.record.get_mut());
    }
}

impl SandboxEntry {
    /// A sandbox that has its name, if it has one.
    pub fn new(record: Sandbox, indexes: Arc<EntryIndexes>) -> Self {
        let id = SmolStr::new(&*record.id);
        indexes.add(&id, &record);
        Self::indexed(id, Box::new(record), indexes)
    }

    /// A sandbox that is in the indexes.
    pub fn indexed(id: SmolStr, record: Box<Sandbox>, indexes: Arc<EntryIndexes>) -> Self {
        Self {
            id,
            record: Mutex::new(record),
            indexes,
            activity: OnceLock::new(),
        }
    }

    fn activity(&self) -> &Activity {
        self.activity.get_or_init(Box::default)
    }

    /// Held by the operation that is changing the sandbox.
    pub fn op_lock(&self) -> &tokio::sync::Mutex<()> {
        &self.activity().op_lock
    }

    /// Resources that it used over time.
    pub fn history(&self) -> MutexGuard<'_, History> {
        self.activity().history.lock()
    }

    /// Connections of its earlier guests.
    pub fn reached(&self) -> MutexGuard<'_, ConnectionHistory> {
        self.activity().reached.lock()
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

    /// Its id, as indexes have it.
    pub fn shared_id(&self) -> &SmolStr {
        &self.id
    }

    pub fn size(&self) -> SandboxSize {
        self.record.lock().size
    }

    /// When its time is over, while it runs and nobody has noticed yet.
    pub fn deadline(&self) -> Option<u64> {
        let activity = self.activity.get();
        let counts = !activity.is_some_and(|a| a.expiring.load(Ordering::Acquire));
        ends_at(&self.record.lock()).filter(|_| counts)
    }

    /// Returns true to the one caller that is to act upon its deadline.
    pub fn begin_expiring(&self) -> bool {
        !self.activity().expiring.swap(true, Ordering::AcqRel)
    }

    pub fn end_expiring(&self) {
        self.activity().expiring.store(false, Ordering::Release);
    }

    /// True if it is alive, and its agent's token fits.
    pub fn has_token(&self, fits: impl Fn(&str) -> bool) -> bool {
        let record = self.record.lock();
        matches!(record.state, SandboxState::Running | SandboxState::Paused)
            && record.agent_token.as_deref().is_some_and(fits)
    }

    /// Says whether it is being killed from now on.
    pub fn set_ending(&self, ending: bool) {
        self.activity().ending.send_replace(ending);
    }

    pub fn is_ending(&self) -> bool {
        let activity = self.activity.get();
        activity.is_some_and(|activity| *activity.ending.borrow())
    }

    /// Waits until nothing is under way with it, or it is being killed.
    pub async fn decided(&self) {
        let mut ending = self.activity().ending.subscribe();
        tokio::select! {
            _op_guard = self.op_lock().lock() => {}
            _ = ending.wait_for(|ending| *ending) => {}
        }
    }

    /// Waits until the record is as `wanted`, and returns it.
    pub async fn until(&self, wanted: impl Fn(&Sandbox) -> bool) -> Sandbox {
        let mut changes = self.activity().changed.subscribe();
        loop {
            changes.borrow_and_update();
            let record = self.record();
            // The sender lives as long as this entry.
            if wanted(&record) || changes.changed().await.is_err() {
                return record;
            }
        }
    }

    /// Takes over `record`. In a state without a guest it needs no place.
    pub fn set_record(&self, record: Sandbox) {
        let alive = matches!(record.state, SandboxState::Creating | SandboxState::Running);
        if record.state == SandboxState::Killed {
            // Its guest's, too: many are killed, and each is remembered for an hour.
            self.reached().clear();
            self.activity().exit_console.lock().take();
        }
        let mut current = self.record.lock();
        self.indexes.change(&self.id, &current, &record);
        **current = record;
        drop(current);
        self.activity().changed.send_replace(());
        if !alive {
            self.set_reservation(None);
        }
    }

    /// True if it has a place.
    pub fn has_reservation(&self) -> bool {
        let activity = self.activity.get();
        activity.is_some_and(|activity| activity.reservation.lock().is_some())
    }

    pub fn set_reservation(&self, reservation: Option<Reservation>) {
        *self.activity().reservation.lock() = reservation;
    }

    /// Its guest is up; one that has no place, since it was there before we were, gets one from
    /// `count`.
    pub fn count_guest(&self, count: impl FnOnce(SandboxSize) -> Reservation) {
        let size = self.record.lock().size;
        self.activity()
            .reservation
            .lock()
            .get_or_insert_with(|| count(size))
            .set_up();
    }

    /// The record as it will be in `state`.
    pub fn record_in(&self, state: SandboxState) -> Sandbox {
        Sandbox {
            state,
            changed_ms: now_ms(),
            ..self.record()
        }
    }

    pub fn guest(&self) -> Option<Arc<dyn Guest>> {
        self.activity.get()?.guest.lock().clone()
    }

    /// Puts another guest, or none, in place and returns the one before.
    pub fn replace_guest(&self, guest: Option<Arc<dyn Guest>>) -> Option<Arc<dyn Guest>> {
        let before = std::mem::replace(&mut *self.activity().guest.lock(), guest);
        if let Some(log) = before.as_ref().and_then(|guest| guest.connections()) {
            self.reached().add(log);
        }
        before
    }

    /// Durations of the create and of the last operation, as far as this daemon performed them.
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

    /// Keeps the end of the console of a guest that ended by itself.
    pub fn retain_console(&self, console: &str) {
        let mut begin = console.len().saturating_sub(MAX_EXIT_REASON_BYTES);
        while !console.is_char_boundary(begin) {
            begin += 1;
        }
        *self.activity().exit_console.lock() = Some(console[begin..].to_owned());
    }

    /// Console of its guest, or of the one that ended by itself.
    pub fn console(&self) -> Option<String> {
        match self.guest() {
            Some(guest) => Some(guest.console_tail()),
            None => self.activity.get()?.exit_console.lock().clone(),
        }
    }

    /// Returns the record of its guest's connections.
    pub fn connections(&self) -> Option<Arc<dyn ConnectionLog>> {
        self.guest()?.connections()
    }

    pub fn is_guest(&self, guest: &Arc<dyn Guest>) -> bool {
        self.guest().is_some_and(|g| Arc::ptr_eq(&g, guest))
    }

    /// The record, if the sandbox may be asked to do `operation` now.
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

    pub fn refuse(&self, verb: &'static str) -> OperationError {
        let record = self.record();
        OperationError::State {
            operation: verb,
            id: record.id,
            state: record.state,
        }
    }

    /// The guest, if `operation` needs one and the sandbox is in a state that has one.
    pub fn running(
        &self,
        operation: SandboxOperation,
        verb: &'static str,
    ) -> Result<Arc<dyn Guest>, OperationError> {
        self.allow(operation, verb)?;
        self.guest().ok_or_else(|| self.refuse(verb))
    }
}
