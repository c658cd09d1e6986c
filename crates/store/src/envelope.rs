//! Envelope of the encrypted objects: a header of 64 bytes in plain text, then the ciphertext.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys. A rotation of the keys starts a new *generation* of them. The
//! *root* of a snapshot is the hash that identifies it in the store. A *pack* is an object with
//! many chunks of snapshots.
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 8 | magic |
//! | 8 | 4 | version |
//! | 12 | 4 | generation of the data keys |
//! | 16 | 16 | tenant id |
//! | 32 | 32 | name of the object: a root, or the id of a pack and 16 zero bytes |

use crate::FormatError;
use crate::codec::Reader;
use crate::data_keys::{DataKeys, SEAL_BYTES};

/// Length in bytes of the header of an encrypted object.
pub const HEADER_BYTES: usize = 64;
/// Version of all formats of the store.
pub const STORE_FORMAT: u32 = 1;

/// Public id of a tenant. It is random and reveals nothing about the tenant.
pub type TenantId = [u8; 16];

/// Readable part of an encrypted object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Magic of the kind of object.
    pub magic: [u8; 8],
    /// Generation of the data keys.
    pub generation: u32,
    /// Tenant.
    pub tenant: TenantId,
    /// Name of the object.
    pub name: [u8; 32],
}

impl Header {
    /// Encodes the header.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.magic);
        bytes[8..12].copy_from_slice(&STORE_FORMAT.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.generation.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.tenant);
        bytes[32..].copy_from_slice(&self.name);
        bytes
    }

    /// Decodes the header of an object of kind `magic`.
    pub fn decode(magic: [u8; 8], bytes: &[u8]) -> Result<Self, FormatError> {
        let mut reader = Reader::new(bytes);
        reader.header(magic, STORE_FORMAT)?;
        Ok(Self {
            magic,
            generation: reader.u32()?,
            tenant: reader.array()?,
            name: reader.array()?,
        })
    }

    /// Encrypts `body`, authenticated together with this header, and returns header and ciphertext.
    pub(crate) fn seal(&self, keys: &DataKeys, body: &[u8]) -> Result<Vec<u8>, FormatError> {
        let header = self.encode();
        Ok([&header[..], &keys.seal(&header, body)?].concat())
    }

    /// Decrypts the body of `object`, which has this header.
    pub(crate) fn open(&self, keys: &DataKeys, object: &[u8]) -> Result<Vec<u8>, FormatError> {
        let short = FormatError::Damaged("it is truncated");
        if object.len() < HEADER_BYTES + SEAL_BYTES {
            return Err(short);
        }
        keys.open(&self.encode(), &object[HEADER_BYTES..])
    }
}

const _: () = assert!(HEADER_BYTES == 8 + 4 + 4 + 16 + 32);
