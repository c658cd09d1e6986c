//! Connection to a host, and the copying between it and a tenant's process.

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

/// Bytes of a connection in each direction.
const MAX_BYTES: u64 = 64 << 20;
/// Bytes that are copied at once.
const BUFFER_BYTES: usize = 32 << 10;
/// Time of a connection: that of the longest request.
const MAX_LIFETIME: Duration = jiffy_proto::function::MAX_REQUEST_TIME;
/// Time for a TLS handshake.
const TLS_TIMEOUT: Duration = Duration::from_secs(10);

/// Connection in plain text, whatever is below.
trait Connection: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Connection for T {}

/// Maker of connections.
pub(super) struct Connector {
    destinations: Destinations,
    tls: TlsConnector,
}

impl Connector {
    pub(super) fn new(destinations: Destinations) -> Result<Self, tokio_rustls::rustls::Error> {
        let mut roots = RootCertStore::empty();
        // Those that cannot be read are missing like those that are not there.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions()?;
        let mut config = builder.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            destinations,
            tls: TlsConnector::from(Arc::new(config)),
        })
    }

    /// Connects, and makes a pair of sockets. Returns the relay and the process's end, which does
    /// not block: a process under its filter cannot change that.
    pub(super) async fn relay(
        &self,
        request: &EgressRequest,
    ) -> Result<(Relay, OwnedFd), EgressFailure> {
        let host = self.connect(request).await?;
        let made = pair().and_then(|(ours, theirs)| Ok((UnixStream::from_std(ours)?, theirs)));
        let (ours, theirs) = made.map_err(|_| EgressFailure::TooMany)?;
        Ok((Relay { host, ours }, theirs))
    }

    async fn connect(&self, request: &EgressRequest) -> Result<Box<dyn Connection>, EgressFailure> {
        let stream = self.destinations.connect(&request.host, request.port);
        let stream = stream.await?;
        // Requests are small and wait for their answers.
        let _ = stream.set_nodelay(true);
        if !request.tls {
            return Ok(Box::new(stream));
        }
        let name = ServerName::try_from(request.host.clone()).map_err(|_| EgressFailure::Tls)?;
        match timeout(TLS_TIMEOUT, self.tls.connect(name, stream)).await {
            Ok(Ok(stream)) => Ok(Box::new(stream)),
            Ok(Err(_)) => Err(EgressFailure::Tls),
            Err(_) => Err(EgressFailure::Timeout),
        }
    }
}

/// Makes a pair of sockets that do not block: ours, and the process's.
pub(super) fn pair() -> std::io::Result<(StdUnixStream, OwnedFd)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::Stream, None, flags)?;
    Ok((StdUnixStream::from(ours), theirs))
}

/// Connection that the process has one end of.
pub(super) struct Relay {
    host: Box<dyn Connection>,
    ours: UnixStream,
}

impl Relay {
    /// Copies until either side closes, or a limit is reached.
    pub(super) async fn run(self) {
        let (host_read, host_write) = tokio::io::split(self.host);
        let (our_read, our_write) = self.ours.into_split();
        let both = async {
            // A client of HTTP/1 does not close its half before the answer's end.
            tokio::select! {
                () = copy(host_read, our_write) => {}
                () = copy(our_read, host_write) => {}
            }
        };
        // At its end both sides are closed, which is all there is to tell.
        let _ = timeout(MAX_LIFETIME, both).await;
    }
}

/// Copies up to the limit of bytes, and tells the end to the other side.
async fn copy(from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
    let from = from.take(MAX_BYTES);
    let mut from = tokio::io::BufReader::with_capacity(BUFFER_BYTES, from);
    // A broken connection is as good as a closed one.
    let _ = tokio::io::copy_buf(&mut from, &mut to).await;
    let _ = to.shutdown().await;
}
