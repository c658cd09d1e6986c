//! Public keys (SubjectPublicKeyInfo, RFC 5280).

use super::der::{BIT_STRING, Reader, SEQUENCE};
use rustls_pki_types::SignatureVerificationAlgorithm;
use webpki::ring;

/// Algorithms of signatures. The first algorithm for a kind of key is the default of this kind.
pub(super) static ALGORITHMS: &[&dyn SignatureVerificationAlgorithm] = &[
    ring::ECDSA_P256_SHA256,
    ring::ECDSA_P384_SHA384,
    ring::ED25519,
    ring::RSA_PKCS1_2048_8192_SHA256,
    ring::ECDSA_P256_SHA384,
    ring::ECDSA_P384_SHA256,
    ring::RSA_PKCS1_2048_8192_SHA384,
    ring::RSA_PKCS1_2048_8192_SHA512,
];

/// A public key of any of [`ALGORITHMS`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PublicKey {
    /// SubjectPublicKeyInfo.
    der: Vec<u8>,
    /// Content of its AlgorithmIdentifier.
    algorithm: Vec<u8>,
    /// Content of its bit string.
    key: Vec<u8>,
}

impl PublicKey {
    /// Parses a SubjectPublicKeyInfo. `None` if it is invalid, or the algorithm is not supported.
    pub fn from_der(der: &[u8]) -> Option<Self> {
        let mut info = Reader::inside(der, SEQUENCE)?;
        let algorithm = info.read(SEQUENCE)?;
        let (unused_bits, key) = info.read(BIT_STRING)?.split_first()?;
        let mut known = ALGORITHMS.iter();
        let is_known = known.any(|known| *known.public_key_alg_id() == *algorithm);
        (is_known && *unused_bits == 0 && info.is_empty()).then(|| Self {
            der: der.to_vec(),
            algorithm: algorithm.to_vec(),
            key: key.to_vec(),
        })
    }

    /// Returns the SubjectPublicKeyInfo.
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// Returns whether the content of an AlgorithmIdentifier is the algorithm of the key.
    pub fn has_algorithm(&self, algorithm: &[u8]) -> bool {
        self.algorithm == algorithm
    }

    /// Returns whether the key has signed a message with the default algorithm of its kind.
    pub fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        let mut known = ALGORITHMS.iter();
        let algorithm = known.find(|known| *known.public_key_alg_id() == *self.algorithm);
        self.verify(algorithm, message, signature)
    }

    /// Returns whether the key has signed a message with the algorithm of an AlgorithmIdentifier.
    pub fn has_signed_with(&self, algorithm: &[u8], message: &[u8], signature: &[u8]) -> bool {
        let mut known = ALGORITHMS.iter();
        let algorithm = known.find(|known| {
            *known.public_key_alg_id() == *self.algorithm && *known.signature_alg_id() == *algorithm
        });
        self.verify(algorithm, message, signature)
    }

    fn verify(
        &self,
        algorithm: Option<&&dyn SignatureVerificationAlgorithm>,
        message: &[u8],
        signature: &[u8],
    ) -> bool {
        algorithm.is_some_and(|algorithm| {
            let verified = algorithm.verify_signature(&self.key, message, signature);
            verified.is_ok()
        })
    }
}
