//! Confinement of a tenant's process and of compilers: empty namespaces, no files, no network, a
//! user of their own, no privileges. Seccomp follows ([`crate::serve`], [`crate::compile`]).

use jiffy_confinement::{self as confinement, CapabilitySet};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::Resource;
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

/// Confines this process, which must have one thread only. Without root, only what an unprivileged
/// process can do to itself.
pub fn confine(limits: &ProcessLimits) -> io::Result<()> {
    confinement::prefer_for_oom_kill();
    if Uid::effective().is_root() {
        confinement::leave_host(jiffy_rootless::is_host_root())?;
    } else {
        // Hosts may forbid it; seccomp still allows neither paths nor new sockets.
        let _ = unshare(
            CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWIPC,
        );
        confinement::set_capabilities(CapabilitySet::empty())?;
    }
    let all = [
        (Resource::RLIMIT_NOFILE, Some(limits.descriptors)),
        (Resource::RLIMIT_CPU, limits.cpu_s),
        (Resource::RLIMIT_AS, limits.address_space),
        (Resource::RLIMIT_CORE, Some(0)),
        (Resource::RLIMIT_FSIZE, Some(limits.file_bytes)),
    ];
    for (resource, limit) in all {
        limit.map_or(Ok(()), |limit| confinement::set_limit(resource, limit))?;
    }
    confinement::forbid_inspection()?;
    if limits.ends_with_starter {
        // Set last, since a change of user clears it.
        confinement::end_with_parent()?;
    }
    Ok(())
}
