//! One sandbox in memory.

use super::error::OperationError;
use crate::record::{Operation, SandboxRecord, State, now_ms};
use jiffy_engine::Guest;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A sandbox: its record, its guest while it has one, and whose turn it is to change them.
pub(crate) struct Entry<G> {
    record: Mutex<SandboxRecord>,
    guest: Mutex<Option<Arc<G>>>,
    /// Held by the operation that is changing the sandbox.
    pub turn: tokio::sync::Mutex<()>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<G: Guest> Entry<G> {
    pub fn new(record: SandboxRecord) -> Self {
        Self {
            record: Mutex::new(record),
            guest: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
        }
    }

    pub fn record(&self) -> SandboxRecord {
        lock(&self.record).clone()
    }

    pub fn set_record(&self, record: SandboxRecord) {
        *lock(&self.record) = record;
    }

    /// The record as it will be in `state`.
    pub fn record_in(&self, state: State) -> SandboxRecord {
        SandboxRecord {
            state,
            changed_ms: now_ms(),
            ..self.record()
        }
    }

    pub fn guest(&self) -> Option<Arc<G>> {
        lock(&self.guest).clone()
    }

    /// Puts another guest, or none, in place and returns the one before.
    pub fn replace_guest(&self, guest: Option<Arc<G>>) -> Option<Arc<G>> {
        std::mem::replace(&mut *lock(&self.guest), guest)
    }

    pub fn is_guest(&self, guest: &Arc<G>) -> bool {
        lock(&self.guest)
            .as_ref()
            .is_some_and(|g| Arc::ptr_eq(g, guest))
    }

    /// The record, if the sandbox may be asked to do `operation` now.
    pub fn allow(
        &self,
        operation: Operation,
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
            state: match record.state {
                State::Broken { cause } => format!("broken ({cause})"),
                state => state.name().to_owned(),
            },
        }
    }

    /// The guest, if `operation` needs one and the sandbox is in a state that has one.
    pub fn running(
        &self,
        operation: Operation,
        verb: &'static str,
    ) -> Result<Arc<G>, OperationError> {
        self.allow(operation, verb)?;
        self.guest().ok_or_else(|| self.refuse(verb))
    }
}
