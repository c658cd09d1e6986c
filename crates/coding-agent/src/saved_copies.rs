//! Saved copies of files that commands changed or deleted, by hash. Undo restores them.

use crate::host_directory::HostDirectory;
use crate::host_tree;
use crate::tree_path::TreePath;
use anyhow::{Context, ensure};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Directory of the copies.
pub struct SavedCopies(PathBuf);

impl SavedCopies {
    /// Uses an existing directory.
    pub fn new(directory: PathBuf) -> Self {
        Self(directory)
    }

    fn path(&self, hash: &str) -> PathBuf {
        self.0.join(hash)
    }

    /// Returns whether a copy exists.
    pub fn contains(&self, hash: &str) -> bool {
        self.path(hash).exists()
    }

    /// Opens a copy.
    pub fn open(&self, hash: &str) -> anyhow::Result<File> {
        let path = self.path(hash);
        File::open(&path).with_context(|| format!("cannot open the saved copy {}", path.display()))
    }

    /// Saves a file of the project. Returns false if its content does not have this hash, because
    /// another program changed the file.
    pub fn save(
        &self,
        directory: &HostDirectory,
        path: &TreePath,
        hash: &str,
    ) -> anyhow::Result<bool> {
        if self.contains(hash) {
            return Ok(true);
        }
        let context = || format!("cannot save a copy of {}", directory.shown(path));
        let Some((source, _)) = directory.read(path).with_context(context)? else {
            return Ok(false);
        };
        let temporary = self.0.join("new");
        let mut copy = File::create(&temporary).with_context(context)?;
        let mut size = 0;
        let copied = host_tree::hash(Tee(source, &mut copy), &mut size).with_context(context)?;
        if copied != hash {
            return Ok(false);
        }
        fs::rename(&temporary, self.path(hash)).with_context(context)?;
        Ok(true)
    }

    /// Returns the size of all copies in bytes.
    pub fn bytes(&self) -> u64 {
        size_of(&self.0)
    }

    /// Removes the copies whose hash is not in `needed`.
    pub fn retain(&self, needed: &HashSet<&str>) -> anyhow::Result<()> {
        for file in fs::read_dir(&self.0)? {
            let file = file?;
            let is_needed = file
                .file_name()
                .to_str()
                .is_some_and(|n| needed.contains(n));
            if !is_needed {
                fs::remove_file(file.path())?;
            }
        }
        Ok(())
    }
}

/// Returns the size of the files in a directory.
fn size_of(directory: &Path) -> u64 {
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    files
        .filter_map(|file| Some(file.metadata().ok()?.len()))
        .sum()
}

/// Fails if a command needs more saved copies than the limit of the session.
pub fn check_size(bytes: u64, limit: u64) -> anyhow::Result<()> {
    ensure!(
        bytes <= limit,
        "the changes need {} MiB of saved copies, and the limit is {} MiB: nothing was copied to \
         the host. Raise the limit with `jiffy agent-shell start --saved-size`, or discard the \
         changes with `jiffy undo`",
        bytes.div_ceil(1 << 20),
        limit >> 20
    );
    Ok(())
}

/// Reader that also writes the bytes to a file.
struct Tee<'a, R>(R, &'a mut File);

impl<R: Read> Read for Tee<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.0.read(buffer)?;
        io::Write::write_all(self.1, &buffer[..n])?;
        Ok(n)
    }
}
