//! HTTP between clients and guests: headers ([`headers`]), connections for forwarding requests
//! ([`UpstreamConnection`]), their pools ([`ConnectionPool`]) and bodies ([`PooledBody`],
//! [`GuardedBody`]).

mod body;
pub mod headers;
mod pool;
mod pooled_body;
mod upstream;

pub use body::{BoxError, GuardedBody};
pub use pool::{ConnectionPool, PoolLimits, PooledConnection};
pub use pooled_body::PooledBody;
pub use upstream::UpstreamConnection;
