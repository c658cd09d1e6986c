//! Starter's side of a tenant's process.

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

/// Time within which a process starts, and answers an order.
const ANSWER_TIMEOUT_S: i64 = 30;
/// Time for a killed process to end, in milliseconds.
const END_TIMEOUT_MS: u16 = 5000;
/// Socket of requests in a tenant's directory.
pub const HTTP_SOCKET: &str = "http.sock";
/// Control socket there.
const CONTROL_SOCKET: &str = "control.sock";

/// Failure of a tenant's process or of a compiler.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// It cannot be started.
    #[error("starting jiffy-functions: {0}")]
    Start(#[from] io::Error),
    /// It does not answer.
    #[error("the process of functions does not answer: {0}")]
    Control(#[from] ChannelError),
    /// It refused an order.
    #[error("{0}")]
    Refused(String),
    /// The module was not compiled. The message is its author's.
    #[error("{0}")]
    Compile(String),
    /// The budget of the module's owner has no room for the machine code.
    #[error("{0}")]
    NoRoom(BoxError),
}

/// Settings of a process that is started.
#[derive(Debug, Clone, Copy)]
pub struct ProcessSettings<'a> {
    /// Program `jiffy-functions`.
    pub program: &'a Path,
    /// Owner of its functions.
    pub owner: &'a str,
    /// Limits of the process.
    pub limits: TenantLimits,
    /// False for tests of hosts that allow no namespaces.
    pub jailed: bool,
    /// Time without a daemon after which it ends.
    pub grace: Duration,
}

/// Process of a tenant. It ends with this value, unless it is left to the next daemon. Calls block
/// until the process has answered; orders are carried out one at a time.
#[derive(Debug)]
pub struct TenantProcess {
    record: ProcessRecord,
    pidfd: OwnedFd,
    /// None for one that an earlier daemon started.
    child: Option<Child>,
    directory: PathBuf,
    control: Mutex<Channel>,
    engine: String,
    left: AtomicBool,
    egress_settings: EgressSettings,
    /// None until a function may reach a host.
    egress: Mutex<Option<EgressBroker>>,
}

impl TenantProcess {
    /// Starts a process with its sockets in `directory`, and waits until it serves.
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
            left: AtomicBool::new(false),
            egress_settings: EgressSettings::default(),
            egress: Mutex::default(),
        })
    }

    /// Takes over the process that an earlier daemon left in `directory`; none if it has ended or
    /// does not answer, in which case nothing of it stays.
    #[must_use]
    pub fn adopt(directory: &Path) -> Option<Self> {
        let found = adopt(directory);
        if found.is_none() {
            remove_files(directory);
        }
        found
    }

    /// Fingerprint of its engine: compiled files of another one are compiled again.
    #[must_use]
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// Process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.record.instance.pid
    }

    /// Reset of its slots.
    #[must_use]
    pub fn reset(&self) -> SlotReset {
        self.record.reset
    }

    /// Descriptor that is readable when the process has ended.
    pub fn pidfd(&self) -> io::Result<OwnedFd> {
        self.pidfd.try_clone()
    }

    /// True if the process has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ends_within(PollTimeout::ZERO)
    }

    fn ends_within(&self, timeout: PollTimeout) -> bool {
        let mut watched = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        poll(&mut watched, timeout) != Ok(0)
    }

    /// Ends the process, and waits until it has ended.
    pub fn end(&self) {
        self.kill();
        self.ends_within(PollTimeout::from(END_TIMEOUT_MS));
    }

    /// Leaves the process to the next daemon: it goes on when this value is dropped.
    pub fn leave(&self) {
        self.left.store(true, Ordering::Release);
    }

    /// Carries out an order.
    pub fn order(&self, order: &ControlRequest) -> Result<ControlResponse, ProcessError> {
        let answer = self.send(order, None)?;
        if let ControlRequest::Remove { function } = order {
            self.set_allowed(function, AllowList::default())?;
        }
        Ok(answer)
    }

    /// Loads a compiled file whose digest is `digest` in hexadecimal digits.
    pub fn load(
        &self,
        function: &str,
        file: &File,
        digest: &str,
        settings: impl Into<LoadSettings>,
    ) -> Result<World, ProcessError> {
        self.load_as(function, file, digest, settings.into(), None)
    }

    /// The same for a function that reaches the control plane as `origin`.
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
            // The process asks for no connection of a function that may reach nothing.
            settings.allow.push(API_HOST.to_owned());
        }
        let list = list.with_origin(origin);
        let former = self.allowed(function);
        // Neither the former version nor the next one is refused a host of its own meanwhile.
        self.set_allowed(function, former.and(&list))?;
        let order = ControlRequest::Load {
            function: function.to_owned(),
            digest: digest.to_owned(),
            settings,
        };
        let loaded = match self.send(&order, Some(file.as_fd())) {
            Ok(ControlResponse::Loaded { world }) => Ok(world),
            Ok(other) => Err(unexpected(&other)),
            Err(error) => Err(error),
        };
        self.set_allowed(function, if loaded.is_ok() { list } else { former })?;
        loaded
    }

    /// Lets the process serve the connections that come over `socket`.
    pub(crate) fn attach_direct(&self, socket: &OwnedFd) -> Result<(), ProcessError> {
        self.send(&ControlRequest::Direct, Some(socket.as_fd()))
            .map(drop)
    }

    /// Sets what the host's owner lets functions reach, before any is loaded.
    pub fn set_egress(&mut self, settings: EgressSettings) {
        self.egress_settings = settings;
    }

    /// Sets the hosts that a function may reach, for one that is loaded already: a process that was
    /// adopted reaches nothing before.
    pub fn allow(&self, function: &str, hosts: &[String]) -> Result<(), ProcessError> {
        self.set_allowed(function, allow_list(hosts)?)
    }

    fn allowed(&self, function: &str) -> AllowList {
        let egress = self.egress.lock();
        let list = egress.as_ref().map(|broker| broker.allowed(function));
        list.unwrap_or_default()
    }

    fn set_allowed(&self, function: &str, list: AllowList) -> Result<(), ProcessError> {
        let list = match self.egress_settings.is_off {
            true => list.without_hosts(),
            false => list,
        };
        let mut egress = self.egress.lock();
        let broker = match &mut *egress {
            Some(broker) => broker,
            None if list.is_empty() => return Ok(()),
            none => {
                let (broker, socket) = EgressBroker::start(self.egress_settings.clone())?;
                self.send(&ControlRequest::Egress, Some(socket.as_fd()))?;
                none.insert(broker)
            }
        };
        match list.is_empty() {
            true => broker.forget(function),
            false => broker.allow(function, list),
        }
        Ok(())
    }

    fn send(
        &self,
        order: &ControlRequest,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<ControlResponse, ProcessError> {
        let files: Vec<_> = file.into_iter().collect();
        let control = self.control.lock();
        let answered = control.send(order, &files).and_then(|()| control.recv());
        if answered.is_err() {
            // A late answer would be taken for that of the next order.
            self.kill();
        }
        match answered?.0 {
            ControlResponse::Refused { message } => Err(ProcessError::Refused(message)),
            answer => Ok(answer),
        }
    }

    /// Ends the process.
    pub fn kill(&self) {
        kill(&self.pidfd);
    }
}

impl Drop for TenantProcess {
    fn drop(&mut self) {
        if self.left.load(Ordering::Acquire) {
            return;
        }
        self.kill();
        if let Some(mut child) = self.child.take() {
            // Ends now.
            let _ = child.wait();
        }
        // Another process may run there by now.
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

/// Child that is ended unless it is taken.
struct UnreadyChild(Option<Child>);

impl UnreadyChild {
    fn into_child(mut self) -> Option<Child> {
        self.0.take()
    }
}

impl Drop for UnreadyChild {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // Already ended, or ends now.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

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
        // Signals of the daemon's terminal are not for it.
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
    // The process has its copies of the descriptors; ours close with the command.
    let child = command.spawn()?;
    drop(command);
    messages.forward("jiffy-functions", child.id());
    Ok(child)
}

fn listen_for_control(directory: &Path) -> io::Result<OwnedFd> {
    let listener = control_socket()?;
    bind(
        listener.as_raw_fd(),
        &UnixAddr::new(&directory.join(CONTROL_SOCKET))?,
    )?;
    listen(&listener, Backlog::new(1)?)?;
    Ok(listener)
}

fn control_socket() -> io::Result<OwnedFd> {
    Ok(socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?)
}

/// Connects to the control socket in `directory`. Returns the fingerprint of the process's engine.
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

fn adopt(directory: &Path) -> Option<TenantProcess> {
    let record = ProcessRecord::read(directory)?;
    let pid = record.instance.pid;
    let pidfd = open_pidfd(pid).ok()?;
    // A pidfd refers to one process for ever: if the instance matches now, it was opened on the
    // right one.
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
            left: AtomicBool::new(false),
            egress_settings: EgressSettings::default(),
            egress: Mutex::default(),
        }),
        Err(e) => {
            tracing::warn!("ending the process {pid} of functions: {e}");
            kill(&pidfd);
            None
        }
    }
}

fn remove_files(directory: &Path) {
    ProcessRecord::remove(directory);
    for name in [HTTP_SOCKET, CONTROL_SOCKET] {
        // Absent, or replaced by the next start.
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
