//! Signatures of images in the format of cosign: the registry has a manifest with the tag
//! `sha256-DIGEST.sig`, whose layers are signed documents that name the digest of the image
//! (https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md).

use super::ImportError;
use super::document::{Descriptor, Document, parse};
use super::registry::RegistryImage;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use serde::Deserialize;
use std::fmt;

/// Annotation of a layer with the signature in base64.
const SIGNATURE: &str = "dev.cosignproject.cosign/signature";
/// Type of a signed document.
const DOCUMENT_TYPE: &str = "cosign container image signature";
/// Maximum number of signatures of an image that are examined.
const MAX_SIGNATURES: usize = 64;
/// Maximum length of a signed document in bytes.
const MAX_DOCUMENT_BYTES: u64 = 64 << 10;
/// Start of a public key for ECDSA with the curve P-256 (SubjectPublicKeyInfo, RFC 5480), up to the
/// point on the curve.
const P256_PREFIX: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// Length of an uncompressed point of the curve P-256.
const P256_POINT_BYTES: usize = 65;
/// Lines around a public key.
const PEM_BEGIN: &str = "-----BEGIN PUBLIC KEY-----";
const PEM_END: &str = "-----END PUBLIC KEY-----";

/// Public key that verifies signatures of images.
#[derive(Clone, PartialEq, Eq)]
pub struct VerifyKey(Vec<u8>);

impl fmt::Debug for VerifyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VerifyKey")
    }
}

impl VerifyKey {
    /// Parses a public key in PEM, such as `cosign.pub`.
    ///
    /// # Errors
    /// The error is a message for the author of the build.
    pub fn from_pem(text: &str) -> Result<Self, String> {
        let invalid = || {
            "the key is not a public key in PEM (BEGIN PUBLIC KEY), such as cosign.pub".to_owned()
        };
        let begin = text.find(PEM_BEGIN).ok_or_else(invalid)? + PEM_BEGIN.len();
        let rest = text.get(begin..).unwrap_or_default();
        let (body, _) = rest.split_once(PEM_END).ok_or_else(invalid)?;
        let body: String = body.split_whitespace().collect();
        let key = STANDARD.decode(body).map_err(|_| invalid())?;
        let point = key.strip_prefix(&P256_PREFIX[..]);
        let point = point.filter(|point| point.len() == P256_POINT_BYTES);
        let point = point.ok_or_else(|| {
            "the public key has another algorithm than ECDSA with P-256, the default of cosign"
                .to_owned()
        })?;
        Ok(Self(point.to_vec()))
    }

    /// Returns whether the key has signed a message.
    fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &self.0);
        key.verify(message, signature).is_ok()
    }
}

/// Signed document. The name of the image is not compared, as in cosign.
#[derive(Deserialize)]
struct SignedDocument {
    critical: Critical,
}

#[derive(Deserialize)]
struct Critical {
    image: SignedImage,
    r#type: String,
}

#[derive(Deserialize)]
struct SignedImage {
    #[serde(rename = "docker-manifest-digest")]
    digest: String,
}

/// Checks that one of `keys` has signed the manifest of an image or the index that refers to it.
/// `digests` are the SHA-256 digests of both. `registry` is the repository of the image.
pub(super) fn verify(
    registry: &mut RegistryImage,
    digests: &[String],
    keys: &[VerifyKey],
) -> Result<(), ImportError> {
    let mut examined = 0;
    for digest in digests {
        let Some(manifest) = registry.optional_manifest(&format!("sha256-{digest}.sig"))? else {
            continue;
        };
        let manifest: Document = parse("signature manifest", &manifest)?;
        for layer in manifest.layers.iter().take(MAX_SIGNATURES) {
            examined += 1;
            if is_valid(registry, layer, digest, keys)? {
                return Ok(());
            }
        }
    }
    let image = registry.name();
    Err(match examined {
        0 => ImportError::Unsigned { image },
        count => ImportError::Signature { image, count },
    })
}

/// Returns whether a layer of a signature manifest is a signature of the image with this digest.
fn is_valid(
    registry: &mut RegistryImage,
    layer: &Descriptor,
    digest: &str,
    keys: &[VerifyKey],
) -> Result<bool, ImportError> {
    let signature = layer.annotations.get(SIGNATURE);
    let signature = signature.and_then(|text| STANDARD.decode(text).ok());
    let Some(signature) = signature.filter(|_| layer.size <= MAX_DOCUMENT_BYTES) else {
        return Ok(false);
    };
    // Only a signed document is parsed.
    let document = registry.document(layer)?;
    if !keys.iter().any(|key| key.has_signed(&document, &signature)) {
        return Ok(false);
    }
    let document = serde_json::from_slice::<SignedDocument>(&document);
    Ok(document.is_ok_and(|document| {
        let critical = document.critical;
        critical.r#type == DOCUMENT_TYPE && critical.image.digest == format!("sha256:{digest}")
    }))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};

    /// Key that signs images as cosign does.
    pub struct SigningKey {
        pair: EcdsaKeyPair,
        /// Public key in PEM.
        pub public_pem: String,
    }

    impl SigningKey {
        pub fn generate() -> Self {
            let (random, algorithm) = (SystemRandom::new(), &ECDSA_P256_SHA256_ASN1_SIGNING);
            let document = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
            let pair = EcdsaKeyPair::from_pkcs8(algorithm, document.as_ref(), &random).unwrap();
            let der = [&P256_PREFIX[..], pair.public_key().as_ref()].concat();
            Self {
                pair,
                public_pem: pem(&der),
            }
        }

        pub fn sign(&self, message: &[u8]) -> Vec<u8> {
            let signature = self.pair.sign(&SystemRandom::new(), message).unwrap();
            signature.as_ref().to_vec()
        }
    }

    fn pem(der: &[u8]) -> String {
        format!("{PEM_BEGIN}\n{}\n{PEM_END}\n", STANDARD.encode(der))
    }

    #[test]
    fn only_public_keys_for_p256_are_accepted() {
        let pair = SigningKey::generate();
        let key = VerifyKey::from_pem(&format!("comment\n{}", pair.public_pem)).unwrap();
        let signature = pair.sign(b"message");
        assert!(key.has_signed(b"message", &signature));
        assert!(!key.has_signed(b"massage", &signature));
        assert!(!key.has_signed(b"message", &signature[1..]));
        for (bad, reason) in [
            (String::new(), "not a public key"),
            (PEM_BEGIN.to_owned(), "not a public key"),
            (pem(&P256_PREFIX), "another algorithm"),
            (pem(&[0; 91]), "another algorithm"),
        ] {
            let message = VerifyKey::from_pem(&bad).unwrap_err();
            assert!(message.contains(reason), "{bad}: {message}");
        }
    }
}
