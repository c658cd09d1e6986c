//! Detection of a chroot, in which the kernel denies user namespaces (user_namespaces(7)).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Remedy for users in a chroot.
pub const CHROOT_REMEDY: &str =
    "enter the directory with pivot_root, systemd-nspawn or a container";

/// Returns whether the root directory of this process is not the root of its mount namespace.
pub fn is_chroot() -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    lacks_root_mount(&mounts) || differs_from_root_of_init()
}

/// Returns whether no mount covers `/`, so that the root directory is an ordinary directory.
fn lacks_root_mount(mountinfo: &str) -> bool {
    // Field 5 is the mount point, relative to the root directory of the process.
    let mut points = mountinfo.lines().filter_map(|line| line.split(' ').nth(4));
    !mountinfo.is_empty() && !points.any(|point| point == "/")
}

/// Returns whether the root directories of this process and of process 1 differ in the same mount
/// namespace. Only root can read the root directory of process 1.
fn differs_from_root_of_init() -> bool {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
    let root = |path: &str| {
        let metadata = fs::metadata(Path::new(path)).ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    let (Some(own), Some(init)) = (namespace("self"), namespace("1")) else {
        return false;
    };
    match (root("/"), root("/proc/1/root/")) {
        (Some(own_root), Some(init_root)) => own == init && own_root != init_root,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_directory_without_a_mount_is_a_chroot() {
        let root = "25 1 254:0 / / rw - ext4 /dev/vda rw\n";
        let proc = "26 25 0:5 / /proc rw - proc proc rw\n";
        assert!(!lacks_root_mount(&format!("{root}{proc}")));
        assert!(lacks_root_mount(proc));
        assert!(!lacks_root_mount(""), "/proc may be absent");
    }
}
