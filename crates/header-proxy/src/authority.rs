//! [`SandboxAuthority`]: the certificate authority of one sandbox, by which the proxy can terminate
//! the sandbox's TLS. Only this sandbox and its clones trust it.

use data_encoding::BASE64URL_NOPAD;
use jiffy_secrets::{HostKey, SecretError};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::pki_types::PrivatePkcs8KeyDer;
use std::time::{Duration, SystemTime};

const DAY: Duration = Duration::from_secs(86_400);
/// Validity of the certificate of an authority. It is long, because snapshots contain the
/// certificate.
const LIFETIME: Duration = Duration::from_secs(20 * 365 * 86_400);
/// Context of encrypted keys: text to which the encryption binds them, so that another secret
/// cannot replace them.
const CONTEXT: &str = "header authority";

/// Error of an authority.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The key or a certificate cannot be generated or parsed.
    #[error("cannot use the certificate authority of the sandbox: {0}")]
    Certificate(#[from] rcgen::Error),
    /// The key cannot be encrypted.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The key was encrypted by another host.
    #[error(
        "the certificate authority of the sandbox belongs to another host, or `secrets-key` of the \
         data directory was replaced: create the sandbox again with its rules"
    )]
    Foreign,
}

/// Certificate authority of one sandbox, as its record contains it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxAuthority {
    /// Certificate (PEM).
    pub certificate: String,
    /// Private key, encrypted with the key of the host.
    pub sealed_key: String,
}

impl SandboxAuthority {
    /// Generates an authority.
    ///
    /// # Errors
    /// [`AuthorityError`] if the host has no entropy.
    pub fn generate(host_key: &HostKey) -> Result<Self, AuthorityError> {
        let now = SystemTime::now();
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::new())?;
        // The name must be unique: trust stores find authorities by the hash of the name.
        let id = BASE64URL_NOPAD.encode(key.public_key_raw().get(1..13).unwrap_or_default());
        let name = format!("Jiffy headers of a sandbox {id}");
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.not_before = (now - DAY).into();
        params.not_after = (now + LIFETIME).into();
        let certificate = params.self_signed(&key)?.pem();
        let plain = zeroize::Zeroizing::new(key.serialize_der());
        let sealed = host_key.seal(CONTEXT, &plain)?;
        Ok(Self {
            certificate,
            sealed_key: BASE64URL_NOPAD.encode(&sealed),
        })
    }

    /// Decrypts the key of an authority. Returns the issuer of certificates.
    pub(crate) fn issuer(
        host_key: &HostKey,
        certificate: &str,
        sealed_key: &str,
    ) -> Result<Issuer<'static, KeyPair>, AuthorityError> {
        let sealed = BASE64URL_NOPAD.decode(sealed_key.as_bytes());
        let sealed = sealed.map_err(|_| AuthorityError::Foreign)?;
        let plain = host_key.open_sealed(CONTEXT, &sealed);
        let plain = plain.ok_or(AuthorityError::Foreign)?;
        let key = KeyPair::try_from(&PrivatePkcs8KeyDer::from(plain.as_slice()))?;
        Ok(Issuer::from_ca_cert_pem(certificate, key)?)
    }
}
