//! [`Tenant`]: the functions in this process by name, the engine that runs them, and the resources
//! that they share.
//!
//! A *tenant* is one owner of functions. Each tenant has a process of its own (`jiffy-functions
//! serve`). A *direct* connection is passed from the daemon to the process of the tenant, which
//! then serves its requests without the gateway. The *world* of a module is the interface between
//! the module and its host.

use crate::artifact::{self, ArtifactError, Digest};
use crate::cpu_meter::{MeteredGuest, RequestUsage};
use crate::egress::Egress;
use crate::epoch_ticker::EpochTicker;
use crate::fault::RequestFault;
use crate::function::{Function, Version, VersionCode};
use crate::http_world::{self, HttpState};
use crate::memory_limiter::{MemoryBudget, MemoryLimiter};
use crate::world::{self, WorldError};
use crate::{core_world, engine};
use jiffy_proto::function::{
    DirectAccess, FunctionLimits, LimitError, LoadSettings, LogEntry, MAX_FUNCTIONS,
    MetricsSnapshot, TenantLimits, World,
};
use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::Semaphore;
use wasmtime::component::{Component, Linker};
use wasmtime::{Engine, Module};

/// Maximum length of a function's name in bytes.
const MAX_NAME_BYTES: usize = 64;
/// Timeout of the instantiation that validates a version.
const VALIDATION_TIMEOUT: Duration = Duration::from_secs(15);
/// Processor time limit of that instantiation, in which start functions run.
const VALIDATION_CPU_TIME: Duration = Duration::from_millis(500);

/// Error: a version or setting is rejected.
#[derive(Debug, thiserror::Error)]
pub enum DeployError {
    /// The name of a function is not valid.
    #[error("a function's name has 1 to {MAX_NAME_BYTES} characters of a-z, 0-9, - and _")]
    Name,
    /// The function does not exist.
    #[error("function {0:?} does not exist")]
    NotFound(String),
    /// The tenant has too many functions.
    #[error("a tenant may have at most {MAX_FUNCTIONS} functions")]
    TooMany,
    /// A limit is out of its range.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// This process may not load the file.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// The exports do not match the world.
    #[error(transparent)]
    World(#[from] WorldError),
    /// The module cannot be loaded or instantiated.
    #[error("the module cannot be {what}: {reason}")]
    Load {
        /// Step that failed.
        what: &'static str,
        /// Reason reported by Wasmtime.
        reason: String,
    },
}

/// Returns a function that converts an error of Wasmtime, truncated to 2,000 characters.
fn failed(what: &'static str) -> impl Fn(wasmtime::Error) -> DeployError {
    move |error| DeployError::Load {
        what,
        reason: format!("{error:#}").chars().take(2000).collect(),
    }
}

/// A tenant's engine and functions.
pub struct Tenant {
    engine: Engine,
    /// Shared by all functions, because the linker occupies tens of KiB.
    http_linker: Linker<HttpState>,
    /// Fingerprint of the engine, which a compiled file must contain.
    fingerprint: Digest,
    /// Digest of the owner's name, which a compiled file must contain.
    owner: Digest,
    // The poisoning of this lock is ignored: the process aborts at a panic.
    functions: RwLock<HashMap<String, Arc<Function>>>,
    budget: Arc<MemoryBudget>,
    /// One permit per concurrent request of all functions.
    slots: Arc<Semaphore>,
    egress: Arc<Egress>,
    limits: TenantLimits,
}

impl Tenant {
    /// Creates a tenant without functions. The engine must come from [`engine::running`].
    pub fn new(owner: &str, limits: TenantLimits, engine: Engine) -> wasmtime::Result<Self> {
        Ok(Self {
            fingerprint: engine::fingerprint(&engine::compiling()?),
            owner: artifact::owner_digest(owner),
            functions: RwLock::default(),
            budget: Arc::new(MemoryBudget::new(limits.memory_bytes)),
            slots: Arc::new(Semaphore::new(usize::try_from(limits.slots).unwrap_or(1))),
            http_linker: http_world::linker(&engine)?,
            engine,
            egress: Arc::default(),
            limits,
        })
    }

    /// Returns the fingerprint of the engine that compiled files must match.
    #[must_use]
    pub fn fingerprint(&self) -> &Digest {
        &self.fingerprint
    }

    /// Returns the engine that runs requests.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(crate) fn limits(&self) -> &TenantLimits {
        &self.limits
    }

    pub(crate) fn budget(&self) -> &Arc<MemoryBudget> {
        &self.budget
    }

    pub(crate) fn egress(&self) -> &Arc<Egress> {
        &self.egress
    }

    pub(crate) fn slots(&self) -> &Arc<Semaphore> {
        &self.slots
    }

    /// Returns the bytes in use for linear memory and bodies of running requests.
    #[must_use]
    pub fn memory_used(&self) -> u64 {
        self.budget.used()
    }

    pub(crate) fn function(&self, name: &str) -> Option<Arc<Function>> {
        let functions = self
            .functions
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        functions.get(name).cloned()
    }

    fn existing(&self, name: &str) -> Result<Arc<Function>, DeployError> {
        self.function(name)
            .ok_or_else(|| DeployError::NotFound(name.to_owned()))
    }

    /// Loads a compiled file, validates it by an instantiation, and activates its version. If this
    /// fails, the previous version remains active.
    pub async fn load(
        &self,
        ticker: &EpochTicker,
        name: &str,
        file: &[u8],
        digest: &Digest,
        settings: LoadSettings,
    ) -> Result<World, DeployError> {
        let valid = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_';
        if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(valid) {
            return Err(DeployError::Name);
        }
        settings.limits.check()?;
        let (header, code) = artifact::check(file, digest, &self.fingerprint, &self.owner)?;
        let version = Version {
            digest: *digest,
            code: self.deserialize(header.world, code)?,
        };
        // Validate without the lock: requests must not wait for an instantiation.
        self.validate(ticker, &version, &settings).await?;
        let mut functions = self
            .functions
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        match functions.get(name) {
            Some(function) => function.swap(version, settings),
            // New versions of existing functions are always accepted.
            None if functions.len() >= MAX_FUNCTIONS => return Err(DeployError::TooMany),
            None => {
                let function = Arc::new(Function::new(version, settings));
                functions.insert(name.to_owned(), function);
            }
        }
        Ok(header.world)
    }

    /// Loads machine code into the engine, and resolves its imports and exports.
    fn deserialize(&self, world: World, code: &[u8]) -> Result<VersionCode, DeployError> {
        let unloadable = failed("loaded");
        match world {
            World::Core => {
                // SAFETY: `artifact::check` has verified the digest that the daemon recorded when a
                // compiler with this engine's settings wrote the file for this tenant. `code` is a
                // private copy that cannot have changed since.
                let module =
                    unsafe { Module::deserialize(&self.engine, code) }.map_err(&unloadable)?;
                world::check_core(&module)?;
                core_world::prepare(&module)
                    .map(VersionCode::Core)
                    .map_err(unloadable)
            }
            World::Http => {
                // SAFETY: see the deserialization of the module above.
                let component =
                    unsafe { Component::deserialize(&self.engine, code) }.map_err(&unloadable)?;
                world::check_http(&component)?;
                http_world::prepare(&self.http_linker, &component)
                    .map(VersionCode::Http)
                    .map_err(unloadable)
            }
        }
    }

    /// Instantiates a version within the limits of a request, and discards the instance.
    async fn validate(
        &self,
        ticker: &EpochTicker,
        version: &Version,
        settings: &LoadSettings,
    ) -> Result<(), DeployError> {
        let usage = Arc::new(RequestUsage::default());
        let limiter =
            MemoryLimiter::new(&self.budget, usage.clone(), settings.limits.memory_bytes());
        // Without a running guest, the ticker ends no epochs, and a start function that loops would
        // never yield.
        let _running = ticker.enter();
        let instantiation = async {
            let result = match &version.code {
                VersionCode::Core(function) => {
                    function.instantiate_once(&self.engine, limiter).await
                }
                VersionCode::Http(function) => {
                    function
                        .instantiate_once(&self.engine, limiter, settings)
                        .await
                }
            };
            Ok(result)
        };
        let instantiation = pin!(instantiation);
        let instantiation = MeteredGuest::new(instantiation, &usage, VALIDATION_CPU_TIME);
        let rejected = |reason: &str| DeployError::Load {
            what: "instantiated",
            reason: reason.to_owned(),
        };
        // The outer result is of the timeout, the next one of the limit of processor time, and the
        // inner one of the instantiation.
        match tokio::time::timeout(VALIDATION_TIMEOUT, instantiation).await {
            Ok(Ok(result)) => result.map_err(failed("instantiated")),
            Ok(Err(RequestFault::Cpu)) => Err(rejected(
                "its start function exceeded the processor time limit",
            )),
            Ok(Err(fault)) => Err(rejected(&fault.to_string())),
            Err(_) => Err(rejected("its start function timed out")),
        }
    }

    /// Replaces the limits of a function.
    pub fn limit(&self, name: &str, limits: FunctionLimits) -> Result<(), DeployError> {
        limits.check()?;
        self.existing(name)?.limit(limits);
        Ok(())
    }

    /// Sets the access of direct requests to a function.
    pub fn publish(&self, name: &str, access: DirectAccess) -> Result<(), DeployError> {
        self.existing(name)?.publish(access);
        Ok(())
    }

    /// Enables or disables a function.
    pub fn enable(&self, name: &str, enabled: bool) -> Result<(), DeployError> {
        self.existing(name)?.enable(enabled);
        Ok(())
    }

    /// Removes a function. Requests in flight complete.
    pub fn remove(&self, name: &str) -> Result<(), DeployError> {
        let mut functions = self
            .functions
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let removed = functions.remove(name);
        removed
            .map(drop)
            .ok_or_else(|| DeployError::NotFound(name.to_owned()))
    }

    /// Returns the metrics of a function.
    pub fn metrics(&self, name: &str) -> Result<MetricsSnapshot, DeployError> {
        Ok(self.existing(name)?.metrics.snapshot())
    }

    /// Returns the entries of a function's log from `sequence` on, as many as fit in `max` bytes of
    /// JSON, but at least one if any exists.
    pub fn logs(
        &self,
        name: &str,
        sequence: u64,
        max: usize,
    ) -> Result<Vec<LogEntry>, DeployError> {
        Ok(self.existing(name)?.log.read(sequence, max))
    }

    /// Returns the world and the digest of the active version.
    pub fn version(&self, name: &str) -> Result<(World, Digest), DeployError> {
        let deployment = self.existing(name)?.deployment();
        Ok((deployment.version.world(), deployment.version.digest))
    }
}
