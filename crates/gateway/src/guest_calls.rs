//! Record of the calls that clients make to agents: commands and paths of files, without the
//! content of files, input and environment.
//!
//! The *agent* is the program in a guest that starts processes and accesses files for clients. The
//! gateway forwards calls to it without parsing them. If a log is set, the gateway copies the first
//! bytes of a call's body while it forwards them, and parses the copy after the response began.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

mod description;
mod text;

pub use text::{MAX_COMMAND_BYTES, MAX_PATHS_BYTES, bounded_command, bounded_paths};

use crate::peer::Peer;
use crate::request_body::ClientRequestBody;
use crate::route::SandboxTarget;
use crate::sandboxes::SandboxAccess;
use crate::state::RequestContext;
use description::CallKind;
use hyper::body::{Body, Bytes};
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap};
use hyper::http::request::Parts;
use jiffy_proto::agent::ENVD_PORT;
use jiffy_proto::internal::InternalOrigin;
use parking_lot::Mutex;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of bytes of a body that are copied.
const MAX_COPIED_BYTES: usize = 64 * 1024;
/// Status of a call whose client has closed the connection before the response.
const CLIENT_CLOSED: u16 = 499;

/// Log of the calls that clients make to agents.
pub trait GuestCallLog: Debug + Send + Sync + 'static {
    /// Records a call after its response began.
    fn record(&self, call: GuestCall);
}

/// Call of a client to the agent of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestCall {
    /// Sandbox id.
    pub sandbox: String,
    /// API key that owns the sandbox. `None` if the host's owner does.
    pub owner: Option<String>,
    /// Client.
    pub peer: Peer,
    /// Function or sandbox that made the call. `None` for other clients.
    pub origin: Option<Arc<InternalOrigin>>,
    /// Id of the request.
    pub request_id: String,
    /// Method and path.
    pub call: &'static str,
    /// Program and arguments of a started process, as [`bounded_command`] returns them.
    pub command: Option<String>,
    /// Paths, as [`bounded_paths`] returns them.
    pub paths: Vec<String>,
    /// Status of the response.
    pub status: u16,
    /// Time from the request to the head of the response.
    pub duration: Duration,
}

/// First bytes of a body, which are copied while the body is forwarded.
#[derive(Debug, Clone, Default)]
pub(crate) struct CopiedBody(Arc<Mutex<Vec<u8>>>);

impl CopiedBody {
    /// Copies bytes up to the maximum.
    pub fn add(&self, bytes: &Bytes) {
        let mut copied = self.0.lock();
        let free = MAX_COPIED_BYTES.saturating_sub(copied.len());
        copied.extend_from_slice(bytes.get(..free.min(bytes.len())).unwrap_or_default());
    }
}

/// Call whose response has not begun. The call is recorded when this value is dropped: also if the
/// client closes the connection, which must not hide the call.
#[derive(Debug)]
pub(crate) struct PendingGuestCall {
    log: Arc<dyn GuestCallLog>,
    /// `None` after the call was recorded.
    call: Option<GuestCall>,
    kind: CallKind,
    /// Query of the request.
    query: Option<String>,
    headers: HeaderMap,
    body: CopiedBody,
    /// Time at which the call arrived.
    start: Instant,
}

impl PendingGuestCall {
    /// Begins the record of a request. Returns `None` if the request starts no process and accesses
    /// no file.
    pub fn begin(
        log: &Arc<dyn GuestCallLog>,
        context: &RequestContext,
        (target, access): (&SandboxTarget, &SandboxAccess),
        parts: &Parts,
        body: &mut ClientRequestBody,
    ) -> Option<Self> {
        if u32::from(target.port) != ENVD_PORT {
            return None;
        }
        let (call, kind) = description::kind_of(&parts.method, target.path.path())?;
        let mut headers = HeaderMap::new();
        for name in [CONTENT_TYPE, CONTENT_ENCODING] {
            if let Some(value) = parts.headers.get(&name) {
                headers.insert(name, value.clone());
            }
        }
        let copied = CopiedBody::default();
        if kind.has_names_in_body() && !body.is_end_stream() {
            body.copy_to(copied.clone());
        }
        let call = GuestCall {
            sandbox: target.id.clone(),
            owner: access.owner.clone(),
            peer: context.peer,
            origin: context.origin.clone(),
            request_id: context.request_id.as_str().to_owned(),
            call,
            command: None,
            paths: Vec::new(),
            status: CLIENT_CLOSED,
            duration: Duration::ZERO,
        };
        Some(Self {
            log: Arc::clone(log),
            call: Some(call),
            kind,
            query: target.path.query().map(str::to_owned),
            headers,
            body: copied,
            start: Instant::now(),
        })
    }

    /// Records the call with the status of its response.
    pub fn complete(mut self, status: u16) {
        if let Some(call) = &mut self.call {
            call.status = status;
        }
    }
}

impl Drop for PendingGuestCall {
    fn drop(&mut self) {
        let Some(mut call) = self.call.take() else {
            return;
        };
        let body = std::mem::take(&mut *self.body.0.lock());
        let is_cut = body.len() >= MAX_COPIED_BYTES;
        let query = self.query.as_deref().unwrap_or_default();
        let names = description::names(self.kind, query, &self.headers, &body, is_cut);
        call.command = names.command.as_deref().map(bounded_command);
        call.paths = bounded_paths(&names.paths);
        call.duration = self.start.elapsed();
        self.log.record(call);
    }
}
