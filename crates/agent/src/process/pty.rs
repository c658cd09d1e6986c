//! Terminals of processes: opens a pseudoterminal, and sets its size.

use super::message::PtySize;
use crate::sys;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Default size.
const DEFAULT_SIZE: PtySize = PtySize { cols: 80, rows: 24 };

/// Opens a terminal that belongs to `uid`. Returns the agent's side and the process's side.
pub fn open(size: Option<PtySize>, uid: u32) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: the path is zero-terminated.
    let master = sys::owned(unsafe { libc::open(c"/dev/ptmx".as_ptr(), flags) })?;
    let unlock: libc::c_int = 0;
    // SAFETY: TIOCSPTLCK reads an int.
    sys::check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlock) })?;
    // SAFETY: TIOCGPTPEER takes flags by value and returns a new descriptor.
    let slave = sys::owned(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) })?;
    // SAFETY: the call takes no pointers. The group remains `tty`, as set by the mount options of
    // the file system.
    sys::check(unsafe { libc::fchown(slave.as_raw_fd(), uid, u32::MAX) })?;
    resize(&master, size.unwrap_or(DEFAULT_SIZE))?;
    Ok((master, slave))
}

/// Sets the size of the terminal. The kernel notifies its processes with SIGWINCH.
pub fn resize(master: &OwnedFd, size: PtySize) -> io::Result<()> {
    let size = libc::winsize {
        ws_row: size.rows,
        ws_col: size.cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: TIOCSWINSZ reads a winsize.
    sys::check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) })?;
    Ok(())
}
