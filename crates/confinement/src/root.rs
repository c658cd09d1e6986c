//! Namespaces of a confined process, and an empty root directory for it.

use crate::become_own_user;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, pivot_root};
use rustix::thread::CapabilitySet;
use std::ffi::CStr;
use std::io;

/// Existing directory on which a new root is mounted.
pub(crate) const PIVOT_MOUNT_POINT: &CStr = c"/proc";
/// Mount flags that forbid execution, devices and set-user-ID files.
pub(crate) const RESTRICTED: MsFlags = MsFlags::MS_NOSUID
    .union(MsFlags::MS_NODEV)
    .union(MsFlags::MS_NOEXEC);

const NONE: Option<&CStr> = None;

/// Makes the mounts of this process private. The process must have its own mount namespace.
pub fn private_mounts() -> nix::Result<()> {
    // While the mounts are shared with the host, later mounts of this process appear there too.
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(NONE, c"/", NONE, private, NONE)
}

/// Moves this process into new mount, network, IPC and UTS namespaces with private mounts. Makes
/// system calls only.
pub fn detach() -> io::Result<()> {
    unshare(
        CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWUTS,
    )?;
    Ok(private_mounts()?)
}

/// Mounts an empty file system, the future root, with these options.
pub(crate) fn mount_new_root(options: &CStr) -> nix::Result<()> {
    let tmpfs = Some(c"tmpfs");
    mount(tmpfs, PIVOT_MOUNT_POINT, tmpfs, RESTRICTED, Some(options))
}

/// Makes the working directory, which must be a mount point, the root. Detaches the former root.
pub(crate) fn pivot() -> nix::Result<()> {
    // Both arguments are the same directory: the kernel then stacks the old root on top of the new
    // one. This needs no directory for the old root (pivot_root(2)).
    pivot_root(c".", c".")?;
    umount2(c".", MntFlags::MNT_DETACH)?;
    chdir(c"/")
}

/// Makes the root read-only.
pub(crate) fn make_root_read_only() -> nix::Result<()> {
    // MS_BIND changes the flags of this mount only, not of the file system.
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY | RESTRICTED;
    mount(NONE, c"/", NONE, read_only, NONE)
}

/// Makes an empty, read-only directory the root of this process, which must have its own mount
/// namespace.
pub fn enter_empty_root() -> nix::Result<()> {
    private_mounts()?;
    // The only inode is the root directory.
    mount_new_root(c"mode=555,size=4k,nr_inodes=1")?;
    chdir(PIVOT_MOUNT_POINT)?;
    pivot()?;
    make_root_read_only()
}

/// Leaves the network, files, IPC and capabilities of the host. The caller must be root and
/// single-threaded. If `is_host` is `false`, the caller is root in the user namespace of an
/// unprivileged user, which maps no other ids: the process keeps its user.
pub fn leave_host(is_host: bool) -> io::Result<()> {
    unshare(
        CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWCGROUP,
    )?;
    // The user is changed last, since mounts require privileges.
    enter_empty_root()?;
    if is_host {
        become_own_user(CapabilitySet::empty())
    } else {
        crate::drop_capabilities()
    }
}
