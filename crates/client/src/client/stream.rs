//! Connections to a daemon over a Unix socket, TCP or TLS.

use super::address::{ServerAddress, Url};
use anyhow::Context;
use jiffy_agent_client::ConnectionPool;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{CertificateError, ClientConfig, Error as TlsError, RootCertStore};

/// Timeout of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the connections to the daemon at `socket`. `first` is an open connection.
pub async fn local(socket: PathBuf, first: UnixStream) -> anyhow::Result<ConnectionPool> {
    let connections = ConnectionPool::new(move || UnixStream::connect(socket.clone()));
    connections.add(first).await?;
    Ok(connections)
}

/// Returns the connections to a daemon on another host. One connection is opened immediately to
/// report errors early.
pub async fn remote(address: &ServerAddress) -> anyhow::Result<ConnectionPool> {
    let url = Arc::new(address.url.clone());
    let unreachable = |e| anyhow::Error::msg(unreachable(&url, &e));
    if !url.tls {
        // The first connection is made at once, so that its error is reported.
        let first = tcp(&url).await.map_err(unreachable)?;
        let url = url.clone();
        let connections = ConnectionPool::new(move || {
            let url = url.clone();
            async move { tcp(&url).await }
        });
        connections.add(first).await?;
        return Ok(connections);
    }
    let connector = TlsConnector::from(Arc::new(tls_config(address.ca.as_deref())?));
    let first = tls(&url, &connector).await.map_err(unreachable)?;
    let url = url.clone();
    let connections = ConnectionPool::new(move || {
        let (url, connector) = (url.clone(), connector.clone());
        async move { tls(&url, &connector).await }
    });
    connections.add(first).await?;
    Ok(connections)
}

/// Opens a TCP connection.
async fn tcp(url: &Url) -> io::Result<TcpStream> {
    let stream = timeout(
        CONNECT_TIMEOUT,
        TcpStream::connect((url.host.as_str(), url.port)),
    );
    let stream = stream.await.map_err(|_| timed_out())??;
    // Requests are small, and each waits for its response.
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Opens a TLS connection.
async fn tls(url: &Url, connector: &TlsConnector) -> io::Result<TlsStream<TcpStream>> {
    let stream = tcp(url).await?;
    let name = ServerName::try_from(url.host.clone()).map_err(io::Error::other)?;
    let handshake = timeout(CONNECT_TIMEOUT, connector.connect(name, stream));
    handshake.await.map_err(|_| timed_out())?
}

fn timed_out() -> io::Error {
    let limit = CONNECT_TIMEOUT.as_secs();
    io::Error::new(io::ErrorKind::TimedOut, format!("no response in {limit} s"))
}

/// Returns the TLS configuration with the root certificates of the system and the authorities in
/// `ca`.
fn tls_config(ca: Option<&Path>) -> anyhow::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    // Ignore root certificates that cannot be read or parsed: the others may suffice.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(path) = ca {
        let context = || {
            format!(
                "JIFFY_CA: {} is not a PEM file with certificates",
                path.display()
            )
        };
        for certificate in CertificateDer::pem_file_iter(path).with_context(context)? {
            roots.add(certificate.with_context(context)?)?;
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions()?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    // Upgrades to streams require HTTP/1.1.
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Returns the message for a failed connection to `url`.
pub fn unreachable(url: &Url, error: &io::Error) -> String {
    match error.get_ref().and_then(|e| e.downcast_ref::<TlsError>()) {
        Some(TlsError::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        )) => format!(
            "the certificate of {url} is for another name: use a name in the certificate, or add a name \
             with `jiffy serve --domain NAME`"
        ),
        Some(TlsError::InvalidCertificate(reason)) => format!(
            "the certificate of {url} is not trusted ({reason}): set JIFFY_CA to the PEM file of its \
             certificate authority, which `jiffy serve --tls` prints when it starts"
        ),
        Some(TlsError::InvalidMessage(_)) => {
            format!("{url} does not use TLS: use http://")
        }
        _ => format!(
            "cannot connect to {url} ({error}): check with `jiffy daemon status` on its host that the \
             daemon runs and listens on this address"
        ),
    }
}
