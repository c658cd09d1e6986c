//! Files that are not copied to the sandbox: the rules of `.gitignore` files.

use crate::host_directory::HostDirectory;
use crate::tree_path::TreePath;
use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use std::collections::HashMap;
use std::path::Path;

/// Maximum size of a file with rules in bytes. The rest of a longer file is ignored.
const MAX_RULES_BYTES: u64 = 1 << 20;
/// Name of the files with rules.
pub const RULES_NAME: &[u8] = b".gitignore";
/// File with the rules of a repository that are not part of its content.
const EXCLUDE_PATH: &[u8] = b".git/info/exclude";

/// Rules of the project directory.
pub struct IgnoreRules<'a> {
    directory: &'a HostDirectory,
    /// Rules of a directory, by path. `None` stands for the project directory.
    files: HashMap<Option<TreePath>, Gitignore>,
    /// Rules with the lowest priority: of `.git/info/exclude`, and of the user's global Git
    /// settings.
    others: [Gitignore; 2],
    /// Directories, and whether they are ignored.
    directories: HashMap<TreePath, bool>,
}

impl<'a> IgnoreRules<'a> {
    /// Reads the rules lazily from the project directory.
    pub fn new(directory: &'a HostDirectory) -> Self {
        let exclude = TreePath::new(EXCLUDE_PATH).map(|path| rules_of(directory, &path));
        Self {
            directory,
            files: HashMap::new(),
            others: [
                exclude.unwrap_or_else(Gitignore::empty),
                Gitignore::global().0,
            ],
            directories: HashMap::new(),
        }
    }

    /// Returns whether a file is ignored, because of a rule for the file or for one of its parents.
    /// The files of a Git repository are never ignored.
    pub fn is_ignored(&mut self, path: &TreePath, is_directory: bool) -> bool {
        if path.components().any(|name| name == b".git") {
            return false;
        }
        let mut ancestors = path.ancestors();
        ancestors.any(|ancestor| self.is_directory_ignored(ancestor))
            || if is_directory {
                self.is_directory_ignored(path.clone())
            } else {
                self.matches(path, false)
            }
    }

    /// Returns whether a directory is ignored. Results are cached.
    fn is_directory_ignored(&mut self, path: TreePath) -> bool {
        if let Some(known) = self.directories.get(&path) {
            return *known;
        }
        let ignored = self.matches(&path, true);
        self.directories.insert(path, ignored);
        ignored
    }

    /// Returns whether the rules ignore the path itself. `is_directory` is true if the path is a
    /// directory: some rules match directories only. The innermost rule has priority.
    fn matches(&mut self, path: &TreePath, is_directory: bool) -> bool {
        let mut parent = path.parent();
        loop {
            let directory = self.directory;
            let rules = self.files.entry(parent.clone()).or_insert_with(|| {
                let file = TreePath::join(parent.as_ref(), RULES_NAME);
                file.map_or_else(Gitignore::empty, |file| rules_of(directory, &file))
            });
            let start = parent.as_ref().map_or(0, |parent| parent.bytes().len() + 1);
            let relative = TreePath::new(&path.bytes()[start..]);
            let relative = relative.as_ref().map_or(Path::new(""), TreePath::path);
            match rules.matched(relative, is_directory) {
                Match::Ignore(_) => return true,
                Match::Whitelist(_) => return false,
                Match::None => {}
            }
            let Some(directory) = parent else { break };
            parent = directory.parent();
        }
        for rules in &self.others {
            match rules.matched(path.path(), is_directory) {
                Match::Ignore(_) => return true,
                Match::Whitelist(_) => return false,
                Match::None => {}
            }
        }
        false
    }
}

/// Parses a file with rules. A missing file and invalid rules have no effect, as in Git.
fn rules_of(directory: &HostDirectory, path: &TreePath) -> Gitignore {
    let Ok(Some(text)) = directory.read_start(path, MAX_RULES_BYTES) else {
        return Gitignore::empty();
    };
    let mut builder = GitignoreBuilder::new("");
    for line in String::from_utf8_lossy(&text).lines() {
        // Ignore the error: Git ignores invalid rules as well.
        let _ = builder.add_line(None, line);
    }
    builder.build().unwrap_or_else(|_| Gitignore::empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn files_are_ignored_as_by_git() {
        let project = tempfile::tempdir().unwrap();
        let at = |name: &str| project.path().join(name);
        fs::create_dir_all(at("sub/deep")).unwrap();
        fs::create_dir_all(at(".git/info")).unwrap();
        fs::write(at(".gitignore"), "target/\n*.log\n!keep.log\n/only\n# c\n").unwrap();
        fs::write(at("sub/.gitignore"), "!again.log\nlocal\n").unwrap();
        fs::write(at(".git/info/exclude"), "mine\n").unwrap();
        let directory = HostDirectory::open(project.path()).unwrap();
        let mut rules = IgnoreRules::new(&directory);
        for (path, is_directory, ignored) in [
            ("target", true, true),
            ("target", false, false),
            ("sub/target/x/y", false, true),
            ("a.log", false, true),
            ("keep.log", false, false),
            ("sub/a.log", false, true),
            ("sub/again.log", false, false),
            ("sub/deep/local", false, true),
            ("local", false, false),
            ("only", false, true),
            ("sub/only", false, false),
            ("sub/mine", false, true),
            (".git/a.log", false, false),
            (".git", true, false),
        ] {
            let tree_path = TreePath::new(path.as_bytes()).unwrap();
            assert_eq!(
                rules.is_ignored(&tree_path, is_directory),
                ignored,
                "{path}"
            );
        }
    }
}
