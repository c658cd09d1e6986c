//! [`SigningKey`]: a key that signs tokens (ECDSA with P-256 and SHA-256, `ES256` in RFC 7518).

use crate::IdentityError;
use data_encoding::BASE64URL_NOPAD;
use jiffy_secrets::HostKey;
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use zeroize::Zeroizing;

/// Context of encrypted keys: text to which the encryption binds them, so that another secret
/// cannot replace them.
const CONTEXT: &str = "identity key";
/// Bytes of a coordinate of a public key.
const COORDINATE: usize = 32;

/// A key as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredKey {
    /// Time of the creation, in seconds since 1970.
    pub created_s: u64,
    /// Private key (PKCS #8) in base64, encrypted with the key of the host or of its fleet.
    pub sealed: String,
}

impl StoredKey {
    /// Decrypts the private key. `None` if it was encrypted by another host, or is damaged.
    fn open(&self, host_key: &HostKey) -> Option<Zeroizing<Vec<u8>>> {
        let sealed = BASE64URL_NOPAD.decode(self.sealed.as_bytes()).ok()?;
        host_key.open_sealed(CONTEXT, &sealed)
    }
}

/// Key that signs tokens.
pub(crate) struct SigningKey {
    pub stored: StoredKey,
    pair: EcdsaKeyPair,
    /// Public key as verifiers read it (RFC 7517).
    pub public: Value,
    /// Name of the key in tokens: the thumbprint of the public key (RFC 7638).
    pub id: String,
    random: SystemRandom,
}

impl SigningKey {
    /// Creates a key.
    pub fn generate(host_key: &HostKey, now_s: u64) -> Result<Self, IdentityError> {
        let random = SystemRandom::new();
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random);
        let pkcs8 = pkcs8.map_err(|_| IdentityError::Key)?;
        let plain = Zeroizing::new(pkcs8.as_ref().to_vec());
        Self::seal(host_key, now_s, &plain)
    }

    /// Returns the key with its private key encrypted anew.
    pub fn seal_again(&self, host_key: &HostKey) -> Result<Self, IdentityError> {
        let plain = self.stored.open(host_key).ok_or(IdentityError::Key)?;
        Self::seal(host_key, self.stored.created_s, &plain)
    }

    fn seal(host_key: &HostKey, created_s: u64, plain: &[u8]) -> Result<Self, IdentityError> {
        let sealed = BASE64URL_NOPAD.encode(&host_key.seal(CONTEXT, plain)?);
        Self::of_plain(StoredKey { created_s, sealed }, plain).ok_or(IdentityError::Key)
    }

    /// Decrypts a stored key. `None` if the key was encrypted by another host, or is damaged.
    pub fn open(host_key: &HostKey, stored: StoredKey) -> Option<Self> {
        let plain = stored.open(host_key)?;
        Self::of_plain(stored, &plain)
    }

    fn of_plain(stored: StoredKey, plain: &[u8]) -> Option<Self> {
        let random = SystemRandom::new();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, plain, &random);
        let pair = pair.ok()?;
        // An uncompressed point: 4, x and y (SEC 1, 2.3.3).
        let point = pair.public_key().as_ref().get(1..)?;
        let (x, y) = point.split_at_checked(COORDINATE)?;
        let (x, y) = (BASE64URL_NOPAD.encode(x), BASE64URL_NOPAD.encode(y));
        // The thumbprint is the digest of exactly this text.
        let text = format!(r#"{{"crv":"P-256","kty":"EC","x":"{x}","y":"{y}"}}"#);
        let id = BASE64URL_NOPAD.encode(digest(&SHA256, text.as_bytes()).as_ref());
        let public = json!({
            "kty": "EC", "crv": "P-256", "x": x, "y": y,
            "use": "sig", "alg": "ES256", "kid": id,
        });
        Some(Self {
            stored,
            pair,
            public,
            id,
            random,
        })
    }

    /// Returns the token with these claims, in the compact form of RFC 7515.
    pub fn sign(&self, claims: &Value) -> Result<Zeroizing<String>, IdentityError> {
        let header = json!({ "alg": "ES256", "kid": self.id, "typ": "JWT" });
        let encode = |value: &Value| BASE64URL_NOPAD.encode(value.to_string().as_bytes());
        let signed = format!("{}.{}", encode(&header), encode(claims));
        let signature = self.pair.sign(&self.random, signed.as_bytes());
        let signature = signature.map_err(|_| IdentityError::Key)?;
        let signature = BASE64URL_NOPAD.encode(signature.as_ref());
        Ok(Zeroizing::new(format!("{signed}.{signature}")))
    }
}
