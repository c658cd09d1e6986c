//! Imports existing images as templates: from a registry, an archive or a directory.
//!
//! A *stock template* is a template whose recipe Jiffy contains. A *blob* is a file of a registry,
//! such as a compressed layer. The *diff id* of a layer is the SHA-256 of its uncompressed archive.
//!
//! An import from a registry first downloads all layers without a lock ([`FetchedImage`]). Then
//! [`ImportJob`] unpacks the layers and writes the image, under the lock of the template and the
//! lock of the layer store.

mod bounded;
mod byte_progress;
mod credentials;
mod disk_budget;
mod document;
mod download;
mod error;
mod fetched_image;
mod job;
mod layout;
mod registry;
mod signature;

pub use disk_budget::DiskBudget;
pub use error::{ImportError, RegistryError};
pub use jiffy_registry_pull::PullSettings;
pub use signature::{SignaturePolicy, VerifyKey};

use crate::home::Home;
use crate::layer::{LayerStore, UnpackLimits};
use crate::progress::{Phase, Progress};
use crate::template_model::{Defaults, Reference, Template, TemplateError, Visibility};
use crate::templates::Templates;
use crate::verified::sum_of;
use crate::work_dir::WorkDir;
use document::{ImageConfig, RunConfig};
use fetched_image::{FetchOutcome, FetchedImage};
use jiffy_engine_api::{FirstUse, Readiness, SandboxSize, StartCommand, Startup, is_reserved};
use jiffy_registry_pull::RegistryLogin;
use job::ImportJob;
use std::cell::Cell;
use std::path::PathBuf;
use std::time::Instant;

/// Version of the importer, a part of the hash of an import. It must be raised if an import of the
/// same image gives another result.
const IMPORTER_VERSION: u32 = 1;

/// Maximum number of attempts if other processes remove layers during the import.
const MAX_ATTEMPTS: usize = 4;

/// Description of an import.
#[derive(Clone, Debug)]
pub struct Import {
    /// Name of the template: `[owner/]name[:tag]`.
    pub name: String,
    /// Visibility. If `None`, the visibility of the replaced template, or private for a new
    /// template.
    pub visibility: Option<Visibility>,
    pub source: ImportSource,
    /// Default vCPUs of sandboxes.
    pub vcpus: Option<u8>,
    /// Default memory of sandboxes in MiB.
    pub memory_mib: Option<u32>,
    /// Default disk size of sandboxes in MiB.
    pub disk_mib: Option<u64>,
    pub start: ImportStart,
    /// Readiness check after the start.
    pub ready: Option<Readiness>,
    /// Limits of each layer.
    pub limits: UnpackLimits,
    pub disk: DiskBudget,
    /// Signatures that an image of a registry must have.
    pub signatures: SignaturePolicy,
}

/// Origin of the files.
#[derive(Clone, Debug)]
pub enum ImportSource {
    Registry {
        /// `alpine`, `ghcr.io/owner/name:tag`, `host:5000/name@sha256:…`
        reference: String,
        access: RegistryAccess,
        /// Settings of the pull.
        pull: PullSettings,
    },
    /// An OCI layout, the output of `docker save`, or a root file system, as a tar archive with
    /// optional compression.
    Archive(PathBuf),
    /// An OCI layout or a root file system.
    Directory(PathBuf),
}

/// Authentication to a registry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RegistryAccess {
    /// Credentials from the environment or from this host's Docker configuration.
    #[default]
    Host,
    Anonymous,
    /// Credentials of the caller.
    Login(RegistryLogin),
}

/// Command that is started in every sandbox of the template.
#[derive(Clone, Debug, Default)]
pub enum ImportStart {
    #[default]
    Nothing,
    /// Command line for `/bin/sh -c`.
    Command(String),
    /// Entry point of the image and its arguments.
    Image,
}

/// Configuration of an image, and its layers.
#[derive(Clone)]
struct FoundImage {
    run: RunConfig,
    /// Diff ids of the layers, lowest first.
    diff_ids: Vec<String>,
    /// SHA-256 of the image's manifest. `None` if the source has no manifest with a digest, such as
    /// the output of `docker save`.
    manifest_sha256: Option<String>,
}

impl FoundImage {
    fn new(
        config: ImageConfig,
        manifest_sha256: Option<String>,
        layers: usize,
    ) -> Result<Self, ImportError> {
        Ok(Self {
            diff_ids: config.diff_ids(layers)?,
            run: config.config.unwrap_or_default(),
            manifest_sha256,
        })
    }
}

/// Receiver of progress.
type ProgressSink<'a> = dyn FnMut(Progress<'_>) + 'a;

/// Result of one attempt under locks.
enum ImportAttempt {
    /// The template was created or is up to date.
    Done(Box<Template>),
    /// Digests of blobs whose layers are no longer in the store.
    Missing(Vec<String>),
}

impl Import {
    /// Imports the image as a template, or returns the existing template if it is equal.
    ///
    /// Imports are serialised except for downloads, since they share unpacked layers. Requires root
    /// and `mkfs.erofs`.
    pub fn run(
        &self,
        templates: &Templates,
        on_progress: &mut ProgressSink<'_>,
    ) -> Result<Template, ImportError> {
        let reference = self.check()?;
        // The files of an image belong to several users. Only root of the host can create such
        // files.
        if !nix::unistd::Uid::effective().is_root() || jiffy_rootless::current().is_some() {
            return Err(ImportError::NotRoot);
        }
        let home = &templates.home;
        let began = Instant::now();
        let mut fetched = match &self.source {
            ImportSource::Registry {
                reference,
                access,
                pull,
            } => {
                // Downloads run without locks, so that a slow registry blocks no other import.
                let source = (&reference[..], access, pull);
                match FetchedImage::fetch((templates, home), self, source, on_progress)? {
                    FetchOutcome::UpToDate(template) => return Ok(*template),
                    FetchOutcome::Fetched(fetched) => Some(fetched),
                }
            }
            _ => None,
        };
        for _ in 0..MAX_ATTEMPTS {
            let attempt = self.attempt(
                templates,
                home,
                &reference,
                began,
                &mut fetched,
                on_progress,
            );
            if let Err(ImportError::Budget { .. }) = &attempt {
                // The import fails below. The layers that it has unpacked may exceed the quota, so
                // layers that no template uses are removed now.
                templates.gc_unused()?;
            }
            match attempt? {
                ImportAttempt::Done(template) => {
                    templates.prune_if_idle();
                    return Ok(*template);
                }
                // The locks are released here, since a download may take long.
                ImportAttempt::Missing(blobs) => {
                    if let Some(image) = &mut fetched {
                        image.download(home, &blobs, on_progress)?;
                    }
                }
            }
        }
        let problem = "other processes removed its layers during the import: run again";
        Err(ImportError::image(problem.to_owned()))
    }

    /// Makes one attempt to create the template. Acquires the lock of the template first, and then
    /// the lock of the layer store.
    fn attempt(
        &self,
        templates: &Templates,
        home: &Home,
        reference: &Reference,
        began: Instant,
        fetched: &mut Option<Box<FetchedImage>>,
        on_progress: &mut ProgressSink<'_>,
    ) -> Result<ImportAttempt, ImportError> {
        let lock = templates.lock(reference, &mut |()| {
            on_progress(Progress::Phase(Phase::Waiting))
        })?;
        // The lock of the template is taken first by all imports, so that no two of them can block
        // each other.
        let layers = LayerStore::open(home, || on_progress(Progress::Phase(Phase::Waiting)))?;
        // The import may have waited long for the locks.
        self.check_cancelled()?;
        let work = WorkDir::create(templates.unfinished(reference))?;
        let job = ImportJob {
            import: self,
            reference,
            templates,
            home,
            work: &work,
            layers,
            lock: &lock,
            began,
            unpacked_bytes: Cell::new(0),
        };
        let template = match &self.source {
            ImportSource::Archive(path) => job.archive(path, on_progress)?,
            ImportSource::Directory(path) => job.directory(path, on_progress)?,
            ImportSource::Registry { .. } => {
                let Some(image) = fetched else {
                    return Err(ImportError::image("it was not downloaded".to_owned()));
                };
                match image.import(&job, on_progress)? {
                    Ok(template) => template,
                    Err(missing) => return Ok(ImportAttempt::Missing(missing)),
                }
            }
        };
        // `gc_layers` requires the lock of the layer store, which `job` still holds.
        job.gc_layers()?;
        Ok(ImportAttempt::Done(Box::new(template)))
    }
}

/// Returns the existing template if it equals the import.
fn up_to_date(
    templates: &Templates,
    import: &Import,
    found: &FoundImage,
) -> Result<Option<Template>, ImportError> {
    let reference = Reference::parse(&import.name)?;
    // This check avoids an error if the template does not exist.
    if !templates.directory(&reference).is_dir() {
        return Ok(None);
    }
    let template = templates.get(&import.name)?;
    let visibility = templates.visibility(&reference, import.visibility);
    let is_same = template.manifest.recipe_sha256 == import.hash(found)?
        && template.manifest.visibility == visibility;
    Ok(is_same.then_some(template))
}

/// Checks a chosen template name. Names of stock templates require a tag. Names that are reserved
/// for internal templates are rejected.
pub(crate) fn check_name(
    name: &str,
    visibility: Option<Visibility>,
) -> Result<Reference, ImportError> {
    let reference = Reference::parse(name)?;
    // A stock template must always have its own recipe.
    if reference.is_stock() {
        return Err(ImportError::Stock {
            name: reference.to_string(),
        });
    }
    if is_reserved(reference.name()) && visibility != Some(Visibility::Internal) {
        let name = reference.name().to_owned();
        return Err(TemplateError::Reserved { name }.into());
    }
    Ok(reference)
}

impl Import {
    /// Checks the options of an import before anything is downloaded.
    fn check(&self) -> Result<Reference, ImportError> {
        let reference = check_name(&self.name, self.visibility)?;
        let standard = SandboxSize::default();
        let size = SandboxSize {
            vcpus: self.vcpus.unwrap_or(standard.vcpus),
            memory_mib: self.memory_mib.unwrap_or(standard.memory_mib),
            disk_mib: self.disk_mib.unwrap_or(standard.disk_mib),
        };
        size.check()
            .map_err(|e| ImportError::Choice(e.to_string()))?;
        if matches!(&self.start, ImportStart::Command(command) if command.trim().is_empty()) {
            return Err(ImportError::Choice("the start command is empty".to_owned()));
        }
        let probe = self.ready.as_ref().map(Readiness::probe);
        // The readiness check is parsed only to reject an invalid one before the download.
        (probe.and_then(Result::err)).map_or(Ok(reference), |e| Err(ImportError::Choice(e)))
    }

    /// Fails if the import was cancelled.
    fn check_cancelled(&self) -> Result<(), ImportError> {
        match &self.source {
            ImportSource::Registry { pull, .. } if pull.cancel.is_cancelled() => {
                Err(ImportError::Cancelled)
            }
            _ => Ok(()),
        }
    }

    /// Returns the defaults of the template: the settings of the image, and the sizes of the
    /// import.
    fn defaults(&self, run: &RunConfig) -> Result<Defaults, ImportError> {
        Ok(Defaults {
            user: run.user()?,
            workdir: run.workdir()?,
            disk_mib: self.disk_mib.unwrap_or(SandboxSize::default().disk_mib),
            memory_mib: self.memory_mib,
            vcpus: self.vcpus,
            env: run.environment()?,
        })
    }

    /// SHA-256 of the importer's version, the layers, the defaults and the startup. The name of the
    /// image is not included.
    fn hash(&self, found: &FoundImage) -> Result<String, ImportError> {
        let defaults = self.defaults(&found.run)?;
        let startup = self.startup(&found.run)?;
        let text = serde_json::to_string(&(IMPORTER_VERSION, &found.diff_ids, &defaults, &startup));
        // Serialization of strings and numbers cannot fail.
        Ok(sum_of(text.unwrap_or_default().as_bytes()))
    }

    /// Returns the startup of the template: the command that the caller selected, or the command of
    /// the image.
    fn startup(&self, run: &RunConfig) -> Result<Startup, ImportError> {
        let start = |command, args| StartCommand {
            command,
            args,
            user: None,
            workdir: None,
        };
        let start = match &self.start {
            ImportStart::Nothing => None,
            ImportStart::Command(line) => Some(start(line.clone(), None)),
            ImportStart::Image => {
                // As in Docker: the command is appended to the entry point.
                let words = run.entrypoint.iter().chain(&run.cmd).flatten().cloned();
                let mut words = words.collect::<Vec<String>>().into_iter();
                let command = words.next().ok_or_else(|| {
                    ImportError::image(
                        "it has no command to start: specify a command with --start".to_owned(),
                    )
                })?;
                Some(start(command, Some(words.collect())))
            }
        };
        Ok(Startup {
            start,
            ready: self.ready.clone(),
            first_use: None,
        })
    }
}

/// Rejects defaults and startup settings that are out of range.
pub(crate) fn check_defaults(defaults: &Defaults, startup: &Startup) -> Result<(), ImportError> {
    let standard = SandboxSize::default();
    let size = SandboxSize {
        vcpus: defaults.vcpus.unwrap_or(standard.vcpus),
        memory_mib: defaults.memory_mib.unwrap_or(standard.memory_mib),
        disk_mib: defaults.disk_mib,
    };
    size.check()
        .map_err(|e| ImportError::Choice(e.to_string()))?;
    let probe = startup.ready.as_ref().map(Readiness::probe);
    let action = startup.first_use.as_ref().map(FirstUse::action);
    let problem = probe.and_then(Result::err);
    let problem = problem.or(action.and_then(Result::err));
    problem.map_or(Ok(()), |e| Err(ImportError::Choice(e)))
}

#[cfg(test)]
mod tests;
