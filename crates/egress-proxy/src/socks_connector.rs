//! [`SocksConnector`]: connects to servers through the proxies of sandboxes.
//!
//! A sandbox may have a SOCKS5 proxy for all of its connections, which its creator chose.

use crate::proxy_credentials::ProxyCredentials;
use crate::socks::{self, SocksError};
use jiffy_engine_api::{EgressProxy, EgressProxyTls};
use jiffy_network::{EgressConnector, EgressTarget, GuestStream, OpeningTunnel};
use jiffy_secrets::HostKey;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::sync::Arc;
use std::time::Duration;
use tokio_rustls::TlsConnector;

/// Timeout of the TLS handshake with a proxy.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of the answers of a proxy, which connects to the server meanwhile.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Connects to servers through SOCKS5 proxies.
pub struct SocksConnector {
    /// Key of the credentials. `None` on a host without secrets.
    key: Option<HostKey>,
    roots: Arc<RootCertStore>,
}

impl std::fmt::Debug for SocksConnector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SocksConnector")
    }
}

/// Failure of a connection through a proxy.
#[derive(Debug, thiserror::Error)]
enum TunnelError {
    #[error(transparent)]
    Socks(#[from] SocksError),
    #[error("cannot verify the proxy: {0}")]
    Tls(String),
    #[error("the proxy does not respond")]
    Timeout,
    #[error("the credentials for the proxy are from another host")]
    Credentials,
}

impl SocksConnector {
    /// Creates a connector. Proxies are verified with the authorities of the host's system, and
    /// with the certificates `authorities` (PEM). `key` decrypts the credentials of sandboxes.
    #[must_use]
    pub fn new(key: Option<HostKey>, authorities: &[String]) -> Self {
        let mut roots = RootCertStore::empty();
        // Certificates that cannot be parsed are skipped.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        for pem in authorities {
            let parsed = CertificateDer::pem_slice_iter(pem.as_bytes());
            roots.add_parsable_certificates(parsed.flatten());
        }
        let roots = Arc::new(roots);
        Self { key, roots }
    }

    /// Opens a tunnel to `target` over a connection to the proxy: TLS if the proxy requires it,
    /// then the SOCKS5 handshake. The credentials are decrypted with the key of the host.
    async fn open(
        &self,
        stream: Box<dyn GuestStream>,
        proxy: &EgressProxy,
        owner: &str,
        target: EgressTarget<'_>,
    ) -> Result<Box<dyn GuestStream>, TunnelError> {
        let credentials = match (&proxy.sealed_credentials, &self.key) {
            (None, _) => None,
            (Some(sealed), Some(key)) => {
                let opened = ProxyCredentials::open(key, owner, sealed);
                Some(opened.ok_or(TunnelError::Credentials)?)
            }
            (Some(_), None) => return Err(TunnelError::Credentials),
        };
        let mut stream = match &proxy.tls {
            None => stream,
            Some(tls) => {
                let handshake = self.with_tls(stream, proxy, tls);
                let stream = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await;
                stream.map_err(|_| TunnelError::Timeout)??
            }
        };
        let connecting = socks::connect(&mut stream, credentials.as_ref(), target);
        let connected = tokio::time::timeout(ANSWER_TIMEOUT, connecting).await;
        connected.map_err(|_| TunnelError::Timeout)??;
        Ok(stream)
    }

    /// Performs the TLS handshake with the proxy. The certificate must be signed by the authorities
    /// of the proxy's settings, or else by an authority of the host.
    async fn with_tls(
        &self,
        stream: Box<dyn GuestStream>,
        proxy: &EgressProxy,
        tls: &EgressProxyTls,
    ) -> Result<Box<dyn GuestStream>, TunnelError> {
        let failed = |e: &dyn std::fmt::Display| TunnelError::Tls(e.to_string());
        let roots = match &tls.ca_certificates {
            None => self.roots.clone(),
            Some(pem) => {
                let mut roots = RootCertStore::empty();
                let parsed = CertificateDer::pem_slice_iter(pem.as_bytes());
                roots.add_parsable_certificates(parsed.flatten());
                Arc::new(roots)
            }
        };
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions();
        let settings = builder
            .map_err(|e| failed(&e))?
            .with_root_certificates(roots);
        let connector = TlsConnector::from(Arc::new(settings.with_no_client_auth()));
        let name = tls.server_name.as_deref().or_else(|| proxy.host());
        let name = ServerName::try_from(name.unwrap_or_default().to_owned());
        let name = name.map_err(|e| failed(&e))?;
        let stream = connector
            .connect(name, stream)
            .await
            .map_err(|e| failed(&e))?;
        Ok(Box::new(stream))
    }
}

impl EgressConnector for SocksConnector {
    fn open_tunnel<'a>(
        &'a self,
        stream: Box<dyn GuestStream>,
        proxy: &'a EgressProxy,
        owner: Option<&'a str>,
        target: EgressTarget<'a>,
    ) -> OpeningTunnel<'a> {
        Box::pin(async move {
            let opened = self
                .open(stream, proxy, owner.unwrap_or_default(), target)
                .await;
            // The failure may occur for each connection of a guest, so warnings could fill the log.
            opened
                .inspect_err(|e| {
                    tracing::debug!(proxy = proxy.address, error = %e, "cannot connect through an egress proxy");
                })
                .ok()
        })
    }
}

#[cfg(test)]
#[path = "socks_connector_tests.rs"]
mod tests;
