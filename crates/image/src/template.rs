//! Templates: what sandboxes are started from.

use crate::builder::{self, BuildError};
use crate::file::{FileError, OnPath, UNFINISHED};
use crate::home::Home;
use crate::import::{self, Import, ImportError};
use crate::layer::Layers;
use crate::manifest::{MANIFEST_FORMAT, Manifest};
use crate::progress::Progress;
use crate::recipe::Recipe;
use crate::verified::{Check, VerifiedFile, VerifyError};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub(crate) const IMAGE: &str = "rootfs.erofs";
pub(crate) const MANIFEST: &str = "template.json";

/// A template, verified and ready to boot.
#[derive(Debug)]
pub struct Template {
    pub manifest: Manifest,
    pub directory: PathBuf,
    /// The root filesystem (EROFS, read-only).
    pub image: VerifiedFile,
}

/// The templates of a data directory.
#[derive(Clone, Debug)]
pub struct Templates {
    home: Home,
}

/// Why a template is not to be had.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error(
        "`{name}` is not a template name: use a-z, 0-9, `.`, `_` and `-`, starting with a letter or digit, at most 63"
    )]
    Name { name: String },
    #[error("there is no template `{name}`; {known}")]
    Unknown { name: String, known: String },
    #[error("manifest {} is not readable: {problem}; remove the directory and build the template again", path.display())]
    Manifest { path: PathBuf, problem: String },
    #[error(transparent)]
    Verify(#[from] VerifyError),
    #[error("cannot use the template")]
    File(#[from] FileError),
}

/// Whether `name` can name a template: `[a-z0-9][a-z0-9._-]{0,62}`.
pub(crate) fn is_template_name(name: &str) -> bool {
    let alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    name.len() <= 63
        && name.starts_with(alphanumeric)
        && name.chars().all(|c| alphanumeric(c) || "._-".contains(c))
}

impl Templates {
    pub fn new(home: &Home) -> Self {
        Self { home: home.clone() }
    }

    /// All templates by name. Their images are not verified: that happens when one is used.
    pub fn list(&self) -> Result<Vec<Manifest>, TemplateError> {
        self.names()?
            .iter()
            .map(|name| load_manifest(&self.directory(name), name))
            .collect()
    }

    /// What is known about a template. Its image is not verified.
    pub fn manifest(&self, name: &str) -> Result<Manifest, TemplateError> {
        if !is_template_name(name) {
            return Err(TemplateError::Name {
                name: name.to_owned(),
            });
        }
        let directory = self.directory(name);
        if !directory.is_dir() {
            return Err(TemplateError::Unknown {
                name: name.to_owned(),
                known: self.known()?,
            });
        }
        load_manifest(&directory, name)
    }

    /// Opens a template, verified.
    pub fn get(&self, name: &str) -> Result<Template, TemplateError> {
        let manifest = self.manifest(name)?;
        let directory = self.directory(name);
        match open_image(&directory, &manifest) {
            Ok(image) => Ok(Template {
                manifest,
                directory,
                image,
            }),
            Err(error) => {
                // A rebuild may have replaced the template between the two reads.
                let newer = load_manifest(&directory, name)?;
                if newer.image == manifest.image {
                    return Err(error);
                }
                let image = open_image(&directory, &newer)?;
                Ok(Template {
                    manifest: newer,
                    directory,
                    image,
                })
            }
        }
    }

    /// The template of `recipe`; built first unless it exists and was made from an equal recipe.
    ///
    /// However many ask at once, one builds and the others wait. Needs root, `mmdebstrap` and `mkfs.erofs`.
    pub fn build_if_needed(
        &self,
        recipe: &Recipe,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Template, BuildError> {
        builder::build_if_needed(self, &self.home, recipe, on_progress)
    }

    /// The template of an image that exists already; made first unless it is there and of the same.
    ///
    /// Imports wait for each other: they share unpacked layers. Needs root and `mkfs.erofs`.
    pub fn import(
        &self,
        import: &Import,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Template, ImportError> {
        import::import(self, &self.home, import, on_progress)
    }

    /// Removes a template, also a corrupted one. Sandboxes that run keep what they have open.
    pub fn remove(&self, name: &str) -> Result<(), TemplateError> {
        if !is_template_name(name) {
            return Err(TemplateError::Name {
                name: name.to_owned(),
            });
        }
        let _lock = self.home.lock(&format!("template-{name}"), || ())?;
        let (directory, doomed) = (self.directory(name), self.unfinished(name));
        builder::clear(&doomed)?;
        match fs::rename(&directory, &doomed) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(TemplateError::Unknown {
                    name: name.to_owned(),
                    known: self.known()?,
                });
            }
            renamed => renamed.on("remove", &directory)?,
        }
        builder::clear(&doomed)?;
        // One that is being imported now will look for layers without a template when it is done.
        if let Some(layers) = Layers::try_open(&self.home)? {
            import::collect(self, &self.home, &layers)?;
        }
        Ok(())
    }

    pub(crate) fn directory(&self, name: &str) -> PathBuf {
        self.home.templates().join(name)
    }

    /// Where work on the template `name` takes place, under its lock.
    pub(crate) fn unfinished(&self, name: &str) -> PathBuf {
        self.home.templates().join(format!("{UNFINISHED}{name}"))
    }

    fn names(&self) -> Result<Vec<String>, FileError> {
        let path = self.home.templates();
        let mut names = Vec::new();
        for entry in fs::read_dir(&path).on("list", &path)? {
            let name = entry
                .on("list", &path)?
                .file_name()
                .to_string_lossy()
                .into_owned();
            if is_template_name(&name) {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    fn known(&self) -> Result<String, FileError> {
        let names = self.names()?;
        Ok(match names.is_empty() {
            true => "there are none yet: run `jiffy template build base`".to_owned(),
            false => format!("there are: {}", names.join(", ")),
        })
    }
}

fn load_manifest(directory: &Path, name: &str) -> Result<Manifest, TemplateError> {
    let path = directory.join(MANIFEST);
    let broken = |problem: String| TemplateError::Manifest {
        path: path.clone(),
        problem,
    };
    let text = fs::read(&path).map_err(|e| broken(e.to_string()))?;
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|e| broken(e.to_string()))?;
    if manifest.format != MANIFEST_FORMAT {
        return Err(broken(format!(
            "its format is {}, not {MANIFEST_FORMAT}",
            manifest.format
        )));
    }
    if manifest.name != name {
        return Err(broken(format!("it is the manifest of `{}`", manifest.name)));
    }
    Ok(manifest)
}

fn open_image(directory: &Path, manifest: &Manifest) -> Result<VerifiedFile, TemplateError> {
    let path = directory.join(IMAGE);
    let remedy = format!(
        "remove the directory {} and build the template again",
        directory.display()
    );
    let check = Check {
        what: "template image",
        sha256: Some(&manifest.image.sha256),
        size: Some(manifest.image.size),
        sparse: false,
        remedy: &remedy,
    };
    let missing = || TemplateError::Manifest {
        path: path.clone(),
        problem: "the image is missing".to_owned(),
    };
    check.open(&path)?.ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builder::tests::{Fake, home};
    use std::os::unix::fs::FileExt;

    #[test]
    fn names_are_short_and_harmless() {
        for good in ["base", "a", "0", "py3.11_x-y", &"a".repeat(63)] {
            assert!(is_template_name(good), "{good}");
        }
        for bad in [
            "",
            ".new-base",
            "-a",
            "Base",
            "a/b",
            "..",
            "ü",
            &"a".repeat(64),
        ] {
            assert!(!is_template_name(bad), "{bad}");
        }
    }

    #[test]
    fn an_unknown_template_is_named_together_with_those_that_exist() {
        let (_dir, home) = home();
        let templates = Templates::new(&home);
        let message = templates.get("nope").unwrap_err().to_string();
        assert_eq!(
            message,
            "there is no template `nope`; there are none yet: run `jiffy template build base`"
        );
        Fake::new("one").build(&home).unwrap();
        Fake::new("two").build(&home).unwrap();
        let message = templates.get("nope").unwrap_err().to_string();
        assert_eq!(message, "there is no template `nope`; there are: one, two");
        assert_eq!(templates.list().unwrap().len(), 2);
        templates.remove("one").unwrap();
        assert!(matches!(
            templates.remove("one"),
            Err(TemplateError::Unknown { .. })
        ));
        assert_eq!(templates.list().unwrap().len(), 1);
    }

    #[test]
    fn a_flipped_or_missing_byte_is_refused_by_name() {
        let (_dir, home) = home();
        let image = Fake::new("one").build(&home).unwrap().image;
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
    fn a_damaged_manifest_is_refused_by_name() {
        let (_dir, home) = home();
        let directory = Fake::new("one").build(&home).unwrap().directory;
        let path = directory.join(MANIFEST);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "{}").unwrap();
        let message = Templates::new(&home).get("one").unwrap_err().to_string();
        assert!(
            message.starts_with(&format!("manifest {} is not readable", path.display())),
            "{message}"
        );
    }
}
