//! Confinement of a puller before it reads from a registry.

use caps::CapSet;
use jiffy_proto::vm::jail::FIRST_UID;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::unistd::{Gid, Uid, chdir, pivot_root, setgroups, setresgid, setresuid};
use std::io;
use std::path::Path;

/// Limit of the address space in bytes.
const MAX_MEMORY: u64 = 512 << 20;
/// Limit of open descriptors: the parent's socket, the event loop's, and connections.
const MAX_DESCRIPTORS: u64 = 64;
/// Limit of processor time in seconds.
const MAX_CPU_S: u64 = 3600;
/// Existing directory on which the empty root is mounted.
const STAND_IN: &str = "/proc";

/// Closes inherited descriptors except the standard ones.
pub(super) fn close_descriptors() -> io::Result<()> {
    // SAFETY: nothing in this process owns a descriptor above standard error yet.
    match unsafe { libc::close_range(3, u32::MAX, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

pub(super) fn limit_resources() -> io::Result<()> {
    // First candidate of the OOM killer. Not every host permits it.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    for (resource, limit) in [
        (Resource::RLIMIT_AS, MAX_MEMORY),
        (Resource::RLIMIT_NOFILE, MAX_DESCRIPTORS),
        (Resource::RLIMIT_CPU, MAX_CPU_S),
        // No files and no core dumps.
        (Resource::RLIMIT_FSIZE, 0),
        (Resource::RLIMIT_CORE, 0),
    ] {
        setrlimit(resource, limit, limit)?;
    }
    Ok(())
}

/// Leaves the host's namespaces, files, user and privileges. Without root, only what an
/// unprivileged process can.
pub(super) fn leave_everything() -> io::Result<()> {
    if Uid::effective().is_root() {
        unshare(
            CloneFlags::CLONE_NEWNET
                | CloneFlags::CLONE_NEWNS
                | CloneFlags::CLONE_NEWIPC
                | CloneFlags::CLONE_NEWUTS
                | CloneFlags::CLONE_NEWCGROUP,
        )?;
        let is_host = jiffy_rootless::is_host_root();
        leave_files()?;
        become_nobody(is_host)?;
    }
    prctl::set_no_new_privs()?;
    prctl::set_dumpable(false)?;
    // Set last, since a change of user clears it. A parent that has ended closes the socket as
    // well.
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    // No further tasks.
    setrlimit(Resource::RLIMIT_NPROC, 0, 0)?;
    Ok(())
}

/// Makes an empty directory the root.
fn leave_files() -> nix::Result<()> {
    const NONE: Option<&str> = None;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(NONE, "/", NONE, private, NONE)?;
    let sealed = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    // One inode, that of the directory.
    let options = Some("mode=555,size=4k,nr_inodes=1");
    mount(Some("tmpfs"), STAND_IN, Some("tmpfs"), sealed, options)?;
    chdir(STAND_IN)?;
    // Stacks the old root on the new one, and unmounts it.
    pivot_root(Path::new("."), Path::new("."))?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")?;
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY | sealed;
    mount(NONE, "/", NONE, read_only, NONE)
}

fn become_nobody(is_host: bool) -> io::Result<()> {
    // User id from the process id, as for VMMs: no two processes share one.
    for capability in caps::all() {
        // Unknown to this kernel.
        let _ = caps::drop(None, CapSet::Bounding, capability);
    }
    // In an ordinary user's namespace, root has no other user ids, and only loses its capabilities.
    if is_host {
        let id = FIRST_UID + std::process::id();
        setgroups(&[])?;
        let group = Gid::from_raw(id);
        setresgid(group, group, group)?;
        let user = Uid::from_raw(id);
        setresuid(user, user, user)?;
    }
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
