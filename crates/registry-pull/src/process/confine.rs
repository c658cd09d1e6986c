//! Confinement of a puller before it reads from a registry. The *puller* is the process that
//! downloads images from registries.

use jiffy_confinement as confinement;
use nix::sys::resource::Resource;
use nix::unistd::Uid;
use std::io;

/// Maximum size of the address space in bytes. Responses are streamed, so a puller needs little.
const MAX_MEMORY: u64 = 512 << 20;
/// Maximum number of open descriptors: the parent's socket, the event loop's, and connections.
const MAX_DESCRIPTORS: u64 = 64;
/// Maximum processor time in seconds. Stops a puller that loops endlessly.
const MAX_CPU_S: u64 = 3600;

/// Sets limits for memory, descriptors and processor time.
pub(super) fn limit_resources() -> io::Result<()> {
    confinement::prefer_for_oom_kill();
    confinement::set_limits(&[
        (Resource::RLIMIT_AS, MAX_MEMORY),
        (Resource::RLIMIT_NOFILE, MAX_DESCRIPTORS),
        (Resource::RLIMIT_CPU, MAX_CPU_S),
        // No files and no core dumps.
        (Resource::RLIMIT_FSIZE, 0),
        (Resource::RLIMIT_CORE, 0),
    ])
}

/// Leaves the host's namespaces, files, user and privileges. Without root, only applies
/// restrictions that an unprivileged process can apply.
pub(super) fn leave_everything() -> io::Result<()> {
    if Uid::effective().is_root() {
        confinement::leave_host(jiffy_rootless::is_host_root())?;
    }
    confinement::forbid_inspection()?;
    // Call `end_with_parent` after `leave_host`, because a change of user clears this setting. If
    // the parent has exited before the call, the puller reads the end of its socket and exits.
    confinement::end_with_parent()?;
    // No further tasks can be created.
    confinement::set_limit(Resource::RLIMIT_NPROC, 0)
}
