//! A data directory with the templates of another one.

use anyhow::Context;
use jiffy_image::Home;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use tempfile::TempDir;

/// Parts of the other data directory that are linked.
const LINKED_PARTS: [&str; 4] = ["images", "kernel", "disks", "initrd"];
/// Parts of the other data directory whose entries are linked, so that entries can be added.
const PARTS_OF_LINKS: [&str; 2] = ["templates", "versions"];

/// Temporary data directory. It is removed when the value is dropped.
pub struct DataDirectory {
    root: TempDir,
}

impl DataDirectory {
    /// Creates a data directory with links to the templates of the data directory of this host, if
    /// there is one.
    pub fn new() -> anyhow::Result<Self> {
        let root = tempfile::Builder::new()
            .prefix("jiffy-bench-")
            .tempdir()
            .context("cannot create a temporary data directory")?;
        let this = Self { root };
        let home = this.home()?;
        // Without a data directory on this host, instruments that need no template still run.
        let Ok(real) = Home::locate() else {
            return Ok(this);
        };
        for part in LINKED_PARTS {
            link(&real.path().join(part), &home.path().join(part))?;
        }
        for part in PARTS_OF_LINKS {
            for entry in fs::read_dir(real.path().join(part)).into_iter().flatten() {
                let entry = entry?;
                let link_path = home.path().join(part).join(entry.file_name());
                link(&entry.path(), &link_path)?;
            }
        }
        Ok(this)
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        self.root.path()
    }

    /// Opens the data directory.
    pub fn home(&self) -> anyhow::Result<Home> {
        Ok(Home::at(self.path())?)
    }
}

/// Links `target` at `path` if `target` exists and `path` does not, or is an empty directory.
fn link(target: &Path, path: &Path) -> anyhow::Result<()> {
    if !target.exists() {
        return Ok(());
    }
    // `Home::at` creates empty directories. `symlink` reports all other errors.
    let _ = fs::remove_dir(path);
    if !path.exists() {
        symlink(target, path).with_context(|| format!("cannot link {}", path.display()))?;
    }
    Ok(())
}
