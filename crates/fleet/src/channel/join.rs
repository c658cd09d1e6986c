//! Join request, from the side of the host that joins. This host has no certificate yet. It
//! identifies the fleet by the fingerprint of the authority's certificate, which its token
//! contains. A *token* is a text with which an operator permits hosts to join.

use super::identity::{ALPN, provider};
use super::pool::reason;
use super::{CONNECT_TIMEOUT, HANDSHAKE_TIMEOUT, JOIN_PATH, MAX_JOIN_BYTES, body, read_body};
use bytes::Bytes;
use hyper::client::conn::http2;
use hyper::{Method, Request};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Error of a join request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// The member cannot be reached.
    #[error("cannot connect to the fleet at {address}: {reason}")]
    Connect {
        /// Address of the member.
        address: String,
        /// Reason.
        reason: String,
    },
    /// The certificate at the address is not of the fleet of the token.
    #[error(
        "the host at {address} is not a member of the fleet of this token: {reason}; \
         check the address and the token, and the clocks of both hosts"
    )]
    Untrusted {
        /// Address of the member.
        address: String,
        /// Reason.
        reason: String,
    },
    /// The member rejected the request.
    #[error("the member at {address} rejected the join: {reason}")]
    Rejected {
        /// Address of the member.
        address: String,
        /// HTTP status.
        status: u16,
        /// Reason of the member.
        reason: String,
    },
    /// The response did not arrive. The member may have executed the request.
    #[error("the member at {address} did not answer the join: {reason}")]
    Lost {
        /// Address of the member.
        address: String,
        /// Reason.
        reason: String,
    },
}

/// Returns the first bytes of the digest of the authority's certificate (PEM).
///
/// # Errors
/// If `certificate` is malformed.
pub fn authority_fingerprint(
    certificate: &str,
) -> Result<[u8; 16], crate::certificates::CertificateError> {
    let der = CertificateDer::from_pem_slice(certificate.as_bytes()).map_err(|e| {
        crate::certificates::CertificateError::unusable("the certificate of the authority", e)
    })?;
    Ok(fingerprint(&der))
}

fn fingerprint(der: &[u8]) -> [u8; 16] {
    let mut first = [0; 16];
    first.copy_from_slice(&blake3::hash(der).as_bytes()[..16]);
    first
}

/// Sends a join request to a member at `address` whose authority has this fingerprint, and returns
/// the response.
///
/// # Errors
/// [`JoinError`].
pub async fn join(
    address: &str,
    authority: [u8; 16],
    request: Bytes,
    limit: Duration,
) -> Result<Bytes, JoinError> {
    let lost = |reason: String| JoinError::Lost {
        address: address.to_owned(),
        reason,
    };
    let late = |_| lost(format!("no response within {} s", limit.as_secs()));
    let connected = connect(address, authority).await?;
    let sent = async move {
        let (mut sender, connection) = http2::handshake(TokioExecutor::new(), connected)
            .await
            .map_err(|error| lost(reason(&error)))?;
        let driver = tokio::spawn(connection);
        let result = async {
            let uri = format!("https://join.jiffy.internal{JOIN_PATH}");
            let mut sent = Request::new(body(request));
            *sent.method_mut() = Method::POST;
            *sent.uri_mut() = uri
                .parse()
                .map_err(|error: hyper::http::uri::InvalidUri| lost(error.to_string()))?;
            let response = sender
                .send_request(sent)
                .await
                .map_err(|error| lost(reason(&error)))?;
            let status = response.status();
            let content = read_body(response.into_body(), MAX_JOIN_BYTES, limit)
                .await
                .map_err(|error| lost(error.to_string()))?;
            if status.is_success() {
                return Ok(content);
            }
            Err(JoinError::Rejected {
                address: address.to_owned(),
                status: status.as_u16(),
                reason: String::from_utf8_lossy(&content).into_owned(),
            })
        };
        let result = result.await;
        driver.abort();
        result
    };
    tokio::time::timeout(limit, sent).await.map_err(late)?
}

type TlsStream = tokio_rustls::client::TlsStream<TcpStream>;

/// Connects to a member whose certificate was issued by the authority with this fingerprint. This
/// host presents no certificate.
async fn connect(address: &str, authority: [u8; 16]) -> Result<TokioIo<TlsStream>, JoinError> {
    let failed = |reason: String| JoinError::Connect {
        address: address.to_owned(),
        reason,
    };
    let untrusted = |reason: String| JoinError::Untrusted {
        address: address.to_owned(),
        reason,
    };
    // Wait longer than between members: a user may give a name that must be resolved first.
    let limit = CONNECT_TIMEOUT * 5;
    let stream = tokio::time::timeout(limit, TcpStream::connect(address))
        .await
        .map_err(|_| failed(format!("no connection within {} s", limit.as_secs())))?
        .map_err(|error| failed(error.to_string()))?;
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| failed(error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Verifier {
            authority,
            provider: provider(),
        }))
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    let name = ServerName::try_from("join.jiffy.internal").map_err(|e| failed(e.to_string()))?;
    let handshake = TlsConnector::from(Arc::new(config)).connect(name, stream);
    let stream = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake)
        .await
        .map_err(|_| failed("the TLS handshake took too long".to_owned()))?
        .map_err(|error| {
            let is_tls = error.get_ref().is_some_and(|e| e.is::<rustls::Error>());
            let text = error.to_string();
            if is_tls {
                untrusted(text)
            } else {
                failed(text)
            }
        })?;
    Ok(TokioIo::new(stream))
}

/// Accepts a certificate that was issued by the authority with this fingerprint.
#[derive(Debug)]
struct Verifier {
    authority: [u8; 16],
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let authority = intermediates
            .iter()
            .find(|der| fingerprint(der) == self.authority)
            .ok_or(CertificateError::UnknownIssuer)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        verify_server_cert_signed_by_trust_anchor(
            &ParsedCertificate::try_from(end_entity)?,
            &roots,
            &[],
            now,
            self.provider.signature_verification_algorithms.all,
        )?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}
