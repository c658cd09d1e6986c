//! The network namespaces of the guest: a container in it has its own connections.

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
/// Most attempts to open the namespace of a process that may have just ended.
const MAX_OPEN_ATTEMPTS: u32 = 16;

/// Runs `work` in every network namespace that a process is in or that is mounted, the agent's own
/// first. Stops at the first call that returns `true`, and returns true then.
pub fn for_each_namespace(work: impl Fn() -> io::Result<bool> + Sync) -> io::Result<bool> {
    if work()? {
        return Ok(true);
    }
    if is_only_one() {
        return Ok(false);
    }
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

/// True if the agent's own is the only one. Finding them takes milliseconds. The kernel of a
/// snapshot of an earlier version does not tell.
fn is_only_one() -> bool {
    std::fs::read(COUNT).is_ok_and(|count| count.trim_ascii() == b"1")
}

/// Opens a namespace; none if its process has ended, or something else is mounted over it.
fn open(path: &Path) -> io::Result<Option<File>> {
    let mut attempt = 1;
    loop {
        match File::open(path) {
            Ok(namespace) => return Ok(Some(namespace)),
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {
                return Ok(None);
            }
            // The kernel's error (`proc_ns_get_link`) for a process that ended between the look-up
            // of its directory and this. Its number may be another one's by now, which the next
            // attempt opens.
            Err(e) if e.raw_os_error() == Some(libc::EACCES) && attempt < MAX_OPEN_ATTEMPTS => {
                attempt += 1
            }
            Err(e) => return Err(e),
        }
    }
}

/// Runs `work` in a namespace, on a thread of its own: the thread stays in that namespace.
fn in_namespace(
    namespace: &File,
    work: &(impl Fn() -> io::Result<bool> + Sync),
) -> io::Result<bool> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, || {
            // SAFETY: no pointers.
            sys::check(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) })?;
            work()
        })?;
        thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("a thread in another namespace failed")))
    })
}

/// Mount points of network namespaces, as of `ip netns` (proc(5), `/proc/PID/mountinfo`).
fn mounted(mounts: &[u8]) -> Vec<PathBuf> {
    let lines = mounts.split(|b| *b == b'\n');
    lines.filter_map(namespace).map(unescaped).collect()
}

/// The mount point in a line, if a network namespace is mounted there.
fn namespace(line: &[u8]) -> Option<&[u8]> {
    let mut fields = line.split(|b| *b == b' ').skip(3);
    let root = fields.next()?;
    root.starts_with(b"net:[").then(|| fields.next())?
}

/// Blanks and the like are three octal digits behind a backslash.
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

    /// Processes whose end is raced against; the kernel refuses about one open in ten.
    const CHILDREN: u32 = 400;

    #[test]
    fn a_process_that_ends_while_its_namespace_is_opened_is_no_failure() {
        for _ in 0..CHILDREN {
            // SAFETY: the child does nothing but end.
            let pid = sys::check(unsafe { libc::fork() }).unwrap();
            if pid == 0 {
                // SAFETY: ends the child without running anything of the parent's.
                unsafe { libc::_exit(0) };
            }
            let reaper = std::thread::spawn(move || {
                // SAFETY: waits for our own child, and wants no status.
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
