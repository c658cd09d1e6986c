//! Capabilities of a process. All functions make system calls only and do not allocate memory, so
//! that they can run between fork and exec.

pub use rustix::thread::CapabilitySet;

use crate::forbid_new_privileges;
use rustix::thread::{
    CapabilitySets, capabilities, clear_ambient_capability_set,
    configure_capability_in_ambient_set, remove_capability_from_bounding_set,
};
use std::io;

/// Iterates over single capabilities, including capabilities of future kernels.
fn all() -> impl Iterator<Item = CapabilitySet> {
    (0..u64::BITS).map(|number| CapabilitySet::from_bits_retain(1 << number))
}

/// Removes all capabilities except `retained` from the bounding set: programs executed by this
/// process cannot gain the others. Without `CAP_SETPCAP`, the set is not changed.
pub fn limit_bounding_set(retained: CapabilitySet) {
    for capability in all().filter(|capability| !retained.contains(*capability)) {
        // Ignore the error: a capability that this kernel does not know cannot be held either, and
        // a process without CAP_SETPCAP may not change the set.
        let _ = remove_capability_from_bounding_set(capability);
    }
}

/// Limits the privileges that this process and programs executed by it can gain. Only `retained`
/// remain in the bounding set, and `no_new_privs` is set.
pub fn limit_privileges(retained: CapabilitySet) -> io::Result<()> {
    limit_bounding_set(retained);
    forbid_new_privileges()
}

/// Sets the capabilities of the calling thread to `retained`. They survive an exec.
///
/// # Errors
/// Fails if another capability remains, or if one of `retained` is not permitted.
pub fn set_capabilities(retained: CapabilitySet) -> io::Result<()> {
    // Ambient capabilities are cleared first, so that none remains if a later call fails.
    clear_ambient_capability_set()?;
    let sets = CapabilitySets {
        effective: retained,
        permitted: retained,
        inheritable: retained,
    };
    rustix::thread::set_capabilities(None, sets)?;
    // A program of a user other than root retains only ambient capabilities at an exec. These must
    // be permitted and inheritable.
    for capability in all().filter(|capability| retained.contains(*capability)) {
        configure_capability_in_ambient_set(capability, true)?;
    }
    // Verify the result, because a capability that remains by mistake would be a hole in the
    // confinement.
    if capabilities(None)?.permitted != retained {
        // The error has no message, which would be allocated.
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(())
}

/// Drops all capabilities, and removes them from the bounding set if permitted.
pub fn drop_capabilities() -> io::Result<()> {
    limit_bounding_set(CapabilitySet::empty());
    set_capabilities(CapabilitySet::empty())
}
