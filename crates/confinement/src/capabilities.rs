//! Capabilities of a process. All steps make system calls only and do not allocate, so that they
//! can run between fork and exec.

pub use rustix::thread::CapabilitySet;

use crate::forbid_new_privileges;
use rustix::thread::{
    CapabilitySets, capabilities, clear_ambient_capability_set,
    configure_capability_in_ambient_set, remove_capability_from_bounding_set,
};
use std::io;

/// All capabilities, also those of later kernels, one at a time.
fn all() -> impl Iterator<Item = CapabilitySet> {
    (0..u64::BITS).map(|number| CapabilitySet::from_bits_retain(1 << number))
}

/// Removes all capabilities except `kept` from the bounding set: programs that this process
/// executes cannot gain the others. Without `CAP_SETPCAP` the set stays as it is.
pub fn limit_bounding_set(kept: CapabilitySet) {
    for capability in all().filter(|capability| !kept.contains(*capability)) {
        // A capability that this kernel does not know cannot be held either.
        let _ = remove_capability_from_bounding_set(capability);
    }
}

/// Limits what this process and the programs that it executes can gain: only `kept` stay in the
/// bounding set, and `no_new_privs` is set.
pub fn limit_privileges(kept: CapabilitySet) -> io::Result<()> {
    limit_bounding_set(kept);
    forbid_new_privileges()
}

/// Makes `kept` the only capabilities of the calling thread. They survive an exec.
///
/// # Errors
/// Fails if another capability is left, or if one of `kept` is not permitted.
pub fn set_capabilities(kept: CapabilitySet) -> io::Result<()> {
    clear_ambient_capability_set()?;
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: kept,
    };
    rustix::thread::set_capabilities(None, sets)?;
    for capability in all().filter(|capability| kept.contains(*capability)) {
        configure_capability_in_ambient_set(capability, true)?;
    }
    match capabilities(None)?.permitted == kept {
        true => Ok(()),
        // An error without a message, which would be allocated.
        false => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

/// Drops all capabilities, also from the bounding set as far as the process may do that.
pub fn drop_capabilities() -> io::Result<()> {
    limit_bounding_set(CapabilitySet::empty());
    set_capabilities(CapabilitySet::empty())
}
