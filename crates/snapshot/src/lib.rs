//! Snapshots on disk. A snapshot is a directory whose content does not change after it is
//! published. A *merge* ([`Store::merge`]) copies the layers of ancestors into a snapshot. A *fold*
//! ([`Store::prepare_fold`]) copies the layers of a parent into its only child. Both replace the
//! files, but the new files represent the same memory and disks.
//!
//! Files of a snapshot:
//!
//! - `manifest.json`: id, parent, origin and sizes ([`Manifest`]).
//! - `state.bin`: state of vCPUs and devices, read only by `jiffy-vmm`.
//! - `memory.layer`, `memory.index`: 64 KiB chunks of memory that differ from the parent
//!   ([`jiffy_proto::layer`]).
//! - `disk0.layer`, `disk0.index`, ...: blocks that the guest wrote since the parent.
//! - `seal.json`: BLAKE3 hashes of all chunks, added later ([`Snapshot::write_checksums`]).
//! - `working-set.index`: chunks of memory that a restored guest touches first. The file is added
//!   later ([`Snapshot::put_working_set`], [`Snapshot::put_touched`]). [`Lineage::read_ahead`]
//!   reads these chunks into the page cache before a restore.
//! - `missing.json`, `memory.present`: exist while chunks of `memory.layer` are missing on this
//!   host ([`Snapshot::missing`]). An additional file `prefetch` requests all of them.
//! - `written-pages.index`, `first-use-pages.index`: pages that a guest writes until the end of its
//!   first command (any command, such as `true`), and until the end of its first use (the request
//!   or command with which most uses of the template's sandboxes start)
//!   ([`Snapshot::put_written_pages`], [`Snapshot::put_first_use_pages`]).
//!
//! A [`Store`] is a directory of snapshots. A snapshot is written as a [`SnapshotDraft`] and
//! published when it is complete. Users of a snapshot must hold it ([`Snapshot::hold`]). Its chain
//! of parents is its [`Lineage`].
//!
//! docs/design-snapshots.md explains how a running guest becomes these files, and the reverse.

mod checked_snapshots;
mod checksums;
mod draft;
mod error;
mod lineage;
mod manifest;
mod snapshot;
mod snapshot_dir;
mod store;
mod store_index;

pub use checksums::{Checksums, DamagedChunk, VerifyResult};
pub use draft::{Durability, SnapshotDraft};
pub use error::SnapshotError;
pub use lineage::Lineage;
pub use manifest::{DiskSizes, Manifest, MemorySizes, SNAPSHOT_FORMAT, Versions};
pub use snapshot::missing::{MissingMemory, PIN_FILE, is_reserved};
pub use snapshot::working_set::WrittenPages;
pub use snapshot::{Hold, Snapshot, SnapshotLayer, read_index};
pub use store::Store;
pub use store::fold::{Fold, FoldPace};
pub use store::import::{ImportMode, check_manifest};
pub use store::parts::{PartKind, SnapshotPart};
