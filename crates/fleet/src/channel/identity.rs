//! [`Identity`]: certificate and key of a member, and the TLS settings of the channel between
//! members. Both sides of a connection present a certificate of the fleet's own authority, whose
//! name contains the member number.

use crate::certificates::{CertificateError, MemberCertificate, MemberKey};
use jiffy_fleet_core::{FleetId, MemberId};
use parking_lot::RwLock;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::sync::Arc;
use std::time::SystemTime;

/// Protocol of the channel in ALPN.
pub(super) const ALPN: &[u8] = b"h2";

/// Identity of a member. Clones share it, so that a renewed certificate is used at once.
#[derive(Clone)]
pub struct Identity(Arc<Inner>);

/// State of an identity, shared by its clones.
struct Inner {
    fleet: FleetId,
    member: MemberId,
    authority: String,
    current: RwLock<Current>,
}

/// State that a renewal replaces.
struct Current {
    key: String,
    expires: SystemTime,
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity")
            .field("fleet", &self.0.fleet)
            .field("member", &self.0.member)
            .finish_non_exhaustive()
    }
}

impl Identity {
    /// Returns the identity with the certificate of the fleet's authority, and a certificate and
    /// key of a member (all PEM).
    ///
    /// # Errors
    /// [`CertificateError`] if one of them cannot be used, or they do not match.
    pub fn new(
        fleet: FleetId,
        authority: &str,
        certificate: &str,
        key: &str,
    ) -> Result<Self, CertificateError> {
        let member = MemberCertificate::read_pem(certificate, &fleet)?.member;
        let current = Current::new(&fleet, authority, certificate, key)?;
        Ok(Self(Arc::new(Inner {
            fleet,
            member,
            authority: authority.to_owned(),
            current: RwLock::new(current),
        })))
    }

    /// Returns the fleet.
    pub fn fleet(&self) -> &FleetId {
        &self.0.fleet
    }

    /// Returns the member.
    pub fn member(&self) -> MemberId {
        self.0.member
    }

    /// Returns the end of the certificate's validity.
    pub fn expires(&self) -> SystemTime {
        self.0.current.read().expires
    }

    /// Returns a request (PEM) for another certificate of the same key.
    ///
    /// # Errors
    /// [`CertificateError`].
    pub fn renewal_request(&self) -> Result<String, CertificateError> {
        Ok(MemberKey::from_pem(&self.0.current.read().key)?.request)
    }

    /// Uses another certificate of the same member and key for all new connections.
    ///
    /// # Errors
    /// [`CertificateError`] if it cannot be used. The former certificate remains in use.
    pub fn renew(&self, certificate: &str) -> Result<(), CertificateError> {
        let read = MemberCertificate::read_pem(certificate, &self.0.fleet)?;
        if read.member != self.0.member {
            let reason = format!("it belongs to {}, not to {}", read.member, self.0.member);
            return Err(CertificateError::unusable("the new certificate", reason));
        }
        let key = self.0.current.read().key.clone();
        let current = Current::new(&self.0.fleet, &self.0.authority, certificate, &key)?;
        *self.0.current.write() = current;
        Ok(())
    }

    pub(super) fn server(&self) -> Arc<ServerConfig> {
        self.0.current.read().server.clone()
    }

    pub(super) fn client(&self) -> Arc<ClientConfig> {
        self.0.current.read().client.clone()
    }
}

impl Current {
    /// Checks a certificate and key of a member, and creates the TLS settings of server and client.
    fn new(
        fleet: &FleetId,
        authority: &str,
        certificate: &str,
        key: &str,
    ) -> Result<Self, CertificateError> {
        let authority = CertificateDer::from_pem_slice(authority.as_bytes())
            .map_err(|e| CertificateError::unusable("the certificate of the authority", e))?;
        let leaf = CertificateDer::from_pem_slice(certificate.as_bytes())
            .map_err(|e| CertificateError::unusable("the certificate", e))?;
        let der = PrivateKeyDer::from_pem_slice(key.as_bytes())
            .map_err(|e| CertificateError::unusable("the private key", e))?;
        let expires = MemberCertificate::read(&leaf, fleet)?.expires;
        let mut roots = RootCertStore::empty();
        roots
            .add(authority.clone())
            .map_err(|e| CertificateError::unusable("the certificate of the authority", e))?;
        let roots = Arc::new(roots);
        // The authority is part of the chain because a host that joins the fleet knows only the
        // fingerprint of the authority's certificate.
        let chain = vec![leaf, authority];
        let tls = |e: rustls::Error| CertificateError::unusable("the certificate and its key", e);

        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider())
            // A host that joins has no certificate yet. The server then serves only the path for
            // join requests.
            .allow_unauthenticated()
            .build()
            .map_err(|e| CertificateError::unusable("the certificate of the authority", e))?;
        let mut server = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(tls)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), der.clone_key())
            .map_err(tls)?;
        server.alpn_protocols = vec![ALPN.to_vec()];
        // No session tickets: a resumed TLS session would not check the certificate again, and so
        // remain usable after its expiry.
        server.send_tls13_tickets = 0;

        let mut client = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(tls)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, der)
            .map_err(tls)?;
        client.alpn_protocols = vec![ALPN.to_vec()];
        client.resumption = rustls::client::Resumption::disabled();
        Ok(Self {
            key: key.to_owned(),
            expires,
            server: Arc::new(server),
            client: Arc::new(client),
        })
    }
}

/// Returns the cryptographic algorithms of the channel. They are passed explicitly because a
/// process of Jiffy may not have installed a default for rustls.
pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}
