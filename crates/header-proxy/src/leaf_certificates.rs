//! Certificates for the host names to which guests connect, issued by the authorities of their
//! sandboxes.

use crate::authority::{AuthorityError, SandboxAuthority};
use jiffy_engine_api::HeaderRules;
use jiffy_secrets::HostKey;
use parking_lot::Mutex;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose};
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::NoServerSessionStorage;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

const DAY: Duration = Duration::from_secs(86_400);
/// Validity of the certificate of a host.
const LIFETIME: Duration = Duration::from_secs(7 * 86_400);
/// Time after which a certificate is issued again.
const MAX_AGE: Duration = DAY;
/// Maximum number of certificates in memory.
const MAX_CERTIFICATES: usize = 512;

/// TLS settings of one host, and the time of their creation.
type Issued = (Instant, Arc<ServerConfig>);

/// Certificates by authority and host.
pub(crate) struct LeafCertificates {
    /// Key of all certificates. It never leaves this process.
    key: KeyPair,
    /// TLS settings by encrypted (sealed) key of the authority, host name, and whether the protocol
    /// is HTTP/2.
    issued: Mutex<HashMap<(String, String, bool), Issued>>,
}

impl LeafCertificates {
    pub fn new() -> Result<Self, AuthorityError> {
        Ok(Self {
            key: KeyPair::generate()?,
            issued: Mutex::default(),
        })
    }

    /// Returns the TLS settings for `host`, with HTTP/2 or HTTP/1.1 as the only protocol.
    pub fn settings(
        &self,
        host_key: &HostKey,
        rules: &HeaderRules,
        host: &str,
        is_http2: bool,
    ) -> Result<Arc<ServerConfig>, AuthorityError> {
        let id = (rules.sealed_key.clone(), host.to_owned(), is_http2);
        if let Some((at, settings)) = self.issued.lock().get(&id)
            && at.elapsed() < MAX_AGE
        {
            return Ok(settings.clone());
        }
        let settings = Arc::new(self.issue(host_key, rules, host, is_http2)?);
        let mut issued = self.issued.lock();
        if issued.len() >= MAX_CERTIFICATES {
            // All certificates are removed, not the oldest ones: issuing one again takes less than
            // a millisecond.
            issued.clear();
        }
        issued.insert(id, (Instant::now(), settings.clone()));
        Ok(settings)
    }

    /// Issues a certificate for `host`, and returns the TLS settings that use it.
    fn issue(
        &self,
        host_key: &HostKey,
        rules: &HeaderRules,
        host: &str,
        is_http2: bool,
    ) -> Result<ServerConfig, AuthorityError> {
        let issuer = SandboxAuthority::issuer(host_key, &rules.certificate, &rules.sealed_key)?;
        let now = SystemTime::now();
        let mut params = CertificateParams::new(vec![host.to_owned()])?;
        // A common name has at most 64 characters. The name of the host is an alternative name.
        params
            .distinguished_name
            .push(DnType::CommonName, "Jiffy headers");
        params.not_before = (now - DAY).into();
        params.not_after = (now + LIFETIME).into();
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = params.signed_by(&self.key, &issuer)?;
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(self.key.serialize_der()));
        // The error of settings that rustls rejects: of the new certificate and its key.
        let invalid = |_| rcgen::Error::CouldNotParseCertificate;
        let mut settings = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(invalid)?
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)
            .map_err(invalid)?;
        let protocol: &[u8] = if is_http2 { b"h2" } else { b"http/1.1" };
        settings.alpn_protocols = vec![protocol.to_vec()];
        // Sessions would hold memory, and outlive a change of the rules.
        settings.session_storage = Arc::new(NoServerSessionStorage {});
        settings.send_tls13_tickets = 0;
        Ok(settings)
    }
}
