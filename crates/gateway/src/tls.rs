//! TLS for the listener. Of the protocols that a client offers by ALPN, the server prefers HTTP/2
//! to HTTP/1.1.

use crate::certificate::{self, CertificatePaths};
use crate::tls_error::TlsError;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

/// TLS settings of a listener.
#[derive(Clone)]
pub struct Tls {
    acceptor: TlsAcceptor,
    /// Certificate of the generated authority. `None` if the certificate was read from files.
    trust: Option<PathBuf>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("trust", &self.trust).finish()
    }
}

impl Tls {
    /// Reads PEM files: the certificate chain and its private key (PKCS #8, PKCS #1 or SEC 1).
    ///
    /// # Errors
    /// [`TlsError`] if they cannot be read or do not match.
    pub fn from_files(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let chain: Vec<_> = CertificateDer::pem_file_iter(certificate)
            .and_then(Iterator::collect)
            .map_err(|source| TlsError::Pem {
                path: certificate.to_owned(),
                what: "the certificate chain",
                source,
            })?;
        let key = PrivateKeyDer::from_pem_file(key).map_err(|source| TlsError::Pem {
            path: key.to_owned(),
            what: "the private key",
            source,
        })?;
        let unusable = |source| TlsError::Unusable {
            path: certificate.to_owned(),
            source,
        };
        // The provider is explicit: the process may have no default provider.
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            // Clients authenticate with API keys.
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(unusable)?;
        // rustls selects the first of these protocols that the client offers.
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self {
            acceptor: TlsAcceptor::from(Arc::new(config)),
            // Clients already trust the authority of a certificate from files, or the operator
            // distributes it.
            trust: None,
        })
    }

    /// Uses a generated certificate, stored in `directory`. It is valid for each domain, all names
    /// directly below it, `localhost` and the loopback addresses. It is not valid for
    /// `*.localhost`, because clients reject such wildcards. Clients must trust the authority in
    /// [`Tls::trust`].
    ///
    /// # Errors
    /// [`TlsError`] if it cannot be generated or stored.
    pub fn generated(directory: &Path, domains: &[String]) -> Result<Self, TlsError> {
        let CertificatePaths {
            certificate,
            key,
            authority,
        } = certificate::ensure(directory, domains)?;
        let tls = Self::from_files(&certificate, &key)?;
        Ok(Self {
            trust: Some(authority),
            ..tls
        })
    }

    /// Returns the PEM file with the authority of a generated certificate, which clients must trust
    /// (`SSL_CERT_FILE`, `NODE_EXTRA_CA_CERTS`). `None` for a certificate from files.
    #[must_use]
    pub fn trust(&self) -> Option<&Path> {
        self.trust.as_deref()
    }

    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        self.acceptor.accept(stream).await
    }
}
