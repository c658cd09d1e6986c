//! The sandboxes of one host, and everything that can be done with them.
//!
//! Every operation holds its sandbox's turn from its first look at the state to the commit of the new one, and runs to its end
//! even if whoever asked goes away. The journal is written last: what it says was true. Only `kill` does not wait for its turn
//! before it acts, so that nothing a sandbox does can keep it alive.

mod collect;
mod create;
mod end;
mod entry;
mod error;
mod fork;
mod lookup;
mod pool;
mod recover;
mod rollback;
mod sleep;
mod snapshot;
mod template;

pub use create::{CreateSpec, Source};
pub use error::OperationError;
pub use fork::{Child, ForkReport};

use crate::journal::{Change, Journal, JournalError};
use crate::record::{SandboxRecord, SnapshotRecord, State};
use entry::{Entry, lock};
use jiffy_engine::{Engine, Guest};
use pool::Pool;
use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// How a host is run.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Restored sandboxes that wait for their creator, per template and size in use.
    pub warm: usize,
}

struct Inner<E: Engine> {
    engine: E,
    journal: Journal,
    entries: Mutex<BTreeMap<String, Arc<Entry<E::Guest>>>>,
    /// Complete snapshots. Locked before `entries` where both are.
    snapshots: Mutex<BTreeMap<String, SnapshotRecord>>,
    /// Snapshots that something is being made from.
    pins: Mutex<HashMap<String, usize>>,
    pool: Pool<E::Arrival>,
    /// One lock per template snapshot that is being made.
    making: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

/// The sandboxes of one host. Clones are the same sandboxes. Must be used inside a tokio runtime.
pub struct Sandboxes<E: Engine>(Arc<Inner<E>>);

impl<E: Engine> Clone for Sandboxes<E> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<E: Engine> Sandboxes<E> {
    /// Opens the journal in `file` and puts in order what a daemon that was killed left behind.
    pub fn open(engine: E, file: &Path, options: Options) -> Result<Self, OperationError> {
        let journal = Journal::open(file)?;
        let recovered = recover::recover(&engine, &journal)?;
        let this = Self(Arc::new(Inner {
            engine,
            journal,
            entries: Mutex::new(
                recovered
                    .sandboxes
                    .into_iter()
                    .map(|r| (r.id.clone(), Arc::new(Entry::new(r))))
                    .collect(),
            ),
            snapshots: Mutex::new(
                recovered
                    .snapshots
                    .into_iter()
                    .map(|s| (s.id.clone(), s))
                    .collect(),
            ),
            pins: Mutex::default(),
            pool: Pool::new(options.warm),
            making: Mutex::default(),
        }));
        this.collect()?;
        Ok(this)
    }

    /// All sandboxes, oldest first, also those that were killed.
    pub fn list(&self) -> Vec<SandboxRecord> {
        let mut records: Vec<_> = lock(&self.0.entries).values().map(|e| e.record()).collect();
        records.sort_by_key(|r| r.created_ms);
        records
    }

    /// One sandbox by its id or the beginning of it.
    pub fn get(&self, id: &str) -> Result<SandboxRecord, OperationError> {
        Ok(self.entry(id)?.record())
    }

    /// All snapshots, oldest first; with `sandbox`, those that were taken of it or that it descends from.
    pub fn snapshots(&self, sandbox: Option<&str>) -> Result<Vec<SnapshotRecord>, OperationError> {
        let mut all: Vec<_> = lock(&self.0.snapshots).values().cloned().collect();
        if let Some(id) = sandbox {
            let record = self.get(id)?;
            let lineage = self.lineage(record.snapshot.as_deref());
            all.retain(|s| s.sandbox == record.id || lineage.contains(&s.id));
        }
        all.sort_by_key(|s| s.created_ms);
        Ok(all)
    }

    /// How many restored sandboxes wait in the warm pool.
    pub fn warm(&self) -> usize {
        self.0.pool.len()
    }

    /// Opens a stream to `port` in a sandbox.
    pub async fn connect(
        &self,
        id: &str,
        port: u32,
    ) -> Result<std::os::unix::net::UnixStream, OperationError> {
        let entry = self.entry(id)?;
        let guest = entry.running(crate::record::Operation::Connect, "connect to")?;
        guest
            .connect(port)
            .await
            .map_err(|source| OperationError::Connect {
                id: entry.record().id,
                port,
                source,
            })
    }

    /// The last console output of a sandbox that has a guest.
    pub fn console_tail(&self, id: &str) -> Result<Option<String>, OperationError> {
        Ok(self.entry(id)?.guest().map(|g| g.console_tail()))
    }

    /// Ends every guest, as the end of this process would. The journal says so.
    pub async fn stop_all(&self) {
        self.0.pool.clear();
        let entries: Vec<_> = lock(&self.0.entries).values().cloned().collect();
        for entry in entries {
            if let Some(guest) = entry.replace_guest(None) {
                guest.stop().await;
                let cause = recover::DAEMON_STOPPED.to_owned();
                let record = entry.record_in(State::Broken { cause });
                if let Err(e) = self.commit(&entry, record, &[]) {
                    tracing::error!("{e}");
                }
            }
        }
    }

    /// Writes the record and `more` to the journal, then to memory.
    fn commit(
        &self,
        entry: &Entry<E::Guest>,
        record: SandboxRecord,
        more: &[Change],
    ) -> Result<(), JournalError> {
        let mut changes = vec![Change::Sandbox(record.clone())];
        changes.extend_from_slice(more);
        self.0.journal.commit(&changes)?;
        entry.set_record(record);
        Ok(())
    }

    /// Marks the sandbox as broken when its guest ends by itself.
    fn watch(&self, entry: &Arc<Entry<E::Guest>>, guest: &Arc<E::Guest>) {
        let (entry, guest) = (Arc::downgrade(entry), guest.clone());
        let this = Arc::downgrade(&self.0);
        tokio::spawn(async move {
            let end = guest.ended().await;
            let (Some(entry), Some(inner)) = (entry.upgrade(), this.upgrade()) else {
                return;
            };
            let _turn = entry.turn.lock().await;
            if !entry.is_guest(&guest) {
                return;
            }
            entry.replace_guest(None);
            let cause = end.to_string();
            let record = entry.record_in(State::Broken { cause });
            if let Err(e) = Self(inner).commit(&entry, record, &[]) {
                tracing::error!("{e}");
            }
        });
    }
}

/// Runs `work` to its end even if nobody waits for it any more.
async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, OperationError>> + Send + 'static,
) -> Result<T, OperationError> {
    match tokio::spawn(work).await {
        Ok(result) => result,
        Err(e) => Err(OperationError::Lost(e.to_string())),
    }
}
