//! Confinement of a tenant's process and of compilers: empty namespaces, no files, no network, a
//! separate user, no privileges. The caller enforces a seccomp filter afterwards ([`crate::serve`],
//! [`crate::compile`]).

use jiffy_confinement::{self as confinement, CapabilitySet};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::Resource;
use nix::unistd::Uid;
use std::io;

/// Limits of a process that the kernel enforces.
#[derive(Debug, Clone, Copy)]
pub struct ProcessLimits {
    /// Maximum number of open descriptors.
    pub descriptors: u64,
    /// Maximum processor time in seconds. `None` for a server.
    pub cpu_s: Option<u64>,
    /// True if the process is killed when the thread that started it exits. False for a server,
    /// which outlives a restart of the daemon and exits by itself if no daemon connects
    /// ([`crate::serve`]).
    pub ends_with_starter: bool,
    /// Maximum address space in bytes. `None` for a server, whose pool of slots (memory for
    /// instances) reserves terabytes of address space.
    pub address_space: Option<u64>,
    /// Maximum length in bytes of written files, including files in memory.
    pub file_bytes: u64,
}

/// Confines this process, which must have one thread only. Without root, only the restrictions that
/// an unprivileged process can apply to itself take effect.
pub fn confine(limits: &ProcessLimits) -> io::Result<()> {
    // If memory is short, the kernel should kill this process rather than the daemon.
    confinement::prefer_for_oom_kill();
    if Uid::effective().is_root() {
        confinement::leave_host(jiffy_rootless::is_host_root())?;
    } else {
        // The host may forbid namespaces. Seccomp still denies paths and new sockets.
        let _ = unshare(
            CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWIPC,
        );
        confinement::set_capabilities(CapabilitySet::empty())?;
    }
    let all = [
        (Resource::RLIMIT_NOFILE, Some(limits.descriptors)),
        (Resource::RLIMIT_CPU, limits.cpu_s),
        (Resource::RLIMIT_AS, limits.address_space),
        // A core dump would contain the data of requests.
        (Resource::RLIMIT_CORE, Some(0)),
        (Resource::RLIMIT_FSIZE, Some(limits.file_bytes)),
    ];
    for (resource, limit) in all {
        limit.map_or(Ok(()), |limit| confinement::set_limit(resource, limit))?;
    }
    // Other processes of the same user could otherwise read the memory of this process.
    confinement::forbid_inspection()?;
    if limits.ends_with_starter {
        // Set this last, because a change of the user clears the setting.
        confinement::end_with_parent()?;
    }
    Ok(())
}
