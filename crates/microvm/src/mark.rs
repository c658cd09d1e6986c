//! By what a kept VMM is found again: which process it is, and where it listens.

use jiffy_proto::channel::{Channel, ChannelError};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket,
};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// One process of one run of one host: never another, even if its number is used again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmmMark {
    /// The kernel's random word for this run of the host.
    pub boot: String,
    /// Process id.
    pub pid: u32,
    /// When it started, in the kernel's ticks since the host did.
    pub started: u64,
}

impl VmmMark {
    /// The mark of a process that lives.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        Ok(Self {
            boot: boot.trim().to_owned(),
            pid,
            started: started(&stat).ok_or(io::ErrorKind::NotFound)?,
        })
    }

    /// Where it listens, in the directory of all control sockets. The name tells enough to end a VMM that nobody knows of.
    pub(crate) fn socket(&self, directory: &Path) -> PathBuf {
        directory.join(format!("{}-{}.sock", self.pid, self.started))
    }

    /// The mark of the process of this run of the host that listens at `path`, if that is such a name.
    pub(crate) fn named(path: &Path) -> Option<(u32, u64)> {
        let (pid, started) = path
            .file_name()?
            .to_str()?
            .strip_suffix(".sock")?
            .split_once('-')?;
        Some((pid.parse().ok()?, started.parse().ok()?))
    }
}

/// Field 22 of `/proc/PID/stat` (proc_pid_stat(5)); the name in field 2 may hold anything. None of a process that has ended and
/// that nobody has waited for.
fn started(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let started = fields.nth(18)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(started)
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
    fn a_process_is_told_from_a_later_one_of_the_same_number() {
        let here = VmmMark::of(std::process::id()).unwrap();
        assert_eq!(VmmMark::of(std::process::id()).unwrap(), here);
        assert_ne!(VmmMark::of(1).unwrap().started, here.started);
        assert_eq!(
            started("1 (a) b) c) S 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 99 23"),
            Some(99)
        );
        assert_eq!(
            started("1 (a) Z 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 99 23"),
            None
        );
        let path = here.socket(Path::new("/x"));
        assert_eq!(VmmMark::named(&path), Some((here.pid, here.started)));
        assert_eq!(VmmMark::named(Path::new("/x/notes.txt")), None);
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
