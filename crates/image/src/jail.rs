//! Confinement of the processes that read untrusted files on the host: `mkfs.erofs` and the
//! unpacker of layers.
//!
//! Root starts each process. The process then runs as a separate unprivileged user with few
//! capabilities, in its own mount, network, IPC and UTS namespaces, and sees only its own files.

pub(crate) mod system_calls;

use jiffy_confinement::{
    CapabilitySet, become_own_user, end_with_parent, forbid_new_privileges, set_limits,
};
use nix::sys::resource::Resource;
use std::io;

/// Maximum number of tasks of the process's user. The user has no other processes.
const MAX_TASKS: u64 = 64;
/// Maximum number of open files.
const MAX_FILES: u64 = 1024;

/// Returns whether processes are confined. Processes of the host's root are confined unless
/// `JIFFY_JAIL` is `off`.
pub(crate) fn is_on() -> bool {
    jiffy_rootless::is_host_root() && std::env::var_os("JIFFY_JAIL").is_none_or(|w| w != "off")
}

/// Switches to a separate unprivileged user with the given capabilities, which survive an exec, and
/// prevents that the process gains others. The process is killed when its parent exits. Makes
/// system calls only and does not allocate, since it runs between fork and exec.
pub(crate) fn drop_privileges(capabilities: CapabilitySet) -> io::Result<()> {
    // No core dumps: they could contain files of the template's owner.
    set_limits(&[
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_NPROC, MAX_TASKS),
        (Resource::RLIMIT_NOFILE, MAX_FILES),
    ])?;
    become_own_user(capabilities)?;
    // The parent-death signal is set last, since a change of user clears it.
    end_with_parent()?;
    forbid_new_privileges()
}

#[cfg(test)]
mod tests;
