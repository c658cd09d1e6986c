//! The data directory of Jiffy, in which all files of sandboxes are stored.

use crate::file::{FileError, OnPath};
use crate::lock::Lock;
use std::env;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Data directory of Jiffy, readable by its owner only.
///
/// ```text
/// <home>/
///   kernel/vmlinux-<sha12>          guest kernel, unpacked and verified once
///   kernel/modules-<sha12>.erofs    its modules; earlier modules stay for their snapshots
///   images/sha256-<digest>.erofs    read-only images, shared by the templates that name them
///   templates/[<key>~]<name>[@<tag>]/template.json  manifest: images, owner, recipe hash, ...;
///                                   <key>: id of the key that owns the template
///   versions/<sha256>.json          manifest of each version of a template that is in use
///   layers/sha256-<diff id>/root    unpacked layers of the images that templates are made of
///   blobs/sha256-<digest>           downloads of images
///   disks/ext4-<MiB>.img            blank disk, sparse, read-only base of copy-on-write disks
///   initrd/<sha12>-<layout>.cpio    initial ramdisk per agent binary
///   initrd/agent-<sha12>-<layout>.erofs  root image of the agent for gVisor
///   cache/apt/                      Debian packages, reused by later template builds
///   run/                            unlinked files of running sandboxes, the daemon's socket
///   run/vmm/                        control sockets of the sandboxes that outlive their daemon
///   run/gvisor/                     gVisor sandboxes: configuration, console, state
///   snapshots/, gvisor/             snapshots, one directory per engine
///   functions/<owner digest>/       an owner's functions: records, modules, sockets
///   locks/                          lock files, for example one per template
/// ```
///
/// `<sha12>` is the start of a SHA-256, and `<layout>` the version of the file's layout. A file
/// `<x>.stamp` records the verified checksum and identity of `<x>`. A file whose name starts with
/// `.new-` is unfinished and may be removed while no build runs.
#[derive(Clone, Debug)]
pub struct Home {
    root: PathBuf,
}

/// Error of the data directory.
#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    #[error(
        "cannot choose a data directory, since neither XDG_DATA_HOME nor HOME is set: set JIFFY_HOME"
    )]
    NoPlace,
    #[error("data directory {} is not an absolute path: set JIFFY_HOME to an absolute path", path.display())]
    Relative { path: PathBuf },
    #[error("data directory {} belongs to uid {owner}, but this process runs as uid {uid}: set JIFFY_HOME to another directory", path.display())]
    Foreign { path: PathBuf, owner: u32, uid: u32 },
    #[error("cannot use the data directory (set JIFFY_HOME to choose another)")]
    File(#[from] FileError),
}

/// Directories that [`Home::at`] creates. Other crates create the remaining directories.
const DIRECTORIES: [&str; 11] = [
    "kernel",
    "images",
    "templates",
    "versions",
    "layers",
    "blobs",
    "disks",
    "initrd",
    "cache",
    "run",
    "locks",
];

impl Home {
    /// Opens the data directory of this user, and creates it if missing: `$JIFFY_HOME`, else
    /// `/var/lib/jiffy` for root, else `$XDG_DATA_HOME/jiffy`, else `~/.local/share/jiffy`.
    pub fn locate() -> Result<Self, HomeError> {
        Self::at(default_path(
            |name| env::var_os(name).filter(|v| !v.is_empty()),
            uid(),
        )?)
    }

    /// Opens the data directory at `root` (absolute), and creates it if missing. Only its owner may
    /// access it.
    pub fn at(root: impl Into<PathBuf>) -> Result<Self, HomeError> {
        let root = root.into();
        if !root.is_absolute() {
            return Err(HomeError::Relative { path: root });
        }
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&root)
            .on("create", &root)?;
        // The mode above applies only to a new directory.
        let metadata = fs::metadata(&root).on("examine", &root)?;
        let (owner, uid) = (metadata.uid(), uid());
        // Another user could read secrets of the guests, or replace their files.
        if owner != uid {
            return Err(HomeError::Foreign {
                path: root,
                owner,
                uid,
            });
        }
        if metadata.mode() & 0o077 != 0 {
            // An existing directory may have been created by hand.
            fs::set_permissions(&root, Permissions::from_mode(0o700))
                .on("set the mode of", &root)?;
        }
        for name in DIRECTORIES {
            // `path` may be a symbolic link to the same directory of another data directory. The
            // link is followed: this data directory then borrows the contents, such as templates.
            let path = root.join(name);
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&path)
                .on("create", &path)?;
            let mode = fs::metadata(&path).on("examine", &path)?.mode();
            // Group and others may pass through a directory (x), but not list or write it. Confined
            // processes need this to reach their files.
            if mode & 0o066 != 0 {
                let closed = Permissions::from_mode(mode & 0o7711);
                fs::set_permissions(&path, closed).on("set the mode of", &path)?;
            }
        }
        Ok(Self { root })
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.root
    }

    // The comment of `Home` describes the directories.
    pub(crate) fn kernel(&self) -> PathBuf {
        self.root.join("kernel")
    }

    pub(crate) fn templates(&self) -> PathBuf {
        self.root.join("templates")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    pub(crate) fn versions(&self) -> PathBuf {
        self.root.join("versions")
    }

    /// Directories of snapshots, one per engine. Versions and images that these snapshots refer to
    /// are not removed.
    pub(crate) fn snapshots(&self) -> [PathBuf; 2] {
        ["snapshots", "gvisor"].map(|directory| self.root.join(directory))
    }

    pub(crate) fn layers(&self) -> PathBuf {
        self.root.join("layers")
    }

    pub(crate) fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }

    pub(crate) fn disks(&self) -> PathBuf {
        self.root.join("disks")
    }

    pub(crate) fn initrd(&self) -> PathBuf {
        self.root.join("initrd")
    }

    pub(crate) fn cache(&self) -> PathBuf {
        self.root.join("cache")
    }

    /// Directory with the unlinked files and sockets of running sandboxes.
    pub fn run(&self) -> PathBuf {
        self.root.join("run")
    }

    /// Acquires the lock `name` if it is free.
    pub(crate) fn try_lock(&self, name: &str) -> Result<Option<Lock>, FileError> {
        Lock::try_take(&self.root.join("locks").join(name))
    }

    /// Acquires the lock `name` in shared mode.
    pub(crate) fn share(&self, name: &str) -> Result<Lock, FileError> {
        Lock::share(&self.root.join("locks").join(name))
    }

    /// Acquires the lock `name`. Calls `wait` once if the lock is held.
    pub(crate) fn lock(&self, name: &str, wait: impl FnOnce()) -> Result<Lock, FileError> {
        Lock::take(&self.root.join("locks").join(name), wait)
    }
}

fn uid() -> u32 {
    nix::unistd::Uid::effective().as_raw()
}

/// Returns the default path of the data directory. `var` reads an environment variable.
fn default_path(var: impl Fn(&str) -> Option<OsString>, uid: u32) -> Result<PathBuf, HomeError> {
    if let Some(home) = var("JIFFY_HOME") {
        return Ok(home.into());
    }
    if uid == 0 {
        // Root has one data directory for the whole host, independent of `HOME`.
        return Ok("/var/lib/jiffy".into());
    }
    // The XDG specification requires that relative paths are ignored.
    let data = var("XDG_DATA_HOME")
        .map(PathBuf::from)
        .filter(|p| p.is_absolute());
    let data = data.or_else(|| var("HOME").map(|home| Path::new(&home).join(".local/share")));
    data.map(|data| data.join("jiffy"))
        .ok_or(HomeError::NoPlace)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path_of(uid: u32, vars: &[(&str, &str)]) -> Result<PathBuf, HomeError> {
        default_path(
            |name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()),
            uid,
        )
    }

    #[test]
    fn jiffy_home_has_priority_over_the_default_paths() {
        assert_eq!(
            path_of(0, &[("JIFFY_HOME", "/srv/j"), ("HOME", "/root")]).unwrap(),
            Path::new("/srv/j")
        );
        assert_eq!(
            path_of(0, &[("HOME", "/root")]).unwrap(),
            Path::new("/var/lib/jiffy")
        );
        assert_eq!(
            path_of(1, &[("XDG_DATA_HOME", "/d"), ("HOME", "/h")]).unwrap(),
            Path::new("/d/jiffy")
        );
        assert_eq!(
            path_of(1, &[("HOME", "/h")]).unwrap(),
            Path::new("/h/.local/share/jiffy")
        );
        assert!(matches!(path_of(1, &[]), Err(HomeError::NoPlace)));
    }

    #[test]
    fn the_data_directory_is_private_to_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("home");
        fs::create_dir(&root).unwrap();
        fs::set_permissions(&root, Permissions::from_mode(0o755)).unwrap();
        let home = Home::at(&root).unwrap();
        for path in [home.path().to_owned(), home.templates(), home.run()] {
            assert_eq!(fs::metadata(path).unwrap().mode() & 0o777, 0o700);
        }
    }

    #[test]
    fn a_relative_directory_is_refused() {
        assert!(matches!(Home::at("jiffy"), Err(HomeError::Relative { .. })));
    }
}
