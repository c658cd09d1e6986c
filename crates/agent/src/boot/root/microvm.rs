//! Root of a microVM.
//!
//! `/dev/vda` contains the template (EROFS, read-only), and `/dev/vdb` the changes of this sandbox
//! (ext4). If there is no `/dev/vdb`, the changes are in a tmpfs. The root is an overlay of both,
//! and is mounted over the initial archive. A template may consist of several images: `/dev/vdc`
//! and the following disks contain the other images, lowest first. The disk after the last image
//! contains the modules of the kernel as a directory tree below all images. Therefore
//! `/lib/modules` contains these modules and the modules of an image.

use super::{container_storage, image_count, mount_overlay, system, text, writable};
use crate::boot::mount::{NO_PROGRAMS_OR_DEVICES, directory, mount, raw};
use crate::boot::{ipv4, sysctl};
use crate::modprobe;
use jiffy_proto::agent::{IMAGES, MODULES};
use std::ffi::{CStr, OsStr};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Timeout for the appearance of a disk.
const DISK_WAIT: Duration = Duration::from_secs(2);

/// Letters of the disks with images, lowest first. The second disk, `b`, is the writable disk. The
/// disk after the last image contains the modules.
const IMAGE_DISKS: &[u8] = b"acdefgh";

/// Options of the overlay:
/// - `metacopy=off`, `index=off`: every changed file is complete and has its own name in the upper
///   directory, because layers are created from this directory.
/// - `redirect_dir=on`: a renamed directory of a template has an attribute with its path in the
///   template. Layers contain the whole directory (`jiffy_archive::pack`).
/// - `xino=on`: inode numbers in directory entries equal the numbers of `stat`.
const OVERLAY_OPTIONS: &str = ",metacopy=off,redirect_dir=on,index=off,xino=on";

/// Devices that every user may open, as with udev on other systems. Their effects are limited to
/// the privileges or the namespaces of the user.
const OPEN_DEVICES: [&CStr; 2] = [c"/dev/fuse", c"/dev/net/tun"];

/// Mounts the root and changes into it.
pub fn enter() -> Result<(), String> {
    for path in ["/dev", "/lower", "/upper", "/root-new"] {
        directory(path, 0o755);
    }
    mount_devices()?;
    open_devices();
    open_console();
    mount_image(c"/dev/vda", c"/lower")?;
    let count = image_count(IMAGES, IMAGE_DISKS.len())?.unwrap_or(1);
    let lower = mount_others(count)?;
    let modules = mount_modules(count)?;
    mount_writable()?;
    let storage = container_storage::make("/upper")?;
    mount_overlay(
        &format!("{lower}/lower{modules}"),
        "/upper",
        c"/root-new",
        OVERLAY_OPTIONS,
    )?;
    switch()?;
    system()?;
    sysctl::apply();
    container_storage::mount(storage)?;
    mount_tracing();
    mount(
        c"cgroup2",
        c"/sys/fs/cgroup",
        c"cgroup2",
        NO_PROGRAMS_OR_DEVICES,
        c"nsdelegate",
    )?;
    ipv4::bring_up();
    Ok(())
}

/// Mounts `/dev`.
fn mount_devices() -> Result<(), String> {
    match raw(
        c"devtmpfs",
        c"/dev",
        c"devtmpfs",
        libc::MS_NOSUID,
        c"mode=0755",
    ) {
        // The kernel may have mounted it already.
        Err(e) if e.raw_os_error() != Some(libc::EBUSY) => {
            Err(format!("cannot mount devtmpfs on /dev: {e}"))
        }
        _ => Ok(()),
    }
}

/// Lets every user open [`OPEN_DEVICES`]. A kernel without one of them is supported.
fn open_devices() {
    for device in OPEN_DEVICES {
        // SAFETY: the path is zero-terminated.
        unsafe { libc::chmod(device.as_ptr(), 0o666) };
    }
}

/// Opens the console. The kernel could not open it if the archive has no node for it.
fn open_console() {
    // SAFETY: the path is zero-terminated, and the descriptors 0 to 2 are not in use yet.
    unsafe {
        let console = libc::open(c"/dev/console".as_ptr(), libc::O_RDWR | libc::O_NOCTTY);
        let source = if console >= 0 {
            console
        } else {
            libc::open(c"/dev/null".as_ptr(), libc::O_RDWR)
        };
        if source < 0 {
            return;
        }
        for fd in 0..=2 {
            if fd != source {
                libc::dup2(source, fd);
            }
        }
        if source > 2 {
            libc::close(source);
        }
    }
}

/// Mounts the images above the lowest. Returns their mount points in the format of overlayfs:
/// uppermost first, each followed by a colon.
fn mount_others(count: usize) -> Result<String, String> {
    let mut lower = String::new();
    for letter in IMAGE_DISKS
        .iter()
        .take(count)
        .skip(1)
        .map(|l| char::from(*l))
    {
        let at = format!("/lower-{letter}");
        directory(&at, 0o755);
        mount_image(&text(format!("/dev/vd{letter}"))?, &text(at.clone())?)?;
        lower = format!("{at}:{lower}");
    }
    Ok(lower)
}

/// Mounts the image with the modules if there is one. Returns its mount point after a colon, or an
/// empty string.
fn mount_modules(images: usize) -> Result<&'static str, String> {
    if std::env::var_os(MODULES).is_none() {
        return Ok("");
    }
    let letter = IMAGE_DISKS
        .get(images)
        .copied()
        .map(char::from)
        .ok_or("no disk is left for the kernel's modules")?;
    directory("/lower-modules", 0o755);
    mount_image(&text(format!("/dev/vd{letter}"))?, c"/lower-modules")?;
    Ok(":/lower-modules")
}

/// Mounts file systems for programs that trace the kernel, for root only. Kernels without them are
/// supported.
fn mount_tracing() {
    let _ = raw(
        c"debugfs",
        c"/sys/kernel/debug",
        c"debugfs",
        NO_PROGRAMS_OR_DEVICES,
        c"mode=0700",
    );
    let _ = raw(
        c"tracefs",
        c"/sys/kernel/tracing",
        c"tracefs",
        NO_PROGRAMS_OR_DEVICES,
        c"mode=0700",
    );
    // The image with the modules also contains the types of the kernel (BTF).
    let types = modprobe::directory().join("btf");
    if let Ok(types) = crate::sys::cpath(&types) {
        let _ = raw(&types, c"/sys/kernel/btf", c"", libc::MS_BIND, c"");
    }
}

/// Waits for the disk of an image, and mounts it read-only.
fn mount_image(disk: &CStr, at: &CStr) -> Result<(), String> {
    let flags = libc::MS_RDONLY | libc::MS_NOATIME;
    let began = Instant::now();
    let name = Path::new(OsStr::from_bytes(disk.to_bytes()));
    while !name.exists() && began.elapsed() < DISK_WAIT {
        std::thread::sleep(Duration::from_millis(5));
    }
    match raw(disk, at, c"erofs", flags, c"") {
        Ok(()) => Ok(()),
        // The image is not EROFS: images of other engines are ext4.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => mount(disk, at, c"ext4", flags, c""),
        Err(e) => Err(format!(
            "cannot mount {} (erofs) on {}: {e}",
            name.display(),
            at.to_string_lossy()
        )),
    }
}

/// Mounts the writable file system, the upper layer of the root: the second disk, or memory.
fn mount_writable() -> Result<(), String> {
    if Path::new("/dev/vdb").exists() {
        // A write error of the host must be visible to programs: there is no journal that would
        // stop the file system.
        let options = c"errors=remount-ro";
        mount(c"/dev/vdb", c"/upper", c"ext4", libc::MS_NOATIME, options)?;
    } else {
        // The template has no writable disk: changes use the memory of the guest.
        mount(
            c"tmpfs",
            c"/upper",
            c"tmpfs",
            libc::MS_NOATIME,
            c"mode=0755",
        )?;
    }
    writable("/upper")
}

/// Makes `/root-new` the root. The initial archive cannot be unmounted, so the new root is mounted
/// over it.
fn switch() -> Result<(), String> {
    let failed = |what: &str| format!("cannot {what}: {}", io::Error::last_os_error());
    directory("/root-new/dev", 0o755);
    // SAFETY: all arguments are zero-terminated strings, or null where the call allows it.
    unsafe {
        let moved = |from: &std::ffi::CStr, to: &std::ffi::CStr| {
            libc::mount(
                from.as_ptr(),
                to.as_ptr(),
                std::ptr::null(),
                libc::MS_MOVE,
                std::ptr::null(),
            ) == 0
        };
        if !moved(c"/dev", c"/root-new/dev") {
            return Err(failed("mount /dev in the new root"));
        }
        // Removes this program, the only regular file of the archive. The kernel releases its
        // memory when no process uses the file.
        libc::unlink(c"/init".as_ptr());
        if libc::chdir(c"/root-new".as_ptr()) != 0
            || !moved(c".", c"/")
            || libc::chroot(c".".as_ptr()) != 0
            || libc::chdir(c"/".as_ptr()) != 0
        {
            return Err(failed("mount the new root"));
        }
    }
    Ok(())
}
