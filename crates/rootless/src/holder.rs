//! Holder: the process that keeps namespaces and their uplink while they are in use.
//!
//! It is another process of the `jiffy` program. It runs as long as descriptor 3, a stream to the
//! process that started it, is open, or a client is connected to the socket at descriptor 4. A
//! persistent holder also runs while other processes are in its namespaces.

use crate::namespace_processes;
use crate::router::ROUTER_NAME;
use crate::uplink::Uplink;
use jiffy_confinement::{CapabilitySet, set_capabilities};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Gid, Uid, setresgid, setresuid, setsid};
use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

/// Argument that makes `jiffy` a holder.
pub const HOLDER_ARGUMENT: &str = "--as-namespace-holder";
/// Descriptor of the stream to the starter.
pub(crate) const CONTROL_FD: RawFd = 3;
/// Descriptor of the socket for later clients; persistent holders only.
pub(crate) const LISTENER_FD: RawFd = 4;
/// Message of the holder: it is in its user namespace. Answer of the starter: the namespace is
/// mapped.
pub(crate) const STEP_BYTE: u8 = b'.';
/// Prefix of the reason for a missing uplink, in place of its path.
pub(crate) const NO_UPLINK_PREFIX: &str = "-";
/// Time before an ended uplink is started again.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// Milliseconds between two checks when no descriptor signals an end.
const EXIT_POLL_MS: libc::c_int = 20;
/// Most bytes of an uplink's error output that are reported.
const MAX_ERROR_BYTES: u64 = 4096;

/// Report of a holder that is ready.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct HolderReport {
    /// Process id of the holder.
    pub pid: u32,
    /// Directory of slot claims and names of network namespaces.
    pub directory: PathBuf,
    /// Name of the uplink, or the reason that there is none.
    pub uplink: Result<String, String>,
}

/// Arguments of a holder.
#[derive(Clone)]
struct HolderArguments {
    directory: PathBuf,
    uplink: Result<Uplink, String>,
    /// Paths of the socket, and of the lock that is held while a client connects to it.
    persistent: Option<(PathBuf, PathBuf)>,
}

impl HolderArguments {
    fn read(mut words: impl Iterator<Item = OsString>) -> Option<Self> {
        let directory = words.next()?.into();
        let uplink = words.next()?;
        let refused = uplink
            .to_str()
            .and_then(|word| word.strip_prefix(NO_UPLINK_PREFIX));
        let persistent = words.next().zip(words.next());
        Some(Self {
            directory,
            uplink: match refused {
                Some(why) => Err(why.to_owned()),
                None => Ok(Uplink::at(Path::new(&uplink))),
            },
            persistent: persistent.map(|(socket, lock)| (socket.into(), lock.into())),
        })
    }
}

/// Main function of a holder: keeps namespaces until they are unused.
pub fn main() -> ExitCode {
    let Some(arguments) = HolderArguments::read(std::env::args_os().skip(2)) else {
        return ExitCode::FAILURE;
    };
    // SAFETY: the starter put the stream here, and nothing else in this process owns it.
    let mut control = UnixStream::from(unsafe { OwnedFd::from_raw_fd(CONTROL_FD) });
    match hold_namespaces(&arguments, &mut control) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // The starter reads it instead of a report.
            let _ = writeln!(control, "{e}");
            ExitCode::FAILURE
        }
    }
}

fn failed<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> io::Error {
    move |e| io::Error::other(format!("{what}: {}", e.into()))
}

fn hold_namespaces(arguments: &HolderArguments, control: &mut UnixStream) -> io::Result<()> {
    // A terminal's signals are not for the holder.
    let _ = setsid();
    close_on_exec(CONTROL_FD)?;
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)
        .map_err(failed("making a user namespace"))?;
    control.write_all(&[STEP_BYTE])?;
    let mut step = [0];
    control.read_exact(&mut step)?;
    setresgid(Gid::from_raw(0), Gid::from_raw(0), Gid::from_raw(0))
        .map_err(failed("becoming root of a user namespace"))?;
    setresuid(Uid::from_raw(0), Uid::from_raw(0), Uid::from_raw(0))
        .map_err(failed("becoming root of a user namespace"))?;
    make_directory(&arguments.directory)?;
    // The uplink thread stays in the host's network; this one leaves.
    let uplink_thread = UplinkThread::start()?;
    unshare(CloneFlags::CLONE_NEWNET).map_err(failed("making a network namespace"))?;
    loopback_up().map_err(failed("switching the loopback device on"))?;
    name_router(&arguments.directory)?;
    // This thread keeps the capabilities to inspect other processes; the main thread drops its own.
    let (begin, begun) = mpsc::channel::<String>();
    let (held, keeper) = (arguments.clone(), control.try_clone()?);
    let waiting = thread::Builder::new().name("keeper".to_owned());
    let waiting = waiting.spawn(move || match begun.recv() {
        Ok(report) => wait_until_unused(&held, keeper, report.as_bytes()),
        Err(_) => Ok(()),
    })?;
    // An uplink has few capabilities, and the kernel lets it open the namespaces only of a process
    // that has no more (ptrace(2), access mode checking).
    set_capabilities(CapabilitySet::empty()).map_err(failed("giving up capabilities"))?;
    let uplink = match &arguments.uplink {
        Ok(uplink) => uplink_thread.start_uplink(uplink),
        Err(why) => Err(why.clone()),
    };
    let report = HolderReport {
        pid: std::process::id(),
        directory: arguments.directory.clone(),
        uplink,
    };
    let mut words = serde_json::to_string(&report)?;
    words.push('\n');
    control.write_all(words.as_bytes())?;
    // If this thread fails before, the channel closes and the other thread ends.
    let _ = begin.send(words);
    match waiting.join() {
        Ok(waited) => waited,
        Err(_) => Err(io::Error::other("a thread died")),
    }
}

fn close_on_exec(fd: RawFd) -> io::Result<()> {
    // SAFETY: no pointers.
    match unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Mounts a tmpfs directory that is visible in these namespaces only.
fn make_directory(directory: &Path) -> io::Result<()> {
    let what = "mounting a directory for names of networks";
    let none = None::<&str>;
    // Mounts of the host propagate here, and none back.
    let slave = MsFlags::MS_REC | MsFlags::MS_SLAVE;
    mount(none, "/", none, slave, none).map_err(failed(what))?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(failed(what))?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let options = Some("mode=0700,size=1m");
    mount(Some("jiffy-net"), directory, Some("tmpfs"), flags, options).map_err(failed(what))
}

/// Binds the network namespace of this thread to its name.
fn name_router(directory: &Path) -> io::Result<()> {
    let path = directory.join(ROUTER_NAME);
    File::create_new(&path).map_err(failed("naming the router"))?;
    let none = None::<&str>;
    let own = Some("/proc/thread-self/ns/net");
    mount(own, &path, none, MsFlags::MS_BIND, none).map_err(failed("naming the router"))
}

fn loopback_up() -> io::Result<()> {
    nix::ioctl_write_ptr_bad!(set_flags, libc::SIOCSIFFLAGS, libc::ifreq);
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    // SAFETY: an all-zero `ifreq` is valid: it is plain integers and a union of them.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(*b"lo") {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads one `ifreq`, which `request` is.
    unsafe { set_flags(socket.as_raw_fd(), &raw const request) }?;
    Ok(())
}

/// Thread in the host's network that starts the uplink, and restarts it when it ends.
struct UplinkThread {
    requests: Sender<(Uplink, PathBuf)>,
    /// Reason that the last uplink ended.
    ended: Arc<Mutex<Option<String>>>,
}

impl UplinkThread {
    fn start() -> io::Result<Self> {
        let (requests, inbox) = mpsc::channel();
        let ended = Arc::default();
        let shared_end = Arc::clone(&ended);
        thread::Builder::new()
            .name("uplink".to_owned())
            .spawn(move || keep_running(&inbox, &shared_end))?;
        Ok(Self { requests, ended })
    }

    /// Starts an uplink for this thread's network namespace; returns its name.
    fn start_uplink(&self, uplink: &Uplink) -> Result<String, String> {
        let namespace = PathBuf::from(format!("/proc/{}/ns/net", std::process::id()));
        let ended = || {
            let ended = self.ended.lock();
            ended.clone()
        };
        let sent = self.requests.send((uplink.clone(), namespace));
        sent.map_err(|e| e.to_string())?;
        uplink.ready(&ended)?;
        Ok(uplink.name().to_owned())
    }
}

/// Keeps an uplink running. The thread must not end: the uplink ends with it.
fn keep_running(inbox: &Receiver<(Uplink, PathBuf)>, ended: &Mutex<Option<String>>) {
    let Ok((uplink, namespace)) = inbox.recv() else {
        return;
    };
    loop {
        let why = match uplink.start(&namespace) {
            Ok(child) => exit_message(child),
            Err(e) => e.to_string(),
        };
        *ended.lock() = Some(why);
        thread::sleep(RESTART_PAUSE);
    }
}

/// Waits for the end of an uplink; returns its last error output.
fn exit_message(mut child: Child) -> String {
    let mut said = Vec::new();
    if let Some(mut stderr) = child.stderr.take() {
        let _ = (&mut stderr).take(MAX_ERROR_BYTES).read_to_end(&mut said);
        // Drained, so that the uplink never blocks on a full pipe.
        let _ = io::copy(&mut stderr, &mut io::sink());
    }
    let status = child.wait().map(|status| status.to_string());
    let said = String::from_utf8_lossy(&said);
    match said.lines().rev().find(|line| !line.trim().is_empty()) {
        Some(line) => line.trim().to_owned(),
        None => status.unwrap_or_else(|e| e.to_string()),
    }
}

/// Waits until the namespaces are unused.
fn wait_until_unused(
    arguments: &HolderArguments,
    control: UnixStream,
    report: &[u8],
) -> io::Result<()> {
    let listener = match arguments.persistent {
        Some(_) => {
            close_on_exec(LISTENER_FD)?;
            // SAFETY: the starter put the socket here, and nothing else in this process owns it.
            let listener = UnixListener::from(unsafe { OwnedFd::from_raw_fd(LISTENER_FD) });
            listener.set_nonblocking(true)?;
            Some(listener)
        }
        None => None,
    };
    let mut keepers = vec![control];
    loop {
        // Without clients the only users are sandboxes that run on.
        let mut others = Vec::new();
        if keepers.is_empty() {
            if arguments.persistent.is_some() {
                others = namespace_processes::others();
            }
            if others.is_empty() && remove_socket_if_unused(arguments, listener.as_ref())? {
                return Ok(());
            }
        }
        let watched: Vec<OwnedFd> = others.iter().filter_map(|&pid| watch(pid)).collect();
        let waits = match (keepers.is_empty(), watched.is_empty()) {
            (false, _) | (true, false) => -1,
            (true, true) => EXIT_POLL_MS,
        };
        let mut fds: Vec<libc::pollfd> = keepers
            .iter()
            .map(AsRawFd::as_raw_fd)
            .chain(listener.as_ref().map(AsRawFd::as_raw_fd))
            .chain(watched.iter().map(AsRawFd::as_raw_fd))
            .map(|fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        let count = libc::nfds_t::try_from(fds.len()).unwrap_or(0);
        // SAFETY: `fds` has so many elements and lives through the call.
        if unsafe { libc::poll(fds.as_mut_ptr(), count, waits) } < 0
            && Errno::last() != Errno::EINTR
        {
            return Err(io::Error::last_os_error());
        }
        // Clients send nothing, so a readable stream is at its end.
        let mut ready = fds.iter().map(|fd| fd.revents != 0);
        keepers.retain(|_| !ready.next().unwrap_or(false));
        if let Some(listener) = &listener {
            while let Ok((mut stream, _)) = listener.accept() {
                if stream.write_all(report).is_ok() {
                    keepers.push(stream);
                }
            }
        }
    }
}

/// Opens a pidfd, which is readable when the process has ended.
fn watch(pid: u32) -> Option<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Removes the socket unless a client is just connecting; returns true if removed.
fn remove_socket_if_unused(
    arguments: &HolderArguments,
    listener: Option<&UnixListener>,
) -> io::Result<bool> {
    let Some((socket, lock)) = &arguments.persistent else {
        return Ok(true);
    };
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(lock)?;
    let Ok(_lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else {
        return Ok(false);
    };
    let mut fd = libc::pollfd {
        fd: listener.map_or(-1, AsRawFd::as_raw_fd),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one pollfd, and no time to wait.
    if unsafe { libc::poll(&raw mut fd, 1, 0) } > 0 {
        return Ok(false);
    }
    let _ = fs::remove_file(socket);
    Ok(true)
}
