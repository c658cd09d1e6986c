//! Messages for errors of the API and invalid responses. The messages describe what to do.

use super::Server;
use hyper::{HeaderMap, StatusCode};
use jiffy_api_types::ErrorBody;

/// Header with the version of the daemon. A server that does not send it is not a daemon, or is a
/// daemon of an older version without this header.
pub const VERSION_HEADER: &str = "jiffy-version";
/// Version of this program.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Error of the API.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Error code of the API. Empty if the response has none.
    pub code: String,
    /// Message.
    pub message: String,
}

/// Returns whether `error` is an error of the API with this code.
pub fn has_error_code(error: &anyhow::Error, code: &str) -> bool {
    error
        .downcast_ref::<ApiError>()
        .is_some_and(|error| error.code == code)
}

/// Error if the server is not a daemon of a compatible version.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UnknownServer(pub String);

/// Parses the body of an error. The fields are empty if it is not an error of the API.
fn parse(body: &[u8]) -> ErrorBody {
    // A proxy in front of the daemon may respond with HTML.
    serde_json::from_slice(body).unwrap_or_else(|_| ErrorBody {
        code: 0,
        message: String::new(),
        error_code: None,
    })
}

/// Returns the version of the daemon in a response. `None` if the server is not a daemon.
pub fn version(headers: &HeaderMap) -> Option<&str> {
    headers.get(VERSION_HEADER)?.to_str().ok()
}

/// Returns the error of a response without a version.
pub fn unknown_server(server: &Server, status: StatusCode, body: &[u8]) -> anyhow::Error {
    let body = parse(body);
    UnknownServer(match server.url() {
        None => format!(
            "{} has an older version that is incompatible with this command ({VERSION}): run `jiffy \
             daemon restart` to replace it; its sandboxes continue to run",
            server.name()
        ),
        Some(url) if !body.message.is_empty() => format!("{url} rejected the request: {}", body.message),
        Some(url) => format!(
            "{url} responded with {status}, but is not a Jiffy daemon: use the address that `jiffy \
             daemon status` shows on its host"
        ),
    })
    .into()
}

/// Returns the error of an unsupported response from a daemon of version `daemon_version`.
pub fn incompatible(server: &Server, daemon_version: &str, reason: &str) -> anyhow::Error {
    let name = server.name();
    let advice = match server.url() {
        // If the versions are equal, an upgrade does not help.
        _ if daemon_version == VERSION => "see its log".to_owned(),
        None => {
            "run `jiffy daemon restart` to replace it; its sandboxes continue to run".to_owned()
        }
        Some(_) => "use the same version on both hosts".to_owned(),
    };
    UnknownServer(format!(
        "{name} has version {daemon_version}, this command has version {VERSION}, and {reason}: {advice}"
    ))
    .into()
}

/// Returns the error of an error response from a daemon of version `daemon_version`.
pub fn api_error(
    server: &Server,
    daemon_version: &str,
    status: StatusCode,
    body: &[u8],
) -> anyhow::Error {
    let body = parse(body);
    let name = server.name();
    let code = body.error_code.unwrap_or_default();
    let message = match (status, code.as_str()) {
        // A daemon of an older version lacks the call.
        (_, "no_such_call" | "method_not_allowed") => {
            return incompatible(server, daemon_version, "it does not support this request");
        }
        // Replace the message: the user of the command needs to know what to do on the other host.
        (StatusCode::UNAUTHORIZED, _) => format!(
            "{name} rejected the API key: it is unknown, expired or revoked; list the keys with `jiffy \
             key ls` on the host of the daemon, or create a key with `jiffy key create`"
        ),
        (StatusCode::FORBIDDEN, _) if body.message.contains("scope `read`") => format!(
            "{}: create a key for this request with `jiffy key create --scope create` on the host of {name}",
            body.message
        ),
        // The daemon's message may already name a command.
        (_, "sandbox_not_found") if !body.message.contains("`jiffy ") => {
            format!("{}; list all sandboxes with `jiffy ls --all`", body.message)
        }
        (_, "snapshot_not_found") if !body.message.contains("`jiffy ") => {
            format!(
                "{}; list the snapshots of this host with `jiffy snapshots`, and use complete ids for \
                 other snapshots in the store",
                body.message
            )
        }
        (_, "function_not_found") if !body.message.contains("`jiffy ") => {
            format!(
                "{}; list all functions with `jiffy function ls`",
                body.message
            )
        }
        (_, "key_not_found") if !body.message.contains("`jiffy ") => {
            format!("{}; list all keys with `jiffy key ls --all`", body.message)
        }
        _ if body.message.is_empty() => {
            return incompatible(
                server,
                daemon_version,
                &format!("it responded with status {status}"),
            );
        }
        _ => body.message,
    };
    ApiError { code, message }.into()
}
