//! Template builder of a host: the state that all builds share. The submodules implement requests
//! for builds, their execution, and template names, tags and usage.
//!
//! A *permit* counts towards a limit until it is dropped.

mod copy;
mod error;
mod failure;
mod import;
mod job;
mod lifecycle;
mod log;
mod migrate;
mod names;
mod queue;
mod reconcile;
mod records;
mod rename;
mod request;
mod secrets;
mod ssh_clients;
mod stage_config;
mod step_cache;
mod step_key;
mod tags;
mod transfer;
mod uploads;
mod usage;
mod user;
mod waiting_builds;

pub use error::BuilderError;
pub use jiffy_image::DEFAULT_TAG;
pub use log::BuildProgress;
pub use names::{
    ResolvedBy, ResolvedTemplate, StoredTemplate, TemplateLookup, is_visible, resolve,
};
pub use records::{
    BuildRecord, BuildRecords, BuildStatus, FailureReason, LogLevel, LogLine, LogPosition,
    LogQuery, RecordError, TemplateRecord, WantedSize,
};
pub use request::BuildRequest;
pub use secrets::BuildSecrets;
pub use ssh_clients::SshClients;
pub use step_cache::{PrunableBuildCache, PrunedBuildCache};
pub use uploads::{
    FoundUpload, IncomingUpload, MAX_UPLOAD_BYTES, UploadError, UploadNaming, UploadStore,
};
pub use usage::{BuildUsage, WeakBuilder};
pub use waiting_builds::{MAX_WAITING_BUILDS, WAITING_BUILD_TIMEOUT};

use jiffy_image::{Home, Templates, UnpackLimits};
use jiffy_registry_pull::{PullQueue, Registries};
use jiffy_sandbox_manager::{OwnerQuota, Sandbox, Sandboxes};
use log::BuildLog;
use parking_lot::Mutex;
use queue::BuildQueue;
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use usage::TemplateUsage;

/// Metadata key of sandboxes that a build created.
const BUILD_METADATA_KEY: &str = "jiffy.build";
/// Maximum number of tags of one build.
const MAX_TAGS: usize = 100;
/// Maximum number of characters of a text in a message.
const MAX_PRINTED_CHARS: usize = 128;

/// Settings of the template builder.
#[derive(Debug, Clone)]
pub struct BuilderSettings {
    /// Maximum number of concurrent builds; others wait.
    pub at_once: usize,
    /// Time limit of a step.
    pub step_limit: Duration,
    /// Registry rules, and the network for pulls.
    pub registries: Registries,
    /// Limits of the changes that a build makes.
    pub limits: UnpackLimits,
    /// Retention time of unused steps and uploads. `None` if they are retained until a prune.
    pub cache_for: Option<Duration>,
    /// API keys that act for the host's owner. Used only to migrate a data directory from before
    /// templates had owners: the templates of these keys become templates of the host.
    pub host_keys: HashSet<String>,
}

impl Default for BuilderSettings {
    fn default() -> Self {
        Self {
            at_once: 2,
            step_limit: Duration::from_secs(3600),
            registries: Registries::default(),
            limits: UnpackLimits::default(),
            cache_for: Some(Duration::from_secs(14 * 24 * 3600)),
            host_keys: HashSet::new(),
        }
    }
}

/// Template builder of a host. Clones share their state.
pub struct Builder(Arc<BuilderInner>);

impl Clone for Builder {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// A build that is waiting for a permit or running.
struct RunningBuild {
    cancel: CancellationToken,
    /// Cancelled when the build and its sandboxes have terminated.
    ended: CancellationToken,
    log: Arc<BuildLog>,
    ssh: Arc<SshClients>,
}

// Lock order: `names_lock` before `running`.
pub(crate) struct BuilderInner {
    sandboxes: Sandboxes,
    templates: Templates,
    records: Arc<BuildRecords>,
    uploads: UploadStore,
    settings: BuilderSettings,
    queue: BuildQueue,
    /// Limits concurrent pulls from registries, in total and per key.
    pulls: PullQueue,
    /// Quotas of owners. `None` if unlimited.
    quota: Mutex<Option<Arc<dyn OwnerQuota>>>,
    template_usage: Mutex<TemplateUsage>,
    /// Waiting and running builds by build id.
    running: Mutex<HashMap<String, RunningBuild>>,
    /// Held while names are added or removed.
    names_lock: Mutex<()>,
    /// Locks by template: builds of one template run one after another.
    template_locks: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

impl Builder {
    /// Opens the builder of the data directory `home`. Marks unfinished builds of an earlier daemon
    /// as failed, and removes their sandboxes.
    pub async fn open(
        home: &Home,
        sandboxes: Sandboxes,
        settings: BuilderSettings,
    ) -> Result<Self, BuilderError> {
        let records = Arc::new(BuildRecords::open(home.path())?);
        // The tasks of these builds ended with the earlier daemon.
        records.fail_unfinished(&FailureReason {
            message:
                "the daemon was stopped during the build: build again to continue after the last \
                completed step"
                    .to_owned(),
            step: None,
        })?;
        let uploads = home.path().join("uploads");
        let builder = Self(Arc::new(BuilderInner {
            templates: Templates::new(home),
            records,
            uploads: UploadStore::open(uploads).map_err(BuilderError::Directory)?,
            queue: BuildQueue::new(settings.at_once),
            pulls: PullQueue::default(),
            settings,
            quota: Mutex::default(),
            template_usage: Mutex::default(),
            running: Mutex::default(),
            names_lock: Mutex::default(),
            template_locks: Mutex::default(),
            sandboxes,
        }));
        // Sandboxes outlive the daemon, but their builds do not.
        let of_build = |r: &Sandbox| r.settings().metadata.contains_key(BUILD_METADATA_KEY);
        let sandboxes = builder.0.sandboxes.index();
        for sandbox in sandboxes.all(of_build) {
            if let Err(e) = builder.0.sandboxes.remove(sandbox.id()).await {
                tracing::warn!(sandbox = sandbox.id(), error = %e, "cannot remove the sandbox of an earlier build");
            }
        }
        // The migration precedes the first request: the names of templates depend on their owners.
        builder.migrate().await?;
        builder.remove_unfinished_templates().await?;
        builder.spawn_waiting_gc();
        if let Some(unused_for) = builder.0.settings.cache_for {
            builder.spawn_prune(unused_for);
        }
        Ok(builder)
    }

    /// Returns the database of templates and builds.
    pub fn records(&self) -> &BuildRecords {
        &self.0.records
    }

    /// Returns the store of uploaded files.
    pub fn uploads(&self) -> &UploadStore {
        &self.0.uploads
    }
}

/// Runs blocking work on a separate thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, BuilderError> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.map_err(|e| BuilderError::Directory(io::Error::other(e)))
}

/// Removes control characters from `text` and truncates it for a message.
fn printable(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_control())
        .take(MAX_PRINTED_CHARS)
        .collect()
}
