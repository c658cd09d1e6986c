//! Snapshots on disk. A snapshot is a directory that is never changed once it has its name:
//!
//! | File | Content |
//! |---|---|
//! | `manifest.json` | what it is, whose child, made by what and on what ([`Manifest`]) |
//! | `state.bin` | vCPUs and devices, for `jiffy-vmm` alone |
//! | `memory.layer`, `memory.index` | 64 KiB chunks of memory that differ from the parent ([`jiffy_proto::layer`]) |
//! | `disk0.layer`, `disk0.index`, ... | blocks that the guest wrote since the parent |
//! | `seal.json` | BLAKE3 hash of every chunk, added later ([`Snapshot::seal`]) |
//! | `working-set.index` | chunks of memory that a restored guest touches first, added later ([`Snapshot::put_working_set`]) |
//!
//! A [`Store`] is a directory of snapshots. A snapshot is written to a [`Draft`], which has no name until it is complete;
//! whoever runs from one holds it ([`Snapshot::hold`]); what lies below it is its [`Lineage`].

mod dir;
mod draft;
mod error;
mod family;
mod lineage;
mod manifest;
mod merge;
mod seal;
mod snapshot;
mod store;
mod working_set;

pub use draft::{Draft, Durability};
pub use error::SnapshotError;
pub use lineage::Lineage;
pub use manifest::{DiskSizes, FORMAT, Manifest, MemorySizes, Versions};
pub use seal::{Damage, Seal, Verdict};
pub use snapshot::{Hold, Layer, Snapshot, read_index};
pub use store::Store;
