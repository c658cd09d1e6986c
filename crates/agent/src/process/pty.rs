//! Terminals.

use super::message::PtySize;
use crate::sys;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Size when the client names none.
const DEFAULT_SIZE: PtySize = PtySize { cols: 80, rows: 24 };

/// Opens a terminal that belongs to `uid`: our side and the process's side.
pub fn open(size: Option<PtySize>, uid: u32) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: a valid path.
    let master = sys::owned(unsafe { libc::open(c"/dev/ptmx".as_ptr(), flags) })?;
    let unlock: libc::c_int = 0;
    // SAFETY: TIOCSPTLCK reads an int.
    sys::check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlock) })?;
    // SAFETY: TIOCGPTPEER takes flags by value and returns a new descriptor.
    let slave = sys::owned(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) })?;
    // SAFETY: no pointers. The group stays `tty`, as the file system's mount options set it.
    sys::check(unsafe { libc::fchown(slave.as_raw_fd(), uid, u32::MAX) })?;
    resize(&master, size.unwrap_or(DEFAULT_SIZE))?;
    Ok((master, slave))
}

/// Tells the terminal, and by SIGWINCH its processes, a new size.
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
