//! Head of one sandbox: the record in the store that decides which host may run the sandbox. This
//! module executes the reads and conditional writes that the state machines of `jiffy_fleet_core`
//! request.
//!
//! A conditional write names the version of the record that it replaces. If its answer is lost, its
//! outcome is unknown: the same bytes are sent again, and a read then shows which write the record
//! contains.

use super::HeadError;
use crate::RecordKey;
use crate::records::{Outcome, PendingWrite, Record, RecordError, SealedRecords};
use jiffy_fleet_core::record::Head;
use jiffy_fleet_core::{HeadWrite, ReadOutcome, SandboxId, Version, WriteId, WriteOutcome};
use std::sync::Arc;

/// Maximum number of remembered versions of the record.
const MAX_KNOWN: usize = 3;

/// Record of a head with the versions that a state machine may name.
pub(super) struct HeadFile {
    pub id: SandboxId,
    key: RecordKey,
    records: Arc<SealedRecords>,
    /// Latest versions of the record: from the last reads and writes, and from a write that failed
    /// because another host had written first.
    known: Vec<Record>,
    /// Latest write. It is sent again with the same bytes if its outcome is unknown.
    pending: Option<(WriteId, PendingWrite)>,
    /// Failure of the last access.
    error: Option<HeadError>,
}

impl HeadFile {
    pub fn new(id: SandboxId, key: RecordKey, records: Arc<SealedRecords>) -> Self {
        Self {
            id,
            key,
            records,
            known: Vec::new(),
            pending: None,
            error: None,
        }
    }

    /// Returns the error of the last access that failed.
    pub fn take_error(&mut self) -> HeadError {
        let error = self.error.take();
        error.unwrap_or_else(|| HeadError::contended(&self.id.to_string()))
    }

    /// Prepares for another state machine. Each state machine numbers its writes from the start, so
    /// a pending write of the former one must not be mistaken for a write with the same number.
    pub fn restart(&mut self) {
        self.pending = None;
    }

    /// Reads the head.
    pub async fn read(&mut self) -> ReadOutcome<Head> {
        match self.records.get(&self.key).await {
            Ok(None) => ReadOutcome::Missing,
            Ok(Some(record)) => match self.decode(record) {
                Some((head, version)) => ReadOutcome::Found(Box::new(head), version),
                None => ReadOutcome::Failed,
            },
            Err(error) => {
                self.error = Some(HeadError::record(self.id)(error));
                ReadOutcome::Failed
            }
        }
    }

    /// Sends a write.
    pub async fn write(&mut self, write: &HeadWrite) -> WriteOutcome<Head> {
        let pending = match &self.pending {
            Some((id, pending)) if *id == write.write => pending.clone(),
            _ => match self.prepare(write) {
                Ok(pending) => {
                    self.pending = Some((write.write, pending.clone()));
                    pending
                }
                Err(error) => {
                    self.error = Some(error);
                    return WriteOutcome::Rejected;
                }
            },
        };
        match self.records.send(&pending).await {
            Ok(Outcome::Done(record)) => WriteOutcome::Done(self.remember(record)),
            Ok(Outcome::Lost(None)) => WriteOutcome::Lost(None),
            // A head that cannot be decoded, for example of a newer format, must not count as a
            // missing one. A missing head means a killed sandbox, whose state this host removes.
            Ok(Outcome::Lost(Some(record))) => match self.decode(record) {
                Some(current) => WriteOutcome::Lost(Some(Box::new(current))),
                None => WriteOutcome::Unknown,
            },
            Err(error) => {
                let outcome = match error {
                    RecordError::Unavailable { .. }
                    | RecordError::TooLarge { .. }
                    | RecordError::Full { .. }
                    | RecordError::Denied { .. } => WriteOutcome::Rejected,
                    // The answer does not show whether the write was executed.
                    _ => WriteOutcome::Unknown,
                };
                self.error = Some(HeadError::record(self.id)(error));
                outcome
            }
        }
    }

    /// Encrypts a write of the head, on the condition that the state machine has named.
    fn prepare(&self, write: &HeadWrite) -> Result<PendingWrite, HeadError> {
        let id = self.id.to_string();
        let damaged = HeadError::damaged(&id);
        let content = write.head.encode().map_err(|e| damaged(&e))?;
        let prepared = match &write.expected {
            None => self.records.create(&self.key, content),
            Some(expected) => {
                let mut known = self.known.iter();
                let current = known.find(|record| version_of(record) == *expected);
                let current = current.ok_or_else(|| HeadError::contended(&id))?;
                self.records.replace(&self.key, content, current)
            }
        };
        prepared.map_err(HeadError::record(self.id))
    }

    /// Decodes a record that was read, and remembers it. A damaged record is reported to the caller
    /// after the state machine has ended.
    fn decode(&mut self, record: Record) -> Option<(Head, Version)> {
        match Head::decode(&record.content, self.id) {
            Ok(head) => Some((head, self.remember(record))),
            Err(error) => {
                self.error = Some(HeadError::damaged(&self.id.to_string())(&error));
                None
            }
        }
    }

    /// Retains a record, because a later write names it by its version as the expected one.
    fn remember(&mut self, record: Record) -> Version {
        let version = version_of(&record);
        // Older versions are not needed: a state machine expects the version of its last read or
        // write.
        if self.known.len() == MAX_KNOWN {
            self.known.remove(0);
        }
        self.known.push(record);
        version
    }
}

fn version_of(record: &Record) -> Version {
    Version(record.version_id().to_vec().into_boxed_slice())
}
