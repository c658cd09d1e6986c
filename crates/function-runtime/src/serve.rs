//! `jiffy-functions serve`: the process of a tenant. It creates the WebAssembly engine, enters the
//! jail, and then serves requests of clients and control messages of the daemon.
//!
//! A *tenant* is one owner of functions. A *direct* connection is passed from the daemon to the
//! process of the tenant, which then serves its requests without the gateway.

use crate::artifact::{DIGEST_BYTES, Digest};
use crate::epoch_ticker::EpochTicker;
use crate::jail::{self, ProcessLimits};
use crate::server::FunctionServer;
use crate::tenant::Tenant;
use crate::{direct, engine, seccomp};
use jiffy_proto::channel::{Channel, ChannelError};
use jiffy_proto::function::{
    CONTROL_FD, ControlRequest, ControlResponse, LISTENER_FD, MAX_ARTIFACT_BYTES, TenantLimits,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{SockFlag, accept4};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::{Builder, Handle};
use tokio::sync::Semaphore;

/// Maximum length in bytes of a file that the process writes. Wasmtime stores the initial content
/// of a memory in a `memfd`. A 32-bit memory has at most 4 GiB, well below this limit.
const MAX_IMAGE_BYTES: u64 = 8 << 30;
/// Maximum number of open descriptors in addition to the connections of clients.
const OTHER_DESCRIPTORS: u64 = 1024;
/// Time within which the daemon that started the process must connect. If that daemon is killed
/// before it has recorded the process, no other daemon can find the process.
const STARTER_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of the log entries in one answer, in bytes. The whole answer must fit in a control
/// message ([`jiffy_proto::channel::MAX_MESSAGE`]).
const MAX_LOG_ANSWER_BYTES: usize = 48 << 10;

/// Settings of the process.
#[derive(Debug, Clone)]
pub struct ServeSettings {
    /// Owner of the files that this process may load.
    pub owner: String,
    /// Limits of the process.
    pub limits: TenantLimits,
    /// Time without a daemon after which the process exits.
    pub grace: Duration,
    /// Number of threads that run guests.
    pub workers: usize,
    /// True if the process is confined. False in tests on hosts without user namespaces.
    pub jailed: bool,
}

/// Serves until no daemon has been connected to the control socket for the grace period. A
/// restarted daemon thus finds the process unchanged. Must be called before the process creates
/// another thread, with the sockets at [`CONTROL_FD`] and [`LISTENER_FD`].
pub fn serve(settings: &ServeSettings) -> io::Result<()> {
    // SAFETY: nothing in this process owns a descriptor above the listener yet.
    unsafe { jiffy_confinement::close_descriptors(LISTENER_FD.cast_unsigned() + 1) }?;
    // SAFETY: the parent put both descriptors there, and nothing else in this process owns them.
    let (control, listener) = unsafe {
        let control = OwnedFd::from_raw_fd(CONTROL_FD);
        (control, OwnedFd::from_raw_fd(LISTENER_FD))
    };
    let listener = UnixListener::from(listener);
    // tokio requires a non-blocking listener.
    listener.set_nonblocking(true)?;
    // The engine is created before the confinement: it reads files in /proc, which the jail
    // forbids.
    let engine = engine::running(&settings.limits).map_err(io::Error::other)?;
    if settings.jailed {
        jail::confine(&ProcessLimits {
            // The limit applies to the gateway's connections and to direct connections separately.
            descriptors: u64::from(settings.limits.connections) * 2 + OTHER_DESCRIPTORS,
            cpu_s: None,
            ends_with_starter: false,
            address_space: None,
            file_bytes: MAX_IMAGE_BYTES,
        })?;
    }
    // A worker polls the shared queue of tasks after every 8 tasks of its own. Each of its tasks
    // may be a guest that runs for a whole epoch (1 ms).
    let runtime = Builder::new_multi_thread()
        .worker_threads(settings.workers.max(1))
        .global_queue_interval(8)
        .enable_io()
        .enable_time()
        .build()?;
    // This call creates the last thread: the seccomp filter below denies `clone`.
    let ticker = EpochTicker::start(&engine)?;
    let tenant = Tenant::new(&settings.owner, settings.limits, engine).map_err(io::Error::other)?;
    let tenant = Arc::new(tenant);
    let server = FunctionServer::new(tenant.clone(), ticker.clone());
    if settings.jailed {
        seccomp::confine_server(settings.limits.reset)?;
    }
    let listener = {
        // `from_std` registers the listener with the runtime whose context is entered.
        let _context = runtime.enter();
        tokio::net::UnixListener::from_std(listener)?
    };
    let connections = usize::try_from(settings.limits.connections).unwrap_or(1);
    runtime.spawn(server.clone().listen(listener));
    let handler = ControlHandler {
        tenant,
        server,
        direct: Arc::new(Semaphore::new(connections)),
        ticker,
        runtime: runtime.handle().clone(),
    };
    // The grace period applies after the first daemon has connected.
    let mut timeout = settings.grace.min(STARTER_TIMEOUT);
    while let Some(channel) = next_daemon(&control, timeout)? {
        timeout = settings.grace;
        // The daemon disconnected or sent an invalid message. Another daemon may connect.
        let _ = handler.serve(&channel);
    }
    Ok(())
}

/// Waits for a daemon to connect. `None` if the timeout expires.
fn next_daemon(listener: &OwnedFd, timeout: Duration) -> io::Result<Option<Channel>> {
    let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
    let mut waiting = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    if poll(&mut waiting, timeout)? == 0 {
        return Ok(None);
    }
    let accepted = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?;
    // SAFETY: the kernel has just created this descriptor; it has no other owner.
    Ok(Some(Channel::new(unsafe {
        OwnedFd::from_raw_fd(accepted)
    })))
}

/// Handler of the daemon's control messages. Handles one message at a time on the main thread.
struct ControlHandler {
    tenant: Arc<Tenant>,
    server: FunctionServer,
    /// Permits for direct connections. Their number equals the limit for the gateway's connections.
    direct: Arc<Semaphore>,
    ticker: EpochTicker,
    runtime: Handle,
}

impl ControlHandler {
    /// Announces the engine's fingerprint, then handles messages until the daemon disconnects or
    /// sends an invalid message.
    fn serve(&self, control: &Channel) -> Result<(), ChannelError> {
        let engine = hex(self.tenant.fingerprint());
        control.send(&ControlResponse::Ready { engine }, &[])?;
        loop {
            let (request, files) = control.recv::<ControlRequest>()?;
            let response = self.handle(request, files);
            let response = response.unwrap_or_else(|message| ControlResponse::Refused { message });
            control.send(&response, &[])?;
        }
    }

    /// Executes a control message of the daemon. `files` are the descriptors of the message.
    fn handle(
        &self,
        request: ControlRequest,
        mut files: Vec<OwnedFd>,
    ) -> Result<ControlResponse, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let tenant = &self.tenant;
        let result = match request {
            ControlRequest::Load {
                function,
                digest,
                settings,
            } => {
                let file = files.pop().ok_or("the message has no file")?;
                let file = read_artifact(File::from(file)).map_err(|e| text(&e))?;
                let digest =
                    parse_digest(&digest).ok_or("the digest is not 64 hexadecimal digits")?;
                let load = tenant.load(&self.ticker, &function, &file, &digest, settings);
                // The main thread is not a worker of the runtime, so that it may block.
                let world = self.runtime.block_on(load).map_err(|e| text(&e))?;
                return Ok(ControlResponse::Loaded { world });
            }
            ControlRequest::Egress => {
                let socket = files.pop().ok_or("the message has no socket")?;
                let _context = self.runtime.enter();
                tenant.egress().attach(socket).map_err(|e| text(&e))?;
                return Ok(ControlResponse::Done);
            }
            ControlRequest::Direct => {
                let socket = files.pop().ok_or("the message has no socket")?;
                let _context = self.runtime.enter();
                direct::attach(&self.server, &self.direct, socket).map_err(|e| text(&e))?;
                return Ok(ControlResponse::Done);
            }
            ControlRequest::Publish { function, access } => tenant.publish(&function, access),
            ControlRequest::Metrics { function } => {
                let metrics = tenant.metrics(&function).map_err(|e| text(&e))?;
                return Ok(ControlResponse::Metrics { metrics });
            }
            ControlRequest::Logs { function, sequence } => {
                let entries = tenant
                    .logs(&function, sequence, MAX_LOG_ANSWER_BYTES)
                    .map_err(|e| text(&e))?;
                return Ok(ControlResponse::Logs { entries });
            }
            ControlRequest::Limit { function, limits } => tenant.limit(&function, limits),
            ControlRequest::Enable { function, enabled } => tenant.enable(&function, enabled),
            ControlRequest::Remove { function } => tenant.remove(&function),
        };
        result.map(|()| ControlResponse::Done).map_err(|e| text(&e))
    }
}

/// Reads a compiled module into private memory: the file of the daemon could change after the check
/// of its digest.
fn read_artifact(file: File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One byte more than the maximum, so that a larger file is noticed.
    file.take(MAX_ARTIFACT_BYTES + 1).read_to_end(&mut bytes)?;
    match u64::try_from(bytes.len()) {
        Ok(length) if length <= MAX_ARTIFACT_BYTES => Ok(bytes),
        _ => Err(io::Error::other("the compiled module is too large")),
    }
}

/// Writes a digest as hexadecimal digits.
#[must_use]
pub fn hex(digest: &Digest) -> String {
    blake3::Hash::from_bytes(*digest).to_hex().to_string()
}

/// Parses a digest in hexadecimal digits.
fn parse_digest(digits: &str) -> Option<Digest> {
    if digits.len() == DIGEST_BYTES * 2 {
        blake3::Hash::from_hex(digits)
            .ok()
            .map(|hash| *hash.as_bytes())
    } else {
        None
    }
}
