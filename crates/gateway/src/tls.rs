//! TLS for the listener: HTTP/2 and HTTP/1.1 by ALPN.

use crate::certificate::{self, Paths};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};
use tokio_rustls::server::TlsStream;

/// What a listener needs for TLS.
#[derive(Clone)]
pub struct Tls {
    acceptor: TlsAcceptor,
    trust: Option<PathBuf>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("trust", &self.trust).finish()
    }
}

/// Why there is no TLS.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A PEM file cannot be read, or is none.
    #[error("cannot read {}: {source}; give a PEM file with {what}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
        /// Why not.
        source: pem::Error,
    },
    /// Certificate and key do not fit, or are of a kind that is not known.
    #[error("cannot use the certificate of {} with its key: {source}", path.display())]
    Unusable {
        /// The certificate's file.
        path: PathBuf,
        /// Why not.
        source: rustls::Error,
    },
    /// A generated certificate cannot be kept.
    #[error("cannot keep a generated certificate in {}: {source}", path.display())]
    Keep {
        /// File or directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A certificate cannot be made for these names.
    #[error("cannot make a certificate for {names}: {source}")]
    Generate {
        /// The names.
        names: String,
        /// Why not.
        source: rcgen::Error,
    },
}

impl Tls {
    /// From files: the certificate with those that lead to its root, and its private key (PKCS #8, PKCS #1 or SEC 1).
    ///
    /// # Errors
    /// [`TlsError`] if they cannot be read or do not fit.
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
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(unusable)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self {
            acceptor: TlsAcceptor::from(Arc::new(config)),
            trust: None,
        })
    }

    /// From a certificate that is made, and kept in `directory`, for each domain, everything directly below it, `localhost` and
    /// the loopback addresses (not for `*.localhost`: clients accept no such wildcard). [`Tls::trust`] tells what clients must trust.
    ///
    /// # Errors
    /// [`TlsError`] if it cannot be made or kept.
    pub fn generated(directory: &Path, domains: &[String]) -> Result<Self, TlsError> {
        let Paths {
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

    /// Of a generated certificate: the PEM file with the authority that clients must trust (`SSL_CERT_FILE`, `NODE_EXTRA_CA_CERTS`).
    #[must_use]
    pub fn trust(&self) -> Option<&Path> {
        self.trust.as_deref()
    }

    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        self.acceptor.accept(stream).await
    }
}
