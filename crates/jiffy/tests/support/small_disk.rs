//! File system that a test fills.

use super::{engine, skip, wait_for};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Small file system, unmounted when this value is dropped.
pub struct SmallDisk {
    path: PathBuf,
    _place: TempDir,
}

impl SmallDisk {
    /// Returns `None`, and skips the test, if the test may not mount.
    pub fn new(size: &str) -> Option<Self> {
        let test_home = tempfile::tempdir().unwrap();
        let path = test_home.path().join("disk");
        std::fs::create_dir(&path).unwrap();
        let mounted = if engine::is_gvisor() {
            // The memory of a tmpfs is charged to the sandbox that writes to it.
            mount_file(test_home.path(), &path, size)
        } else {
            mount_memory(&path, size)
        };
        if let Err(e) = mounted {
            skip(&format!("cannot mount a file system: {e}"));
            return None;
        }
        Some(Self {
            path,
            _place: test_home,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of bytes that can be written.
    pub fn room(&self) -> u64 {
        let stat = nix::sys::statvfs::statvfs(self.path()).unwrap();
        stat.blocks_available() * stat.fragment_size()
    }

    /// Uses all space except `left` bytes.
    pub fn fill(&self, left: u64) {
        let file = std::fs::File::create(self.path().join("filler")).unwrap();
        // Other processes may write at the same time.
        wait_for("the disk to be full", || {
            let taken = i64::try_from(self.room().saturating_sub(left)).unwrap();
            fallocate(&file, FallocateFlags::empty(), 0, taken).ok()
        });
    }

    /// Removes the file with which [`Self::fill`] has filled the disk.
    pub fn free(&self) {
        std::fs::remove_file(self.path().join("filler")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = umount2(self.path(), MntFlags::MNT_DETACH);
        assert!(unmounted.is_ok() || std::thread::panicking());
    }
}

fn mount_memory(at: &Path, size: &str) -> Result<(), String> {
    let options = format!("size={size}");
    let (kind, flags) = (Some("tmpfs"), MsFlags::empty());
    mount(Some("none"), at, kind, flags, Some(options.as_str())).map_err(|e| e.to_string())
}

/// Mounts a file with an ext4 file system.
fn mount_file(test_home: &Path, at: &Path, size: &str) -> Result<(), String> {
    let script = r#"
        truncate -s "$1" "$2/image"
        mkfs.ext4 -q -m 0 "$2/image"
        mount -o loop "$2/image" "$3""#;
    let done = Command::new("sh")
        .args(["-ec", script, "sh", size])
        .args([test_home, at])
        .output()
        .map_err(|e| e.to_string())?;
    if done.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&done.stderr).into_owned())
    }
}
