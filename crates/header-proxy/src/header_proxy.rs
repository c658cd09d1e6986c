//! [`HeaderProxy`]: serves the connections of sandboxes to hosts that rules name. A *rule* names
//! hosts, and the headers that their requests receive.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use crate::authority::AuthorityError;
use crate::connection_limit::ConnectionLimit;
use crate::exchange::Exchanges;
use crate::leaf_certificates::LeafCertificates;
use crate::server_connection::{
    self, CONNECTION_WINDOW, HANDSHAKE_TIMEOUT, MAX_HEAD_BYTES, MAX_HEADERS, STREAM_WINDOW, Server,
};
use crate::task_set::{TaskGuard, TaskSet};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use jiffy_engine_api::RefusalReason;
use jiffy_identity::TokenIssuer;
use jiffy_network::{GuestStream, HeaderConnection, HeaderInjector};
use jiffy_secrets::Secrets;
use parking_lot::Mutex;
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::Acceptor;
use rustls::{ClientConfig, RootCertStore};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio_rustls::LazyConfigAcceptor;

/// Timeout for the head of a request, also between two requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(300);
/// Maximum number of open connections of one API key, over all of its sandboxes. Each costs the
/// daemon up to 2 MB of memory.
const MAX_CONNECTIONS: usize = 1024;
/// Maximum number of concurrent requests of a connection.
const MAX_REQUESTS: u32 = 32;
/// Maximum number of bytes of a response that HTTP/2 holds for a guest that does not read.
const MAX_SEND_BUFFER: usize = 32 * 1024;

/// Proxy that adds headers to the requests of sandboxes.
pub struct HeaderProxy {
    secrets: Secrets,
    issuer: Option<Arc<TokenIssuer>>,
    certificates: LeafCertificates,
    /// TLS settings of connections to servers, with HTTP/2 and without.
    with_http2: Arc<ClientConfig>,
    without_http2: Arc<ClientConfig>,
    limit: ConnectionLimit,
}

impl std::fmt::Debug for HeaderProxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HeaderProxy")
    }
}

impl HeaderProxy {
    /// Creates a proxy. Servers are verified with the authorities of the host's system, and with
    /// the certificates `authorities` (PEM).
    ///
    /// # Errors
    /// [`AuthorityError`] if the host has no entropy.
    pub fn new(secrets: Secrets, authorities: &[String]) -> Result<Self, AuthorityError> {
        let mut roots = RootCertStore::empty();
        // Certificates that cannot be parsed are skipped.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        for pem in authorities {
            let parsed = CertificateDer::pem_slice_iter(pem.as_bytes());
            roots.add_parsable_certificates(parsed.flatten());
        }
        let roots = Arc::new(roots);
        let settings = |protocols: &[&[u8]]| -> Result<Arc<ClientConfig>, AuthorityError> {
            let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
            let builder = builder.with_safe_default_protocol_versions();
            // The provider supports the default versions, so this error does not occur.
            let builder = builder.map_err(|_| rcgen::Error::CouldNotParseCertificate)?;
            let mut settings = builder
                .with_root_certificates(roots.clone())
                .with_no_client_auth();
            settings.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
            Ok(Arc::new(settings))
        };
        Ok(Self {
            secrets,
            issuer: None,
            certificates: LeafCertificates::new()?,
            with_http2: settings(&[b"h2", b"http/1.1"])?,
            without_http2: settings(&[b"http/1.1"])?,
            limit: ConnectionLimit::new(MAX_CONNECTIONS),
        })
    }

    /// Adds the issuer of identity tokens. Without it, requests with such tokens fail.
    #[must_use]
    pub fn with_issuer(mut self, issuer: Option<Arc<TokenIssuer>>) -> Self {
        self.issuer = issuer;
        self
    }

    /// Serves one connection of a guest: terminates TLS, connects to the server, and forwards
    /// requests until either side closes.
    async fn carry(&self, connection: HeaderConnection) -> io::Result<()> {
        let HeaderConnection {
            client,
            host,
            is_tls,
            rules,
            owner,
            connector,
        } = connection;
        let owner = owner.unwrap_or_default();
        let Some(_permit) = self.limit.acquire(&owner) else {
            connector.refused(RefusalReason::Limit);
            return Ok(());
        };
        let tasks = TaskGuard(TaskSet::default());
        let host = host.to_ascii_lowercase();
        let (client, is_http2, tls, opened) = if is_tls {
            let start = LazyConfigAcceptor::new(Acceptor::default(), client);
            let start = tokio::time::timeout(HANDSHAKE_TIMEOUT, start).await??;
            let (offers_2, offers_1) = {
                let hello = start.client_hello();
                let offers = |protocol: &[u8]| {
                    let mut offered = hello.alpn().into_iter().flatten();
                    offered.any(|name| name == protocol)
                };
                (offers(b"h2"), offers(b"http/1.1"))
            };
            let tls = if offers_2 {
                &self.with_http2
            } else {
                &self.without_http2
            };
            let opened = server_connection::open(&*connector, &host, Some(tls)).await;
            // Both connections have the same version of HTTP. If the server cannot be used, the
            // guest's choice counts.
            let is_http2 = match &opened {
                Ok(opened) => opened.is_http2,
                Err(_) => offers_2 && !offers_1,
            };
            let settings =
                (self.certificates).settings(self.secrets.host_key(), &rules, &host, is_http2);
            let settings = settings.map_err(|e| {
                // The failure may occur for each connection of a guest, so warnings could fill the
                // log.
                tracing::debug!(error = %e, %host, "cannot add headers to requests of a sandbox");
                connector.refused(RefusalReason::Authority);
                io::Error::other(e)
            })?;
            let accepted = start.into_stream(settings);
            let client = tokio::time::timeout(HANDSHAKE_TIMEOUT, accepted).await??;
            let client: Box<dyn GuestStream> = Box::new(client);
            (client, is_http2, Some(tls.clone()), opened)
        } else {
            let opened = server_connection::open(&*connector, &host, None).await;
            (client, false, None, opened)
        };
        let server = match opened {
            Ok(opened) => {
                let (connector, tasks) = (connector.clone(), tasks.0.clone());
                Server::new(opened, connector, host.clone(), tls, tasks).await
            }
            Err(rejection) => Err(rejection),
        };
        let exchanges = Arc::new(Exchanges {
            secrets: self.secrets.clone(),
            issuer: self.issuer.clone(),
            rules,
            owner,
            connector,
            host,
            is_tls,
            server,
            upgraded: Mutex::default(),
        });
        serve(client, is_http2, &exchanges, &tasks.0).await;
        // At most one request of a connection switches protocols, and it is the last one.
        let upgraded = exchanges.upgraded.lock().take();
        if let Some((client, server)) = upgraded
            && let (Ok(client), Ok(server)) = tokio::join!(client, server)
        {
            let (mut client, mut server) = (TokioIo::new(client), TokioIo::new(server));
            tokio::io::copy_bidirectional(&mut client, &mut server).await?;
        }
        Ok(())
    }
}

/// Serves the requests of a connection until it ends.
async fn serve(
    client: Box<dyn GuestStream>,
    is_http2: bool,
    exchanges: &Arc<Exchanges>,
    tasks: &TaskSet,
) {
    let service = service_fn(|request| {
        let exchanges = exchanges.clone();
        async move { Ok::<_, std::convert::Infallible>(exchanges.answer(request).await) }
    });
    let io = TokioIo::new(client);
    // Errors are ignored below: an error means that the connection of the guest has ended.
    if is_http2 {
        let mut builder = http2::Builder::new(tasks.clone());
        builder
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_REQUESTS)
            .max_header_list_size(u32::try_from(MAX_HEAD_BYTES).unwrap_or(u32::MAX))
            .max_send_buf_size(MAX_SEND_BUFFER)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
        let _ = builder.serve_connection(io, service).await;
    } else {
        let mut builder = http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(MAX_HEAD_BYTES)
            .max_headers(MAX_HEADERS)
            .preserve_header_case(true);
        let _ = builder.serve_connection(io, service).with_upgrades().await;
    }
}

impl HeaderInjector for HeaderProxy {
    fn serve<'a>(
        &'a self,
        connection: HeaderConnection,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(async move {
            // An error of the guest's connection is its end.
            let _ = self.carry(connection).await;
        })
    }
}
