//! Routing: decides from host name and path whether a request is for the control plane or for a
//! port of a sandbox. The functions are pure and do not access sandboxes.

use crate::config::GatewayConfig;
use crate::host_name::{self, HostTarget};
use hyper::header::{CONTENT_LENGTH, HOST, HeaderMap, TRANSFER_ENCODING};
use hyper::http::request::Parts;
use hyper::http::uri::PathAndQuery;
use hyper::{Method, StatusCode};
use jiffy_proto::internal::is_api_host;

/// Header with the sandbox id.
pub const SANDBOX_ID: &str = "e2b-sandbox-id";
/// Header with the port in the sandbox.
pub const SANDBOX_PORT: &str = "e2b-sandbox-port";

/// Destination of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// Sandbox.
    Sandbox(SandboxTarget),
    /// Function, by the label in its host name. The control plane answers the request.
    Function(String),
    /// Control plane.
    ControlPlane,
    /// The request is rejected with this status and reason.
    Refused(StatusCode, &'static str),
}

/// Label of a function's host name, in the extensions of a request to the control plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionLabel(pub String);

/// Port of a sandbox, and the path to request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxTarget {
    /// Sandbox id, 1 to 64 lower-case letters and digits.
    pub id: String,
    /// TCP port in the guest. Not 0.
    pub port: u16,
    /// Path and query for the guest, without the prefix of [`Addressing::Path`]. May contain the
    /// parameters of a signed link, which are removed when access is checked.
    pub path: PathAndQuery,
    /// Form in which the request specified the sandbox.
    pub addressing: Addressing,
}

/// Form in which a request specifies its sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Addressing {
    /// By the headers [`SANDBOX_ID`] and [`SANDBOX_PORT`].
    Headers,
    /// By host name, with expiry and signature if it contains them.
    Host(Option<(String, String)>),
    /// By path. Contains the removed prefix: `/sandboxes/{id}/proxy/{port}`.
    Path(String),
}

/// Routes a request by host name, otherwise by the two headers, otherwise by path.
#[must_use]
pub fn route(parts: &Parts, config: &GatewayConfig) -> Route {
    let refused = |(status, reason)| Route::Refused(status, reason);
    decide(parts, config).unwrap_or_else(refused)
}

/// Status and reason of a rejected request.
type RouteRefusal = (StatusCode, &'static str);

/// Returns a refusal with status 400.
const fn bad(reason: &'static str) -> RouteRefusal {
    (StatusCode::BAD_REQUEST, reason)
}

/// Routes a request of an internal connection, which the daemon opens on behalf of a function or
/// sandbox ([`crate::internal`]). Only the host name `api.jiffy.internal` is valid. Like the
/// gateway's own names, it serves the API and, by headers or path, sandboxes. The caller rejects
/// routes that the function or sandbox may not use.
pub(crate) fn route_internal(parts: &Parts) -> Route {
    let decide = || match checked_host(parts)? {
        host if is_api_host(&host) => at_gateway(parts),
        _ => Err((
            StatusCode::MISDIRECTED_REQUEST,
            "Only api.jiffy.internal is served on this connection",
        )),
    };
    decide().unwrap_or_else(|(status, reason)| Route::Refused(status, reason))
}

/// Returns the host of a request. Rejects `CONNECT` and ambiguous framing.
fn checked_host(parts: &Parts) -> Result<String, RouteRefusal> {
    if parts.method == Method::CONNECT {
        return Err((
            StatusCode::METHOD_NOT_ALLOWED,
            "This is not a forward proxy: CONNECT is not served",
        ));
    }
    // Check the framing before any other header is interpreted.
    check_framing(&parts.headers)?;
    host(parts)
}

/// Returns path and query of a request. A request line that contains only an authority has no path
/// and counts as `/`.
fn path(parts: &Parts) -> PathAndQuery {
    let path = parts.uri.path_and_query().cloned();
    path.unwrap_or_else(|| PathAndQuery::from_static("/"))
}

/// Routes a request for the gateway's own host names: by the two headers, otherwise by path.
fn at_gateway(parts: &Parts) -> Result<Route, RouteRefusal> {
    match by_headers(&parts.headers)? {
        Some((id, port)) => Ok(Route::Sandbox(SandboxTarget {
            id,
            port,
            path: path(parts),
            addressing: Addressing::Headers,
        })),
        None => {
            let target = by_path(&path(parts))?;
            Ok(target.map_or(Route::ControlPlane, Route::Sandbox))
        }
    }
}

/// Routes a request of a client.
fn decide(parts: &Parts, config: &GatewayConfig) -> Result<Route, RouteRefusal> {
    let host = checked_host(parts)?;
    // Reject malformed headers even if the host name determines the target.
    by_headers(&parts.headers)?;
    match host_name::classify(&host, config) {
        HostTarget::Sandbox(label) => Ok(Route::Sandbox(SandboxTarget {
            id: label.id,
            port: label.port,
            path: path(parts),
            addressing: Addressing::Host(label.link),
        })),
        HostTarget::Function(label) => Ok(Route::Function(label)),
        HostTarget::Malformed(reason) => Err(bad(reason)),
        HostTarget::Foreign => Err((
            StatusCode::MISDIRECTED_REQUEST,
            "This server does not serve this host name: use an IP address, localhost, or a domain given with --domain or --allow-host",
        )),
        // The gateway's own names serve the API and, by headers or path, all sandboxes.
        HostTarget::Gateway => at_gateway(parts),
    }
}

/// Rejects requests whose length two parsers could interpret differently (request smuggling).
fn check_framing(headers: &HeaderMap) -> Result<(), RouteRefusal> {
    let encoded = match only(headers, TRANSFER_ENCODING.as_str()) {
        Err(()) => return Err(bad("More than one Transfer-Encoding")),
        Ok(None) => false,
        Ok(Some(encoding)) if encoding.eq_ignore_ascii_case("chunked") => true,
        Ok(Some(_)) => return Err(bad("The only Transfer-Encoding served is chunked")),
    };
    // hyper has checked that the value is a number.
    match only(headers, CONTENT_LENGTH.as_str()) {
        Err(()) => Err(bad("More than one Content-Length")),
        Ok(Some(_)) if encoded => Err(bad("Transfer-Encoding and Content-Length together")),
        _ => Ok(()),
    }
}

/// Returns the host, which must be equal in the `Host` header and the request line.
fn host(parts: &Parts) -> Result<String, RouteRefusal> {
    let header = only(&parts.headers, HOST.as_str())
        .map_err(|()| bad("More than one Host header"))?
        .map(|host| host_name::parse_host(host).ok_or(bad("The Host header is not a host name")))
        .transpose()?;
    let line = parts
        .uri
        .authority()
        .map(|authority| {
            host_name::parse_host(authority.as_str())
                .ok_or(bad("The authority of the request is not a host name"))
        })
        .transpose()?;
    match (line, header) {
        // A proxy in front of this server may have checked only one of them.
        (Some(line), Some(header)) if line != header => Err(bad(
            "The Host header and the authority of the request differ",
        )),
        (Some(host), _) | (None, Some(host)) => Ok(host),
        (None, None) => Err(bad("The Host header is missing")),
    }
}

/// Parses the two headers that address a sandbox. `None` if neither exists.
fn by_headers(headers: &HeaderMap) -> Result<Option<(String, u16)>, RouteRefusal> {
    let id = only(headers, SANDBOX_ID)
        .map_err(|()| bad("More than one or an unreadable E2b-Sandbox-Id"))?;
    let port = only(headers, SANDBOX_PORT)
        .map_err(|()| bad("More than one or an unreadable E2b-Sandbox-Port"))?;
    // One header without the other is probably a mistake of the client.
    match (id, port) {
        (None, None) => Ok(None),
        (Some(id), Some(port)) => {
            if !host_name::is_id(id) {
                return Err(bad("E2b-Sandbox-Id is not a sandbox id"));
            }
            let port = host_name::parse_port(port)
                .ok_or(bad("E2b-Sandbox-Port is not a port from 1 to 65535"))?;
            Ok(Some((id.to_owned(), port)))
        }
        _ => Err(bad(
            "E2b-Sandbox-Id and E2b-Sandbox-Port must be used together",
        )),
    }
}

/// Parses `/sandboxes/{id}/proxy/{port}/...`. `None` for other paths, which belong to the control
/// plane.
fn by_path(path: &PathAndQuery) -> Result<Option<SandboxTarget>, RouteRefusal> {
    // Do not decode the path: the guest receives the remainder as sent.
    let mut pieces = path.path().splitn(6, '/');
    let (Some(""), Some("sandboxes"), Some(id), Some("proxy"), Some(port)) = (
        pieces.next(),
        pieces.next(),
        pieces.next(),
        pieces.next(),
        pieces.next(),
    ) else {
        return Ok(None);
    };
    if !host_name::is_id(id) {
        return Err(bad("The path has no sandbox id after /sandboxes/"));
    }
    let prefix = format!("/sandboxes/{id}/proxy/{port}");
    // The prefix above contains the text of the port. From here on, `port` is the number.
    let port = host_name::parse_port(port)
        .ok_or(bad("The path has no port from 1 to 65535 after /proxy/"))?;
    let mut rest = format!("/{}", pieces.next().unwrap_or_default());
    if let Some(query) = path.query() {
        rest.push('?');
        rest.push_str(query);
    }
    let path = rest
        .try_into()
        .map_err(|_| bad("The path is not a path after /proxy/"))?;
    Ok(Some(SandboxTarget {
        id: id.to_owned(),
        port,
        path,
        addressing: Addressing::Path(prefix),
    }))
}

/// Returns the only value of a header. `Err` if the header has several values or is not plain text.
pub(crate) fn only<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, ()> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => value.to_str().map(Some).map_err(|_| ()),
        (Some(_), Some(_)) => Err(()),
    }
}

#[cfg(test)]
mod tests;
