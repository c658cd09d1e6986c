//! Keys that are derived from the secret of the fleet, and random request numbers. A *preview link*
//! is a signed address of one port of a sandbox.

use super::TableError;
use jiffy_fleet_core::record::RequestId;
use zeroize::Zeroizing;

/// Returns the key that signs preview links and file links on all members.
#[must_use]
pub fn preview_key(fleet_secret: &[u8; 32]) -> [u8; 32] {
    blake3::derive_key("jiffy fleet 2026 signatures of preview links", fleet_secret)
}

/// Returns the key that encrypts secrets of API keys on all members.
#[must_use]
pub fn secrets_key(fleet_secret: &[u8; 32]) -> Zeroizing<[u8; 32]> {
    Zeroizing::new(blake3::derive_key(
        "jiffy fleet 2026 secrets of API keys",
        fleet_secret,
    ))
}

/// Returns a number for a request.
pub(super) fn new_request() -> Result<RequestId, TableError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|e| TableError::Invalid(format!("random numbers are not available: {e}")))?;
    Ok(RequestId(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_keys_differ_from_the_secret_and_depend_on_it() {
        let keys = [[1; 32], [2; 32]].map(|secret| preview_key(&secret));
        assert_ne!(keys[0], keys[1]);
        assert_ne!(keys[0], [1; 32]);
        assert_eq!(keys[0], preview_key(&[1; 32]));
        assert_ne!(*secrets_key(&[1; 32]), keys[0]);
    }
}
