//! Finds the processes in a user namespace and its descendants. A persistent holder of the
//! namespaces runs while other processes use them.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// `NS_GET_PARENT` (ioctl_nsfs(2)).
const NS_GET_PARENT: libc::c_ulong = 0xb702;
/// Maximum nesting depth of user namespaces (user_namespaces(7)).
const MAX_NAMESPACE_DEPTH: usize = 33;

/// Returns the processes in the user namespace of this process and its descendants, without this
/// process and its children.
pub(crate) fn others() -> Vec<u32> {
    let Ok(own) = fs::metadata("/proc/self/ns/user").map(|data| data.ino()) else {
        return Vec::new();
    };
    let own_pid = std::process::id();
    let names = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = names.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|&pid| pid != own_pid && is_running_and_not_child(pid, own_pid))
        .filter(|pid| is_beneath(Path::new(&format!("/proc/{pid}/ns/user")), own))
        .collect()
}

/// Returns whether process `pid` is running and is not a child of `parent_pid`.
fn is_running_and_not_child(pid: u32, parent_pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The process name may contain any character. It ends at the last bracket.
    let mut words = stat
        .rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_whitespace();
    let (state, parent) = (words.next(), words.next());
    state.is_some_and(|state| state != "Z")
        && parent.and_then(|p| p.parse().ok()) != Some(parent_pid)
}

/// Returns whether the user namespace at the path is `own` (an inode number) or a descendant of it.
fn is_beneath(namespace: &Path, own: u64) -> bool {
    let Ok(mut file) = File::open(namespace) else {
        return false;
    };
    for _ in 0..MAX_NAMESPACE_DEPTH {
        if file.metadata().is_ok_and(|data| data.ino() == own) {
            return true;
        }
        // SAFETY: the call has no pointer arguments, and returns a new descriptor that this process
        // owns.
        let fd = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_PARENT) };
        // The initial namespace has no parent, or the parent is not visible from here.
        if fd < 0 {
            return false;
        }
        // SAFETY: the descriptor is new and has no other owner.
        file = unsafe { File::from_raw_fd(fd) };
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_in_its_own_user_namespace() {
        let own = fs::metadata("/proc/self/ns/user").unwrap().ino();
        assert!(is_beneath(Path::new("/proc/self/ns/user"), own));
        assert!(!is_beneath(Path::new("/proc/self/ns/user"), own + 1));
        assert!(!is_beneath(Path::new("/proc/self/ns/nothing"), own));
        let (own_pid, parent) = (std::process::id(), std::os::unix::process::parent_id());
        assert!(is_running_and_not_child(own_pid, 0));
        assert!(!is_running_and_not_child(own_pid, parent) && !is_running_and_not_child(0, 1));
    }
}
