//! Connections through the egress proxy of a sandbox. The client of the proxy is another crate,
//! which implements [`EgressConnector`].

use crate::header_connection::GuestStream;
use jiffy_engine_api::EgressProxy;
use std::fmt;
use std::net::SocketAddr;
use std::pin::Pin;

/// Server to which a proxy connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EgressTarget<'a> {
    /// Host name and port. The proxy resolves the name.
    Name(&'a str, u16),
    /// Address and port.
    Address(SocketAddr),
}

/// Result of [`EgressConnector::open_tunnel`].
pub type OpeningTunnel<'a> =
    Pin<Box<dyn Future<Output = Option<Box<dyn GuestStream>>> + Send + 'a>>;

/// Client of egress proxies.
pub trait EgressConnector: fmt::Debug + Send + Sync {
    /// Requests a connection to `target` over `stream`, a new connection to `proxy`. `owner` is the
    /// API key that owns the sandbox. Returns the connection to `target`, or `None` if the proxy
    /// cannot be verified, rejects the request or does not respond.
    fn open_tunnel<'a>(
        &'a self,
        stream: Box<dyn GuestStream>,
        proxy: &'a EgressProxy,
        owner: Option<&'a str>,
        target: EgressTarget<'a>,
    ) -> OpeningTunnel<'a>;
}
