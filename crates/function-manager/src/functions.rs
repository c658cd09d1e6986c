//! [`Functions`]: the functions of a host. Each *owner* (an API key, or the host's operator) has
//! one process, in which all functions of the owner run. The submodules implement the operations.
//!
//! A *permit* counts towards a limit until it is dropped. A daemon *adopts* the processes that
//! continued to run while no daemon ran.

mod deployment;
mod direct;
mod invocation;
mod loading;
mod module_store;
mod observe;
mod processes;
mod scheduled;

pub use module_store::LocatedModule;

use crate::compile_slots::CompileSlots;
use crate::egress::EgressSettings;
use crate::function_error::FunctionError;
use crate::function_record::FunctionRecord;
use crate::function_state::FunctionState;
use crate::function_store::FunctionStore;
use crate::owner;
use crate::running_process::RunningProcess;
use crate::start_backoff::StartBackoff;
use crate::tenant_process::TenantProcess;
use jiffy_confinement::Cgroups;
use jiffy_proto::function::{CompileLimits, TenantLimits};
use module_store::ModuleStore;
use parking_lot::RwLock;
use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use tokio::sync::Semaphore;

/// Directory of modules that are being received, next to the directories of owners.
const UPLOADS: &str = ".uploads";
/// Maximum number of an owner's modules that are being received, copied, or wait for deployment.
pub const MAX_UPLOADS: usize = 16;
/// Maximum number of modules being compiled, at most one per owner. This limits the memory of
/// compilers.
const MAX_COMPILERS: usize = 8;
/// Maximum number of compilers that run at the same time. The other compilers wait until a running
/// compiler exits or its time slice ends.
const MAX_RUNNING_COMPILERS: usize = 2;
/// Interval between maintenance passes over the processes.
const MAINTENANCE_INTERVAL: Duration = Duration::from_millis(500);

/// Settings of a host's functions.
#[derive(Debug, Clone)]
pub struct FunctionHostSettings {
    /// Directory of all functions, created on demand.
    pub directory: PathBuf,
    /// Path of the program `jiffy-functions`. `None` if functions are not available.
    pub program: Option<PathBuf>,
    /// True if processes are confined. False in tests on hosts without user namespaces.
    pub jailed: bool,
    /// Control groups that limit processes. `None` if processes have no control groups.
    pub cgroups: Option<Cgroups>,
    /// Limits of a process, and the method by which it clears the memory of an instance before the
    /// next request. A process that an earlier daemon started with another method is replaced.
    pub limits: TenantLimits,
    /// Limits of a compilation.
    pub compile: CompileLimits,
    /// Time without a request after which a process is stopped.
    pub idle: Duration,
    /// Time without a daemon after which a process exits.
    pub grace: Duration,
    /// Egress settings of functions.
    pub egress: EgressSettings,
}

/// Functions of a host. Clones share the same state.
#[derive(Debug, Clone)]
pub struct Functions(Arc<Shared>);

/// State shared by all clones of [`Functions`] and their tasks.
#[derive(Debug)]
struct Shared {
    settings: FunctionHostSettings,
    owners: RwLock<Owners>,
    /// Permits for modules that are being compiled.
    compilers: Semaphore,
    /// Slots of the compilers that run at the moment.
    compile_slots: CompileSlots,
    /// Shared store of modules. Unset if modules remain on this host.
    store: OnceLock<ModuleStore>,
}

/// Owners by API key and by the tag in public names.
#[derive(Debug, Default)]
struct Owners {
    /// Owners by API key. `None` is the host's owner.
    by_key: HashMap<Option<String>, Arc<Owner>>,
    /// Owners by the tag in the host names of their functions.
    by_tag: HashMap<String, Arc<Owner>>,
}

/// Functions of one owner, and the process that runs them.
#[derive(Debug)]
struct Owner {
    /// Id of the API key. `None` for the operator.
    key: Option<String>,
    store: FunctionStore,
    /// Functions by name.
    functions: RwLock<HashMap<String, Arc<FunctionState>>>,
    running: RwLock<Option<Arc<RunningProcess>>>,
    /// Held while the process is started or stopped. May be taken while `changing` is held.
    starting: tokio::sync::Mutex<StartBackoff>,
    /// Held while a function is changed.
    changing: tokio::sync::Mutex<()>,
    /// Held while a module is compiled, so that compilers of one owner do not delay other owners.
    compiling: tokio::sync::Mutex<()>,
    /// Permits for uploads of modules ([`MAX_UPLOADS`]).
    uploads: Arc<Semaphore>,
}

impl Owner {
    fn new(key: Option<String>, store: FunctionStore) -> Self {
        Self {
            key,
            store,
            functions: RwLock::default(),
            running: RwLock::default(),
            starting: tokio::sync::Mutex::default(),
            changing: tokio::sync::Mutex::default(),
            compiling: tokio::sync::Mutex::default(),
            uploads: Arc::new(Semaphore::new(MAX_UPLOADS)),
        }
    }

    fn function(&self, name: &str) -> Result<Arc<FunctionState>, FunctionError> {
        let functions = self.functions.read();
        let function = functions.get(name).cloned();
        function.ok_or_else(|| FunctionError::NotFound(name.to_owned()))
    }

    fn states(&self) -> Vec<Arc<FunctionState>> {
        self.functions.read().values().cloned().collect()
    }

    /// Removes files that no record references. `is_start` is true at the start of the daemon, when
    /// no compiler is writing files yet.
    fn gc(&self, is_start: bool) {
        let records: Vec<_> = self.states().iter().map(|state| state.record()).collect();
        self.store
            .gc(records.iter().map(|record| &**record), is_start);
    }
}

impl Functions {
    /// Opens the functions of a host, and adopts the processes of an earlier daemon. Blocks; must
    /// be called inside a tokio runtime.
    #[must_use]
    pub fn open(settings: FunctionHostSettings) -> Self {
        let functions = Self(Arc::new(Shared {
            settings,
            owners: RwLock::default(),
            compilers: Semaphore::new(MAX_COMPILERS),
            compile_slots: CompileSlots::new(MAX_RUNNING_COMPILERS),
            store: OnceLock::new(),
        }));
        // Remove modules of interrupted deployments. The directory usually does not exist.
        let _ = fs::remove_dir_all(functions.0.settings.directory.join(UPLOADS));
        let directories = fs::read_dir(&functions.0.settings.directory);
        for entry in directories.into_iter().flatten().flatten() {
            functions.open_owner(entry.path());
        }
        // Pass a weak reference, because the task must not keep the functions alive.
        tokio::spawn(maintain(Arc::downgrade(&functions.0)));
        functions
    }

    /// Opens the functions of one owner at the start of the daemon, from their directory. Adopts
    /// the owner's process if it still runs.
    fn open_owner(&self, directory: PathBuf) {
        let store = FunctionStore::new(directory);
        let stored = store.records();
        let records = stored.records;
        let process = TenantProcess::adopt(store.directory()).map(|mut process| {
            process.set_egress(self.0.settings.egress.clone());
            process
        });
        let Some(first) = records.first() else {
            // The first deployment was interrupted before it committed a record, or no record can
            // be read. `remove_all` preserves the files in the second case. Dropping the process
            // kills it.
            drop(process);
            store.remove_all();
            return;
        };
        let key = first.owner.clone();
        // A directory that was copied or renamed must not be used: an owner would receive the
        // process and machine code of another owner.
        if store.directory().file_name() != Some(owner::directory_name(key.as_deref()).as_ref()) {
            tracing::error!(
                directory = %store.directory().display(),
                "ignoring functions: the name of the directory does not match their owner"
            );
            return;
        }
        let owner = Owner::new(key.clone(), store);
        // A record of another owner in this directory was not written by the daemon.
        let states = records.into_iter().filter(|record| record.owner == key);
        *owner.functions.write() = states
            .map(|record| (record.name.clone(), Arc::new(FunctionState::new(record))))
            .collect();
        let is_start = true;
        owner.gc(is_start);
        if let Some(process) = process {
            let has_configured_reset = process.reset() == self.0.settings.limits.reset;
            let running = Arc::new(RunningProcess::new(process, owner.store.directory()));
            *owner.running.write() = Some(running.clone());
            // The process may have logs and metrics from the time without a daemon.
            for state in owner.states() {
                state.ran.store(true, std::sync::atomic::Ordering::Release);
            }
            if !has_configured_reset {
                tracing::info!(
                    pid = running.process.id(),
                    reset = running.process.reset().word(),
                    "stopping a function process: the configured method of clearing memory has changed"
                );
                owner.stop(running, &self.0);
            }
        }
        self.0.owners.write().add(Arc::new(owner));
    }

    /// Returns whether the host can run functions.
    #[must_use]
    pub fn is_installed(&self) -> bool {
        self.0.settings.program.is_some()
    }

    /// Returns the owner with this key. An error names the function `name`.
    fn existing_owner(&self, key: Option<&str>, name: &str) -> Result<Arc<Owner>, FunctionError> {
        let owners = self.0.owners.read();
        let owner = owners.by_key.get(&key.map(str::to_owned)).cloned();
        owner.ok_or_else(|| FunctionError::NotFound(name.to_owned()))
    }

    /// Returns an owner. Adds the owner if the key is unknown.
    fn owner(&self, key: Option<&str>) -> Result<Arc<Owner>, FunctionError> {
        let mut owners = self.0.owners.write();
        if let Some(owner) = owners.by_key.get(&key.map(str::to_owned)) {
            return Ok(owner.clone());
        }
        let directory = self.0.settings.directory.join(owner::directory_name(key));
        let owner = Arc::new(Owner::new(
            key.map(str::to_owned),
            FunctionStore::new(directory),
        ));
        owners.add(owner.clone());
        Ok(owner)
    }

    fn owners(&self) -> Vec<Arc<Owner>> {
        self.0.owners.read().by_key.values().cloned().collect()
    }

    /// Returns a function of an owner by its name.
    pub fn find(
        &self,
        key: Option<&str>,
        name: &str,
    ) -> Result<Arc<FunctionRecord>, FunctionError> {
        let owner = self.existing_owner(key, name)?;
        Ok(owner.function(name)?.record())
    }

    /// Returns a function by its public name, the label below `fn.DOMAIN`.
    pub fn find_label(&self, label: &str) -> Result<Arc<FunctionRecord>, FunctionError> {
        let unknown = || FunctionError::NotFound(label.to_owned());
        let (name, tag) = owner::parse_label(label).ok_or_else(unknown)?;
        let owner = self.0.owners.read().by_tag.get(tag).cloned();
        let state = owner.ok_or_else(unknown)?.function(name);
        Ok(state.map_err(|_| unknown())?.record())
    }

    /// Returns all functions, sorted by owner and name.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<FunctionRecord>> {
        let owners = self.owners();
        let states = owners.iter().flat_map(|owner| owner.states());
        let mut records: Vec<_> = states.map(|state| state.record()).collect();
        records.sort_by(|a, b| (&a.owner, &a.name).cmp(&(&b.owner, &b.name)));
        records
    }

    /// Returns the disk space of an owner's modules and their machine code in bytes.
    #[must_use]
    pub fn disk_bytes(&self, key: Option<&str>) -> u64 {
        let Ok(owner) = self.existing_owner(key, "") else {
            return 0;
        };
        let records: Vec<_> = owner.states().iter().map(|state| state.record()).collect();
        let versions = records.iter().flat_map(|record| &record.versions);
        // Versions with the same module share its files.
        let modules: HashMap<&str, u64> = versions
            .map(|v| (v.module.as_str(), v.bytes.saturating_add(v.artifact.bytes)))
            .collect();
        modules
            .values()
            .fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Returns the number of an owner's functions.
    #[must_use]
    pub fn count(&self, key: Option<&str>) -> usize {
        let owner = self.existing_owner(key, "");
        owner.map_or(0, |owner| owner.functions.read().len())
    }

    /// Creates and returns the directory of uploads.
    fn uploads(&self) -> Result<PathBuf, FunctionError> {
        let path = self.0.settings.directory.join(UPLOADS);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&path)
            .map_err(FunctionError::file(&path))?;
        Ok(path)
    }
}

impl Owners {
    fn add(&mut self, owner: Arc<Owner>) {
        let tag = owner::tag(owner.key.as_deref());
        self.by_tag.insert(tag, owner.clone());
        self.by_key.insert(owner.key.clone(), owner);
    }
}

/// Stops idle processes and runs schedules until the functions are dropped.
async fn maintain(shared: Weak<Shared>) {
    let mut tick = tokio::time::interval(MAINTENANCE_INTERVAL);
    // After a suspension of the host, one pass suffices.
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let functions = Functions(shared);
        functions.run_schedules(jiff::Timestamp::now());
        for owner in functions.owners() {
            functions.maintain_process(&owner).await;
        }
    }
}
