//! Builder of templates from recipes: atomic, and once per recipe.

use crate::command::CommandError;
use crate::erofs::{self, ImageRoot, WriteImageError};
use crate::file::{self, FileError, OnPath};
use crate::home::Home;
use crate::images::ImageStore;
use crate::import::ImportError;
use crate::lock::Lock;
use crate::manifest::{
    Defaults, HistoryStep, ImageOrigin, ImageSum, MANIFEST_FORMAT, TemplateManifest, Visibility,
};
use crate::progress::{Phase, Progress};
use crate::recipe::Recipe;
use crate::reference::Reference;
use crate::rootfs::{self, BuildSite, EPOCH, RootfsError};
use crate::rootfs_layer;
use crate::template::{MANIFEST, Template, TemplateError, Templates};
use crate::transfer;
use crate::verified::VerifyError;
use crate::version;
use jiffy_engine_api::Startup;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Error of a template build.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error(
        "building a template installs packages, whose files belong to several users: it needs \
         root, or subordinate users (`apt-get install uidmap`, a range in /etc/subuid and \
         /etc/subgid); or take one along that was built elsewhere: `jiffy template export NAME \
         FILE` there, `jiffy template import FILE` here"
    )]
    NotRoot,
    #[error(
        "cannot use the template file {origin}: {source}; replace the file, or remove it to build the template"
    )]
    TemplateFile {
        /// Path or URL.
        origin: String,
        /// Cause.
        source: Box<ImportError>,
    },
    #[error("a recipe adds to templates of one image; `{name}` has {images}")]
    Stacked { name: String, images: usize },
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error(transparent)]
    Image(#[from] WriteImageError),
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error(transparent)]
    Verify(#[from] VerifyError),
    #[error("cannot build the template")]
    File(#[from] FileError),
}

impl From<RootfsError> for BuildError {
    fn from(error: RootfsError) -> Self {
        match error {
            RootfsError::Command(error) => error.into(),
            RootfsError::File(error) => error.into(),
        }
    }
}

/// Creates the directory that becomes the image; replaced in tests, which have no network.
type MakeRoot<'a> =
    &'a mut dyn FnMut(&BuildSite<'_>, &mut dyn FnMut(Progress<'_>)) -> Result<PathBuf, BuildError>;

pub(crate) fn build_if_needed(
    templates: &Templates,
    home: &Home,
    recipe: &Recipe,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Template, BuildError> {
    if let Some(template) = up_to_date(templates, recipe)? {
        return Ok(template);
    }
    if let Some(template) = transfer::import_stock(templates, recipe, on_progress)? {
        return Ok(template);
    }
    // Held until this template is published, so that its image is not removed.
    let below = match &recipe.from {
        Some(from) => Some(build_if_needed(templates, home, from, on_progress)?),
        None => None,
    };
    let make_root: MakeRoot<'_> = &mut |site, on_progress| {
        if !nix::unistd::Uid::effective().is_root() || jiffy_rootless::maps_only_itself() {
            return Err(BuildError::NotRoot);
        }
        // Packages take 85 % of the time, the image 10 %, its checksum the rest.
        let told = &mut |line: &str, percent: u8| {
            on_progress(Progress::Line(line));
            on_progress(Progress::Percent(
                u8::try_from(u32::from(percent) * 85 / 100).unwrap_or(0),
            ));
        };
        Ok(match &below {
            None => rootfs::bootstrap(recipe, site, told)?,
            Some(below) => rootfs_layer::build(recipe, only_image(below)?, site, told)?,
        })
    };
    let below = below.as_ref().map(|t| &t.manifest.images[..]);
    build_with(
        templates,
        home,
        recipe,
        below.unwrap_or_default(),
        make_root,
        on_progress,
    )
}

/// The image of a template that has only one.
fn only_image(below: &Template) -> Result<&Path, BuildError> {
    match &below.images[..] {
        [image] => Ok(&image.path),
        images => Err(BuildError::Stacked {
            name: below.manifest.reference(),
            images: images.len(),
        }),
    }
}

/// Builds a template of the images `below` and a new one.
fn build_with(
    templates: &Templates,
    home: &Home,
    recipe: &Recipe,
    below: &[ImageSum],
    make_root: MakeRoot<'_>,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Template, BuildError> {
    let name = recipe.name();
    if let Some(template) = up_to_date(templates, recipe)? {
        return Ok(template);
    }
    let began = Instant::now();
    let reference = Reference::parse(name)?;
    let lock = templates.lock(&reference, &mut |()| {
        on_progress(Progress::Phase(Phase::Waiting))
    })?;
    if let Some(template) = up_to_date(templates, recipe)? {
        return Ok(template);
    }
    let work = WorkDir::begin(templates.unfinished(&reference))?;
    let cache = home.cache().join("apt").join(name);
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&cache)
        .on("create", &cache)?;

    on_progress(Progress::Phase(Phase::Packages));
    let site = BuildSite {
        work: &work.0,
        cache: &cache,
        lock: &lock,
    };
    let root = make_root(&site, on_progress)?;
    on_progress(Progress::Percent(85));
    let shared = ImageStore::new(home).share()?;
    let root = ImageRoot::Marked(root);
    let image = write_image(home, &root, recipe.hash(), &work, &lock, on_progress)?;
    let stock = reference.is_stock().then_some(Visibility::Public);
    let plan = ManifestFields {
        reference: &reference,
        visibility: templates.visibility(&reference, stock),
        hash: recipe.hash(),
        history: vec![HistoryStep {
            text: format!("recipe {name}"),
            seconds: began.elapsed().as_secs_f64(),
            bytes: Some(image.size),
        }],
        images: [below, &[image]].concat(),
        defaults: recipe.defaults(),
        startup: recipe.startup(),
        origin: None,
    };
    publish(templates, &plan.manifest(), &work, &lock)?;
    let template = templates.get(name)?;
    drop(shared);
    templates.prune_if_idle();
    on_progress(Progress::Percent(100));
    Ok(template)
}

/// The template, if it was built from an equal recipe.
fn up_to_date(templates: &Templates, recipe: &Recipe) -> Result<Option<Template>, TemplateError> {
    if !templates
        .directory(&Reference::parse(recipe.name())?)
        .is_dir()
    {
        return Ok(None);
    }
    let template = templates.get(recipe.name())?;
    Ok((template.manifest.recipe_sha256 == recipe.hash()).then_some(template))
}

/// Fields of a new manifest.
pub(crate) struct ManifestFields<'a> {
    pub reference: &'a Reference,
    pub visibility: Visibility,
    /// SHA-256 of all inputs, lower-case hexadecimal.
    pub hash: &'a str,
    /// Lowest image first.
    pub images: Vec<ImageSum>,
    pub defaults: &'a Defaults,
    pub startup: Startup,
    pub origin: Option<ImageOrigin>,
    pub history: Vec<HistoryStep>,
}

impl ManifestFields<'_> {
    pub(crate) fn manifest(self) -> TemplateManifest {
        TemplateManifest {
            format: MANIFEST_FORMAT,
            name: self.reference.name().to_owned(),
            tag: self.reference.tag().to_owned(),
            owner: self.reference.owner().map(str::to_owned),
            visibility: self.visibility,
            created: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs(),
            recipe_sha256: self.hash.to_owned(),
            images: self.images,
            defaults: self.defaults.clone(),
            startup: self.startup,
            origin: self.origin,
            history: self.history,
        }
    }
}

/// Writes an image of `root` and flushes it. The caller holds a shared lock on the images until the
/// image is referenced.
pub(crate) fn write_image(
    home: &Home,
    root: &ImageRoot,
    hash: &str,
    work: &WorkDir,
    lock: &Lock,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<ImageSum, BuildError> {
    on_progress(Progress::Phase(Phase::Image));
    let image = work.0.join("image.erofs");
    erofs::write(root, &image, &uuid(hash), EPOCH, Some(lock))?;
    fs::File::open(&image)
        .and_then(|file| file.sync_all())
        .on("flush", &image)?;
    on_progress(Progress::Percent(95));
    on_progress(Progress::Phase(Phase::Verification));
    Ok(ImageStore::new(home).add(&image)?)
}

/// Publishes `manifest` under its name atomically. The replaced template is kept as a version. The
/// caller holds the template's lock and a shared lock on the images.
pub(crate) fn publish(
    templates: &Templates,
    manifest: &TemplateManifest,
    work: &WorkDir,
    _lock: &Lock,
) -> Result<(), TemplateError> {
    version::keep(&templates.home, manifest)?;
    let finished = work.0.join("template");
    DirBuilder::new()
        .mode(0o700)
        .create(&finished)
        .on("create", &finished)?;
    file::write(&finished, MANIFEST, &version::text(manifest, &finished)?)?;

    let reference = Reference::parse(&manifest.reference())?;
    let place = templates.directory(&reference);
    // An unreadable template has no users.
    if let Ok(before) = templates.manifest(&reference.to_string()) {
        version::keep(&templates.home, &before)?;
        templates.rescue(&before, &place)?;
    }
    let flags = if place.exists() {
        RenameFlags::RENAME_EXCHANGE
    } else {
        RenameFlags::RENAME_NOREPLACE
    };
    renameat2(AT_FDCWD, &finished, AT_FDCWD, &place, flags)
        .map_err(io::Error::from)
        .on("create", &place)?;
    Ok(file::sync_dir(place.parent().unwrap_or(&place))?)
}

/// UUID of an image, from the recipe's hash (RFC 9562, version 8: "vendor specific").
fn uuid(hash: &str) -> String {
    format!(
        "{}-{}-8{}-8{}-{}",
        &hash[..8],
        &hash[8..12],
        &hash[13..16],
        &hash[17..20],
        &hash[20..32]
    )
}

/// Working directory of a build, removed on drop.
pub(crate) struct WorkDir(pub PathBuf);

impl WorkDir {
    /// Creates the directory. The caller holds the template's lock, so an existing directory is
    /// from a killed build.
    pub(crate) fn begin(path: PathBuf) -> Result<Self, FileError> {
        clear(&path)?;
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .on("create", &path)?;
        Ok(Self(path))
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        // Remains are removed by the next build.
        let _ = clear(&self.0);
    }
}

/// Removes a directory tree, unless a file system is mounted in it, whose files would be removed as
/// well.
pub(crate) fn clear(path: &Path) -> Result<(), FileError> {
    let mounts =
        fs::read_to_string("/proc/self/mountinfo").on("read", Path::new("/proc/self/mountinfo"))?;
    let mounted = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .find(|point| Path::new(point).starts_with(path));
    if let Some(point) = mounted {
        let busy = io::Error::new(
            io::ErrorKind::ResourceBusy,
            "something is mounted there: unmount it and run again",
        );
        return Err(busy).on("remove", Path::new(point));
    }
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).on("remove", path),
        _ => Ok(()),
    }
}

#[cfg(test)]
pub(crate) mod tests;
