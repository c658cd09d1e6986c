//! Control sockets of detached VMMs, which continue to run without a daemon. The path of the socket
//! names the process, so that the next daemon finds and connects to it.

use jiffy_engine_api::ProcessInstance;
use jiffy_proto::channel::{Channel, ChannelError};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket,
};
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Returns the path of a VMM's control socket in `directory`. The name identifies the process, so
/// that an unknown VMM can be terminated.
pub(crate) fn control_socket_path(mark: &ProcessInstance, directory: &Path) -> PathBuf {
    directory.join(format!("{}-{}.sock", mark.pid, mark.started))
}

/// Parses the process id and start time of the VMM from the name of its socket.
pub(crate) fn parse_socket_name(path: &Path) -> Option<(u32, u64)> {
    let (pid, started) = path
        .file_name()?
        .to_str()?
        .strip_suffix(".sock")?
        .split_once('-')?;
    Some((pid.parse().ok()?, started.parse().ok()?))
}

fn seqpacket() -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)
}

/// Creates a listening socket at `path`. Replaces a socket that an exited VMM left.
pub(crate) fn listen_at(path: &Path) -> io::Result<OwnedFd> {
    // Ignore the error: usually no socket exists.
    let _ = fs::remove_file(path);
    let listener = seqpacket()?;
    bind(listener.as_raw_fd(), &UnixAddr::new(path)?)?;
    // A client controls the VMM, so the socket and its directory are inaccessible to other users.
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    // More connections than are ever attempted at the same time.
    listen(&listener, Backlog::new(8)?)?;
    Ok(listener)
}

/// Connects to the VMM that listens at `path`. Fails with ECONNREFUSED only if no VMM listens: a
/// listening socket is held by a VMM, or in flight to a VMM that is being detached.
pub(crate) fn connect_to(path: &Path) -> Result<Channel, ChannelError> {
    let ours = seqpacket()?;
    connect(ours.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(Channel::new(ours))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_control_socket_identifies_its_process() {
        let here = ProcessInstance::of(std::process::id()).unwrap();
        let path = control_socket_path(&here, Path::new("/x"));
        assert_eq!(parse_socket_name(&path), Some((here.pid, here.started)));
        assert_eq!(parse_socket_name(Path::new("/x/notes.txt")), None);
    }

    #[test]
    fn a_socket_without_a_listener_rejects_connections() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("1-2.sock");
        let listener = listen_at(&path).unwrap();
        connect_to(&path).unwrap();
        drop(listener);
        assert!(connect_to(&path).is_err());
        listen_at(&path).unwrap();
    }
}
