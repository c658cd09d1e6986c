//! System calls for which `std`, `nix` and `rustix` have no function.

use std::io;

/// Calls `close_range(2)` for the descriptors from `first` to `last`. The call closes the
/// descriptors. With `libc::CLOSE_RANGE_CLOEXEC` in `flags`, the next exec closes them. Makes one
/// system call and does not allocate.
///
/// # Safety
/// No value in this process may own a descriptor in the range if the call closes it.
pub unsafe fn close_range(first: u32, last: u32, flags: u32) -> io::Result<()> {
    // SAFETY: the call takes no pointers, and the caller guarantees the rest. The C library of the
    // guest agent has no function for this call.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
