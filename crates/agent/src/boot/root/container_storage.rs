//! Storage of container images.
//!
//! overlayfs takes no upper directory that lies on another overlay, and the root is one. So that
//! docker, containerd and podman use it without a detour, directories of the disk itself are
//! mounted where they keep their layers, unless the template has something there. On gVisor they
//! are directories of the tmpfs that takes all writes.

use super::super::mount::{directory, raw};
use crate::sys;
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount};
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;
use std::sync::OnceLock;

/// A directory of the disk and the place of the root where it is mounted.
#[derive(Debug)]
pub struct ContainerStorage {
    /// The directory on the disk.
    pub directory: File,
    /// Mount point beneath the root, without a slash in front.
    pub place: &'static str,
}

impl ContainerStorage {
    /// Returns true if anything was written there.
    pub fn is_used(&self) -> bool {
        std::fs::read_dir(format!("/{}", self.place)).is_ok_and(|mut all| all.next().is_some())
    }

    /// Path beneath it of unpacked container images, if there are any. Their layers have overlayfs
    /// marks that apply to containers, not to a template.
    pub fn container_layers(&self) -> Option<String> {
        let mut layers = LAYERS.iter().map(|at| format!("{}/{at}", self.place));
        layers.find(|at| has_directories(format!("/{at}").as_ref()))
    }
}

/// Directories of docker, of containerd and of podman with one directory for each layer.
const LAYERS: [&str; 3] = [
    "overlay2",
    "io.containerd.snapshotter.v1.overlayfs/snapshots",
    "storage/overlay",
];

/// Returns true if it contains a directory, apart from the one with short names of the others.
fn has_directories(path: &Path) -> bool {
    let Ok(mut all) = std::fs::read_dir(path) else {
        return false;
    };
    all.any(|entry| {
        entry.is_ok_and(|e| e.file_name() != "l" && e.file_type().is_ok_and(|kind| kind.is_dir()))
    })
}

/// Names on the disk, places, and modes. The last is podman's without root, in templates that have
/// a directory there; it belongs to that directory's owner.
const PLACES: [(&str, &str, u32); 4] = [
    ("docker", "var/lib/docker", 0o710),
    ("containerd", "var/lib/containerd", 0o711),
    ("containers", "var/lib/containers", 0o755),
    (
        "user-containers",
        "home/user/.local/share/containers",
        0o700,
    ),
];

/// Directory of the disk that the directories are in.
const ABOVE: &str = "storage";

static STORAGE: OnceLock<Vec<ContainerStorage>> = OnceLock::new();

/// Those that are mounted. None if we are not process 1.
pub fn mounted() -> &'static [ContainerStorage] {
    STORAGE.get().map_or(&[], Vec::as_slice)
}

/// Makes the directories in the file system on `at`.
pub fn make(at: &str) -> Result<Vec<ContainerStorage>, String> {
    let above = format!("{at}/{ABOVE}");
    directory(&above, 0o700);
    let made = PLACES.iter().map(|(name, place, mode)| {
        let path = format!("{above}/{name}");
        directory(&path, *mode);
        let failed = |e: io::Error| format!("cannot open {path}: {e}");
        let directory = File::open(&path).map_err(failed)?;
        // The mask of the kernel's first process must not matter.
        let mode = Permissions::from_mode(*mode);
        directory.set_permissions(mode).map_err(failed)?;
        Ok(ContainerStorage { directory, place })
    });
    made.collect()
}

/// Mounts each where the root, which we are in, has an empty directory for it; files that an image
/// has there stay.
pub fn mount(made: Vec<ContainerStorage>) -> Result<(), String> {
    mount_each(made, mount_tree)
}

/// The same on gVisor, whose kernel has no mounts without a place: beneath `root`, which is about
/// to become the root, from [`make`]'s directories in the file system on `at`.
pub fn bind(made: Vec<ContainerStorage>, at: &str, root: &str) -> Result<(), String> {
    mount_each(made, |storage| bind_one(storage, at, root))
}

fn mount_each(
    made: Vec<ContainerStorage>,
    mount_one: impl Fn(&ContainerStorage) -> io::Result<bool>,
) -> Result<(), String> {
    let mut mounted = Vec::new();
    for storage in made {
        let done = mount_one(&storage)
            .map_err(|e| format!("cannot mount storage on /{}: {e}", storage.place))?;
        if done {
            mounted.push(storage);
        }
    }
    // There is one root, made once.
    let _ = STORAGE.set(mounted);
    Ok(())
}

/// Prepares the directory for the one at `path`, if there is one that is empty.
fn is_wanted(storage: &ContainerStorage, path: &Path) -> io::Result<bool> {
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => found,
        _ => return Ok(false),
    };
    if std::fs::read_dir(path)?.next().is_some() {
        return Ok(false);
    }
    if (found.uid(), found.gid()) != (0, 0) {
        fchown(&storage.directory, Some(found.uid()), Some(found.gid()))?;
    }
    Ok(true)
}

fn mount_tree(storage: &ContainerStorage) -> io::Result<bool> {
    let path = format!("/{}", storage.place);
    if !is_wanted(storage, path.as_ref())? {
        return Ok(false);
    }
    let tree = open_tree(&storage.directory)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(&tree, c"", CWD, path, flags)?;
    Ok(true)
}

fn bind_one(storage: &ContainerStorage, at: &str, root: &str) -> io::Result<bool> {
    let path = Path::new(root).join(storage.place);
    // A symbolic link on the way would lead out of the new root: it is not the root yet.
    let is_plain = std::fs::canonicalize(&path).is_ok_and(|found| found == path);
    if !is_plain || !is_wanted(storage, &path)? {
        return Ok(false);
    }
    let source = PLACES.iter().find(|(_, place, _)| *place == storage.place);
    let source = source.map(|(name, _, _)| format!("{at}/{ABOVE}/{name}"));
    let source = sys::cstring(source.unwrap_or_default().as_bytes())?;
    raw(&source, &sys::cpath(&path)?, c"", libc::MS_BIND, c"").map(|()| true)
}

/// The directory as a mount of its own, which has no place yet.
fn open_tree(directory: &File) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    Ok(rustix::mount::open_tree(directory, c"", flags)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_directories_and_not_the_files_beside_them() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!has_directories(&dir.path().join("missing")));
        std::fs::create_dir(dir.path().join("l")).unwrap();
        std::fs::write(dir.path().join("backingFsBlockDev"), "").unwrap();
        assert!(!has_directories(dir.path()));
        std::fs::create_dir(dir.path().join("0a1b")).unwrap();
        assert!(has_directories(dir.path()));
    }
}
