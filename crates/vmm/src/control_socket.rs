//! Control socket of a process, and the namespaces that it is to enter, at the numbers where it
//! looks for them.
//!
//! They come as standard input and over it: the starter has nothing to do between a fork and the
//! program, and needs no fork.

use jiffy_proto::channel::{Channel, ChannelError};
use jiffy_proto::vm::CONTROL_FD;
use jiffy_proto::vm::jail::{FIRST_FD, NAMESPACES};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::SockType;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Failure to place them.
#[derive(Debug, thiserror::Error)]
pub enum DescriptorError {
    /// Standard input is something else.
    #[error("standard input is no control socket; it is started by `jiffy`, not by hand")]
    NoSocket,
    /// System call.
    #[error("placing descriptors: {0}")]
    Host(#[from] io::Error),
    /// No message with the namespaces.
    #[error("receiving the namespaces: {0}")]
    Channel(#[from] ChannelError),
    /// A starter of another version.
    #[error("{0} namespaces instead of {wanted}", wanted = NAMESPACES.len())]
    Count(usize),
}

/// Moves the control socket from standard input to [`CONTROL_FD`], and places the namespaces that
/// come over it if the process is `jailed`. Must come before any other descriptor is opened: what
/// has their numbers is closed.
pub fn place(jailed: bool) -> Result<(), DescriptorError> {
    if getsockopt(&io::stdin(), SockType).is_err() {
        return Err(DescriptorError::NoSocket);
    }
    duplicate(io::stdin().as_fd(), CONTROL_FD)?;
    if jailed {
        // SAFETY: opened above, and not closed here: its owner takes it by its number.
        let control = unsafe { OwnedFd::from_raw_fd(CONTROL_FD) };
        place_namespaces(&ManuallyDrop::new(Channel::new(control)))?;
    }
    duplicate(File::open("/dev/null")?.as_fd(), libc::STDIN_FILENO)?;
    Ok(())
}

fn place_namespaces(control: &Channel) -> Result<(), DescriptorError> {
    let ((), namespaces) = control.recv()?;
    if namespaces.len() != NAMESPACES.len() {
        return Err(DescriptorError::Count(namespaces.len()));
    }
    // Away from the numbers that they get.
    let above = FIRST_FD + RawFd::try_from(NAMESPACES.len()).unwrap_or(RawFd::MAX);
    let moved: io::Result<Vec<OwnedFd>> = namespaces.iter().map(|n| move_up(n, above)).collect();
    let moved = moved?;
    drop(namespaces);
    for (number, namespace) in (FIRST_FD..).zip(&moved) {
        duplicate(namespace.as_fd(), number)?;
    }
    Ok(())
}

/// A duplicate with a number from `first` on.
fn move_up(fd: &OwnedFd, first: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: no pointers.
    match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, first) } {
        // SAFETY: just made, and nothing else owns it.
        duplicate if duplicate >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(duplicate) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes `number` a duplicate of `fd`. Nothing in this process may own it.
fn duplicate(fd: BorrowedFd<'_>, number: RawFd) -> io::Result<()> {
    // SAFETY: no pointers.
    match unsafe { libc::dup2(fd.as_raw_fd(), number) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
