//! Entries of the audit log about the console's calls on guests: names of files and shells, and
//! terminals that browsers show.

use crate::Console;
use crate::refusal::Refusal;
use crate::session_store::Session;
use crate::terminal::Terminal;
use axum::Extension;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use jiffy_api::{Caller, ClientAddress, ConsoleSession, SharedGuestNames, TerminalAudit};
use jiffy_gateway::{bounded_command, bounded_paths};
use std::sync::Arc;

/// Maximum length of a recorded id in characters. A browser may send any text.
const MAX_ID_CHARS: usize = 64;

/// Names of the call in progress, as an extension of its request.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallNames(SharedGuestNames);

impl CallNames {
    /// Sets the paths that the call accesses in a sandbox.
    pub fn set_paths(&self, sandbox: &str, paths: &[&str]) {
        self.0.update(|names| {
            names.sandbox = Some(sandbox.chars().take(MAX_ID_CHARS).collect());
            names.paths = bounded_paths(paths);
        });
    }
}

/// Records calls on guests that name files, if the host's owner has enabled this.
pub(crate) async fn record(
    State(console): State<Console>,
    Extension(caller): Extension<Caller>,
    Extension(session): Extension<Session>,
    Extension(from): Extension<ClientAddress>,
    path: MatchedPath,
    mut request: Request,
    next: Next,
) -> Response {
    let names = CallNames::default();
    request.extensions_mut().insert(names.clone());
    let call = format!("{} {}", request.method(), path.as_str());
    let session = ConsoleSession(session.id);
    let app = &console.app;
    let pending = app.begin_guest_audit(call, &caller, &session, from, names.0);
    let response = next.run(request).await;
    if let Some(pending) = pending {
        pending.complete(response.status().as_u16());
    }
    response
}

/// Request of a browser that shows a terminal. It is a message in the WebSocket `/live`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TerminalCall<'a> {
    /// Starts a terminal with this shell. `None` for the default of the user.
    Open(Option<&'a str>),
    /// Shows a terminal again, or to a further viewer.
    Attach(&'a str),
}

/// Records that a browser has started or attached a terminal, also if this failed. The command is
/// recorded only if the host's owner has enabled this.
pub(crate) fn record_terminal(
    console: &Console,
    (caller, session, from): (&Caller, &Session, ClientAddress),
    sandbox: &str,
    request: TerminalCall<'_>,
    result: &Result<Arc<Terminal>, Refusal>,
) {
    let (call, command) = match request {
        TerminalCall::Open(shell) => {
            let command = bounded_command(&[shell.unwrap_or("$SHELL"), "-l"]);
            ("GET /live open", Some(command))
        }
        TerminalCall::Attach(_) => ("GET /live attach", None),
    };
    let named = match request {
        TerminalCall::Open(_) => None,
        TerminalCall::Attach(id) => Some(id.chars().take(MAX_ID_CHARS).collect()),
    };
    let (status, error, terminal) = match result {
        Ok(terminal) => (200, None, Some(terminal.id.clone())),
        Err(refusal) => {
            let (status, code) = refusal.status_and_code();
            (status, Some(code), named)
        }
    };
    let session = ConsoleSession(session.id.clone());
    let terminal = TerminalAudit {
        call,
        sandbox: sandbox.chars().take(MAX_ID_CHARS).collect(),
        terminal,
        command,
        status,
        error,
    };
    console
        .app
        .record_terminal(caller, &session, from, terminal);
}
