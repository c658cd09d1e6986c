//! Kernel calls for which `std`, `nix` and `rustix` have no function.

use std::io;

/// Applies `close_range(2)` to the descriptors from `first` to `last`: closes them, or with
/// `libc::CLOSE_RANGE_CLOEXEC` in `flags` has the next exec close them. Makes one system call and
/// does not allocate.
///
/// # Safety
/// No value in this process owns a descriptor of the range that is closed.
pub unsafe fn close_range(first: u32, last: u32, flags: u32) -> io::Result<()> {
    // SAFETY: no pointers; the rest is the caller's promise. The C library of the guests' agent has
    // no function for this call.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
