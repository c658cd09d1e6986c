//! Template builder of a host: builds that clients asked for, and their execution.

mod copy;
mod ended;
mod error;
mod failure;
mod import;
mod job;
mod key;
mod known;
mod lifecycle;
mod log;
mod migrate;
mod names;
mod queue;
mod records;
mod request;
mod setting;
mod steps;
mod tags;
mod transfer;
mod uploads;
mod usage;
mod user;
mod waiting;

pub use error::BuilderError;
pub use jiffy_image::DEFAULT_TAG;
pub use log::Progressing;
pub use names::{Look, Meaning, Rank, is_visible, resolve};
pub use records::{
    BuildRecord, Level, Line, Lines, Reason, RecordError, Records, Status, TemplateRecord,
    WantedSize, now_ms,
};
pub use request::NewBuild;
pub use steps::{Prunable, Pruned};
pub use uploads::{MAX_UPLOAD, Upload, UploadError, Uploads};
pub use usage::{BuildUsage, WeakBuilder};
pub use waiting::{MAX_WAITING_BUILDS, WAITING_BUILD_LIFE};

use jiffy_engine::Engine;
use jiffy_host::{OwnerQuota, Sandboxes};
use jiffy_image::{Home, Limits, Templates};
use jiffy_pull::{Queue, Registries};
use log::Log;
use queue::BuildQueue;
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use usage::TemplateUsage;

/// By which word of its metadata a sandbox is known as one that a build made.
const LABEL: &str = "jiffy.build";
/// Most tags of one build.
const MAX_TAGS: usize = 100;

#[derive(Debug, Clone)]
pub struct Settings {
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

impl Default for Settings {
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
pub struct Builder<E: Engine>(Arc<Inner<E>>);

impl<E: Engine> Clone for Builder<E> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// A build that goes on.
struct Running {
    cancel: CancellationToken,
    log: Arc<Log>,
}

pub(crate) struct Inner<E: Engine> {
    sandboxes: Sandboxes<E>,
    templates: Templates,
    records: Arc<Records>,
    uploads: Uploads,
    settings: Settings,
    queue: BuildQueue,
    pulls: Queue,
    /// Budgets of owners; none: they have none.
    quota: Mutex<Option<Arc<dyn OwnerQuota>>>,
    template_usage: Mutex<TemplateUsage>,
    running: Mutex<HashMap<String, Running>>,
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
        settings: Settings,
    ) -> Result<Self, BuilderError> {
        let records = Arc::new(Records::open(home.path())?);
        records.abandon(&Reason {
            message: "the daemon was stopped while it built: build again, and it goes on after the last step that was done".to_owned(),
            step: None,
        })?;
        let uploads = home.path().join("uploads");
        let builder = Self(Arc::new(Inner {
            templates: Templates::new(home),
            records,
            uploads: Uploads::open(uploads).map_err(BuilderError::Directory)?,
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
            if left.terms.metadata.contains_key(LABEL)
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
    pub fn records(&self) -> &Records {
        &self.0.records
    }

    /// Files that clients send.
    pub fn uploads(&self) -> &Uploads {
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
