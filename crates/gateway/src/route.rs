//! Decides whose a request is. Pure: no sandbox is looked up here.

use crate::config::Config;
use crate::host_name::{self, Named};
use hyper::header::{CONTENT_LENGTH, HOST, HeaderMap, TRANSFER_ENCODING};
use hyper::http::request::Parts;
use hyper::http::uri::PathAndQuery;
use hyper::{Method, StatusCode};

/// Header that names the sandbox.
pub const SANDBOX_ID: &str = "e2b-sandbox-id";
/// Header that names the port in it.
pub const SANDBOX_PORT: &str = "e2b-sandbox-port";

/// Whose a request is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// A sandbox's.
    Sandbox(Target),
    /// The control plane's.
    ControlPlane,
    /// Nobody's, with the reason in a sentence.
    Refused(StatusCode, &'static str),
}

/// A port of a sandbox, and what to ask there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Sandbox id, 1 to 64 lower-case letters and digits.
    pub id: String,
    /// TCP port in the guest, not 0.
    pub port: u16,
    /// Path and query as the guest shall see them.
    pub path: PathAndQuery,
    /// How the request named it.
    pub how: How,
}

/// How a request named its sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum How {
    /// By the two headers.
    Headers,
    /// By host name, with expiry and signature if they were in it.
    Host(Option<(String, String)>),
    /// By path; this prefix was cut off: `/sandboxes/{id}/proxy/{port}`.
    Path(String),
}

/// Decides whose a request is: by host name, else by the two headers, else by path.
#[must_use]
pub fn route(parts: &Parts, config: &Config) -> Route {
    match decide(parts, config) {
        Ok(Some(target)) => Route::Sandbox(target),
        Ok(None) => Route::ControlPlane,
        Err((status, reason)) => Route::Refused(status, reason),
    }
}

type Refusal = (StatusCode, &'static str);

const fn bad(reason: &'static str) -> Refusal {
    (StatusCode::BAD_REQUEST, reason)
}

fn decide(parts: &Parts, config: &Config) -> Result<Option<Target>, Refusal> {
    if parts.method == Method::CONNECT {
        return Err((
            StatusCode::METHOD_NOT_ALLOWED,
            "This is not a forward proxy: CONNECT is not served",
        ));
    }
    check_framing(&parts.headers)?;
    let host = host(parts)?;
    let headers = by_headers(&parts.headers)?;
    let path = || {
        parts
            .uri
            .path_and_query()
            .cloned()
            .unwrap_or_else(|| PathAndQuery::from_static("/"))
    };
    match host_name::named(&host, config) {
        Named::Sandbox(label) => Ok(Some(Target {
            id: label.id,
            port: label.port,
            path: path(),
            how: How::Host(label.link),
        })),
        Named::Malformed(reason) => Err(bad(reason)),
        Named::Stranger => Err((
            StatusCode::MISDIRECTED_REQUEST,
            "This host name is not served here: use an address, localhost, or a domain this server is configured for",
        )),
        Named::Gateway => match headers {
            Some((id, port)) => Ok(Some(Target {
                id,
                port,
                path: path(),
                how: How::Headers,
            })),
            None => by_path(&path()),
        },
    }
}

/// Refuses whatever two parsers could read as two different messages.
fn check_framing(headers: &HeaderMap) -> Result<(), Refusal> {
    let encoded = match only(headers, TRANSFER_ENCODING.as_str()) {
        Err(()) => return Err(bad("More than one Transfer-Encoding")),
        Ok(None) => false,
        Ok(Some(encoding)) if encoding.eq_ignore_ascii_case("chunked") => true,
        Ok(Some(_)) => return Err(bad("The only Transfer-Encoding served is chunked")),
    };
    match only(headers, CONTENT_LENGTH.as_str()) {
        Err(()) => Err(bad("More than one Content-Length")),
        Ok(Some(_)) if encoded => Err(bad("Transfer-Encoding and Content-Length together")),
        _ => Ok(()),
    }
}

/// The host meant, the same in the `Host` header and the request line.
fn host(parts: &Parts) -> Result<String, Refusal> {
    let header = only(&parts.headers, HOST.as_str())
        .map_err(|()| bad("More than one Host header"))?
        .map(|host| host_name::host_of(host).ok_or(bad("The Host header is not a host name")))
        .transpose()?;
    let line = parts
        .uri
        .authority()
        .map(|authority| {
            host_name::host_of(authority.as_str())
                .ok_or(bad("The authority of the request is not a host name"))
        })
        .transpose()?;
    match (line, header) {
        (Some(line), Some(header)) if line != header => Err(bad(
            "The Host header and the authority of the request differ",
        )),
        (Some(host), _) | (None, Some(host)) => Ok(host),
        (None, None) => Err(bad("A Host header is needed")),
    }
}

fn by_headers(headers: &HeaderMap) -> Result<Option<(String, u16)>, Refusal> {
    let id = only(headers, SANDBOX_ID)
        .map_err(|()| bad("More than one or an unreadable E2b-Sandbox-Id"))?;
    let port = only(headers, SANDBOX_PORT)
        .map_err(|()| bad("More than one or an unreadable E2b-Sandbox-Port"))?;
    match (id, port) {
        (None, None) => Ok(None),
        (Some(id), Some(port)) => {
            if !host_name::is_id(id) {
                return Err(bad("E2b-Sandbox-Id is not a sandbox id"));
            }
            let port = host_name::port(port)
                .ok_or(bad("E2b-Sandbox-Port is not a port from 1 to 65535"))?;
            Ok(Some((id.to_owned(), port)))
        }
        _ => Err(bad(
            "E2b-Sandbox-Id and E2b-Sandbox-Port are needed together",
        )),
    }
}

/// Reads `/sandboxes/{id}/proxy/{port}/...`; everything that has not this form is the control plane's.
fn by_path(path: &PathAndQuery) -> Result<Option<Target>, Refusal> {
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
        return Err(bad("The path names no sandbox id after /sandboxes/"));
    }
    let prefix = format!("/sandboxes/{id}/proxy/{port}");
    let port =
        host_name::port(port).ok_or(bad("The path names no port from 1 to 65535 after /proxy/"))?;
    let mut rest = format!("/{}", pieces.next().unwrap_or_default());
    if let Some(query) = path.query() {
        rest.push('?');
        rest.push_str(query);
    }
    let path = rest
        .try_into()
        .map_err(|_| bad("The path is not a path after /proxy/"))?;
    Ok(Some(Target {
        id: id.to_owned(),
        port,
        path,
        how: How::Path(prefix),
    }))
}

/// The one value of a header; `Err` if there are several, or it is not plain text.
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
