//! File systems of the guest.
//!
//! The root is an overlay. The lower layers are the read-only images of the template, and the upper
//! layer contains the changes of this sandbox.

pub mod container_storage;
pub mod gvisor;
pub mod microvm;

use super::mount::{NO_PROGRAMS_OR_DEVICES, directory, mount, raw};
use crate::sys;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::unix::fs::symlink;
use std::sync::OnceLock;

/// Upper directory of the root: the changes of this sandbox in the format of overlayfs. The new
/// root hides the directory, which is then reachable only through this descriptor. No program
/// inherits the descriptor.
static UPPER_DIRECTORY: OnceLock<File> = OnceLock::new();

/// Returns the overlay's upper directory, or `None` if the agent is not process 1.
pub fn upper_directory() -> Option<&'static File> {
    UPPER_DIRECTORY.get()
}

/// Root directories of the template's images, uppermost first. The new root also hides these
/// directories, which are reachable only through these descriptors.
static LOWER_DIRECTORIES: OnceLock<Vec<File>> = OnceLock::new();

/// Returns the overlay's lower directories, uppermost first, or `None` if the agent is not process
/// 1.
pub fn lower_directories() -> Option<&'static [File]> {
    LOWER_DIRECTORIES.get().map(Vec::as_slice)
}

/// Returns the number of images of the template from the environment variable `variable`, or `None`
/// if it is not set. An incorrect number would give another template, hence the error.
fn image_count(variable: &str, max: usize) -> Result<Option<usize>, String> {
    let Some(value) = std::env::var_os(variable) else {
        return Ok(None);
    };
    let count = value.to_str().and_then(|n| n.parse().ok());
    let valid = count.filter(|n| (1..=max).contains(n));
    valid
        .map(Some)
        .ok_or_else(|| format!("{variable} is {value:?}: not 1 to {max}"))
}

/// Creates the upper and the work directory of an overlay in the file system that is mounted on
/// `at`. Stores a descriptor of the upper directory for [`upper_directory`].
fn writable(at: &str) -> Result<(), String> {
    let data = format!("{at}/data");
    directory(&data, 0o755);
    directory(&format!("{at}/work"), 0o755);
    let upper = File::open(&data).map_err(|e| format!("cannot open {data}: {e}"))?;
    // Ignore the error: there is only one root, and it is created once.
    let _ = UPPER_DIRECTORY.set(upper);
    Ok(())
}

/// Mounts an overlay on `at`. `lower` contains the lower directories, uppermost first, separated by
/// colons. `upper` is the mount point that was passed to [`writable`]. `further` contains more
/// options, each after a comma.
fn mount_overlay(lower: &str, upper: &str, at: &CStr, further: &str) -> Result<(), String> {
    let open = |at: &str| File::open(at).map_err(|e| format!("cannot open {at}: {e}"));
    let images = lower.split(':').map(open).collect::<Result<_, _>>()?;
    // Ignore the error: there is only one root, and it is created once.
    let _ = LOWER_DIRECTORIES.set(images);
    let options = format!("lowerdir={lower},upperdir={upper}/data,workdir={upper}/work{further}");
    mount(
        c"overlay",
        at,
        c"overlay",
        libc::MS_NOATIME,
        &text(options)?,
    )
}

/// Converts a text for the kernel. Fails on a zero byte.
fn text(text: String) -> Result<CString, String> {
    CString::new(text).map_err(|e| e.to_string())
}

/// Mounts the standard file systems under `/proc`, `/sys`, `/dev` and `/run`, and prepares `/tmp`.
fn system() -> Result<(), String> {
    for path in [
        "/proc",
        "/sys",
        "/run",
        "/dev/pts",
        "/dev/shm",
        "/dev/mqueue",
    ] {
        directory(path, 0o755);
    }
    mount(c"proc", c"/proc", c"proc", NO_PROGRAMS_OR_DEVICES, c"")?;
    mount(c"sysfs", c"/sys", c"sysfs", NO_PROGRAMS_OR_DEVICES, c"")?;
    mount(
        c"devpts",
        c"/dev/pts",
        c"devpts",
        libc::MS_NOSUID | libc::MS_NOEXEC,
        c"mode=620,ptmxmode=666,gid=5",
    )?;
    let no_devices = libc::MS_NOSUID | libc::MS_NODEV;
    // The sizes are numbers: for a percentage, gVisor would use the memory of the host.
    let memory_kib =
        sys::memory_kib().map_err(|e| format!("cannot read the size of the memory: {e}"))?;
    let shared = text(format!("mode=1777,size={}k", memory_kib / 2))?;
    mount(c"tmpfs", c"/dev/shm", c"tmpfs", no_devices, &shared)?;
    let running = text(format!("mode=755,size={}k", memory_kib / 4))?;
    mount(c"tmpfs", c"/run", c"tmpfs", no_devices, &running)?;
    directory("/run/lock", 0o1777);
    super::generation::make_home()?;
    // Ignore the error: kernels without these file systems are supported.
    let _ = raw(
        c"mqueue",
        c"/dev/mqueue",
        c"mqueue",
        NO_PROGRAMS_OR_DEVICES,
        c"",
    );
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        // Ignore the error: the link may exist already.
        let _ = symlink(target, link);
    }
    // Programs that unmount file systems read this file. Images of registries do not contain it,
    // since container runtimes create it.
    let _ = symlink("../proc/self/mounts", "/etc/mtab");
    temporary();
    Ok(())
}

/// Prepares `/tmp`. The directory is on the disk, so that unpacking a large archive there does not
/// compete with programs for memory.
fn temporary() {
    directory("/tmp", 0o1777);
    // The umask may have reduced the mode, or the template may have a different mode.
    if let Ok(path) = sys::cstring(b"/tmp")
        && let Ok(found) = std::fs::metadata("/tmp")
        && std::os::unix::fs::MetadataExt::mode(&found) & 0o7777 != 0o1777
    {
        // SAFETY: the path is zero-terminated.
        unsafe { libc::chmod(path.as_ptr(), 0o1777) };
    }
}
