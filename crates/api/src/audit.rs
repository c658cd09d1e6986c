//! Audit log: records each call of the API with its caller and its result.

use crate::app::App;
use crate::caller::{Caller, ClientAddress};
use crate::error::ErrorCode;
use crate::fleet::Forwarded;
use crate::keys::SECRET_PREFIX;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use jiffy_api_types::AuditCaller;
use jiffy_event_log::{AuditLog, AuditedCall};
use percent_encoding::percent_decode_str;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Interval at which numbers of rejected calls are recorded. If a client has many rejected calls,
/// the log counts the further ones instead of recording each of them.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum length of a recorded id, name or header in characters.
const MAX_TEXT: usize = 128;
/// Maximum length of a recorded method in characters: clients may send methods of any length.
const MAX_METHOD: usize = 16;
/// Status of a call whose client has closed the connection before the response.
pub(crate) const CLIENT_CLOSED: u16 = 499;
/// The call that reads the audit log, as it is recorded.
pub(crate) const READ_CALL: &str = "GET /audit";
/// Paths that are not recorded: they need no key, or are requests to functions.
const UNRECORDED: [&str; 5] = [
    "/health",
    "/openapi.json",
    "/.well-known/openid-configuration",
    "/.well-known/jwks.json",
    "/functions/{name}/invoke",
];
/// Path parameters that are secret: `{word}` is the secret part of an upload link.
const SECRET: [&str; 1] = ["{word}"];

/// Session of the web console that makes a call, as an extension of the request.
#[derive(Debug, Clone)]
pub struct ConsoleSession(pub String);

/// Marks the response to a call that is not recorded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unrecorded;

/// Sandbox that a call has created, as an extension of the response.
#[derive(Debug, Clone)]
pub(crate) struct CreatedSandbox(pub String);

impl App {
    /// Records calls in `log`. Without a log, calls are not recorded.
    pub fn with_audit(mut self, log: AuditLog) -> Self {
        self.audit = Some(log);
        self
    }
}

/// Background task that records the numbers of rejected calls. Never returns.
pub async fn count_rejections(app: App) {
    loop {
        tokio::time::sleep(COUNT_INTERVAL).await;
        if let Some(log) = &app.audit {
            let all_periods = false;
            log.write_counted(all_periods);
        }
    }
}

/// Caller of a request, which is known after its authentication.
#[derive(Debug, Clone, Default)]
pub(crate) struct AuditedCaller(Arc<OnceLock<(AuditCaller, Option<String>)>>);

impl AuditedCaller {
    /// Sets the caller.
    pub fn set(&self, caller: &Caller) {
        // A request is authenticated once.
        let _ = self.0.set(described(caller));
    }

    /// Sets the holder of a token as the caller. `owner` is the key that owns the token's object.
    pub fn set_token(&self, owner: Option<String>) {
        let _ = self.0.set((AuditCaller::Token, owner));
    }
}

/// Call that has no response yet. Dropping it records the call, also if the client has closed the
/// connection: a client must not be able to hide a call in this way.
struct PendingCall {
    log: AuditLog,
    /// `None` if the call is not recorded.
    call: Option<AuditedCall>,
    caller: AuditedCaller,
    start: Instant,
}

impl PendingCall {
    /// Adds the result of the call to its record, when the response exists. The record is written
    /// when `self` is dropped.
    fn complete(mut self, response: &Response) {
        let extensions = response.extensions();
        if extensions.get::<Unrecorded>().is_some() {
            self.call = None;
        }
        let Some(call) = &mut self.call else { return };
        call.status = response.status().as_u16();
        if let Some(CreatedSandbox(id)) = extensions.get() {
            call.sandbox = Some(id.clone());
        }
        let error = extensions.get::<ErrorCode>();
        call.error = error.map(|error| error.0.to_owned());
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        let Some(mut call) = self.call.take() else {
            return;
        };
        if let Some(caller) = self.caller.0.get() {
            (call.caller, call.key) = caller.clone();
        }
        call.ms = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.log.record(call);
    }
}

/// Sets the caller of a call.
pub(crate) fn set_caller(call: &mut AuditedCall, caller: &Caller) {
    (call.caller, call.key) = described(caller);
}

/// Returns the kind of a caller and its key.
fn described(caller: &Caller) -> (AuditCaller, Option<String>) {
    match caller {
        Caller::Owner => (AuditCaller::Owner, None),
        Caller::Key(key) => (AuditCaller::Key, Some(key.id.clone())),
        Caller::Function(function) => (AuditCaller::Function, Some(function.key.id.clone())),
    }
}

/// Records a call after its response.
pub(crate) async fn record(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let Some(log) = app.audit.clone() else {
        return next.run(request).await;
    };
    let path = request.extensions().get::<MatchedPath>().cloned();
    // The host that received the call from its client records it.
    let is_forwarded = request.extensions().get::<Forwarded>().is_some();
    let path = path.filter(|path| {
        let path = path.as_str();
        !is_forwarded && !UNRECORDED.iter().any(|prefix| path.starts_with(prefix))
    });
    let Some(path) = path else {
        return next.run(request).await;
    };
    let caller = AuditedCaller::default();
    request.extensions_mut().insert(caller.clone());
    let pending = PendingCall {
        log,
        call: Some(describe(&request, path.as_str())),
        caller,
        start: Instant::now(),
    };
    let response = next.run(request).await;
    pending.complete(&response);
    response
}

/// Describes a call without its result. Queries and bodies are not recorded.
fn describe(request: &Request, path: &str) -> AuditedCall {
    let method = bounded(request.method().as_str(), MAX_METHOD);
    let mut call = AuditedCall::new(format!("{method} {path}"), CLIENT_CLOSED);
    let parts = path.split('/').zip(request.uri().path().split('/'));
    let parameters = parts.filter(|(name, _)| name.starts_with('{') && !SECRET.contains(name));
    for (name, value) in parameters {
        let mut value = bounded(&percent_decode_str(value).decode_utf8_lossy(), MAX_TEXT);
        // A caller may send the secret of a key instead of its id.
        if value.starts_with(SECRET_PREFIX) {
            value.truncate(SECRET_PREFIX.len());
        }
        match name {
            "{sandboxID}" => call.sandbox = Some(value),
            // The first parameter is the object of the call.
            _ if call.object.is_none() => call.object = Some(value),
            _ => {}
        }
    }
    let extensions = request.extensions();
    let session = extensions.get::<ConsoleSession>();
    call.session = session.map(|session| session.0.clone());
    // The owner's socket has no address.
    call.address = extensions
        .get::<ClientAddress>()
        .map(|address| address.0.to_string());
    let id = request.headers().get("x-request-id");
    let id = id.and_then(|id| id.to_str().ok());
    call.request = id.map(|id| bounded(id, MAX_TEXT));
    call
}

/// Returns the first characters of a text.
fn bounded(text: &str, max: usize) -> String {
    text.chars().take(max).collect()
}
