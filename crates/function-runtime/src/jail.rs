//! Confinement of a tenant's process and of compilers: empty namespaces, no files, no network, a
//! user of their own, no privileges. Seccomp follows ([`crate::serve`], [`crate::compile`]).

use jiffy_jail::{clear_capabilities, drop_privileges, leave_files};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::unistd::Uid;
use std::io;

/// Limits of a process by the kernel.
#[derive(Debug, Clone, Copy)]
pub struct ProcessLimits {
    /// Open descriptors.
    pub descriptors: u64,
    /// Processor time in seconds.
    pub cpu_s: Option<u64>,
    /// True to end with the thread that started it. A server ends with its control socket instead:
    /// the starter's thread may end long before the starter.
    pub ends_with_starter: bool,
    /// Address space in bytes. None where a pool reserves terabytes of it.
    pub address_space: Option<u64>,
    /// Length in bytes of files that it writes, also of those in memory.
    pub file_bytes: u64,
}

/// Closes inherited descriptors from `first` on.
pub fn close_descriptors(first: i32) -> io::Result<()> {
    let first = u32::try_from(first).unwrap_or(3);
    // SAFETY: called at the start of a process, which owns no descriptor from `first` on.
    match unsafe { libc::close_range(first, u32::MAX, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Confines this process, which must have one thread only. Without root, only what an unprivileged
/// process can do to itself.
pub fn confine(limits: &ProcessLimits) -> io::Result<()> {
    // First candidate of the OOM killer. Not every host permits it.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
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
    } else {
        // Hosts may forbid it; seccomp still allows neither paths nor new sockets.
        let _ = unshare(
            CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWIPC,
        );
        clear_capabilities()?;
    }
    limit_resources(limits)?;
    prctl::set_no_new_privs()?;
    // No core dumps, no debugger.
    prctl::set_dumpable(false)?;
    if limits.ends_with_starter {
        // Set last, since a change of user clears it.
        prctl::set_pdeathsig(Signal::SIGKILL)?;
    }
    Ok(())
}

fn limit_resources(limits: &ProcessLimits) -> io::Result<()> {
    let all = [
        (Resource::RLIMIT_NOFILE, Some(limits.descriptors)),
        (Resource::RLIMIT_CPU, limits.cpu_s),
        (Resource::RLIMIT_AS, limits.address_space),
        (Resource::RLIMIT_CORE, Some(0)),
        (Resource::RLIMIT_FSIZE, Some(limits.file_bytes)),
    ];
    for (resource, limit) in all {
        if let Some(limit) = limit {
            setrlimit(resource, limit, limit)?;
        }
    }
    Ok(())
}
