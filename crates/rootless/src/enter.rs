//! The way from an ordinary user's process to namespaces in which it is root.

use crate::holder::{ARGUMENT, CONTROL, LISTENER, NO_UPLINK, STEP};
use crate::ids::is_host_root;
use crate::join;
use crate::ranges::{self, Range, Ranges};
use crate::runtime;
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

/// What namespaces are wanted for.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The data directory.
    pub home: PathBuf,
    /// Tells if sandboxes may need them longer than this process, as those of a daemon do. Such
    /// namespaces are one for the data directory, and joined if they are there.
    pub lasting: bool,
    /// Tells if a way out is wanted.
    pub network: bool,
}

/// Why there are no namespaces.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// Root needs none.
    #[error("this process is root already")]
    Root,
    /// The kernel moves no other process.
    #[error("this process has threads already")]
    Threads,
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The process that would keep them failed.
    #[error("{0}")]
    Holder(String),
}

impl EnterError {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

/// Names of the files by which lasting namespaces are found.
struct Lasting {
    socket: PathBuf,
    lock: PathBuf,
}

/// Moves this process into namespaces of its user's own, in which it is root. It must have one
/// thread only. Its network stays the host's.
pub fn enter(plan: &Plan) -> Result<(), EnterError> {
    let uid = Uid::effective();
    if uid.is_root() || is_host_root() {
        return Err(EnterError::Root);
    }
    if !join::has_one_thread() {
        return Err(EnterError::Threads);
    }
    if !plan.lasting {
        return make(plan, uid, None);
    }
    let directory = runtime::directory(&plan.home, uid.as_raw());
    let lasting = Lasting {
        socket: directory.join("namespaces.sock"),
        lock: directory.join("namespaces.lock"),
    };
    // Two that come at once make them once.
    let _lock = lock(&lasting.lock)?;
    match UnixStream::connect(&lasting.socket) {
        Ok(stream) => join_holder(stream, uid),
        Err(_) => make(plan, uid, Some(&lasting)),
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

/// Has a holder make them, and enters them.
fn make(plan: &Plan, uid: Uid, lasting: Option<&Lasting>) -> Result<(), EnterError> {
    let (mut control, theirs) =
        UnixStream::pair().map_err(EnterError::io("making a pair of sockets"))?;
    let mut holder = spawn(plan, theirs.into(), lasting)?;
    let made = (|| {
        let mut step = [0];
        let hears = EnterError::io("waiting for a user namespace");
        control.read_exact(&mut step).map_err(hears)?;
        if step != [STEP] {
            return Err(refusal(step[0], &mut control));
        }
        map(holder.id(), uid)?;
        let says = EnterError::io("speaking to the namespaces");
        control.write_all(&[STEP]).map_err(says)?;
        let report = join::report(&control)?;
        join::join(uid.as_raw(), report, control)
    })();
    made.inspect_err(|_| {
        // It has done nothing yet that anybody needs.
        let _ = holder.kill();
        let _ = holder.wait();
        if let Some(lasting) = lasting {
            let _ = fs::remove_file(&lasting.socket);
        }
    })
}

/// What the holder wrote in the place of its first step.
fn refusal(first: u8, control: &mut UnixStream) -> EnterError {
    let mut said = vec![first];
    let _ = control.take(4096).read_to_end(&mut said);
    EnterError::Holder(String::from_utf8_lossy(&said).trim().to_owned())
}

fn spawn(plan: &Plan, control: OwnedFd, lasting: Option<&Lasting>) -> Result<Child, EnterError> {
    let uplink = match plan.network {
        true => Uplink::find(),
        false => Err("none was asked for".to_owned()),
    };
    let uplink = match uplink {
        Ok(uplink) => uplink.path().to_owned(),
        Err(why) => PathBuf::from(format!("{NO_UPLINK}{why}")),
    };
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("jiffy")
        .arg(ARGUMENT)
        .arg(plan.home.join("run").join("net"))
        .arg(uplink)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut mappings = vec![FdMapping {
        parent_fd: control,
        child_fd: CONTROL,
    }];
    if let Some(lasting) = lasting {
        command.arg(&lasting.socket).arg(&lasting.lock);
        let _ = fs::remove_file(&lasting.socket);
        let what = "listening for processes that come to the namespaces";
        let listener = UnixListener::bind(&lasting.socket).map_err(EnterError::io(what))?;
        let closed = fs::set_permissions(&lasting.socket, Permissions::from_mode(0o600));
        closed.map_err(EnterError::io(what))?;
        mappings.push(FdMapping {
            parent_fd: listener.into(),
            child_fd: LISTENER,
        });
    }
    let what = "starting the process that keeps the namespaces";
    command
        .fd_mappings(mappings)
        .map_err(|e| EnterError::io(what)(io::Error::other(e)))?;
    command.spawn().map_err(EnterError::io(what))
}

/// Maps this process's user to root of the namespace of process `holder`, and its subordinate users
/// to the others; where there are none, nothing else.
fn map(holder: u32, uid: Uid) -> Result<(), EnterError> {
    if let Ok(ranges) = ranges::of(uid)
        && map_ranges(holder, uid, &ranges)
    {
        return Ok(());
    }
    let what = "mapping this user to root of a user namespace";
    let write = |file: &str, text: String| {
        fs::write(format!("/proc/{holder}/{file}"), text).map_err(EnterError::io(what))
    };
    write("uid_map", format!("0 {uid} 1\n"))?;
    // Without this a group that keeps somebody out of a file could be left.
    write("setgroups", "deny\n".to_owned())?;
    write("gid_map", format!("0 {} 1\n", Gid::effective()))
}

fn map_ranges(holder: u32, uid: Uid, ranges: &Ranges) -> bool {
    let run = |program: &Path, own: u32, range: Range| {
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
