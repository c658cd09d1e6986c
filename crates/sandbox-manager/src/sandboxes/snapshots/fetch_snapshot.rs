//! Fetches a snapshot and its ancestors from the store that hosts share, if an operation needs a
//! snapshot that this host does not have. A *chunk* is 64 KiB of memory or of a disk.

mod fetch_locks;
mod repair;

pub(in crate::sandboxes) use fetch_locks::FetchLocks;

use crate::admission::Shortage;
use crate::quota::{QuotaAmount, QuotaRequest};
use crate::records::SnapshotRecord;
use crate::sandboxes::snapshot_catalog::SnapshotPin;
use crate::sandboxes::snapshot_engine::SnapshotOnDisk;
use crate::sandboxes::{OperationError, OwnerBudgets, Sandboxes, Snapshots};
use crate::snapshot::Snapshot;
use crate::store_copies::{StoreCopies, StoreCopy, StorePlace};
use jiffy_api_types::SnapshotPurpose;
use jiffy_engine_api::{EngineError, ExistingSnapshot, ImportedFile, SnapshotImport, is_id};
use jiffy_store::SHARED_TENANT;
use jiffy_store::host::{
    FoundSnapshot, LOCAL_TENANT, MANIFEST_PART, MemoryPull, PulledFile, RECORD_PART, RemoteStore,
    first_chunks,
};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Snapshot of this host, pinned while this value exists.
pub struct PinnedSnapshot {
    record: Snapshot,
    pin: SnapshotPin,
}

impl PinnedSnapshot {
    /// Returns the snapshot.
    pub fn snapshot(&self) -> &Snapshot {
        &self.record
    }
}

/// Snapshots that a caller may fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FetchScope {
    /// Snapshots requested by clients.
    Requested,
    /// All snapshots, also of paused sandboxes.
    All,
}

impl FetchScope {
    /// Returns the scope of an owner. `None` is the host's owner.
    fn of(owner: Option<&str>) -> Self {
        match owner {
            Some(_) => Self::Requested,
            None => Self::All,
        }
    }

    /// Returns whether a caller with this scope may fetch the snapshot.
    fn has(self, record: &Snapshot) -> bool {
        self == Self::All || record.purpose == SnapshotPurpose::Requested
    }
}

/// File from the store, in the form in which engines import files.
struct Pulled(PulledFile);

impl ImportedFile for Pulled {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn place(&self, to: &Path) -> io::Result<()> {
        self.0.place(to)
    }

    fn missing(&self) -> Option<String> {
        self.0.missing().map(jiffy_store::host::LayerOrigin::encode)
    }

    fn pin(&self, to: &Path) -> io::Result<()> {
        self.0.pin(to)
    }
}

impl Snapshots<'_> {
    /// Returns snapshot `id` of `owner`. If it is not on this host, fetches it with its ancestors
    /// from the store. Returns `None` if the store does not have it either, or if there is no
    /// store. Concurrent calls for one snapshot share one fetch, which continues if the callers
    /// disconnect.
    pub async fn fetch(
        self,
        owner: Option<&str>,
        id: &str,
        scope: FetchScope,
    ) -> Result<Option<PinnedSnapshot>, OperationError> {
        let Some(remote) = self.0.uploads.remote.clone().filter(|_| is_id(id)) else {
            return Ok(None);
        };
        let (this, id) = (Sandboxes(self.0.clone()), id.to_owned());
        let owner = owner.map(str::to_owned);
        let work = async move {
            // The key contains the owner: an owner must not receive the fetch of another owner.
            let key = format!("{}/{id}", owner.as_deref().unwrap_or_default());
            let lock = this.0.fetch_locks.get(key);
            let _guard = lock.lock().await;
            let fetch = Fetch {
                this: this.clone(),
                remote,
                owner,
            };
            // The future is boxed, because it is large.
            Box::pin(fetch.run(&id, scope)).await
        };
        let this = Sandboxes(self.0.clone());
        this.perform("fetch", "", work).await
    }

    /// Returns the record of snapshot `id` of `owner` in the store without fetching the snapshot.
    /// `None` if the store has no such snapshot.
    pub async fn describe_stored(
        self,
        owner: Option<&str>,
        id: &str,
        scope: FetchScope,
    ) -> Result<Option<Snapshot>, OperationError> {
        let Some(remote) = self.0.uploads.remote.clone().filter(|_| is_id(id)) else {
            return Ok(None);
        };
        let failed = Fetch::store_error(id);
        let fetch = Fetch {
            this: Sandboxes(self.0.clone()),
            remote,
            owner: owner.map(str::to_owned),
        };
        let lineage = fetch.remote.find(owner, id).await.map_err(failed)?;
        let Some(source) = lineage.and_then(|lineage| lineage.into_iter().next()) else {
            return Ok(None);
        };
        // `newest` is true: the source is the requested snapshot, and not an ancestor.
        let record = fetch.record(&source, true).await?;
        Ok(Some(record).filter(|record| scope.has(record)))
    }

    /// Pins a snapshot by its id, a prefix of the id, or its name. If it is not on this host,
    /// fetches it by its id for `owner`. Waits for a snapshot that is being stored.
    pub(in crate::sandboxes) async fn pin_or_fetch(
        self,
        owner: Option<&str>,
        id: &str,
    ) -> Result<(Snapshot, SnapshotPin), OperationError> {
        match self.pin_stored(id).await {
            Err(unknown @ OperationError::Unknown { .. }) => {
                self.expect_not_lost(owner, id, FetchScope::of(owner))?;
                // `All`: a resume needs the snapshot of a pause, which no client requested.
                match Box::pin(self.fetch(owner, id, FetchScope::All)).await? {
                    Some(held) => Ok((held.record, held.pin)),
                    None => Err(unknown),
                }
            }
            other => other,
        }
    }
}

/// Fetch of a snapshot with its ancestors.
struct Fetch {
    this: Sandboxes,
    remote: Arc<RemoteStore>,
    /// API key that owns the snapshot. `None` for the owner of the host.
    owner: Option<String>,
}

/// Snapshot to fetch, with its checked description.
struct Missing {
    source: FoundSnapshot,
    record: Snapshot,
    import: SnapshotImport,
    /// Chunks of memory to fetch before a guest runs. `None` for all chunks.
    memory: Option<Vec<u64>>,
}

impl Fetch {
    fn store_error(id: &str) -> impl FnOnce(jiffy_store::host::RemoteError) -> OperationError + '_ {
        |source| OperationError::Store {
            id: id.to_owned(),
            source,
        }
    }

    fn find_local(&self, id: &str) -> Option<PinnedSnapshot> {
        let snapshots = self.this.0.catalog.read();
        let record = snapshots.get(id)?.clone();
        let pin = self.this.0.catalog.pin(id);
        Some(PinnedSnapshot { record, pin })
    }

    async fn run(
        &self,
        id: &str,
        scope: FetchScope,
    ) -> Result<Option<PinnedSnapshot>, OperationError> {
        // A snapshot of another owner is reported as missing, so that its id is not disclosed.
        let if_owned = |held: PinnedSnapshot| (held.record.owner == self.owner).then_some(held);
        let local = self.find_local(id);
        // A snapshot that is here only as an ancestor is looked up in the store, which shows
        // whether it exists there under its own id.
        if let Some(held) = local
            && (scope == FetchScope::All || held.record.retained || !scope.has(&held.record))
        {
            return Ok(if_owned(held).filter(|held| scope.has(&held.record)));
        }
        let lineage = self.remote.find(self.owner.as_deref(), id).await;
        let Some(lineage) = lineage.map_err(Self::store_error(id))? else {
            return Ok(None);
        };
        // Pin the snapshots before the first byte is written, so that garbage collection does not
        // remove their files.
        let pins = lineage
            .iter()
            .map(|source| self.this.0.catalog.pin(&source.id));
        let _pins: Vec<SnapshotPin> = pins.collect();
        let engine = lineage.first().map_or("", FoundSnapshot::engine);
        let files = self.this.0.engines.snapshot_files(engine);
        // Chunks to fetch before a guest runs, per snapshot of the lineage. `None`: all chunks.
        let mut first = files
            .is_ok_and(|files| files.restores_lazily())
            .then(|| first_chunks(&lineage))
            .flatten()
            .map(Vec::into_iter);
        let mut missing = Vec::new();
        for (depth, source) in lineage.into_iter().enumerate() {
            let memory = first.as_mut().and_then(Iterator::next);
            match self.find_local(&source.id) {
                // An ancestor that is already on this host is not fetched again.
                Some(held) => self.check_ancestor(&held.record)?,
                None => missing.push(self.describe(source, depth == 0, memory).await?),
            }
        }
        let newest = missing.first().filter(|missing| missing.source.id == id);
        // Check the scope before any file is fetched.
        if newest.is_some_and(|missing| !scope.has(&missing.record)) {
            return Ok(None);
        }
        let _permit = self.reserve_space(&missing).await?;
        // The snapshots are fetched concurrently: a guest waits for the slowest fetch and not for
        // all of them in turn.
        let pulls = missing.iter().map(|missing| Box::pin(self.pull(missing)));
        let pulled: Vec<_> = futures_util::future::try_join_all(pulls).await?;
        // Oldest first: a snapshot is imported only after its parent.
        for (missing, files) in missing.into_iter().zip(pulled).rev() {
            self.store_fetched(missing, files).await?;
        }
        let Some(held) = self.find_local(id).and_then(if_owned) else {
            return Ok(None);
        };
        // The snapshot was fetched earlier as an ancestor of another one.
        if scope == FetchScope::Requested && !held.record.retained {
            self.this
                .0
                .catalog
                .update(id, |record| record.retained = true);
        }
        Ok(self.find_local(id))
    }

    /// Fails if an ancestor belongs to another owner.
    fn check_ancestor(&self, record: &Snapshot) -> Result<(), OperationError> {
        if self.owner.is_none() || record.owner.is_none() || record.owner == self.owner {
            return Ok(());
        }
        Err(incompatible(
            &record.id,
            "it descends from a snapshot of another owner",
        ))
    }

    /// Reads the record and the manifest of a snapshot, and checks that it can be restored on this
    /// host. `newest` is true for the snapshot itself, and false for its ancestors.
    async fn describe(
        &self,
        source: FoundSnapshot,
        newest: bool,
        memory: Option<Vec<u64>>,
    ) -> Result<Missing, OperationError> {
        let manifest = async {
            let manifest = self.remote.document(&source, MANIFEST_PART).await;
            manifest.map_err(Self::store_error(&source.id))
        };
        let (record, manifest) = tokio::try_join!(self.record(&source, newest), manifest)?;
        let lacks = || incompatible(&source.id, "its manifest is missing");
        let import = SnapshotImport {
            id: source.id.clone(),
            parent: source.parent.clone(),
            engine: source.engine().to_owned(),
            size: record.size,
            manifest: manifest.ok_or_else(lacks)?,
        };
        if !newest {
            self.check_ancestor(&record)?;
        }
        let checked = match self.this.0.engines.snapshot_files(&import.engine) {
            Ok(files) => files.check_import(&import).await,
            Err(e) => Err(EngineError::Incompatible {
                reason: format!("snapshot {} cannot be restored: {e}", import.id),
            }),
        };
        checked.map_err(OperationError::engine("fetch the snapshot"))?;
        Ok(Missing {
            source,
            record,
            import,
            memory,
        })
    }

    /// Reads the record of a snapshot in the form in which this host stores it. `newest` is true
    /// for the requested snapshot and false for its ancestors.
    async fn record(
        &self,
        source: &FoundSnapshot,
        newest: bool,
    ) -> Result<Snapshot, OperationError> {
        let record = self.remote.document(source, RECORD_PART).await;
        let record = record.map_err(Self::store_error(&source.id))?;
        let lacks = || incompatible(&source.id, "its record is missing");
        let record = serde_json::from_slice::<SnapshotRecord>(&record.ok_or_else(lacks)?);
        let record = record.map_err(|e| incompatible(&source.id, &format!("its record: {e}")))?;
        let record = *Box::<Snapshot>::from(record);
        record.size.check()?;
        // The record comes from the store, and the id becomes a file name.
        if !is_id(&source.id) || record.id != source.id {
            return Err(incompatible(
                &source.id,
                "its record belongs to another snapshot",
            ));
        }
        Ok(Snapshot {
            owner: if newest {
                self.owner.clone()
            } else {
                record.owner.filter(|_| !source.shared)
            },
            parent: source.parent.clone(),
            engine: source.engine().to_owned(),
            // The copies that other hosts know are not taken over: this host did not push them.
            store: StoreCopies {
                revision: record.store.revision,
                uploading: None,
                copies: vec![self.copy(source)],
            },
            // Ancestors and snapshots of pauses are removed once no sandbox needs them.
            retained: newest && record.purpose == SnapshotPurpose::Requested,
            storing: false,
            ..record
        })
    }

    /// Returns the copy in the store from which a snapshot is fetched.
    fn copy(&self, source: &FoundSnapshot) -> StoreCopy {
        let tenant = if source.shared {
            SHARED_TENANT
        } else {
            self.owner.as_deref().unwrap_or(LOCAL_TENANT)
        };
        StoreCopy {
            place: StorePlace {
                store: self.remote.url().to_owned(),
                tenant: tenant.to_owned(),
            },
            root: source.remote.root.to_string(),
            fetched: true,
        }
    }

    /// Checks that the disk has enough free space. Returns the maximum number of bytes to write.
    fn check_disk(&self, missing: &[Missing]) -> Result<u64, OperationError> {
        let bytes = missing.iter().map(|missing| missing.source.bytes());
        let bytes = bytes.fold(0, u64::saturating_add);
        let free = self.this.0.admission.writable_disk_mib();
        match free.filter(|free| bytes >> 20 > *free) {
            None => Ok(bytes),
            Some(free) => Err(OperationError::Busy {
                what: format!(
                    "the snapshot and its ancestors need up to {} MiB of disk space, and {free} MiB are available: free space on the data directory's disk",
                    bytes >> 20
                ),
                retry_after: Shortage::Disk.retry_after().unwrap_or_default(),
            }),
        }
    }

    /// Checks the free disk space and reserves quota of the owner.
    async fn reserve_space(
        &self,
        missing: &[Missing],
    ) -> Result<crate::quota::QuotaPermit, OperationError> {
        let bytes = self.check_disk(missing)?;
        let is_requested = missing
            .first()
            .is_some_and(|missing| missing.record.retained);
        let request = QuotaRequest {
            amount: QuotaAmount {
                snapshots: u64::from(is_requested),
                disk_bytes: bytes,
                ..QuotaAmount::default()
            },
            disk_floor: None,
        };
        OwnerBudgets(&self.this.0)
            .reserve(self.owner.as_deref(), request)
            .await
    }

    /// Fetches the files of a snapshot, with the first chunks of its memory or with all of it.
    async fn pull(&self, missing: &Missing) -> Result<Vec<PulledFile>, OperationError> {
        let id = &missing.source.id;
        let memory = match &missing.memory {
            Some(chunks) => MemoryPull::Chunks(chunks),
            None => MemoryPull::All,
        };
        let owner = self.owner.as_deref();
        let pulled = self.remote.pull(owner, &missing.source, memory).await;
        let (files, report) = pulled.map_err(Self::store_error(id))?;
        tracing::info!(
            id,
            chunks = report.chunks,
            fetched_bytes = report.fetched_bytes,
            range_bytes = report.range_bytes,
            ranges = report.ranges,
            whole = missing.memory.is_none(),
            "fetched a snapshot from the store"
        );
        Ok(files)
    }

    /// Stores and registers a fetched snapshot, whose parent is on this host, unless another fetch
    /// has done so.
    async fn store_fetched(
        &self,
        missing: Missing,
        files: Vec<PulledFile>,
    ) -> Result<(), OperationError> {
        let id = missing.source.id.clone();
        let lock = self.this.0.fetch_locks.get(id.clone());
        let _guard = lock.lock().await;
        if self.find_local(&id).is_some() {
            return Ok(());
        }
        let failed = || OperationError::engine(format!("store the fetched snapshot {id}"));
        let engine = &missing.import.engine;
        let stored = self
            .this
            .0
            .engines
            .snapshot_files(engine)
            .map_err(failed())?;
        // Removes files without a record that a killed daemon left.
        stored.remove(&id).map_err(failed())?;
        let files = files.into_iter().map(|file| Arc::new(Pulled(file)) as _);
        stored
            .import(&missing.import, files.collect(), ExistingSnapshot::Keep)
            .await
            .map_err(failed())?;
        let record = Snapshot {
            bytes: stored.size(&id).unwrap_or(0),
            ..missing.record
        };
        // The record is committed after the files are complete. After a crash in between, the files
        // have no record and are removed.
        let committed = self
            .this
            .0
            .catalog
            .change()
            .commit(record.clone(), Vec::new());
        if let Err(e) = committed {
            let engine = record.engine;
            self.this
                .0
                .gc
                .remove_files(vec![SnapshotOnDisk { id, engine }]);
            return Err(e.into());
        }
        if record.retained {
            self.this.0.upkeep.enqueue_checksums(&record.id);
        }
        // The memory is incomplete, so the store must retain its layers for this host. The notified
        // task registers the host in the store as a reader of these layers.
        if missing.memory.is_some() {
            self.this.0.uploads.wake_readers.notify_one();
        }
        Ok(())
    }
}

fn incompatible(id: &str, reason: &str) -> OperationError {
    let reason = format!("snapshot {id} in the store is damaged: {reason}");
    OperationError::engine("fetch the snapshot")(EngineError::Incompatible { reason })
}
