//! Parent's side of a puller process: starts the process, sends requests to it and opens
//! connections for it.
//!
//! The *puller* is the confined process that downloads images from registries.

use crate::cancel::Cancel;
use crate::connection_gate::ConnectionGate;
use crate::error::{PullError, PullFault};
use crate::login::RegistryLogin;
use crate::process::{INHERITED_VARIABLES, PULLER_ARGUMENT};
use crate::puller_link::{PullerLink, PullerMessage};
use crate::response_deadlines::ResponseDeadlines;
use crate::wire::{PullRequest, PullResponse};
use nix::unistd::Pid;
use std::env;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Timeout until a puller is confined and ready.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of connections of one puller. An image with 400 layers needs a few per layer.
const MAX_CONNECTIONS: usize = 4096;

/// Program that pullers run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PullerProgram {
    /// This program, which must call [`crate::process::main`] if its first argument is
    /// [`PULLER_ARGUMENT`].
    #[default]
    Own,
    /// A thread without confinement.
    #[cfg(feature = "testing")]
    Thread,
}

/// Repository that a puller pulls from.
#[derive(Debug, Clone)]
pub struct PullTarget {
    /// `host` or `host:port`.
    pub registry: String,
    /// Repository in the registry.
    pub repository: String,
    /// Hosts (`host` or `host:port`) with plain HTTP.
    pub plain_http: Vec<String>,
    /// Authentication, if any.
    pub login: Option<RegistryLogin>,
}

/// Puller process for one repository. Dropping this value kills the process.
#[derive(Debug)]
pub struct Puller {
    /// Process or thread that runs the puller.
    backend: PullerBackend,
    link: PullerLink,
    gate: ConnectionGate,
    cancel: Cancel,
    /// Number of connections that were requested so far.
    connections: usize,
    /// Start of the first layer, to which the deadline of all layers refers.
    first_layer: Option<Instant>,
    /// Cause of the last connection that could not be opened during this request.
    connection_error: Option<String>,
}

/// Process or thread of a puller.
#[derive(Debug)]
enum PullerBackend {
    Process(Child),
    #[cfg(feature = "testing")]
    Thread(Option<std::thread::JoinHandle<()>>),
}

impl Puller {
    /// Starts a puller whose connections are opened by `gate`.
    pub fn start(
        program: PullerProgram,
        setup: PullTarget,
        gate: ConnectionGate,
        cancel: &Cancel,
    ) -> Result<Self, PullError> {
        // Both ends are close-on-exec. The process receives its end as standard input.
        let (ours, theirs) = UnixStream::pair().map_err(PullError::Start)?;
        let backend = match program {
            PullerProgram::Own => {
                PullerBackend::Process(spawn(theirs.into()).map_err(PullError::Start)?)
            }
            #[cfg(feature = "testing")]
            PullerProgram::Thread => {
                let work = move || crate::process::serve_unconfined(theirs);
                PullerBackend::Thread(Some(std::thread::spawn(work)))
            }
        };
        // Register the process before the first wait, so that a cancellation also interrupts the
        // start.
        if let Some(pid) = backend.pid() {
            cancel.register(pid);
        }
        let mut puller = Self {
            backend,
            link: PullerLink::new(ours).map_err(PullError::Start)?,
            gate,
            cancel: cancel.clone(),
            connections: 0,
            first_layer: None,
            connection_error: None,
        };
        let deadline = Instant::now() + START_TIMEOUT;
        let deadline = (deadline, "the puller did not start in time".to_owned());
        let first = puller.link.receive(&deadline, cancel);
        match first.map_err(|e| puller.with_exit_status(e))? {
            PullerMessage::Response(PullResponse::Ready) => {}
            PullerMessage::Response(PullResponse::Failed(fault)) => {
                return Err(fault.bounded().into());
            }
            _ => return Err(protocol_violation()),
        }
        // Credentials are sent over the socket: command lines and environments are visible to
        // others.
        let request = PullRequest::Setup {
            registry: setup.registry,
            repository: setup.repository,
            plain_http: setup.plain_http,
            login: setup.login,
        };
        puller.link.send(&request, None, cancel)?;
        Ok(puller)
    }

    /// Returns a manifest of at most `max_bytes` bytes by tag or digest. The manifest is not
    /// verified.
    pub fn manifest(&mut self, reference: &str, max_bytes: u64) -> Result<Vec<u8>, PullError> {
        let request = PullRequest::Manifest {
            reference: reference.to_owned(),
            most: max_bytes,
        };
        self.document(&request, max_bytes)
    }

    /// Returns a blob of at most `max_bytes` bytes. The blob is not verified.
    pub fn small_blob(&mut self, digest: &str, max_bytes: u64) -> Result<Vec<u8>, PullError> {
        let request = PullRequest::Blob {
            digest: digest.to_owned(),
            offset: 0,
            most: max_bytes,
        };
        self.document(&request, max_bytes)
    }

    /// Returns the document at `target`, a path and query on the server [`PullTarget::registry`].
    /// The document has at most `max_bytes` bytes, and is not verified.
    pub fn document_at(&mut self, target: &str, max_bytes: u64) -> Result<Vec<u8>, PullError> {
        let request = PullRequest::File {
            target: target.to_owned(),
            offset: 0,
            most: max_bytes,
        };
        self.document(&request, max_bytes)
    }

    /// Requests a document of a registry, and returns it.
    fn document(&mut self, request: &PullRequest, max_bytes: u64) -> Result<Vec<u8>, PullError> {
        let mut bytes = Vec::new();
        let mut deadlines = ResponseDeadlines::document();
        let mut receive = |chunk: &[u8]| {
            // The limit is sent to the puller as well, but the puller is not trusted.
            if bytes.len() as u64 + chunk.len() as u64 <= max_bytes {
                bytes.extend_from_slice(chunk);
                Ok(())
            } else {
                Err(PullFault::TooLong(max_bytes).into())
            }
        };
        match self.exchange(request, &mut deadlines, &mut receive)? {
            PullResponse::Done => Ok(bytes),
            _ => Err(protocol_violation()),
        }
    }

    /// Starts the deadlines of a layer. The first call also starts the deadline of all layers.
    pub fn layer(&mut self) -> LayerPull {
        let first = *self.first_layer.get_or_insert_with(Instant::now);
        LayerPull(ResponseDeadlines::layer(first))
    }

    /// Streams a layer from `offset`. Offset and data together are at most `max_bytes` bytes.
    pub fn blob(
        &mut self,
        layer: &mut LayerPull,
        digest: &str,
        offset: u64,
        max_bytes: u64,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), PullError> {
        let request = PullRequest::Blob {
            digest: digest.to_owned(),
            offset,
            most: max_bytes,
        };
        self.stream(layer, &request, offset, max_bytes, sink)
    }

    /// Streams the file at `target`, a path and query on the server [`PullTarget::registry`], from
    /// `offset`. Offset and data together are at most `max_bytes` bytes. The server need not be a
    /// registry.
    pub fn file(
        &mut self,
        layer: &mut LayerPull,
        target: &str,
        offset: u64,
        max_bytes: u64,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), PullError> {
        let request = PullRequest::File {
            target: target.to_owned(),
            offset,
            most: max_bytes,
        };
        self.stream(layer, &request, offset, max_bytes, sink)
    }

    /// Requests a layer from `offset`, and passes its bytes to `sink`.
    fn stream(
        &mut self,
        layer: &mut LayerPull,
        request: &PullRequest,
        offset: u64,
        max_bytes: u64,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), PullError> {
        let mut remaining = max_bytes.saturating_sub(offset);
        let mut receive = |chunk: &[u8]| {
            let rest = remaining.checked_sub(chunk.len() as u64);
            remaining = rest.ok_or(PullFault::TooLong(max_bytes))?;
            sink(chunk).map_err(PullError::Sink)
        };
        match self.exchange(request, &mut layer.0, &mut receive)? {
            PullResponse::Done => Ok(()),
            _ => Err(protocol_violation()),
        }
    }

    /// Returns true if the registry has a blob of this size.
    pub fn has(&mut self, digest: &str, size: u64) -> Result<bool, PullError> {
        let request = PullRequest::Has {
            digest: digest.to_owned(),
            size,
        };
        let mut deadlines = ResponseDeadlines::document();
        match self.exchange(&request, &mut deadlines, &mut |_| Err(protocol_violation()))? {
            PullResponse::Has(has) => Ok(has),
            _ => Err(protocol_violation()),
        }
    }

    /// Sends a request and opens connections for the puller until it responds.
    fn exchange(
        &mut self,
        request: &PullRequest,
        deadlines: &mut ResponseDeadlines,
        receive: &mut dyn FnMut(&[u8]) -> Result<(), PullError>,
    ) -> Result<PullResponse, PullError> {
        self.connection_error = None;
        self.link.send(request, None, &self.cancel)?;
        loop {
            let message = self.link.receive(&deadlines.next(), &self.cancel);
            match message.map_err(|e| self.with_exit_status(e))? {
                PullerMessage::Data(bytes) => {
                    deadlines.count(bytes.len());
                    receive(&bytes)?;
                }
                PullerMessage::Response(PullResponse::Connect { host, port }) => {
                    self.connect(&host, port)?
                }
                PullerMessage::Response(PullResponse::Failed(fault)) => {
                    // The puller knows only that there is no connection. The parent knows the
                    // reason.
                    let fault = match (fault.bounded(), self.connection_error.take()) {
                        (PullFault::Unreachable(_), Some(why)) => PullFault::Unreachable(why),
                        (fault, _) => fault,
                    };
                    return Err(fault.into());
                }
                PullerMessage::Response(response) => return Ok(response),
            }
        }
    }

    /// Opens a connection that the puller requests, and sends its descriptor to the puller.
    fn connect(&mut self, host: &str, port: u16) -> Result<(), PullError> {
        // The puller is not trusted and could request connections without end.
        self.connections += 1;
        if self.connections > MAX_CONNECTIONS {
            return Err(protocol_violation());
        }
        match self.gate.connect(host, port, &self.cancel) {
            Ok(stream) => {
                let descriptor = Some(stream.as_fd());
                self.link
                    .send(&PullRequest::Connected, descriptor, &self.cancel)
            }
            Err(why) => {
                // The reason is for the host's owner, so the puller does not receive it.
                self.connection_error = Some(PullFault::text(&why));
                self.link
                    .send(&PullRequest::NotConnected, None, &self.cancel)
            }
        }
    }

    /// Returns the error to report: a cancellation, or the exit status of the process if it has
    /// exited.
    fn with_exit_status(&mut self, error: PullError) -> PullError {
        if self.cancel.is_cancelled() {
            return PullError::Cancelled;
        }
        match (&error, &mut self.backend) {
            (PullError::Died(_), PullerBackend::Process(child)) => {
                // After `wait`, the process id may belong to another process.
                if let Some(pid) = pid(child) {
                    self.cancel.unregister(pid);
                }
                // The socket is closed, so the process has exited or can be killed.
                let _ = child.kill();
                match child.wait() {
                    Ok(status) => PullError::Died(status.to_string()),
                    Err(e) => PullError::Died(e.to_string()),
                }
            }
            _ => error,
        }
    }
}

impl Drop for Puller {
    fn drop(&mut self) {
        // After `wait`, the process id may belong to another process.
        if let Some(pid) = self.backend.pid() {
            self.cancel.unregister(pid);
        }
        match &mut self.backend {
            PullerBackend::Process(child) => {
                // Ignore errors: the process may have exited already.
                let _ = child.kill();
                let _ = child.wait();
            }
            #[cfg(feature = "testing")]
            PullerBackend::Thread(thread) => {
                self.link.shut();
                if let Some(thread) = thread.take() {
                    let _ = thread.join();
                }
            }
        }
    }
}

impl PullerBackend {
    fn pid(&self) -> Option<Pid> {
        match self {
            Self::Process(child) => pid(child),
            #[cfg(feature = "testing")]
            Self::Thread(_) => None,
        }
    }
}

fn pid(child: &Child) -> Option<Pid> {
    i32::try_from(child.id()).ok().map(Pid::from_raw)
}

fn protocol_violation() -> PullError {
    PullError::Died("protocol violation".to_owned())
}

/// Deadlines of the download of one layer, over all attempts.
#[derive(Debug)]
pub struct LayerPull(ResponseDeadlines);

/// Starts the puller process with `socket` as standard input and an almost empty environment.
fn spawn(socket: OwnedFd) -> io::Result<Child> {
    // The link refers to this program even if its file was replaced by an update.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("jiffy")
        .arg(PULLER_ARGUMENT)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    for name in INHERITED_VARIABLES {
        if let Some(value) = env::var_os(name) {
            command.env(name, value);
        }
    }
    command.spawn()
}
