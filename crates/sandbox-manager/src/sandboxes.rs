//! The sandboxes of one host, and everything that can be done with them.
//!
//! Every operation holds its sandbox's turn from its first look at the state to the commit of the
//! new one, and runs to its end even if whoever asked goes away. The journal is written last: what
//! it says was true. Only `kill` does not wait for its turn before it acts, so that nothing a
//! sandbox does can keep it alive.

mod adopt;
mod build_steps;
mod capture;
mod change_settings;
mod connect;
mod connection_history;
mod create;
mod entry;
mod entry_indexes;
mod fetch_snapshot;
mod fork;
mod gc;
mod host_options;
mod id_groups;
mod lineage_length;
mod list_order;
mod lookup;
mod names;
mod observe;
mod operations;
mod owner_ages;
mod owner_usage;
mod pause_resume;
mod pool;
mod ranked_lock;
mod recover;
mod removal;
mod restart;
mod rollback;
mod snapshot_catalog;
mod snapshot_engine;
mod snapshot_fold;
mod snapshot_index;
mod snapshot_removal;
mod snapshot_upkeep;
mod start_pacer;
mod take_snapshot;
mod template_retirement;
mod template_snapshots;
mod timeout;
mod upload;
mod wake_options;

pub use build_steps::BuildSteps;
pub use create::{CreateSpec, SandboxSource};
pub use fetch_snapshot::{FetchScope, HeldSnapshot};
pub use fork::{ForkChild, ForkReport};
pub use host_options::HostOptions;
pub use list_order::{ListOrder, ListPosition, ListedSandboxes, ListedSnapshots};
pub use lookup::Snapshots;
pub use names::SandboxIndex;
pub use observe::{Observation, SandboxFigures};
pub use owner_usage::OwnerBudgets;
pub use owner_usage::OwnerUsage;
pub use pool::PoolSize;
pub use pool::WarmPool;
pub use restart::MAX_RESTART_GRACE;
pub use template_snapshots::TemplateSnapshots;
pub use timeout::Timeouts;
pub use wake_options::{AwakeTime, WakeOptions};

use crate::admission::{
    Admission, HostFigures, KernelReader, Occupant, PromisedResources, Reservation,
};
use crate::journal::{Journal, JournalChange, JournalError, OpenedJournal};
use crate::metrics::Metrics;
use crate::operation_error::OperationError;
use crate::quota::OwnerQuota;
use crate::sandbox::{Sandbox, broken_by_end};
use capture::Captures;
use entry::SandboxEntry;
use entry_indexes::EntryIndexes;
use fetch_snapshot::FetchLocks;
use gc::file_remover::{self, FileRemover};
use jiffy_api_types::SandboxState;
use jiffy_engine_api::{EngineDescription, EngineError, Engines, Guest, SandboxSize, steps};
use jiffy_proto::agent::SiteSettings;
use observe::FigureSources;
use operations::{Operations, detached};
use parking_lot::Mutex;
use pool::Pool;
use ranked_lock::{LockRank, RankedMutex};
use smol_str::SmolStr;
use snapshot_catalog::SnapshotCatalog;
use snapshot_fold::SnapshotFolder;
use snapshot_upkeep::SnapshotUpkeep;
use start_pacer::StartPacer;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;
use template_snapshots::TemplateSnapshotState;
use tokio::sync::{Notify, Semaphore};
use upload::Uploads;

struct SandboxesInner {
    engines: Engines,
    journal: Arc<Journal>,
    entries: RankedMutex<BTreeMap<SmolStr, Arc<SandboxEntry>>>,
    catalog: SnapshotCatalog,
    /// Indexes over the records of sandboxes.
    indexes: Arc<EntryIndexes>,
    /// Removes files of snapshots.
    file_remover: FileRemover,
    pool: Pool,
    admission: Admission,
    start_pacer: StartPacer,
    metrics: Metrics,
    figure_sources: FigureSources,
    operations: Operations,
    /// Guests that run no more and are not gone yet.
    endings: Arc<Semaphore>,
    /// Told when a deadline may have changed.
    deadlines: Arc<Notify>,
    template_snapshots: TemplateSnapshotState,
    fetch_locks: FetchLocks,
    upkeep: SnapshotUpkeep,
    /// Reclaims the disk space of removed snapshots that others lie on.
    folder: SnapshotFolder,
    captures: Captures,
    /// Snapshots on their way into the store.
    uploads: Uploads,
    /// Budgets of owners; none: they have none.
    quota: Mutex<Option<Arc<dyn OwnerQuota>>>,
    /// Certificate authorities and proxy of all sandboxes.
    site: SiteSettings,
}

/// The sandboxes of one host. Clones are the same sandboxes. Must be used inside a tokio runtime.
pub struct Sandboxes(Arc<SandboxesInner>);

impl Clone for Sandboxes {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// The same sandboxes, for as long as another holds them.
pub struct WeakSandboxes(Weak<SandboxesInner>);

impl WeakSandboxes {
    /// The sandboxes, if they are still there.
    pub fn upgrade(&self) -> Option<Sandboxes> {
        self.0.upgrade().map(Sandboxes)
    }
}

impl Sandboxes {
    /// A handle that does not keep them.
    pub fn downgrade(&self) -> WeakSandboxes {
        WeakSandboxes(Arc::downgrade(&self.0))
    }

    /// Opens the journal in `file`, puts in order what a daemon that was killed left behind, and
    /// takes over the guests that ran on.
    pub async fn open(
        engines: Engines,
        file: &Path,
        options: HostOptions,
    ) -> Result<Self, OperationError> {
        let left = OpenedJournal::read(file)?;
        Self::open_read(engines, async { Ok(left) }, options).await
    }

    /// The same with a journal that is read while other things are prepared.
    pub async fn open_read(
        engines: Engines,
        left: impl Future<Output = Result<OpenedJournal, OperationError>>,
        options: HostOptions,
    ) -> Result<Self, OperationError> {
        let on_disk = recover::on_disk(&engines)?;
        let left = left.await?;
        let reader = options.reader.unwrap_or_else(|| {
            let data = left.path.parent().unwrap_or(Path::new("/"));
            Arc::new(KernelReader::new(data))
        });
        let recovered = recover::recover(&engines, on_disk, left, options.remote.is_some())?;
        let journal = Arc::new(recovered.journal);
        let (upkeep, orders) = SnapshotUpkeep::new();
        let (folder, folds) = SnapshotFolder::new();
        let uploads = Uploads::new(
            options.remote.clone(),
            options.is_stock,
            journal.retractions()?,
        );
        let (file_remover, removals) = FileRemover::new();
        let unkept = recovered.snapshots.iter().filter(|s| !s.kept);
        let unkept: Vec<String> = unkept.map(|s| s.id.clone()).collect();
        let (entries, indexes, snapshots) =
            recover::index(recovered.sandboxes, recovered.snapshots);
        let catalog = SnapshotCatalog::new(snapshots, journal.clone());
        let this = Self(Arc::new(SandboxesInner {
            engines,
            journal,
            entries: RankedMutex::new(LockRank::Entries, entries),
            catalog,
            indexes,
            file_remover,
            pool: Pool::new(options.warm),
            admission: Admission::new(options.limits, reader),
            start_pacer: StartPacer::new(),
            metrics: Metrics::new(),
            figure_sources: FigureSources::default(),
            operations: Operations::default(),
            template_snapshots: TemplateSnapshotState::new(&options.site),
            fetch_locks: FetchLocks::default(),
            endings: Arc::new(Semaphore::new(removal::MAX_ENDING_GUESTS)),
            deadlines: Arc::default(),
            upkeep,
            folder,
            captures: Captures::default(),
            uploads,
            quota: Mutex::default(),
            site: options.site,
        }));
        file_remover::begin(Arc::downgrade(&this.0), removals);
        this.snapshots().gc(unkept);
        this.adopt(recovered.orphans, recovered.storing).await?;
        if !recovered.unknown.is_empty() {
            this.0.file_remover.remove(recovered.unknown);
        }
        this.keep_time();
        this.keep_samples(options.sample);
        this.spawn_gc(options.gc_interval, options.lock);
        this.begin_uploads();
        snapshot_upkeep::begin(Arc::downgrade(&this.0), orders, options.tend);
        snapshot_fold::begin(Arc::downgrade(&this.0), folds, options.tend);
        Ok(this)
    }

    /// All sandboxes, oldest first, also those that were killed.
    pub fn list(&self) -> Vec<Sandbox> {
        let mut records: Vec<_> = self.0.entries.lock().values().map(|e| e.record()).collect();
        records.sort_by_key(|r| r.created_ms);
        records
    }

    /// One sandbox by its id or the beginning of it.
    pub fn get(&self, id: &str) -> Result<Sandbox, OperationError> {
        Ok(self.0.entry(id)?.record())
    }

    /// One sandbox by its whole id.
    pub fn find(&self, id: &str) -> Option<Sandbox> {
        self.0.find(id)
    }

    /// Shows one sandbox by its whole id, without a copy of its record.
    pub fn look<T>(&self, id: &str, at: impl FnOnce(&Sandbox) -> T) -> Option<T> {
        let entry = self.0.entries.lock().get(id).cloned()?;
        Some(entry.look(at))
    }

    /// One sandbox by its exact id, as it is once what is under way with it has been decided. One
    /// that is being killed counts as killed.
    pub async fn wait_decided(&self, id: &str) -> Option<Sandbox> {
        let entry = self.0.entries.lock().get(id).cloned()?;
        entry.decided().await;
        if entry.is_ending() {
            return Some(entry.record_in(SandboxState::Killed));
        }
        Some(entry.record())
    }

    /// Waits until a sandbox is in a state that is `wanted`, at most so long, and returns what it
    /// is then, also if its record was removed meanwhile.
    pub async fn wait(
        &self,
        id: &str,
        limit: Duration,
        wanted: impl Fn(&SandboxState) -> bool,
    ) -> Result<Sandbox, OperationError> {
        let entry = self.0.entry(id)?;
        // One that is being killed may look broken for a moment.
        let settled = |state: &SandboxState| *state == SandboxState::Killed || !entry.is_ending();
        let until = entry.until(|record| settled(&record.state) && wanted(&record.state));
        match tokio::time::timeout(limit, until).await {
            Ok(record) => Ok(record),
            Err(_) => Ok(entry.record()),
        }
    }

    /// Describes the network of sandboxes on this host, in a few words.
    pub fn network(&self) -> String {
        self.0.engines.default_engine().network()
    }

    /// The engines that sandboxes can have here.
    pub fn engines(&self) -> Vec<EngineDescription> {
        self.0.engines.descriptions()
    }

    /// A place for a guest of `size`. Those that only wait in the warm pool give way.
    fn admit(&self, size: SandboxSize) -> Result<Reservation, OperationError> {
        let _step = steps::begin("admission");
        loop {
            match self.0.admission.admit(Occupant::Sandbox, size) {
                Ok(reservation) => return Ok(reservation),
                Err(refusal) => {
                    if !refusal.short_of.is_of_waiting() || !self.0.pool.give_way() {
                        return Err(refusal.into());
                    }
                }
            }
        }
    }

    /// Ends every guest. The journal says so.
    pub async fn stop_all(&self) {
        self.0.pool.clear();
        let entries: Vec<_> = self.0.entries.lock().values().cloned().collect();
        for entry in entries.into_iter().filter(|e| e.guest().is_some()) {
            if let Some(guest) = entry.replace_guest(None) {
                guest.stop().await;
                let state = SandboxState::broken(recover::DAEMON_STOPPED);
                let record = entry.record_in(state);
                self.record_write_behind(&entry, record);
            }
        }
    }

    /// Writes the record and `more` to the journal, then to memory. The journal hears of a sandbox
    /// when it is up: until then it is in memory only.
    fn commit(
        &self,
        entry: &SandboxEntry,
        record: Sandbox,
        more: &[JournalChange],
    ) -> Result<(), JournalError> {
        if record.state != SandboxState::Creating {
            let _step = steps::begin("journal");
            let mut changes = vec![JournalChange::Sandbox(record.clone())];
            changes.extend_from_slice(more);
            self.0.journal.commit(&changes)?;
        }
        entry.set_record(record);
        Ok(())
    }

    /// The same for what has happened.
    fn record_write_behind(&self, entry: &SandboxEntry, record: Sandbox) {
        self.0
            .journal
            .commit_write_behind(&[JournalChange::Sandbox(record.clone())]);
        entry.set_record(record);
    }

    /// Marks the sandbox as broken when its guest ends by itself.
    fn watch(&self, entry: &Arc<SandboxEntry>, guest: &Arc<dyn Guest>) {
        entry.count_guest(|size| self.0.admission.count(size));
        observe::sample(entry);
        let (entry, guest) = (Arc::downgrade(entry), guest.clone());
        let this = Arc::downgrade(&self.0);
        tokio::spawn(async move {
            let end = guest.ended().await;
            let (Some(entry), Some(inner)) = (entry.upgrade(), this.upgrade()) else {
                return;
            };
            let _op_guard = entry.op_lock().lock().await;
            // Of one that is being killed, the kill says how it ended.
            if !entry.is_guest(&guest) || entry.is_ending() {
                return;
            }
            entry.keep_last_words(&guest.console_tail());
            entry.replace_guest(None);
            if entry.is_ending() {
                // The kill that is under way writes it down.
                return;
            }
            let record = entry.record_in(broken_by_end(&end));
            Self(inner).record_write_behind(&entry, record);
        });
    }
}

impl SandboxIndex<'_> {
    /// Ids of the sandboxes of a key that were not killed.
    pub fn of_owner(self, owner: &str) -> Vec<String> {
        let owners = self.0.indexes.owners.lock();
        owners.of(owner).map(SmolStr::to_string).collect()
    }

    /// The sandbox, alive, whose agent's token fits. Looks at every one.
    pub fn by_token(self, fits: impl Fn(&str) -> bool) -> Option<String> {
        let entries = self.0.entries.lock();
        let mut found = entries.iter().filter(|(_, e)| e.has_token(&fits));
        found.next().map(|(id, _)| id.to_string())
    }
}

impl Observation<'_> {
    /// The process that isolates a running sandbox, and how often the processor left its guest for
    /// the host.
    pub async fn process(self, id: &str) -> Result<(u32, Option<u64>), OperationError> {
        let entry = self.0.entry(id)?;
        let guest = entry.running(crate::sandbox::SandboxOperation::Connect, "look at")?;
        let none = || EngineError::Unsupported {
            engine: guest.engine(),
            what: "name the process of a sandbox",
            instead: None,
        };
        let process = guest.pid().ok_or_else(none);
        let pid = process.map_err(OperationError::engine("look at the sandbox's process"))?;
        Ok((pid, guest.exits().await))
    }

    /// The last console output of a sandbox that has a guest, or whose guest ended by itself while
    /// this process was there.
    pub fn console_tail(self, id: &str) -> Result<Option<String>, OperationError> {
        Ok(self.0.entry(id)?.console())
    }

    /// Why the host could not serve the disk of a sandbox, if that happened since its guest came
    /// up.
    pub fn disk_failure(self, id: &str) -> Option<String> {
        let entry = self.0.entries.lock().get(id).cloned();
        entry?.guest()?.disk_failure()
    }
}

impl WarmPool<'_> {
    /// Returns the count of restored sandboxes in the warm pool.
    pub fn waiting(self) -> usize {
        self.0.pool.len()
    }
}

impl SandboxFigures<'_> {
    /// Returns what was promised to sandboxes and the warm pool, and what was refused.
    pub fn promised(self) -> PromisedResources {
        self.0.admission.promised()
    }

    /// Returns the free resources of the host, and what all guests together may grow to, in MiB.
    pub fn host(self) -> (HostFigures, Option<u64>) {
        let figures = self.0.admission.figures();
        (figures, self.0.admission.memory_limit_mib(&figures))
    }
}
