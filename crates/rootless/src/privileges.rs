//! Privileges that a process started in such namespaces must not have.

use std::io;

/// Largest capability number of any kernel (include/uapi/linux/capability.h).
const MAX_CAPABILITY: u32 = 63;

/// Drops the capability bounding set and sets `no_new_privs`, so that no executed program becomes
/// root again. Makes system calls only and does not allocate: for use between fork and exec.
pub fn drop_privileges() -> io::Result<()> {
    for capability in 0..=MAX_CAPABILITY {
        // SAFETY: no pointers. A capability that this kernel does not know cannot be held either.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    }
    // SAFETY: no pointers.
    match unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
