//! Root of a gVisor sandbox.
//!
//! Programs cannot mount the images. Therefore gVisor mounts them on `/images/0` (the lowest),
//! `/images/1` and so on before the agent starts. The changes of the sandbox are in a tmpfs.

use super::{container_storage, image_count, mount_overlay, system, text, writable};
use crate::boot::mount::{NO_PROGRAMS_OR_DEVICES, directory, mount, raw};
use jiffy_proto::agent::{GVISOR_DISK_MIB, GVISOR_IMAGES};
use rustix::mount::UnmountFlags;
use std::ffi::CStr;
use std::io;

/// Maximum number of images of a template, equal to `jiffy_image::MAX_IMAGES`.
const MAX_IMAGES: usize = 6;
/// Directory in the agent's image that is the lowest layer of every root. It contains the mount
/// points of the container storage.
const BELOW: &str = "/below";
/// Controllers that gVisor supports. Each has a separate hierarchy (cgroup v1).
const CONTROLLERS: [&CStr; 6] = [
    c"cpu", c"cpuacct", c"cpuset", c"devices", c"memory", c"pids",
];

/// Mounts the root and changes into it.
pub fn enter() -> Result<(), String> {
    let count = image_count(GVISOR_IMAGES, MAX_IMAGES)?
        .ok_or_else(|| format!("{GVISOR_IMAGES} is not set"))?;
    mount(
        c"tmpfs",
        c"/overlay",
        c"tmpfs",
        libc::MS_NOATIME,
        &text(format!("mode=0755,size={}m", disk_mib()?))?,
    )?;
    writable("/overlay")?;
    let storage = container_storage::make("/overlay")?;
    // overlayfs expects the uppermost layer first.
    let images = (0..count).rev().map(|n| format!("/images/{n}"));
    let lower: Vec<_> = images.chain([BELOW.to_owned()]).collect();
    // gVisor's overlay always copies whole files, and accepts no option for this (`metacopy=off` in
    // microVMs).
    mount_overlay(&lower.join(":"), "/overlay", c"/newroot", "")?;
    container_storage::bind(storage, "/overlay", "/newroot")?;
    directory("/newroot/dev", 0o755);
    mount(
        c"devtmpfs",
        c"/newroot/dev",
        c"devtmpfs",
        libc::MS_NOSUID,
        c"mode=0755",
    )?;
    switch().map_err(|e| format!("cannot mount the new root: {e}"))?;
    system()?;
    mount_controllers();
    allow_tracing();
    Ok(())
}

/// Mounts the control groups that container runtimes require. A gVisor without them is supported.
fn mount_controllers() {
    let at = c"/sys/fs/cgroup";
    if raw(c"tmpfs", at, c"tmpfs", NO_PROGRAMS_OR_DEVICES, c"mode=0755").is_err() {
        return;
    }
    for name in CONTROLLERS {
        let path = format!("/sys/fs/cgroup/{}", name.to_string_lossy());
        directory(&path, 0o755);
        if let Ok(path) = text(path) {
            // Ignore the error: the sandbox then lacks this controller only.
            let _ = raw(c"cgroup", &path, c"cgroup", NO_PROGRAMS_OR_DEVICES, name);
        }
    }
}

/// Lets programs trace other processes of their user, as in microVMs. gVisor's default allows only
/// children.
fn allow_tracing() {
    let _ = std::fs::write("/proc/sys/kernel/yama/ptrace_scope", "0");
}

/// Returns the limit of the sandbox's writes in MiB.
fn disk_mib() -> Result<u64, String> {
    let value = std::env::var(GVISOR_DISK_MIB).map_err(|e| format!("{GVISOR_DISK_MIB}: {e}"))?;
    let size = value.parse().ok().filter(|mib| *mib > 0);
    size.ok_or_else(|| format!("{GVISOR_DISK_MIB} is {value:?}, expected a number of MiB"))
}

/// Makes the new root the root. The old root is mounted over it for a moment, and is then
/// unmounted.
fn switch() -> io::Result<()> {
    std::env::set_current_dir("/newroot")?;
    // With equal arguments, no directory for the old root is needed.
    rustix::process::pivot_root(c".", c".")?;
    rustix::mount::unmount(c".", UnmountFlags::DETACH)?;
    std::env::set_current_dir("/")
}
