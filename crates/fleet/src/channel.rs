//! Channel between the members of a fleet: HTTP/2 with mutual TLS.
//!
//! A member has one listener ([`Server`]) and connects to other members with a [`Client`]. Both use
//! the member's [`Identity`]. The certificate of a peer determines its member id.
//!
//! A *front* is a machine without sandboxes that passes requests of clients to the members. The
//! channel has three uses:
//! - *Messages* ([`Client::message`], [`MessageHandler`]): at most [`MAX_MESSAGE_BYTES`] in each
//!   direction, with a time limit.
//! - *Requests* ([`Client::request`], [`Handler`]): bodies of any length in both directions.
//! - *Streams* ([`Client::open_stream`], [`accept_stream`]): bytes in both directions, for example
//!   of WebSockets and TLS. Each direction ends on its own.
//!
//! Messages have a connection of their own, so that bulk data cannot delay heartbeats.
//!
//! A host that joins the fleet has no certificate. The listener serves only [`JOIN_PATH`] to such
//! a peer ([`JoinHandler`], [`join`]).

mod body;
mod client;
mod error;
mod identity;
mod join;
mod limits;
mod pool;
mod server;
mod stream;

pub use body::{Body, BodyError, Interrupted, body, empty_body, read_body};
pub use client::Client;
pub use error::ChannelError;
pub use identity::Identity;
pub use join::{JoinError, authority_fingerprint, join};
pub use limits::Limits;
pub use server::{Handler, JoinHandler, MessageHandler, PeerCheck, Rejected, Server, ServerHandle};
pub use stream::{Stream, accept_stream};

use std::time::Duration;

/// Maximum size of a message and of its response.
pub const MAX_MESSAGE_BYTES: usize = 2 << 20;
/// Maximum size of a join request and of its response.
pub const MAX_JOIN_BYTES: usize = 1 << 20;
/// Path of join requests.
pub const JOIN_PATH: &str = "/join";
/// Maximum duration of a TCP connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum duration of a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);
/// Interval of the pings on each connection. A peer that does not answer within
/// [`PING_TIMEOUT`] counts as lost.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum time for the answer to a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of bytes that a peer sends on a stream before the receiver has consumed them.
const STREAM_WINDOW: u32 = 256 << 10;
/// Maximum number of concurrent requests on a connection.
const MAX_STREAMS: u32 = 1024;
/// Maximum number of unconsumed bytes on a connection: streams that are not consumed must not
/// block the others.
const CONNECTION_WINDOW: u32 = STREAM_WINDOW * MAX_STREAMS;
/// Maximum size of the headers of a request.
const MAX_HEADER_BYTES: u32 = 64 << 10;
