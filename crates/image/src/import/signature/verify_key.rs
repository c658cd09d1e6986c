//! [`VerifyKey`]: keys that verify signatures of images.

use super::pem;
use super::public_key::PublicKey;
use rustls_pki_types::alg_id;
use std::fmt;

/// Public key that verifies signatures of images.
#[derive(Clone, PartialEq, Eq)]
pub struct VerifyKey(PublicKey);

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
        let der = pem::decode(text, pem::PUBLIC_KEY).ok_or_else(|| {
            "the key is not a public key in PEM (BEGIN PUBLIC KEY), such as cosign.pub".to_owned()
        })?;
        let key = PublicKey::from_der(&der);
        let key = key.filter(|key| key.has_algorithm(&alg_id::ECDSA_P256));
        key.map(Self).ok_or_else(|| {
            "the public key has another algorithm than ECDSA with P-256, the default of cosign"
                .to_owned()
        })
    }

    /// Returns the key in DER.
    pub(super) fn der(&self) -> &[u8] {
        self.0.der()
    }

    /// Returns whether the key has signed a message.
    pub(super) fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        self.0.has_signed(message, signature)
    }
}

#[cfg(test)]
mod tests {
    use super::super::signing_key::SigningKey;
    use super::*;

    #[test]
    fn only_public_keys_for_p256_are_accepted() {
        let pair = SigningKey::generate();
        let key = VerifyKey::from_pem(&format!("comment\n{}", pair.public_pem)).unwrap();
        let signature = pair.sign(b"message");
        assert!(key.has_signed(b"message", &signature));
        assert!(!key.has_signed(b"massage", &signature));
        assert!(!key.has_signed(b"message", &signature[1..]));
        let unfinished = "-----BEGIN PUBLIC KEY-----";
        let of_bytes = |der: &[u8]| pem::encode(der, pem::PUBLIC_KEY);
        for (bad, reason) in [
            (String::new(), "not a public key"),
            (unfinished.to_owned(), "not a public key"),
            (of_bytes(&pair.public_der[..26]), "another algorithm"),
            (of_bytes(&[0; 91]), "another algorithm"),
            (
                pem::encode(&pair.public_der, "PRIVATE KEY"),
                "not a public key",
            ),
        ] {
            let message = VerifyKey::from_pem(&bad).unwrap_err();
            assert!(message.contains(reason), "{bad}: {message}");
        }
    }
}
