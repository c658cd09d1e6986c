//! Tests of builds without network: a fake recipe replaces the installation of packages.

use super::*;
use crate::erofs::EPOCH;
use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::UNIX_EPOCH;

/// Returns a data directory, and the temporary directory that contains it.
pub(crate) fn home() -> (tempfile::TempDir, Home) {
    let dir = tempfile::tempdir().unwrap();
    let home = Home::at(dir.path().join("home")).unwrap();
    (dir, home)
}

/// A recipe with a single file instead of packages.
pub(crate) struct FakeRecipe {
    recipe: Recipe,
    builds: AtomicU32,
}

impl FakeRecipe {
    pub(crate) fn new(name: &str) -> Self {
        Self::with_package(name, "git")
    }

    /// Creates a recipe with one package.
    pub(crate) fn with_package(name: &str, package: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let defaults = "[defaults]\nuser = \"user\"\nworkdir = \"/\"\ndisk_mib = 64\n";
        let text = format!(
            "name = \"{name}\"\nsuite = \"bookworm\"\npackages = [\"{package}\"]\n{defaults}"
        );
        fs::write(dir.path().join("recipe.toml"), text).unwrap();
        Self {
            recipe: Recipe::from_directory(dir.path()).unwrap(),
            builds: AtomicU32::new(0),
        }
    }

    pub(crate) fn build(&self, home: &Home) -> Result<Template, BuildError> {
        self.build_with(home, &mut |_| Ok(()))
    }

    /// Builds the recipe with a fake root file system. `interrupt` runs when the file system
    /// exists.
    fn build_with(
        &self,
        home: &Home,
        interrupt: &mut dyn FnMut(&Path) -> Result<(), BuildError>,
    ) -> Result<Template, BuildError> {
        let make_root: MakeRoot<'_> = &mut |site, _| {
            self.builds.fetch_add(1, Ordering::Relaxed);
            let root = site.work.join("root");
            fs::create_dir(&root).unwrap();
            fs::write(
                root.join("file"),
                // The content depends on the packages, so other packages give another image.
                format!("{:?}", self.recipe.spec.packages),
            )
            .unwrap();
            interrupt(site.work)?;
            Ok(root)
        };
        build_with(
            &Templates::new(home),
            home,
            &self.recipe,
            &[],
            make_root,
            &mut |_| (),
        )
    }
}

/// Returns the sorted names in a directory.
fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(path)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_template_is_built_once_and_again_only_when_its_recipe_changes() {
    let (_dir, home) = home();
    let git = FakeRecipe::with_package("one", "git");
    let first = git.build(&home).unwrap();
    git.build(&home).unwrap();
    assert_eq!(git.builds.load(Ordering::Relaxed), 1);
    assert_eq!(first.manifest.recipe_sha256, git.recipe.hash());
    assert_eq!(first.manifest.images[0].size, first.images[0].size);

    let curl = FakeRecipe::with_package("one", "curl");
    let second = curl.build(&home).unwrap();
    assert_ne!(second.images[0].sha256, first.images[0].sha256);
    assert_eq!(names(&home.templates()), ["one"]);
    assert_eq!(names(&home.templates().join("one")), ["template.json"]);
    // Both images remain, each with its stamp (a record of its verification): the first one is
    // still in use.
    assert_eq!(names(&home.images()).len(), 4);
}

#[test]
fn eight_builders_at_once_do_one_build() {
    let (_dir, home) = home();
    let fake = FakeRecipe::new("one");
    // All threads need the same lock, and only the first one finds no template.
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| fake.build(&home).unwrap());
        }
    });
    assert_eq!(fake.builds.load(Ordering::Relaxed), 1);
}

#[test]
fn a_failed_build_leaves_nothing_behind_and_the_old_template_in_place() {
    let (_dir, home) = home();
    let old = FakeRecipe::with_package("one", "git").build(&home).unwrap();
    let failed = FakeRecipe::with_package("one", "curl")
        .build_with(&home, &mut |_| Err(BuildError::NotRoot));
    assert!(matches!(failed, Err(BuildError::NotRoot)));
    assert_eq!(names(&home.templates()), ["one"]);
    assert_eq!(
        Templates::new(&home).get("one").unwrap().images[0].sha256,
        old.images[0].sha256
    );
}

#[test]
fn remains_of_a_killed_build_are_removed_by_the_next() {
    let (_dir, home) = home();
    // The name of the working directory of template `one`.
    let leftover = home.templates().join(".new-one/root/usr");
    fs::create_dir_all(&leftover).unwrap();
    FakeRecipe::new("one").build(&home).unwrap();
    assert_eq!(names(&home.templates()), ["one"]);
}

#[test]
fn a_corrupted_template_is_refused_instead_of_rebuilt_unasked() {
    let (_dir, home) = home();
    let fake = FakeRecipe::new("one");
    let image = &fake.build(&home).unwrap().images[0];
    fs::File::options()
        .write(true)
        .open(&image.path)
        .unwrap()
        .set_len(0)
        .unwrap();
    assert!(matches!(
        fake.build(&home),
        Err(BuildError::Template(TemplateError::Verify(_)))
    ));
}

#[test]
fn the_same_recipe_makes_the_same_image_on_another_host() {
    let ((_a, one), (_b, other)) = (home(), home());
    let fake = FakeRecipe::new("one");
    fake.build_with(&one, &mut set_times).unwrap();
    fake.build_with(&other, &mut set_times).unwrap();
    let sum = |home| {
        Templates::new(home).get("one").unwrap().images[0]
            .sha256
            .clone()
    };
    assert_eq!(sum(&one), sum(&other));
}

/// Sets a fixed time on all files, as a real build does.
fn set_times(work: &Path) -> Result<(), BuildError> {
    let time = UNIX_EPOCH + std::time::Duration::from_secs(EPOCH);
    for path in [work.join("root/file"), work.join("root")] {
        fs::File::open(path).unwrap().set_modified(time).unwrap();
    }
    Ok(())
}
