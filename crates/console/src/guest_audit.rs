//! Names of files and shells in the console's calls on guests, for the audit log.

use crate::Console;
use crate::session_store::Session;
use axum::Extension;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use jiffy_api::{Caller, ClientAddress, ConsoleSession, SharedGuestNames};
use jiffy_gateway::{bounded_command, bounded_paths};

/// Maximum length of a recorded sandbox id in characters. A browser may send any text.
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

/// Records the start of a terminal with `shell`. `None` for the default of the user.
pub(crate) fn record_terminal(
    console: &Console,
    (caller, session, from): (&Caller, &Session, ClientAddress),
    sandbox: &str,
    shell: Option<&str>,
    status: u16,
) {
    let names = SharedGuestNames::default();
    names.update(|names| {
        names.sandbox = Some(sandbox.chars().take(MAX_ID_CHARS).collect());
        names.command = Some(bounded_command(&[shell.unwrap_or("$SHELL"), "-l"]));
    });
    let session = ConsoleSession(session.id.clone());
    let call = "GET /live".to_owned();
    let app = &console.app;
    if let Some(pending) = app.begin_guest_audit(call, caller, &session, from, names) {
        pending.complete(status);
    }
}
