//! Certificates of the members of a fleet.
//!
//! A *member* is the daemon of one host of the fleet.
//!
//! The fleet has an authority of its own. It issues one certificate per member, whose name contains
//! the member's number and the fleet. A member generates its private key itself and never sends it.

use jiffy_fleet_core::{FleetId, MemberId};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

/// One day.
const DAY: Duration = Duration::from_secs(86_400);
/// Validity of the authority's certificate.
const AUTHORITY_LIFETIME: Duration = Duration::from_secs(20 * 365 * 86_400);
/// Validity of a member's certificate.
pub const MEMBER_LIFETIME: Duration = Duration::from_secs(30 * 86_400);
/// A member renews its certificate when less than this time is left.
pub const RENEWAL_MARGIN: Duration = Duration::from_secs(10 * 86_400);
/// A certificate is valid from this time before its creation, because the clocks of other members
/// may be behind.
const CLOCK_SKEW: Duration = Duration::from_secs(600);
/// End of the names in certificates.
const NAME_SUFFIX: &str = "jiffy.internal";

/// Error of a certificate or key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// A certificate or key could not be generated.
    #[error("cannot generate {what}: {reason}")]
    Generate {
        /// Certificate or key.
        what: &'static str,
        /// Reason.
        reason: String,
    },
    /// A certificate, key or request cannot be used.
    #[error("cannot use {what}: {reason}")]
    Unusable {
        /// Certificate, key or request.
        what: &'static str,
        /// Reason.
        reason: String,
    },
}

impl CertificateError {
    fn generate(what: &'static str, error: impl ToString) -> Self {
        Self::Generate {
            what,
            reason: error.to_string(),
        }
    }

    pub(crate) fn unusable(what: &'static str, error: impl ToString) -> Self {
        Self::Unusable {
            what,
            reason: error.to_string(),
        }
    }
}

/// Returns the name of a member in its certificate.
pub(crate) fn member_name(fleet: &FleetId, member: MemberId) -> String {
    format!("{member}.{fleet}.{NAME_SUFFIX}")
}

/// Authority of a fleet, with its private key.
pub struct Authority {
    certificate: String,
    key: String,
    issuer: Issuer<'static, KeyPair>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    /// Generates the authority of a new fleet.
    ///
    /// # Errors
    /// [`CertificateError::Generate`].
    pub fn generate(fleet: &FleetId) -> Result<Self, CertificateError> {
        let error = |e: rcgen::Error| CertificateError::generate("the authority of the fleet", e);
        let now = SystemTime::now();
        let key = KeyPair::generate().map_err(error)?;
        let mut params = CertificateParams::new(Vec::new()).map_err(error)?;
        params
            .distinguished_name
            .push(DnType::CommonName, format!("jiffy fleet {fleet}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.not_before = (now - DAY).into();
        params.not_after = (now + AUTHORITY_LIFETIME).into();
        let certificate = params.self_signed(&key).map_err(error)?.pem();
        Self::from_pem(&certificate, &key.serialize_pem())
    }

    /// Returns the authority with this certificate and private key (PEM).
    ///
    /// # Errors
    /// [`CertificateError::Unusable`].
    pub fn from_pem(certificate: &str, key: &str) -> Result<Self, CertificateError> {
        let error = |e: rcgen::Error| CertificateError::unusable("the authority of the fleet", e);
        let pair = KeyPair::from_pem(key).map_err(error)?;
        let issuer = Issuer::from_ca_cert_pem(certificate, pair).map_err(error)?;
        Ok(Self {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            issuer,
        })
    }

    /// Returns the certificate (PEM).
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Returns the private key (PEM).
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Issues a certificate (PEM) for a member. All names and extensions in `request` (PEM) are
    /// ignored: only its public key is used.
    ///
    /// # Errors
    /// [`CertificateError`] if `request` is malformed or not signed by its key.
    pub fn issue(
        &self,
        fleet: &FleetId,
        member: MemberId,
        request: &str,
        valid_from: SystemTime,
        lifetime: Duration,
    ) -> Result<String, CertificateError> {
        let what = "the certificate request";
        let mut request = CertificateSigningRequestParams::from_pem(request)
            .map_err(|e| CertificateError::unusable(what, e))?;
        let error = |e: rcgen::Error| CertificateError::generate("the certificate of a member", e);
        let name = member_name(fleet, member);
        let mut params = CertificateParams::new(vec![name]).map_err(error)?;
        params
            .distinguished_name
            .push(DnType::CommonName, member.to_string());
        params.not_before = (valid_from - CLOCK_SKEW).into();
        params.not_after = (valid_from + lifetime).into();
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        request.params = params;
        Ok(request.signed_by(&self.issuer).map_err(error)?.pem())
    }
}

/// Private key of a member, and the request for its certificate (both PEM).
#[derive(Clone)]
pub struct MemberKey {
    /// Private key.
    pub key: String,
    /// Certificate request, signed by the key.
    pub request: String,
}

impl std::fmt::Debug for MemberKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemberKey").finish_non_exhaustive()
    }
}

impl MemberKey {
    /// Generates a key.
    ///
    /// # Errors
    /// [`CertificateError::Generate`].
    pub fn generate() -> Result<Self, CertificateError> {
        let error = |e: rcgen::Error| CertificateError::generate("the key of this host", e);
        let pair = KeyPair::generate().map_err(error)?;
        Self::request(&pair).map_err(error)
    }

    /// Returns the request for another certificate of an existing key (PEM).
    ///
    /// # Errors
    /// [`CertificateError::Unusable`].
    pub fn from_pem(key: &str) -> Result<Self, CertificateError> {
        let error = |e: rcgen::Error| CertificateError::unusable("the key of this host", e);
        let pair = KeyPair::from_pem(key).map_err(error)?;
        Self::request(&pair).map_err(error)
    }

    fn request(pair: &KeyPair) -> Result<Self, rcgen::Error> {
        let params = CertificateParams::new(Vec::new())?;
        Ok(Self {
            key: pair.serialize_pem(),
            request: params.serialize_request(pair)?.pem()?,
        })
    }
}

/// Content of a member's certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemberCertificate {
    /// Member.
    pub member: MemberId,
    /// End of its validity.
    pub expires: SystemTime,
}

impl MemberCertificate {
    /// Reads the certificate of a member of `fleet`. The caller has verified its signature.
    ///
    /// # Errors
    /// [`CertificateError::Unusable`] if the name is not a name of a member of `fleet`.
    pub fn read(der: &[u8], fleet: &FleetId) -> Result<Self, CertificateError> {
        let error = |reason: &str| CertificateError::unusable("the certificate", reason);
        let (_, certificate) =
            X509Certificate::from_der(der).map_err(|_| error("it is not a certificate"))?;
        let names = certificate
            .subject_alternative_name()
            .ok()
            .flatten()
            .map(|extension| &extension.value.general_names);
        let name = match names.map(Vec::as_slice) {
            Some([GeneralName::DNSName(name)]) => *name,
            _ => return Err(error("it has no name of a member")),
        };
        let member = name
            .strip_suffix(NAME_SUFFIX)
            .and_then(|name| name.strip_suffix('.'))
            .and_then(|name| name.split_once('.'))
            .filter(|(_, of)| *of == fleet.to_string())
            .and_then(|(member, _)| member.parse().ok())
            .ok_or_else(|| error(&format!("{name:?} is not a member of fleet {fleet}")))?;
        let seconds = certificate.validity().not_after.timestamp();
        Ok(Self {
            member,
            expires: UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0)),
        })
    }

    /// Reads the first certificate of a PEM text. See [`MemberCertificate::read`].
    ///
    /// # Errors
    /// [`CertificateError::Unusable`].
    pub fn read_pem(pem: &str, fleet: &FleetId) -> Result<Self, CertificateError> {
        let der = CertificateDer::from_pem_slice(pem.as_bytes())
            .map_err(|e| CertificateError::unusable("the certificate", e))?;
        Self::read(&der, fleet)
    }

    /// Returns whether the certificate must be renewed.
    pub fn needs_renewal(&self, now: SystemTime) -> bool {
        now + RENEWAL_MARGIN >= self.expires
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet(name: &str) -> FleetId {
        FleetId::try_from(name.to_owned()).unwrap()
    }

    #[test]
    fn a_certificate_names_its_member_and_fleet() {
        let id = fleet("abcd");
        let authority = Authority::generate(&id).unwrap();
        let key = MemberKey::generate().unwrap();
        let now = SystemTime::now();
        let pem = authority
            .issue(&id, MemberId(7), &key.request, now, MEMBER_LIFETIME)
            .unwrap();
        let read = MemberCertificate::read_pem(&pem, &id).unwrap();
        assert_eq!(read.member, MemberId(7));
        // The certificate is valid for 30 days, and renewed 10 days before its end.
        assert!(read.expires > now + Duration::from_secs(29 * 86_400));
        assert!(!read.needs_renewal(now));
        assert!(read.needs_renewal(now + Duration::from_secs(21 * 86_400)));
        assert!(MemberCertificate::read_pem(&pem, &fleet("bbbb")).is_err());
        assert!(MemberCertificate::read_pem(authority.certificate(), &id).is_err());
    }

    #[test]
    fn a_request_that_its_key_did_not_sign_is_rejected() {
        let id = fleet("abcd");
        let authority = Authority::generate(&id).unwrap();
        let request = MemberKey::generate().unwrap().request;
        let now = SystemTime::now();
        let mut bytes = request.clone().into_bytes();
        // Change a character of the signature, which is at the end of the request.
        let last = bytes.len() - 60;
        bytes[last] = if bytes[last] == b'A' { b'B' } else { b'A' };
        for request in [String::from_utf8(bytes).unwrap(), String::new()] {
            let issued = authority.issue(&id, MemberId(1), &request, now, DAY);
            assert!(issued.is_err(), "{request}");
        }
    }
}
