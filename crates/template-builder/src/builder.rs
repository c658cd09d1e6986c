//! Template builder of a host: builds that clients asked for, and their execution.

mod copy;
mod error;
mod failure;
mod import;
mod job;
mod lifecycle;
mod log;
mod migrate;
mod names;
mod pending_ends;
mod queue;
mod reconcile;
mod records;
mod request;
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
pub use names::{ResolvedBy, ResolvedTemplate, VisibilityLookup, is_visible, resolve};
pub use records::{
    BuildRecord, BuildRecords, BuildStatus, FailureReason, LogLevel, LogLine, LogQuery,
    RecordError, TemplateRecord, WantedSize, now_ms,
};
pub use request::BuildRequest;
pub use step_cache::{PrunableBuildCache, PrunedBuildCache};
pub use uploads::{IncomingUpload, MAX_UPLOAD_BYTES, UploadError, UploadStore};
pub use usage::{BuildUsage, WeakBuilder};
pub use waiting_builds::{MAX_WAITING_BUILDS, WAITING_BUILD_TIMEOUT};

use jiffy_engine::Engine;
use jiffy_host::{OwnerQuota, Sandboxes};
use jiffy_image::{Home, Limits, Templates};
use jiffy_pull::{Queue, Registries};
use log::BuildLog;
use queue::BuildQueue;
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use usage::TemplateUsage;

/// By which word of its metadata a sandbox is known as one that a build made.
const BUILD_METADATA_KEY: &str = "jiffy.build";
/// Most tags of one build.
const MAX_TAGS: usize = 100;

#[derive(Debug, Clone)]
pub struct BuilderSettings {
    /// Builds at once; others wait.
    pub at_once: usize,
    /// How long a step may take.
    pub step_limit: Duration,
    /// Rules about registries, and the network they are asked from.
    pub registries: Registries,
    /// Bounds for what a build changes.
    pub limits: Limits,
    /// How long steps and uploads are kept that no build uses; none: until somebody removes them.
    pub cache_for: Option<Duration>,
    /// API keys that act for the host's owner. Templates that are recorded as theirs become the
    /// host's when a data directory of before templates had owners is taken over.
    pub host_keys: HashSet<String>,
}

impl Default for BuilderSettings {
    fn default() -> Self {
        Self {
            at_once: 2,
            step_limit: Duration::from_secs(3600),
            registries: Registries::default(),
            limits: Limits::default(),
            cache_for: Some(Duration::from_secs(14 * 24 * 3600)),
            host_keys: HashSet::new(),
        }
    }
}

/// The builder of a host. Clones are the same.
pub struct Builder<E: Engine>(Arc<BuilderInner<E>>);

impl<E: Engine> Clone for Builder<E> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// A build that goes on.
struct RunningBuild {
    cancel: CancellationToken,
    log: Arc<BuildLog>,
}

pub(crate) struct BuilderInner<E: Engine> {
    sandboxes: Sandboxes<E>,
    templates: Templates,
    records: Arc<BuildRecords>,
    uploads: UploadStore,
    settings: BuilderSettings,
    queue: BuildQueue,
    pulls: Queue,
    /// Budgets of owners; none: they have none.
    quota: Mutex<Option<Arc<dyn OwnerQuota>>>,
    template_usage: Mutex<TemplateUsage>,
    running: Mutex<HashMap<String, RunningBuild>>,
    /// Held while names are entered or forgotten.
    naming: Mutex<()>,
    /// Builds of one template wait for each other.
    turns: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

impl<E: Engine> Builder<E> {
    /// The builder of the host with the data directory `home`. Builds that another daemon left behind are over, and so are their
    /// sandboxes.
    pub async fn open(
        home: &Home,
        sandboxes: Sandboxes<E>,
        settings: BuilderSettings,
    ) -> Result<Self, BuilderError> {
        let records = Arc::new(BuildRecords::open(home.path())?);
        records.abandon(&FailureReason {
            message: "the daemon was stopped while it built: build again, and it goes on after the last step that was done".to_owned(),
            step: None,
        })?;
        let uploads = home.path().join("uploads");
        let builder = Self(Arc::new(BuilderInner {
            templates: Templates::new(home),
            records,
            uploads: UploadStore::open(uploads).map_err(BuilderError::Directory)?,
            queue: BuildQueue::new(settings.at_once),
            pulls: Queue::default(),
            settings,
            quota: Mutex::default(),
            template_usage: Mutex::default(),
            running: Mutex::default(),
            naming: Mutex::default(),
            turns: Mutex::default(),
            sandboxes,
        }));
        for left in builder.0.sandboxes.list() {
            if left.terms.metadata.contains_key(BUILD_METADATA_KEY)
                && let Err(e) = builder.0.sandboxes.remove(&left.id).await
            {
                tracing::warn!("sandbox {} of an earlier build stays: {e}", left.id);
            }
        }
        builder.migrate().await?;
        builder.remove_unfinished().await?;
        builder.keep_waiting_bounded();
        if let Some(unused_for) = builder.0.settings.cache_for {
            builder.keep_pruned(unused_for);
        }
        Ok(builder)
    }

    /// What it knows.
    pub fn records(&self) -> &BuildRecords {
        &self.0.records
    }

    /// Files that clients send.
    pub fn uploads(&self) -> &UploadStore {
        &self.0.uploads
    }
}

/// Does what blocks elsewhere.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, BuilderError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| BuilderError::Directory(io::Error::other(e)))
}

/// As much of what was asked for as a message can take.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(128).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
