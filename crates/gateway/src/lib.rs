//! Data plane: determines the sandbox of each request, checks access, and streams bytes in both
//! directions. Requests without a sandbox are passed to the control plane.
//!
//! [`route()`] makes the routing decision, [`Gateway`] handles requests and [`serve`] accepts
//! connections. The daemon implements [`Sandboxes`] to find sandboxes and to open connections into
//! them. Clients and guests are both considered hostile: all their input is bounded and checked.
//!
//! docs/design-gateway.md explains the design.

mod activity;
pub mod admission;
pub mod body;
pub mod certificate;
pub mod config;
pub mod connection;
pub mod control_plane;
pub mod counters;
pub mod exchange;
pub mod file_link;
mod first_bytes;
pub mod front;
pub mod gateway;
pub mod guest_calls;
mod guest_tls;
pub mod headers;
pub mod host_name;
pub mod host_only_path;
mod in_flight_exchange;
pub mod internal;
pub mod listener;
mod local_peer;
pub mod other_hosts;
pub mod peer;
pub mod pool;
pub mod preview_link;
pub mod request_body;
pub mod request_error;
pub mod request_id;
pub mod response_body;
pub mod route;
pub mod sandboxes;
mod state;
mod tasks;
pub mod tcp_handshake;
pub mod tls;
pub mod tls_error;
pub mod tunnel;
mod watched_stream;

pub use config::{GatewayConfig, GatewayLimits};
pub use control_plane::ControlPlane;
pub use counters::{GatewayCounters, GatewayTotals};
pub use file_link::FileLink;
pub use front::{FrontHosts, serve_front};
pub use gateway::Gateway;
pub use guest_calls::{GuestCall, GuestCallLog, bounded_command, bounded_paths};
pub use internal::{InternalConnection, serve_internal};
pub use listener::{serve, serve_local};
pub use other_hosts::{
    ForwardedConnection, HostStream, Location, OtherHosts, Pending, serve_forwarded,
};
pub use peer::{KnownCaller, Peer};
pub use pool::GuestConnectionPool;
pub use preview_link::{LinkError, LinkSigner};
pub use request_body::ClientRequestBody;
pub use request_id::RequestId;
pub use route::{Addressing, FunctionLabel, Route, SandboxTarget, route};
pub use sandboxes::{ExchangePermit, OpenError, SandboxAccess, SandboxUse, Sandboxes};
pub use tcp_handshake::tcp_handshake;
pub use tls::Tls;
pub use tls_error::TlsError;
