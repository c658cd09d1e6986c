//! Derives a template from another template and a layer of changes. The template builder publishes
//! its results in this way.
//!
//! A *layer* of a container image is an archive with the files that one step of its build changed.
//! Its *diff id* is the SHA-256 of the uncompressed archive. An *opaque* layer hides all layers
//! below it.

use crate::erofs::ImageRoot;
use crate::file::OnPath;
use crate::images::ImageStore;
use crate::import::{DiskBudget, ImportError, check_defaults, check_name};
use crate::layer::confined::{unpack, unpack_image};
use crate::layer::{UnpackLimits, merge};
use crate::progress::{Phase, Progress};
use crate::template_model::{
    Defaults, HistoryStep, ImageOrigin, ImageSum, MAX_IMAGES, ManifestFields, Reference, Template,
    TemplateManifest, Visibility,
};
use crate::templates::{Templates, write_image};
use crate::verified::sum_of;
use crate::work_dir::WorkDir;
use jiffy_engine_api::{Startup, TemplateNetwork};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Description of a derived template.
#[derive(Clone, Debug)]
pub struct DerivedTemplate<'a> {
    /// `[owner/]name[:tag]`.
    pub name: &'a str,
    /// Visibility. If `None`, the visibility of the replaced template, or private for a new
    /// template.
    pub visibility: Option<Visibility>,
    /// Base template, possibly without images. The caller must hold a [`Template`] of it, so that
    /// its images are not removed.
    pub base: &'a TemplateManifest,
    pub defaults: Defaults,
    /// Default idle timeout of its sandboxes in seconds.
    pub idle_timeout_s: Option<u64>,
    /// Network rules of its sandboxes. If empty, the rules of the base apply.
    pub network: TemplateNetwork,
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

impl DerivedTemplate<'_> {
    /// Creates a template from `base` and `layer`, a tar archive of the changes in the format of
    /// OCI layers, optionally compressed.
    ///
    /// Blocks the calling thread. Requires root and `mkfs.erofs`. Replaces a template of the same
    /// name; sandboxes of the replaced template are unaffected.
    pub fn build(
        &self,
        templates: &Templates,
        layer: impl Read + Send,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Template, ImportError> {
        let reference = self.check()?;
        if !nix::unistd::Uid::effective().is_root() || jiffy_rootless::current().is_some() {
            return Err(ImportError::NotRoot);
        }
        let lock = templates.lock(&reference, &mut |()| {
            on_progress(Progress::Phase(Phase::Waiting))
        })?;
        // The template is locked before the images, as everywhere.
        let store = ImageStore::new(&templates.home);
        let shared = store.share()?;
        // The build fails early if an image of the base is missing or damaged.
        for sum in &self.base.images {
            store.open(sum)?;
        }
        let work = WorkDir::create(templates.unfinished(&reference))?;
        let began = Instant::now();
        let root = work.0.join("layer");
        fs::create_dir(&root).on("create", &root)?;
        on_progress(Progress::Phase(Phase::Layers));
        let meter = |bytes| self.disk.reserve(bytes);
        let unpacked = unpack(layer, &root, self.limits, &meter, &mut |_| ());
        let what = || format!("the layer of changes for template `{reference}`");
        let unpacked = unpacked.map_err(|source| ImportError::layer(what(), source))?;
        if !unpacked.end_mark {
            // A truncated archive can be recognised only by its missing end mark.
            return Err(ImportError::Layer {
                what: format!("the layer of changes for template `{reference}`"),
                source: crate::layer::LayerError::Truncated,
            });
        }

        let mut images = self.base.images.clone();
        if unpacked.opaque {
            // The layer hides all images below.
            images.clear();
        }
        let mut history = [&self.base.history[..], &self.history[..]].concat();
        if unpacked.entries > 0 || images.is_empty() {
            on_progress(Progress::Percent(50));
            let mut text = "image of the changes".to_owned();
            let mut root = root;
            if images.len() >= MAX_IMAGES {
                // At the maximum number of images, all but the lowest are merged.
                text.push_str(&format!(" and of {} images below", images.len() - 1));
                root = self.merge_images(&store, &images, &root, &work)?;
                images.truncate(1);
            }
            // The UUID of the image depends only on the images below it and on the layer, so that
            // an equal build gives an equal image.
            let id = sum_of(format!("{images:?} {}", unpacked.diff_id).as_bytes());
            let root = ImageRoot::Marked(root);
            let image =
                write_image::<ImportError>(&templates.home, &root, &id, &work, &lock, on_progress)?;
            history.push(HistoryStep {
                text,
                seconds: began.elapsed().as_secs_f64(),
                bytes: Some(image.size),
            });
            // The new image may equal an image below it, and overlayfs rejects a directory that is
            // listed twice.
            images.retain(|i| *i != image);
            images.push(image);
        }
        let plan = ManifestFields {
            reference: &reference,
            visibility: templates.visibility(&reference, self.visibility),
            hash: &self.recipe_sha256,
            images,
            defaults: &self.defaults,
            idle_timeout_s: self.idle_timeout_s,
            network: if self.network.is_empty() {
                self.base.network.clone()
            } else {
                self.network.clone()
            },
            startup: self.startup.clone(),
            origin: self.origin.clone(),
            history,
        };
        templates.publish(&plan.manifest(), &work, &lock)?;
        let template = templates.get(&reference.to_string())?;
        // `prune_if_idle` needs the exclusive lock.
        drop(shared);
        templates.prune_if_idle();
        on_progress(Progress::Percent(100));
        Ok(template)
    }

    fn check(&self) -> Result<Reference, ImportError> {
        let reference = check_name(self.name, self.visibility)?;
        check_defaults(&self.defaults, &self.startup)?;
        Ok(reference)
    }

    /// Merges `layer` and all `images` except the lowest into one directory. An overlay of the
    /// merged directory on the lowest image has the same content as an overlay of the separate
    /// layers.
    fn merge_images(
        &self,
        store: &ImageStore,
        images: &[ImageSum],
        layer: &Path,
        work: &WorkDir,
    ) -> Result<PathBuf, ImportError> {
        let merged = work.0.join("merged");
        for (n, sum) in images.iter().enumerate().skip(1) {
            // The first image is unpacked directly into the target directory.
            let first = !merged.exists();
            let root = if first {
                merged.clone()
            } else {
                work.0.join(format!("image-{n}"))
            };
            fs::create_dir(&root).on("create", &root)?;
            let image = store.open(sum)?;
            let unpacked = unpack_image(&image.file, &root, self.limits);
            let put = unpacked.and_then(|()| if first { Ok(()) } else { merge(&root, &merged) });
            put.map_err(|source| ImportError::Layer {
                what: format!("image sha256 {} of template `{}`", sum.sha256, self.name),
                source,
            })?;
        }
        merge(layer, &merged).map_err(|source| ImportError::Layer {
            what: format!("the layer of changes for template `{}`", self.name),
            source,
        })?;
        Ok(merged)
    }
}

#[cfg(test)]
mod tests;
