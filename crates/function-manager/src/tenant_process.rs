//! [`TenantProcess`]: the daemon's side of a tenant's process `jiffy-functions serve`, which
//! executes all functions of one tenant. A *tenant* is an API key, or the *operator*: the owner of
//! the host.
//!
//! The daemon starts the process, or adopts the process of an earlier daemon. It sends control
//! messages over one socket, one at a time, and requests of clients over another socket.

use crate::egress::{AllowList, EgressBroker, EgressSettings};
use crate::process_record::ProcessRecord;
use crate::request_body::BoxError;
use command_fds::{CommandFdExt, FdMapping};
use jiffy_engine_api::{ChildMessages, ProcessInstance};
use jiffy_proto::channel::{Channel, ChannelError};
use jiffy_proto::function::{
    CONTROL_FD, ControlRequest, ControlResponse, LISTENER_FD, LoadSettings, SlotReset,
    TenantLimits, World,
};
use jiffy_proto::internal::{API_HOST, InternalOrigin};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, setsockopt,
    socket, sockopt,
};
use nix::sys::time::TimeVal;
use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Timeout for the start of a process, and for its response to a request, in seconds.
const ANSWER_TIMEOUT_S: i64 = 30;
/// Timeout for the exit of a killed process, in milliseconds.
const END_TIMEOUT_MS: u16 = 5000;
/// Name of the socket for requests in a tenant's directory.
pub const HTTP_SOCKET: &str = "http.sock";
/// Name of the control socket in a tenant's directory.
const CONTROL_SOCKET: &str = "control.sock";

/// Error of a tenant's process or of a compiler.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The process cannot be started.
    #[error("starting jiffy-functions: {0}")]
    Start(#[from] io::Error),
    /// The process does not answer.
    #[error("the process of functions does not answer: {0}")]
    Control(#[from] ChannelError),
    /// The process rejected a request.
    #[error("{0}")]
    Refused(String),
    /// The module was not compiled. The module's author receives the message.
    #[error("{0}")]
    Compile(String),
    /// The quota of the module's owner is too small for the machine code.
    #[error("{0}")]
    QuotaExceeded(BoxError),
}

/// Settings for starting a process.
#[derive(Debug, Clone, Copy)]
pub struct ProcessSettings<'a> {
    /// Program `jiffy-functions`.
    pub program: &'a Path,
    /// Owner of the functions.
    pub owner: &'a str,
    /// Limits of the process.
    pub limits: TenantLimits,
    /// True if the process is confined. False in tests on hosts without user namespaces.
    pub jailed: bool,
    /// Time without a daemon after which the process exits.
    pub grace: Duration,
}

/// Process of a tenant. Dropping this value kills the process, unless it was detached for the next
/// daemon. Calls block until the process has responded; requests are executed one at a time.
#[derive(Debug)]
pub struct TenantProcess {
    record: ProcessRecord,
    pidfd: OwnedFd,
    /// `None` if an earlier daemon started the process.
    child: Option<Child>,
    directory: PathBuf,
    control: Mutex<Channel>,
    engine: String,
    is_detached: AtomicBool,
    egress_settings: EgressSettings,
    /// `None` until a function may reach a host.
    egress: Mutex<Option<EgressBroker>>,
}

impl TenantProcess {
    /// Starts a process with its sockets in `directory`, and waits until the process is ready.
    pub fn start(settings: &ProcessSettings<'_>, directory: &Path) -> Result<Self, ProcessError> {
        remove_files(directory);
        let http = UnixListener::bind(directory.join(HTTP_SOCKET))?;
        let control = listen_for_control(directory)?;
        let child = spawn(settings, http.into(), control)?;
        let guard = UnreadyChild(Some(child));
        let pid = guard.0.as_ref().map_or(0, Child::id);
        let (instance, pidfd) = (ProcessInstance::of(pid)?, open_pidfd(pid)?);
        let reset = settings.limits.reset;
        let record = ProcessRecord { instance, reset };
        record.write(directory)?;
        let (control, engine) = connect_control(directory)?;
        Ok(Self {
            record,
            pidfd,
            child: guard.into_child(),
            directory: directory.to_owned(),
            control: Mutex::new(control),
            engine,
            is_detached: AtomicBool::new(false),
            egress_settings: EgressSettings::default(),
            egress: Mutex::default(),
        })
    }

    /// Adopts the process that an earlier daemon left in `directory`. Returns `None` if the process
    /// has exited or does not answer; such a process is killed, and its files are removed.
    #[must_use]
    pub fn adopt(directory: &Path) -> Option<Self> {
        let process = adopt(directory);
        if process.is_none() {
            remove_files(directory);
        }
        process
    }

    /// Returns the fingerprint of the WebAssembly engine (version and settings) in the process. A
    /// function whose machine code has another fingerprint must be compiled again.
    #[must_use]
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// Returns the process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.record.instance.pid
    }

    /// Returns how the process clears a slot, the memory of an instance, between two requests.
    #[must_use]
    pub fn reset(&self) -> SlotReset {
        self.record.reset
    }

    /// Returns a descriptor that becomes readable when the process exits.
    pub fn pidfd(&self) -> io::Result<OwnedFd> {
        self.pidfd.try_clone()
    }

    /// Returns whether the process has exited.
    #[must_use]
    pub fn has_exited(&self) -> bool {
        self.exits_within(PollTimeout::ZERO)
    }

    /// Waits for the exit of the process. Returns whether it has exited.
    fn exits_within(&self, timeout: PollTimeout) -> bool {
        let mut watched = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        // An error counts as an exit: a failed poll must not block a stop.
        poll(&mut watched, timeout) != Ok(0)
    }

    /// Kills the process, and waits until it has exited.
    pub fn kill_and_wait(&self) {
        self.kill();
        self.exits_within(PollTimeout::from(END_TIMEOUT_MS));
    }

    /// Detaches the process for the next daemon: dropping this value no longer kills the process.
    pub fn detach(&self) {
        self.is_detached.store(true, Ordering::Release);
    }

    /// Executes a control request. A removed function loses its allowed hosts.
    pub fn execute(&self, request: &ControlRequest) -> Result<ControlResponse, ProcessError> {
        let answer = self.send(request, None)?;
        if let ControlRequest::Remove { function } = request {
            self.set_allowed(function, AllowList::default())?;
        }
        Ok(answer)
    }

    /// Loads a compiled file. `digest` is the digest of the file in hexadecimal digits.
    pub fn load(
        &self,
        function: &str,
        file: &File,
        digest: &str,
        settings: impl Into<LoadSettings>,
    ) -> Result<World, ProcessError> {
        self.load_as(function, file, digest, settings.into(), None)
    }

    /// Like [`Self::load`], for a function that reaches the control plane as `origin`.
    pub fn load_as(
        &self,
        function: &str,
        file: &File,
        digest: &str,
        mut settings: LoadSettings,
        origin: Option<InternalOrigin>,
    ) -> Result<World, ProcessError> {
        let list = allow_list(&settings.allow)?;
        if origin.is_some() {
            // The process denies all connections of a function whose list is empty, without a
            // request to the broker. Therefore the list names the control plane as well.
            settings.allow.push(API_HOST.to_owned());
        }
        let list = list.with_origin(origin);
        let previous = self.allowed(function);
        // During the change, neither the previous version nor the next version is denied a host of
        // its own.
        self.set_allowed(function, previous.union(&list))?;
        let request = ControlRequest::Load {
            function: function.to_owned(),
            digest: digest.to_owned(),
            settings,
        };
        let loaded = match self.send(&request, Some(file.as_fd())) {
            Ok(ControlResponse::Loaded { world }) => Ok(world),
            Ok(other) => Err(unexpected(&other)),
            Err(error) => Err(error),
        };
        self.set_allowed(function, if loaded.is_ok() { list } else { previous })?;
        loaded
    }

    /// Passes the process a socket on which the daemon sends client connections. The process serves
    /// them itself.
    pub(crate) fn attach_direct(&self, socket: &OwnedFd) -> Result<(), ProcessError> {
        self.send(&ControlRequest::Direct, Some(socket.as_fd()))
            .map(drop)
    }

    /// Sets the egress settings of the operator. Must be called before a function is loaded.
    pub fn set_egress(&mut self, settings: EgressSettings) {
        self.egress_settings = settings;
    }

    /// Sets the hosts that a loaded function may reach. A function of an adopted process reaches no
    /// host before this call, because the egress broker ended with the former daemon.
    pub fn allow(&self, function: &str, hosts: &[String]) -> Result<(), ProcessError> {
        self.set_allowed(function, allow_list(hosts)?)
    }

    fn allowed(&self, function: &str) -> AllowList {
        let egress = self.egress.lock();
        let list = egress.as_ref().map(|broker| broker.allowed(function));
        list.unwrap_or_default()
    }

    /// Replaces the hosts of a function in the egress broker, which is started when the first
    /// function needs it.
    fn set_allowed(&self, function: &str, list: AllowList) -> Result<(), ProcessError> {
        // `is_off` does not apply to the control plane, because the sandbox key grants this access.
        let list = if self.egress_settings.is_off {
            list.without_hosts()
        } else {
            list
        };
        let mut egress = self.egress.lock();
        let broker = match &mut *egress {
            Some(broker) => broker,
            None if list.is_empty() => return Ok(()),
            none => {
                let (broker, socket) = EgressBroker::start(self.egress_settings.clone())?;
                // The broker is stored only after the process has accepted the socket. Without a
                // broker, the process denies all connections.
                self.send(&ControlRequest::Egress, Some(socket.as_fd()))?;
                none.insert(broker)
            }
        };
        if list.is_empty() {
            broker.remove(function)
        } else {
            broker.allow(function, list)
        }
        Ok(())
    }

    /// Sends a control request with an optional descriptor, and waits for the response.
    fn send(
        &self,
        request: &ControlRequest,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<ControlResponse, ProcessError> {
        let files: Vec<_> = file.into_iter().collect();
        // The lock is held until the response: the process handles one request at a time.
        let control = self.control.lock();
        let answered = control.send(request, &files).and_then(|()| control.recv());
        if answered.is_err() {
            // A late response would be mistaken for the response to the next request.
            self.kill();
        }
        match answered?.0 {
            ControlResponse::Refused { message } => Err(ProcessError::Refused(message)),
            answer => Ok(answer),
        }
    }

    /// Kills the process.
    pub fn kill(&self) {
        kill(&self.pidfd);
    }
}

impl Drop for TenantProcess {
    fn drop(&mut self) {
        if self.is_detached.load(Ordering::Acquire) {
            return;
        }
        self.kill();
        if let Some(mut child) = self.child.take() {
            // The killed process exits now.
            let _ = child.wait();
        }
        // Another process of the same directory may have replaced the record.
        if ProcessRecord::read(&self.directory).is_some_and(|record| record == self.record) {
            remove_files(&self.directory);
        }
    }
}

fn allow_list(hosts: &[String]) -> Result<AllowList, ProcessError> {
    AllowList::parse(hosts).map_err(|error| ProcessError::Refused(error.to_string()))
}

fn unexpected(answer: &ControlResponse) -> ProcessError {
    ProcessError::Refused(format!("unexpected answer {answer:?}"))
}

/// Child process that is killed when this value is dropped, unless it was taken.
struct UnreadyChild(Option<Child>);

impl UnreadyChild {
    fn into_child(mut self) -> Option<Child> {
        self.0.take()
    }
}

impl Drop for UnreadyChild {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // The process has exited, or exits now.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts the program with both listeners at the descriptors that it expects.
fn spawn(
    settings: &ProcessSettings<'_>,
    http: OwnedFd,
    control: OwnedFd,
) -> Result<Child, ProcessError> {
    let limits = &settings.limits;
    let messages = ChildMessages::new()?;
    let mut command = Command::new(settings.program);
    command
        .env_clear()
        .args(["serve", "--owner", settings.owner])
        .args(["--slots", &limits.slots.to_string()])
        .args(["--memory-bytes", &limits.memory_bytes.to_string()])
        .args(["--connections", &limits.connections.to_string()])
        .args(["--reset", limits.reset.word()])
        .args(["--grace-s", &settings.grace.as_secs().to_string()])
        // Signals from the daemon's terminal must not reach the process.
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(messages.stderr()?);
    if !settings.jailed {
        command.arg("--no-jail");
    }
    let mappings = vec![
        FdMapping {
            parent_fd: control,
            child_fd: CONTROL_FD,
        },
        FdMapping {
            parent_fd: http,
            child_fd: LISTENER_FD,
        },
    ];
    command.fd_mappings(mappings).map_err(io::Error::other)?;
    // The process has its own copies of the descriptors. The daemon's copies close with `command`.
    let child = command.spawn()?;
    drop(command);
    messages.forward("jiffy-functions", child.id());
    Ok(child)
}

/// Creates the listening control socket in `directory`.
fn listen_for_control(directory: &Path) -> io::Result<OwnedFd> {
    let listener = control_socket()?;
    bind(
        listener.as_raw_fd(),
        &UnixAddr::new(&directory.join(CONTROL_SOCKET))?,
    )?;
    // One daemon connects at a time.
    listen(&listener, Backlog::new(1)?)?;
    Ok(listener)
}

/// Creates a socket for the control connection, which is not connected yet.
fn control_socket() -> io::Result<OwnedFd> {
    Ok(socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?)
}

/// Connects to the control socket in `directory`. Returns the channel and the fingerprint of the
/// process's engine.
fn connect_control(directory: &Path) -> Result<(Channel, String), ProcessError> {
    let control = control_socket()?;
    let timeout = TimeVal::new(ANSWER_TIMEOUT_S, 0);
    setsockopt(&control, sockopt::ReceiveTimeout, &timeout).map_err(io::Error::from)?;
    setsockopt(&control, sockopt::SendTimeout, &timeout).map_err(io::Error::from)?;
    let address = UnixAddr::new(&directory.join(CONTROL_SOCKET)).map_err(io::Error::from)?;
    loop {
        match connect(control.as_raw_fd(), &address) {
            Err(Errno::EINTR) => {}
            connected => break connected.map_err(io::Error::from)?,
        }
    }
    let control = Channel::new(control);
    match control.recv()?.0 {
        ControlResponse::Ready { engine } => Ok((control, engine)),
        other => Err(unexpected(&other)),
    }
}

/// Connects to the recorded process. `None` if it has exited, or was killed because it does not
/// answer.
fn adopt(directory: &Path) -> Option<TenantProcess> {
    let record = ProcessRecord::read(directory)?;
    let pid = record.instance.pid;
    // The pidfd is opened before the check: the process id may be reused at any time.
    let pidfd = open_pidfd(pid).ok()?;
    // A pidfd always refers to the same process. If the instance matches now, the pidfd refers to
    // the recorded process.
    if ProcessInstance::of(pid).ok()? != record.instance {
        return None;
    }
    match connect_control(directory) {
        Ok((control, engine)) => Some(TenantProcess {
            record,
            pidfd,
            child: None,
            directory: directory.to_owned(),
            control: Mutex::new(control),
            engine,
            is_detached: AtomicBool::new(false),
            egress_settings: EgressSettings::default(),
            egress: Mutex::default(),
        }),
        Err(e) => {
            tracing::warn!(pid, error = %e, "cannot adopt a function process; killing it");
            kill(&pidfd);
            None
        }
    }
}

/// Removes record and sockets of a process from `directory`.
fn remove_files(directory: &Path) {
    ProcessRecord::remove(directory);
    for name in [HTTP_SOCKET, CONTROL_SOCKET] {
        // The file is absent, or the next start replaces it.
        let _ = fs::remove_file(directory.join(name));
    }
}

fn open_pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    Ok(pidfd_open(
        pid.ok_or(io::ErrorKind::NotFound)?,
        PidfdFlags::empty(),
    )?)
}

fn kill(pidfd: &OwnedFd) {
    // The process may have exited already.
    let _ = pidfd_send_signal(pidfd, Signal::KILL);
}
