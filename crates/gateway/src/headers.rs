//! Rewriting of message heads, in both directions.

use crate::config::GatewayConfig;
use crate::peer::Peer;
use crate::request_id::{RequestId, X_REQUEST_ID};
use crate::route::{Addressing, SANDBOX_ID, SANDBOX_PORT, SandboxTarget};
use crate::sandboxes::SandboxAccess;
use hyper::header::{CONNECTION, HOST, HeaderMap, HeaderName, HeaderValue, TE, UPGRADE};
use hyper::http::request::Parts;
use hyper::{Uri, Version};
use jiffy_http::headers::has_token;

pub use jiffy_http::headers::{
    TRAFFIC_TOKEN, confine_answer, confine_function_request, confine_request,
};

/// Facts about a request by which its head, and that of the answer, are rewritten.
#[derive(Debug)]
pub struct HeaderRewrite<'a> {
    /// The client.
    pub peer: Peer,
    /// Under which name.
    pub request_id: &'a RequestId,
    /// Sandbox, port and path it is for.
    pub target: &'a SandboxTarget,
    /// Host as the client wrote it, with port.
    pub host: &'a str,
    /// Access settings of the sandbox.
    pub access: &'a SandboxAccess,
    /// Configuration of the gateway.
    pub config: &'a GatewayConfig,
}

/// The host of a request as it was written.
#[must_use]
pub fn requested_host(parts: &Parts) -> String {
    let header = || parts.headers.get(HOST).and_then(|host| host.to_str().ok());
    parts
        .uri
        .authority()
        .map(hyper::http::uri::Authority::as_str)
        .or_else(header)
        .unwrap_or_default()
        .to_owned()
}

/// Returns the protocol of an HTTP/1.1 upgrade. HTTP/2 (`h2c`) is none: it is spoken from the
/// start.
#[must_use]
pub fn upgrade(version: Version, headers: &HeaderMap) -> Option<HeaderValue> {
    if version != Version::HTTP_11 || !has_token(headers, &CONNECTION, "upgrade") {
        return None;
    }
    headers
        .get(UPGRADE)
        .filter(|protocol| !protocol.as_bytes().eq_ignore_ascii_case(b"h2c"))
        .cloned()
}

impl HeaderRewrite<'_> {
    fn prefix(&self) -> Option<&str> {
        match &self.target.addressing {
            Addressing::Path(prefix) => Some(prefix),
            _ => None,
        }
    }

    /// Turns the head of a client's request into that of the request to the guest.
    pub fn to_guest(&self, parts: &mut Parts) {
        let upgrade = upgrade(parts.version, &parts.headers);
        let trailers = has_token(&parts.headers, &TE, "trailers");
        let before = self.forwarded_for(&parts.headers);
        parts.uri = Uri::from(self.target.path.clone());
        parts.version = Version::HTTP_11;
        let headers = &mut parts.headers;
        confine_request(headers);
        let mut set = |name: &'static str, value: &str| match HeaderValue::from_str(value) {
            Ok(value) => drop(headers.insert(HeaderName::from_static(name), value)),
            Err(_) => drop(headers.remove(name)),
        };
        let port = self.target.port.to_string();
        let masked = self.access.mask_request_host.as_ref();
        let masked = masked.map(|host| host.replace("${PORT}", &port));
        set("host", masked.as_deref().unwrap_or(self.host));
        if masked.is_some() {
            // Without the client's spelling of names the guest gets `Host`, as from E2B's proxy,
            // also if the client wrote `host`.
            parts.extensions.clear();
        }
        set(SANDBOX_ID, &self.target.id);
        set(SANDBOX_PORT, &port);
        set("x-forwarded-for", &before);
        set("x-forwarded-host", self.host);
        let proto = if self.peer.tls { "https" } else { "http" };
        set("x-forwarded-proto", proto);
        if let Some(prefix) = self.prefix() {
            set("x-forwarded-prefix", prefix);
        }
        headers.insert(X_REQUEST_ID.clone(), self.request_id.value());
        if let Some(protocol) = upgrade {
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            headers.insert(UPGRADE, protocol);
        } else if trailers {
            headers.insert(CONNECTION, HeaderValue::from_static("te"));
            headers.insert(TE, HeaderValue::from_static("trailers"));
        }
    }

    /// Returns `X-Forwarded-For`: continued if a trusted proxy sent it, else the peer's address
    /// alone.
    fn forwarded_for(&self, headers: &HeaderMap) -> String {
        let mut hops: Vec<&str> = Vec::new();
        if self.config.trusted_proxies.contains(&self.peer.ip) {
            let values = headers.get_all("x-forwarded-for").iter();
            hops.extend(values.filter_map(|value| value.to_str().ok()));
        }
        let peer = self.peer.ip.to_string();
        hops.push(&peer);
        hops.join(", ")
    }

    /// Turns the head of a guest's answer into that of the answer to the client. `upgraded`: the
    /// protocol it switches to.
    pub fn to_client(&self, headers: &mut HeaderMap, upgraded: Option<HeaderValue>) {
        let prefix = self.prefix();
        confine_answer(headers, prefix, self.host, self.config.isolate_paths);
        headers.insert(X_REQUEST_ID.clone(), self.request_id.value());
        if let Some(protocol) = upgraded {
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            headers.insert(UPGRADE, protocol);
        }
    }
}
