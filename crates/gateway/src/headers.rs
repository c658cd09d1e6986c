//! Rewrites the heads of requests before guests receive them, and the heads of their responses:
//! guests must not see keys of clients, and must not set cookies of the gateway.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

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

/// Data for rewriting the head of a request and of its response.
#[derive(Debug)]
pub struct HeaderRewrite<'a> {
    /// Peer of the client's connection.
    pub peer: Peer,
    /// Id of the request.
    pub request_id: &'a RequestId,
    /// Target sandbox, port and path.
    pub target: &'a SandboxTarget,
    /// Host as sent by the client, with port.
    pub host: &'a str,
    /// Access settings of the sandbox.
    pub access: &'a SandboxAccess,
    /// Configuration of the gateway.
    pub config: &'a GatewayConfig,
}

/// Returns the host of a request as it was sent.
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

/// Returns the protocol that an HTTP/1.1 request wants to upgrade to. Ignores `h2c` (HTTP/2 without
/// TLS), because the gateway accepts HTTP/2 from the first byte only.
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
    /// Returns the path prefix that was removed from the request. `None` unless the sandbox is
    /// addressed by path.
    fn prefix(&self) -> Option<&str> {
        match &self.target.addressing {
            Addressing::Path(prefix) => Some(prefix),
            _ => None,
        }
    }

    /// Rewrites the head of a client's request for the guest.
    pub fn to_guest(&self, parts: &mut Parts) {
        // Read the values before `confine_request` removes the headers of the client's connection.
        let upgrade = upgrade(parts.version, &parts.headers);
        let trailers = has_token(&parts.headers, &TE, "trailers");
        let before = self.forwarded_for(&parts.headers);
        parts.uri = Uri::from(self.target.path.clone());
        // Connections to guests use HTTP/1.1 only.
        parts.version = Version::HTTP_11;
        let headers = &mut parts.headers;
        confine_request(headers);
        let mut set = |name: &'static str, value: &str| match HeaderValue::from_str(value) {
            Ok(value) => drop(headers.insert(HeaderName::from_static(name), value)),
            // Never leave the client's own value in place.
            Err(_) => drop(headers.remove(name)),
        };
        let port = self.target.port.to_string();
        let masked = self.access.mask_request_host.as_ref();
        let masked = masked.map(|host| host.replace("${PORT}", &port));
        set("host", masked.as_deref().unwrap_or(self.host));
        if masked.is_some() {
            // Discard the client's spelling of names, so that the guest receives `Host`, as from
            // E2B's proxy, even if the client sent `host`.
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
        // Replace an id that was rejected because of its form.
        headers.insert(X_REQUEST_ID.clone(), self.request_id.value());
        // Headers of the connection to the guest: either an upgrade, or permission to send
        // trailers.
        if let Some(protocol) = upgrade {
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            headers.insert(UPGRADE, protocol);
        } else if trailers {
            headers.insert(CONNECTION, HeaderValue::from_static("te"));
            headers.insert(TE, HeaderValue::from_static("trailers"));
        }
    }

    /// Returns the value of `X-Forwarded-For`: extended if a trusted proxy sent it, otherwise only
    /// the peer's address.
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

    /// Rewrites the head of a guest's response for the client. `upgraded` is the protocol of an
    /// upgrade.
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
