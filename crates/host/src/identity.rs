//! Identity of new sandboxes.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_engine::SandboxIdentity;
use jiffy_image::Defaults;
use jiffy_proto::agent::Identity;

/// Letters of an id: no `-`, which separates port and id in host names, and nothing that reads as
/// another letter.
const ALPHABET: &[u8; 32] = jiffy_image::ID_ALPHABET;
const ID_LENGTH: usize = jiffy_image::ID_LENGTH;
const ENTROPY: usize = 64;

/// No identity could be made.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The host gives no random bytes.
    #[error("the host gives no random bytes: {0}")]
    Entropy(#[from] getrandom::Error),
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

/// A new secret: 40 hexadecimal digits, 160 random bits.
pub fn new_token() -> Result<String, IdentityError> {
    let bytes: [u8; 20] = random()?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

/// Returns the identity for the agent of a sandbox, with fresh entropy; the clock is added when it
/// is sent.
pub(crate) fn identity(
    sandbox_identity: &SandboxIdentity,
    defaults: &Defaults,
) -> Result<Identity, IdentityError> {
    let mut env = defaults.env.clone();
    env.extend(sandbox_identity.env.clone());
    Ok(Identity {
        id: sandbox_identity.id.clone(),
        rewound: sandbox_identity.rewound,
        hostname: None,
        time_ns: 0,
        entropy: STANDARD.encode(random::<ENTROPY>()?),
        env,
        access_token: sandbox_identity.access_token.clone(),
        default_user: Some(defaults.user.clone()),
        default_workdir: Some(defaults.workdir.clone()).filter(|d| !d.is_empty()),
        site: sandbox_identity.site.clone(),
    })
}

/// Returns the identity of a running sandbox for an agent that asks again: the same one, with fresh
/// entropy.
pub(crate) fn renewed(before: Identity) -> Result<Identity, IdentityError> {
    Ok(Identity {
        rewound: false,
        entropy: STANDARD.encode(random::<ENTROPY>()?),
        ..before
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
