//! Puller process, and the parent's requests to it.

use crate::cancel::Cancel;
use crate::connection_gate::ConnectionGate;
use crate::error::{PullError, PullFault};
use crate::process::{INHERITED_VARIABLES, PULLER_ARGUMENT};
use crate::puller_link::{PullerLink, PullerMessage};
use crate::response_deadlines::ResponseDeadlines;
use crate::wire::{PullRequest, PullResponse};
use nix::unistd::Pid;
use std::env;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Timeout until a puller is confined and ready.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of connections of one puller.
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

/// User and password for a registry.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// User name.
    pub user: String,
    /// Password.
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Credentials").field(&self.user).finish()
    }
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
    /// Credentials, if any.
    pub credentials: Option<Credentials>,
}

/// Puller process for one repository. Dropping this value kills the process.
#[derive(Debug)]
pub struct Puller {
    running: PullerBackend,
    link: PullerLink,
    gate: ConnectionGate,
    cancel: Cancel,
    connections: usize,
    first_layer: Option<Instant>,
    /// Cause of the last failed connection.
    refused: Option<String>,
}

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
        let (ours, theirs) = UnixStream::pair().map_err(PullError::Start)?;
        let running = match program {
            PullerProgram::Own => {
                PullerBackend::Process(spawn(theirs.into()).map_err(PullError::Start)?)
            }
            #[cfg(feature = "testing")]
            PullerProgram::Thread => {
                let work = move || crate::process::serve_unconfined(theirs);
                PullerBackend::Thread(Some(std::thread::spawn(work)))
            }
        };
        if let Some(pid) = running.pid() {
            cancel.register(pid);
        }
        let mut puller = Self {
            running,
            link: PullerLink::new(ours).map_err(PullError::Start)?,
            gate,
            cancel: cancel.clone(),
            connections: 0,
            first_layer: None,
            refused: None,
        };
        let deadline = Instant::now() + START_TIMEOUT;
        let deadline = (deadline, "the puller did not start in time".to_owned());
        let first = puller.link.receive(&deadline, cancel);
        match first.map_err(|e| puller.ended(e))? {
            PullerMessage::Response(PullResponse::Ready) => {}
            PullerMessage::Response(PullResponse::Failed(fault)) => {
                return Err(fault.bounded().into());
            }
            _ => return Err(nonsense()),
        }
        let order = PullRequest::Setup {
            registry: setup.registry,
            repository: setup.repository,
            plain_http: setup.plain_http,
            credentials: setup.credentials.map(|c| (c.user, c.password)),
        };
        puller.link.send(&order, None, cancel)?;
        Ok(puller)
    }

    /// Returns a manifest by tag or digest, at most `most` bytes. The manifest is not verified.
    pub fn manifest(&mut self, reference: &str, most: u64) -> Result<Vec<u8>, PullError> {
        let order = PullRequest::Manifest {
            reference: reference.to_owned(),
            most,
        };
        self.document(&order, most)
    }

    /// Returns a blob of at most `most` bytes. The blob is not verified.
    pub fn small_blob(&mut self, digest: &str, most: u64) -> Result<Vec<u8>, PullError> {
        let order = PullRequest::Blob {
            digest: digest.to_owned(),
            offset: 0,
            most,
        };
        self.document(&order, most)
    }

    fn document(&mut self, order: &PullRequest, most: u64) -> Result<Vec<u8>, PullError> {
        let mut bytes = Vec::new();
        let mut pace = ResponseDeadlines::document();
        let mut take = |chunk: &[u8]| {
            if bytes.len() as u64 + chunk.len() as u64 <= most {
                bytes.extend_from_slice(chunk);
                Ok(())
            } else {
                Err(PullFault::TooLong(most).into())
            }
        };
        match self.exchange(order, &mut pace, &mut take)? {
            PullResponse::Done => Ok(bytes),
            _ => Err(nonsense()),
        }
    }

    /// Starts the deadlines of a layer. The first call also starts the deadline of all layers.
    pub fn layer(&mut self) -> LayerPull {
        let first = *self.first_layer.get_or_insert_with(Instant::now);
        LayerPull(ResponseDeadlines::layer(first))
    }

    /// Streams a layer from `offset`. Offset and data together are at most `most` bytes.
    pub fn blob(
        &mut self,
        layer: &mut LayerPull,
        digest: &str,
        offset: u64,
        most: u64,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), PullError> {
        let request = PullRequest::Blob {
            digest: digest.to_owned(),
            offset,
            most,
        };
        self.stream(layer, &request, offset, most, sink)
    }

    /// Streams the file at a path and query of the host from `offset`. Offset and data together are
    /// at most `most` bytes.
    pub fn file(
        &mut self,
        layer: &mut LayerPull,
        target: &str,
        offset: u64,
        most: u64,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), PullError> {
        let request = PullRequest::File {
            target: target.to_owned(),
            offset,
            most,
        };
        self.stream(layer, &request, offset, most, sink)
    }

    fn stream(
        &mut self,
        layer: &mut LayerPull,
        request: &PullRequest,
        offset: u64,
        most: u64,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), PullError> {
        let mut remaining = most.saturating_sub(offset);
        let mut take = |chunk: &[u8]| {
            let rest = remaining.checked_sub(chunk.len() as u64);
            remaining = rest.ok_or(PullFault::TooLong(most))?;
            sink(chunk).map_err(PullError::Sink)
        };
        match self.exchange(request, &mut layer.0, &mut take)? {
            PullResponse::Done => Ok(()),
            _ => Err(nonsense()),
        }
    }

    /// Returns true if the registry has a blob of this size.
    pub fn has(&mut self, digest: &str, size: u64) -> Result<bool, PullError> {
        let order = PullRequest::Has {
            digest: digest.to_owned(),
            size,
        };
        let mut pace = ResponseDeadlines::document();
        match self.exchange(&order, &mut pace, &mut |_| Err(nonsense()))? {
            PullResponse::Has(has) => Ok(has),
            _ => Err(nonsense()),
        }
    }

    /// Sends a request and opens connections for the puller until it responds.
    fn exchange(
        &mut self,
        order: &PullRequest,
        pace: &mut ResponseDeadlines,
        take: &mut dyn FnMut(&[u8]) -> Result<(), PullError>,
    ) -> Result<PullResponse, PullError> {
        self.refused = None;
        self.link.send(order, None, &self.cancel)?;
        loop {
            let message = self.link.receive(&pace.next(), &self.cancel);
            match message.map_err(|e| self.ended(e))? {
                PullerMessage::Data(bytes) => {
                    pace.count(bytes.len());
                    take(&bytes)?;
                }
                PullerMessage::Response(PullResponse::Connect { host, port }) => {
                    self.connect(&host, port)?
                }
                PullerMessage::Response(PullResponse::Failed(fault)) => {
                    let fault = match (fault.bounded(), self.refused.take()) {
                        (PullFault::Unreachable(_), Some(why)) => PullFault::Unreachable(why),
                        (fault, _) => fault,
                    };
                    return Err(fault.into());
                }
                PullerMessage::Response(report) => return Ok(report),
            }
        }
    }

    fn connect(&mut self, host: &str, port: u16) -> Result<(), PullError> {
        // The puller is not trusted and could request connections without end.
        self.connections += 1;
        if self.connections > MAX_CONNECTIONS {
            return Err(nonsense());
        }
        match self.gate.connect(host, port, &self.cancel) {
            Ok(stream) => {
                let descriptor = Some(stream.as_fd());
                self.link
                    .send(&PullRequest::Connected, descriptor, &self.cancel)
            }
            Err(why) => {
                self.refused = Some(PullFault::text(&why));
                self.link
                    .send(&PullRequest::NotConnected, None, &self.cancel)
            }
        }
    }

    /// Replaces the error by the exit status of the process if the process has exited.
    fn ended(&mut self, error: PullError) -> PullError {
        if self.cancel.is_cancelled() {
            return PullError::Cancelled;
        }
        match (&error, &mut self.running) {
            (PullError::Died(_), PullerBackend::Process(child)) => {
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
        if let Some(pid) = self.running.pid() {
            self.cancel.unregister(pid);
        }
        match &mut self.running {
            PullerBackend::Process(child) => {
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

fn nonsense() -> PullError {
    PullError::Died("protocol violation".to_owned())
}

/// Deadlines of a layer's download over all attempts.
#[derive(Debug)]
pub struct LayerPull(ResponseDeadlines);

fn spawn(socket: OwnedFd) -> io::Result<Child> {
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
