//! Text form of keys and certificates (RFC 7468).

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Returns the content of the first block with this label. `None` if the text has no such block.
pub(super) fn decode(text: &str, label: &str) -> Option<Vec<u8>> {
    let begin = format!("-----BEGIN {label}-----");
    let rest = text.get(text.find(&begin)? + begin.len()..)?;
    let (body, _) = rest.split_once(&format!("-----END {label}-----"))?;
    let body: String = body.split_whitespace().collect();
    STANDARD.decode(body).ok()
}

/// Label of public keys.
pub(super) const PUBLIC_KEY: &str = "PUBLIC KEY";
/// Label of certificates.
pub(super) const CERTIFICATE: &str = "CERTIFICATE";

#[cfg(test)]
pub(super) fn encode(der: &[u8], label: &str) -> String {
    let body = STANDARD.encode(der);
    format!("-----BEGIN {label}-----\n{body}\n-----END {label}-----\n")
}
