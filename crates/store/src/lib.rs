//! Snapshot store, addressed by content. A store is an S3 bucket or a directory that many hosts
//! share.
//!
//! # Words
//! - A *tenant* is an owner of snapshots, usually an API key. All objects of a tenant are encrypted
//!   under its keys. The *shared* tenant has the stock templates, which all tenants may read.
//! - A *chunk* is 64 KiB of memory or of a disk, named by its keyed hash. A *frame* is a chunk as
//!   it is stored: compressed and encrypted.
//! - A *pack* ([`pack`]) is an object with many frames.
//! - A [`StoredManifest`] describes a snapshot, and has the hashes of its chunks. The keyed hash of
//!   its content, the *root*, identifies the snapshot. [`Locations`] map each chunk to its pack.
//! - The *ancestors* of a snapshot are the snapshots that it is based on. A snapshot stores only
//!   the chunks that differ from them.
//! - A *push* copies a snapshot of a host to the store. A *pull* fetches chunks into the cache of a
//!   host.
//! - A *collection* removes objects that no snapshot needs. It first *condemns* an object, and a
//!   later collection removes it. A *lease* protects the objects of a push from collections.
//!
//! Objects, formats, backends and tenants are modules of this crate that do not depend on a host.
//! The module [`host`] builds on them: the state that one host has of the store, and its
//! operations.
//!
//! docs/design-store.md explains the design.

mod backend;
#[cfg(feature = "s3")]
mod bounded_http;
mod cache;
mod codec;
mod data_keys;
mod directory_store;
pub mod envelope;
mod error;
mod fetch_plan;
pub mod host;
mod key_broker;
mod keyring;
pub mod layer;
mod locations;
mod manifest;
pub mod pack;
mod remote;
mod request_error;
mod resume_bundle;
mod s3;
mod shared_store;
mod source;
mod stall_clock;
mod store_url;
mod tenant;
mod traffic;
mod version_memory;

pub use backend::{Backend, BackendSettings, Listed, ObjectVersion, Versioned, Written};
pub use cache::{CachedLayer, LayerCache};
pub use data_keys::{DataKeys, HASH_BYTES, Hash, SEAL_BYTES};
pub use directory_store::DirectoryCheck;
pub use error::{FormatError, StoreError};
pub use key_broker::KeyBroker;
pub use keyring::Keyring;
pub use layer::{Layer, LayerKind, Run, RunKind};
pub use locations::{Location, Locations, MAX_LOCATIONS_BYTES};
pub use manifest::{
    Attributes, CHUNK_BYTES, EngineKind, MAX_LINEAGE, MAX_MANIFEST_BYTES, Scope, SnapshotName,
    StoredManifest,
};
pub use remote::RemoteSnapshot;
pub use resume_bundle::{
    BundledChunk, BundledSnapshot, MAX_BUNDLED_BYTES, MAX_BUNDLED_CHUNKS, MAX_BUNDLED_DOCUMENTS,
    ResumeBundle,
};
pub use shared_store::SharedStore;
pub use shared_store::collection::{GC_LOCK_TIME, GcOptions, GcReport, OnProgress};
pub use shared_store::pull::{CachedPart, PullReport, Selection};
pub use shared_store::push::{MAX_PUSH_TIME, PushOptions, PushReport};
pub use shared_store::readers::READER_TIME;
pub use shared_store::repair::ChunkCopies;
pub use shared_store::resume::WrittenChunks;
pub use shared_store::tenant_names::TenantNames;
pub use shared_store::tenant_records::TenantKeys;
pub use shared_store::usage::{ChunkUsage, StoreStats};
pub use shared_store::verify::{DamagedFrame, DamagedObject, DamagedSnapshot, VerifyReport};
pub use source::{PartSource, SnapshotSource};
pub use store_url::StoreUrl;
pub use tenant::{SHARED_TENANT, Tenant};
pub use traffic::Traffic;
pub use version_memory::VersionMemory;
