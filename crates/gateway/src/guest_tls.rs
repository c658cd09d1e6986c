//! TLS to servers in guests: for the HTTPS ports of a sandbox, the gateway terminates the TLS of
//! the client and encrypts the connection to the server again.
//!
//! The certificate of the server is not verified. The stream leads to the guest itself, so that a
//! certificate would prove nothing, and such servers have self-signed certificates.

use std::fmt;
use std::io;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};

/// Server name of connections to guests whose `Host` header is not masked.
const DEFAULT_NAME: &str = "localhost";

/// TLS settings of connections to servers in guests.
#[derive(Clone)]
pub(crate) struct GuestTls(Result<TlsConnector, Error>);

impl fmt::Debug for GuestTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GuestTls")
    }
}

impl GuestTls {
    /// Creates the settings. An error is reported by [`GuestTls::connect`].
    pub fn new() -> Self {
        let provider = Arc::new(ring::default_provider());
        // The provider is explicit: the process may have no default provider.
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions();
        Self(builder.map(|builder| {
            let mut config = builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
                .with_no_client_auth();
            // Connections to guests use HTTP/1.1 only.
            config.alpn_protocols = vec![b"http/1.1".to_vec()];
            TlsConnector::from(Arc::new(config))
        }))
    }

    /// Starts TLS on a stream to a server. The server name (SNI) is the name in `host`, which may
    /// have a port.
    ///
    /// # Errors
    /// The server uses no TLS, or no version that is supported.
    pub async fn connect<T>(&self, stream: T, host: &str) -> io::Result<TlsStream<T>>
    where
        T: AsyncRead + AsyncWrite + Unpin,
    {
        let connector = self.0.clone().map_err(io::Error::other)?;
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        let name = match ServerName::try_from(name.to_owned()) {
            Ok(name) => name,
            Err(_) => ServerName::try_from(DEFAULT_NAME).map_err(io::Error::other)?,
        };
        connector.connect(name, stream).await
    }
}

/// Accepts every certificate.
struct AnyCertificate(Arc<CryptoProvider>);

impl fmt::Debug for AnyCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AnyCertificate")
    }
}

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
