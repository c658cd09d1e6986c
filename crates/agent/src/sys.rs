//! Small wrappers around system calls that neither std nor tokio offers. The agent uses `libc`
//! directly, to stay small.

use data_encoding::HEXLOWER;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Converts `-1` to the error in `errno`.
pub fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Converts a path or argument for the kernel. Fails on a zero byte.
pub fn cstring(bytes: &[u8]) -> io::Result<CString> {
    CString::new(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Converts a path as [`cstring`] does.
pub fn cpath(path: &Path) -> io::Result<CString> {
    cstring(path.as_os_str().as_bytes())
}

/// Takes ownership of a descriptor that the kernel has just returned.
pub fn owned(result: libc::c_int) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: the caller passes the result of a call that creates a descriptor, so it has no other
    // owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes reads and writes on this descriptor return `EAGAIN` instead of waiting.
pub fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: F_GETFL and F_SETFL take no pointers.
    unsafe {
        let flags = check(libc::fcntl(fd, libc::F_GETFL))?;
        check(libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK))?;
    }
    Ok(())
}

/// Creates a close-on-exec pipe. Returns the read end and the write end.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has space for the two descriptors.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: the call above created both descriptors, so they have no other owner.
    unsafe { Ok((OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))) }
}

/// Reads the available bytes. Returns 0 at the end.
pub fn read(fd: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the pointer and length describe `buffer`.
    let n = unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Writes as many bytes as possible without waiting.
pub fn write(fd: RawFd, buffer: &[u8]) -> io::Result<usize> {
    // SAFETY: the pointer and length describe `buffer`.
    let n = unsafe { libc::write(fd, buffer.as_ptr().cast(), buffer.len()) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Opens a regular file. Other files are rejected with `EINVAL`, because opening them may wait. An
/// example is a named pipe, which waits for its other end.
pub fn open_regular(path: &Path, options: &mut std::fs::OpenOptions) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::from_raw_os_error(libc::EINVAL))
    }
}

/// Reads at most the first `limit` bytes of a regular file.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = open_regular(path, File::options().read(true))?;
    let mut content = Vec::new();
    file.take(limit).read_to_end(&mut content)?;
    Ok(content)
}

/// Changes the owner of an open file. Without privileges, the file remains owned by the agent's
/// user. A path would be unsafe here: a user may have replaced the file by a symbolic link.
pub fn set_owner(file: impl AsFd, uid: u32, gid: u32) -> io::Result<()> {
    match std::os::unix::fs::fchown(file, Some(uid), Some(gid)) {
        Err(e) if e.raw_os_error() != Some(libc::EPERM) => Err(e),
        _ => Ok(()),
    }
}

/// Returns the memory of the guest in KiB.
pub fn memory_kib() -> io::Result<u64> {
    // SAFETY: sysinfo consists of integers, for which all zeroes are valid.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is writable and lives longer than the call.
    check(unsafe { libc::sysinfo(&raw mut info) })?;
    // The product cannot overflow: it is the size of the memory in bytes.
    Ok(info.totalram * u64::from(info.mem_unit) / 1024)
}

/// Returns the time on `CLOCK_BOOTTIME` in microseconds.
pub fn boot_us() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a writable timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut time) };
    time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_nsec.unsigned_abs() / 1_000
}

/// Returns the release of the kernel, as `uname -r` does.
pub fn kernel_release() -> String {
    // SAFETY: utsname consists of bytes, for which all zeroes are valid.
    let mut name: libc::utsname = unsafe { std::mem::zeroed() };
    // SAFETY: `name` is a writable utsname.
    unsafe { libc::uname(&mut name) };
    let bytes: Vec<u8> = name
        .release
        .iter()
        .take_while(|c| **c != 0)
        .map(|c| c.to_ne_bytes()[0])
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Fills a buffer with random bytes of the kernel.
pub fn random(buffer: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        let rest = &mut buffer[done..];
        // SAFETY: the pointer and length describe `rest`.
        let n = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        done += usize::try_from(n).map_err(|_| io::Error::last_os_error())?;
    }
    Ok(())
}

/// Returns 128 random bits in hexadecimal.
pub fn random_id() -> io::Result<String> {
    let mut bytes = [0; 16];
    random(&mut bytes)?;
    Ok(HEXLOWER.encode(&bytes))
}

/// Raises the limit of open files for the agent and its children: soft to 65,536 and hard to
/// 1,048,576. Without the privilege to raise the hard limit, raises the soft limit at most to the
/// hard limit.
pub fn raise_open_files() {
    let mut limit = libc::rlimit {
        rlim_cur: 65_536,
        rlim_max: 1_048_576,
    };
    // SAFETY: `limit` is a valid rlimit for each call. A failed call leaves the old limit.
    unsafe {
        if libc::setrlimit(libc::RLIMIT_NOFILE, &limit) != 0
            && libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0
        {
            limit.rlim_cur = limit.rlim_max.min(65_536);
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// Registers a descriptor with the event loop. The descriptor must be non-blocking.
pub fn register<T: AsFd + AsRawFd>(inner: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: a type that implements `AsFd` keeps its descriptor open and unchanged while it lives.
    unsafe { AsyncFd::register_with_interest(inner, interest) }.map_err(|e| e.into_parts().1)
}

/// Makes a descriptor non-blocking, and registers it for reading and writing.
pub fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    set_nonblocking(fd.as_raw_fd())?;
    register(fd, Interest::READABLE | Interest::WRITABLE)
}

/// Configures the allocator to retain freed memory for the next request. A page that is returned to
/// the kernel costs a page fault at its next use.
pub fn tune_allocator() {
    // SAFETY: mallopt only sets parameters of the allocator.
    unsafe {
        // One arena suffices, since most allocations happen on the thread of the event loop.
        libc::mallopt(libc::M_ARENA_MAX, 1);
        // The default of both thresholds in glibc is 128 KiB.
        libc::mallopt(libc::M_TRIM_THRESHOLD, 512 * 1024);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 512 * 1024);
    }
}
