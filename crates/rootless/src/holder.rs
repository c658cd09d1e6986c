//! Namespace holder: the process that keeps namespaces and their uplink open while they are used.
//! It exists in rootless mode only, in which an unprivileged user is root of a user namespace. The
//! *router* is the network namespace to which the sandboxes are connected. The *uplink* is a
//! program (`pasta` or `slirp4netns`) that connects the router to the network of the host.
//!
//! The holder is a process of the `jiffy` program. It runs while descriptor 3, a stream to its
//! parent process, is open, or a client is connected to the socket at descriptor 4. A persistent
//! holder also runs while other processes are in its namespaces.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest. A *claim* is a file by which a daemon reserves a range of
//! addresses for its slots.

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

/// First argument of `jiffy` that selects the role of a holder.
pub const HOLDER_ARGUMENT: &str = "--as-namespace-holder";
/// Descriptor of the stream to the parent process.
pub(crate) const CONTROL_FD: RawFd = 3;
/// Descriptor of the socket for later clients of persistent holders.
pub(crate) const LISTENER_FD: RawFd = 4;
/// The holder sends this byte after it has created its user namespace. The parent sends it after it
/// has written the id maps of the namespace.
pub(crate) const STEP_BYTE: u8 = b'.';
/// Prefix of the reason for a missing uplink, in the argument for the path of the uplink.
pub(crate) const NO_UPLINK_PREFIX: &str = "-";
/// Delay before a terminated uplink is restarted.
const UPLINK_RESTART_DELAY: Duration = Duration::from_secs(1);
/// Interval of checks in milliseconds if no descriptor signals the end of a process.
const EXIT_POLL_MS: libc::c_int = 20;
/// Maximum number of bytes that are read from the error output of an uplink.
const MAX_ERROR_BYTES: u64 = 4096;

/// Report of a ready holder.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct HolderReport {
    /// Process id of the holder.
    pub pid: u32,
    /// Directory with claims and network namespaces.
    pub directory: PathBuf,
    /// Name of the uplink, or the reason for its absence.
    pub uplink: Result<String, String>,
}

/// Arguments of a holder.
#[derive(Clone)]
struct HolderArguments {
    directory: PathBuf,
    uplink: Result<Uplink, String>,
    /// Paths of the socket, and of the lock that clients hold while they connect.
    persistent: Option<(PathBuf, PathBuf)>,
}

impl HolderArguments {
    /// Parses the arguments after [`HOLDER_ARGUMENT`].
    fn read(mut arguments: impl Iterator<Item = OsString>) -> Option<Self> {
        let directory = arguments.next()?.into();
        let uplink = arguments.next()?;
        let missing_reason = uplink
            .to_str()
            .and_then(|argument| argument.strip_prefix(NO_UPLINK_PREFIX));
        let persistent = arguments.next().zip(arguments.next());
        Some(Self {
            directory,
            uplink: match missing_reason {
                Some(reason) => Err(reason.to_owned()),
                None => Ok(Uplink::at(Path::new(&uplink))),
            },
            persistent: persistent.map(|(socket, lock)| (socket.into(), lock.into())),
        })
    }
}

/// Main function of a holder. Returns when the namespaces are unused.
pub fn main() -> ExitCode {
    let Some(arguments) = HolderArguments::read(std::env::args_os().skip(2)) else {
        return ExitCode::FAILURE;
    };
    // SAFETY: the parent process opened this descriptor, and no other object in this process owns
    // it.
    let mut control = UnixStream::from(unsafe { OwnedFd::from_raw_fd(CONTROL_FD) });
    match hold_namespaces(&arguments, &mut control) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // The parent reads the error instead of the report.
            let _ = writeln!(control, "{e}");
            ExitCode::FAILURE
        }
    }
}

/// Returns a function that adds `message` to an error.
fn context<E: Into<io::Error>>(message: &'static str) -> impl Fn(E) -> io::Error {
    move |e| io::Error::other(format!("{message}: {}", e.into()))
}

/// Creates the namespaces, reports them to the parent process, and waits until they are unused.
///
/// The parent writes the id maps between two step bytes: only a process outside of the namespace
/// may map further ids.
fn hold_namespaces(arguments: &HolderArguments, control: &mut UnixStream) -> io::Result<()> {
    // The holder must not receive signals of the terminal.
    let _ = setsid();
    // The uplink must not inherit the stream: it would keep the connection open.
    close_on_exec(CONTROL_FD)?;
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)
        .map_err(context("cannot create a user namespace"))?;
    control.write_all(&[STEP_BYTE])?;
    let mut step = [0];
    // Wait for the id maps: without them this process is not root.
    control.read_exact(&mut step)?;
    setresgid(Gid::from_raw(0), Gid::from_raw(0), Gid::from_raw(0))
        .map_err(context("cannot become root of the user namespace"))?;
    setresuid(Uid::from_raw(0), Uid::from_raw(0), Uid::from_raw(0))
        .map_err(context("cannot become root of the user namespace"))?;
    mount_directory(&arguments.directory)?;
    // The uplink thread remains in the network namespace of the host, and this thread leaves it.
    let uplink_thread = UplinkThread::start()?;
    unshare(CloneFlags::CLONE_NEWNET).map_err(context("cannot create a network namespace"))?;
    loopback_up().map_err(context("cannot enable the loopback device"))?;
    bind_router(&arguments.directory)?;
    // The waiting thread retains its capabilities, so that it can inspect other processes. This
    // thread drops its capabilities.
    let (report_sender, report_receiver) = mpsc::channel::<String>();
    let (holder_arguments, parent_stream) = (arguments.clone(), control.try_clone()?);
    let waiter = thread::Builder::new()
        .name("waiter".to_owned())
        .spawn(move || match report_receiver.recv() {
            Ok(report) => wait_until_unused(&holder_arguments, parent_stream, report.as_bytes()),
            Err(_) => Ok(()),
        })?;
    // An uplink has few capabilities. The kernel only permits it to open the namespaces of a
    // process that has no other capabilities (ptrace(2), access mode checking).
    set_capabilities(CapabilitySet::empty()).map_err(context("cannot drop capabilities"))?;
    let uplink = match &arguments.uplink {
        Ok(uplink) => uplink_thread.start_uplink(uplink),
        Err(reason) => Err(reason.clone()),
    };
    let report = HolderReport {
        pid: std::process::id(),
        directory: arguments.directory.clone(),
        uplink,
    };
    let mut line = serde_json::to_string(&report)?;
    line.push('\n');
    control.write_all(line.as_bytes())?;
    // If this thread fails earlier, the channel is closed and the waiting thread exits.
    let _ = report_sender.send(line);
    match waiter.join() {
        Ok(result) => result,
        Err(_) => Err(io::Error::other("the waiting thread panicked")),
    }
}

/// Marks an inherited descriptor, so that child processes do not inherit it.
fn close_on_exec(fd: RawFd) -> io::Result<()> {
    // SAFETY: no pointers.
    match unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Mounts a tmpfs that is visible in these namespaces only.
fn mount_directory(directory: &Path) -> io::Result<()> {
    let message = "cannot mount the directory of network namespaces";
    let none = None::<&str>;
    // Mounts of the host propagate to this namespace, but not back.
    let slave = MsFlags::MS_REC | MsFlags::MS_SLAVE;
    mount(none, "/", none, slave, none).map_err(context(message))?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(context(message))?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let options = Some("mode=0700,size=1m");
    mount(Some("jiffy-net"), directory, Some("tmpfs"), flags, options).map_err(context(message))
}

/// Bind mounts the network namespace of this thread as the router.
fn bind_router(directory: &Path) -> io::Result<()> {
    let path = directory.join(ROUTER_NAME);
    File::create_new(&path).map_err(context("cannot bind the router namespace"))?;
    let none = None::<&str>;
    let own = Some("/proc/thread-self/ns/net");
    mount(own, &path, none, MsFlags::MS_BIND, none)
        .map_err(context("cannot bind the router namespace"))
}

/// Enables the loopback device of this thread's network namespace.
fn loopback_up() -> io::Result<()> {
    nix::ioctl_write_ptr_bad!(set_flags, libc::SIOCSIFFLAGS, libc::ifreq);
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    // SAFETY: an all-zero `ifreq` is valid, because it consists of integers and a union of
    // integers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(*b"lo") {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads an `ifreq` from the pointer.
    unsafe { set_flags(socket.as_raw_fd(), &raw const request) }?;
    Ok(())
}

/// Thread in the network namespace of the host that starts the uplink and restarts it after its
/// exit.
struct UplinkThread {
    requests: Sender<(Uplink, PathBuf)>,
    /// Error message of the last uplink that exited.
    last_error: Arc<Mutex<Option<String>>>,
}

impl UplinkThread {
    /// Starts the thread that starts and monitors the uplink.
    fn start() -> io::Result<Self> {
        let (requests, receiver) = mpsc::channel();
        let last_error = Arc::default();
        let shared_error = Arc::clone(&last_error);
        thread::Builder::new()
            .name("uplink".to_owned())
            .spawn(move || run_uplink(&receiver, &shared_error))?;
        Ok(Self {
            requests,
            last_error,
        })
    }

    /// Starts an uplink for the network namespace of this thread. Returns the name of the uplink.
    fn start_uplink(&self, uplink: &Uplink) -> Result<String, String> {
        let namespace = PathBuf::from(format!("/proc/{}/ns/net", std::process::id()));
        let last_error = || self.last_error.lock().clone();
        self.requests
            .send((uplink.clone(), namespace))
            .map_err(|e| e.to_string())?;
        uplink.ready(&last_error)?;
        Ok(uplink.name().to_owned())
    }
}

/// Runs an uplink, and restarts it after its exit. The kernel kills the uplink when this thread
/// exits, which is when the holder exits.
fn run_uplink(receiver: &Receiver<(Uplink, PathBuf)>, last_error: &Mutex<Option<String>>) {
    let Ok((uplink, namespace)) = receiver.recv() else {
        return;
    };
    loop {
        let error = match uplink.start(&namespace) {
            Ok(child) => exit_message(child),
            Err(e) => e.to_string(),
        };
        *last_error.lock() = Some(error);
        thread::sleep(UPLINK_RESTART_DELAY);
    }
}

/// Waits for the exit of an uplink. Returns the last line of its error output.
fn exit_message(mut child: Child) -> String {
    let mut output = Vec::new();
    if let Some(mut stderr) = child.stderr.take() {
        let _ = (&mut stderr).take(MAX_ERROR_BYTES).read_to_end(&mut output);
        // The remaining output is discarded, so that the uplink never blocks on a full pipe.
        let _ = io::copy(&mut stderr, &mut io::sink());
    }
    let status = child.wait().map(|status| status.to_string());
    let output = String::from_utf8_lossy(&output);
    match output.lines().rev().find(|line| !line.trim().is_empty()) {
        Some(line) => line.trim().to_owned(),
        None => status.unwrap_or_else(|e| e.to_string()),
    }
}

/// Waits until neither the parent process, nor a client, nor another process uses the namespaces.
fn wait_until_unused(
    arguments: &HolderArguments,
    parent: UnixStream,
    report: &[u8],
) -> io::Result<()> {
    let listener = match arguments.persistent {
        Some(_) => {
            close_on_exec(LISTENER_FD)?;
            // SAFETY: the parent process opened this descriptor, and no other object in this
            // process owns it.
            let listener = UnixListener::from(unsafe { OwnedFd::from_raw_fd(LISTENER_FD) });
            // A client may disconnect between poll and accept.
            listener.set_nonblocking(true)?;
            Some(listener)
        }
        None => None,
    };
    let mut clients = vec![parent];
    loop {
        // Without clients, only sandboxes that outlive their daemon use the namespaces.
        let mut others = Vec::new();
        if clients.is_empty() {
            if arguments.persistent.is_some() {
                // Reads all of /proc, so it is called only when the last client has disconnected.
                others = namespace_processes::others();
            }
            if others.is_empty() && remove_socket_if_unused(arguments, listener.as_ref())? {
                return Ok(());
            }
        }
        // Each pidfd becomes readable when its process exits. Without pidfds (before Linux 5.3),
        // the processes are checked at intervals.
        let pidfds: Vec<OwnedFd> = others.iter().filter_map(|&pid| open_pidfd(pid)).collect();
        let timeout_ms = match (clients.is_empty(), pidfds.is_empty()) {
            (false, _) | (true, false) => -1,
            (true, true) => EXIT_POLL_MS,
        };
        let mut fds: Vec<libc::pollfd> = clients
            .iter()
            .map(AsRawFd::as_raw_fd)
            .chain(listener.as_ref().map(AsRawFd::as_raw_fd))
            .chain(pidfds.iter().map(AsRawFd::as_raw_fd))
            .map(|fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        let count = libc::nfds_t::try_from(fds.len()).unwrap_or(0);
        // SAFETY: `fds` has `count` elements and outlives the call.
        if unsafe { libc::poll(fds.as_mut_ptr(), count, timeout_ms) } < 0
            && Errno::last() != Errno::EINTR
        {
            return Err(io::Error::last_os_error());
        }
        // Clients send no data, so that a readable stream is closed.
        let mut ready = fds.iter().map(|fd| fd.revents != 0);
        clients.retain(|_| !ready.next().unwrap_or(false));
        if let Some(listener) = &listener {
            while let Ok((mut stream, _)) = listener.accept() {
                if stream.write_all(report).is_ok() {
                    clients.push(stream);
                }
            }
        }
    }
}

/// Opens a pidfd, which becomes readable when the process exits.
fn open_pidfd(pid: u32) -> Option<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Removes the socket unless a client is connecting. Returns whether it was removed. Clients hold
/// the lock while they connect, so that none connects to a socket without a holder.
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
    // SAFETY: the pointer refers to one pollfd, and the call does not block.
    if unsafe { libc::poll(&raw mut fd, 1, 0) } > 0 {
        return Ok(false);
    }
    let _ = fs::remove_file(socket);
    Ok(true)
}
