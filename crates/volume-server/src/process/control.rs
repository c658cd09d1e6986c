//! Start of the process, and of its sessions, by the daemon.
//!
//! Each volume has one server process. A *session* serves one client: the kernel of a guest that
//! has mounted the volume, or the daemon. The *charged* bytes of a file are its length, rounded up
//! to 4 KiB.

use super::streams::Streams;
use super::{ServerSettings, VOLUME_SERVER_ARGUMENT};
use crate::session::SessionRights;
use jiffy_confinement::in_new_pid_namespace;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recv, recvmsg, sendmsg};
use nix::unistd::geteuid;
use std::fs::{self, File};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Version of the messages.
const VERSION: u8 = 2;
/// Length of a message: version, flags, and the number of a session's mount.
const MESSAGE: usize = 10;
/// Maximum number of connections that wait for the exit of the process.
const MAX_WATCHES: usize = 16;
/// Flag of a session that rejects changes.
const READ_ONLY: u8 = 1;
/// Flag of a session of the daemon.
const DAEMON: u8 = 2;
/// Flag of a message that stops the process instead of starting a session.
const STOP: u8 = 4;
/// Flag of a message on a connection that remains open until the process exits.
const WATCH: u8 = 8;
/// Flag of a message with a file, to which the process writes an image of the volume.
const IMAGE: u8 = 16;
/// Reply to a session that was started. Any other reply means that it was not started.
const STARTED: u8 = 0;
/// Length of the reply to the request for an image: error number and charged bytes.
const IMAGE_REPLY: usize = 12;
/// Timeout of a message.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of the start of a session, which includes counting the usage of the volume.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Effect of a message.
#[derive(Debug)]
pub(super) enum Accepted {
    /// A session was started.
    Session,
    /// An image must be written to this file, and the result to the connection.
    Image(File),
    /// The process must exit.
    Stop,
    /// The connection must remain open until the process exits.
    Watch,
}

/// Connection that ends when a process exits.
#[derive(Debug)]
pub struct ServerWatch {
    /// Number of the process. The processes of a volume have different numbers.
    pub server: u64,
    /// Connection without further data.
    pub connection: UnixStream,
}

/// Connections of [`watch`].
#[derive(Debug)]
pub(super) struct Watches {
    /// Number of this process, which clients receive.
    server: u64,
    connections: Vec<UnixStream>,
}

impl Watches {
    pub(super) fn new(server: u64) -> Self {
        Self {
            server,
            connections: Vec::new(),
        }
    }

    /// Replies with the number of this process, and retains the connection.
    pub(super) fn add(&mut self, mut connection: UnixStream) -> io::Result<()> {
        // A client sends nothing. A read without data means that it has closed the connection.
        self.connections.retain(|open| {
            let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
            recv(open.as_raw_fd(), &mut [0], flags).is_err()
        });
        if self.connections.len() >= MAX_WATCHES {
            // No process has this number.
            connection.write_all(&[0; 8])?;
            return Err(io::Error::other("the process has too many connections"));
        }
        connection.write_all(&self.server.to_le_bytes())?;
        self.connections.push(connection);
        Ok(())
    }
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

/// Returns a message. `mount` is `None` if the client is not a mount in a guest. The message then
/// has the mount 0.
fn message(flags: u8, mount: Option<u64>) -> [u8; MESSAGE] {
    let mut message = [0; MESSAGE];
    let (start, rest) = message.split_at_mut(2);
    start.copy_from_slice(&[VERSION, flags]);
    rest.copy_from_slice(&mount.unwrap_or(0).to_le_bytes());
    message
}

/// Starts a session on `stream`, whose other end is the client, by the process that listens on
/// `socket`. Ends an earlier session of the same `mount`.
pub fn open_session(
    socket: &Path,
    stream: BorrowedFd<'_>,
    rights: SessionRights,
    mount: Option<u64>,
) -> io::Result<()> {
    let mut connection = UnixStream::connect(socket)?;
    connection.set_read_timeout(Some(START_TIMEOUT))?;
    connection.set_write_timeout(Some(TIMEOUT))?;
    let read_only = if rights.is_read_only { READ_ONLY } else { 0 };
    let daemon = if rights.is_daemon { DAEMON } else { 0 };
    let message = message(read_only | daemon, mount);
    send(&connection, &message, stream)?;
    let mut reply = [0];
    connection.read_exact(&mut reply)?;
    match reply {
        [STARTED] => Ok(()),
        _ => Err(io::Error::other("the volume has too many sessions")),
    }
}

/// Sends a message with a descriptor.
fn send(connection: &UnixStream, message: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let descriptors = [descriptor.as_raw_fd()];
    sendmsg::<()>(
        connection.as_raw_fd(),
        &[IoSlice::new(message)],
        &[ControlMessage::ScmRights(&descriptors)],
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    Ok(())
}

/// Connects to the process that listens on `socket`, until it exits.
pub fn watch(socket: &Path) -> io::Result<ServerWatch> {
    let mut connection = UnixStream::connect(socket)?;
    connection.set_read_timeout(Some(START_TIMEOUT))?;
    connection.set_write_timeout(Some(TIMEOUT))?;
    connection.write_all(&message(WATCH, None))?;
    let mut server = [0; 8];
    connection.read_exact(&mut server)?;
    connection.set_read_timeout(None)?;
    let server = u64::from_le_bytes(server);
    if server == 0 {
        return Err(io::Error::other("the process has too many connections"));
    }
    Ok(ServerWatch { server, connection })
}

/// Writes an image of the volume to the empty file `image`, by the process that listens on
/// `socket`. Returns the charged bytes of its files.
pub fn write_image(socket: &Path, image: &File) -> io::Result<u64> {
    let mut connection = UnixStream::connect(socket)?;
    // The reply has no timeout: the copy may take long, and the connection ends with the process.
    connection.set_write_timeout(Some(TIMEOUT))?;
    let message = message(IMAGE, None);
    send(&connection, &message, image.as_fd())?;
    let mut reply = [0; IMAGE_REPLY];
    connection.read_exact(&mut reply)?;
    let (error, bytes) = reply.split_at(4);
    let error = i32::from_le_bytes(error.try_into().unwrap_or_default());
    match error {
        0 => Ok(u64::from_le_bytes(bytes.try_into().unwrap_or_default())),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Returns the reply to the request for an image.
pub(super) fn image_reply(written: Result<u64, Errno>) -> [u8; IMAGE_REPLY] {
    let mut reply = [0; IMAGE_REPLY];
    let (error, bytes) = reply.split_at_mut(4);
    error.copy_from_slice(&written.err().map_or(0, |e| e as i32).to_le_bytes());
    bytes.copy_from_slice(&written.unwrap_or(0).to_le_bytes());
    reply
}

/// Stops the process that listens on `socket`, and waits until it has exited. Ignores errors:
/// without a process, no connection is accepted.
pub fn stop(socket: &Path) {
    let stop = || -> io::Result<()> {
        let mut connection = UnixStream::connect(socket)?;
        connection.set_read_timeout(Some(TIMEOUT))?;
        connection.write_all(&message(STOP, None))?;
        // The read returns when the process has exited.
        connection.read_exact(&mut [0])
    };
    let _ = stop();
}

/// Starts the session that a message on `connection` requests.
pub(super) fn accept(connection: &UnixStream, streams: &Streams) -> io::Result<Accepted> {
    connection.set_read_timeout(Some(TIMEOUT))?;
    connection.set_write_timeout(Some(TIMEOUT))?;
    let mut message = [0; MESSAGE];
    let mut space = nix::cmsg_space!([std::os::fd::RawFd; 1]);
    let mut buffers = [IoSliceMut::new(&mut message)];
    let received = recvmsg::<()>(
        connection.as_raw_fd(),
        &mut buffers,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )?;
    let length = received.bytes;
    let mut stream = None;
    for part in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(descriptors) = part {
            for descriptor in descriptors {
                // SAFETY: the kernel created the descriptor for this process at the receive.
                stream = Some(unsafe { OwnedFd::from_raw_fd(descriptor) });
            }
        }
    }
    let (flags, mount) = match message {
        [VERSION, flags, mount @ ..] if length == MESSAGE => (flags, u64::from_le_bytes(mount)),
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    if flags & STOP != 0 {
        return Ok(Accepted::Stop);
    }
    if flags & WATCH != 0 {
        return Ok(Accepted::Watch);
    }
    let stream = stream.ok_or(io::ErrorKind::InvalidData)?;
    if flags & IMAGE != 0 {
        return Ok(Accepted::Image(File::from(stream)));
    }
    let rights = SessionRights {
        is_read_only: flags & READ_ONLY != 0,
        is_daemon: flags & DAEMON != 0,
    };
    let started = streams.start(
        UnixStream::from(stream),
        rights,
        (mount != 0).then_some(mount),
    );
    let reply = [if started.is_ok() { STARTED } else { 1 }];
    let mut connection = connection;
    // Ignore the error: a client that does not receive the reply closes the stream.
    let _ = connection.write_all(&reply);
    started.map(|()| Accepted::Session)
}
