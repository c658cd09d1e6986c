//! Configuration of a gateway.

use std::net::IpAddr;
use std::time::Duration;

/// Names the gateway answers to, and its limits.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// Domains under which sandboxes have host names, lower case, without port:
    /// `sandbox.example.com`.
    pub domains: Vec<String>,
    /// Further host names under which clients may come, such as that of a proxy in front.
    pub allowed_hosts: Vec<String>,
    /// Proxies in front whose `X-Forwarded-For` is continued; that of other clients is replaced.
    pub trusted_proxies: Vec<IpAddr>,
    /// Gives pages reached by path an origin of their own (`Content-Security-Policy: sandbox`).
    /// They share host and port with the control plane: without this a page of a guest can call it
    /// in its visitor's name. Pages reached by host name have their own origin anyway.
    pub isolate_paths: bool,
    /// Bounds on connections and requests.
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

/// Bounds on connections and requests.
#[derive(Debug, Clone)]
pub struct GatewayLimits {
    /// Connections at once, all clients together.
    pub connections: usize,
    /// Connections at once from one address (IPv6: one /64). Loopback addresses are not counted:
    /// all local programs and proxies share them.
    pub connections_per_client: usize,
    /// Connections at once, all clients together, on which neither a key was shown nor a sandbox
    /// reached yet.
    pub unknown_connections: usize,
    /// Such connections from one address, counted as in `connections_per_client`.
    pub unknown_connections_per_client: usize,
    /// Requests to sandboxes under way at once.
    pub exchanges: usize,
    /// Connections into one sandbox at once.
    pub exchanges_per_sandbox: usize,
    /// Streams of one HTTP/2 connection at once.
    pub streams: u32,
    /// Header lines of one request or answer.
    pub headers: usize,
    /// Bytes of the head of one request or answer.
    pub head_bytes: usize,
    /// Time for a request's head to arrive once it has begun, and for the first one after
    /// connecting.
    pub head: Duration,
    /// Time for a TLS handshake.
    pub handshake: Duration,
    /// Time a connection may stay open with nothing in flight. Longer than clients keep theirs (300
    /// s), so that no request crosses a close.
    pub idle: Duration,
    /// Same, for a connection on which neither a key was shown nor a sandbox reached yet.
    pub idle_unknown: Duration,
    /// Time for opening a connection into a sandbox, waking it included.
    pub open: Duration,
    /// Time an upgraded stream may be silent once one side has finished.
    pub half_closed: Duration,
    /// Time for requests under way to finish at shutdown.
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
