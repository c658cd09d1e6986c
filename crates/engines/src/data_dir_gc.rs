//! Removal of what killed processes left in a data directory, outside the snapshots.

use nix::fcntl::{Flock, FlockArg};
use std::collections::HashSet;
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

/// Removes it; returns what was removed. What is in use is young, bound or has another name.
/// Directories that are links belong to somebody else.
pub(crate) fn gc(home: &Path, now: SystemTime) -> Vec<PathBuf> {
    let mut gone = Vec::new();
    let bound = bound_sockets();
    let run = home.join("run");
    for (path, name, metadata) in entries(&run) {
        let age = age(&path, &metadata, now);
        let unused = match metadata.file_type() {
            t if t.is_socket() => {
                name != "jiffy.sock"
                    && age > SOCKET
                    && bound.as_ref().is_some_and(|b| !b.contains(&path))
            }
            _ if name.starts_with(".tmp") => age > TEMPORARY && !locked(&path, &metadata),
            t if t.is_file() => old_log(&name).is_some_and(|n| n > OLD_LOGS),
            _ => false,
        };
        if unused {
            remove(path, metadata.file_type(), &mut gone);
        }
    }
    for directory in ["templates", "images", "kernel", "disks", "initrd", "cache"] {
        for (path, name, metadata) in entries(&home.join(directory)) {
            let age = age(&path, &metadata, now);
            let of_nothing = name.ends_with(".stamp") && !path.with_extension("").exists();
            let unused = name.starts_with(".new-") && age > UNFINISHED
                || of_nothing && metadata.is_file() && age > TEMPORARY;
            if unused {
                remove(path, metadata.file_type(), &mut gone);
            }
        }
    }
    gone
}

fn entries(directory: &Path) -> Vec<(PathBuf, String, Metadata)> {
    let own = fs::symlink_metadata(directory).is_ok_and(|m| m.is_dir());
    let entries = own.then(|| fs::read_dir(directory).ok()).flatten();
    let known = entries.into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        // Not through links.
        let metadata = fs::symlink_metadata(entry.path()).ok()?;
        Some((entry.path(), name, metadata))
    });
    known.collect()
}

/// Since when nothing was changed in it, one level deep.
fn age(path: &Path, metadata: &Metadata, now: SystemTime) -> Duration {
    let mut latest = metadata.modified().ok();
    if metadata.is_dir() {
        let inside = entries(path)
            .into_iter()
            .filter_map(|(.., m)| m.modified().ok());
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
        let gone = |at| {
            let mut gone = gc(home, at);
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
}
