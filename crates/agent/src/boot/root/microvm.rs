//! The root of a microVM.
//!
//! `/dev/vda` holds the template (EROFS, read-only), `/dev/vdb` this sandbox's writes (ext4; a
//! tmpfs without it); an overlay of both becomes the root and the initial archive disappears under
//! it. A template may be a stack of images: the others are `/dev/vdc` and so on, each on top of
//! those before it. The disk after them holds the modules of the kernel, as a tree that lies below
//! all images: so `/lib/modules` has them beside those of an image.

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

/// Time for a disk to appear.
const DISK_WAIT: Duration = Duration::from_secs(2);

/// Letters of the disks with images, the lowest first: the second disk is the one that is written
/// to. After the last image come the modules.
const IMAGE_DISKS: &[u8] = b"acdefgh";

/// Every changed file is whole in the upper directory, under its own name: layers are made of it. A
/// directory of a template that is renamed has an attribute with its path in the template; layers
/// have all of it (`jiffy_archive::pack`). Inode numbers in directory entries equal those of
/// `stat`.
const OVERLAY_OPTIONS: &str = ",metacopy=off,redirect_dir=on,index=off,xino=on";

/// Devices that every user may open, as with udev elsewhere: their effects are bound to privileges
/// or to namespaces of the user's own.
const OPEN_DEVICES: [&CStr; 2] = [c"/dev/fuse", c"/dev/net/tun"];

/// Builds the root and moves into it.
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

fn mount_devices() -> Result<(), String> {
    match raw(
        c"devtmpfs",
        c"/dev",
        c"devtmpfs",
        libc::MS_NOSUID,
        c"mode=0755",
    ) {
        // The kernel may have done it.
        Err(e) if e.raw_os_error() != Some(libc::EBUSY) => {
            Err(format!("cannot mount devtmpfs on /dev: {e}"))
        }
        _ => Ok(()),
    }
}

/// Lets every user open [`OPEN_DEVICES`]; a kernel that lacks one is fine.
fn open_devices() {
    for device in OPEN_DEVICES {
        // SAFETY: a valid path.
        unsafe { libc::chmod(device.as_ptr(), 0o666) };
    }
}

/// The kernel could not open the console for us if the archive has no node for it.
fn open_console() {
    // SAFETY: a valid path; the descriptors 0 to 2 are not in use yet.
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

/// Mounts the images above the lowest, and returns their names as overlayfs expects them: the
/// uppermost first, each with a colon.
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

/// Mounts the image with the modules, if there is one, and names it as overlayfs wants it.
fn mount_modules(images: usize) -> Result<&'static str, String> {
    if std::env::var_os(MODULES).is_none() {
        return Ok("");
    }
    let letter = IMAGE_DISKS
        .get(images)
        .copied()
        .map(char::from)
        .ok_or("there is no disk for the kernel's modules")?;
    directory("/lower-modules", 0o755);
    mount_image(&text(format!("/dev/vd{letter}"))?, c"/lower-modules")?;
    Ok(":/lower-modules")
}

/// Mounts file systems for programs that trace the kernel, for root only. Kernels without them are
/// fine.
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
    let types = modprobe::directory().join("btf");
    if let Ok(types) = crate::sys::cpath(&types) {
        let _ = raw(&types, c"/sys/kernel/btf", c"", libc::MS_BIND, c"");
    }
}

fn mount_image(disk: &CStr, at: &CStr) -> Result<(), String> {
    let flags = libc::MS_RDONLY | libc::MS_NOATIME;
    let began = Instant::now();
    let name = Path::new(OsStr::from_bytes(disk.to_bytes()));
    while !name.exists() && began.elapsed() < DISK_WAIT {
        std::thread::sleep(Duration::from_millis(5));
    }
    match raw(disk, at, c"erofs", flags, c"") {
        Ok(()) => Ok(()),
        // Not erofs: other engines' images are ext4.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => mount(disk, at, c"ext4", flags, c""),
        Err(e) => Err(format!(
            "cannot mount {} (erofs) on {}: {e}",
            name.display(),
            at.to_string_lossy()
        )),
    }
}

fn mount_writable() -> Result<(), String> {
    if Path::new("/dev/vdb").exists() {
        // A write that the host refuses must not go unnoticed: there is no journal that would stop.
        let options = c"errors=remount-ro";
        mount(c"/dev/vdb", c"/upper", c"ext4", libc::MS_NOATIME, options)?;
    } else {
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

fn switch() -> Result<(), String> {
    let failed = |what: &str| format!("cannot {what}: {}", io::Error::last_os_error());
    directory("/root-new/dev", 0o755);
    // SAFETY: all arguments are valid C strings or null where the call allows it.
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
        // Gives the archive's memory back as far as we do not run from it.
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
