//! Import of existing images as templates: from a registry, an archive or a directory.

mod credentials;
mod disk_budget;
mod document;
mod download;
mod error;
mod fetched;
mod few;
mod layout;
mod registry;
mod steps;

pub use disk_budget::DiskBudget;
pub use error::{ImportError, RegistryError};
pub use jiffy_pull::Pull;

use crate::builder::{self, BuildError, Plan, Work};
use crate::erofs::Root;
use crate::file::OnPath;
use crate::home::Home;
use crate::images::Images;
use crate::layer::{Layer, LayerError, Layers, Limits, shown};
use crate::lock::Lock;
use crate::manifest::{Defaults, Origin, Step, Visibility};
use crate::progress::{Phase, Progress};
use crate::reference::{Reference, is_reserved};
use crate::template::{Template, TemplateError, Templates};
use crate::verified::sum_of;
use document::{ImageConfig, Run};
use fetched::{Fetched, Outcome};
use jiffy_engine::{Readiness, SandboxSize, StartCommand, Startup};
use layout::Layout;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;
use steps::Steps;

/// Version of the importer in the hash of an import: raise it when its results change.
const IMPORTER: u32 = 1;

/// Maximum number of attempts, if other processes remove layers meanwhile.
const MAX_ROUNDS: usize = 4;

/// Description of an import.
#[derive(Clone, Debug)]
pub struct Import {
    /// Name of the template: `[owner/]name[:tag]`.
    pub name: String,
    /// None: that of the replaced template, else private.
    pub visibility: Option<Visibility>,
    pub source: Source,
    /// Default vCPUs of sandboxes.
    pub vcpus: Option<u8>,
    /// Default memory of sandboxes in MiB.
    pub memory_mib: Option<u32>,
    /// Default disk size of sandboxes in MiB.
    pub disk_mib: Option<u64>,
    pub start: Start,
    /// Readiness check after the start.
    pub ready: Option<Readiness>,
    /// Limits of each layer.
    pub limits: Limits,
    pub disk: DiskBudget,
}

/// Origin of the files.
#[derive(Clone, Debug)]
pub enum Source {
    Registry {
        /// `alpine`, `ghcr.io/owner/name:tag`, `host:5000/name@sha256:…`
        reference: String,
        access: Access,
        /// Settings of the pull.
        pull: Pull,
    },
    /// An OCI layout, the output of `docker save`, or a root file system; as tar, optionally
    /// compressed.
    Archive(PathBuf),
    /// An OCI layout or a root file system.
    Directory(PathBuf),
}

/// Identity towards a registry.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Access {
    /// Credentials of the environment or of this host's Docker configuration.
    #[default]
    Host,
    Nobody,
    User {
        name: String,
        password: String,
    },
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("Host"),
            Self::Nobody => f.write_str("Nobody"),
            Self::User { name, .. } => f.debug_tuple("User").field(name).finish(),
        }
    }
}

/// Command that every sandbox of the template starts with.
#[derive(Clone, Debug, Default)]
pub enum Start {
    #[default]
    Nothing,
    /// Command line for `/bin/sh -c`.
    Command(String),
    /// Entry point of the image with its arguments.
    Image,
}

/// Configuration of an image, and its layers.
#[derive(Clone)]
struct Found {
    run: Run,
    /// Diff ids of the layers, lowest first.
    diff_ids: Vec<String>,
    manifest_sha256: Option<String>,
}

impl Found {
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

/// A running import.
struct Job<'a> {
    import: &'a Import,
    reference: &'a Reference,
    templates: &'a Templates,
    home: &'a Home,
    work: &'a Work,
    layers: Layers,
    /// Lock of the template; programs that write to it inherit it.
    lock: &'a Lock,
    began: Instant,
}

/// Receiver of progress.
type Sink<'a> = dyn FnMut(Progress<'_>) + 'a;

/// Imports an image as a template, unless an equal one exists.
pub(crate) fn import(
    templates: &Templates,
    home: &Home,
    import: &Import,
    on_progress: &mut Sink<'_>,
) -> Result<Template, ImportError> {
    let reference = import.check()?;
    if !nix::unistd::Uid::effective().is_root() || jiffy_rootless::current().is_some() {
        return Err(ImportError::NotRoot);
    }
    let began = Instant::now();
    let mut fetched = match &import.source {
        Source::Registry {
            reference,
            access,
            pull,
        } => {
            let asked = (&reference[..], access, pull);
            match Fetched::fetch((templates, home), import, asked, on_progress)? {
                Outcome::UpToDate(template) => return Ok(*template),
                Outcome::Fetched(fetched) => Some(fetched),
            }
        }
        _ => None,
    };
    for _ in 0..MAX_ROUNDS {
        let made = import.once(
            templates,
            home,
            &reference,
            began,
            &mut fetched,
            on_progress,
        );
        if let Err(ImportError::Budget { .. }) = &made {
            // Layers beyond the quota do not stay on disk.
            templates.drop_unused()?;
        }
        match made? {
            Once::Made(template) => {
                templates.prune_if_quiet();
                return Ok(*template);
            }
            // Downloads run without locks.
            Once::Missing(blobs) => {
                if let Some(image) = &mut fetched {
                    image.download(home, &blobs, on_progress)?;
                }
            }
        }
    }
    let problem = "its layers are removed by others as fast as they come: run again";
    Err(ImportError::image(problem.to_owned()))
}

/// The template, or the digests of blobs whose layers are gone from the store.
enum Once {
    Made(Box<Template>),
    Missing(Vec<String>),
}

impl Import {
    /// Creates the template under its lock and that of the layers.
    fn once(
        &self,
        templates: &Templates,
        home: &Home,
        reference: &Reference,
        began: Instant,
        fetched: &mut Option<Box<Fetched>>,
        on_progress: &mut Sink<'_>,
    ) -> Result<Once, ImportError> {
        let lock = templates.lock(reference, &mut |()| {
            on_progress(Progress::Phase(Phase::Waiting))
        })?;
        let layers = Layers::open(home, || on_progress(Progress::Phase(Phase::Waiting)))?;
        self.check_cancelled()?;
        let work = Work::begin(templates.unfinished(reference)).map_err(BuildError::from)?;
        let job = Job {
            import: self,
            reference,
            templates,
            home,
            work: &work,
            layers,
            lock: &lock,
            began,
        };
        let template = match &self.source {
            Source::Archive(path) => job.archive(path, on_progress)?,
            Source::Directory(path) => job.directory(path, on_progress)?,
            Source::Registry { .. } => {
                let Some(image) = fetched else {
                    return Err(ImportError::image("it was not downloaded".to_owned()));
                };
                match job.registry(image, on_progress)? {
                    Ok(template) => template,
                    Err(missing) => return Ok(Once::Missing(missing)),
                }
            }
        };
        job.collect()?;
        Ok(Once::Made(Box::new(template)))
    }
}

/// The existing template, if it equals the import.
fn up_to_date(
    templates: &Templates,
    import: &Import,
    found: &Found,
) -> Result<Option<Template>, ImportError> {
    let reference = Reference::parse(&import.name)?;
    if !templates.directory(&reference).is_dir() {
        return Ok(None);
    }
    let template = templates.get(&import.name)?;
    let visibility = templates.visibility(&reference, import.visibility);
    let same = template.manifest.recipe_sha256 == import.hash(found)?
        && template.manifest.visibility == visibility;
    Ok(same.then_some(template))
}

/// Checks a chosen template name. Stock names need a tag, and reserved names are for internal
/// templates.
pub(crate) fn free_name(
    name: &str,
    visibility: Option<Visibility>,
) -> Result<Reference, ImportError> {
    let reference = Reference::parse(name)?;
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
    fn check(&self) -> Result<Reference, ImportError> {
        let reference = free_name(&self.name, self.visibility)?;
        let standard = SandboxSize::default();
        let size = SandboxSize {
            vcpus: self.vcpus.unwrap_or(standard.vcpus),
            memory_mib: self.memory_mib.unwrap_or(standard.memory_mib),
            disk_mib: self.disk_mib.unwrap_or(standard.disk_mib),
        };
        size.check()
            .map_err(|e| ImportError::Choice(e.to_string()))?;
        if matches!(&self.start, Start::Command(command) if command.trim().is_empty()) {
            return Err(ImportError::Choice("the start command is empty".to_owned()));
        }
        let probe = self.ready.as_ref().map(Readiness::probe);
        (probe.and_then(Result::err)).map_or(Ok(reference), |e| Err(ImportError::Choice(e)))
    }

    fn check_cancelled(&self) -> Result<(), ImportError> {
        match &self.source {
            Source::Registry { pull, .. } if pull.cancel.is_cancelled() => {
                Err(ImportError::Cancelled)
            }
            _ => Ok(()),
        }
    }

    fn defaults(&self, run: &Run) -> Result<Defaults, ImportError> {
        Ok(Defaults {
            user: run.user()?,
            workdir: run.workdir()?,
            disk_mib: self.disk_mib.unwrap_or(SandboxSize::default().disk_mib),
            memory_mib: self.memory_mib,
            vcpus: self.vcpus,
            env: run.environment()?,
        })
    }

    /// SHA-256 of all inputs except the image's name.
    fn hash(&self, found: &Found) -> Result<String, ImportError> {
        let defaults = self.defaults(&found.run)?;
        let startup = self.startup(&found.run)?;
        let text = serde_json::to_string(&(IMPORTER, &found.diff_ids, &defaults, &startup));
        Ok(sum_of(text.unwrap_or_default().as_bytes()))
    }

    fn startup(&self, run: &Run) -> Result<Startup, ImportError> {
        let start = |command, args| StartCommand {
            command,
            args,
            user: None,
            workdir: None,
        };
        let start = match &self.start {
            Start::Nothing => None,
            Start::Command(line) => Some(start(line.clone(), None)),
            Start::Image => {
                let words = run.entrypoint.iter().chain(&run.cmd).flatten().cloned();
                let mut words = words.collect::<Vec<String>>().into_iter();
                let command = words.next().ok_or_else(|| {
                    ImportError::image(
                        "it has no command to start: name one with --start".to_owned(),
                    )
                })?;
                Some(start(command, Some(words.collect())))
            }
        };
        Ok(Startup {
            start,
            ready: self.ready.clone(),
        })
    }
}

impl Job<'_> {
    fn archive(&self, path: &Path, on_progress: &mut Sink<'_>) -> Result<Template, ImportError> {
        // Not canonicalized: standard input may be a pipe without a name.
        let path = std::path::absolute(path).on("find", path)?;
        let file = File::open(&path).on("open", &path)?;
        let size = file.metadata().on("examine", &path)?.len();
        let mut steps = Steps::new(Phase::Layers, size, 85, on_progress);
        let aside = self
            .layers
            .unpack_aside(&file, self.import.limits, &mut |n| steps.at(n))
            // Only the end mark shows that the archive is complete.
            .and_then(|aside| match aside.unpacked.end_mark {
                true => Ok(aside),
                false => Err(LayerError::Truncated),
            })
            .map_err(|source| ImportError::Layer {
                what: path.display().to_string(),
                source,
            })?;
        if Layout::open(&aside.root)?.is_some() {
            // Makes way for the layers in it.
            let layout = self.work.0.join("layout");
            fs::rename(&aside.root, &layout).on("create", &layout)?;
            drop(aside);
            let layout = Layout::open(&layout)?
                .ok_or_else(|| ImportError::image("it is gone".to_owned()))?;
            return self.layout(&layout, path.display().to_string(), on_progress);
        }
        let layer = self.layers.keep(aside)?;
        let found = Found {
            run: Run::default(),
            diff_ids: vec![layer.unpacked.diff_id.clone()],
            manifest_sha256: None,
        };
        let from = path.display().to_string();
        if let Some(template) = self.up_to_date(&found)? {
            return Ok(template);
        }
        self.finish(from, found, vec![layer], on_progress)
    }

    fn directory(&self, path: &Path, on_progress: &mut Sink<'_>) -> Result<Template, ImportError> {
        let path = path.canonicalize().on("find", path)?;
        let from = path.display().to_string();
        if let Some(layout) = Layout::open(&path)? {
            return self.layout(&layout, from, on_progress);
        }
        let found = Found {
            run: Run::default(),
            diff_ids: Vec::new(),
            manifest_sha256: None,
        };
        self.write(from, found, &Root::Directory(path), on_progress)
    }

    fn layout(
        &self,
        layout: &Layout,
        from: String,
        on_progress: &mut Sink<'_>,
    ) -> Result<Template, ImportError> {
        let (found, names) = layout.image()?;
        if let Some(template) = self.up_to_date(&found)? {
            return Ok(template);
        }
        on_progress(Progress::Phase(Phase::Layers));
        let mut unpacked = Vec::new();
        for (name, diff_id) in names.iter().zip(&found.diff_ids) {
            unpacked.push(match self.layers.get(diff_id) {
                Some(layer) => layer,
                None => self.unpack(&layout.file(name)?, diff_id, &mut |_| ())?,
            });
        }
        self.finish(from, found, unpacked, on_progress)
    }

    fn unpack(
        &self,
        packed: &File,
        diff_id: &str,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<Layer, ImportError> {
        let added = (self.layers).add(packed, diff_id, self.import.limits, on_bytes);
        added.map_err(|source| ImportError::Layer {
            what: format!("layer sha256:{diff_id}"),
            source,
        })
    }

    /// Merges the layers into an image.
    fn finish(
        &self,
        from: String,
        found: Found,
        layers: Vec<Layer>,
        on_progress: &mut Sink<'_>,
    ) -> Result<Template, ImportError> {
        let left_out: u64 = layers.iter().map(|l| l.unpacked.devices_left_out).sum();
        if left_out > 0 {
            let note = format!("{left_out} device nodes left out: sandboxes have their own /dev");
            on_progress(Progress::Line(&note));
        }
        // An opaque layer hides all below it.
        let opaque = layers.iter().rposition(|layer| layer.unpacked.opaque);
        let mut roots: Vec<PathBuf> = Vec::new();
        for layer in &layers[opaque.unwrap_or(0)..] {
            // Of equal layers the uppermost suffices; overlayfs accepts no directory twice.
            roots.retain(|root| *root != layer.root);
            roots.push(layer.root.clone());
        }
        let work = self.work.0.join("union");
        fs::create_dir(&work).on("create", &work)?;
        let root = Root::Layers {
            layers: roots,
            work,
        };
        self.write(from, found, &root, on_progress)
    }

    fn write(
        &self,
        from: String,
        found: Found,
        root: &Root,
        on_progress: &mut Sink<'_>,
    ) -> Result<Template, ImportError> {
        let defaults = self.import.defaults(&found.run)?;
        let startup = self.import.startup(&found.run)?;
        let hash = self.import.hash(&found)?;
        on_progress(Progress::Percent(85));
        let _shared = Images::new(self.home).share()?;
        let image =
            builder::write_image(self.home, root, &hash, self.work, self.lock, on_progress)?;
        self.import.disk.need(image.size)?;
        let plan = Plan {
            reference: self.reference,
            visibility: (self.templates).visibility(self.reference, self.import.visibility),
            hash: &hash,
            history: vec![Step {
                text: format!("image {from}"),
                seconds: self.began.elapsed().as_secs_f64(),
                bytes: Some(image.size),
            }],
            images: vec![image],
            defaults: &defaults,
            startup,
            origin: Some(origin(from, found)),
        };
        self.import.check_cancelled()?;
        builder::publish(self.templates, &plan.manifest(), self.work, self.lock)?;
        on_progress(Progress::Percent(100));
        Ok(self.templates.get(&self.import.name)?)
    }

    /// The existing template, if it equals the import.
    fn up_to_date(&self, found: &Found) -> Result<Option<Template>, ImportError> {
        up_to_date(self.templates, self.import, found)
    }

    /// Removes unused layers and abandoned downloads.
    fn collect(&self) -> Result<(), ImportError> {
        Ok(collect(self.templates, self.home, &self.layers)?)
    }
}

/// Removes layers without a template, and abandoned downloads. The caller holds the lock of the
/// layers.
pub(crate) fn collect(
    templates: &Templates,
    home: &Home,
    layers: &Layers,
) -> Result<(), TemplateError> {
    let manifests = templates.list()?;
    let origins = manifests.into_iter().filter_map(|m| m.origin);
    let named: Vec<String> = origins.flat_map(|o| o.layers).collect();
    layers.retain(&named)?;
    for entry in fs::read_dir(home.blobs()).on("list", &home.blobs())? {
        let path = entry.on("list", &home.blobs())?.path();
        let age = path
            .metadata()
            .and_then(|m| m.modified())
            .map(|m| m.elapsed());
        if matches!(age, Ok(Ok(age)) if age.as_secs() > KEEP_DOWNLOADS_S) {
            fs::remove_file(&path).on("remove", &path)?;
        }
    }
    Ok(())
}

/// Retention time of interrupted downloads in seconds.
const KEEP_DOWNLOADS_S: u64 = 24 * 3600;

fn origin(from: String, found: Found) -> Origin {
    let run = found.run;
    let text = |words: Option<Vec<String>>| words.unwrap_or_default();
    let ports = run.exposed_ports.unwrap_or_default();
    Origin {
        from,
        manifest_sha256: found.manifest_sha256,
        layers: found.diff_ids,
        entrypoint: text(run.entrypoint),
        cmd: text(run.cmd),
        exposed_ports: ports.keys().map(|p| shown(p.as_bytes())).collect(),
    }
}

#[cfg(test)]
mod tests;
