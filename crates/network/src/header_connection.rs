//! Connections to hosts whose requests receive headers. The proxy that adds the headers is another
//! crate, which implements [`HeaderInjector`].

use jiffy_engine_api::{HeaderRules, HeaderUse, RefusalReason};
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};

/// Stream of a connection.
pub trait GuestStream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> GuestStream for T {}

/// Result of [`ServerConnector::connect`].
pub type Connecting<'a> = Pin<Box<dyn Future<Output = Option<Box<dyn GuestStream>>> + Send + 'a>>;

/// Connects to the host of a connection.
pub trait ServerConnector: Send + Sync {
    /// Connects to an address that the host's name servers have for the name, and that the rules of
    /// the sandbox permit. `None` if there is no such address, or if it does not respond.
    fn connect(&self) -> Connecting<'_>;

    /// Records a request.
    fn used(&self, used: HeaderUse);

    /// Records that the connection of the guest is closed before its first request.
    fn refused(&self, reason: RefusalReason);
}

/// Connection of a guest to a host that its rules for headers name.
pub struct HeaderConnection {
    /// Connection of the guest, from its first byte.
    pub client: Box<dyn GuestStream>,
    /// Name of the host (TLS server name, `Host`).
    pub host: String,
    /// True for TLS, false for plain HTTP.
    pub is_tls: bool,
    /// Rules of the sandbox.
    pub rules: Arc<HeaderRules>,
    /// API key that owns the sandbox. `None` if the owner of the host does.
    pub owner: Option<String>,
    /// Connects to the host.
    pub connector: Arc<dyn ServerConnector>,
}

/// Adds headers to the requests of connections.
pub trait HeaderInjector: fmt::Debug + Send + Sync {
    /// Serves a connection until it ends. Dropping the future closes the connection.
    fn serve<'a>(
        &'a self,
        connection: HeaderConnection,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;
}
