//! HTTP between clients and guests: heads ([`headers`]), connections that requests are passed on to
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
