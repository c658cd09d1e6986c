//! Connections of the egress broker to hosts, and the copying of data between them and the process
//! of a tenant, within limits.
//!
//! The *broker* is a thread of the daemon that opens the outgoing connections of a tenant's
//! functions. A *tenant* is one owner of functions.

use super::EgressSettings;
use super::destination::Destinations;
use jiffy_proto::function::{EgressFailure, EgressRequest};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// Maximum number of bytes of a connection in each direction.
const MAX_BYTES: u64 = 64 << 20;
/// Number of bytes copied at once.
const BUFFER_BYTES: usize = 32 << 10;
/// Maximum lifetime of a connection: the maximum time of a request.
const MAX_LIFETIME: Duration = jiffy_proto::function::MAX_REQUEST_TIME;
/// Timeout of a TLS handshake.
const TLS_TIMEOUT: Duration = Duration::from_secs(10);

/// Connection that carries plain text, over TCP or TLS.
pub trait Connection: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Connection for T {}

/// Connects to hosts that tenants name, within the rules for addresses.
pub struct HostConnector {
    destinations: Destinations,
    tls: TlsConnector,
}

impl std::fmt::Debug for HostConnector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HostConnector")
    }
}

impl HostConnector {
    /// Creates a connector for clients of HTTP/1.1 in the daemon.
    pub fn open(settings: EgressSettings) -> std::io::Result<Self> {
        let destinations = Destinations::new(settings).map_err(std::io::Error::other)?;
        Self::new(destinations).map_err(std::io::Error::other)
    }

    pub(super) fn new(destinations: Destinations) -> Result<Self, tokio_rustls::rustls::Error> {
        let mut roots = RootCertStore::empty();
        // Certificates that cannot be parsed are skipped.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions()?;
        let mut config = builder.with_root_certificates(roots).with_no_client_auth();
        // The process speaks HTTP/1.1 only. Without this offer, a server could choose HTTP/2.
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            destinations,
            tls: TlsConnector::from(Arc::new(config)),
        })
    }

    /// Connects to a host and creates a pair of sockets. Returns the relay and the process's end.
    /// The process's end is non-blocking already: the standard library sets this by `ioctl`, which
    /// the process's seccomp filter denies.
    pub(super) async fn relay(
        &self,
        request: &EgressRequest,
    ) -> Result<(Relay, OwnedFd), EgressFailure> {
        let host = self.connect(&request.host, request.port, request.tls);
        let host = host.await?;
        let (broker_end, process_end) = pair()
            .and_then(|(broker_end, process_end)| {
                Ok((UnixStream::from_std(broker_end)?, process_end))
            })
            .map_err(|_| EgressFailure::TooMany)?;
        Ok((Relay { host, broker_end }, process_end))
    }

    /// Connects to a name or address, and performs the TLS handshake if `tls` is set.
    pub async fn connect(
        &self,
        host: &str,
        port: u16,
        tls: bool,
    ) -> Result<Box<dyn Connection>, EgressFailure> {
        let stream = self.destinations.connect(host, port).await?;
        // Without this setting, a small request could wait for the confirmation of an earlier
        // packet. A failure only costs time.
        let _ = stream.set_nodelay(true);
        if !tls {
            return Ok(Box::new(stream));
        }
        let name = ServerName::try_from(host.to_owned()).map_err(|_| EgressFailure::Tls)?;
        match timeout(TLS_TIMEOUT, self.tls.connect(name, stream)).await {
            Ok(Ok(stream)) => Ok(Box::new(stream)),
            Ok(Err(_)) => Err(EgressFailure::Tls),
            Err(_) => Err(EgressFailure::Timeout),
        }
    }
}

/// Creates a pair of non-blocking sockets. The second end is for the process.
pub(super) fn pair() -> std::io::Result<(StdUnixStream, OwnedFd)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (broker_end, process_end) = socketpair(AddressFamily::Unix, SockType::Stream, None, flags)?;
    Ok((StdUnixStream::from(broker_end), process_end))
}

/// Relay between a host and the process's end of a connection.
pub(super) struct Relay {
    host: Box<dyn Connection>,
    broker_end: UnixStream,
}

impl Relay {
    /// Copies until either side closes its connection or a limit is reached.
    pub(super) async fn run(self) {
        let (host_read, host_write) = tokio::io::split(self.host);
        let (our_read, our_write) = self.broker_end.into_split();
        let both = async {
            // The first side that closes ends both directions: an HTTP/1 client does not close its
            // half before the response is complete.
            tokio::select! {
                () = copy(host_read, our_write) => {}
                () = copy(our_read, host_write) => {}
            }
        };
        // Both sides are closed afterwards. An error needs no further handling.
        let _ = timeout(MAX_LIFETIME, both).await;
    }
}

/// Copies at most [`MAX_BYTES`], and then shuts down `to`.
async fn copy(from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
    // Each direction has its own limit.
    let from = from.take(MAX_BYTES);
    let mut from = tokio::io::BufReader::with_capacity(BUFFER_BYTES, from);
    // A broken connection is handled like a closed connection.
    let _ = tokio::io::copy_buf(&mut from, &mut to).await;
    // The call fails if the other side is already closed.
    let _ = to.shutdown().await;
}
