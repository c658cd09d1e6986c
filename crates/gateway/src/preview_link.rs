//! Preview links: signed URLs of one port of a sandbox with a limited lifetime, for users without a
//! token.
//!
//! In a link by path, the signature is in the query, and a cookie scoped to the port's path carries
//! it in later requests. In a link by host name, the signature is in the first label, so that all
//! requests of the page contain it and the page has its own origin.

use crate::host_name;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, Mac};
use hyper::http::uri::PathAndQuery;
use sha2::Sha256;
use std::fmt;
use subtle::ConstantTimeEq;
use thiserror::Error;

/// Query parameter with the expiry in seconds since 1970.
pub const EXPIRES_PARAM: &str = "jiffy_expires";
/// Query parameter with the signature.
pub const SIGNATURE_PARAM: &str = "jiffy_signature";

/// Maximum length of a label of a host name (RFC 1035).
const MAX_LABEL_BYTES: usize = 63;
/// Number of bytes of the signature in a host name: 128 bits.
const LABEL_SIGNATURE_BYTES: usize = 16;
/// Digits of base 32 (RFC 4648) in lower case.
const BASE_32_DIGITS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
/// Digits of base 36, in which a host name contains the expiry of a link.
const BASE_36_DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// Creates and verifies links with a secret key.
#[derive(Clone)]
pub struct LinkSigner {
    mac: Hmac<Sha256>,
}

impl fmt::Debug for LinkSigner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LinkSigner")
    }
}

/// Reason why a link cannot be created.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LinkError {
    /// The id is not a sandbox id, or the port is 0.
    #[error("'{id}' port {port} is not a port of a sandbox")]
    InvalidTarget {
        /// Requested id.
        id: String,
        /// TCP port.
        port: u16,
    },
    /// Host names have at most 63 characters per label.
    #[error(
        "sandbox id '{id}' is too long for a signed host name ({length} of {MAX_LABEL_BYTES} \
         characters): use a link by path"
    )]
    TooLong {
        /// Sandbox id.
        id: String,
        /// Length of the label in bytes.
        length: usize,
    },
}

impl LinkSigner {
    /// Creates a signer with a key of 32 secret random bytes.
    #[must_use]
    pub fn new(key: &[u8; 32]) -> Self {
        // `Hmac::new` takes a key of the block's size. Zeros at the end do not change the
        // signatures, because HMAC fills shorter keys with zeros.
        let mut block = [0; 64];
        block[..32].copy_from_slice(key);
        Self {
            mac: Hmac::new(&block.into()),
        }
    }

    /// Returns path and query of a link: `/sandboxes/{id}/proxy/{port}{path}?...`. `path` must
    /// begin with `/` and may have a query.
    ///
    /// # Errors
    /// [`LinkError::InvalidTarget`] if the id or the port is invalid.
    pub fn path(&self, id: &str, port: u16, path: &str, expires: u64) -> Result<String, LinkError> {
        check_target(id, port)?;
        let signature = self.path_signature(id, port, expires);
        // The path may already have a query.
        let mark = if path.contains('?') { '&' } else { '?' };
        Ok(format!(
            "/sandboxes/{id}/proxy/{port}{path}{mark}{EXPIRES_PARAM}={expires}&{SIGNATURE_PARAM}={signature}"
        ))
    }

    /// Returns the first label of a link's host name.
    ///
    /// # Errors
    /// [`LinkError::InvalidTarget`] if the id or the port is invalid. [`LinkError::TooLong`] if the
    /// label has more than 63 characters. An id of at most 23 characters fits while the expiry has
    /// 6 digits in base 36, which is until 2038.
    pub fn label(&self, id: &str, port: u16, expires: u64) -> Result<String, LinkError> {
        check_target(id, port)?;
        // The parts have the order in which `host_name::classify` parses them.
        let label = format!(
            "{port}-{id}-{}-{}",
            base_36(expires),
            self.label_signature(id, port, expires)
        );
        if label.len() > MAX_LABEL_BYTES {
            return Err(LinkError::TooLong {
                id: id.to_owned(),
                length: label.len(),
            });
        }
        Ok(label)
    }

    /// Checks expiry and signature of a query or cookie for this port at `now` (seconds since
    /// 1970). Returns the expiry if they are valid.
    #[must_use]
    pub fn verify_path_link(
        &self,
        id: &str,
        port: u16,
        expires: &str,
        signature: &str,
        now: u64,
    ) -> Option<u64> {
        let until = parse_canonical(expires, 10)?;
        // Verify the signature in constant time, even if the link has expired.
        let same = equal_in_constant_time(signature, &self.path_signature(id, port, until));
        (same && now < until).then_some(until)
    }

    /// Returns true if expiry and signature of a host name are valid for this port at `now`.
    #[must_use]
    pub fn verify_host_link(
        &self,
        id: &str,
        port: u16,
        expires: &str,
        signature: &str,
        now: u64,
    ) -> bool {
        let Some(until) = parse_canonical(expires, 36) else {
            return false;
        };
        let same = equal_in_constant_time(signature, &self.label_signature(id, port, until));
        same && now < until
    }

    fn path_signature(&self, id: &str, port: u16, expires: u64) -> String {
        URL_SAFE_NO_PAD.encode(self.sign("path", id, port, expires))
    }

    fn label_signature(&self, id: &str, port: u16, expires: u64) -> String {
        base_32(&self.sign("host", id, port, expires)[..LABEL_SIGNATURE_BYTES])
    }

    /// Signs a target. `kind` is signed, too, so that the short signature of a host name is not
    /// valid for a path.
    fn sign(&self, kind: &str, id: &str, port: u16, expires: u64) -> [u8; 32] {
        let mut mac = self.mac.clone();
        // Line feeds separate the fields: none of them contains one, so different targets never
        // give the same text.
        mac.update(format!("jiffy-link-1\n{kind}\n{id}\n{port}\n{expires}").as_bytes());
        mac.finalize().into_bytes().into()
    }
}

/// Removes the parameters of a signed link from a query. Returns the remaining path and the values
/// of expiry and signature. `None` if neither parameter exists. Repeated parameters are joined,
/// which makes them invalid.
pub(crate) fn take_link(path: &PathAndQuery) -> Option<(PathAndQuery, String, String)> {
    let query = path.query()?;
    let (mut expires, mut signature) = (Vec::new(), Vec::new());
    let mut rest = Vec::new();
    for pair in query.split('&') {
        // Compare undecoded names: the guest must receive any other spelling unchanged.
        match pair.split_once('=') {
            Some((EXPIRES_PARAM, value)) => expires.push(value),
            Some((SIGNATURE_PARAM, value)) => signature.push(value),
            _ => rest.push(pair),
        }
    }
    // One parameter alone is an invalid link, not a request without one.
    if expires.is_empty() && signature.is_empty() {
        return None;
    }
    let mut stripped = path.path().to_owned();
    if !rest.is_empty() {
        stripped = format!("{stripped}?{}", rest.join("&"));
    }
    Some((
        stripped.try_into().ok()?,
        expires.join("&"),
        signature.join("&"),
    ))
}

/// Checks that `id` has the form of a sandbox id, and that `port` is not 0.
fn check_target(id: &str, port: u16) -> Result<(), LinkError> {
    if host_name::is_id(id) && port != 0 {
        Ok(())
    } else {
        Err(LinkError::InvalidTarget {
            id: id.to_owned(),
            port,
        })
    }
}

/// Compares in constant time, so that the duration does not reveal a correct prefix.
fn equal_in_constant_time(given: &str, right: &str) -> bool {
    given.as_bytes().ct_eq(right.as_bytes()).into()
}

/// Parses a number in its only valid spelling: no sign, no leading zeros, lower case. If other
/// spellings were valid, one signature would be valid for several links.
fn parse_canonical(text: &str, radix: u32) -> Option<u64> {
    let legal = |b: u8| b.is_ascii_digit() || (radix > 10 && b.is_ascii_lowercase());
    (!text.starts_with('0') && text.bytes().all(legal))
        .then(|| u64::from_str_radix(text, radix).ok())
        .flatten()
}

/// Encodes a number with the digits 0-9 and a-z.
fn base_36(mut number: u64) -> String {
    let mut digits = Vec::new();
    while number > 0 || digits.is_empty() {
        digits.push(char::from(BASE_36_DIGITS[(number % 36) as usize]));
        number /= 36;
    }
    digits.iter().rev().collect()
}

/// Encodes bytes in base 32 without padding.
fn base_32(bytes: &[u8]) -> String {
    let mut out = String::new();
    let (mut bits, mut count) = (0_u32, 0);
    for byte in bytes {
        // At most 4 bits remain from earlier bytes, so 12 bits suffice.
        bits = (bits << 8 | u32::from(*byte)) & 0xfff;
        count += 8;
        // Each digit encodes five bits.
        while count >= 5 {
            count -= 5;
            out.push(char::from(BASE_32_DIGITS[(bits >> count & 31) as usize]));
        }
    }
    if count > 0 {
        out.push(char::from(
            BASE_32_DIGITS[(bits << (5 - count) & 31) as usize],
        ));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::GatewayConfig;
    use crate::host_name::{HostTarget, classify};

    /// Present time of the tests in seconds since 1970.
    const NOW: u64 = 1_800_000_000;
    const ID: &str = "i0123456789abcdefghi";

    fn signer() -> LinkSigner {
        LinkSigner::new(&[7; 32])
    }

    /// Returns the values of the two query parameters of a link: time and signature.
    fn query(link: &str) -> (String, String) {
        let (_, query) = link.split_once('?').unwrap();
        let mut pairs = query.split('&').map(|pair| pair.split_once('=').unwrap().1);
        (
            pairs.next().unwrap().to_owned(),
            pairs.next().unwrap().to_owned(),
        )
    }

    /// Returns time and signature in the host name of a link. The longest port gives the longest
    /// label.
    fn label(signer: &LinkSigner) -> (String, String) {
        let label = signer.label(ID, 65535, NOW + 60).unwrap();
        assert!(label.len() <= 63, "{label}");
        match classify(&format!("{label}.localhost"), &GatewayConfig::default()) {
            HostTarget::Sandbox(label) => label.link.unwrap(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_link_by_path_opens_its_port_until_it_expires() {
        let link = signer().path(ID, 3000, "/a", NOW + 60).unwrap();
        assert!(link.starts_with(&format!("/sandboxes/{ID}/proxy/3000/a?jiffy_expires=")));
        let (expires, signature) = query(&link);
        let opens = |id, port, expires: &str, signature: &str, now| {
            signer().verify_path_link(id, port, expires, signature, now)
        };
        assert_eq!(opens(ID, 3000, &expires, &signature, NOW), Some(NOW + 60));
        assert_eq!(
            opens(ID, 3000, &expires, &signature, NOW + 59),
            Some(NOW + 60)
        );
        assert_eq!(opens(ID, 3000, &expires, &signature, NOW + 60), None);
        // Another port, another sandbox, and other forms of the time.
        assert_eq!(opens(ID, 3001, &expires, &signature, NOW), None);
        assert_eq!(
            opens("i0123456789abcdefghj", 3000, &expires, &signature, NOW),
            None
        );
        let later = (NOW + 61).to_string();
        assert_eq!(opens(ID, 3000, &later, &signature, NOW), None);
        assert_eq!(
            opens(ID, 3000, &format!("0{expires}"), &signature, NOW),
            None
        );
        assert_eq!(
            opens(ID, 3000, &format!("+{expires}"), &signature, NOW),
            None
        );
        // An empty, a shortened and a changed signature, and the key of another host.
        assert_eq!(opens(ID, 3000, &expires, "", NOW), None);
        assert_eq!(
            opens(ID, 3000, &expires, &signature[..signature.len() - 1], NOW),
            None
        );
        for at in 0..signature.len() {
            let mut other = signature.clone().into_bytes();
            other[at] = if other[at] == b'A' { b'B' } else { b'A' };
            let other = String::from_utf8(other).unwrap();
            assert_eq!(opens(ID, 3000, &expires, &other, NOW), None, "{at}");
        }
        assert!(
            LinkSigner::new(&[8; 32])
                .verify_path_link(ID, 3000, &expires, &signature, NOW)
                .is_none()
        );
    }

    #[test]
    fn a_link_by_host_name_opens_its_port_until_it_expires() {
        let (expires, signature) = label(&signer());
        let opens = |id, port, now| signer().verify_host_link(id, port, &expires, &signature, now);
        assert!(opens(ID, 65535, NOW + 59));
        assert!(!opens(ID, 65535, NOW + 60));
        assert!(!opens(ID, 65534, NOW));
        assert!(!opens("i0123456789abcdefghj", 65535, NOW));
        for at in 0..signature.len() {
            let mut other = signature.clone().into_bytes();
            other[at] = if other[at] == b'a' { b'b' } else { b'a' };
            let other = String::from_utf8(other).unwrap();
            assert!(
                !signer().verify_host_link(ID, 65535, &expires, &other, NOW),
                "{at}"
            );
        }
        assert!(!signer().verify_host_link(ID, 65535, "zzzzzzz", &signature, NOW));
    }

    #[test]
    fn signatures_for_paths_and_host_names_are_not_interchangeable() {
        let (_, signature) = label(&signer());
        let expires = (NOW + 60).to_string();
        assert!(
            signer()
                .verify_path_link(ID, 65535, &expires, &signature, NOW)
                .is_none()
        );
        let (_, signature) = query(&signer().path(ID, 65535, "/", NOW + 60).unwrap());
        assert!(!signer().verify_host_link(ID, 65535, &base_36(NOW + 60), &signature, NOW));
    }

    #[test]
    fn links_that_do_not_fit_are_refused() {
        assert!(signer().label(&"i".repeat(23), 65535, NOW).is_ok());
        let error = signer().label(&"i".repeat(24), 65535, NOW).unwrap_err();
        assert!(error.to_string().contains("too long"), "{error}");
        assert!(signer().path("a-b", 80, "/", NOW).is_err());
        assert!(signer().path("ab", 0, "/", NOW).is_err());
    }

    #[test]
    fn base_32_and_base_36_digits_are_canonical() {
        assert_eq!(base_36(0), "0");
        assert_eq!(base_36(36 * 36 + 35), "10z");
        assert_eq!(base_32(b"foobar"), "mzxw6ytboi");
        assert_eq!(parse_canonical("10z", 36), Some(36 * 36 + 35));
        assert_eq!(parse_canonical("", 10), None);
    }
}
