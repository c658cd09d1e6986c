//! How a template is made.

use crate::file::{FileError, OnPath};
use crate::manifest::Defaults;
use crate::template::is_template_name;
use crate::verified::sum_of;
use serde::Deserialize;
use std::fs;
use std::path::Path;

/// A recipe: Debian packages, a script that finishes the root filesystem, and the defaults of the sandboxes.
///
/// On disk it is a directory with `recipe.toml` and, if that says so, a script. The script runs on the host as root after all
/// packages are installed, with the root filesystem's path as its first argument.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub(crate) spec: Spec,
    pub(crate) customize: Option<String>,
    hash: String,
}

/// `recipe.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Spec {
    pub name: String,
    /// Debian release by code name.
    pub suite: String,
    /// Packages besides the essential ones; recommended packages are not followed.
    pub packages: Vec<String>,
    /// Paths (with wildcards) that packages do not get to install, now or later in a sandbox.
    #[serde(default)]
    pub exclude: Vec<String>,
    /// Exceptions to `exclude`.
    #[serde(default)]
    pub include: Vec<String>,
    /// File name of the script, if there is one.
    pub customize: Option<String>,
    pub defaults: Defaults,
}

/// Why a recipe cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    #[error(
        "there is no recipe `{name}`: choose one of {known}, or name a directory with a recipe.toml"
    )]
    Unknown { name: String, known: String },
    #[error("recipe {origin} is not valid")]
    Syntax {
        origin: String,
        source: Box<toml::de::Error>,
    },
    #[error("recipe {origin}: {problem}")]
    Content { origin: String, problem: String },
    #[error("cannot read the recipe")]
    File(#[from] FileError),
}

/// Recipes inside this program: name, recipe.toml, script.
const BUILT_IN: [(&str, &str, &str); 1] = [(
    "base",
    include_str!("../../../templates/base/recipe.toml"),
    include_str!("../../../templates/base/customize"),
)];

/// Part of every recipe's hash: raise it when the builder makes something else of the same recipe.
const BUILDER: u32 = 1;

impl Recipe {
    /// The recipe that this program carries under `name`.
    pub fn built_in(name: &str) -> Result<Self, RecipeError> {
        let Some((_, text, script)) = BUILT_IN.iter().find(|(known, ..)| *known == name) else {
            let known = BUILT_IN.map(|(known, ..)| known).join(", ");
            return Err(RecipeError::Unknown {
                name: name.to_owned(),
                known,
            });
        };
        Self::parse(name, text, |_| Ok((*script).to_owned()))
    }

    /// The recipe in a directory.
    pub fn from_directory(directory: &Path) -> Result<Self, RecipeError> {
        let read = |path: &Path| fs::read_to_string(path).on("read", path);
        let path = directory.join("recipe.toml");
        Self::parse(&path.display().to_string(), &read(&path)?, |script| {
            read(&directory.join(script))
        })
    }

    fn parse(
        origin: &str,
        text: &str,
        script: impl FnOnce(&str) -> Result<String, FileError>,
    ) -> Result<Self, RecipeError> {
        let spec: Spec = toml::from_str(text).map_err(|source| RecipeError::Syntax {
            origin: origin.to_owned(),
            source: Box::new(source),
        })?;
        if let Some(problem) = spec.problem() {
            return Err(RecipeError::Content {
                origin: origin.to_owned(),
                problem,
            });
        }
        let customize = spec.customize.as_deref().map(script).transpose()?;
        let hash = sum_of(
            format!(
                "{BUILDER}\0{text}\0{}",
                customize.as_deref().unwrap_or_default()
            )
            .as_bytes(),
        );
        Ok(Self {
            spec,
            customize,
            hash,
        })
    }

    /// Name of the template it makes.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// SHA-256 of the recipe: a template made from an equal one need not be built again.
    pub fn hash(&self) -> &str {
        &self.hash
    }
}

impl Spec {
    /// What is wrong with it. Packages, paths and suite become arguments of a program, hence the narrow alphabet.
    fn problem(&self) -> Option<String> {
        let plain = |text: &str, more: &str| {
            text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '/')
                && text
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "+-._/".contains(c) || more.contains(c))
        };
        if !is_template_name(&self.name) {
            return Some(format!(
                "`{}` is not a template name ([a-z0-9][a-z0-9._-]*, at most 63)",
                self.name
            ));
        }
        if !plain(&self.suite, "") {
            return Some(format!("`{}` is not a Debian release", self.suite));
        }
        if let Some(package) = self.packages.iter().find(|p| !plain(p, ":=~")) {
            return Some(format!("`{package}` is not a package name"));
        }
        if let Some(path) = self
            .exclude
            .iter()
            .chain(&self.include)
            .find(|p| !p.starts_with('/') || !plain(p, "*?[]"))
        {
            return Some(format!("`{path}` is not an absolute path"));
        }
        if self
            .customize
            .as_deref()
            .is_some_and(|script| script.contains('/'))
        {
            return Some("`customize` must be a file beside recipe.toml".to_owned());
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_recipe_is_valid_and_called_by_its_name() {
        for (name, ..) in BUILT_IN {
            assert_eq!(Recipe::built_in(name).unwrap().name(), name);
        }
    }

    #[test]
    fn an_unknown_recipe_lists_the_known_ones() {
        let message = Recipe::built_in("nope").unwrap_err().to_string();
        assert!(
            message.contains("`nope`") && message.contains("base"),
            "{message}"
        );
    }

    #[test]
    fn a_change_of_recipe_or_script_changes_the_hash() {
        let dir = tempfile::tempdir().unwrap();
        let hash = |packages: &str, script: &str| {
            let defaults = "[defaults]\nuser = \"u\"\nworkdir = \"/\"\ndisk_mib = 64\n";
            let text = format!(
                "name = \"t\"\nsuite = \"bookworm\"\npackages = [{packages}]\ncustomize = \"c\"\n{defaults}"
            );
            fs::write(dir.path().join("recipe.toml"), text).unwrap();
            fs::write(dir.path().join("c"), script).unwrap();
            Recipe::from_directory(dir.path())
                .unwrap()
                .hash()
                .to_owned()
        };
        let first = hash("\"git\"", "true");
        assert_eq!(hash("\"git\"", "true"), first);
        assert_ne!(hash("\"git\"", "false"), first);
        assert_ne!(hash("\"curl\"", "true"), first);
    }

    #[test]
    fn arguments_cannot_be_smuggled_through_a_recipe() {
        let base = Recipe::built_in("base").unwrap().spec;
        for package in ["--option", "a b", "a,b", "$(x)", ""] {
            let spec = Spec {
                packages: vec![package.to_owned()],
                ..base.clone()
            };
            assert!(spec.problem().is_some(), "{package:?}");
        }
    }
}
