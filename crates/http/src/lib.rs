//! HTTP between clients and guests, for the gateway and the function manager: headers
//! ([`headers`]), connections for forwarding requests ([`UpstreamConnection`]), pools of such
//! connections ([`ConnectionPool`]) and bodies ([`PooledBody`], [`GuardedBody`]).

mod body;
pub mod headers;
mod pool;
mod pooled_body;
mod upstream;

pub use body::{BoxError, GuardedBody};
pub use pool::{ConnectionPool, PoolLimits, PooledConnection};
pub use pooled_body::PooledBody;
pub use upstream::UpstreamConnection;
