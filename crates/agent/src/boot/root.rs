//! The guest's file systems.
//!
//! The root is an overlay: a template's images, read-only, below a layer for this sandbox's writes.

pub mod container_storage;
pub mod gvisor;
pub mod microvm;

use super::mount::{NO_PROGRAMS_OR_DEVICES, directory, mount, raw};
use crate::sys;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::unix::fs::symlink;
use std::sync::OnceLock;

/// Upper directory of the root: this sandbox's writes in overlayfs' own form. It lies beneath the
/// root afterwards, reachable only by this descriptor, which no program inherits.
static UPPER_DIRECTORY: OnceLock<File> = OnceLock::new();

/// The overlay's upper directory. None if we are not process 1.
pub fn upper_directory() -> Option<&'static File> {
    UPPER_DIRECTORY.get()
}

/// The template's images, the uppermost first. Their directories, too, are reachable only by these
/// descriptors.
static LOWER_DIRECTORIES: OnceLock<Vec<File>> = OnceLock::new();

/// The overlay's lower directories, the uppermost first. None if we are not process 1.
pub fn lower_directories() -> Option<&'static [File]> {
    LOWER_DIRECTORIES.get().map(Vec::as_slice)
}

/// Number of images of the template, from `variable`, if it is set. Fewer than there are would be
/// another template.
fn image_count(variable: &str, most: usize) -> Result<Option<usize>, String> {
    let Some(said) = std::env::var_os(variable) else {
        return Ok(None);
    };
    let count = said.to_str().and_then(|n| n.parse().ok());
    let sane = count.filter(|n| (1..=most).contains(n));
    sane.map(Some)
        .ok_or_else(|| format!("{variable} is {said:?}: not 1 to {most}"))
}

/// Makes the directories that an overlay writes to in the file system on `at`.
fn writable(at: &str) -> Result<(), String> {
    let data = format!("{at}/data");
    directory(&data, 0o755);
    directory(&format!("{at}/work"), 0o755);
    let written = File::open(&data).map_err(|e| format!("cannot open {data}: {e}"))?;
    // There is one root, made once.
    let _ = UPPER_DIRECTORY.set(written);
    Ok(())
}

/// Mounts the overlay of `lower`, the uppermost first, and the [`writable`] file system on `upper`.
fn mount_overlay(lower: &str, upper: &str, at: &CStr, further: &str) -> Result<(), String> {
    let open = |at: &str| File::open(at).map_err(|e| format!("cannot open {at}: {e}"));
    let images = lower.split(':').map(open).collect::<Result<_, _>>()?;
    // There is one root, made once.
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

fn text(text: String) -> Result<CString, String> {
    CString::new(text).map_err(|e| e.to_string())
}

/// Mounts the standard file systems under `/proc`, `/sys`, `/dev`, `/run` and `/tmp`.
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
    // In numbers: gVisor takes a share of its host's memory, which the guest does not have.
    let memory_kib =
        sys::memory_kib().map_err(|e| format!("cannot tell how much memory there is: {e}"))?;
    let shared = text(format!("mode=1777,size={}k", memory_kib / 2))?;
    mount(c"tmpfs", c"/dev/shm", c"tmpfs", no_devices, &shared)?;
    let running = text(format!("mode=755,size={}k", memory_kib / 4))?;
    mount(c"tmpfs", c"/run", c"tmpfs", no_devices, &running)?;
    directory("/run/lock", 0o1777);
    super::generation::make_home()?;
    // Kernels without them are fine.
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
        let _ = symlink(target, link);
    }
    // Programs that unmount look here. Images of registries leave it to whoever runs them.
    let _ = symlink("../proc/self/mounts", "/etc/mtab");
    temporary();
    Ok(())
}

/// `/tmp` stays on the disk: unpacking a large archive there must not compete with programs for
/// memory.
fn temporary() {
    directory("/tmp", 0o1777);
    if let Ok(path) = sys::cstring(b"/tmp")
        && let Ok(found) = std::fs::metadata("/tmp")
        && std::os::unix::fs::MetadataExt::mode(&found) & 0o7777 != 0o1777
    {
        // SAFETY: a valid path.
        unsafe { libc::chmod(path.as_ptr(), 0o1777) };
    }
}
