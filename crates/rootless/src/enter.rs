//! Entry of an ordinary user's process into namespaces in which it is root.

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
    /// True if sandboxes may outlive this process, as those of a daemon do. There is one set of
    /// such namespaces per data directory, which later processes join.
    pub persistent: bool,
    /// True if an uplink is wanted.
    pub network: bool,
}

/// Failure to enter namespaces.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// The process is root and needs none.
    #[error("this process is root already")]
    Root,
    /// The kernel moves single-threaded processes only.
    #[error("this process has threads already")]
    Threads,
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// Attempted operation.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The holder failed.
    #[error("{0}")]
    Holder(String),
}

impl EnterError {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

/// Files by which persistent namespaces are found.
struct PersistentPaths {
    socket: PathBuf,
    lock: PathBuf,
}

/// Moves this process into namespaces of its user, in which it is root. It must have one thread
/// only. Its network stays the host's.
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
    // Concurrent processes make them once.
    let _lock = lock(&persistent.lock)?;
    match UnixStream::connect(&persistent.socket) {
        Ok(stream) => join_holder(stream, uid),
        Err(_) => start_holder(options, uid, Some(&persistent)),
    }
}

fn lock(path: &Path) -> Result<Flock<File>, EnterError> {
    let what = "locking the namespaces";
    if let Some(directory) = path.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(EnterError::io(what))?;
    }
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .map_err(EnterError::io(what))?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| EnterError::io(what)(e.into()))
}

fn join_holder(stream: UnixStream, uid: Uid) -> Result<(), EnterError> {
    let report = join::report(&stream)?;
    let peer = nix::sys::socket::getsockopt(&stream, nix::sys::socket::sockopt::PeerCredentials);
    let peer = peer.map_err(|e| EnterError::io("asking who keeps the namespaces")(e.into()))?;
    if peer.uid() != uid.as_raw() {
        return Err(EnterError::Holder(format!(
            "the namespaces are kept by uid {}",
            peer.uid()
        )));
    }
    join::join(uid.as_raw(), report, stream)
}

/// Starts a holder, which makes the namespaces, and enters them.
fn start_holder(
    options: &EnterOptions,
    uid: Uid,
    persistent: Option<&PersistentPaths>,
) -> Result<(), EnterError> {
    let (mut control, theirs) =
        UnixStream::pair().map_err(EnterError::io("making a pair of sockets"))?;
    let mut holder = spawn(options, theirs.into(), persistent)?;
    let made = (|| {
        let mut step = [0];
        let hears = EnterError::io("waiting for a user namespace");
        control.read_exact(&mut step).map_err(hears)?;
        if step != [STEP_BYTE] {
            return Err(holder_error(step[0], &mut control));
        }
        write_id_maps(holder.id(), uid)?;
        let says = EnterError::io("speaking to the namespaces");
        control.write_all(&[STEP_BYTE]).map_err(says)?;
        let report = join::report(&control)?;
        join::join(uid.as_raw(), report, control)
    })();
    made.inspect_err(|_| {
        // The holder has no users yet.
        let _ = holder.kill();
        let _ = holder.wait();
        if let Some(persistent) = persistent {
            let _ = fs::remove_file(&persistent.socket);
        }
    })
}

/// Reads the error that the holder wrote instead of its first step.
fn holder_error(first: u8, control: &mut UnixStream) -> EnterError {
    let mut said = vec![first];
    let _ = control.take(4096).read_to_end(&mut said);
    EnterError::Holder(String::from_utf8_lossy(&said).trim().to_owned())
}

fn spawn(
    options: &EnterOptions,
    control: OwnedFd,
    persistent: Option<&PersistentPaths>,
) -> Result<Child, EnterError> {
    let uplink = match options.network {
        true => Uplink::find(),
        false => Err("none was asked for".to_owned()),
    };
    let uplink = match uplink {
        Ok(uplink) => uplink.path().to_owned(),
        Err(why) => PathBuf::from(format!("{NO_UPLINK_PREFIX}{why}")),
    };
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("jiffy")
        .arg(HOLDER_ARGUMENT)
        .arg(options.home.join("run").join("net"))
        .arg(uplink)
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
        let _ = fs::remove_file(&persistent.socket);
        let what = "listening for processes that come to the namespaces";
        let listener = UnixListener::bind(&persistent.socket).map_err(EnterError::io(what))?;
        let closed = fs::set_permissions(&persistent.socket, Permissions::from_mode(0o600));
        closed.map_err(EnterError::io(what))?;
        mappings.push(FdMapping {
            parent_fd: listener.into(),
            child_fd: LISTENER_FD,
        });
    }
    let what = "starting the process that keeps the namespaces";
    command
        .fd_mappings(mappings)
        .map_err(|e| EnterError::io(what)(io::Error::other(e)))?;
    command.spawn().map_err(EnterError::io(what))
}

/// Maps this process's user to root in the user namespace of process `holder`, and its subordinate
/// ids, if any, to the other ids.
fn write_id_maps(holder: u32, uid: Uid) -> Result<(), EnterError> {
    if let Ok(ranges) = subordinate_ids::for_user(uid)
        && map_ranges(holder, uid, &ranges)
    {
        return Ok(());
    }
    let what = "mapping this user to root of a user namespace";
    let write = |file: &str, text: String| {
        fs::write(format!("/proc/{holder}/{file}"), text).map_err(EnterError::io(what))
    };
    write("uid_map", format!("0 {uid} 1\n"))?;
    // Required by the kernel: leaving a group could give access to files that deny it to the group.
    write("setgroups", "deny\n".to_owned())?;
    write("gid_map", format!("0 {} 1\n", Gid::effective()))
}

fn map_ranges(holder: u32, uid: Uid, ranges: &SubIds) -> bool {
    let run = |program: &Path, own: u32, range: SubIdRange| {
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
