//! Owners and visibility of templates, their tags, and the removal of internal templates.
//!
//! A *stock template* is a template whose recipe Jiffy contains. A *borrowed* template is a
//! symbolic link to a template in another data directory.

use crate::file::{FileError, OnPath};
use crate::images::ImageStore;
use crate::template_model::{Reference, TemplateError, TemplateManifest, Visibility};
use crate::templates::Templates;
use crate::version;
use crate::work_dir::WorkDir;
use jiffy_engine_api::{
    IMPORTED_IMAGE_PREFIX, UNFINISHED_BUILD_PREFIX, is_imported_image, is_unfinished_build,
};
use std::fs;

/// A template that [`Templates::move_to_owners`] moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovedTemplate {
    /// Former name.
    pub from: Reference,
    /// New name.
    pub to: Reference,
}

impl Templates {
    /// Returns the visibility of a template that is published: the requested visibility, else the
    /// visibility of the existing template, else private.
    pub(crate) fn visibility(
        &self,
        reference: &Reference,
        requested: Option<Visibility>,
    ) -> Visibility {
        let inherited = || self.inherited(reference);
        requested.or_else(inherited).unwrap_or_default()
    }

    /// Returns the visibility of the template with this name, or of its other tags. Returns `None`
    /// for internal templates.
    pub(crate) fn inherited(&self, reference: &Reference) -> Option<Visibility> {
        // Unreadable manifests are skipped: the template is replaced anyway.
        let of = |r: &Reference| self.load(r).ok().map(|m| m.visibility);
        let visibility = of(reference).or_else(|| {
            let all = self.references().unwrap_or_default();
            let same = |r: &&Reference| r.without_tag() == reference.without_tag();
            all.iter().filter(same).find_map(of)
        });
        // Internal templates are created by Jiffy itself. Their visibility is not passed on to a
        // template of a user.
        visibility.filter(|v| *v != Visibility::Internal)
    }

    /// Returns all tags of the template `name` (`[owner/]name`). A tag in `name` is ignored.
    pub fn tags(&self, name: &str) -> Result<Vec<Reference>, TemplateError> {
        let template = Reference::parse(name)?.without_tag();
        let mut references = self.references()?;
        references.retain(|r| r.without_tag() == template);
        Ok(references)
    }

    /// Makes the template `name` (`[owner/]name`) with all its tags public or private.
    pub fn set_visibility(&self, name: &str, visibility: Visibility) -> Result<(), TemplateError> {
        let reference = Reference::parse(name)?;
        // Stock templates are always public.
        if reference.is_stock() {
            return Err(TemplateError::Stock {
                name: reference.without_tag(),
            });
        }
        let tags = self.tags(name)?;
        if tags.is_empty() {
            return Err(self.unknown(&reference));
        }
        for tag in tags {
            self.change(&tag, |manifest| manifest.visibility = visibility)?;
        }
        Ok(())
    }

    /// Rewrites a manifest.
    fn change(
        &self,
        reference: &Reference,
        change: impl FnOnce(&mut TemplateManifest),
    ) -> Result<(), TemplateError> {
        let lock = self.lock(reference, &mut |()| ())?;
        let _shared = ImageStore::new(&self.home).share()?;
        let before = self.load(reference)?;
        let mut manifest = before.clone();
        change(&mut manifest);
        // An unchanged template retains its modification time, so indexes stay valid.
        if manifest != before {
            let work = WorkDir::create(self.unfinished(reference))?;
            self.publish(&manifest, &work, &lock)?;
        }
        Ok(())
    }

    /// Moves each template without an owner to the owner that `owner_of` returns. Templates of
    /// unfinished builds and of imported images become [`Visibility::Internal`]. Borrowed templates
    /// are unchanged. If a crash interrupts a move, the next call completes it: a template is
    /// published under its new name before the old name is removed.
    pub fn move_to_owners(
        &self,
        owner_of: &dyn Fn(&str) -> Option<(String, Visibility)>,
    ) -> Result<Vec<MovedTemplate>, TemplateError> {
        let mut moved = Vec::new();
        // Borrowed templates belong to another data directory, whose daemon moves them.
        if self.is_borrowed() {
            return Ok(moved);
        }
        for from in self.references()? {
            let place = self.directory(&from);
            // A single template may be borrowed as well.
            let borrowed = fs::symlink_metadata(&place).is_ok_and(|m| m.is_symlink());
            if from.owner().is_some() || borrowed || from.is_stock() {
                // Stock templates stay without an owner, since they are the same for every key.
                continue;
            }
            // No sandbox can be created from a template whose manifest is unreadable.
            let Ok(manifest) = self.load(&from) else {
                continue;
            };
            match owner_of(from.name()) {
                Some((owner, visibility)) => {
                    let to = Reference::in_namespace(Some(&owner), &bare(&from))?;
                    self.move_one(manifest, &from, &to, visibility)?;
                    moved.push(MovedTemplate { from, to });
                }
                None if is_unfinished_build(from.name()) || is_imported_image(from.name()) => {
                    self.change(&from, |m| m.visibility = Visibility::Internal)?;
                }
                // The template belongs to the owner of the host and is not moved.
                None => {}
            }
        }
        Ok(moved)
    }

    /// Removes unfinished templates of builds, and returns their names. The caller must ensure that
    /// no build is running.
    pub fn remove_unfinished_builds(&self) -> Result<Vec<String>, TemplateError> {
        self.remove_internal(UNFINISHED_BUILD_PREFIX, &|r, _| {
            is_unfinished_build(r.name())
        })
    }

    /// Removes templates that were imported for builds at or before the time `before`, in seconds
    /// since 1970, and returns their names. Templates based on them are not removed. The caller
    /// must ensure that no build is running.
    pub fn remove_imported_images(&self, before: u64) -> Result<Vec<String>, TemplateError> {
        self.remove_internal(IMPORTED_IMAGE_PREFIX, &|r, m| {
            is_imported_image(r.name()) && m.created <= before
        })
    }

    /// Returns whether all templates are borrowed from another data directory.
    fn is_borrowed(&self) -> bool {
        fs::symlink_metadata(self.home.templates()).is_ok_and(|m| m.is_symlink())
    }

    /// Returns the references of all templates, sorted.
    pub(crate) fn references(&self) -> Result<Vec<Reference>, FileError> {
        self.references_with("")
    }

    /// Returns the references whose file name contains `part`.
    pub(crate) fn references_with(&self, part: &str) -> Result<Vec<Reference>, FileError> {
        let path = self.home.templates();
        let mut references = Vec::new();
        for entry in fs::read_dir(&path).on("list", &path)? {
            let name = entry.on("list", &path)?.file_name();
            let name = name.to_str().filter(|name| name.contains(part));
            // Names of other files, such as unfinished directories, are not references.
            references.extend(name.and_then(Reference::of_file));
        }
        references.sort();
        Ok(references)
    }

    /// Removes internal templates for which `is_selected` returns true. Reads only the manifests of
    /// templates whose name contains `part`.
    fn remove_internal(
        &self,
        part: &str,
        is_selected: &dyn Fn(&Reference, &TemplateManifest) -> bool,
    ) -> Result<Vec<String>, TemplateError> {
        let mut removed = Vec::new();
        if self.is_borrowed() {
            return Ok(removed);
        }
        for reference in self.references_with(part)? {
            // Unreadable templates are skipped: a user may still repair or remove them.
            let internal = self
                .load(&reference)
                .is_ok_and(|m| m.visibility == Visibility::Internal && is_selected(&reference, &m));
            if internal {
                self.remove(&reference.to_string())?;
                removed.push(reference.to_string());
            }
        }
        Ok(removed)
    }

    /// Moves a template to another owner or name. The new name is published before the old one is
    /// removed.
    fn move_one(
        &self,
        mut manifest: TemplateManifest,
        from: &Reference,
        to: &Reference,
        visibility: Visibility,
    ) -> Result<(), TemplateError> {
        let lock = self.lock(to, &mut |()| ())?;
        // The shared lock must be released before `remove`, whose garbage collection needs the
        // exclusive lock.
        {
            let _shared = ImageStore::new(&self.home).share()?;
            // Snapshots of the template refer to its version.
            version::store(&self.home, &manifest)?;
            manifest.rename(to);
            manifest.visibility = visibility;
            let work = WorkDir::create(self.unfinished(to))?;
            self.publish(&manifest, &work, &lock)?;
        }
        // After a crash at this point both names exist. The next call publishes again and removes
        // the old name.
        self.remove(&from.to_string())
    }
}

/// Returns `name[:tag]`.
fn bare(reference: &Reference) -> String {
    if reference.is_default() {
        reference.name().to_owned()
    } else {
        format!("{}:{}", reference.name(), reference.tag())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::tests::{FakeRecipe, home};
    use std::os::unix::fs::symlink;

    const KEY: &str = "abcdefghijkmnpqrstuv";

    #[test]
    fn templates_of_a_key_move_to_it_once_and_keep_their_versions() {
        let (_dir, home) = home();
        let templates = Templates::new(&home);
        let theirs = FakeRecipe::new("theirs").build(&home).unwrap();
        let version = format!("theirs@{}", theirs.manifest.version());
        drop(theirs);
        templates
            .tag("theirs", "theirs:v1", Visibility::Private)
            .unwrap();
        FakeRecipe::new("mine").build(&home).unwrap();
        let (build, image) = (
            "build-01234567-89ab-4cde-8f01-23456789abcd",
            "image-python-3.12-01234567",
        );
        FakeRecipe::new(build).build(&home).unwrap();
        FakeRecipe::new(image).build(&home).unwrap();
        let owner_of =
            |name: &str| (name == "theirs").then(|| (KEY.to_owned(), Visibility::Public));
        let moved = templates.move_to_owners(&owner_of).unwrap();
        let names: Vec<String> = moved.iter().map(|m| m.to.to_string()).collect();
        assert_eq!(names, [format!("{KEY}/theirs"), format!("{KEY}/theirs:v1")]);
        assert_eq!(templates.move_to_owners(&owner_of).unwrap(), []);

        let seen = |name: &str| templates.manifest(name).unwrap().visibility;
        assert_eq!(seen(&names[1]), Visibility::Public);
        assert_eq!(seen("mine"), Visibility::Private);
        assert_eq!(seen(build), Visibility::Internal);
        assert_eq!(seen(image), Visibility::Internal);
        assert!(matches!(
            templates.manifest("theirs"),
            Err(TemplateError::Unknown { .. })
        ));
        assert_eq!(templates.remove_unfinished_builds().unwrap(), [build]);
        assert_eq!(templates.remove_imported_images(0).unwrap(), [""; 0]);
        assert_eq!(templates.remove_imported_images(u64::MAX).unwrap(), [image]);
        let manifest = templates.get(&names[0]).unwrap().manifest;
        assert_eq!(manifest.owner.as_deref(), Some(KEY));
        let old = templates.version(&version).unwrap().manifest;
        assert_eq!(old.version(), manifest.version());
        let new = format!("{}@{}", names[0], manifest.version());
        assert_eq!(templates.version(&new).unwrap().manifest.images, old.images);
        // The host's owner may use the same name.
        FakeRecipe::new("theirs").build(&home).unwrap();
        assert_eq!(seen("theirs"), Visibility::Private);
        assert_eq!(seen(&names[0]), Visibility::Public);
    }

    #[test]
    fn an_interrupted_move_is_completed() {
        let (_dir, home) = home();
        let templates = Templates::new(&home);
        FakeRecipe::new("theirs").build(&home).unwrap();
        let owned = format!("{KEY}/theirs");
        // State after a crash between the two steps.
        templates
            .tag("theirs", &owned, Visibility::Private)
            .unwrap();
        let owner_of = |_: &str| Some((KEY.to_owned(), Visibility::Private));
        assert_eq!(templates.move_to_owners(&owner_of).unwrap().len(), 1);
        assert_eq!(templates.tags("theirs").unwrap(), []);
        templates.get(&owned).unwrap();
    }

    #[test]
    fn borrowed_templates_are_not_moved() {
        let ((_a, lender), (_b, home)) = (home(), home());
        FakeRecipe::new("theirs").build(&lender).unwrap();
        let borrowed = home.templates().join("theirs");
        symlink(lender.templates().join("theirs"), &borrowed).unwrap();
        let templates = Templates::new(&home);
        let owner_of = |_: &str| Some((KEY.to_owned(), Visibility::Private));
        assert_eq!(templates.move_to_owners(&owner_of).unwrap(), []);
        assert!(borrowed.exists());
        // The whole directory.
        fs::remove_dir_all(home.templates()).unwrap();
        symlink(lender.templates(), home.templates()).unwrap();
        assert_eq!(templates.move_to_owners(&owner_of).unwrap(), []);
        Templates::new(&lender).get("theirs").unwrap();
    }

    #[test]
    fn visibility_covers_all_tags_and_survives_a_rebuild() {
        let (_dir, home) = home();
        let templates = Templates::new(&home);
        FakeRecipe::new("app").build(&home).unwrap();
        templates.tag("app", "app:v1", Visibility::Private).unwrap();
        templates.set_visibility("app", Visibility::Public).unwrap();
        let seen = |name: &str| templates.manifest(name).unwrap().visibility;
        assert_eq!(seen("app:v1"), Visibility::Public);
        FakeRecipe::with_package("app", "curl")
            .build(&home)
            .unwrap();
        assert_eq!(seen("app"), Visibility::Public);
        templates.tag("app", "app:v2", Visibility::Private).unwrap();
        assert_eq!(seen("app:v2"), Visibility::Public);
        templates.tag("app", "other", Visibility::Private).unwrap();
        assert_eq!(seen("other"), Visibility::Private);
        for (name, text) in [("nope", "does not exist"), ("base", "stock template")] {
            let refused = templates.set_visibility(name, Visibility::Private);
            let refused = refused.unwrap_err().to_string();
            assert!(refused.contains(text), "{refused}");
        }
    }
}
