//! Who a new sandbox is.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_proto::agent::Identity;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

/// Letters of an id: no `-`, which separates port and id in host names, and nothing that reads as another letter.
const ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
const ID_LENGTH: usize = 20;
const ENTROPY: usize = 64;

/// No identity could be made.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The host gives no random bytes.
    #[error("the host gives no random bytes: {0}")]
    Entropy(#[from] getrandom::Error),
    /// The host's clock is absurd.
    #[error("the host's clock is before 1970: set it")]
    Clock,
}

fn random<const N: usize>() -> Result<[u8; N], getrandom::Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

/// A new sandbox id: 20 letters and digits, 100 random bits.
pub fn new_id() -> Result<String, IdentityError> {
    let bytes: [u8; ID_LENGTH] = random()?;
    Ok(bytes
        .iter()
        .map(|b| char::from(ALPHABET[usize::from(b % 32)]))
        .collect())
}

/// What the agent of sandbox `id` is told: clock and entropy of this very moment.
pub(crate) fn identity(
    id: &str,
    env: BTreeMap<String, String>,
    user: String,
    workdir: Option<String>,
) -> Result<Identity, IdentityError> {
    let since_epoch = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_err(|_| IdentityError::Clock)?;
    Ok(Identity {
        id: id.to_owned(),
        hostname: None,
        time_ns: u64::try_from(since_epoch.as_nanos()).map_err(|_| IdentityError::Clock)?,
        entropy: STANDARD.encode(random::<ENTROPY>()?),
        env,
        access_token: None,
        default_user: Some(user),
        default_workdir: workdir,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_fresh_and_fit_a_host_name() {
        let ids: Vec<String> = (0..100).map(|_| new_id().unwrap()).collect();
        for (i, id) in ids.iter().enumerate() {
            assert!(
                id.len() == 20 && id.bytes().all(|b| ALPHABET.contains(&b)),
                "{id}"
            );
            assert!(!ids[..i].contains(id));
        }
    }
}
