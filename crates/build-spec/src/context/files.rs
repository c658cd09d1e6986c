//! Selects the files of a build context: files that match a source of `COPY` and are not excluded
//! by `.dockerignore`.

use super::ContextError;
use super::ignore::DockerIgnore;
use super::pattern::Pattern;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Maximum depth of directories.
const MAX_DEPTH: usize = 256;

/// Directory of a build context.
pub(super) struct ContextFiles<'c> {
    root: &'c Path,
    /// Root with resolved symbolic links.
    real: PathBuf,
    ignore: DockerIgnore,
}

/// Entries of an archive: sorted names, with the path of each file.
pub(super) type ContextEntries = BTreeMap<Vec<u8>, PathBuf>;

/// Reason why a source selects no file.
#[derive(Debug)]
pub(super) enum SourceError {
    /// The path leads out of the context.
    Outside,
    Missing,
    /// `.dockerignore` excludes the path.
    Ignored,
    /// The pattern is invalid.
    Pattern(&'static str),
    Error(ContextError),
}

impl From<ContextError> for SourceError {
    fn from(e: ContextError) -> Self {
        Self::Error(e)
    }
}

impl<'c> ContextFiles<'c> {
    pub(super) fn new(root: &'c Path, ignore: DockerIgnore) -> Result<Self, ContextError> {
        // The root is compared with resolved paths in `resolve_inside`, so it must be resolved as
        // well.
        let real = root
            .canonicalize()
            .map_err(|e| ContextError::read(root, e))?;
        Ok(Self { root, real, ignore })
    }

    /// Adds the files that `source` selects.
    pub(super) fn add(&self, source: &str, to: &mut ContextEntries) -> Result<(), SourceError> {
        let names = components(source)?;
        let wild = names.iter().position(|name| name.contains(['*', '?', '[']));
        // Without a wildcard, the source itself must exist. With a wildcard, it must match a file.
        let Some(wild) = wild else {
            return self.add_one(&names.join("/"), to);
        };
        let pattern = Pattern::source(&names.join("/")).map_err(SourceError::Pattern)?;
        let mut hits = Vec::new();
        // Components before the first wildcard need no search.
        let mut waiting = vec![names[..wild].join("/")];
        // Matches one level at a time, since a star does not match a slash.
        for _ in wild..names.len() {
            let mut next = Vec::new();
            for directory in &waiting {
                next.extend(self.list_directory(directory)?);
            }
            waiting = next;
        }
        hits.extend(waiting.into_iter().filter(|path| pattern.matches(path)));
        let mut any = false;
        for hit in hits {
            match self.add_one(&hit, to) {
                Ok(()) => any = true,
                // A pattern may match excluded files as long as one file remains.
                Err(SourceError::Ignored) => {}
                Err(e) => return Err(e),
            }
        }
        any.then_some(()).ok_or(SourceError::Missing)
    }

    /// Returns the paths of a directory's entries. Empty if it is not a directory.
    fn list_directory(&self, directory: &str) -> Result<Vec<String>, SourceError> {
        let path = self.root.join(directory);
        if !path.is_dir() {
            return Ok(Vec::new());
        }
        self.resolve_inside(&path)?;
        let join = |name: &str| {
            if directory.is_empty() {
                name.to_owned()
            } else {
                format!("{directory}/{name}")
            }
        };
        // Names that are not UTF-8 match no pattern.
        let entries = sorted(&path)?.into_iter();
        Ok(entries.filter_map(|name| name.to_str().map(join)).collect())
    }

    /// Adds a file, or a directory with its entries that are not excluded. If `source` is a
    /// symbolic link, follows the link, whose target must be inside the context.
    fn add_one(&self, source: &str, to: &mut ContextEntries) -> Result<(), SourceError> {
        let path = self.root.join(source);
        let real = self.resolve_inside(&path)?;
        let metadata = std::fs::metadata(&real).map_err(|e| ContextError::read(&path, e))?;
        if !metadata.is_dir() {
            if self.ignore.ignores(source) {
                return Err(SourceError::Ignored);
            }
            // The file has the name of the link, and the content of its target.
            to.insert(source.as_bytes().to_vec(), real);
            return Ok(());
        }
        let before = to.len();
        // The root of the context cannot be excluded.
        let ignored = !source.is_empty() && self.ignore.ignores(source);
        if !ignored && !source.is_empty() {
            to.insert(source.as_bytes().to_vec(), real.clone());
        }
        // With exceptions, files in an excluded directory may be included, so it must be searched.
        if !ignored || self.ignore.has_exceptions() {
            self.add_tree(source.as_bytes(), &real, to)?;
        }
        if ignored && to.len() == before {
            Err(SourceError::Ignored)
        } else {
            Ok(())
        }
    }

    /// Adds the contents of a directory. Symbolic links are added as links.
    fn add_tree(
        &self,
        name: &[u8],
        real: &Path,
        to: &mut ContextEntries,
    ) -> Result<(), SourceError> {
        let mut waiting = vec![(name.to_vec(), real.to_path_buf(), 0)];
        while let Some((name, real, depth)) = waiting.pop() {
            if depth > MAX_DEPTH {
                let deep = std::io::Error::other("its directories are nested too deeply");
                return Err(ContextError::read(&real, deep).into());
            }
            for file in sorted(&real)? {
                let mut below = name.clone();
                if !below.is_empty() {
                    below.push(b'/');
                }
                below.extend_from_slice(file.as_bytes());
                let path = real.join(&file);
                let ignored = self.ignore.ignores(&String::from_utf8_lossy(&below));
                let metadata =
                    std::fs::symlink_metadata(&path).map_err(|e| ContextError::read(&path, e))?;
                if metadata.is_dir() && (!ignored || self.ignore.has_exceptions()) {
                    waiting.push((below.clone(), path.clone(), depth + 1));
                }
                if !ignored {
                    // A rule may have excluded the parents, which are needed as well.
                    self.add_parents(&below, &path, to);
                    to.insert(below, path);
                }
            }
        }
        Ok(())
    }

    /// Adds the parent directories of an entry until one is present.
    fn add_parents(&self, name: &[u8], path: &Path, to: &mut ContextEntries) {
        let (mut name, mut path) = (name, path);
        while let (Some(slash), Some(above)) =
            (name.iter().rposition(|b| *b == b'/'), path.parent())
        {
            (name, path) = (&name[..slash], above);
            if to.contains_key(name) {
                return;
            }
            to.insert(name.to_vec(), path.to_path_buf());
        }
    }

    /// Resolves symbolic links. The result must be inside the context.
    fn resolve_inside(&self, path: &Path) -> Result<PathBuf, SourceError> {
        match path.canonicalize() {
            Ok(real) if real.starts_with(&self.real) => Ok(real),
            Ok(_) => Err(SourceError::Outside),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Err(SourceError::Missing)
            }
            Err(e) => Err(ContextError::read(path, e).into()),
        }
    }
}

/// Returns the components of a source's path, relative to the context.
fn components(source: &str) -> Result<Vec<&str>, SourceError> {
    let mut names = Vec::new();
    for name in source.split('/').filter(|n| !n.is_empty() && *n != ".") {
        match name {
            ".." => {
                // Resolved without the file system, as in Docker.
                names.pop().ok_or(SourceError::Outside)?;
            }
            name => names.push(name),
        }
    }
    Ok(names)
}

/// Returns the names in a directory in sorted order, so that archives do not depend on the file
/// system.
fn sorted(directory: &Path) -> Result<Vec<std::ffi::OsString>, ContextError> {
    let failed = |e| ContextError::read(directory, e);
    let entries = std::fs::read_dir(directory).map_err(failed)?;
    let names = entries.map(|entry| entry.map(|e| e.file_name()));
    let mut names = names.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    names.sort();
    Ok(names)
}
