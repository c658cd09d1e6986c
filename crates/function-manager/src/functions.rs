//! Functions of a host.

mod deployment;
mod direct;
mod invocation;
mod loading;
mod module_store;
mod observe;
mod processes;
mod scheduled;

pub use module_store::FoundModule;

use crate::compile_turns::CompileTurns;
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

/// Directory of modules that arrive, beside those of owners.
const UPLOADS: &str = ".uploads";
/// Modules of an owner that arrive, are copied, or wait for their deployment, at once.
pub const MAX_UPLOADS: usize = 16;
/// Modules that are being compiled, one of an owner at most: this bounds the memory of compilers.
const MAX_COMPILERS: usize = 8;
/// Compilers that run at once. Others are stopped, and have their turns.
const MAX_RUNNING_COMPILERS: usize = 2;
/// Interval at which processes are looked after.
const UPKEEP_INTERVAL: Duration = Duration::from_millis(500);

/// Settings of a host's functions.
#[derive(Debug, Clone)]
pub struct FunctionHostSettings {
    /// Directory of functions; made when it is needed.
    pub directory: PathBuf,
    /// Program `jiffy-functions`; none: functions are refused.
    pub program: Option<PathBuf>,
    /// False for tests of hosts that allow no namespaces.
    pub jailed: bool,
    /// Control groups that limit processes; none: they are not limited.
    pub cgroups: Option<Cgroups>,
    /// Limits of a process, and the reset of its slots. Processes of another reset that an earlier
    /// daemon left are replaced.
    pub limits: TenantLimits,
    /// Limits of a compilation.
    pub compile: CompileLimits,
    /// Time without a request after which a process ends.
    pub idle: Duration,
    /// Time without a daemon after which it ends.
    pub grace: Duration,
    /// Hosts that functions may reach if they list them.
    pub egress: EgressSettings,
}

/// Functions of a host. Clones are the same.
#[derive(Debug, Clone)]
pub struct Functions(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    settings: FunctionHostSettings,
    owners: RwLock<Owners>,
    compilers: Semaphore,
    compile_turns: CompileTurns,
    /// None: modules stay on this host.
    store: OnceLock<ModuleStore>,
}

#[derive(Debug, Default)]
struct Owners {
    by_key: HashMap<Option<String>, Arc<Owner>>,
    by_tag: HashMap<String, Arc<Owner>>,
}

/// Functions of one owner, and the process that runs them.
#[derive(Debug)]
struct Owner {
    /// Id of the API key; none: the host's owner.
    key: Option<String>,
    store: FunctionStore,
    functions: RwLock<HashMap<String, Arc<FunctionState>>>,
    running: RwLock<Option<Arc<RunningProcess>>>,
    /// Held while the process starts or ends.
    starting: tokio::sync::Mutex<StartBackoff>,
    /// Held while a function changes.
    changing: tokio::sync::Mutex<()>,
    /// Held while a module is compiled: compilers of one owner do not delay those of others.
    compiling: tokio::sync::Mutex<()>,
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
        let found = functions.get(name).cloned();
        found.ok_or_else(|| FunctionError::NotFound(name.to_owned()))
    }

    fn states(&self) -> Vec<Arc<FunctionState>> {
        self.functions.read().values().cloned().collect()
    }

    fn gc(&self, is_start: bool) {
        let records: Vec<_> = self.states().iter().map(|state| state.record()).collect();
        self.store
            .gc(records.iter().map(|record| &**record), is_start);
    }
}

impl Functions {
    /// Opens the functions of a host, and takes over the processes that an earlier daemon left.
    /// Blocks; must be called inside a tokio runtime.
    #[must_use]
    pub fn open(settings: FunctionHostSettings) -> Self {
        let functions = Self(Arc::new(Shared {
            settings,
            owners: RwLock::default(),
            compilers: Semaphore::new(MAX_COMPILERS),
            compile_turns: CompileTurns::new(MAX_RUNNING_COMPILERS),
            store: OnceLock::new(),
        }));
        // Modules whose deployment was cut off.
        let _ = fs::remove_dir_all(functions.0.settings.directory.join(UPLOADS));
        let directories = fs::read_dir(&functions.0.settings.directory);
        for entry in directories.into_iter().flatten().flatten() {
            functions.open_owner(entry.path());
        }
        tokio::spawn(look_after(Arc::downgrade(&functions.0)));
        functions
    }

    fn open_owner(&self, directory: PathBuf) {
        let store = FunctionStore::new(directory);
        let records = store.records();
        let process = TenantProcess::adopt(store.directory()).map(|mut process| {
            process.set_egress(self.0.settings.egress.clone());
            process
        });
        let Some(first) = records.first() else {
            // The first deployment was cut off.
            drop(process);
            store.remove_all();
            return;
        };
        let key = first.owner.clone();
        if store.directory().file_name() != Some(owner::directory_name(key.as_deref()).as_ref()) {
            tracing::error!("{} is of no owner", store.directory().display());
            return;
        }
        let owner = Owner::new(key.clone(), store);
        let states = records.into_iter().filter(|record| record.owner == key);
        *owner.functions.write() = states
            .map(|record| (record.name.clone(), Arc::new(FunctionState::new(record))))
            .collect();
        owner.gc(true);
        if let Some(process) = process {
            let is_wanted = process.reset() == self.0.settings.limits.reset;
            let running = Arc::new(RunningProcess::new(process, owner.store.directory()));
            *owner.running.write() = Some(running.clone());
            // Logs and counts of the time without a daemon.
            for state in owner.states() {
                state.ran.store(true, std::sync::atomic::Ordering::Release);
            }
            if !is_wanted {
                tracing::info!(
                    "ending the process {} of functions: its reset is {}",
                    running.process.id(),
                    running.process.reset().word()
                );
                owner.end(running, &self.0);
            }
        }
        self.0.owners.write().add(Arc::new(owner));
    }

    /// True if the host can run functions.
    #[must_use]
    pub fn is_installed(&self) -> bool {
        self.0.settings.program.is_some()
    }

    fn existing_owner(&self, key: Option<&str>, name: &str) -> Result<Arc<Owner>, FunctionError> {
        let owners = self.0.owners.read();
        let found = owners.by_key.get(&key.map(str::to_owned)).cloned();
        found.ok_or_else(|| FunctionError::NotFound(name.to_owned()))
    }

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

    /// Function of an owner by its name.
    pub fn find(
        &self,
        key: Option<&str>,
        name: &str,
    ) -> Result<Arc<FunctionRecord>, FunctionError> {
        let owner = self.existing_owner(key, name)?;
        Ok(owner.function(name)?.record())
    }

    /// Function by its public name, the label below `fn.DOMAIN`.
    pub fn find_label(&self, label: &str) -> Result<Arc<FunctionRecord>, FunctionError> {
        let unknown = || FunctionError::NotFound(label.to_owned());
        let (name, tag) = owner::parse_label(label).ok_or_else(unknown)?;
        let owner = self.0.owners.read().by_tag.get(tag).cloned();
        let state = owner.ok_or_else(unknown)?.function(name);
        Ok(state.map_err(|_| unknown())?.record())
    }

    /// All functions, by owner and name.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<FunctionRecord>> {
        let owners = self.owners();
        let states = owners.iter().flat_map(|owner| owner.states());
        let mut records: Vec<_> = states.map(|state| state.record()).collect();
        records.sort_by(|a, b| (&a.owner, &a.name).cmp(&(&b.owner, &b.name)));
        records
    }

    /// Bytes on disk of an owner's modules and their machine code.
    #[must_use]
    pub fn disk_bytes(&self, key: Option<&str>) -> u64 {
        let Ok(owner) = self.existing_owner(key, "") else {
            return 0;
        };
        let records: Vec<_> = owner.states().iter().map(|state| state.record()).collect();
        let versions = records.iter().flat_map(|record| &record.versions);
        let modules: HashMap<&str, u64> = versions
            .map(|v| (v.module.as_str(), v.bytes.saturating_add(v.artifact.bytes)))
            .collect();
        modules
            .values()
            .fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Number of an owner's functions.
    #[must_use]
    pub fn count(&self, key: Option<&str>) -> usize {
        let owner = self.existing_owner(key, "");
        owner.map_or(0, |owner| owner.functions.read().len())
    }

    fn uploads(&self) -> Result<PathBuf, FunctionError> {
        let path = self.0.settings.directory.join(UPLOADS);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&path);
        made.map_err(FunctionError::file(&path))?;
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

/// Ends idle processes and runs schedules until the functions are dropped.
async fn look_after(shared: Weak<Shared>) {
    let mut tick = tokio::time::interval(UPKEEP_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let functions = Functions(shared);
        functions.run_schedules(jiff::Timestamp::now());
        for owner in functions.owners() {
            functions.upkeep(&owner).await;
        }
    }
}
