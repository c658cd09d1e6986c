//! Moves the control socket and the namespaces of the jail to their fixed descriptor numbers.
//!
//! The control socket arrives as standard input, and the namespaces arrive over it. The starter
//! (crate `microvm-engine`) therefore places no descriptors between fork and exec, and can use
//! vfork.

use jiffy_proto::channel::{Channel, ChannelError};
use jiffy_proto::vm::CONTROL_FD;
use jiffy_proto::vm::jail::{FIRST_FD, NAMESPACES};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::SockType;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Error of receiving the descriptors.
#[derive(Debug, thiserror::Error)]
pub enum DescriptorError {
    /// Standard input is not a socket.
    #[error("standard input is not a control socket: start this program with `jiffy`, not by hand")]
    NoSocket,
    /// A system call failed.
    #[error("placing descriptors: {0}")]
    Host(#[from] io::Error),
    /// The message with the namespaces was not received.
    #[error("receiving the namespaces: {0}")]
    Channel(#[from] ChannelError),
    /// The number of namespaces differs: the starter has another version.
    #[error("{0} namespaces instead of {wanted}", wanted = NAMESPACES.len())]
    Count(usize),
}

/// Moves the control socket from standard input to [`CONTROL_FD`]. If `jailed`, also receives the
/// namespaces and moves them to their numbers. Must be called before any other descriptor is
/// opened: descriptors with these numbers are closed.
pub fn place(jailed: bool) -> Result<(), DescriptorError> {
    // The call fails with ENOTSOCK unless the descriptor is a socket.
    if getsockopt(&io::stdin(), SockType).is_err() {
        return Err(DescriptorError::NoSocket);
    }
    duplicate(io::stdin().as_fd(), CONTROL_FD)?;
    if jailed {
        // SAFETY: the descriptor was opened above. `ManuallyDrop` leaves it open for
        // `process::run`, which becomes its owner later.
        let control = unsafe { OwnedFd::from_raw_fd(CONTROL_FD) };
        place_namespaces(&ManuallyDrop::new(Channel::new(control)))?;
    }
    // Release standard input, so that `CONTROL_FD` is the only descriptor of the socket.
    duplicate(File::open("/dev/null")?.as_fd(), libc::STDIN_FILENO)?;
    Ok(())
}

/// Receives descriptors of namespaces, and gives them the numbers that the program expects.
fn place_namespaces(control: &Channel) -> Result<(), DescriptorError> {
    let ((), namespaces) = control.recv()?;
    if namespaces.len() != NAMESPACES.len() {
        return Err(DescriptorError::Count(namespaces.len()));
    }
    // Move the namespaces above the range of their final numbers. Otherwise `dup2` could close a
    // namespace that has not been moved yet.
    let above = FIRST_FD + RawFd::try_from(NAMESPACES.len()).unwrap_or(RawFd::MAX);
    let moved = namespaces
        .iter()
        .map(|n| move_up(n, above))
        .collect::<io::Result<Vec<OwnedFd>>>()?;
    drop(namespaces);
    for (number, namespace) in (FIRST_FD..).zip(&moved) {
        duplicate(namespace.as_fd(), number)?;
    }
    Ok(())
}

/// Returns a duplicate with a number of at least `first`.
fn move_up(fd: &OwnedFd, first: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the call has no pointer arguments.
    match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, first) } {
        // SAFETY: the descriptor was just created and has no other owner.
        duplicate if duplicate >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(duplicate) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes `number` a duplicate of `fd`. No value in this process may own the descriptor `number`.
fn duplicate(fd: BorrowedFd<'_>, number: RawFd) -> io::Result<()> {
    // SAFETY: the call has no pointer arguments.
    match unsafe { libc::dup2(fd.as_raw_fd(), number) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
