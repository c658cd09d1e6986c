//! [`Recipe`]: the description from which a stock template, or a template of the host's owner, is
//! built: Debian packages and a script.

use super::manifest::Defaults;
use super::name::{MAX_TEMPLATE_NAME, is_template_name};
use super::stock::{STOCK, is_stock};
use crate::file::{FileError, OnPath};
use crate::verified::sum_of;
use jiffy_engine_api::{FirstUse, Readiness, StartCommand, Startup};
use serde::Deserialize;
use std::fs;
use std::path::Path;

/// A recipe: Debian packages, a script that completes the root file system, and defaults of the
/// sandboxes. It creates either a whole root file system, or a layer on top of a stock template
/// (`from`). The image of the stock template is shared.
///
/// A recipe is a directory with `recipe.toml`, and optionally a script and other files. The script
/// runs on the host as root after the packages are installed. Its first argument is the path of the
/// root file system. The other files are in the directory `$JIFFY_FILES`.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub(crate) spec: RecipeSpec,
    pub(crate) customize: Option<String>,
    /// Names and contents of the files in [`RecipeSpec::files`].
    pub(crate) files: Vec<(String, String)>,
    /// Stock recipe on which this recipe is based ([`RecipeSpec::from`]).
    pub(crate) from: Option<Box<Recipe>>,
    hash: String,
}

/// `recipe.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RecipeSpec {
    pub name: String,
    /// Code name of the Debian release. Defaults to the release of `from`.
    #[serde(default)]
    pub suite: Option<String>,
    /// Name of the stock template that is the base.
    #[serde(default)]
    pub from: Option<String>,
    /// Packages in addition to the essential packages or the packages of `from`. Recommended
    /// packages are not installed.
    pub packages: Vec<String>,
    /// Paths (with wildcards) that packages must not install, neither during the build nor later in
    /// a sandbox. Defaults to the paths of `from`.
    #[serde(default)]
    pub exclude: Vec<String>,
    /// Exceptions to `exclude`.
    #[serde(default)]
    pub include: Vec<String>,
    /// File name of the script.
    pub customize: Option<String>,
    /// Names of other files that the script installs.
    #[serde(default)]
    pub files: Vec<String>,
    pub defaults: Defaults,
    /// Command that runs in every sandbox, before the template's snapshot is taken.
    pub start: Option<StartCommand>,
    /// Readiness check of the command.
    pub ready: Option<Readiness>,
    /// Operation that most sandboxes perform first. It runs once after the template's snapshot, to
    /// record which memory it touches.
    pub first_use: Option<FirstUse>,
}

/// Error of a recipe.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    #[error(
        "recipe `{name}` does not exist: choose one of {known}, or specify a directory with a recipe.toml"
    )]
    Unknown { name: String, known: String },
    #[error("recipe {origin} is invalid")]
    Syntax {
        origin: String,
        source: Box<toml::de::Error>,
    },
    #[error("recipe {origin}: {problem}")]
    Content { origin: String, problem: String },
    #[error("cannot read the recipe")]
    File(#[from] FileError),
}

/// Name of the recipe file in a directory.
const RECIPE_FILE: &str = "recipe.toml";

/// Version of the builder, a part of every recipe's hash. It must be raised if the results of the
/// builder change.
const BUILDER_VERSION: u32 = 1;

impl Recipe {
    /// Returns the embedded recipe `name`.
    pub fn built_in(name: &str) -> Result<Self, RecipeError> {
        let Some((_, files)) = STOCK.iter().find(|(known, _)| *known == name) else {
            let known = STOCK.map(|(known, _)| known).join(", ");
            return Err(RecipeError::Unknown {
                name: name.to_owned(),
                known,
            });
        };
        Self::parse(name, |name| {
            let found = files.iter().find(|(file, _)| *file == name);
            let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
            found
                .map(|(_, content)| (*content).to_owned())
                .ok_or_else(missing)
                .on("read", Path::new(name))
        })
    }

    /// Returns whether `name` is a stock template.
    pub fn is_built_in(name: &str) -> bool {
        is_stock(name)
    }

    /// Reads the recipe in a directory.
    pub fn from_directory(directory: &Path) -> Result<Self, RecipeError> {
        let path = directory.join(RECIPE_FILE);
        Self::parse(&path.display().to_string(), |name| {
            let path = directory.join(name);
            fs::read_to_string(&path).on("read", &path)
        })
    }

    /// Parses a recipe. `read` returns the content of a file of the recipe. The hash covers
    /// everything that determines the result of a build.
    fn parse(
        origin: &str,
        read: impl Fn(&str) -> Result<String, FileError>,
    ) -> Result<Self, RecipeError> {
        let text = read(RECIPE_FILE)?;
        let spec: RecipeSpec = toml::from_str(&text).map_err(|source| RecipeError::Syntax {
            origin: origin.to_owned(),
            source: Box::new(source),
        })?;
        // The names in the recipe are checked before they become paths.
        if let Some(problem) = spec.problem() {
            return Err(RecipeError::Content {
                origin: origin.to_owned(),
                problem,
            });
        }
        // Only a stock template can be the base, so recursion ends after the stock recipes.
        let from = spec.from.as_deref().map(Self::built_in).transpose()?;
        let from = from.map(Box::new);
        let customize = spec.customize.as_deref().map(&read).transpose()?;
        let files = spec
            .files
            .iter()
            .map(|name| Ok((name.clone(), read(name)?)));
        let files = files.collect::<Result<Vec<_>, FileError>>()?;
        // The zero bytes separate the parts, so that moving text between them changes the hash.
        let mut whole = format!(
            "{BUILDER_VERSION}\0{text}\0{}",
            customize.as_deref().unwrap_or_default()
        );
        for (_, content) in &files {
            whole.push('\0');
            whole.push_str(content);
        }
        // A change of the base changes all recipes that are derived from it.
        if let Some(from) = &from {
            whole.push('\0');
            whole.push_str(&from.hash);
        }
        let hash = sum_of(whole.as_bytes());
        Ok(Self {
            spec,
            customize,
            files,
            from,
            hash,
        })
    }

    /// Returns the recipe of the stock template that this recipe extends.
    pub fn base(&self) -> Option<&Self> {
        self.from.as_deref()
    }

    /// Name of the template.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Debian release.
    pub(crate) fn suite(&self) -> &str {
        let own = self.spec.suite.as_deref();
        own.unwrap_or_else(|| self.from.as_ref().map_or("", |from| from.suite()))
    }

    /// Returns the startup settings of the template's sandboxes.
    pub(crate) fn startup(&self) -> Startup {
        Startup {
            start: self.spec.start.clone(),
            ready: self.spec.ready.clone(),
            first_use: self.spec.first_use.clone(),
        }
    }

    /// Default settings of the template's sandboxes.
    pub fn defaults(&self) -> &Defaults {
        &self.spec.defaults
    }

    /// SHA-256 of the recipe. A recipe is built only if no template with this hash exists.
    pub fn hash(&self) -> &str {
        &self.hash
    }
}

impl RecipeSpec {
    /// Returns a description of a problem with the recipe, if any. Packages, paths and the release
    /// become arguments of programs, so their characters are restricted.
    fn problem(&self) -> Option<String> {
        // Text that starts with a dash would be read as an option.
        let plain = |text: &str, more: &str| {
            text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '/')
                && text
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "+-._/".contains(c) || more.contains(c))
        };
        if !is_template_name(&self.name) {
            return Some(format!(
                "`{}` is not a template name ([a-z0-9][a-z0-9._-]*, at most {MAX_TEMPLATE_NAME})",
                self.name
            ));
        }
        match (&self.suite, &self.from) {
            (Some(suite), None) if !plain(suite, "") => {
                return Some(format!("`{suite}` is not a Debian release"));
            }
            (Some(_), None) => {}
            (None, Some(_)) if self.exclude.is_empty() && self.include.is_empty() => {}
            (None, Some(_)) => {
                return Some("`exclude` and `include` cannot be combined with `from`: the base recipe defines them".to_owned());
            }
            _ => return Some("exactly one of `suite` and `from` must be set".to_owned()),
        }
        // A name may contain a version (`=`, `~`) or an architecture (`:`).
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
            return Some(
                "`customize` must be the name of a file in the directory of recipe.toml".to_owned(),
            );
        }
        if let Some(name) = self.files.iter().find(|name| !is_template_name(name)) {
            return Some(format!(
                "`{name}` must be the name of a file in the directory of recipe.toml"
            ));
        }
        if let Err(e) = self.defaults.size().check() {
            return Some(e.to_string());
        }
        if self
            .start
            .as_ref()
            .is_some_and(|s| s.command.trim().is_empty())
        {
            return Some("the start command is empty".to_owned());
        }
        let probe = self.ready.as_ref().map(Readiness::probe);
        if let Some(Err(e)) = probe {
            return Some(format!("[ready]: {e}"));
        }
        let action = self.first_use.as_ref().map(FirstUse::action);
        let problem = action.and_then(Result::err);
        problem.map(|e| format!("[first_use]: {e}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_recipe_is_valid_and_has_its_own_name() {
        for (name, ..) in STOCK {
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
    fn a_derived_recipe_has_the_release_of_its_base_and_changes_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let recipe = |more: &str| {
            let text = format!(
                "name = \"t\"\npackages = []\n{more}\n[defaults]\nuser = \"u\"\nworkdir = \"/\"\ndisk_mib = 64\n"
            );
            fs::write(dir.path().join("recipe.toml"), text).unwrap();
            Recipe::from_directory(dir.path())
        };
        let base = Recipe::built_in("base").unwrap();
        let added = recipe("from = \"base\"").unwrap();
        assert_eq!(added.suite(), base.suite());
        assert_eq!(added.from.unwrap().hash(), base.hash());
        let other = recipe("from = \"node\"").unwrap();
        assert_ne!(other.hash(), added.hash);
        for bad in [
            "",
            "suite = \"bookworm\"\nfrom = \"base\"",
            "from = \"base\"\nexclude = [\"/usr/share/doc/*\"]",
            "from = \"nope\"",
        ] {
            assert!(recipe(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn files_startup_and_memory_are_part_of_a_recipe_and_checked() {
        let dir = tempfile::tempdir().unwrap();
        let recipe = |more: &str, file: &str| {
            let text = format!(
                "name = \"t\"\nsuite = \"bookworm\"\npackages = []\nfiles = [\"server.py\"]\n\
                 [defaults]\nuser = \"u\"\nworkdir = \"/\"\ndisk_mib = 64\n{more}"
            );
            fs::write(dir.path().join("recipe.toml"), text).unwrap();
            fs::write(dir.path().join("server.py"), file).unwrap();
            Recipe::from_directory(dir.path())
        };
        let good = "memory_mib = 1024\n[start]\ncommand = \"serve\"\n[ready]\nport = 80\npath = \"/health\"\n\
            [first_use]\nport = 80\npath = \"/run\"\nbody = \"{}\"\n";
        let first = recipe(good, "1").unwrap();
        assert_eq!(first.defaults().memory_mib, Some(1024));
        let startup = first.startup();
        assert_eq!(startup.start.unwrap().command, "serve");
        assert_eq!(startup.ready.unwrap().timeout_s, 60);
        assert_eq!(startup.first_use.unwrap().port, Some(80));
        assert_ne!(recipe(good, "2").unwrap().hash(), first.hash());
        for bad in [
            "memory_mib = 1\n",
            "vcpus = 0\n",
            "vcpus = 200\n",
            "[start]\ncommand = \" \"\n",
            "[start]\ncommand = \"a\"\nshell = \"zsh\"\n",
            "[ready]\nport = 80\ncommand = \"true\"\n",
            "[ready]\ntimeout_s = 5\n",
            "[first_use]\nport = 80\n",
        ] {
            assert!(recipe(bad, "1").is_err(), "{bad}");
        }
    }

    #[test]
    fn arguments_cannot_be_smuggled_through_a_recipe() {
        let base = Recipe::built_in("base").unwrap().spec;
        for package in ["--option", "a b", "a,b", "$(x)", ""] {
            let spec = RecipeSpec {
                packages: vec![package.to_owned()],
                ..base.clone()
            };
            assert!(spec.problem().is_some(), "{package:?}");
        }
    }
}
