//! Templates of a data directory: bootable images with defaults, each under a name and a tag.
//!
//! The *version* of a template is a hash of its images, defaults and startup settings.
//!
//! A template is a directory with a manifest. The manifest names the images by digest; the images
//! themselves are in the [`ImageStore`]. Every change replaces the whole directory atomically under
//! the lock of the template, so reading a manifest needs no lock.

use crate::file::{FileError, OnPath, UNFINISHED};
use crate::home::Home;
use crate::images::ImageStore;
use crate::lock::Lock;
use crate::template_model::{
    MANIFEST, Reference, Template, TemplateError, TemplateManifest, Visibility,
};
use crate::version;
use crate::work_dir::{WorkDir, remove_tree};
use jiffy_engine_api::is_reserved;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// Name of the image in the directory of a format 1 manifest.
const FORMAT_1_IMAGE: &str = "rootfs.erofs";
/// Maximum number of templates that a message lists.
const MAX_NAMED: usize = 50;

/// The templates of a data directory.
#[derive(Clone, Debug)]
pub struct Templates {
    pub(crate) home: Home,
    pub(crate) index: Arc<TemplateIndex>,
}

impl Templates {
    pub fn new(home: &Home) -> Self {
        Self {
            home: home.clone(),
            index: Arc::default(),
        }
    }

    /// Returns all templates, sorted by owner, name and tag. Images are not verified until they are
    /// opened.
    pub fn list(&self) -> Result<Vec<TemplateManifest>, TemplateError> {
        let references = self.references()?;
        let found = references.iter().map(|r| self.look_up(r));
        found.filter_map(Result::transpose).collect()
    }

    /// Returns the time of the last change, with the resolution of the file system's time stamps.
    pub fn changed(&self) -> Option<SystemTime> {
        fs::metadata(self.home.templates()).ok()?.modified().ok()
    }

    /// Returns the manifest of a template. Images are not verified.
    pub fn manifest(&self, name: &str) -> Result<TemplateManifest, TemplateError> {
        let reference = Reference::parse(name)?;
        self.look_up(&reference)?
            .ok_or_else(|| self.unknown(&reference))
    }

    /// Returns the manifest of a template if it exists. Images are not verified.
    pub fn look_up(
        &self,
        reference: &Reference,
    ) -> Result<Option<TemplateManifest>, TemplateError> {
        let directory = self.directory(reference);
        if !directory.is_dir() {
            // This check is only a shortcut: the directory may still be removed before `load`.
            return Ok(None);
        }
        match self.load(reference) {
            // The template was removed or renamed meanwhile, for example by a build that has
            // finished.
            Err(_) if !directory.exists() => Ok(None),
            loaded => loaded.map(Some),
        }
    }

    /// Returns the path of the manifest. Every change of the template replaces this file.
    pub fn manifest_path(&self, name: &str) -> Result<PathBuf, TemplateError> {
        Ok(self.manifest_file(&Reference::parse(name)?))
    }

    pub(crate) fn manifest_file(&self, reference: &Reference) -> PathBuf {
        self.directory(reference).join(MANIFEST)
    }

    /// Opens and verifies a template.
    pub fn get(&self, name: &str) -> Result<Template, TemplateError> {
        let images = ImageStore::new(&self.home);
        // No image may be removed between reading the manifest and opening the images.
        let _shared = images.share()?;
        let manifest = self.manifest(name)?;
        version::store(&self.home, &manifest)?;
        self.open(manifest, &images)
    }

    /// Opens the version `name@version` of a template (see [`TemplateManifest::version`]). The
    /// version may be superseded.
    pub fn version(&self, name: &str) -> Result<Template, TemplateError> {
        let images = ImageStore::new(&self.home);
        let _shared = images.share()?;
        let manifest = self.find_version(name)?;
        self.open(manifest, &images)
    }

    /// Finds the version `name@version`. Snapshots from before versions existed specify the digest
    /// of the image instead.
    pub(crate) fn find_version(&self, called: &str) -> Result<TemplateManifest, TemplateError> {
        let (name, digest) = called.rsplit_once('@').unwrap_or((called, ""));
        let missing = || TemplateError::Version {
            name: name.to_owned(),
            version: digest.to_owned(),
        };
        if digest.len() != 64 || !digest.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(missing());
        }
        let path = version::path(&self.home, digest);
        if path.exists() {
            let manifest = TemplateManifest::read(&path)?;
            // The file may have been changed by hand: its content must match the digest in its
            // name.
            return (manifest.version() == digest)
                .then_some(manifest)
                .ok_or_else(missing);
        }
        let is_requested =
            |m: &TemplateManifest| m.version() == digest || version::is_of_image(m, digest);
        if let Ok(current) = self.manifest(name)
            && is_requested(&current)
        {
            // From now on the version stays available if the template is replaced.
            version::store(&self.home, &current)?;
            return Ok(current);
        }
        // A stored version with this digest was returned above. The digest may still be the digest
        // of an image.
        let mut versions = version::all(&self.home)?.into_iter().map(|(_, m)| m);
        versions
            .find(|m| m.name == name && is_requested(m))
            .ok_or_else(missing)
    }

    /// Opens the images of a template. The caller must hold a shared lock on the images.
    fn open(
        &self,
        manifest: TemplateManifest,
        images: &ImageStore,
    ) -> Result<Template, TemplateError> {
        let open = manifest.images.iter().map(|sum| images.open(sum));
        let images = open.collect::<Result<_, _>>()?;
        Ok(Template { manifest, images })
    }

    /// Tags the current version of `from` as `to`. The replaced version is retained for its users.
    /// The visibility of a replaced template is inherited; otherwise `visibility` applies.
    pub fn tag(
        &self,
        from: &str,
        to: &str,
        visibility: Visibility,
    ) -> Result<TemplateManifest, TemplateError> {
        let to = Reference::parse(to)?;
        if is_reserved(to.name()) {
            let name = to.name().to_owned();
            return Err(TemplateError::Reserved { name });
        }
        let lock = self.lock(&to, &mut |_| ())?;
        // Lock order: the template first, then the images.
        let _shared = ImageStore::new(&self.home).share()?;
        let mut manifest = self.manifest(from)?;
        manifest.rename(&to);
        manifest.visibility = self.inherited(&to).unwrap_or(visibility);
        let work = WorkDir::create(self.unfinished(&to))?;
        self.publish(&manifest, &work, &lock)?;
        Ok(manifest)
    }

    /// Removes the template with this tag, even if it is corrupted. Its sandboxes and snapshots are
    /// unaffected.
    pub fn remove(&self, name: &str) -> Result<(), TemplateError> {
        let reference = Reference::parse(name)?;
        let _lock = self.lock(&reference, &mut |_| ())?;
        // The directory is renamed before it is removed, so that no reader sees a part of it.
        let (directory, doomed) = (self.directory(&reference), self.unfinished(&reference));
        remove_tree(&doomed)?;
        if let Ok(manifest) = self.load(&reference) {
            self.move_format_1(&manifest, &directory)?;
        }
        match fs::rename(&directory, &doomed) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(self.unknown(&reference)),
            renamed => renamed.on("remove", &directory)?,
        }
        remove_tree(&doomed)?;
        // Images that only this template used can be removed now.
        self.gc_unused()?;
        Ok(())
    }

    /// Moves the image of a format 1 template into the image store before its directory is removed.
    /// In format 1, the directory of a template contained its image.
    pub(crate) fn move_format_1(
        &self,
        manifest: &TemplateManifest,
        directory: &Path,
    ) -> Result<(), FileError> {
        let images = ImageStore::new(&self.home);
        for sum in &manifest.images {
            images.move_format_1(sum, &directory.join(FORMAT_1_IMAGE))?;
        }
        Ok(())
    }

    /// Acquires the lock under which a template is created, replaced or removed.
    pub(crate) fn lock(
        &self,
        reference: &Reference,
        on_wait: &mut dyn FnMut(()),
    ) -> Result<Lock, FileError> {
        let name = format!("template-{}", reference.file_name());
        self.home.lock(&name, || on_wait(()))
    }

    pub(crate) fn directory(&self, reference: &Reference) -> PathBuf {
        self.home.templates().join(reference.file_name())
    }

    /// Returns the working directory for a template. The caller must hold the lock of the template.
    pub(crate) fn unfinished(&self, reference: &Reference) -> PathBuf {
        let name = format!("{UNFINISHED}{}", reference.file_name());
        self.home.templates().join(name)
    }

    /// Returns the error for a template that does not exist, with the names of existing templates
    /// of the same owner.
    pub(crate) fn unknown(&self, reference: &Reference) -> TemplateError {
        let references = match self.references() {
            Ok(references) => references,
            Err(e) => return e.into(),
        };
        // Names of other owners must not be revealed, and internal templates are of no use to the
        // caller.
        let shown = references
            .iter()
            .filter(|r| r.owner() == reference.owner() && !is_reserved(r.name()));
        let mut names: Vec<String> = shown.map(Reference::to_string).collect();
        let others = names.len().saturating_sub(MAX_NAMED);
        names.truncate(MAX_NAMED);
        let names = names.join(", ");
        TemplateError::Unknown {
            name: reference.to_string(),
            known: match (names.is_empty(), others) {
                (true, _) => "no templates exist yet: run `jiffy template build base`".to_owned(),
                (false, 0) => format!("existing templates: {names}"),
                (false, others) => format!(
                    "existing templates: {names} and {others} others; `jiffy template ls` lists them"
                ),
            },
        }
    }

    /// Reads the manifest of a template, and converts a manifest of format 1.
    pub(crate) fn load(&self, reference: &Reference) -> Result<TemplateManifest, TemplateError> {
        let directory = self.directory(reference);
        let path = directory.join(MANIFEST);
        let mut manifest = TemplateManifest::read(&path)?;
        if manifest.reference() != reference.to_string() {
            return Err(TemplateError::Manifest {
                path,
                problem: format!("it is the manifest of `{}`", manifest.reference()),
            });
        }
        if reference.is_stock() {
            // Stock templates that were built before templates had owners become public as well.
            manifest.visibility = Visibility::Public;
        }
        // Manifests of format 1: the store links to the image, which stays in the template's
        // directory.
        for sum in &manifest.images {
            ImageStore::new(&self.home).adopt(sum, &directory.join(FORMAT_1_IMAGE))?;
        }
        Ok(manifest)
    }
}

mod index;
mod namespace;
mod prune;
mod publish;
use index::TemplateIndex;
pub use index::TemplateSummary;
pub use namespace::MovedTemplate;
pub use prune::PrunedImages;
pub(crate) use publish::write_image;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::tests::{FakeRecipe, home};
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn templates_can_be_listed_while_other_templates_are_renamed() {
        let (_dir, home) = home();
        let templates = Templates::new(&home);
        FakeRecipe::new("stays").build(&home).unwrap();
        let manifest = fs::read_to_string(templates.manifest_path("stays").unwrap()).unwrap();
        let names: Vec<_> = (0..300).map(|n| format!("moves{n}")).collect();
        for name in &names {
            let directory = home.templates().join(name);
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join(MANIFEST), manifest.replace("stays", name)).unwrap();
        }
        assert_eq!(templates.list().unwrap().len(), 301);
        let done = AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                for name in &names {
                    let elsewhere = home.templates().with_file_name(name);
                    fs::rename(home.templates().join(name), elsewhere).unwrap();
                }
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) {
                let listed = templates.list().unwrap();
                assert!(listed.iter().any(|m| m.name == "stays"), "{listed:?}");
            }
        });
        assert_eq!(templates.list().unwrap().len(), 1);
    }

    #[test]
    fn the_error_for_an_unknown_template_lists_existing_templates() {
        let (_dir, home) = home();
        let templates = Templates::new(&home);
        let message = templates.get("nope").unwrap_err().to_string();
        assert_eq!(
            message,
            "template `nope` does not exist; no templates exist yet: run `jiffy template build base`"
        );
        FakeRecipe::new("one").build(&home).unwrap();
        FakeRecipe::new("two").build(&home).unwrap();
        templates
            .tag("two", "two:old", Visibility::Private)
            .unwrap();
        let message = templates.get("nope:x").unwrap_err().to_string();
        assert_eq!(
            message,
            "template `nope:x` does not exist; existing templates: one, two, two:old"
        );
        assert_eq!(templates.list().unwrap().len(), 3);
        templates.remove("one:default").unwrap();
        assert!(matches!(
            templates.remove("one"),
            Err(TemplateError::Unknown { .. })
        ));
        assert_eq!(templates.list().unwrap().len(), 2);
    }

    #[test]
    fn a_corrupted_or_truncated_image_is_rejected_with_its_path() {
        let (_dir, home) = home();
        let template = FakeRecipe::new("one").build(&home).unwrap();
        let image = &template.images[0];
        let file = fs::File::options().write(true).open(&image.path).unwrap();
        file.write_all_at(b"X", 0).unwrap();
        let message = Templates::new(&home).get("one").unwrap_err().to_string();
        assert!(
            message.starts_with(&format!(
                "template image {} is corrupted",
                image.path.display()
            )),
            "{message}"
        );
        file.set_len(image.size - 1).unwrap();
        let message = Templates::new(&home).get("one").unwrap_err().to_string();
        assert!(
            message.contains(&format!(
                "expected {} bytes, found {}",
                image.size,
                image.size - 1
            )),
            "{message}"
        );
    }

    #[test]
    fn a_damaged_manifest_is_rejected_with_its_path() {
        let (_dir, home) = home();
        FakeRecipe::new("one").build(&home).unwrap();
        let path = Templates::new(&home).manifest_path("one").unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "{}").unwrap();
        let message = Templates::new(&home).get("one").unwrap_err().to_string();
        assert!(
            message.starts_with(&format!("cannot read manifest {}", path.display())),
            "{message}"
        );
    }

    /// Creates a template of format 1, whose image is in the directory of its manifest.
    fn in_the_first_format(home: &Home) -> (Template, PathBuf) {
        let template = FakeRecipe::new("one").build(home).unwrap();
        let path = Templates::new(home).manifest_path("one").unwrap();
        let mut old = serde_json::to_value(&template.manifest).unwrap();
        old["image"] = old["images"][0].take();
        old["format"] = 1.into();
        for added in ["images", "tag", "history", "visibility"] {
            old.as_object_mut().unwrap().remove(added);
        }
        fs::remove_file(&path).unwrap();
        fs::write(&path, old.to_string()).unwrap();
        let image = path.with_file_name(FORMAT_1_IMAGE);
        fs::rename(&template.images[0].path, &image).unwrap();
        fs::remove_dir_all(home.versions()).unwrap();
        fs::create_dir(home.versions()).unwrap();
        (template, image)
    }

    #[test]
    fn a_borrowed_template_stays_in_its_data_directory() {
        let ((_a, lender), (_b, home)) = (home(), home());
        let (_, old) = in_the_first_format(&lender);
        let borrowed = home.templates().join("one");
        std::os::unix::fs::symlink(lender.templates().join("one"), &borrowed).unwrap();
        let templates = Templates::new(&home);
        templates.get("one").unwrap();
        templates.remove("one").unwrap();
        assert!(old.exists() && !borrowed.exists());
        Templates::new(&lender).get("one").unwrap();
    }

    #[test]
    fn a_format_1_template_is_used_and_its_image_outlives_it() {
        let (_dir, home) = home();
        let (was, old) = in_the_first_format(&home);
        let templates = Templates::new(&home);
        let found = templates.get("one").unwrap();
        assert_eq!(found.manifest.version(), was.manifest.version());
        // Form of the reference in snapshots of that time.
        let by_image = format!("one@{}", was.images[0].sha256);
        assert_eq!(
            templates.version(&by_image).unwrap().manifest.images,
            was.manifest.images
        );
        FakeRecipe::with_package("one", "curl")
            .build(&home)
            .unwrap();
        assert!(!old.exists());
        // The new build moved the old image into the store and retained the version.
        assert_eq!(
            templates.version(&by_image).unwrap().manifest.images,
            was.manifest.images
        );
    }
}
