//! Steps of confinement that concern a process itself: inherited descriptors, resource limits and
//! attributes.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rustix::process::{
    DumpableBehavior, Signal, set_dumpable_behavior, set_parent_process_death_signal,
};
use rustix::thread::set_no_new_privs;
use std::io;

/// Closes all inherited descriptors that are at least `first`.
///
/// # Safety
/// No object in this process may own a descriptor that is at least `first`.
pub unsafe fn close_descriptors(first: u32) -> io::Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe { jiffy_proto::kernel::close_range(first, u32::MAX, 0) }
}

/// Sets the soft and the hard limit of a resource. Allocates no memory, so that it may be called
/// between fork and exec.
pub fn set_limit(resource: Resource, limit: u64) -> io::Result<()> {
    Ok(setrlimit(resource, limit, limit)?)
}

/// Sets the limits of several resources.
pub fn set_limits(limits: &[(Resource, u64)]) -> io::Result<()> {
    let mut limits = limits.iter();
    limits.try_for_each(|(resource, limit)| set_limit(*resource, *limit))
}

/// Raises the soft limit of open descriptors to the hard limit, if the kernel permits it.
pub fn raise_descriptor_limit() -> io::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        // Ignore the error: the soft limit remains, and callers handle a lack of descriptors.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
    Ok(())
}

/// Makes this process the first candidate of the OOM killer. Ignores errors, since not every host
/// permits the change.
pub fn prefer_for_oom_kill() {
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
}

/// Sets `no_new_privs`: executed programs gain no privileges.
pub fn forbid_new_privileges() -> io::Result<()> {
    Ok(set_no_new_privs(true)?)
}

/// Forbids new privileges, core dumps and debuggers.
pub fn forbid_inspection() -> io::Result<()> {
    forbid_new_privileges()?;
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Kills this process when the thread that started it exits. A later change of the user clears this
/// setting.
pub fn end_with_parent() -> io::Result<()> {
    // A compromised process cannot block SIGKILL.
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}
