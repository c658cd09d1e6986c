//! Rights that a process started in a namespace of ours must not have.

use std::io;

/// No kernel has more capabilities (include/uapi/linux/capability.h).
const MAX_CAPABILITY: u32 = 63;

/// Takes from the calling process what would make it root again when it executes a program, for
/// ever. Only system calls, no allocation: for use between fork and exec.
pub fn give_up_rights() -> io::Result<()> {
    for capability in 0..=MAX_CAPABILITY {
        // SAFETY: no pointers. One that this kernel does not know cannot be had either.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    }
    // SAFETY: no pointers.
    match unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
