//! The process that keeps namespaces and their way out while somebody needs them.
//!
//! It is `jiffy` started once more. Descriptor 3 is a stream to the process that asked for it: as
//! long as that is open, and for as long as anybody is connected to the socket at descriptor 4, it
//! stays. Of a lasting one the namespaces also stay while other processes are in them.

use crate::router::ROUTER;
use crate::uplink::Uplink;
use crate::users;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Gid, Uid, setresgid, setresuid, setsid};
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
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Argument by which `jiffy` knows that it is a holder.
pub const ARGUMENT: &str = "hold-namespaces";
/// Stream to whom the namespaces are made for.
pub(crate) const CONTROL: RawFd = 3;
/// Socket that others come to; only of a lasting holder.
pub(crate) const LISTENER: RawFd = 4;
/// Word of the holder: it is in its user namespace, and of who asked: that is mapped.
pub(crate) const STEP: u8 = b'.';
/// Begins the reason why there is no way out, in the place of its path.
pub(crate) const NO_UPLINK: &str = "-";
/// Time between two starts of a way out that ended.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// Milliseconds between two looks where nothing tells of an end.
const LOOK: libc::c_int = 20;
/// Most of what a way out wrote that is repeated.
const MAX_WORDS: u64 = 4096;

/// What a holder says when all is made.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Process of the holder.
    pub pid: u32,
    /// Directory of claims and names.
    pub directory: PathBuf,
    /// Name of the way out, or why there is none.
    pub uplink: Result<String, String>,
}

/// A holder's arguments.
#[derive(Clone)]
struct Orders {
    directory: PathBuf,
    uplink: Result<Uplink, String>,
    /// Path of the socket, and of the lock that is held while somebody looks for it.
    lasting: Option<(PathBuf, PathBuf)>,
}

impl Orders {
    fn read(mut words: impl Iterator<Item = OsString>) -> Option<Self> {
        let directory = words.next()?.into();
        let uplink = words.next()?;
        let refused = uplink
            .to_str()
            .and_then(|word| word.strip_prefix(NO_UPLINK));
        let lasting = words.next().zip(words.next());
        Some(Self {
            directory,
            uplink: match refused {
                Some(why) => Err(why.to_owned()),
                None => Ok(Uplink::at(Path::new(&uplink))),
            },
            lasting: lasting.map(|(socket, lock)| (socket.into(), lock.into())),
        })
    }
}

/// Holds namespaces until nobody needs them.
pub fn main() -> ExitCode {
    let Some(orders) = Orders::read(std::env::args_os().skip(2)) else {
        return ExitCode::FAILURE;
    };
    // SAFETY: the starter put the stream here, and nothing else in this process owns it.
    let mut control = UnixStream::from(unsafe { OwnedFd::from_raw_fd(CONTROL) });
    match hold(&orders, &mut control) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // The other end reads it in the place of a report.
            let _ = writeln!(control, "{e}");
            ExitCode::FAILURE
        }
    }
}

fn failed<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> io::Error {
    move |e| io::Error::other(format!("{what}: {}", e.into()))
}

fn hold(orders: &Orders, control: &mut UnixStream) -> io::Result<()> {
    // What a terminal sends to its commands is not for it.
    let _ = setsid();
    close_on_exec(CONTROL)?;
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)
        .map_err(failed("making a user namespace"))?;
    control.write_all(&[STEP])?;
    let mut step = [0];
    control.read_exact(&mut step)?;
    setresgid(Gid::from_raw(0), Gid::from_raw(0), Gid::from_raw(0))
        .map_err(failed("becoming root of a user namespace"))?;
    setresuid(Uid::from_raw(0), Uid::from_raw(0), Uid::from_raw(0))
        .map_err(failed("becoming root of a user namespace"))?;
    make_directory(&orders.directory)?;
    // It stays in the host's network; this thread leaves.
    let outside = Outside::start()?;
    unshare(CloneFlags::CLONE_NEWNET).map_err(failed("making a network namespace"))?;
    loopback_up().map_err(failed("switching the loopback device on"))?;
    name_router(&orders.directory)?;
    // It keeps the rights to look at other processes, which this thread has to give up.
    let (begin, begun) = mpsc::channel::<String>();
    let (told, keeper) = (orders.clone(), control.try_clone()?);
    let waiting = thread::Builder::new().name("keeper".to_owned());
    let waiting = waiting.spawn(move || match begun.recv() {
        Ok(report) => wait(&told, keeper, report.as_bytes()),
        Err(_) => Ok(()),
    })?;
    leave_capabilities().map_err(failed("giving up capabilities"))?;
    let uplink = match &orders.uplink {
        Ok(uplink) => outside.lead_out(uplink),
        Err(why) => Err(why.clone()),
    };
    let report = Report {
        pid: std::process::id(),
        directory: orders.directory.clone(),
        uplink,
    };
    let mut words = serde_json::to_string(&report)?;
    words.push('\n');
    control.write_all(words.as_bytes())?;
    // Not sent where this thread failed: then the other ends with it.
    let _ = begin.send(words);
    match waiting.join() {
        Ok(waited) => waited,
        Err(_) => Err(io::Error::other("a thread died")),
    }
}

/// Takes all capabilities from this thread. A way out has few, and the kernel lets it open the
/// namespaces of a process that has no more than it (ptrace(2), access mode checking).
fn leave_capabilities() -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    let header = Header {
        // `_LINUX_CAPABILITY_VERSION_3` (capset(2)).
        version: 0x2008_0522,
        pid: 0,
    };
    let none = [0_u32; 6];
    // SAFETY: version 3 reads a header and two sets of data, of three words each.
    match unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn close_on_exec(fd: RawFd) -> io::Result<()> {
    // SAFETY: no pointers.
    match unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A directory in memory that is seen in these namespaces only.
fn make_directory(directory: &Path) -> io::Result<()> {
    let what = "mounting a directory for names of networks";
    let none = None::<&str>;
    // Mounts of the host go on to be seen here, and none of ours there.
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

/// Gives the network namespace of this thread its name.
fn name_router(directory: &Path) -> io::Result<()> {
    let path = directory.join(ROUTER);
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

/// A thread in the host's network, which starts the way out and starts it again if it ends.
struct Outside {
    orders: Sender<(Uplink, PathBuf)>,
    /// Why the way out that was started last is gone.
    ended: Arc<Mutex<Option<String>>>,
}

impl Outside {
    fn start() -> io::Result<Self> {
        let (orders, inbox) = mpsc::channel();
        let ended = Arc::default();
        let told = Arc::clone(&ended);
        thread::Builder::new()
            .name("uplink".to_owned())
            .spawn(move || run(&inbox, &told))?;
        Ok(Self { orders, ended })
    }

    /// Leads this thread's network namespace out; the name of what does.
    fn lead_out(&self, uplink: &Uplink) -> Result<String, String> {
        let namespace = PathBuf::from(format!("/proc/{}/ns/net", std::process::id()));
        let ended = || {
            let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
            ended.clone()
        };
        let sent = self.orders.send((uplink.clone(), namespace));
        sent.map_err(|e| e.to_string())?;
        uplink.ready(&ended)?;
        Ok(uplink.name().to_owned())
    }
}

/// Keeps a way out running. Its thread must not end: the way out ends with it.
fn run(inbox: &Receiver<(Uplink, PathBuf)>, ended: &Mutex<Option<String>>) {
    let Ok((uplink, namespace)) = inbox.recv() else {
        return;
    };
    loop {
        let why = match uplink.start(&namespace) {
            Ok(child) => last_words(child),
            Err(e) => e.to_string(),
        };
        *ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
        thread::sleep(RESTART_PAUSE);
    }
}

/// Waits for the end of a way out; what it said.
fn last_words(mut child: Child) -> String {
    let mut said = Vec::new();
    if let Some(mut stderr) = child.stderr.take() {
        let _ = (&mut stderr).take(MAX_WORDS).read_to_end(&mut said);
        // It must not wait for a reader.
        let _ = io::copy(&mut stderr, &mut io::sink());
    }
    let status = child.wait().map(|status| status.to_string());
    let said = String::from_utf8_lossy(&said);
    match said.lines().rev().find(|line| !line.trim().is_empty()) {
        Some(line) => line.trim().to_owned(),
        None => status.unwrap_or_else(|e| e.to_string()),
    }
}

/// Returns when nobody needs the namespaces any more.
fn wait(orders: &Orders, control: UnixStream, report: &[u8]) -> io::Result<()> {
    let listener = match orders.lasting {
        Some(_) => {
            close_on_exec(LISTENER)?;
            // SAFETY: the starter put the socket here, and nothing else in this process owns it.
            let listener = UnixListener::from(unsafe { OwnedFd::from_raw_fd(LISTENER) });
            listener.set_nonblocking(true)?;
            Some(listener)
        }
        None => None,
    };
    let mut keepers = vec![control];
    loop {
        // Nobody is connected: what is left are sandboxes that run on.
        let mut others = Vec::new();
        if keepers.is_empty() {
            if orders.lasting.is_some() {
                others = users::others();
            }
            if others.is_empty() && end(orders, listener.as_ref())? {
                return Ok(());
            }
        }
        let watched: Vec<OwnedFd> = others.iter().filter_map(|&pid| watch(pid)).collect();
        let waits = match (keepers.is_empty(), watched.is_empty()) {
            (false, _) | (true, false) => -1,
            (true, true) => LOOK,
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
        // Nobody says anything: what can be read is the end.
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

/// Descriptor that tells of the end of a process.
fn watch(pid: u32) -> Option<OwnedFd> {
    // SAFETY: no pointers; what it returns is a new descriptor that is ours.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0)?;
        Some(OwnedFd::from_raw_fd(fd))
    }
}

/// Lets no further process find the socket, unless one is just looking for it or has come.
fn end(orders: &Orders, listener: Option<&UnixListener>) -> io::Result<bool> {
    let Some((socket, lock)) = &orders.lasting else {
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
