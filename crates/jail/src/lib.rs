//! Steps that confine a process of ours, for use before it reads anything hostile.

mod allowed_calls;
mod root;
mod user;

pub use allowed_calls::{AllowedCalls, ArgumentCondition, equals, equals_unsigned};
pub use root::{MountTable, VisiblePath, enter_root};
pub use user::OwnUser;

use caps::CapSet;
use jiffy_proto::vm::jail::FIRST_UID;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::unistd::{Gid, Uid, chdir, pivot_root, setgroups, setresgid, setresuid};
use std::io;
use std::path::Path;

/// Existing directory on which the empty root is mounted.
const PIVOT_MOUNT_POINT: &str = "/proc";

/// Makes an empty directory the root of this process, which must have a mount namespace of its own.
pub fn leave_files() -> nix::Result<()> {
    const NONE: Option<&str> = None;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(NONE, "/", NONE, private, NONE)?;
    let sealed = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    // One inode, that of the directory.
    let options = Some("mode=555,size=4k,nr_inodes=1");
    let tmpfs = Some("tmpfs");
    mount(tmpfs, PIVOT_MOUNT_POINT, tmpfs, sealed, options)?;
    chdir(PIVOT_MOUNT_POINT)?;
    // Stacks the old root on the new one, and unmounts it.
    pivot_root(Path::new("."), Path::new("."))?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")?;
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY | sealed;
    mount(NONE, "/", NONE, read_only, NONE)
}

/// Takes a user id of its own and gives all capabilities up. With `is_host` false this process is
/// root of an ordinary user's namespace, which has no other user ids: only capabilities go.
pub fn drop_privileges(is_host: bool) -> io::Result<()> {
    drop_bounding_capabilities();
    if is_host {
        // User id from the process id, as for VMMs: no two processes share one.
        let id = FIRST_UID + std::process::id();
        setgroups(&[])?;
        let group = Gid::from_raw(id);
        setresgid(group, group, group)?;
        let user = Uid::from_raw(id);
        setresuid(user, user, user)?;
    }
    clear_capabilities()
}

/// Gives up all capabilities that later programs of this process could have, as far as its own
/// allow that.
pub fn drop_bounding_capabilities() {
    for capability in caps::all() {
        // Unknown to this kernel.
        let _ = caps::drop(None, CapSet::Bounding, capability);
    }
}

/// Gives all capabilities up, and fails if one is left.
pub fn clear_capabilities() -> io::Result<()> {
    for set in [
        CapSet::Ambient,
        CapSet::Inheritable,
        CapSet::Effective,
        CapSet::Permitted,
    ] {
        caps::clear(None, set).map_err(io::Error::other)?;
    }
    let left = caps::read(None, CapSet::Permitted).map_err(io::Error::other)?;
    match left.is_empty() {
        true => Ok(()),
        false => Err(io::Error::other("capabilities are still there")),
    }
}
