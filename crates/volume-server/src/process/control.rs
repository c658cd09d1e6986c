//! Start of the process, and of its sessions, by the daemon.

use super::streams::Streams;
use super::{ServerSettings, VOLUME_SERVER_ARGUMENT};
use crate::session::SessionRights;
use jiffy_confinement::in_new_pid_namespace;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use nix::unistd::geteuid;
use std::fs::{self, File};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Version of the messages.
const VERSION: u8 = 1;
/// Flag of a session that rejects changes.
const READ_ONLY: u8 = 1;
/// Flag of a session of the daemon.
const DAEMON: u8 = 2;
/// Flag of a message that stops the process instead of starting a session.
const STOP: u8 = 4;
/// Reply to a session that was started.
const STARTED: u8 = 0;
/// Timeout of a message.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of the start of a session, which includes counting the usage of the volume.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Effect of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Accepted {
    /// A session was started.
    Session,
    /// The process must exit.
    Stop,
}

/// Starts a process that serves the volume of `settings` on `socket`. An earlier socket at this
/// path is replaced. `log` receives its messages.
pub fn spawn(settings: &ServerSettings, socket: &Path, log: File) -> io::Result<Child> {
    match fs::remove_file(socket) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    // The link refers to this program even if its file was replaced by an update.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("jiffy")
        .arg(VOLUME_SERVER_ARGUMENT)
        .arg(serde_json::to_string(settings)?)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stdout(Stdio::null())
        .stderr(log);
    if geteuid().is_root() {
        in_new_pid_namespace(|| command.spawn())
    } else {
        command.spawn()
    }
}

/// Starts a session on `stream`, whose other end is the client, by the process that listens on
/// `socket`.
pub fn open_session(
    socket: &Path,
    stream: BorrowedFd<'_>,
    rights: SessionRights,
) -> io::Result<()> {
    let mut connection = UnixStream::connect(socket)?;
    connection.set_read_timeout(Some(START_TIMEOUT))?;
    connection.set_write_timeout(Some(TIMEOUT))?;
    let read_only = if rights.is_read_only { READ_ONLY } else { 0 };
    let daemon = if rights.is_daemon { DAEMON } else { 0 };
    let message = [VERSION, read_only | daemon];
    let descriptors = [stream.as_raw_fd()];
    sendmsg::<()>(
        connection.as_raw_fd(),
        &[IoSlice::new(&message)],
        &[ControlMessage::ScmRights(&descriptors)],
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    let mut reply = [0];
    connection.read_exact(&mut reply)?;
    match reply {
        [STARTED] => Ok(()),
        _ => Err(io::Error::other("the volume has too many sessions")),
    }
}

/// Stops the process that listens on `socket`, and waits until it has exited. Ignores errors:
/// without a process, no connection is accepted.
pub fn stop(socket: &Path) {
    let stop = || -> io::Result<()> {
        let mut connection = UnixStream::connect(socket)?;
        connection.set_read_timeout(Some(TIMEOUT))?;
        connection.write_all(&[VERSION, STOP])?;
        // Returns when the process has exited.
        connection.read_exact(&mut [0])
    };
    let _ = stop();
}

/// Starts the session that a message on `connection` requests.
pub(super) fn accept(connection: &UnixStream, streams: &Streams) -> io::Result<Accepted> {
    connection.set_read_timeout(Some(TIMEOUT))?;
    connection.set_write_timeout(Some(TIMEOUT))?;
    let mut message = [0; 2];
    let mut space = nix::cmsg_space!([std::os::fd::RawFd; 1]);
    let mut buffers = [IoSliceMut::new(&mut message)];
    let received = recvmsg::<()>(
        connection.as_raw_fd(),
        &mut buffers,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )?;
    let mut stream = None;
    for part in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(descriptors) = part {
            for descriptor in descriptors {
                // SAFETY: the kernel created the descriptor for this process at the receive.
                stream = Some(unsafe { OwnedFd::from_raw_fd(descriptor) });
            }
        }
    }
    let flags = match message {
        [VERSION, flags] => flags,
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    if flags & STOP != 0 {
        return Ok(Accepted::Stop);
    }
    let stream = stream.ok_or(io::ErrorKind::InvalidData)?;
    let rights = SessionRights {
        is_read_only: flags & READ_ONLY != 0,
        is_daemon: flags & DAEMON != 0,
    };
    let started = streams.start(UnixStream::from(stream), rights);
    let reply = [if started.is_ok() { STARTED } else { 1 }];
    let mut connection = connection;
    connection.write_all(&reply)?;
    started.map(|()| Accepted::Session)
}
