//! Entry of a process of an unprivileged user into namespaces in which it is root.
//!
//! A *holder* is the process that keeps the namespaces and the uplink open. The *uplink* is a
//! program (`pasta` or `slirp4netns`) that connects the namespaces to the network of the host.

use crate::holder::{CONTROL_FD, HOLDER_ARGUMENT, LISTENER_FD, NO_UPLINK_PREFIX, STEP_BYTE};
use crate::ids::is_host_root;
use crate::join;
use crate::runtime;
use crate::subordinate_ids::{self, SubIdRange, SubIds};
use crate::uplink::Uplink;
use command_fds::{CommandFdExt, FdMapping};
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::{Gid, Uid};
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Options of [`enter`].
#[derive(Debug, Clone)]
pub struct EnterOptions {
    /// Data directory.
    pub home: PathBuf,
    /// True if sandboxes may outlive this process, which applies to daemons. Each data directory
    /// has one set of persistent namespaces, which later processes join.
    pub persistent: bool,
    /// True if the namespaces need an uplink.
    pub network: bool,
}

/// Failure to enter namespaces.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// The process is already root.
    #[error("this process is already root")]
    Root,
    /// The kernel only permits single-threaded processes to enter a user namespace.
    #[error("this process has several threads")]
    Threads,
    /// A system call failed.
    #[error("{operation}: {source}")]
    Io {
        /// Failed operation.
        operation: &'static str,
        /// Error of the operation.
        source: io::Error,
    },
    /// The holder failed.
    #[error("{0}")]
    Holder(String),
}

impl EnterError {
    pub(crate) fn io(operation: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { operation, source }
    }
}

/// Files of persistent namespaces.
struct PersistentPaths {
    socket: PathBuf,
    lock: PathBuf,
}

/// Moves this process into namespaces of its user, in which it is root. The process must be
/// single-threaded. It remains in the network namespace of the host.
pub fn enter(options: &EnterOptions) -> Result<(), EnterError> {
    let uid = Uid::effective();
    if uid.is_root() || is_host_root() {
        return Err(EnterError::Root);
    }
    if !join::has_one_thread() {
        return Err(EnterError::Threads);
    }
    if !options.persistent {
        return start_holder(options, uid, None);
    }
    let directory = runtime::directory(&options.home, uid.as_raw());
    let persistent = PersistentPaths {
        socket: directory.join("namespaces.sock"),
        lock: directory.join("namespaces.lock"),
    };
    // The lock prevents concurrent processes from creating the namespaces twice.
    let _lock = lock(&persistent.lock)?;
    match UnixStream::connect(&persistent.socket) {
        Ok(stream) => join_holder(stream, uid),
        Err(_) => start_holder(options, uid, Some(&persistent)),
    }
}

/// Acquires the lock of persistent namespaces, and creates its directory.
fn lock(path: &Path) -> Result<Flock<File>, EnterError> {
    let operation = "cannot lock the namespaces";
    if let Some(directory) = path.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(EnterError::io(operation))?;
    }
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .map_err(EnterError::io(operation))?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| EnterError::io(operation)(e.into()))
}

/// Enters the namespaces of a running holder.
fn join_holder(stream: UnixStream, uid: Uid) -> Result<(), EnterError> {
    let report = join::report(&stream)?;
    // The kernel reports the user of the peer, so another user cannot pretend to be the holder.
    let peer = nix::sys::socket::getsockopt(&stream, nix::sys::socket::sockopt::PeerCredentials);
    let peer =
        peer.map_err(|e| EnterError::io("cannot identify the namespace holder")(e.into()))?;
    if peer.uid() != uid.as_raw() {
        return Err(EnterError::Holder(format!(
            "the namespace holder belongs to uid {}",
            peer.uid()
        )));
    }
    join::join(uid.as_raw(), report, stream)
}

/// Starts a holder, which creates the namespaces, and enters them.
fn start_holder(
    options: &EnterOptions,
    uid: Uid,
    persistent: Option<&PersistentPaths>,
) -> Result<(), EnterError> {
    let (mut control, holder_end) =
        UnixStream::pair().map_err(EnterError::io("cannot create a pair of sockets"))?;
    let mut holder = spawn(options, holder_end.into(), persistent)?;
    let result = (|| {
        let mut step = [0];
        control
            .read_exact(&mut step)
            .map_err(EnterError::io("cannot read from the namespace holder"))?;
        if step != [STEP_BYTE] {
            return Err(holder_error(step[0], &mut control));
        }
        write_id_maps(holder.id(), uid)?;
        control
            .write_all(&[STEP_BYTE])
            .map_err(EnterError::io("cannot write to the namespace holder"))?;
        let report = join::report(&control)?;
        join::join(uid.as_raw(), report, control)
    })();
    result.inspect_err(|_| {
        // No other process uses the holder yet.
        let _ = holder.kill();
        let _ = holder.wait();
        if let Some(persistent) = persistent {
            let _ = fs::remove_file(&persistent.socket);
        }
    })
}

/// Reads the error that the holder wrote instead of its first step. `first` is the first byte.
fn holder_error(first: u8, control: &mut UnixStream) -> EnterError {
    let mut message = vec![first];
    let _ = control.take(4096).read_to_end(&mut message);
    EnterError::Holder(String::from_utf8_lossy(&message).trim().to_owned())
}

/// Starts the holder process with its control stream and, if persistent, its listening socket.
fn spawn(
    options: &EnterOptions,
    control: OwnedFd,
    persistent: Option<&PersistentPaths>,
) -> Result<Child, EnterError> {
    let uplink = if options.network {
        Uplink::find()
    } else {
        Err("no uplink was requested".to_owned())
    };
    let uplink = match uplink {
        Ok(uplink) => uplink.path().to_owned(),
        Err(reason) => PathBuf::from(format!("{NO_UPLINK_PREFIX}{reason}")),
    };
    // The running program, even if its file was replaced.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("jiffy")
        .arg(HOLDER_ARGUMENT)
        .arg(options.home.join("run").join("net"))
        .arg(uplink)
        // The holder must not keep a file system of the caller mounted.
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut mappings = vec![FdMapping {
        parent_fd: control,
        child_fd: CONTROL_FD,
    }];
    if let Some(persistent) = persistent {
        command.arg(&persistent.socket).arg(&persistent.lock);
        // Remove the socket of an earlier holder. If this fails, `bind` reports an error.
        let _ = fs::remove_file(&persistent.socket);
        let operation = "cannot create the socket of the namespace holder";
        let listener = UnixListener::bind(&persistent.socket).map_err(EnterError::io(operation))?;
        let result = fs::set_permissions(&persistent.socket, Permissions::from_mode(0o600));
        result.map_err(EnterError::io(operation))?;
        mappings.push(FdMapping {
            parent_fd: listener.into(),
            child_fd: LISTENER_FD,
        });
    }
    let operation = "cannot start the namespace holder";
    command
        .fd_mappings(mappings)
        .map_err(|e| EnterError::io(operation)(io::Error::other(e)))?;
    command.spawn().map_err(EnterError::io(operation))
}

/// Maps the user of this process to root in the user namespace of process `holder`, and the
/// subordinate ids of the user, if any, to further ids.
fn write_id_maps(holder: u32, uid: Uid) -> Result<(), EnterError> {
    if let Ok(ranges) = subordinate_ids::for_user(uid)
        && map_ranges(holder, uid, &ranges)
    {
        return Ok(());
    }
    let operation = "cannot map this user to root of a user namespace";
    let write = |file: &str, text: String| {
        fs::write(format!("/proc/{holder}/{file}"), text).map_err(EnterError::io(operation))
    };
    write("uid_map", format!("0 {uid} 1\n"))?;
    // The kernel requires this, because leaving a group could grant access to files that deny
    // access to the group.
    write("setgroups", "deny\n".to_owned())?;
    write("gid_map", format!("0 {} 1\n", Gid::effective()))
}

/// Maps ids with the setuid programs `newgidmap` and `newuidmap`. Returns whether both succeeded.
fn map_ranges(holder: u32, uid: Uid, ranges: &SubIds) -> bool {
    let run = |program: &Path, own: u32, range: SubIdRange| {
        // Two extents of inside, outside, count: root is this user, and ids from 1 are the range.
        let words = [0, own.into(), 1, 1, range.first, range.count];
        Command::new(program)
            .arg(holder.to_string())
            .args(words.map(|number: u64| number.to_string()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    run(&ranges.newgidmap, Gid::effective().as_raw(), ranges.groups)
        && run(&ranges.newuidmap, uid.as_raw(), ranges.users)
}
