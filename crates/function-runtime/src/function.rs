//! [`Function`]: one function in the tenant's process: its name, active version, limits and running
//! requests.
//!
//! A *direct* connection is passed from the daemon to the process of the tenant, which then serves
//! its requests without the gateway. A *permit* counts towards a limit until it is dropped. The
//! *world* of a module is the interface between the module and its host.

use crate::artifact::Digest;
use crate::core_world::CoreFunction;
use crate::fault::RequestFault;
use crate::http_world::HttpFunction;
use crate::logs::FunctionLog;
use crate::metrics::FunctionMetrics;
use jiffy_proto::function::{DirectAccess, FunctionLimits, LoadSettings, World};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};

/// Loaded version of a function.
pub(crate) struct Version {
    /// Digest of the compiled file.
    pub digest: Digest,
    pub code: VersionCode,
}

/// Code of a version, by world.
pub(crate) enum VersionCode {
    Core(CoreFunction),
    Http(HttpFunction),
}

impl Version {
    pub(crate) fn world(&self) -> World {
        match self.code {
            VersionCode::Core(_) => World::Core,
            VersionCode::Http(_) => World::Http,
        }
    }
}

/// Version and settings of a function at one moment. A change replaces the whole value, so that
/// each request sees values that belong together.
#[derive(Clone)]
pub(crate) struct Deployment {
    pub version: Arc<Version>,
    pub settings: Arc<LoadSettings>,
    pub enabled: bool,
    /// Access of direct requests.
    pub access: DirectAccess,
    /// One permit per concurrent request.
    permits: Arc<Semaphore>,
    /// Number of requests that wait for a permit, shared by all deployments of the function.
    waiting: Arc<AtomicU32>,
}

/// Function with its metrics and log, which are retained across versions.
pub(crate) struct Function {
    deployment: RwLock<Arc<Deployment>>,
    pub metrics: FunctionMetrics,
    pub log: Arc<FunctionLog>,
}

fn permits(limits: &FunctionLimits) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(
        usize::try_from(limits.concurrency).unwrap_or(1),
    ))
}

impl Function {
    pub(crate) fn new(version: Version, settings: LoadSettings) -> Self {
        let permits = permits(&settings.limits);
        let version = Arc::new(version);
        let waiting = Arc::default();
        let deployment = Deployment {
            version,
            settings: Arc::new(settings),
            enabled: true,
            access: DirectAccess::default(),
            permits,
            waiting,
        };
        Self {
            deployment: RwLock::new(Arc::new(deployment)),
            metrics: FunctionMetrics::default(),
            log: Arc::default(),
        }
    }

    /// Returns the current deployment. A request uses the deployment that was active when it
    /// started.
    pub(crate) fn deployment(&self) -> Arc<Deployment> {
        self.deployment
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Replaces the deployment by a changed copy.
    fn change(&self, change: impl FnOnce(&mut Deployment)) {
        let mut current = self
            .deployment
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let mut next = Deployment::clone(&current);
        change(&mut next);
        *current = Arc::new(next);
    }

    /// Replaces the version. Requests in flight complete on the previous version.
    pub(crate) fn swap(&self, version: Version, settings: LoadSettings) {
        self.change(|deployment| {
            deployment.version = Arc::new(version);
            replace_settings(deployment, settings);
        });
    }

    /// Replaces the limits.
    pub(crate) fn limit(&self, limits: FunctionLimits) {
        self.change(|deployment| {
            let settings = LoadSettings::clone(&deployment.settings);
            replace_settings(deployment, LoadSettings { limits, ..settings });
        });
    }

    /// Sets the access of direct requests.
    pub(crate) fn publish(&self, access: DirectAccess) {
        self.change(|deployment| deployment.access = access);
    }

    /// Enables or disables the function.
    pub(crate) fn enable(&self, enabled: bool) {
        self.change(|deployment| deployment.enabled = enabled);
    }
}

fn replace_settings(deployment: &mut Deployment, settings: LoadSettings) {
    if settings.limits.concurrency != deployment.settings.limits.concurrency {
        // Requests in flight hold permits of the old semaphore. Until they complete, the function
        // may run more requests than the new limit.
        deployment.permits = permits(&settings.limits);
    }
    deployment.settings = Arc::new(settings);
}

/// Request that waits for a permit.
struct WaitingRequest<'a>(&'a AtomicU32);

impl Drop for WaitingRequest<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Deployment {
    /// Waits for a permit to run.
    ///
    /// # Errors
    ///
    /// [`RequestFault::Busy`] if the queue is full, or if no permit is released in time.
    pub(crate) async fn admit(&self) -> Result<OwnedSemaphorePermit, RequestFault> {
        match self.permits.clone().try_acquire_owned() {
            Ok(permit) => return Ok(permit),
            Err(TryAcquireError::NoPermits | TryAcquireError::Closed) => {}
        }
        // The request is counted before the check, so that concurrent requests cannot exceed the
        // maximum length of the queue.
        // The counter protects no other data: `Relaxed` suffices.
        let before = self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waiting = WaitingRequest(&self.waiting);
        if before >= self.settings.limits.queue {
            return Err(RequestFault::Busy);
        }
        let wait = Duration::from_millis(self.settings.limits.queue_ms.into());
        let permit = tokio::time::timeout(wait, self.permits.clone().acquire_owned()).await;
        // The semaphore is never closed: an error means that the time has elapsed.
        permit.ok().and_then(Result::ok).ok_or(RequestFault::Busy)
    }
}
