//! Lists the project directory on the host, and hashes its files, to find changes.

use crate::host_directory::HostDirectory;
use crate::ignore_rules::IgnoreRules;
use crate::limits::MAX_FILES;
use crate::tree::{FileState, ListedFile, ListedKind, Listing, SyncedTree};
use crate::tree_path::TreePath;
use anyhow::{Context, ensure};
use std::io::Read;

/// Size of the buffer for hashes in bytes.
const BUFFER: usize = 256 << 10;

/// Lists the files that are synchronised: files that are not ignored, and files of `synced`.
pub fn list(
    directory: &HostDirectory,
    rules: &mut IgnoreRules<'_>,
    synced: &SyncedTree,
) -> anyhow::Result<Listing> {
    let mut listing = Listing::new();
    let mut directories = vec![None];
    while let Some(parent) = directories.pop() {
        let names = directory.names(parent.as_ref());
        let names = names.with_context(|| match &parent {
            Some(parent) => format!("cannot read {}", directory.shown(parent)),
            None => format!("cannot read {}", directory.path().display()),
        })?;
        for name in names {
            let Some(path) = TreePath::join(parent.as_ref(), &name) else {
                anyhow::bail!(
                    "a path in {} is too long or too deep",
                    directory.path().display()
                );
            };
            let Some(file) = stat(directory, &path)? else {
                continue;
            };
            let is_directory = file.kind == ListedKind::Directory;
            // A file that is synchronised already remains so, as in Git.
            if !synced.contains_key(&path) && rules.is_ignored(&path, is_directory) {
                continue;
            }
            if is_directory {
                directories.push(Some(path.clone()));
            }
            listing.insert(path, file);
            ensure!(
                listing.len() <= MAX_FILES,
                "{} has more than {MAX_FILES} files: exclude directories in .gitignore",
                directory.path().display()
            );
        }
    }
    // Synchronised files in ignored directories.
    for path in synced.keys().filter(|path| path.parent().is_some()) {
        if !listing.contains_key(path)
            && let Some(file) = stat(directory, path)?
        {
            listing.insert(path.clone(), file);
        }
    }
    Ok(listing)
}

fn stat(directory: &HostDirectory, path: &TreePath) -> anyhow::Result<Option<ListedFile>> {
    let found = directory.stat(path);
    found.with_context(|| format!("cannot read {}", directory.shown(path)))
}

/// Returns the state of a file with its current metadata. Reads the file unless `synced` has the
/// same metadata. `None` if the file does not exist.
pub fn state(
    directory: &HostDirectory,
    path: &TreePath,
    synced: &SyncedTree,
) -> anyhow::Result<Option<(FileState, ListedFile)>> {
    let Some(file) = stat(directory, path)? else {
        return Ok(None);
    };
    let known = synced.get(path).map(|synced| (&synced.state, synced.host));
    if let Some(state) = file.known_state(known) {
        return Ok(Some((state, file)));
    }
    let failed = || format!("cannot read {}", directory.shown(path));
    let Some((content, file)) = directory.read(path).with_context(failed)? else {
        return Ok(None);
    };
    let mut size = 0;
    let hash = hash(content, &mut size).with_context(failed)?;
    let mut state = file.state(|| hash);
    if let crate::tree::Content::File { size: recorded, .. } = &mut state.content {
        *recorded = size;
    }
    Ok(Some((state, file)))
}

/// Returns the hash of the rest of a file, and adds its length to `size`.
pub fn hash(mut content: impl Read, size: &mut u64) -> std::io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; BUFFER];
    loop {
        let n = content.read(&mut buffer)?;
        if n == 0 {
            return Ok(hasher.finalize().to_hex().to_string());
        }
        hasher.update(&buffer[..n]);
        *size += n as u64;
    }
}
