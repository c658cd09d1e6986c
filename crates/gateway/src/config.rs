//! [`GatewayConfig`]: settings of a gateway: domains, timeouts and limits.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use std::net::IpAddr;
use std::time::Duration;

/// Host names and limits of a gateway.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// Domains below which sandboxes have host names, in lower case, without port:
    /// `sandbox.example.com`.
    pub domains: Vec<String>,
    /// Further host names that clients may use, such as the name of a reverse proxy.
    pub allowed_hosts: Vec<String>,
    /// Reverse proxies whose `X-Forwarded-For` is extended. The header of other clients is
    /// replaced.
    pub trusted_proxies: Vec<IpAddr>,
    /// True to isolate pages that are reached by path (`Content-Security-Policy: sandbox`). Such
    /// pages share host and port with the control plane. Without isolation, a guest's page could
    /// call the control plane on behalf of its visitor. Pages reached by host name always have an
    /// origin of their own.
    pub isolate_paths: bool,
    /// Limits of connections and requests.
    pub limits: GatewayLimits,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            domains: Vec::new(),
            allowed_hosts: Vec::new(),
            trusted_proxies: Vec::new(),
            isolate_paths: true,
            limits: GatewayLimits::default(),
        }
    }
}

/// Limits of connections and requests.
#[derive(Debug, Clone)]
pub struct GatewayLimits {
    /// Maximum number of concurrent connections of all clients.
    pub connections: usize,
    /// Maximum number of concurrent connections from one address (IPv6: one /64). Loopback
    /// addresses are not counted, because all local programs and proxies share them.
    pub connections_per_client: usize,
    /// Maximum number of concurrent connections of all unknown clients, which have neither
    /// presented a key nor reached a sandbox.
    pub unknown_connections: usize,
    /// Maximum number of such connections from one address, counted as in `connections_per_client`.
    pub unknown_connections_per_client: usize,
    /// Maximum number of requests to sandboxes in flight.
    pub exchanges: usize,
    /// Maximum number of concurrent connections into one sandbox.
    pub exchanges_per_sandbox: usize,
    /// Maximum number of concurrent streams of one HTTP/2 connection.
    pub streams: u32,
    /// Maximum number of header lines of a request or response.
    pub headers: usize,
    /// Maximum size in bytes of the head of a request or response.
    pub head_bytes: usize,
    /// Maximum time for receiving a request's head, from its first byte or from connecting.
    pub head: Duration,
    /// Timeout of a TLS handshake.
    pub handshake: Duration,
    /// Idle timeout of a connection. It is longer than the idle timeouts of clients (300 s), so
    /// that the gateway does not close a connection on which a request is arriving.
    pub idle: Duration,
    /// Idle timeout of a connection whose client is unknown.
    pub idle_unknown: Duration,
    /// Timeout of opening a connection into a sandbox, including resuming it.
    pub open: Duration,
    /// Maximum silence of an upgraded stream after one side has finished.
    pub half_closed: Duration,
    /// Time after the start of a shutdown in which requests in flight may complete.
    pub drain: Duration,
}

impl Default for GatewayLimits {
    fn default() -> Self {
        Self {
            connections: 20_000,
            connections_per_client: 2_000,
            unknown_connections: 16_000,
            unknown_connections_per_client: 256,
            exchanges: 10_000,
            exchanges_per_sandbox: 512,
            streams: 256,
            headers: 128,
            head_bytes: 64 * 1024,
            head: Duration::from_secs(15),
            handshake: Duration::from_secs(10),
            idle: Duration::from_secs(620),
            idle_unknown: Duration::from_secs(15),
            open: Duration::from_secs(120),
            half_closed: Duration::from_secs(300),
            drain: Duration::from_secs(10),
        }
    }
}
