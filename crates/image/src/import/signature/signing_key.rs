//! Keys that sign images in tests.

use super::pem;
use rcgen::{KeyPair, PublicKeyData, SigningKey as _};

/// Key that signs images as cosign does.
pub struct SigningKey {
    pub pair: KeyPair,
    pub public_pem: String,
    pub public_der: Vec<u8>,
}

impl SigningKey {
    pub fn generate() -> Self {
        let pair = KeyPair::generate().unwrap();
        let public_der = pair.subject_public_key_info();
        Self {
            public_pem: pem::encode(&public_der, pem::PUBLIC_KEY),
            public_der,
            pair,
        }
    }

    pub fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.pair.sign(message).unwrap()
    }
}
