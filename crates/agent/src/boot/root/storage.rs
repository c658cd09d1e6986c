//! Places where programs keep container images.
//!
//! overlayfs takes no upper directory that lies on another overlay, and the root is one. So that
//! docker, containerd and podman use it without a detour, directories of the disk itself are
//! mounted where they keep their layers, unless the template has something there.

use super::super::mount::directory;
use crate::sys;
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::OnceLock;

/// A directory of the disk and the place of the root where it is mounted.
#[derive(Debug)]
pub struct Storage {
    /// The directory on the disk.
    pub directory: File,
    /// Its name beneath the root, without a slash in front.
    pub place: &'static str,
}

impl Storage {
    /// Whether anything was written there.
    pub fn is_used(&self) -> bool {
        std::fs::read_dir(format!("/{}", self.place)).is_ok_and(|mut all| all.next().is_some())
    }

    /// Where beneath it container images are unpacked, if there are any. Their layers have marks
    /// of overlayfs that mean something to containers, not to a template.
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

/// Whether there is a directory in it, apart from the one with short names of the others.
fn has_directories(path: &Path) -> bool {
    let Ok(mut all) = std::fs::read_dir(path) else {
        return false;
    };
    all.any(|entry| {
        entry.is_ok_and(|e| e.file_name() != "l" && e.file_type().is_ok_and(|kind| kind.is_dir()))
    })
}

/// Names on the disk, places, and modes.
const PLACES: [(&str, &str, u32); 3] = [
    ("docker", "var/lib/docker", 0o710),
    ("containerd", "var/lib/containerd", 0o711),
    ("containers", "var/lib/containers", 0o755),
];

static STORAGE: OnceLock<Vec<Storage>> = OnceLock::new();

/// What is mounted. Nothing if we are not process 1 of a microVM.
pub fn mounted() -> &'static [Storage] {
    STORAGE.get().map_or(&[], Vec::as_slice)
}

/// Makes the directories in the file system on `at`.
pub fn make(at: &str) -> Result<Vec<Storage>, String> {
    let above = format!("{at}/storage");
    directory(&above, 0o700);
    let made = PLACES.iter().map(|(name, place, mode)| {
        let path = format!("{above}/{name}");
        directory(&path, *mode);
        let failed = |e: io::Error| format!("cannot open {path}: {e}");
        let directory = File::open(&path).map_err(failed)?;
        // The mask of the kernel's first process must not matter.
        let mode = Permissions::from_mode(*mode);
        directory.set_permissions(mode).map_err(failed)?;
        Ok(Storage { directory, place })
    });
    made.collect()
}

/// Mounts each where the new root has an empty directory for it; what an image has there stays.
pub fn mount(made: Vec<Storage>) -> Result<(), String> {
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

fn mount_one(storage: &Storage) -> io::Result<bool> {
    let path = format!("/{}", storage.place);
    match std::fs::symlink_metadata(&path) {
        Ok(found) if found.is_dir() => {}
        _ => return Ok(false),
    }
    if std::fs::read_dir(&path)?.next().is_some() {
        return Ok(false);
    }
    let tree = open_tree(&storage.directory)?;
    let target = sys::cstring(path.as_bytes())?;
    // SAFETY: descriptors that are open, and valid C strings.
    let moved = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            target.as_ptr(),
            libc::MOVE_MOUNT_F_EMPTY_PATH,
        )
    };
    sys::check(moved as libc::c_int).map(|_| true)
}

/// The directory as a mount of its own, which has no place yet.
fn open_tree(directory: &File) -> io::Result<OwnedFd> {
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | libc::AT_EMPTY_PATH as u32;
    // SAFETY: a descriptor that is open, and an empty C string.
    let tree = unsafe {
        libc::syscall(
            libc::SYS_open_tree,
            directory.as_raw_fd(),
            c"".as_ptr(),
            flags,
        )
    };
    let tree = sys::check(tree as libc::c_int)?;
    // SAFETY: it was just made for us.
    Ok(unsafe { OwnedFd::from_raw_fd(tree) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_directories_and_not_what_lies_beside_them() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!has_directories(&dir.path().join("missing")));
        std::fs::create_dir(dir.path().join("l")).unwrap();
        std::fs::write(dir.path().join("backingFsBlockDev"), "").unwrap();
        assert!(!has_directories(dir.path()));
        std::fs::create_dir(dir.path().join("0a1b")).unwrap();
        assert!(has_directories(dir.path()));
    }
}
