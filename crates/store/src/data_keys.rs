//! [`DataKeys`]: the keys of a tenant, with which chunks are hashed and objects are encrypted.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *tenant* is an owner of snapshots in the store,
//! usually an API key. The objects of a tenant are encrypted with its keys.

use crate::FormatError;
use chacha20poly1305::aead::{Aead, Payload};
use chacha20poly1305::{KeyInit, XChaCha20Poly1305, XNonce};
use zeroize::Zeroizing;

/// Length in bytes of a hash.
pub const HASH_BYTES: usize = 32;
/// Number of bytes that encryption adds: nonce and tag.
pub const SEAL_BYTES: usize = NONCE_BYTES + 16;
/// Length in bytes of the nonce of XChaCha20.
const NONCE_BYTES: usize = 24;

/// Keyed BLAKE3 hash of a chunk, a layer or a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hash(pub [u8; HASH_BYTES]);

impl std::fmt::Display for Hash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::str::FromStr for Hash {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        hex(text)
            .map(Self)
            .ok_or(FormatError::Damaged("a hash is not 64 hexadecimal digits"))
    }
}

/// Decodes lower-case hexadecimal digits.
pub(crate) fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |b: u8| match b {
        b'0'..=b'9' => Some(b - b'0'),
        b'a'..=b'f' => Some(b - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    if text.len() != 2 * N {
        return None;
    }
    for (to, pair) in bytes.iter_mut().zip(text.as_bytes().as_chunks::<2>().0) {
        *to = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

/// Encodes bytes as hexadecimal digits.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns random bytes from the operating system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], FormatError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|_| FormatError::Damaged("the host has no entropy"))?;
    Ok(bytes)
}

/// Subject of a hash. Equal bytes have different hashes under different subjects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HashOf {
    /// Content of a chunk.
    Chunk,
    /// Hashes of some chunks of a layer.
    Leaf,
    /// Length, runs and leaves of a layer.
    Layer,
    Manifest,
    /// Id of a snapshot, a sandbox or a module. The hash replaces the id in the path of an object,
    /// so that the store does not learn the id.
    Name,
}

/// One generation of a tenant's data keys: the keys for hashing and the key for encryption. All
/// keys of a generation are derived from its secret of 32 bytes.
#[derive(Clone)]
pub struct DataKeys {
    generation: u32,
    /// Keys for hashing, indexed by [`HashOf`].
    hash_keys: Zeroizing<[[u8; 32]; 5]>,
    cipher: XChaCha20Poly1305,
}

impl std::fmt::Debug for DataKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DataKeys({})", self.generation)
    }
}

impl DataKeys {
    /// Derives the keys of `generation` from its secret.
    pub fn derive(generation: u32, secret: &[u8; 32]) -> Self {
        let key = |subject: &str| {
            Zeroizing::new(blake3::derive_key(
                &format!("jiffy store 2026 {subject}"),
                secret,
            ))
        };
        Self {
            generation,
            // The keys have the order of the variants of `HashOf`.
            hash_keys: Zeroizing::new(
                ["chunk", "leaf", "layer", "manifest", "name"].map(|subject| *key(subject)),
            ),
            cipher: XChaCha20Poly1305::new((&*key("encryption")).into()),
        }
    }

    /// Number of the generation.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    pub(crate) fn hash(&self, of: HashOf, bytes: &[u8]) -> Hash {
        Hash(*blake3::keyed_hash(&self.hash_keys[of as usize], bytes).as_bytes())
    }

    /// Returns the hash of a chunk's content. The last chunk of a file is hashed at its actual
    /// length.
    pub fn chunk_hash(&self, bytes: &[u8]) -> Hash {
        self.hash(HashOf::Chunk, bytes)
    }

    /// Encrypts `bytes`. Decryption requires the same `context`. Returns nonce, ciphertext and tag.
    pub fn seal(&self, context: &[u8], bytes: &[u8]) -> Result<Vec<u8>, FormatError> {
        seal(&self.cipher, context, bytes)
    }

    /// Decrypts the output of [`Self::seal`].
    pub fn open(&self, context: &[u8], sealed: &[u8]) -> Result<Vec<u8>, FormatError> {
        open(&self.cipher, context, sealed)
    }
}

/// Encrypts bytes. [`open`] only accepts them with the same `context`.
pub(crate) fn seal(
    cipher: &XChaCha20Poly1305,
    context: &[u8],
    bytes: &[u8],
) -> Result<Vec<u8>, FormatError> {
    // Nonces of XChaCha20 are long enough to be chosen at random.
    let nonce: [u8; NONCE_BYTES] = random()?;
    let payload = Payload {
        msg: bytes,
        aad: context,
    };
    let sealed = cipher
        .encrypt(&XNonce::from(nonce), payload)
        .map_err(|_| FormatError::Damaged("it is too long to encrypt"))?;
    Ok([&nonce[..], &sealed].concat())
}

/// Decrypts bytes from [`seal`].
pub(crate) fn open(
    cipher: &XChaCha20Poly1305,
    context: &[u8],
    sealed: &[u8],
) -> Result<Vec<u8>, FormatError> {
    const FORGED: FormatError =
        FormatError::Damaged("it was changed, or was encrypted under another key");
    let (nonce, sealed) = sealed.split_first_chunk::<NONCE_BYTES>().ok_or(FORGED)?;
    let payload = Payload {
        msg: sealed,
        aad: context,
    };
    cipher
        .decrypt(&XNonce::from(*nonce), payload)
        .map_err(|_| FORGED)
}
