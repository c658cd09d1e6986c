//! Access of a node to the record of its shard: executes the reads and conditional writes that the
//! state machine of the member requests.
//!
//! A shard is a part of all sandboxes of the fleet. Its record in the store names the member that
//! coordinates the shard, and conditional writes decide which member that is.

use crate::records::{Outcome, PendingWrite, Record};
use crate::{RecordError, RecordKey, SealedRecords};
use jiffy_fleet_core::record::ShardRecord;
use jiffy_fleet_core::{Event, FleetId, ReadOutcome, ShardId, Version, WriteId, WriteOutcome};
use std::collections::VecDeque;
use std::sync::Arc;

/// Number of remembered versions. A conditional write names one of them.
const KNOWN_VERSIONS: usize = 8;

/// Record of the shard with the versions that the state machine may name.
#[derive(Debug)]
pub(super) struct ShardFile {
    records: Arc<SealedRecords>,
    key: RecordKey,
    fleet: FleetId,
    shard: ShardId,
    /// Latest versions of the record, oldest first.
    known: VecDeque<Record>,
    /// Latest write. It is sent again with the same bytes if its outcome is unknown.
    pending: Option<(WriteId, PendingWrite)>,
}

/// Answer of the records, before it was decoded.
#[derive(Debug)]
pub(super) enum ShardAnswer {
    Read(Result<Option<Record>, RecordError>),
    Written(WriteId, Result<Outcome, RecordError>),
}

impl ShardFile {
    /// Uses the record `fleet/shards/<shard>`.
    ///
    /// # Errors
    /// [`RecordError::Key`] if the number of the shard results in an invalid key.
    pub fn new(
        records: Arc<SealedRecords>,
        fleet: FleetId,
        shard: ShardId,
    ) -> Result<Self, RecordError> {
        Ok(Self {
            records,
            key: format!("fleet/shards/{}", shard.0).parse()?,
            fleet,
            shard,
            known: VecDeque::new(),
            pending: None,
        })
    }

    /// Accepts records that are older than those read before.
    pub fn accept_restore(&mut self) {
        // Other records, for example tables, were restored together with the record of the shard.
        self.records.forget_all();
        self.known.clear();
    }

    /// Returns a task that reads the record.
    pub fn read(&self) -> impl Future<Output = ShardAnswer> + Send + use<> {
        let (records, key) = (self.records.clone(), self.key.clone());
        async move { ShardAnswer::Read(records.get(&key).await) }
    }

    /// Returns a task that replaces the record.
    ///
    /// # Errors
    /// The event of a write that cannot be sent.
    pub fn replace(
        &mut self,
        write: WriteId,
        record: &ShardRecord,
        expected: &Version,
    ) -> Result<impl Future<Output = ShardAnswer> + Send + use<>, Event> {
        let pending = match &self.pending {
            Some((id, pending)) if *id == write => pending.clone(),
            _ => {
                let pending = self.prepare(record, expected).map_err(|reason| {
                    tracing::error!(record = %self.key, reason, "cannot replace a record");
                    Event::ShardWritten {
                        write,
                        outcome: WriteOutcome::Rejected,
                    }
                })?;
                self.pending = Some((write, pending.clone()));
                pending
            }
        };
        let records = self.records.clone();
        Ok(async move { ShardAnswer::Written(write, records.send(&pending).await) })
    }

    fn prepare(&self, record: &ShardRecord, expected: &Version) -> Result<PendingWrite, String> {
        let mut known = self.known.iter();
        let current = known.find(|record| version_of(record) == *expected);
        let current = current.ok_or("its version is not known")?;
        let content = record.encode().map_err(|e| e.to_string())?;
        let pending = self.records.replace(&self.key, content, current);
        pending.map_err(|e| e.to_string())
    }

    /// Returns the event of an answer.
    pub fn event(&mut self, answer: ShardAnswer) -> Event {
        match answer {
            ShardAnswer::Read(Ok(None)) => Event::ShardRead(ReadOutcome::Missing),
            ShardAnswer::Read(Ok(Some(record))) => Event::ShardRead(match self.decode(&record) {
                Some((shard, version)) => ReadOutcome::Found(Box::new(shard), version),
                None => ReadOutcome::Failed,
            }),
            ShardAnswer::Read(Err(error)) => {
                self.log(&error, "cannot read a record");
                Event::ShardRead(ReadOutcome::Failed)
            }
            ShardAnswer::Written(write, result) => {
                let outcome = match result {
                    Ok(Outcome::Done(record)) => WriteOutcome::Done(self.remember(&record)),
                    Ok(Outcome::Lost(current)) => {
                        let current = current.and_then(|record| self.decode(&record));
                        WriteOutcome::Lost(current.map(Box::new))
                    }
                    Err(error) => {
                        self.log(&error, "cannot replace a record");
                        match error {
                            RecordError::Unavailable { .. }
                            | RecordError::TooLarge { .. }
                            | RecordError::Full { .. }
                            | RecordError::Denied { .. } => WriteOutcome::Rejected,
                            // The answer does not show whether the write was executed.
                            _ => WriteOutcome::Unknown,
                        }
                    }
                };
                Event::ShardWritten { write, outcome }
            }
        }
    }

    fn log(&self, error: &RecordError, text: &'static str) {
        if error.is_temporary() {
            tracing::warn!(record = %self.key, %error, "{text}");
        } else {
            tracing::error!(record = %self.key, %error, "{text}");
        }
    }

    fn decode(&mut self, record: &Record) -> Option<(ShardRecord, Version)> {
        match ShardRecord::decode(&record.content, &self.fleet, self.shard) {
            Ok(shard) => Some((shard, self.remember(record))),
            Err(error) => {
                tracing::error!(record = %self.key, %error, "cannot read a record");
                None
            }
        }
    }

    /// Retains a record that was read or written, because a later write names its version as the
    /// expected one.
    fn remember(&mut self, record: &Record) -> Version {
        let version = version_of(record);
        self.known.retain(|known| version_of(known) != version);
        if self.known.len() == KNOWN_VERSIONS {
            self.known.pop_front();
        }
        self.known.push_back(record.clone());
        version
    }
}

/// Returns the version of a record, which is the same on all members.
fn version_of(record: &Record) -> Version {
    Version(record.version_id().to_vec().into_boxed_slice())
}
