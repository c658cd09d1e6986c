//! Builds templates from recipes. A build publishes its template atomically, and an unchanged
//! recipe is built only once.
//!
//! A *recipe* is the source of a stock template: a directory with its packages, files and settings.

use crate::command::CommandError;
use crate::erofs::{ImageRoot, WriteImageError};
use crate::file::{FileError, OnPath};
use crate::home::Home;
use crate::images::ImageStore;
use crate::progress::{Phase, Progress};
use crate::rootfs::{self, BuildSite, RootfsError};
use crate::rootfs_layer;
use crate::template_model::{
    HistoryStep, ImageSum, ManifestFields, Recipe, Reference, Template, TemplateError, Visibility,
};
use crate::templates::{Templates, write_image};
use crate::transfer::{UnusableFile, import_stock};
use crate::verified::VerifyError;
use crate::work_dir::WorkDir;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Error of a template build.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error(
        "cannot install packages as this user, because their files belong to several users: run as \
         root, or configure subordinate users (`apt-get install uidmap`, a range in /etc/subuid and \
         /etc/subgid). Alternatively, run `jiffy template export NAME FILE` on another host and \
         `jiffy template import FILE` on this host"
    )]
    NotRoot,
    #[error(transparent)]
    TemplateFile(#[from] UnusableFile),
    #[error("the base template of a recipe must have one image, but `{name}` has {images}")]
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

/// Function that creates the directory with the content of the image. `BuildSite` contains its
/// directories and the lock of the template. Tests replace the function, since they have no
/// network.
type MakeRoot<'a> =
    &'a mut dyn FnMut(&BuildSite<'_>, &mut dyn FnMut(Progress<'_>)) -> Result<PathBuf, BuildError>;

/// State of the template of a recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecipeStatus {
    /// The template is not built.
    Missing,
    /// The template was built from another recipe.
    Outdated,
    /// The template was built from an equal recipe.
    Current,
}

/// Returns the state of the template of `recipe`.
///
/// # Errors
/// The manifest of the template cannot be read.
pub fn recipe_status(
    templates: &Templates,
    recipe: &Recipe,
) -> Result<RecipeStatus, TemplateError> {
    let reference = Reference::parse(recipe.name())?;
    Ok(match templates.look_up(&reference)? {
        None => RecipeStatus::Missing,
        Some(manifest) if manifest.recipe_sha256 == recipe.hash() => RecipeStatus::Current,
        Some(_) => RecipeStatus::Outdated,
    })
}

/// Returns the template of `recipe`. Builds it unless it exists with an equal recipe.
///
/// Concurrent callers wait for one build. Needs root, `mmdebstrap` and `mkfs.erofs`.
pub fn build_if_needed(
    templates: &Templates,
    recipe: &Recipe,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Template, BuildError> {
    if let Some(template) = up_to_date(templates, recipe)? {
        return Ok(template);
    }
    // If an exported stock template is available, its import replaces the slower build.
    if let Some(template) = import_stock(templates, recipe, on_progress)? {
        return Ok(template);
    }
    // The base template is held until this template is published, so that its image is not removed.
    let below = match &recipe.from {
        Some(from) => Some(build_if_needed(templates, from, on_progress)?),
        None => None,
    };
    let make_root: MakeRoot<'_> = &mut |site, on_progress| {
        if !nix::unistd::Uid::effective().is_root() || jiffy_rootless::maps_only_itself() {
            return Err(BuildError::NotRoot);
        }
        // Packages take 85 % of the time, the image 10 %, and its checksum the rest.
        let report = &mut |line: &str, percent: u8| {
            on_progress(Progress::Line(line));
            on_progress(Progress::Percent(
                u8::try_from(u32::from(percent) * 85 / 100).unwrap_or(0),
            ));
        };
        Ok(match &below {
            None => rootfs::bootstrap(recipe, site, report)?,
            Some(below) => rootfs_layer::build(recipe, only_image(below)?, site, report)?,
        })
    };
    // A derived template shares the images of its base.
    let below = below.as_ref().map(|t| &t.manifest.images[..]);
    build_with(
        templates,
        &templates.home,
        recipe,
        below.unwrap_or_default(),
        make_root,
        on_progress,
    )
}

/// Returns the image of a template that must have exactly one.
fn only_image(below: &Template) -> Result<&Path, BuildError> {
    match &below.images[..] {
        [image] => Ok(&image.path),
        images => Err(BuildError::Stacked {
            name: below.manifest.reference(),
            images: images.len(),
        }),
    }
}

/// Builds a template from the images of its base template, `below`, and a new image.
fn build_with(
    templates: &Templates,
    home: &Home,
    recipe: &Recipe,
    below: &[ImageSum],
    make_root: MakeRoot<'_>,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Template, BuildError> {
    let name = recipe.name();
    // Checks without the lock first, so that an up-to-date template requires no wait.
    if let Some(template) = up_to_date(templates, recipe)? {
        return Ok(template);
    }
    let began = Instant::now();
    let reference = Reference::parse(name)?;
    let lock = templates.lock(&reference, &mut |()| {
        on_progress(Progress::Phase(Phase::Waiting))
    })?;
    // Another process may have built the template while this process waited for the lock.
    if let Some(template) = up_to_date(templates, recipe)? {
        return Ok(template);
    }
    let work = WorkDir::create(templates.unfinished(&reference))?;
    // The cache survives the build, unlike the working directory.
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
    // Shared lock on the images, held until the manifest refers to the new image. Without the lock,
    // the garbage collector could remove the image before.
    let shared = ImageStore::new(home).share()?;
    let root = ImageRoot::Marked(root);
    let image = write_image::<BuildError>(home, &root, recipe.hash(), &work, &lock, on_progress)?;
    // Stock templates are public. Other templates keep the visibility of the replaced template.
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
        idle_timeout_s: None,
        network: Default::default(),
        startup: recipe.startup(),
        origin: None,
    };
    templates.publish(&plan.manifest(), &work, &lock)?;
    let template = templates.get(name)?;
    // `prune_if_idle` needs the exclusive lock.
    drop(shared);
    templates.prune_if_idle();
    on_progress(Progress::Percent(100));
    // The returned value keeps its images from being removed.
    Ok(template)
}

/// Returns the template if it was built from an equal recipe.
fn up_to_date(templates: &Templates, recipe: &Recipe) -> Result<Option<Template>, TemplateError> {
    // This check avoids an error if the template does not exist.
    if !templates
        .directory(&Reference::parse(recipe.name())?)
        .is_dir()
    {
        return Ok(None);
    }
    let template = templates.get(recipe.name())?;
    Ok((template.manifest.recipe_sha256 == recipe.hash()).then_some(template))
}

#[cfg(test)]
pub(crate) mod tests;
