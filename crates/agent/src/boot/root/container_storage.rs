//! Directories for the images and layers of containers that run inside the sandbox.
//!
//! The upper directory of an overlay cannot be on another overlay, and the root is an overlay.
//! Therefore directories of the disk itself are mounted where docker, containerd and podman store
//! their layers. Places at which the template has files are skipped. On gVisor, the directories are
//! in the tmpfs that contains all writes.

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

/// A directory of the disk, and the place in the root where it is mounted.
#[derive(Debug)]
pub struct ContainerStorage {
    /// The directory on the disk.
    pub directory: File,
    /// Mount point relative to the root, without a leading slash.
    pub place: &'static str,
}

impl ContainerStorage {
    /// Returns whether the directory contains files.
    pub fn is_used(&self) -> bool {
        std::fs::read_dir(format!("/{}", self.place)).is_ok_and(|mut all| all.next().is_some())
    }

    /// Returns the relative path of unpacked container images, if there are any. The overlayfs
    /// marks in these layers apply to containers and not to a template.
    pub fn container_layers(&self) -> Option<String> {
        let mut layers = LAYERS.iter().map(|at| format!("{}/{at}", self.place));
        layers.find(|at| has_directories(format!("/{at}").as_ref()))
    }
}

/// Directories in which docker, containerd and podman store one directory per layer.
const LAYERS: [&str; 3] = [
    "overlay2",
    "io.containerd.snapshotter.v1.overlayfs/snapshots",
    "storage/overlay",
];

/// Returns whether the directory contains a subdirectory other than `l`, in which container engines
/// store short links to the layers.
fn has_directories(path: &Path) -> bool {
    let Ok(mut all) = std::fs::read_dir(path) else {
        return false;
    };
    all.any(|entry| {
        entry.is_ok_and(|e| e.file_name() != "l" && e.file_type().is_ok_and(|kind| kind.is_dir()))
    })
}

/// Names on the disk, places in the root, and modes. The lowest layer of the root, below the images
/// of the template, has empty directories at the first three places. The last place is for podman
/// without root. It is used only if the template has a directory there, and belongs to the owner of
/// this directory.
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

/// Directory of the disk that contains the directories.
const PARENT: &str = "storage";

/// Mounted directories.
static STORAGE: OnceLock<Vec<ContainerStorage>> = OnceLock::new();

/// Returns the mounted directories. Empty if the agent is not process 1.
pub fn mounted() -> &'static [ContainerStorage] {
    STORAGE.get().map_or(&[], Vec::as_slice)
}

/// Creates the directories in the file system on `at`.
pub fn make(at: &str) -> Result<Vec<ContainerStorage>, String> {
    let above = format!("{at}/{PARENT}");
    directory(&above, 0o700);
    let storages = PLACES.iter().map(|(name, place, mode)| {
        let path = format!("{above}/{name}");
        directory(&path, *mode);
        let failed = |e: io::Error| format!("cannot open {path}: {e}");
        let directory = File::open(&path).map_err(failed)?;
        // The mode is set explicitly, independent of the umask of the kernel's first process.
        let mode = Permissions::from_mode(*mode);
        directory.set_permissions(mode).map_err(failed)?;
        Ok(ContainerStorage { directory, place })
    });
    storages.collect()
}

/// Mounts each directory on its place if the root has an empty directory there. Files that an image
/// has there remain visible. The calling process must already be in the new root.
pub fn mount(storages: Vec<ContainerStorage>) -> Result<(), String> {
    mount_each(storages, mount_tree)
}

/// Mounts the directories on gVisor, whose kernel does not support detached mounts. The places are
/// below `root`, which is about to become the root. The directories are below `at`, as created by
/// [`make`].
pub fn bind(storages: Vec<ContainerStorage>, at: &str, root: &str) -> Result<(), String> {
    mount_each(storages, |storage| bind_one(storage, at, root))
}

/// Mounts storage for container engines, and remembers the mounts that succeeded.
fn mount_each(
    storages: Vec<ContainerStorage>,
    mount_one: impl Fn(&ContainerStorage) -> io::Result<bool>,
) -> Result<(), String> {
    let mut mounted = Vec::new();
    for storage in storages {
        let done = mount_one(&storage)
            .map_err(|e| format!("cannot mount storage on /{}: {e}", storage.place))?;
        if done {
            mounted.push(storage);
        }
    }
    // Ignore the error: there is only one root, and it is created once.
    let _ = STORAGE.set(mounted);
    Ok(())
}

/// Returns whether there is an empty directory at `path`. If so, copies its owner to the
/// directory of the disk.
fn prepare_place(storage: &ContainerStorage, path: &Path) -> io::Result<bool> {
    let metadata = match std::fs::symlink_metadata(path) {
        // A symbolic link is not followed: the template stores the data elsewhere.
        Ok(metadata) if metadata.is_dir() => metadata,
        _ => return Ok(false),
    };
    if std::fs::read_dir(path)?.next().is_some() {
        return Ok(false);
    }
    if (metadata.uid(), metadata.gid()) != (0, 0) {
        fchown(
            &storage.directory,
            Some(metadata.uid()),
            Some(metadata.gid()),
        )?;
    }
    Ok(true)
}

/// Mounts one directory of [`mount`]. Returns false if its place is not an empty directory.
fn mount_tree(storage: &ContainerStorage) -> io::Result<bool> {
    let path = format!("/{}", storage.place);
    if !prepare_place(storage, path.as_ref())? {
        return Ok(false);
    }
    // The disk has no mount point that the new root can see, so the directory is mounted by its
    // descriptor.
    let tree = open_tree(&storage.directory)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(&tree, c"", CWD, path, flags)?;
    Ok(true)
}

/// Mounts one directory of [`bind`]. Returns false if its place is not an empty directory.
fn bind_one(storage: &ContainerStorage, at: &str, root: &str) -> io::Result<bool> {
    let path = Path::new(root).join(storage.place);
    // A symbolic link in the path would refer to the current root, because `root` is not the root
    // yet.
    let is_plain = std::fs::canonicalize(&path).is_ok_and(|real| real == path);
    if !is_plain || !prepare_place(storage, &path)? {
        return Ok(false);
    }
    let source = PLACES.iter().find(|(_, place, _)| *place == storage.place);
    let source = source.map(|(name, _, _)| format!("{at}/{PARENT}/{name}"));
    let source = sys::cstring(source.unwrap_or_default().as_bytes())?;
    raw(&source, &sys::cpath(&path)?, c"", libc::MS_BIND, c"").map(|()| true)
}

/// Returns the directory as a detached mount.
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
