//! [`Sandboxes`]: the sandboxes of one host and all operations on them. The daemon and the API hold
//! a clone. The submodules implement one operation each, or one component with its own state and
//! lock.
//!
//! The *journal* is the database of the daemon with the records of sandboxes and snapshots. The
//! *warm pool* has guests that were started in advance and wait for a create. A daemon *adopts* the
//! guests that continued to run while no daemon ran. The *head* of a sandbox is the record in the
//! store that decides which host of a fleet may run the sandbox.
//!
//! An operation holds the sandbox's `op_lock` from reading the state until the new state is
//! committed, and completes even if its caller stops waiting. The journal is written after the
//! guest has changed, so that it records only changes that have happened.
//!
//! `kill` is the exception: it records the end of the sandbox and halts the guest before it holds
//! the lock. No operation can thus delay the end of a sandbox.

mod adopt;
mod build_steps;
mod change_settings;
mod compare;
mod connect;
mod connection_history;
mod create;
mod deadlines;
mod entry;
mod entry_indexes;
mod events;
mod fork;
mod gc;
mod guest_hooks;
mod host_options;
mod id_groups;
mod identity;
mod idle;
mod idle_checks;
mod idle_verdict;
mod lineage;
mod list_order;
mod member_addresses;
mod names;
mod observe;
mod observer;
mod operations;
mod owner_ages;
mod owner_usage;
mod pause_resume;
mod pool;
mod ranked_lock;
mod reconcile;
mod recover;
mod removal;
mod restart;
mod resume_hold;
mod resume_options;
mod rollback;
mod sandbox_index;
mod shared;
mod snapshot_catalog;
mod snapshot_content;
mod snapshot_engine;
mod snapshot_index;
mod snapshots;
mod start_pacer;
mod template_snapshots;
mod timeout;
mod usage_writes;
mod use_clock;
mod volume_mounts;

pub use build_steps::BuildSteps;
pub use compare::{ComparedContent, ComparedFiles, MAX_COMPARED_CONTENT};
pub use create::{CreateSpec, SandboxSource};
pub use fork::{ForkChild, ForkReport};
pub use host_options::HostOptions;
pub use lineage::{
    Lineage, LineageEdge, LineageNode, LineageObject, LineageRelation, MAX_LINEAGE_NODES,
    NodeDetails, SandboxDetails, SnapshotDetails, UnfoldedSeries,
};
pub use list_order::{ListOrder, ListPosition, ListedSandboxes, ListedSnapshots};
pub use observer::SandboxObserver;
pub use owner_usage::OwnerBudgets;
pub use owner_usage::OwnerUsage;
pub use pool::{PoolDemand, PoolSize, WarmPool};
pub use restart::MAX_RESTART_GRACE;
pub use resume_hold::ResumeHold;
pub use resume_options::{ResumeOptions, ResumeTimeout};
pub use sandbox_index::SandboxIndex;
pub use snapshots::Snapshots;
pub use snapshots::fetch_snapshot::{FetchScope, PinnedSnapshot};
pub use use_clock::{SandboxUse, UseInProgress};

use crate::VolumeMounter;
use crate::admission::{Admission, KernelReader, Occupant, Reservation};
use crate::journal::{Journal, JournalChange, JournalError, OpenedJournal};
use crate::metrics::Metrics;
use crate::operation_error::OperationError;
use crate::quota::OwnerQuota;
use crate::sandbox::{Sandbox, broken_by_end};
use crate::usage_ledger::UsageLedger;
use compare::ComparisonSlots;
use deadlines::Deadlines;
use entry::{Entries, SandboxEntry};
use entry_indexes::EntryIndexes;
use gc::{GarbageCollector, GcParts};
use jiffy_api_types::SandboxState;
use jiffy_engine_api::{EngineDescription, Engines, Guest, SandboxSize, steps};
use jiffy_event_log::EventFeed;
use jiffy_fleet::Heads;
use jiffy_proto::agent::SiteSettings;
use observe::FigureSources;
use operations::{Operations, detached};
use parking_lot::Mutex;
use pool::Pool;
use ranked_lock::{LockRank, RankedMutex};
use snapshot_catalog::SnapshotCatalog;
use snapshot_engine::SnapshotEngines;
use snapshots::capture::Captures;
use snapshots::fetch_snapshot::FetchLocks;
use snapshots::snapshot_fold::SnapshotFolder;
use snapshots::snapshot_upkeep::SnapshotUpkeep;
use snapshots::upload::Uploads;
use snapshots::{snapshot_fold, snapshot_upkeep, take_snapshot};
use start_pacer::StartPacer;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Weak};
use std::time::Duration;
use template_snapshots::TemplateSnapshotState;
use tokio::sync::{Notify, Semaphore};

/// State that all clones of [`Sandboxes`] share.
struct SandboxesInner {
    engines: Engines,
    journal: Arc<Journal>,
    entries: Arc<RankedMutex<Entries>>,
    catalog: Arc<SnapshotCatalog>,
    snapshot_engines: Arc<SnapshotEngines>,
    /// Indexes over the records of sandboxes.
    indexes: Arc<EntryIndexes>,
    gc: GarbageCollector,
    pool: Pool,
    admission: Admission,
    start_pacer: StartPacer,
    metrics: Metrics,
    figure_sources: FigureSources,
    operations: Operations,
    /// Limits the guests that are halted and still being stopped.
    stopping_guests: Arc<Semaphore>,
    deadlines: Deadlines,
    template_snapshots: TemplateSnapshotState,
    fetch_locks: FetchLocks,
    upkeep: SnapshotUpkeep,
    /// Merges the files of removed snapshots into the files of their children.
    folder: Arc<SnapshotFolder>,
    captures: Captures,
    comparisons: ComparisonSlots,
    /// Heads: records in the store that decide which host may run a stored sandbox. `None` if
    /// sandboxes stay on their host.
    heads: Option<Arc<Heads>>,
    /// True if an earlier daemon of this data directory shared its sandboxes with other hosts.
    /// Heads may then exist although `heads` is `None`.
    has_shared: bool,
    /// True while some sandboxes must be compared with their heads before they are used.
    has_uncompared: AtomicBool,
    /// Notified when a sandbox was compared with its head.
    compared: Notify,
    /// Number of [`ResumeHold`]s.
    resume_holds: Arc<AtomicUsize>,
    /// Held while a sandbox that another host stored is registered, so that concurrent resumes
    /// register the sandbox once. Unrelated to the adoption of guests.
    adopting: Mutex<()>,
    /// Uploads of snapshots to the store.
    uploads: Arc<Uploads>,
    /// Quotas of owners. `None` if there are none.
    quota: Mutex<Option<Arc<dyn OwnerQuota>>>,
    /// Certificate authorities and proxy of all sandboxes.
    site: SiteSettings,
    /// Mounts volumes. `None` if this host has none.
    volumes: Option<Arc<dyn VolumeMounter>>,
    events: EventFeed,
    usage: UsageLedger,
}

/// Sandboxes of one host. Clones share their state. Requires a tokio runtime.
pub struct Sandboxes(Arc<SandboxesInner>);

impl Clone for Sandboxes {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// Reference that does not keep the sandboxes alive.
#[derive(Clone)]
pub struct WeakSandboxes(Weak<SandboxesInner>);

impl WeakSandboxes {
    /// Returns the sandboxes, if they still exist.
    pub fn upgrade(&self) -> Option<Sandboxes> {
        self.0.upgrade().map(Sandboxes)
    }
}

impl Sandboxes {
    /// Returns a reference that does not keep the sandboxes alive.
    pub fn downgrade(&self) -> WeakSandboxes {
        WeakSandboxes(Arc::downgrade(&self.0))
    }

    /// Opens the journal in `file`, recovers the state that a killed daemon left, and adopts the
    /// guests that are still running.
    pub async fn open(
        engines: Engines,
        file: &Path,
        options: HostOptions,
    ) -> Result<Self, OperationError> {
        let journal = OpenedJournal::read(file)?;
        Self::open_read(engines, async { Ok(journal) }, options).await
    }

    /// Like [`Self::open`], with a journal that is read concurrently.
    pub async fn open_read(
        engines: Engines,
        journal: impl Future<Output = Result<OpenedJournal, OperationError>>,
        options: HostOptions,
    ) -> Result<Self, OperationError> {
        // The directories are listed before the journal is awaited: both are read at the same time.
        let on_disk = recover::on_disk(&engines)?;
        let opened = journal.await?;
        let reader = options.reader.unwrap_or_else(|| {
            let data = opened.path.parent().unwrap_or(Path::new("/"));
            Arc::new(KernelReader::new(data))
        });
        let recovered = recover::recover(&engines, on_disk, opened, options.remote.is_some())?;
        let journal = Arc::new(recovered.journal);
        let (upkeep, upkeep_queue) = SnapshotUpkeep::new();
        let (folder, folds) = SnapshotFolder::new();
        let uploads = Uploads::new(
            options.remote.clone(),
            options.is_stock,
            journal.retractions()?,
        );
        let unreferenced = recovered.snapshots.iter().filter(|s| !s.retained);
        let unreferenced: Vec<String> = unreferenced.map(|s| s.id.clone()).collect();
        let (entries, indexes, snapshots) =
            recover::index(recovered.sandboxes, recovered.snapshots);
        // The indexes were just created, so no ledger was set yet and the call succeeds.
        let _ = indexes.usage.set(options.usage.clone());
        let catalog = Arc::new(SnapshotCatalog::new(snapshots, journal.clone()));
        let snapshot_engines = Arc::new(SnapshotEngines::new(engines.clone(), catalog.clone()));
        let (folder, uploads) = (Arc::new(folder), Arc::new(uploads));
        let gc = GarbageCollector::new(GcParts {
            catalog: catalog.clone(),
            engines: snapshot_engines.clone(),
            journal: journal.clone(),
            indexes: indexes.clone(),
            folder: folder.clone(),
            uploads: uploads.clone(),
        });
        let entries = Arc::new(RankedMutex::new(LockRank::Entries, entries));
        let deadlines = Deadlines::new(entries.clone(), indexes.clone());
        let this = Self(Arc::new(SandboxesInner {
            engines,
            journal,
            entries,
            catalog,
            indexes,
            gc,
            snapshot_engines,
            pool: Pool::new(options.warm),
            admission: Admission::new(options.limits, reader),
            start_pacer: StartPacer::new(),
            metrics: Metrics::new(),
            figure_sources: FigureSources::default(),
            operations: Operations::default(),
            template_snapshots: TemplateSnapshotState::new(&options.site),
            fetch_locks: FetchLocks::default(),
            stopping_guests: Arc::new(Semaphore::new(removal::MAX_STOPPING_GUESTS)),
            deadlines,
            upkeep,
            folder,
            captures: Captures::default(),
            comparisons: ComparisonSlots::default(),
            heads: options.heads.map(Arc::new),
            has_shared: options.has_shared,
            has_uncompared: AtomicBool::new(false),
            compared: Notify::new(),
            resume_holds: Arc::default(),
            adopting: Mutex::default(),
            uploads,
            quota: Mutex::default(),
            site: options.site,
            volumes: options.volumes,
            events: options.events,
            usage: options.usage,
        }));
        this.report_recovered(&recovered.changed);
        // The previous daemon may have crashed before it removed snapshots without users.
        this.0.gc.collect(unreferenced);
        this.adopt(recovered.orphans, recovered.storing).await?;
        // Remove these files after the adoption, which may register captured snapshots again: only
        // then are the files without a record known to be orphaned. The files need not wait for the
        // first collection pass.
        this.0.gc.remove_files(recovered.unknown);
        this.spawn_timeouts();
        this.spawn_sampling(options.sample);
        // A daemon that is killed before the first periodic write has a time to continue from.
        usage_writes::write_now(&this.0.usage);
        this.spawn_usage_writes();
        this.spawn_volume_servers();
        this.spawn_gc(options.gc_interval, options.lock);
        this.start_uploads();
        this.publish_earlier_pauses();
        snapshot_upkeep::begin(
            Arc::downgrade(&this.0),
            upkeep_queue,
            options.upkeep_interval,
        );
        snapshot_fold::begin(Arc::downgrade(&this.0), folds, options.upkeep_interval);
        Ok(this)
    }

    /// Returns all sandboxes, including killed ones, the oldest first.
    pub fn list(&self) -> Vec<Sandbox> {
        let mut records: Vec<_> = self.0.entries.lock().values().map(|e| e.record()).collect();
        // The entries are ordered by id.
        records.sort_by_key(|r| r.created_ms);
        records
    }

    /// Returns a sandbox by its id or a prefix of it.
    pub fn get(&self, id: &str) -> Result<Sandbox, OperationError> {
        Ok(self.0.entry(id)?.record())
    }

    /// Returns a sandbox by its complete id.
    pub fn find(&self, id: &str) -> Option<Sandbox> {
        self.0.find(id)
    }

    /// Calls `read` with the sandbox that has this complete id, without copying it.
    pub fn with_sandbox<T>(&self, id: &str, read: impl FnOnce(&Sandbox) -> T) -> Option<T> {
        let entry = self.0.entries.lock().get(id).cloned()?;
        Some(entry.with_record(read))
    }

    /// Waits until the operation in flight on a sandbox has ended, and returns the sandbox. A
    /// sandbox that is being killed counts as killed.
    pub async fn wait_decided(&self, id: &str) -> Option<Sandbox> {
        let entry = self.0.entries.lock().get(id).cloned()?;
        entry.wait_decided().await;
        if entry.is_ending() {
            return Some(entry.record_in(SandboxState::Killed));
        }
        Some(entry.record())
    }

    /// Waits until the state of a sandbox matches, at most `limit`. Returns the sandbox, even if
    /// its record was removed meanwhile.
    pub async fn wait(
        &self,
        id: &str,
        limit: Duration,
        matches: impl Fn(&SandboxState) -> bool,
    ) -> Result<Sandbox, OperationError> {
        let entry = self.0.entry(id)?;
        // Only the final state of a sandbox that is being killed ends the wait: the sandbox may be
        // broken for a moment before.
        let is_final = |state: &SandboxState| *state == SandboxState::Killed || !entry.is_ending();
        let until = entry.until(|record| is_final(&record.state) && matches(&record.state));
        match tokio::time::timeout(limit, until).await {
            Ok(record) => Ok(record),
            // The caller decides by the state whether the wait timed out.
            Err(_) => Ok(entry.record()),
        }
    }

    /// Returns a short description of the network of sandboxes.
    pub fn network(&self) -> String {
        self.0.engines.default_engine().network()
    }

    /// Returns descriptions of the engines of this host.
    pub fn engines(&self) -> Vec<EngineDescription> {
        self.0.engines.descriptions()
    }

    /// Reserves resources for a guest of `size`. Evicts guests of the warm pool if necessary.
    fn admit(&self, size: SandboxSize) -> Result<Reservation, OperationError> {
        let _step = steps::begin("admission");
        loop {
            match self.0.admission.admit(Occupant::Sandbox, size) {
                Ok(reservation) => return Ok(reservation),
                Err(refusal) => {
                    // Each iteration frees the resources of one warm-pool guest, so the loop ends.
                    if !refusal.short_of.is_freed_by_eviction() || !self.0.pool.evict() {
                        return Err(refusal.into());
                    }
                }
            }
        }
    }

    /// Stops all guests, and records their sandboxes as broken.
    pub async fn stop_all(&self) {
        self.0.pool.clear();
        let entries: Vec<_> = self.0.entries.lock().values().cloned().collect();
        for entry in entries.into_iter().filter(|e| e.guest().is_some()) {
            // Remove the guest from the entry first, so that the task of `watch` ignores the exit
            // of the guest.
            entry.meter();
            if let Some(guest) = entry.replace_guest(None) {
                guest.stop().await;
                let state = SandboxState::broken(recover::DAEMON_STOPPED);
                let record = entry.record_in(state);
                self.record_write_behind(&entry, record.clone());
                self.report_broken(&record);
            }
        }
    }

    /// Commits the record and `more` to the journal, then to memory. A sandbox that is being
    /// created is in memory only.
    fn commit(
        &self,
        entry: &SandboxEntry,
        record: Sandbox,
        more: &[JournalChange],
    ) -> Result<(), JournalError> {
        // A crash during a create thus leaves no record.
        if record.state != SandboxState::Creating {
            let _step = steps::begin("journal");
            let mut changes = vec![JournalChange::Sandbox(record.clone())];
            changes.extend_from_slice(more);
            self.0.journal.commit(&changes)?;
        }
        // Change the entry after the journal, so that readers see only states that survive a crash.
        entry.set_record(record);
        Ok(())
    }

    /// Like [`Self::commit`], for a change that has happened and cannot be undone. If the journal
    /// cannot be written, the change is written later, but is visible in memory at once.
    fn record_write_behind(&self, entry: &SandboxEntry, record: Sandbox) {
        self.0
            .journal
            .commit_write_behind(&[JournalChange::Sandbox(record.clone())]);
        entry.set_record(record);
    }

    /// Starts a task that marks the sandbox as broken when its guest exits by itself. Also starts
    /// the measurement of the sandbox's usage and its idle timeout.
    fn watch(&self, entry: &Arc<SandboxEntry>, guest: &Arc<dyn Guest>) {
        // Marks the reservation as started. An adopted guest has no reservation: it receives one
        // without a check, since it already uses its resources.
        entry.reserve_for_guest(|size| self.0.admission.reserve_existing(size));
        entry.start_meter();
        // The first sample is the basis of the processor usage of the next one.
        observe::sample(entry);
        self.start_idle_timeout(entry);
        let (entry, guest) = (Arc::downgrade(entry), guest.clone());
        // The task must not keep the sandboxes alive. After they are dropped no state is recorded.
        let this = Arc::downgrade(&self.0);
        tokio::spawn(async move {
            let end = guest.ended().await;
            let (Some(entry), Some(inner)) = (entry.upgrade(), this.upgrade()) else {
                return;
            };
            // Wait for the operation in flight, which may replace or stop the guest itself.
            let _op_guard = entry.op_lock().lock().await;
            // The operation replaced the guest, or a kill in flight records the final state.
            if !entry.is_guest(&guest) || entry.is_ending() {
                return;
            }
            // The console explains the exit, and would be lost with the guest.
            entry.retain_console(&guest.console_tail());
            entry.replace_guest(None);
            if entry.is_ending() {
                // The kill began after the check above, and records the final state.
                return;
            }
            let record = entry.record_in(broken_by_end(&end));
            let this = Self(inner);
            this.record_write_behind(&entry, record.clone());
            this.report_broken(&record);
        });
    }
}
