//! Confinement of the processes that read untrusted files on the host: `mkfs.erofs` and the
//! unpacker of layers.
//!
//! Started by root, each runs as a user of its own with few capabilities, in mount, network, IPC
//! and UTS namespaces that hold only its files.

pub(crate) mod system_calls;

use jiffy_confinement::{
    CapabilitySet, become_own_user, end_with_parent, forbid_new_privileges, set_limits,
};
use nix::sys::resource::Resource;
use std::io;

/// Maximum number of tasks of a process, which is the only one of its user.
const MAX_TASKS: u64 = 64;
const MAX_FILES: u64 = 1024;

/// Returns whether processes are confined: those of the host's root are, unless `JIFFY_JAIL` is
/// `off`.
pub(crate) fn is_on() -> bool {
    jiffy_rootless::is_host_root() && std::env::var_os("JIFFY_JAIL").is_none_or(|w| w != "off")
}

/// Switches to a user of its own with the capabilities `kept`, which survive an exec, and without a
/// way to gain others. The process is killed with its parent. Makes system calls only and does not
/// allocate: it runs between fork and exec.
pub(crate) fn leave(kept: CapabilitySet) -> io::Result<()> {
    set_limits(&[
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_NPROC, MAX_TASKS),
        (Resource::RLIMIT_NOFILE, MAX_FILES),
    ])?;
    become_own_user(kept)?;
    // After the change of user, which clears it.
    end_with_parent()?;
    forbid_new_privileges()
}

#[cfg(test)]
mod tests;
