//! [`Connect`]: connections to the servers of webhooks, under the rules of the host.

use std::fmt::Debug;
use std::pin::Pin;
use tokio::io::{AsyncRead, AsyncWrite};

/// Connection to a server, over TCP or TLS.
pub trait Connection: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Connection for T {}

/// Connection or the reason of a failure, for the owner of the webhook.
pub type Connecting<'a> =
    Pin<Box<dyn Future<Output = Result<Box<dyn Connection>, String>> + Send + 'a>>;

/// Opens connections. The implementation decides which addresses can be reached: the URL of a
/// webhook must not lead to services of the host or of its network.
pub trait Connect: Debug + Send + Sync {
    /// Connects to a host name or address.
    fn connect<'a>(&'a self, host: &'a str, port: u16, is_tls: bool) -> Connecting<'a>;
}
