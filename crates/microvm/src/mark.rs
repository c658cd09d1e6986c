//! By what a kept VMM is found again: which process it is, and where it listens.

use jiffy_engine::ProcessMark;
use jiffy_proto::channel::{Channel, ChannelError};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket,
};
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Where the VMM of that mark listens, in the directory of all control sockets. The name tells enough to end one that nobody knows of.
pub(crate) fn socket_of(mark: &ProcessMark, directory: &Path) -> PathBuf {
    directory.join(format!("{}-{}.sock", mark.pid, mark.started))
}

/// Process id and start of the process of this run of the host that listens at `path`, if that is such a name.
pub(crate) fn named(path: &Path) -> Option<(u32, u64)> {
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

/// A listening socket at `path`, in the place of what a dead VMM left there.
pub(crate) fn listen_at(path: &Path) -> io::Result<OwnedFd> {
    let _ = fs::remove_file(path);
    let listener = seqpacket()?;
    bind(listener.as_raw_fd(), &UnixAddr::new(path)?)?;
    // The directory is closed, too; whoever connects gives orders.
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    // As many as would ever try at once.
    listen(&listener, Backlog::new(8)?)?;
    Ok(listener)
}

/// A connection to the VMM that listens at `path`. Refused exactly if there is none: a listening socket lives in a VMM, or on its
/// way to one that will be kept.
pub(crate) fn connect_to(path: &Path) -> Result<Channel, ChannelError> {
    let ours = seqpacket()?;
    connect(ours.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(Channel::new(ours))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_socket_says_whose_it_is() {
        let here = ProcessMark::of(std::process::id()).unwrap();
        let path = socket_of(&here, Path::new("/x"));
        assert_eq!(named(&path), Some((here.pid, here.started)));
        assert_eq!(named(Path::new("/x/notes.txt")), None);
    }

    #[test]
    fn a_socket_without_a_listener_refuses() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("1-2.sock");
        let listener = listen_at(&path).unwrap();
        connect_to(&path).unwrap();
        drop(listener);
        assert!(connect_to(&path).is_err());
        listen_at(&path).unwrap();
    }
}
