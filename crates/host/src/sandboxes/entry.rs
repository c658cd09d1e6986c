//! One sandbox in memory.

use super::connection_history::ConnectionHistory;
use super::names::SandboxNames;
use super::snapshot_index::SnapshotUsers;
use crate::admission::Reservation;
use crate::operation_error::OperationError;
use crate::records::{SandboxOperation, SandboxRecord, SandboxState};
use crate::usage::History;
use jiffy_engine::{ConnectionLog, Guest, SandboxSize, now_ms};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::watch;

/// Bytes of a console that are kept when its guest has ended by itself.
const MAX_EXIT_REASON_BYTES: usize = 16 << 10;

/// Indexes over the records of sandboxes.
#[derive(Debug, Default)]
pub(crate) struct EntryIndexes {
    /// Descendants of each snapshot.
    pub users: SnapshotUsers,
    /// Names of those that are not killed.
    pub names: SandboxNames,
    /// All of them by the moment of their creation, in milliseconds since 1970, and id. Locked
    /// after the entries.
    pub ages: Mutex<BTreeSet<(u64, String)>>,
    /// Those that run and have a deadline, by that, in milliseconds since 1970, and id. No other
    /// lock is taken under it.
    pub deadlines: Mutex<BTreeSet<(u64, String)>>,
}

impl EntryIndexes {
    /// Notes that a sandbox's record changes. A name that it gets was claimed before.
    fn change(&self, before: &SandboxRecord, now: &SandboxRecord) {
        self.users
            .change(&now.id, needed_by(before), needed_by(now));
        let name = held_by(before);
        if let Some(name) = name.filter(|_| name != held_by(now)) {
            self.names.release(&before.settings.owner, name, &before.id);
        }
        self.move_deadline(&now.id, ends_at(before), ends_at(now));
    }

    fn move_deadline(&self, id: &str, before: Option<u64>, now: Option<u64>) {
        if before == now {
            return;
        }
        let mut deadlines = self.deadlines.lock();
        if let Some(before) = before {
            deadlines.remove(&(before, id.to_owned()));
        }
        if let Some(now) = now {
            deadlines.insert((now, id.to_owned()));
        }
    }
}

/// A sandbox: its record, its guest while it has one, and whose turn it is to change them.
pub(crate) struct SandboxEntry<G> {
    record: Mutex<SandboxRecord>,
    indexes: Arc<EntryIndexes>,
    guest: Mutex<Option<Arc<G>>>,
    /// Resources that it takes of the host, from before its guest comes up until that is gone.
    reservation: Mutex<Option<Reservation>>,
    /// Resources that it used over time.
    pub history: Mutex<History>,
    /// Connections of its earlier guests.
    pub reached: Mutex<ConnectionHistory>,
    /// Console of a guest that ended by itself, as far as it is kept.
    last_words: Mutex<Option<String>>,
    /// True while its timeout is being acted upon.
    expiring: AtomicBool,
    /// True while it is being killed.
    ending: watch::Sender<bool>,
    /// Told whenever its record changes.
    changed: watch::Sender<()>,
    /// Held by the operation that is changing the sandbox.
    pub op_lock: tokio::sync::Mutex<()>,
}

impl<G> Drop for SandboxEntry<G> {
    fn drop(&mut self) {
        let record = self.record.lock();
        let (id, name) = (&record.id, held_by(&record));
        self.indexes.users.change(id, needed_by(&record), None);
        if let Some(name) = name {
            self.indexes.names.release(&record.settings.owner, name, id);
        }
        let age = (record.created_ms, id.clone());
        self.indexes.ages.lock().remove(&age);
        self.indexes.move_deadline(id, ends_at(&record), None);
    }
}

/// The deadline of a sandbox that runs.
fn ends_at(record: &SandboxRecord) -> Option<u64> {
    let runs = record.state == SandboxState::Running;
    record.deadline_ms.filter(|_| runs)
}

/// The name that a sandbox has for itself.
fn held_by(record: &SandboxRecord) -> Option<&str> {
    let alive = record.state != SandboxState::Killed;
    record.name.as_deref().filter(|_| alive)
}

/// The snapshot that a sandbox needs.
fn needed_by(record: &SandboxRecord) -> Option<&str> {
    let alive = record.state != SandboxState::Killed;
    record.snapshot.as_deref().filter(|_| alive)
}

impl<G: Guest> SandboxEntry<G> {
    /// A sandbox that has its name, if it has one.
    pub fn new(record: SandboxRecord, indexes: Arc<EntryIndexes>) -> Self {
        indexes.users.change(&record.id, None, needed_by(&record));
        let age = (record.created_ms, record.id.clone());
        indexes.ages.lock().insert(age);
        indexes.move_deadline(&record.id, None, ends_at(&record));
        Self {
            record: Mutex::new(record),
            indexes,
            guest: Mutex::default(),
            reservation: Mutex::default(),
            history: Mutex::default(),
            reached: Mutex::default(),
            last_words: Mutex::default(),
            expiring: AtomicBool::new(false),
            ending: watch::Sender::default(),
            changed: watch::Sender::default(),
            op_lock: tokio::sync::Mutex::default(),
        }
    }

    pub fn record(&self) -> SandboxRecord {
        self.record.lock().clone()
    }

    /// Shows the record without a copy of it.
    pub fn look<T>(&self, at: impl FnOnce(&SandboxRecord) -> T) -> T {
        at(&self.record.lock())
    }

    pub fn id(&self) -> String {
        self.record.lock().id.clone()
    }

    /// One word for its state.
    pub fn state_name(&self) -> &'static str {
        self.record.lock().state.name()
    }

    /// True if it was killed before `limit_ms`, in milliseconds since 1970.
    pub fn was_killed_before(&self, limit_ms: u64) -> bool {
        let record = self.record.lock();
        record.state == SandboxState::Killed && record.changed_ms < limit_ms
    }

    pub fn size(&self) -> SandboxSize {
        self.record.lock().size
    }

    /// When its time is over, while it runs and nobody has noticed yet.
    pub fn deadline(&self) -> Option<u64> {
        let counts = !self.expiring.load(Ordering::Acquire);
        ends_at(&self.record.lock()).filter(|_| counts)
    }

    /// Returns true to the one caller that is to act upon its deadline.
    pub fn begin_expiring(&self) -> bool {
        !self.expiring.swap(true, Ordering::AcqRel)
    }

    pub fn end_expiring(&self) {
        self.expiring.store(false, Ordering::Release);
    }

    /// True if it belongs to this key and was not killed.
    pub fn is_alive_of(&self, owner: &str) -> bool {
        let record = self.record.lock();
        record.state != SandboxState::Killed && record.settings.owner.as_deref() == Some(owner)
    }

    /// True if it is alive, and its agent's token fits.
    pub fn has_token(&self, fits: impl Fn(&str) -> bool) -> bool {
        let record = self.record.lock();
        matches!(record.state, SandboxState::Running | SandboxState::Paused)
            && record.agent_token.as_deref().is_some_and(fits)
    }

    /// Says whether it is being killed from now on.
    pub fn set_ending(&self, ending: bool) {
        self.ending.send_replace(ending);
    }

    pub fn is_ending(&self) -> bool {
        *self.ending.borrow()
    }

    /// Waits until nothing is under way with it, or it is being killed.
    pub async fn decided(&self) {
        let mut ending = self.ending.subscribe();
        tokio::select! {
            _op_guard = self.op_lock.lock() => {}
            _ = ending.wait_for(|ending| *ending) => {}
        }
    }

    /// Waits until the record is as `wanted`, and returns it.
    pub async fn until(&self, wanted: impl Fn(&SandboxRecord) -> bool) -> SandboxRecord {
        let mut changes = self.changed.subscribe();
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
    pub fn set_record(&self, record: SandboxRecord) {
        let alive = matches!(record.state, SandboxState::Creating | SandboxState::Running);
        if record.state == SandboxState::Killed {
            // Its guest's, too: many are killed, and each is remembered for an hour.
            self.reached.lock().clear();
            self.last_words.lock().take();
        }
        let mut current = self.record.lock();
        self.indexes.change(&current, &record);
        *current = record;
        drop(current);
        self.changed.send_replace(());
        if !alive {
            self.set_reservation(None);
        }
    }

    /// True if it has a place.
    pub fn has_reservation(&self) -> bool {
        self.reservation.lock().is_some()
    }

    pub fn set_reservation(&self, reservation: Option<Reservation>) {
        *self.reservation.lock() = reservation;
    }

    /// Its guest is up; one that has no place, since it was there before we were, gets one from
    /// `count`.
    pub fn count_guest(&self, count: impl FnOnce(SandboxSize) -> Reservation) {
        let size = self.record.lock().size;
        self.reservation
            .lock()
            .get_or_insert_with(|| count(size))
            .set_up();
    }

    /// The record as it will be in `state`.
    pub fn record_in(&self, state: SandboxState) -> SandboxRecord {
        SandboxRecord {
            state,
            changed_ms: now_ms(),
            ..self.record()
        }
    }

    pub fn guest(&self) -> Option<Arc<G>> {
        self.guest.lock().clone()
    }

    /// Puts another guest, or none, in place and returns the one before.
    pub fn replace_guest(&self, guest: Option<Arc<G>>) -> Option<Arc<G>> {
        let before = std::mem::replace(&mut *self.guest.lock(), guest);
        if let Some(log) = before.as_ref().and_then(|guest| guest.connections()) {
            self.reached.lock().add(log);
        }
        before
    }

    /// Keeps the end of the console of a guest that ended by itself.
    pub fn keep_last_words(&self, console: &str) {
        let mut begin = console.len().saturating_sub(MAX_EXIT_REASON_BYTES);
        while !console.is_char_boundary(begin) {
            begin += 1;
        }
        *self.last_words.lock() = Some(console[begin..].to_owned());
    }

    /// Console of its guest, or of the one that ended by itself.
    pub fn console(&self) -> Option<String> {
        match self.guest() {
            Some(guest) => Some(guest.console_tail()),
            None => self.last_words.lock().clone(),
        }
    }

    /// Returns the record of its guest's connections.
    pub fn connections(&self) -> Option<Arc<dyn ConnectionLog>> {
        self.guest()?.connections()
    }

    pub fn is_guest(&self, guest: &Arc<G>) -> bool {
        self.guest
            .lock()
            .as_ref()
            .is_some_and(|g| Arc::ptr_eq(g, guest))
    }

    /// The record, if the sandbox may be asked to do `operation` now.
    pub fn allow(
        &self,
        operation: SandboxOperation,
        verb: &'static str,
    ) -> Result<SandboxRecord, OperationError> {
        let record = self.record();
        if record.state.allows(operation) {
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
    ) -> Result<Arc<G>, OperationError> {
        self.allow(operation, verb)?;
        self.guest().ok_or_else(|| self.refuse(verb))
    }
}
