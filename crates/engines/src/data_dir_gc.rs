//! Garbage collection of files that killed processes left in a data directory. Snapshots are
//! collected by their stores.
//!
//! The *stamp* `X.stamp` records that the image `X` was verified.

use nix::fcntl::{Flock, FlockArg};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File, FileType, Metadata};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Age above which unfinished work of a template build is removed. The longest build takes minutes.
const UNFINISHED: Duration = Duration::from_secs(24 * 3600);
/// Age above which temporary files, temporary directories and stamps without a file are removed.
const TEMPORARY: Duration = Duration::from_secs(3600);
/// Age above which an unbound socket file is removed. A younger socket may have been bound after
/// the list of bound sockets was read.
const SOCKET: Duration = Duration::from_secs(60);
/// Number of rotated logs that are retained in addition to the current log.
pub const OLD_LOGS: usize = 3;

/// Directories that may contain unfinished work (`.new-*`) and stamps (`*.stamp`).
const DIRECTORIES: [&str; 6] = ["templates", "images", "kernel", "disks", "initrd", "cache"];
/// Precision of modification times: two changes within this period may have the same time stamp.
const STAMP_PRECISION: Duration = Duration::from_secs(2);

/// Garbage collection of a data directory.
pub(crate) struct DataDirGc {
    home: PathBuf,
    /// Modification times of the directories that had no candidates for removal. Such a directory
    /// is not read again until its modification time changes.
    clean: Mutex<HashMap<&'static str, SystemTime>>,
}

impl DataDirGc {
    /// Creates the garbage collector of the data directory `home`.
    pub fn new(home: &Path) -> Self {
        Self {
            home: home.to_owned(),
            clean: Mutex::default(),
        }
    }

    /// Removes unused files and returns their paths. Files in use are young, bound, locked or have
    /// other names. Symbolic links to directories are not followed.
    pub fn run(&self, now: SystemTime) -> Vec<PathBuf> {
        let mut removed = Vec::new();
        self.gc_run(now, &mut removed);
        for name in DIRECTORIES {
            let changed = fs::symlink_metadata(self.home.join(name))
                .and_then(|m| m.modified())
                .ok();
            let mut clean = self.clean.lock();
            // A new candidate changes the modification time of its directory.
            if changed.is_some() && clean.get(name).copied() == changed {
                continue;
            }
            clean.remove(name);
            let candidates = self.gc_directory(name, now, &mut removed);
            // Two changes in quick succession may have the same time stamp.
            let final_change = changed.filter(|at| {
                now.duration_since(*at)
                    .is_ok_and(|age| age > STAMP_PRECISION)
            });
            if let Some(at) = final_change.filter(|_| candidates == 0) {
                clean.insert(name, at);
            }
        }
        removed
    }

    /// Removes unused sockets, temporary files and old logs in the runtime directory (`run`).
    fn gc_run(&self, now: SystemTime, removed: &mut Vec<PathBuf>) {
        let bound = bound_sockets();
        for (path, name) in entries(&self.home.join("run")) {
            // `symlink_metadata` does not follow symbolic links.
            let Ok(metadata) = fs::symlink_metadata(&path) else {
                continue;
            };
            let age = || age(&path, &metadata, now);
            let is_unused = match metadata.file_type() {
                t if t.is_socket() => {
                    // The daemon binds its own socket under another name and renames the file. The
                    // list of bound sockets therefore does not contain this path.
                    name != "jiffy.sock"
                        && age() > SOCKET
                        && bound.as_ref().is_some_and(|b| !b.contains(&path))
                }
                _ if name.starts_with(".tmp") => age() > TEMPORARY && !is_locked(&path, &metadata),
                t if t.is_file() => old_log(&name).is_some_and(|n| n > OLD_LOGS),
                _ => false,
            };
            if is_unused {
                remove(path, metadata.file_type(), removed);
            }
        }
    }

    /// Returns the number of names that may belong to an unused file, now or later. Other files are
    /// not examined because a directory may contain very many.
    fn gc_directory(&self, name: &str, now: SystemTime, removed: &mut Vec<PathBuf>) -> usize {
        let mut candidates = 0;
        for (path, name) in entries(&self.home.join(name)) {
            let is_unfinished = name.starts_with(".new-");
            let is_orphaned = name.ends_with(".stamp") && !path.with_extension("").exists();
            if !is_unfinished && !is_orphaned {
                continue;
            }
            candidates += 1;
            let Ok(metadata) = fs::symlink_metadata(&path) else {
                continue;
            };
            let age = age(&path, &metadata, now);
            if is_unfinished && age > UNFINISHED
                || is_orphaned && metadata.is_file() && age > TEMPORARY
            {
                remove(path, metadata.file_type(), removed);
            }
        }
        candidates
    }
}

/// Returns the paths and names in a directory, but not in the target of a symbolic link.
fn entries(directory: &Path) -> impl Iterator<Item = (PathBuf, String)> {
    let own = fs::symlink_metadata(directory).is_ok_and(|m| m.is_dir());
    let entries = own.then(|| fs::read_dir(directory).ok()).flatten();
    entries.into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        Some((entry.path(), name))
    })
}

/// Returns the time since the last change of `path` and, for a directory, of its entries.
fn age(path: &Path, metadata: &Metadata, now: SystemTime) -> Duration {
    let mut latest = metadata.modified().ok();
    if metadata.is_dir() {
        let inside = entries(path).filter_map(|(path, _)| {
            let metadata = fs::symlink_metadata(path);
            metadata.and_then(|m| m.modified()).ok()
        });
        latest = latest.max(inside.max());
    }
    // A time in the future counts as young.
    latest
        .and_then(|latest| now.duration_since(latest).ok())
        .unwrap_or_default()
}

/// Returns whether another process holds a lock on the directory. Returns `false` for other files
/// and for directories that cannot be opened.
fn is_locked(path: &Path, metadata: &Metadata) -> bool {
    let Some(Ok(directory)) = metadata.is_dir().then(|| File::open(path)) else {
        return false;
    };
    // The lock is released at once, when the file is dropped.
    Flock::lock(directory, FlockArg::LockExclusiveNonblock).is_err()
}

/// Returns the number of a rotated log.
fn old_log(name: &str) -> Option<usize> {
    name.strip_prefix("jiffy.log.")?.parse().ok()
}

/// Returns the paths of all bound Unix sockets. `None` if the kernel does not provide the list.
fn bound_sockets() -> Option<HashSet<PathBuf>> {
    let text = fs::read_to_string("/proc/net/unix").ok()?;
    // A path is the rest of the line after the numeric columns.
    let paths = text
        .lines()
        .filter_map(|l| l.find('/').map(|at| PathBuf::from(&l[at..])));
    Some(paths.collect())
}

/// Removes a file or directory, and adds it to `removed`.
fn remove(path: PathBuf, kind: FileType, removed: &mut Vec<PathBuf>) {
    let result = if kind.is_dir() {
        fs::remove_dir_all(&path)
    } else {
        fs::remove_file(&path)
    };
    match result {
        Ok(()) => removed.push(path),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => {
            tracing::warn!(path = %path.display(), error = %e, "cannot remove an unused file")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    #[test]
    fn unused_files_are_removed_and_used_files_remain() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path();
        for name in ["run", "templates", "kernel", "disks", "elsewhere"] {
            fs::create_dir(home.join(name)).unwrap();
        }
        let file = |name: &str| drop(File::create(home.join(name)).unwrap());
        let socket = |name: &str| UnixListener::bind(home.join(name)).unwrap();
        drop(socket("run/dead.sock"));
        drop(socket("run/jiffy.sock"));
        let _live = socket("run/live.sock");
        fs::create_dir(home.join("run/.tmpX")).unwrap();
        fs::create_dir(home.join("run/.tmpZ")).unwrap();
        let used = File::open(home.join("run/.tmpZ")).unwrap();
        let _used = Flock::lock(used, FlockArg::LockExclusive).unwrap();
        fs::create_dir(home.join("run/vmm")).unwrap();
        fs::create_dir(home.join("templates/.new-base")).unwrap();
        for name in [
            "run/.tmpX/layer",
            "run/.tmpY",
            "run/jiffy.log",
            "run/jiffy.log.3",
            "run/jiffy.log.4",
            "disks/.new-ext4",
            "disks/removed.img.stamp",
            "disks/used.img",
            "disks/used.img.stamp",
            "elsewhere/.new-x",
        ] {
            file(name);
        }
        symlink(home.join("elsewhere"), home.join("initrd")).unwrap();

        let now = SystemTime::now();
        let data_dir = DataDirGc::new(home);
        let removed = |at| {
            let mut removed = data_dir.run(at);
            removed.sort();
            let names = removed
                .iter()
                .map(|p| p.strip_prefix(home).unwrap().display().to_string());
            names.collect::<Vec<_>>()
        };
        // Young files may be in use, but a log beyond the retained number is not.
        assert_eq!(removed(now), ["run/jiffy.log.4"]);
        assert_eq!(removed(now + SOCKET * 2), ["run/dead.sock"]);
        assert_eq!(
            removed(now + TEMPORARY * 2),
            ["disks/removed.img.stamp", "run/.tmpX", "run/.tmpY"]
        );
        assert_eq!(
            removed(now + UNFINISHED * 2),
            ["disks/.new-ext4", "templates/.new-base"]
        );
        assert!(removed(now + UNFINISHED * 9).is_empty());
        for name in [
            "run/live.sock",
            "run/jiffy.sock",
            "run/vmm",
            "run/.tmpZ",
            "disks/used.img.stamp",
            "elsewhere/.new-x",
        ] {
            assert!(home.join(name).exists(), "{name}");
        }
    }

    #[test]
    fn a_directory_is_read_if_it_changed_or_has_candidates() {
        let dir = tempfile::tempdir().unwrap();
        let templates = dir.path().join("templates");
        fs::create_dir(&templates).unwrap();
        let data_dir = DataDirGc::new(dir.path());
        let is_clean = |at| {
            data_dir.run(at);
            data_dir.clean.lock().contains_key("templates")
        };
        let now = SystemTime::now();
        assert!(!is_clean(now), "a further change may have the same time");
        assert!(is_clean(now + STAMP_PRECISION * 2));
        fs::create_dir(templates.join(".new-base")).unwrap();
        assert!(!is_clean(now + STAMP_PRECISION * 4));
        assert!(!is_clean(now + UNFINISHED * 2), "it is removed");
        assert!(!templates.join(".new-base").exists());
        assert!(is_clean(now + UNFINISHED * 2));
    }
}
