//! Confinement of a puller before it reads from a registry.

use jiffy_jail::{drop_privileges, leave_files};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::unistd::Uid;
use std::io;

/// Limit of the address space in bytes.
const MAX_MEMORY: u64 = 512 << 20;
/// Limit of open descriptors: the parent's socket, the event loop's, and connections.
const MAX_DESCRIPTORS: u64 = 64;
/// Limit of processor time in seconds.
const MAX_CPU_S: u64 = 3600;

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
        drop_privileges(is_host)?;
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
