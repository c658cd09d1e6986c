//! Messages for refusals and unusable answers: sentences that say what to do.

use super::Server;
use hyper::{HeaderMap, StatusCode};
use jiffy_api_types::ErrorBody;

/// Header with the daemon's version. A server without it is no daemon, or one that is older than
/// the header.
pub const VERSION_HEADER: &str = "jiffy-version";
/// Version of this program.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Refusal of a control plane.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// One word for it, as the API has it; empty if none was body.
    pub code: String,
    /// A sentence.
    pub message: String,
}

/// True if `error` is a refusal with this code.
pub fn is_refusal(error: &anyhow::Error, code: &str) -> bool {
    error
        .downcast_ref::<Refusal>()
        .is_some_and(|refusal| refusal.code == code)
}

/// The server is not a daemon of this version.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UnknownServer(pub String);

/// Returns the body of a refusal, which may be that of another server.
fn parse(body: &[u8]) -> ErrorBody {
    serde_json::from_slice(body).unwrap_or_else(|_| ErrorBody {
        code: 0,
        message: String::new(),
        error_code: None,
    })
}

/// The version that an answer tells.
pub fn version(headers: &HeaderMap) -> Option<&str> {
    headers.get(VERSION_HEADER)?.to_str().ok()
}

/// Message about an answer without a version.
pub fn unknown_server(server: &Server, status: StatusCode, body: &[u8]) -> anyhow::Error {
    let body = parse(body);
    UnknownServer(match server.url() {
        None => format!(
            "{} is of an older version, which this command ({VERSION}) cannot talk to: `jiffy \
             daemon restart` replaces it, and its sandboxes run on",
            server.name()
        ),
        Some(url) if !body.message.is_empty() => format!("{url} refuses: {}", body.message),
        Some(url) => format!(
            "{url} answers ({status}), but it is no Jiffy daemon: give the address that `jiffy \
             daemon status` shows on its host"
        ),
    })
    .into()
}

/// Message about an answer that a daemon of version `theirs` gave and that is not understood.
pub fn incompatible(server: &Server, theirs: &str, what: &str) -> anyhow::Error {
    let name = server.name();
    let advice = match server.url() {
        _ if theirs == VERSION => "its log says more".to_owned(),
        None => "`jiffy daemon restart` replaces it, and its sandboxes run on".to_owned(),
        Some(_) => "use the same version on both sides".to_owned(),
    };
    UnknownServer(format!(
        "{name} is of version {theirs}, this command of {VERSION}, and {what}: {advice}"
    ))
    .into()
}

/// Refusal by a daemon of version `theirs`.
pub fn refusal(server: &Server, theirs: &str, status: StatusCode, body: &[u8]) -> anyhow::Error {
    let body = parse(body);
    let name = server.name();
    let code = body.error_code.unwrap_or_default();
    let message = match (status, code.as_str()) {
        (_, "no_such_call" | "method_not_allowed") => {
            return incompatible(server, theirs, "it does not know this call");
        }
        (StatusCode::UNAUTHORIZED, _) => format!(
            "{name} does not accept the API key: it is not known there, or was revoked; `jiffy key \
             ls` on that host shows those there are, `jiffy key create` makes one"
        ),
        (StatusCode::FORBIDDEN, _) if body.message.contains("scope `read`") => format!(
            "{}: `jiffy key create --scope create` on the host of {name} makes one that may do this",
            body.message
        ),
        (_, "sandbox_not_found") if !body.message.contains("`jiffy ") => {
            format!("{}; `jiffy ls --all` shows those there are", body.message)
        }
        (_, "snapshot_not_found") if !body.message.contains("`jiffy ") => {
            format!(
                "{}; `jiffy snapshots` shows those of this host, others in a store are found by \
                 their whole ids",
                body.message
            )
        }
        _ if body.message.is_empty() => {
            return incompatible(server, theirs, &format!("it refused with status {status}"));
        }
        _ => body.message,
    };
    Refusal { code, message }.into()
}
