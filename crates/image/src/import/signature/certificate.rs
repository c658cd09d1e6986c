//! Certificates of Fulcio: keys that exist for minutes, with the identity of their owner.

use super::der::{self, Reader, SEQUENCE, UTF8_STRING, context};
use super::public_key::{ALGORITHMS, PublicKey};
use super::trust_root::{Authority, TrustRoot};
use jiff::Timestamp;
use jiffy_engine_api::SignerIdentity;
use rustls_pki_types::{CertificateDer, UnixTime};
use sha2::{Digest, Sha256};
use std::slice;
use std::time::Duration;
use webpki::{EndEntityCert, KeyUsage};
use x509_parser::extensions::{GeneralName, ParsedExtension, SignedCertificateTimestamp};
use x509_parser::prelude::{FromDer, X509Certificate};

/// Object identifiers, in DER without tag and length: extended key usages (RFC 5280).
const CODE_SIGNING: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 3];
pub(super) const TIME_STAMPING: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 8];
/// Extensions of Fulcio with the issuer of the identity: 1.3.6.1.4.1.57264.1.8, and the older
/// 1.3.6.1.4.1.57264.1.1 (https://github.com/sigstore/fulcio/blob/main/docs/oid-info.md).
pub(super) const ISSUER: &[u8] = &[0x2b, 6, 1, 4, 1, 0x83, 0xbf, 0x30, 1, 8];
const OLD_ISSUER: &[u8] = &[0x2b, 6, 1, 4, 1, 0x83, 0xbf, 0x30, 1, 1];
/// Extension with the confirmations of certificate logs (RFC 6962): 1.3.6.1.4.1.11129.2.4.2.
pub(super) const CONFIRMATIONS: &[u8] = &[0x2b, 6, 1, 4, 1, 0xd6, 0x79, 2, 4, 2];
/// Number of the extensions in a certificate.
const EXTENSIONS: u8 = context(3);

/// Certificate of a key that has signed an image.
pub(super) struct SigningCertificate<'a> {
    der: &'a [u8],
    parsed: X509Certificate<'a>,
    /// Key of the certificate.
    pub key: PublicKey,
}

impl<'a> SigningCertificate<'a> {
    /// Parses a certificate in DER.
    pub fn parse(der: &'a [u8]) -> Result<Self, String> {
        let malformed = || "its certificate is malformed".to_owned();
        let (rest, parsed) = X509Certificate::from_der(der).map_err(|_| malformed())?;
        let key = PublicKey::from_der(parsed.public_key().raw);
        let key = key.ok_or("the key of its certificate has an unsupported algorithm")?;
        rest.is_empty().then_some(()).ok_or_else(malformed)?;
        Ok(Self { der, parsed, key })
    }

    /// Checks that an authority of `root` has issued the certificate, that it was valid at `time`,
    /// and that a certificate log has confirmed it, if `root` has such logs.
    pub fn check(&self, root: &TrustRoot, time: Timestamp) -> Result<(), String> {
        let certificate = CertificateDer::from(self.der);
        let mut reason = "no authority was valid at the time of the signature".to_owned();
        for authority in &root.authorities {
            if !authority.is_valid_at(time) {
                continue;
            }
            match issuer_key(&certificate, authority, time, CODE_SIGNING) {
                Ok(_) if root.certificate_logs.is_empty() => return Ok(()),
                Ok(issuer) if self.is_confirmed(root, &issuer) => return Ok(()),
                Ok(_) => reason = "no certificate log has confirmed its certificate".to_owned(),
                Err(e) => reason = format!("its certificate is not valid: {e}"),
            }
        }
        Err(reason)
    }

    /// Returns whether the certificate names one of these identities.
    pub fn names(&self, identities: &[SignerIdentity]) -> bool {
        let (Some(subject), Some(issuer)) = (self.subject(), self.issuer()) else {
            return false;
        };
        identities.iter().any(|identity| {
            let is_subject = match identity.subject.strip_suffix('*') {
                Some(start) => subject.starts_with(start),
                None => subject == identity.subject,
            };
            is_subject && issuer == identity.issuer
        })
    }

    /// Returns the identity in the certificate, for messages.
    pub fn identity(&self) -> String {
        let subject = self.subject().unwrap_or("an unknown subject");
        let issuer = self.issuer().unwrap_or("an unknown issuer");
        crate::layer::shown(format!("{subject} of {issuer}").as_bytes())
    }

    /// Returns the first e-mail address or URI of the certificate.
    fn subject(&self) -> Option<&str> {
        let names = self.parsed.subject_alternative_name().ok()??;
        let mut names = names.value.general_names.iter();
        names.find_map(|name| match name {
            GeneralName::RFC822Name(name) | GeneralName::URI(name) => Some(*name),
            _ => None,
        })
    }

    /// Returns the URL of the identity's issuer.
    fn issuer(&self) -> Option<&str> {
        if let Some(value) = self.extension(ISSUER) {
            let text = Reader::new(value).read(UTF8_STRING)?;
            return str::from_utf8(text).ok();
        }
        // The value is text without a tag.
        str::from_utf8(self.extension(OLD_ISSUER)?).ok()
    }

    /// Returns the value of an extension. `None` if it occurs twice.
    fn extension(&self, identifier: &[u8]) -> Option<&'a [u8]> {
        let extensions = self.parsed.extensions().iter();
        let mut found = extensions.filter(|extension| extension.oid.as_bytes() == identifier);
        let value = found.next()?.value;
        found.next().is_none().then_some(value)
    }

    /// Returns whether a certificate log of `root` has confirmed the certificate of this issuer.
    fn is_confirmed(&self, root: &TrustRoot, issuer: &[u8]) -> bool {
        let extensions = self.parsed.extensions().iter();
        let confirmations = extensions.filter_map(|extension| match extension.parsed_extension() {
            ParsedExtension::SCT(list) => Some(list),
            _ => None,
        });
        let Some(signed) = unconfirmed(self.der) else {
            return false;
        };
        confirmations.flatten().any(|confirmation| {
            let time = i64::try_from(confirmation.timestamp).ok();
            let time = time.and_then(|ms| Timestamp::from_millisecond(ms).ok());
            let mut logs = root.certificate_logs.iter();
            let log = logs.find(|log| log.id == confirmation.id.key_id);
            time.zip(log).is_some_and(|(time, log)| {
                let message = confirmed_message(confirmation, issuer, &signed);
                log.is_valid_at(time) && log.key.has_signed(&message, confirmation.signature.data)
            })
        })
    }
}

/// Checks a certificate for a purpose at a time. Returns the key of its issuer
/// (SubjectPublicKeyInfo).
pub(super) fn issuer_key(
    certificate: &CertificateDer<'_>,
    authority: &Authority,
    time: Timestamp,
    purpose: &'static [u8],
) -> Result<Vec<u8>, webpki::Error> {
    let certificate = EndEntityCert::try_from(certificate)?;
    let seconds = u64::try_from(time.as_second()).unwrap_or(0);
    let path = certificate.verify_for_usage(
        ALGORITHMS,
        slice::from_ref(&authority.anchor),
        &authority.intermediates,
        UnixTime::since_unix_epoch(Duration::from_secs(seconds)),
        KeyUsage::required(purpose),
        None,
        None,
    )?;
    let issuer = path.intermediate_certificates().next();
    Ok(match issuer {
        Some(issuer) => issuer.subject_public_key_info().to_vec(),
        // An anchor has the content of the key only.
        None => der::encode(SEQUENCE, &path.anchor().subject_public_key_info),
    })
}

/// Returns the signed part of a certificate without the confirmations of certificate logs. The logs
/// sign this part, because the certificate does not exist before.
fn unconfirmed(certificate: &[u8]) -> Option<Vec<u8>> {
    let mut fields = Reader::new(Reader::inside(certificate, SEQUENCE)?.read(SEQUENCE)?);
    let mut rest = Vec::new();
    while let Some(field) = fields.element() {
        if field.tag != EXTENSIONS {
            rest.extend_from_slice(field.whole);
            continue;
        }
        let mut extensions = Reader::inside(field.content, SEQUENCE)?;
        let mut others = Vec::new();
        while let Some(extension) = extensions.element() {
            let identifier = Reader::new(extension.content).read(der::OBJECT_IDENTIFIER)?;
            if identifier != CONFIRMATIONS {
                others.extend_from_slice(extension.whole);
            }
        }
        let others = der::encode(SEQUENCE, &others);
        rest.extend(der::encode(EXTENSIONS, &others));
    }
    Some(der::encode(SEQUENCE, &rest))
}

/// Returns the message that a certificate log signs for the certificate of an issuer (RFC 6962,
/// section 3.2).
fn confirmed_message(
    confirmation: &SignedCertificateTimestamp<'_>,
    issuer: &[u8],
    unconfirmed: &[u8],
) -> Vec<u8> {
    // Version 1, a timestamp of a certificate.
    let mut message = vec![0, 0];
    message.extend(confirmation.timestamp.to_be_bytes());
    // The entry is a certificate without confirmations.
    message.extend([0, 1]);
    message.extend(Sha256::digest(issuer));
    let [.., a, b, c] = unconfirmed.len().to_be_bytes();
    message.extend([a, b, c]);
    message.extend_from_slice(unconfirmed);
    let extensions = confirmation.extensions.0;
    let [.., a, b] = extensions.len().to_be_bytes();
    message.extend([a, b]);
    message.extend_from_slice(extensions);
    message
}
