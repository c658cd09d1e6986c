//! Templates derived from another template and a layer of changes.

use crate::builder::{self, BuildError, ManifestFields, WorkDir};
use crate::erofs::ImageRoot;
use crate::file::OnPath;
use crate::images::ImageStore;
use crate::import::{DiskBudget, ImportError, check_name};
use crate::layer::confined::{unpack, unpack_image};
use crate::layer::{UnpackLimits, merge};
use crate::manifest::{
    Defaults, HistoryStep, ImageOrigin, ImageSum, MAX_IMAGES, TemplateManifest, Visibility,
};
use crate::progress::{Phase, Progress};
use crate::reference::Reference;
use crate::template::{Template, Templates};
use crate::verified::sum_of;
use jiffy_engine_api::{FirstUse, Readiness, SandboxSize, Startup};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Description of a derived template.
#[derive(Clone, Debug)]
pub struct DerivedTemplate<'a> {
    /// `[owner/]name[:tag]`.
    pub name: &'a str,
    /// None: that of the replaced template, else private.
    pub visibility: Option<Visibility>,
    /// Base template, possibly without images. Its images exist while a [`Template`] of it is held.
    pub base: &'a TemplateManifest,
    pub defaults: Defaults,
    pub startup: Startup,
    pub origin: Option<ImageOrigin>,
    /// Steps that were applied to the base.
    pub history: Vec<HistoryStep>,
    /// SHA-256 of all inputs, lower-case hexadecimal.
    pub recipe_sha256: String,
    /// Limits of the layer.
    pub limits: UnpackLimits,
    /// Budget for the files of the layer while it is unpacked.
    pub disk: DiskBudget,
}

impl Templates {
    /// Creates a template from `derived.base` and `layer`: a tar of the changes, optionally
    /// compressed, in the format of OCI layers.
    ///
    /// Blocks. Needs root and `mkfs.erofs`. Replaces a template of the same name; its sandboxes are
    /// unaffected.
    pub fn derive(
        &self,
        derived: &DerivedTemplate<'_>,
        layer: impl Read + Send,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Template, ImportError> {
        let reference = derived.check()?;
        if !nix::unistd::Uid::effective().is_root() || jiffy_rootless::current().is_some() {
            return Err(ImportError::NotRoot);
        }
        let lock = self.lock(&reference, &mut |()| {
            on_progress(Progress::Phase(Phase::Waiting))
        })?;
        let store = ImageStore::new(&self.home);
        let shared = store.share()?;
        for sum in &derived.base.images {
            store.open(sum)?;
        }
        let work = WorkDir::begin(self.unfinished(&reference)).map_err(BuildError::from)?;
        let began = Instant::now();
        let root = work.0.join("layer");
        fs::create_dir(&root).on("create", &root)?;
        on_progress(Progress::Phase(Phase::Layers));
        let meter = |bytes| derived.disk.reserve(bytes);
        let unpacked = unpack(layer, &root, derived.limits, &meter, &mut |_| ());
        let what = || format!("what was changed for template `{reference}`");
        let unpacked = unpacked.map_err(|source| ImportError::layer(what(), source))?;
        if !unpacked.end_mark {
            // Only the end mark shows that the archive is complete.
            return Err(ImportError::Layer {
                what: format!("what was changed for template `{reference}`"),
                source: crate::layer::LayerError::Truncated,
            });
        }

        let mut images = derived.base.images.clone();
        if unpacked.opaque {
            // The layer hides all images below.
            images.clear();
        }
        let mut history = [&derived.base.history[..], &derived.history[..]].concat();
        if unpacked.entries > 0 || images.is_empty() {
            on_progress(Progress::Percent(50));
            let mut text = "image of what changed".to_owned();
            let mut root = root;
            if images.len() >= MAX_IMAGES {
                // At the maximum number of images, all but the lowest are merged.
                text.push_str(&format!(" and of {} images below", images.len() - 1));
                root = derived.merge_images(&store, &images, &root, &work)?;
                images.truncate(1);
            }
            let id = sum_of(format!("{images:?} {}", unpacked.diff_id).as_bytes());
            let root = ImageRoot::Marked(root);
            let image = builder::write_image(&self.home, &root, &id, &work, &lock, on_progress)?;
            history.push(HistoryStep {
                text,
                seconds: began.elapsed().as_secs_f64(),
                bytes: Some(image.size),
            });
            // The new image may equal one below, and overlayfs accepts no directory twice.
            images.retain(|i| *i != image);
            images.push(image);
        }
        let plan = ManifestFields {
            reference: &reference,
            visibility: self.visibility(&reference, derived.visibility),
            hash: &derived.recipe_sha256,
            images,
            defaults: &derived.defaults,
            startup: derived.startup.clone(),
            origin: derived.origin.clone(),
            history,
        };
        builder::publish(self, &plan.manifest(), &work, &lock)?;
        let template = self.get(&reference.to_string())?;
        drop(shared);
        self.prune_if_idle();
        on_progress(Progress::Percent(100));
        Ok(template)
    }
}

impl DerivedTemplate<'_> {
    fn check(&self) -> Result<Reference, ImportError> {
        let reference = check_name(self.name, self.visibility)?;
        sound(&self.defaults, &self.startup)?;
        Ok(reference)
    }

    /// Merges `layer` and all of `images` but the lowest into one directory, with the same meaning
    /// above the lowest.
    fn merge_images(
        &self,
        store: &ImageStore,
        images: &[ImageSum],
        layer: &Path,
        work: &WorkDir,
    ) -> Result<PathBuf, ImportError> {
        let whole = work.0.join("together");
        for (n, sum) in images.iter().enumerate().skip(1) {
            let first = !whole.exists();
            let root = match first {
                true => whole.clone(),
                false => work.0.join(format!("image-{n}")),
            };
            fs::create_dir(&root).on("create", &root)?;
            let image = store.open(sum)?;
            let unpacked = unpack_image(&image.file, &root, self.limits);
            let put = unpacked.and_then(|()| if first { Ok(()) } else { merge(&root, &whole) });
            put.map_err(|source| ImportError::Layer {
                what: format!("image sha256 {} of template `{}`", sum.sha256, self.name),
                source,
            })?;
        }
        merge(layer, &whole).map_err(|source| ImportError::Layer {
            what: format!("what was changed for template `{}`", self.name),
            source,
        })?;
        Ok(whole)
    }
}

/// Rejects defaults and startups that no sandbox can have.
pub(crate) fn sound(defaults: &Defaults, startup: &Startup) -> Result<(), ImportError> {
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
