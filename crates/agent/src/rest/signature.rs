//! Signed URLs of files, which work without a token in a header. A signature is `v1_` and the
//! unpadded base64 of sha256(`path:operation:user:token[:expiry]`).

use crate::settings::constant_time_eq;
use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use sha2::{Digest, Sha256};
use std::time::{SystemTime, UNIX_EPOCH};

/// Values that a signature confirms.
#[derive(Debug, Clone, Copy)]
pub struct SignatureClaim<'a> {
    /// Path as in the query.
    pub path: &'a str,
    /// `read` or `write`.
    pub operation: &'a str,
    /// User as in the query. Empty if the query has no user.
    pub user: &'a str,
    /// Expiry in seconds since 1970.
    pub expiry: Option<u64>,
}

/// Returns the signature of a claim with a token.
pub fn sign(claim: SignatureClaim<'_>, token: &str) -> String {
    let SignatureClaim {
        path,
        operation,
        user,
        expiry,
    } = claim;
    let mut text = format!("{path}:{operation}:{user}:{token}");
    if let Some(expiry) = expiry {
        text.push_str(&format!(":{expiry}"));
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
}

/// Checks that the signature is valid and has not expired. The errors have the text of E2B's envd,
/// which clients compare.
pub fn verify(claim: SignatureClaim<'_>, token: &str, signature: &str) -> Result<(), &'static str> {
    if !constant_time_eq(&sign(claim, token), signature) {
        return Err("invalid signature");
    }
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    match claim.expiry {
        Some(expiry) if expiry < now => Err("signature is already expired"),
        _ => Ok(()),
    }
}
