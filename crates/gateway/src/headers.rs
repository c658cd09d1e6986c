//! Rewriting of message heads, in both directions.

use crate::api_key;
use crate::config::GatewayConfig;
use crate::peer::Peer;
use crate::request_id::{RequestId, X_REQUEST_ID};
use crate::route::{Addressing, SANDBOX_ID, SANDBOX_PORT, SandboxTarget};
use crate::sandboxes::SandboxAccess;
use crate::set_cookie;
use hyper::header::{
    ALT_SVC, CONNECTION, CONTENT_LENGTH, CONTENT_SECURITY_POLICY, COOKIE, EXPECT, FORWARDED, HOST,
    HeaderMap, HeaderName, HeaderValue, LOCATION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION,
    SET_COOKIE, STRICT_TRANSPORT_SECURITY, TE, TRANSFER_ENCODING, UPGRADE,
};
use hyper::http::request::Parts;
use hyper::{Uri, Version};

/// Header that carries the token of sandboxes that are not open to the public.
pub const TRAFFIC_TOKEN: &str = "e2b-traffic-access-token";

/// Allows scripts, and gives pages an opaque origin.
const ISOLATION_POLICY: &str =
    "sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads";

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

/// Returns true if a comma-separated header contains `word`.
fn has_token(headers: &HeaderMap, name: &HeaderName, word: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|listed| listed.trim().eq_ignore_ascii_case(word))
}

/// Removes hop-by-hop headers (RFC 9110, 7.6.1).
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let listed: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in listed {
        headers.remove(name);
    }
    for name in [
        CONNECTION,
        UPGRADE,
        TE,
        TRANSFER_ENCODING,
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
    ] {
        headers.remove(name);
    }
    for name in ["keep-alive", "proxy-connection", "http2-settings"] {
        headers.remove(name);
    }
}

/// Removes headers of a client that are not for a guest: those of this hop, of proxies that are not
/// trusted, keys of the control plane, and the gateway's own cookies.
pub fn confine_request(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    // The gateway answers it itself, by asking the client for the body.
    headers.remove(EXPECT);
    headers.remove(FORWARDED);
    for name in [
        TRAFFIC_TOKEN,
        "x-forwarded-prefix",
        "x-real-ip",
        "x-forwarded-port",
    ] {
        headers.remove(name);
    }
    api_key::strip(headers);
    match set_cookie::without_reserved(headers.get_all(COOKIE).iter()) {
        Some(cookies) => drop(headers.insert(COOKIE, cookies)),
        None => drop(headers.remove(COOKIE)),
    }
}

/// Removes headers of a guest's answer that reach beyond the guest. `prefix` is the path below
/// which it lies on `host`, if it has no host name of its own; `isolate` then gives its pages an
/// origin of their own.
pub fn confine_answer(headers: &mut HeaderMap, prefix: Option<&str>, host: &str, isolate: bool) {
    let encoded = headers.contains_key(TRANSFER_ENCODING);
    strip_hop_by_hop(headers);
    if encoded {
        headers.remove(CONTENT_LENGTH);
    }
    let cookies: Vec<HeaderValue> = headers.get_all(SET_COOKIE).iter().cloned().collect();
    headers.remove(SET_COOKIE);
    for cookie in &cookies {
        if let Some(cookie) = set_cookie::confined(cookie, prefix) {
            headers.append(SET_COOKIE, cookie);
        }
    }
    let Some(prefix) = prefix else {
        return;
    };
    // Each of these would apply to the whole origin, which is not the guest's here.
    headers.remove(ALT_SVC);
    headers.remove(STRICT_TRANSPORT_SECURITY);
    headers.remove("clear-site-data");
    headers.remove("service-worker-allowed");
    if let Some(location) = headers
        .get(LOCATION)
        .and_then(|location| set_cookie::prefixed_location(location, prefix, host))
    {
        headers.insert(LOCATION, location);
    }
    if isolate {
        let policy = HeaderValue::from_static(ISOLATION_POLICY);
        headers.append(CONTENT_SECURITY_POLICY, policy);
    }
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
