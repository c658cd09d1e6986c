//! Timestamps (RFC 3161): an authority confirms that a signature existed at a time.

use super::certificate::{TIME_STAMPING, issuer_key};
use super::der::{
    self, GENERALIZED_TIME, INTEGER, OBJECT_IDENTIFIER, OCTET_STRING, Reader, SEQUENCE, SET,
    context,
};
use super::public_key::PublicKey;
use super::trust_root::TimestampAuthority;
use jiff::Timestamp;
use sha2::{Digest, Sha256, Sha384, Sha512};
use x509_parser::prelude::{FromDer, X509Certificate};

/// Object identifiers, in DER without tag and length: signed data (RFC 5652) and its attributes.
const SIGNED_DATA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 7, 2];
const CONTENT_TYPE: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 3];
const MESSAGE_DIGEST: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 4];
/// Content of a timestamp (TSTInfo, RFC 3161).
const TIMESTAMP_INFO: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 16, 1, 4];
/// Hash functions: SHA-256, SHA-384 and SHA-512.
const SHA2: [u8; 8] = [0x60, 0x86, 0x48, 1, 101, 3, 4, 2];

/// A parsed timestamp.
struct SignedTimestamp<'a> {
    /// Time and digest of the signature, in DER.
    info: &'a [u8],
    /// Hash function of the digest in `attributes`.
    hash: &'a [u8],
    /// Attributes that the authority has signed, without tag and length.
    attributes: &'a [u8],
    /// Content of the AlgorithmIdentifier of `signature`.
    algorithm: &'a [u8],
    signature: &'a [u8],
}

/// Returns the time of a timestamp that one of the authorities has given to `signature`.
pub(super) fn check(
    timestamp: &[u8],
    signature: &[u8],
    authorities: &[TimestampAuthority],
) -> Result<Timestamp, String> {
    let parsed = parse(timestamp).and_then(|parsed| {
        let (time, hash, digest) = parse_info(parsed.info)?;
        Some((parsed, time, hash, digest))
    });
    let (parsed, time, hash, digest) = parsed.ok_or("its timestamp is malformed")?;
    if digest_of(hash, signature).as_deref() != Some(digest) {
        return Err("its timestamp is of another signature".to_owned());
    }
    let mut authorities = authorities.iter();
    let is_signed = authorities.any(|authority| parsed.is_signed_by(authority, time));
    if !is_signed || time > Timestamp::now() {
        return Err("its timestamp is not of a trusted authority".to_owned());
    }
    Ok(time)
}

impl SignedTimestamp<'_> {
    /// Returns whether an authority has signed the timestamp, and was valid at its time.
    fn is_signed_by(&self, by: &TimestampAuthority, time: Timestamp) -> bool {
        let authority = &by.authority;
        let key = X509Certificate::from_der(&by.certificate).ok();
        let key = key.and_then(|(_, parsed)| PublicKey::from_der(parsed.public_key().raw));
        // The attributes are signed as a set, but stored with another tag.
        let signed = der::encode(SET, self.attributes);
        self.attributes_match() == Some(true)
            && key.is_some_and(|key| key.has_signed_with(self.algorithm, &signed, self.signature))
            && authority.is_valid_at(time)
            && issuer_key(&by.certificate, authority, time, TIME_STAMPING).is_ok()
    }

    /// Returns whether the signed attributes have the type and the digest of the content.
    fn attributes_match(&self) -> Option<bool> {
        let (mut has_type, mut has_digest) = (false, false);
        let mut attributes = Reader::new(self.attributes);
        while !attributes.is_empty() {
            let mut attribute = Reader::new(attributes.read(SEQUENCE)?);
            let kind = attribute.read(OBJECT_IDENTIFIER)?;
            let mut values = Reader::new(attribute.read(SET)?);
            let value = values.element()?;
            match kind {
                CONTENT_TYPE => has_type = value.content == TIMESTAMP_INFO,
                MESSAGE_DIGEST => {
                    has_digest = value.content == digest_of(self.hash, self.info)?;
                }
                _ => {}
            }
        }
        Some(has_type && has_digest)
    }
}

/// Parses a response of an authority (RFC 3161, section 2.4.2).
fn parse(response: &[u8]) -> Option<SignedTimestamp<'_>> {
    let mut response = Reader::inside(response, SEQUENCE)?;
    let mut status = Reader::new(response.read(SEQUENCE)?);
    // 0 is granted, and 1 granted with modifications.
    if !matches!(status.read(INTEGER)?, [0 | 1]) {
        return None;
    }
    let mut content = Reader::new(response.read(SEQUENCE)?);
    if content.read(OBJECT_IDENTIFIER)? != SIGNED_DATA {
        return None;
    }
    let mut data = Reader::inside(content.read(context(0))?, SEQUENCE)?;
    let (_version, _hashes) = (data.read(INTEGER)?, data.read(SET)?);
    let mut encapsulated = Reader::new(data.read(SEQUENCE)?);
    if encapsulated.read(OBJECT_IDENTIFIER)? != TIMESTAMP_INFO {
        return None;
    }
    let info = Reader::new(encapsulated.read(context(0))?).read(OCTET_STRING)?;
    // Certificates and revocations, which are not used: the trusted root has the certificate.
    let _certificates = data.optional(context(0));
    let _revocations = data.optional(context(1));
    let mut signers = Reader::new(data.read(SET)?);
    let mut signer = Reader::new(signers.read(SEQUENCE)?);
    let _version = signer.read(INTEGER)?;
    // Name or key identifier of the certificate. Each trusted certificate is tried instead.
    let _identifier = signer.element()?;
    let hash = Reader::new(signer.read(SEQUENCE)?).read(OBJECT_IDENTIFIER)?;
    Some(SignedTimestamp {
        info,
        hash,
        attributes: signer.read(context(0))?,
        algorithm: signer.read(SEQUENCE)?,
        signature: signer.read(OCTET_STRING)?,
    })
}

/// Returns time, hash function and digest of the content of a timestamp.
fn parse_info(info: &[u8]) -> Option<(Timestamp, &[u8], &[u8])> {
    let mut info = Reader::inside(info, SEQUENCE)?;
    let (_version, _policy) = (info.read(INTEGER)?, info.read(OBJECT_IDENTIFIER)?);
    let mut imprint = Reader::new(info.read(SEQUENCE)?);
    let hash = Reader::new(imprint.read(SEQUENCE)?).read(OBJECT_IDENTIFIER)?;
    let digest = imprint.read(OCTET_STRING)?;
    let _serial_number = info.read(INTEGER)?;
    let time = generalized_time(info.read(GENERALIZED_TIME)?)?;
    Some((time, hash, digest))
}

/// Parses `YYYYMMDDhhmmss[.f]Z`. Fractions of a second are ignored.
fn generalized_time(text: &[u8]) -> Option<Timestamp> {
    let text = str::from_utf8(text).ok()?.strip_suffix('Z')?;
    let digits = text.split('.').next()?;
    if digits.len() != 14 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let part = |from: usize, to: usize| digits.get(from..to);
    let (year, month, day) = (part(0, 4)?, part(4, 6)?, part(6, 8)?);
    let (hour, minute, second) = (part(8, 10)?, part(10, 12)?, part(12, 14)?);
    let time = format!("{year}-{month}-{day}T{hour}:{minute}:{second}Z");
    time.parse().ok()
}

/// Returns a digest. `None` if the hash function is not supported.
fn digest_of(hash: &[u8], message: &[u8]) -> Option<Vec<u8>> {
    match hash.strip_prefix(&SHA2[..])? {
        [1] => Some(Sha256::digest(message).to_vec()),
        [2] => Some(Sha384::digest(message).to_vec()),
        [3] => Some(Sha512::digest(message).to_vec()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_parsed_and_others_are_rejected() {
        let time = |text: &str| generalized_time(text.as_bytes()).map(|t| t.as_second());
        assert_eq!(time("19700101000100Z"), Some(60));
        assert_eq!(time("19700101000100.25Z"), Some(60));
        for bad in [
            "",
            "Z",
            "197001010001Z",
            "19700101000100",
            "19701301000100Z",
            "1970010100010éZ",
        ] {
            assert_eq!(time(bad), None, "{bad}");
        }
    }
}
