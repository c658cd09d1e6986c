//! Everything that a puller gives up before it reads a byte of a registry.

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

/// Address space, bytes.
const MAX_MEMORY: u64 = 512 << 20;
/// Open descriptors: the socket to the parent, the event loop's, and connections.
const MAX_DESCRIPTORS: u64 = 64;
/// Processor time, seconds.
const MAX_CPU_S: u64 = 3600;
/// A directory that every host has; the empty root is mounted there for a moment.
const STAND_IN: &str = "/proc";

/// Closes what the parent may have left open beyond the standard descriptors.
pub(super) fn close_descriptors() -> io::Result<()> {
    // SAFETY: nothing in this process owns a descriptor above standard error yet.
    match unsafe { libc::close_range(3, u32::MAX, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

pub(super) fn limit_resources() -> io::Result<()> {
    // Whatever the daemon's is: of what runs out of memory this goes first. Not all hosts let it.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    for (resource, limit) in [
        (Resource::RLIMIT_AS, MAX_MEMORY),
        (Resource::RLIMIT_NOFILE, MAX_DESCRIPTORS),
        (Resource::RLIMIT_CPU, MAX_CPU_S),
        // It writes no file, and leaves none.
        (Resource::RLIMIT_FSIZE, 0),
        (Resource::RLIMIT_CORE, 0),
    ] {
        setrlimit(resource, limit, limit)?;
    }
    Ok(())
}

/// Leaves the host's namespaces, files, user and rights. Without root only what any process can give up.
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
    // Cleared when the user changes, so it comes last; a parent that is gone closes the socket, too.
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    // No further task.
    setrlimit(Resource::RLIMIT_NPROC, 0, 0)?;
    Ok(())
}

/// Makes an empty directory the root.
fn leave_files() -> nix::Result<()> {
    const NONE: Option<&str> = None;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(NONE, "/", NONE, private, NONE)?;
    let sealed = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    // One inode: the directory itself.
    let options = Some("mode=555,size=4k,nr_inodes=1");
    mount(Some("tmpfs"), STAND_IN, Some("tmpfs"), sealed, options)?;
    chdir(STAND_IN)?;
    // The old root comes to lie on the new one, and is taken off.
    pivot_root(Path::new("."), Path::new("."))?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")?;
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY | sealed;
    mount(NONE, "/", NONE, read_only, NONE)
}

fn become_nobody(is_host: bool) -> io::Result<()> {
    // By its process id, as a VMM has it: no two processes have the same.
    for capability in caps::all() {
        // One that this kernel does not know cannot be had either.
        let _ = caps::drop(None, CapSet::Bounding, capability);
    }
    // Root of an ordinary user's namespace has no other users to become: it is left without rights.
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
