//! Visits all network namespaces of the guest, to reset connections in each: a container in the
//! guest has connections in its own namespace.

use crate::sys;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// File of the guest kernel with the number of network namespaces.
const COUNT: &str = "/proc/sys/kernel/net_namespaces";
/// Maximum number of attempts to open the namespace of a process that may have just exited.
const MAX_OPEN_ATTEMPTS: u32 = 16;

/// Calls `work` in every network namespace that a process is in or that is mounted, starting with
/// the agent's namespace. Stops when a call returns true, and then returns true.
pub fn for_each_namespace(work: impl Fn() -> io::Result<bool> + Sync) -> io::Result<bool> {
    if work()? {
        return Ok(true);
    }
    if is_only_one() {
        return Ok(false);
    }
    // The inode number identifies a namespace: several processes share one.
    let mut seen = BTreeSet::from([std::fs::metadata("/proc/self/ns/net")?.ino()]);
    let mut visit = |path: PathBuf| match open(&path)? {
        Some(namespace) if seen.insert(namespace.metadata()?.ino()) => {
            in_namespace(&namespace, &work)
        }
        _ => Ok(false),
    };
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        let process = entry.file_name();
        let is_process = process.as_encoded_bytes().iter().all(u8::is_ascii_digit);
        if is_process && visit(entry.path().join("ns/net"))? {
            return Ok(true);
        }
    }
    for path in mounted(&std::fs::read("/proc/self/mountinfo")?) {
        if visit(path)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns true if the agent's namespace is the only one. This check avoids a search, which takes
/// milliseconds. Kernels of old snapshots do not report the number.
fn is_only_one() -> bool {
    std::fs::read(COUNT).is_ok_and(|count| count.trim_ascii() == b"1")
}

/// Opens a namespace. Returns `None` if its process has exited, or if another file system is
/// mounted over it.
fn open(path: &Path) -> io::Result<Option<File>> {
    let mut attempt = 1;
    loop {
        match File::open(path) {
            Ok(namespace) => return Ok(Some(namespace)),
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {
                return Ok(None);
            }
            // Error of the kernel (`proc_ns_get_link`) for a process that exited after the look-up
            // of its directory. Another process may have its number by now. The next attempt opens
            // the namespace of that process.
            Err(e) if e.raw_os_error() == Some(libc::EACCES) && attempt < MAX_OPEN_ATTEMPTS => {
                attempt += 1
            }
            Err(e) => return Err(e),
        }
    }
}

/// Calls `work` in a namespace on a temporary thread, so that the threads of the agent remain in
/// their namespace.
fn in_namespace(
    namespace: &File,
    work: &(impl Fn() -> io::Result<bool> + Sync),
) -> io::Result<bool> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, || {
            // SAFETY: the call takes no pointers.
            sys::check(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) })?;
            work()
        })?;
        thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("a thread in another namespace failed")))
    })
}

/// Returns the mount points of network namespaces, which `ip netns` creates for example (proc(5),
/// `/proc/PID/mountinfo`).
fn mounted(mounts: &[u8]) -> Vec<PathBuf> {
    let lines = mounts.split(|b| *b == b'\n');
    lines.filter_map(namespace).map(unescaped).collect()
}

/// Returns the mount point in a line if a network namespace is mounted there.
fn namespace(line: &[u8]) -> Option<&[u8]> {
    // The first fields are mount id, parent id, device, root and mount point.
    let mut fields = line.split(|b| *b == b' ').skip(3);
    let root = fields.next()?;
    root.starts_with(b"net:[").then(|| fields.next())?
}

/// Decodes a field in which blanks and similar characters are encoded as a backslash and three
/// octal digits.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        let code = (first == b'\\').then(|| after.get(..3)).flatten();
        let code = code.and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            None => bytes.push(first),
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounted_namespaces_are_found_by_their_mount_points() {
        let mounts = b"25 1 0:5 / /dev rw - devtmpfs devtmpfs rw\n\
            90 80 0:4 net:[4026532201] /run/netns/a\\040b rw shared:1 - nsfs nsfs rw\n\
            91 80 0:4 mnt:[4026532202] /run/mnt rw - nsfs nsfs rw\n";
        assert_eq!(mounted(mounts), [PathBuf::from("/run/netns/a b")]);
    }

    /// Number of processes that exit during the test. The kernel rejects about one open in ten.
    const CHILDREN: u32 = 400;

    #[test]
    fn a_process_that_exits_while_its_namespace_is_opened_is_not_an_error() {
        for _ in 0..CHILDREN {
            // SAFETY: the child only exits.
            let pid = sys::check(unsafe { libc::fork() }).unwrap();
            if pid == 0 {
                // SAFETY: exits the child without running code of the parent.
                unsafe { libc::_exit(0) };
            }
            let reaper = std::thread::spawn(move || {
                // SAFETY: waits for a child of this process, and requests no status.
                sys::check(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) })
            });
            let directory = PathBuf::from(format!("/proc/{pid}"));
            while open(&directory.join("ns/net")).unwrap().is_some() || directory.exists() {}
            assert_eq!(reaper.join().unwrap().unwrap(), pid);
        }
    }

    #[test]
    fn the_agents_own_namespace_is_always_visited() {
        assert!(for_each_namespace(|| Ok(true)).unwrap());
    }
}
