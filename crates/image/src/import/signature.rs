//! Signatures of images in the formats of cosign: documents ([`simple_signing`]) and bundles
//! ([`bundle`]).
//!
//! An image is signed with a key, or by an identity. For identities, Fulcio, an authority, issues
//! certificates for keys that exist for minutes. Rekor, a log, proves the time of the signatures
//! ([`trust_root`]). Images, signatures and proofs are untrusted.

mod bundle;
mod certificate;
mod der;
mod image_signature;
mod json;
mod log_entry;
mod pem;
mod policy;
mod public_key;
mod simple_signing;
mod timestamp;
mod trust_root;
mod verify_key;

pub use policy::SignaturePolicy;
pub use verify_key::VerifyKey;

#[cfg(test)]
pub(super) mod signing_key;
#[cfg(test)]
pub(super) mod test_sigstore;
#[cfg(test)]
pub(super) mod tests;

use super::ImportError;
use super::registry::RegistryImage;

/// Maximum number of signatures of a manifest in each format that are examined.
const MAX_SIGNATURES: usize = 64;

/// Signatures that were examined.
#[derive(Default)]
struct Examined {
    count: usize,
    /// Why the last signature was not accepted.
    reason: String,
}

/// Checks that an image has a signature that `policy` accepts: of its manifest, or of the index
/// that refers to it. `digests` are the SHA-256 digests of both. `registry` is the repository of
/// the image.
pub(super) fn verify(
    registry: &mut RegistryImage,
    digests: &[String],
    policy: &SignaturePolicy,
) -> Result<(), ImportError> {
    let mut examined = Examined::default();
    for digest in digests {
        for layer in simple_signing::layers(registry, digest)?
            .iter()
            .take(MAX_SIGNATURES)
        {
            let signature = simple_signing::read(registry, layer)?;
            if examined.accepts(signature, policy, digest) {
                return Ok(());
            }
        }
        for manifest in bundle::manifests(registry, digest)?
            .iter()
            .take(MAX_SIGNATURES)
        {
            let signature = bundle::read(registry, manifest)?;
            if examined.accepts(signature, policy, digest) {
                return Ok(());
            }
        }
    }
    let image = registry.name();
    Err(match examined {
        Examined { count: 0, .. } => ImportError::Unsigned { image },
        Examined { count, reason } => ImportError::Signature {
            image,
            count,
            reason,
        },
    })
}

impl Examined {
    /// Returns whether `policy` accepts a signature. `None` is a malformed signature.
    fn accepts(
        &mut self,
        signature: Option<image_signature::ImageSignature>,
        policy: &SignaturePolicy,
        digest: &str,
    ) -> bool {
        let checked = match signature {
            Some(signature) => policy.check(&signature, digest),
            None => Err("it is malformed".to_owned()),
        };
        self.count += 1;
        match checked {
            Ok(()) => true,
            Err(reason) => {
                self.reason = reason;
                false
            }
        }
    }
}
