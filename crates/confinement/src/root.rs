//! Namespaces, and a root without files.

use crate::become_own_user;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, pivot_root};
use rustix::thread::CapabilitySet;
use std::ffi::CStr;
use std::io;

/// Existing directory on which a new root is mounted.
pub(crate) const PIVOT_MOUNT_POINT: &CStr = c"/proc";
/// Flags of mounts without programs, devices and set-user-ID files.
pub(crate) const SEALED: MsFlags = MsFlags::MS_NOSUID
    .union(MsFlags::MS_NODEV)
    .union(MsFlags::MS_NOEXEC);

const NONE: Option<&CStr> = None;

/// Makes the mounts of this process, which has a mount namespace of its own, private.
pub fn private_mounts() -> nix::Result<()> {
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(NONE, c"/", NONE, private, NONE)
}

/// Moves this process into mount, network, IPC and UTS namespaces of its own, with private mounts.
/// Makes system calls only.
pub fn detach() -> io::Result<()> {
    unshare(
        CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWUTS,
    )?;
    Ok(private_mounts()?)
}

/// Mounts an empty file system with these options, which is to become the root.
pub(crate) fn mount_new_root(options: &CStr) -> nix::Result<()> {
    let tmpfs = Some(c"tmpfs");
    mount(tmpfs, PIVOT_MOUNT_POINT, tmpfs, SEALED, Some(options))
}

/// Makes the working directory, which is a mount point, the root, and detaches the former root.
pub(crate) fn pivot() -> nix::Result<()> {
    // The old root is stacked on the new one.
    pivot_root(c".", c".")?;
    umount2(c".", MntFlags::MNT_DETACH)?;
    chdir(c"/")
}

/// Makes the root read-only.
pub(crate) fn seal_root() -> nix::Result<()> {
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY | SEALED;
    mount(NONE, c"/", NONE, read_only, NONE)
}

/// Makes an empty, read-only directory the root of this process, which has a mount namespace of its
/// own.
pub fn enter_empty_root() -> nix::Result<()> {
    private_mounts()?;
    // One inode: the directory itself.
    mount_new_root(c"mode=555,size=4k,nr_inodes=1")?;
    chdir(PIVOT_MOUNT_POINT)?;
    pivot()?;
    seal_root()
}

/// Leaves network, files, IPC and capabilities of the host. The caller is root and has one thread.
/// If `is_host` is false, the caller is root of an ordinary user's namespace, which has no other
/// user ids: the process keeps its user.
pub fn leave_host(is_host: bool) -> io::Result<()> {
    unshare(
        CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWCGROUP,
    )?;
    enter_empty_root()?;
    match is_host {
        true => become_own_user(CapabilitySet::empty()),
        false => crate::drop_capabilities(),
    }
}
