//! Removal of what killed processes left in a data directory, outside the snapshots.

use nix::fcntl::{Flock, FlockArg};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File, FileType, Metadata};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Unfinished work of template builds; the longest takes minutes.
const UNFINISHED: Duration = Duration::from_secs(24 * 3600);
/// Temporary files and directories, and stamps of nothing.
const TEMPORARY: Duration = Duration::from_secs(3600);
/// A socket is bound before it listens.
const SOCKET: Duration = Duration::from_secs(60);
/// Old logs that are kept beside the one in use.
pub const OLD_LOGS: usize = 3;

/// Directories in which unfinished work and stamps are found.
const DIRECTORIES: [&str; 6] = ["templates", "images", "kernel", "disks", "initrd", "cache"];
/// Age of a directory's last change from which on a later one has another time stamp.
const STAMP_PRECISION: Duration = Duration::from_secs(2);

/// Garbage collection of a data directory.
pub(crate) struct DataDirGc {
    home: PathBuf,
    /// Directories in which nothing was found, by the time of their last change: their names are
    /// read again when that is another.
    clean: Mutex<HashMap<&'static str, SystemTime>>,
}

impl DataDirGc {
    /// That of the data directory `home`.
    pub fn of(home: &Path) -> Self {
        Self {
            home: home.to_owned(),
            clean: Mutex::default(),
        }
    }

    /// Removes what is unused; returns what was removed. What is in use is young, bound or has
    /// another name. Directories that are links belong to somebody else.
    pub fn run(&self, now: SystemTime) -> Vec<PathBuf> {
        let mut gone = Vec::new();
        self.gc_run(now, &mut gone);
        for name in DIRECTORIES {
            let changed = fs::symlink_metadata(self.home.join(name));
            let changed = changed.and_then(|m| m.modified()).ok();
            let mut clean = self.clean.lock();
            if changed.is_some() && clean.get(name).copied() == changed {
                continue;
            }
            clean.remove(name);
            let candidates = self.gc_directory(name, now, &mut gone);
            // Two changes in a row may have one time stamp.
            let settled = changed.filter(|at| {
                now.duration_since(*at)
                    .is_ok_and(|age| age > STAMP_PRECISION)
            });
            if let Some(at) = settled.filter(|_| candidates == 0) {
                clean.insert(name, at);
            }
        }
        gone
    }

    fn gc_run(&self, now: SystemTime, gone: &mut Vec<PathBuf>) {
        let bound = bound_sockets();
        for (path, name) in entries(&self.home.join("run")) {
            // Not through links.
            let Ok(metadata) = fs::symlink_metadata(&path) else {
                continue;
            };
            let age = || age(&path, &metadata, now);
            let unused = match metadata.file_type() {
                t if t.is_socket() => {
                    name != "jiffy.sock"
                        && age() > SOCKET
                        && bound.as_ref().is_some_and(|b| !b.contains(&path))
                }
                _ if name.starts_with(".tmp") => age() > TEMPORARY && !locked(&path, &metadata),
                t if t.is_file() => old_log(&name).is_some_and(|n| n > OLD_LOGS),
                _ => false,
            };
            if unused {
                remove(path, metadata.file_type(), gone);
            }
        }
    }

    /// Returns how many names it found that may be of something unused, now or later. No other
    /// file is looked at: there may be very many.
    fn gc_directory(&self, name: &str, now: SystemTime, gone: &mut Vec<PathBuf>) -> usize {
        let mut candidates = 0;
        for (path, name) in entries(&self.home.join(name)) {
            let unfinished = name.starts_with(".new-");
            let of_nothing = name.ends_with(".stamp") && !path.with_extension("").exists();
            if !unfinished && !of_nothing {
                continue;
            }
            candidates += 1;
            let Ok(metadata) = fs::symlink_metadata(&path) else {
                continue;
            };
            let age = age(&path, &metadata, now);
            if unfinished && age > UNFINISHED || of_nothing && metadata.is_file() && age > TEMPORARY
            {
                remove(path, metadata.file_type(), gone);
            }
        }
        candidates
    }
}

fn entries(directory: &Path) -> impl Iterator<Item = (PathBuf, String)> {
    let own = fs::symlink_metadata(directory).is_ok_and(|m| m.is_dir());
    let entries = own.then(|| fs::read_dir(directory).ok()).flatten();
    entries.into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        Some((entry.path(), name))
    })
}

/// Since when nothing was changed in it, one level deep.
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

/// True if a lock says that a directory is in use.
fn locked(path: &Path, metadata: &Metadata) -> bool {
    let Some(Ok(directory)) = metadata.is_dir().then(|| File::open(path)) else {
        return false;
    };
    Flock::lock(directory, FlockArg::LockExclusiveNonblock).is_err()
}

fn old_log(name: &str) -> Option<usize> {
    name.strip_prefix("jiffy.log.")?.parse().ok()
}

/// Paths that some process listens at; none if the kernel does not tell.
fn bound_sockets() -> Option<HashSet<PathBuf>> {
    let text = fs::read_to_string("/proc/net/unix").ok()?;
    let paths = text
        .lines()
        .filter_map(|l| l.find('/').map(|at| PathBuf::from(&l[at..])));
    Some(paths.collect())
}

fn remove(path: PathBuf, kind: FileType, gone: &mut Vec<PathBuf>) {
    let removed = if kind.is_dir() {
        fs::remove_dir_all(&path)
    } else {
        fs::remove_file(&path)
    };
    match removed {
        Ok(()) => gone.push(path),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => tracing::warn!("cannot remove {}: {e}", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    #[test]
    fn unused_data_of_every_kind_is_removed_and_used_data_stays() {
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
            "disks/gone.img.stamp",
            "disks/kept.img",
            "disks/kept.img.stamp",
            "elsewhere/.new-x",
        ] {
            file(name);
        }
        symlink(home.join("elsewhere"), home.join("initrd")).unwrap();

        let now = SystemTime::now();
        let data_dir = DataDirGc::of(home);
        let gone = |at| {
            let mut gone = data_dir.run(at);
            gone.sort();
            let names = gone
                .iter()
                .map(|p| p.strip_prefix(home).unwrap().display().to_string());
            names.collect::<Vec<_>>()
        };
        // Young things may be in use, but a log that was rotated out is not.
        assert_eq!(gone(now), ["run/jiffy.log.4"]);
        assert_eq!(gone(now + SOCKET * 2), ["run/dead.sock"]);
        assert_eq!(
            gone(now + TEMPORARY * 2),
            ["disks/gone.img.stamp", "run/.tmpX", "run/.tmpY"]
        );
        assert_eq!(
            gone(now + UNFINISHED * 2),
            ["disks/.new-ext4", "templates/.new-base"]
        );
        assert!(gone(now + UNFINISHED * 9).is_empty());
        for name in [
            "run/live.sock",
            "run/jiffy.sock",
            "run/vmm",
            "run/.tmpZ",
            "disks/kept.img.stamp",
            "elsewhere/.new-x",
        ] {
            assert!(home.join(name).exists(), "{name}");
        }
    }

    #[test]
    fn names_of_a_directory_are_read_when_it_has_changed_and_while_something_is_to_age() {
        let dir = tempfile::tempdir().unwrap();
        let templates = dir.path().join("templates");
        fs::create_dir(&templates).unwrap();
        let data_dir = DataDirGc::of(dir.path());
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
