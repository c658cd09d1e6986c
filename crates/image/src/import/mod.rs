//! Templates made of images that exist already: in a registry, an archive, a directory.

mod credentials;
mod document;
mod error;
mod layout;
mod registry;
mod steps;

pub use error::{ImportError, RegistryError};

use crate::builder::{self, BuildError, Plan, Work};
use crate::erofs::Root;
use crate::file::OnPath;
use crate::home::Home;
use crate::images::Images;
use crate::layer::{Layer, LayerError, Layers, Limits, shown};
use crate::lock::Lock;
use crate::manifest::{Defaults, Origin, Step};
use crate::progress::{Phase, Progress};
use crate::recipe::Recipe;
use crate::reference::Reference;
use crate::template::{Template, TemplateError, Templates};
use crate::verified::sum_of;
use document::{ImageConfig, Run};
use jiffy_engine::{Readiness, SandboxSize, StartCommand, Startup};
use layout::Layout;
use registry::Registry;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;
use steps::Steps;

/// Part of the hash of what is imported: raise it when something else is made of the same.
const IMPORTER: u32 = 1;

/// What is to become a template.
#[derive(Clone, Debug)]
pub struct Import {
    /// Name of the template: `name` or `name:tag`.
    pub name: String,
    pub source: Source,
    /// vCPUs of its sandboxes unless their creator says otherwise.
    pub vcpus: Option<u8>,
    /// Memory, likewise, MiB.
    pub memory_mib: Option<u32>,
    /// Likewise, MiB.
    pub disk_mib: Option<u64>,
    pub start: Start,
    /// What is awaited after the start.
    pub ready: Option<Readiness>,
    /// Bounds for each layer.
    pub limits: Limits,
}

/// Where the files come from.
#[derive(Clone, Debug)]
pub enum Source {
    Registry {
        /// `alpine`, `ghcr.io/owner/name:tag`, `host:5000/name@sha256:…`
        reference: String,
        /// Registries (`host` or `host:port`) that are spoken to without TLS.
        plain_http: Vec<String>,
        access: Access,
    },
    /// An OCI layout, what `docker save` writes, or a root's files; as tar, perhaps compressed.
    Archive(PathBuf),
    /// An OCI layout or a root's files.
    Directory(PathBuf),
}

/// Who we are to a registry.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Access {
    /// Whoever the environment and Docker's configuration of this host say.
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

/// What every sandbox of the template starts with.
#[derive(Clone, Debug, Default)]
pub enum Start {
    #[default]
    Nothing,
    /// A line for `/bin/sh -c`.
    Command(String),
    /// The image's entrypoint with its arguments.
    Image,
}

/// What an image says about itself.
struct Found {
    run: Run,
    /// SHA-256 of the layers' archives, the lowest first.
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

/// What is being made, and with what.
struct Job<'a> {
    import: &'a Import,
    reference: &'a Reference,
    templates: &'a Templates,
    home: &'a Home,
    work: &'a Work,
    layers: Layers,
    /// Of the template; programs that write to it hold it.
    lock: &'a Lock,
    began: Instant,
}

/// The sink of progress.
type Sink<'a> = dyn FnMut(Progress<'_>) + 'a;

/// Makes a template of an image, unless it is there already.
pub(crate) fn import(
    templates: &Templates,
    home: &Home,
    import: &Import,
    on_progress: &mut Sink<'_>,
) -> Result<Template, ImportError> {
    let reference = import.check()?;
    if !nix::unistd::Uid::effective().is_root() {
        return Err(ImportError::NotRoot);
    }
    let began = Instant::now();
    let lock = templates.lock(&reference, &mut |()| {
        on_progress(Progress::Phase(Phase::Waiting))
    })?;
    let layers = Layers::open(home, || on_progress(Progress::Phase(Phase::Waiting)))?;
    let work = Work::begin(templates.unfinished(&reference)).map_err(BuildError::from)?;
    let job = Job {
        import,
        reference: &reference,
        templates,
        home,
        work: &work,
        layers,
        lock: &lock,
        began,
    };
    let template = match &import.source {
        Source::Registry {
            reference,
            plain_http,
            access,
        } => {
            let registry = Registry::new(reference, plain_http, access)?;
            job.registry(&registry, on_progress)
        }
        Source::Archive(path) => job.archive(path, on_progress),
        Source::Directory(path) => job.directory(path, on_progress),
    }?;
    job.collect()?;
    templates.prune_if_quiet();
    Ok(template)
}

/// The name of a template that its maker may choose: of stock templates only those with a tag.
pub(crate) fn free_name(name: &str) -> Result<Reference, ImportError> {
    let reference = Reference::parse(name)?;
    match Recipe::built_in(&reference.to_string()) {
        Ok(_) => Err(ImportError::Stock {
            name: reference.to_string(),
        }),
        Err(_) => Ok(reference),
    }
}

impl Import {
    fn check(&self) -> Result<Reference, ImportError> {
        let reference = free_name(&self.name)?;
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
    fn registry(
        &self,
        registry: &Registry,
        on_progress: &mut Sink<'_>,
    ) -> Result<Template, ImportError> {
        let (found, layers) = registry.image()?;
        let from = registry.name();
        if let Some(template) = self.up_to_date(&found)? {
            return Ok(template);
        }
        let sum: u64 = layers.iter().fold(0, |sum, l| sum.saturating_add(l.size));
        if sum > self.import.limits.bytes {
            let most = self.import.limits.bytes >> 20;
            let problem = format!("its layers have {} MiB, more than {most}", sum >> 20);
            return Err(ImportError::image(problem));
        }
        // Downloading and unpacking are 85 % of the time, and every byte goes through both.
        let mut steps = Steps::new(Phase::Download, 2 * sum, 85, on_progress);
        let mut unpacked = Vec::new();
        for (layer, diff_id) in layers.iter().zip(&found.diff_ids) {
            let known = self.layers.get(diff_id);
            let ready = match known {
                Some(layer) => layer,
                None => {
                    steps.phase(Phase::Download);
                    let blob =
                        registry.download(layer, &self.home.blobs(), &mut |n| steps.at(n))?;
                    steps.phase(Phase::Layers);
                    let file = File::open(&blob).on("open", &blob)?;
                    let ready = self.unpack(&file, diff_id, &mut |n| steps.at(layer.size + n))?;
                    fs::remove_file(&blob).on("remove", &blob)?;
                    ready
                }
            };
            steps.done(2 * layer.size);
            unpacked.push(ready);
        }
        self.finish(from, found, unpacked, on_progress)
    }

    fn archive(&self, path: &Path, on_progress: &mut Sink<'_>) -> Result<Template, ImportError> {
        // Not resolved: standard input may be a pipe, which has no name.
        let path = std::path::absolute(path).on("find", path)?;
        let file = File::open(&path).on("open", &path)?;
        let size = file.metadata().on("examine", &path)?.len();
        let mut steps = Steps::new(Phase::Layers, size, 85, on_progress);
        let aside = self
            .layers
            .unpack_aside(&file, self.import.limits, &mut |n| steps.at(n))
            // Nothing else tells that this archive is whole.
            .and_then(|aside| match aside.unpacked.end_mark {
                true => Ok(aside),
                false => Err(LayerError::Truncated),
            })
            .map_err(|source| ImportError::Layer {
                what: path.display().to_string(),
                source,
            })?;
        if Layout::open(&aside.root)?.is_some() {
            // The layers in it come next, in the place where it is now.
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

    /// Puts the layers together.
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
        // Nothing shows through a layer that deletes all that is below it.
        let opaque = layers.iter().rposition(|layer| layer.unpacked.opaque);
        let mut roots: Vec<PathBuf> = Vec::new();
        for layer in &layers[opaque.unwrap_or(0)..] {
            // Of equal layers the uppermost alone says everything; overlayfs takes none twice.
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
        let hash = self.hash(&found)?;
        on_progress(Progress::Percent(85));
        let _shared = Images::new(self.home).share()?;
        let image =
            builder::write_image(self.home, root, &hash, self.work, self.lock, on_progress)?;
        let plan = Plan {
            reference: self.reference,
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
        builder::publish(self.templates, &plan.manifest(), self.work, self.lock)?;
        on_progress(Progress::Percent(100));
        Ok(self.templates.get(&self.import.name)?)
    }

    /// SHA-256 of all that decides what the template is; by which name the image was found does not.
    fn hash(&self, found: &Found) -> Result<String, ImportError> {
        let defaults = self.import.defaults(&found.run)?;
        let startup = self.import.startup(&found.run)?;
        let text = serde_json::to_string(&(IMPORTER, &found.diff_ids, &defaults, &startup));
        Ok(sum_of(text.unwrap_or_default().as_bytes()))
    }

    /// The template, if it was made of the same.
    fn up_to_date(&self, found: &Found) -> Result<Option<Template>, ImportError> {
        if !self.templates.directory(self.reference).is_dir() {
            return Ok(None);
        }
        let template = self.templates.get(&self.import.name)?;
        let same = template.manifest.recipe_sha256 == self.hash(found)?;
        Ok(same.then_some(template))
    }

    /// Removes layers of no template, and downloads that nobody took up again.
    fn collect(&self) -> Result<(), ImportError> {
        Ok(collect(self.templates, self.home, &self.layers)?)
    }
}

/// Removes layers that no template is made of. Without the lock nothing is done: an import is using them, and will do this.
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

/// How long an interrupted download waits to be taken up again.
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
