//! Snapshots by content. A store is an S3 bucket or a directory that many hosts share.
//!
//! A snapshot is cut into chunks of 64 KiB, each named by its keyed hash. Chunks lie in packs
//! ([`pack`]); a [`Manifest`] has the hashes, [`Locations`] say in which packs the chunks are. All of
//! it is encrypted under keys of the tenant.

mod codec;
mod data_keys;
pub mod envelope;
mod error;
pub mod layer;
mod locations;
mod manifest;
pub mod pack;

pub use data_keys::{DataKeys, HASH_BYTES, Hash, SEAL_BYTES};
pub use error::{FormatError, StoreError};
pub use layer::{Layer, LayerKind, Run, RunKind};
pub use locations::{Location, Locations, MAX_LOCATIONS_BYTES};
pub use manifest::{
    Attributes, CHUNK_BYTES, EngineKind, MAX_LINEAGE, MAX_MANIFEST_BYTES, Manifest, Scope,
    SnapshotName,
};
