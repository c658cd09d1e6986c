//! The data plane: one listener that finds the sandbox of each request, checks that it may pass, and streams bytes both ways. Whatever
//! names no sandbox is the control plane's.
//!
//! [`route()`] decides, [`Gateway`] carries it out, [`serve`] listens. How sandboxes are found and reached is the daemon's business, told
//! by [`Sandboxes`]. Clients and guests are both hostile: everything either sends is bounded and checked.

pub mod admission;
pub mod answer;
mod api_key;
pub mod body;
pub mod certificate;
pub mod config;
pub mod connection;
pub mod counters;
pub mod exchange;
pub mod file_link;
mod first;
pub mod gateway;
pub mod handshake;
pub mod headers;
pub mod host_name;
pub mod link;
pub mod listener;
pub mod pool;
pub mod private_path;
pub mod request_id;
pub mod route;
pub mod sandboxes;
pub mod set_cookie;
pub mod tls;
pub mod tunnel;

pub use config::{Config, Limits};
pub use counters::{Counters, Totals};
pub use file_link::FileLink;
pub use gateway::{ControlPlane, Gateway, KnownCaller, Peer};
pub use handshake::tcp_handshake;
pub use link::{LinkError, Signer};
pub use listener::{serve, serve_local};
pub use pool::Pool;
pub use request_id::RequestId;
pub use route::{How, Route, Target, route};
pub use sandboxes::{Access, ExchangePermit, OpenError, Sandboxes};
pub use tls::{Tls, TlsError};
