//! Templates that are another one and what was changed of it.

use crate::builder::{self, BuildError, Plan, Work};
use crate::erofs::Root;
use crate::file::OnPath;
use crate::images::Images;
use crate::import::{ImportError, free_name};
use crate::layer::apart::{unpack, unpack_image};
use crate::layer::{Limits, merge};
use crate::manifest::{Defaults, ImageSum, MAX_IMAGES, Manifest, Origin, Step, Visibility};
use crate::progress::{Phase, Progress};
use crate::reference::Reference;
use crate::template::{Template, Templates};
use crate::verified::sum_of;
use jiffy_engine::{Readiness, SandboxSize, Startup};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// What is to become a template.
#[derive(Clone, Debug)]
pub struct Derived<'a> {
    /// `[owner/]name[:tag]`.
    pub name: &'a str,
    /// None: that of the template in its place, else private.
    pub visibility: Option<Visibility>,
    /// What was changed. With no images: nothing at all. Its images are there as long as somebody holds the [`Template`].
    pub base: &'a Manifest,
    pub defaults: Defaults,
    pub startup: Startup,
    pub origin: Option<Origin>,
    /// What was done to the base.
    pub history: Vec<Step>,
    /// SHA-256 of all that went into it, lower-case hexadecimal.
    pub recipe_sha256: String,
    /// Bounds for the layer.
    pub limits: Limits,
}

impl Templates {
    /// Makes a template of `derived.base` and `layer`: a tar of what changed, perhaps compressed, as layers of OCI images are.
    ///
    /// Blocks. Needs root and `mkfs.erofs`. A template of that name is replaced; what was made of it goes on.
    pub fn derive(
        &self,
        derived: &Derived<'_>,
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
        let store = Images::new(&self.home);
        let shared = store.share()?;
        for sum in &derived.base.images {
            store.open(sum)?;
        }
        let work = Work::begin(self.unfinished(&reference)).map_err(BuildError::from)?;
        let began = Instant::now();
        let root = work.0.join("layer");
        fs::create_dir(&root).on("create", &root)?;
        on_progress(Progress::Phase(Phase::Layers));
        let unpacked = unpack(layer, &root, derived.limits, &mut |_| ());
        let unpacked = unpacked.map_err(|source| ImportError::Layer {
            what: format!("what was changed for template `{reference}`"),
            source,
        })?;
        if !unpacked.end_mark {
            // Nothing else tells that it is whole.
            return Err(ImportError::Layer {
                what: format!("what was changed for template `{reference}`"),
                source: crate::layer::LayerError::Truncated,
            });
        }

        let mut images = derived.base.images.clone();
        if unpacked.opaque {
            // Nothing below shows through.
            images.clear();
        }
        let mut history = [&derived.base.history[..], &derived.history[..]].concat();
        if unpacked.entries > 0 || images.is_empty() {
            on_progress(Progress::Percent(50));
            let mut text = "image of what changed".to_owned();
            let mut root = root;
            if images.len() >= MAX_IMAGES {
                // A sandbox takes no more: all but the lowest become one.
                text.push_str(&format!(" and of {} images below", images.len() - 1));
                root = derived.put_together(&store, &images, &root, &work)?;
                images.truncate(1);
            }
            let id = sum_of(format!("{images:?} {}", unpacked.diff_id).as_bytes());
            let root = Root::Marked(root);
            let image = builder::write_image(&self.home, &root, &id, &work, &lock, on_progress)?;
            history.push(Step {
                text,
                seconds: began.elapsed().as_secs_f64(),
                bytes: Some(image.size),
            });
            // Its own content may be that of one below: overlayfs takes none twice.
            images.retain(|i| *i != image);
            images.push(image);
        }
        let plan = Plan {
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
        self.prune_if_quiet();
        on_progress(Progress::Percent(100));
        Ok(template)
    }
}

impl Derived<'_> {
    fn check(&self) -> Result<Reference, ImportError> {
        let reference = free_name(self.name, self.visibility)?;
        sound(&self.defaults, &self.startup)?;
        Ok(reference)
    }

    /// What is in `layer` and in all of `images` but the lowest, in one directory that means the same above that one.
    fn put_together(
        &self,
        store: &Images,
        images: &[ImageSum],
        layer: &Path,
        work: &Work,
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

/// Refuses what no sandbox could be.
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
    (probe.and_then(Result::err)).map_or(Ok(()), |e| Err(ImportError::Choice(e)))
}

#[cfg(test)]
mod tests;
