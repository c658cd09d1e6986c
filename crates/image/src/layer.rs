//! Layers of container images. A layer is an untrusted archive. It is unpacked into a directory
//! that no path in the archive can leave.
//!
//! A *whiteout* is an entry that marks a file of the layers below as deleted. An *opaque* directory
//! hides the content that it has in the layers below.

pub(crate) mod confined;
mod confined_dir;
mod error;
mod limits;
mod merge;
mod store;
mod stream;
mod unpack;

pub use error::{EntryProblem, LayerError};
pub(crate) use jiffy_archive::error::shown;
pub use limits::UnpackLimits;
pub(crate) use merge::merge;
pub(crate) use store::{BlobProofs, LayerStore, Repository, StoredLayer};
pub(crate) use stream::LayerStream;
pub(crate) use unpack::OVERLAY_OPAQUE;
pub use unpack::{unpack, unpack_image};

use serde::{Deserialize, Serialize};

/// Reserves a total number of unpacked bytes, or rejects the reservation with a message for the
/// owner.
pub(crate) type ByteMeter<'m> = &'m (dyn Fn(u64) -> Result<(), String> + Sync);

/// Result of unpacking an archive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnpackedLayer {
    /// SHA-256 of the uncompressed archive in lower-case hexadecimal (the DiffID of OCI).
    pub diff_id: String,
    /// Number of entries.
    pub entries: u64,
    /// Bytes of the files.
    pub bytes: u64,
    /// Number of skipped device nodes. Guests have their own device nodes.
    pub devices_left_out: u64,
    /// The archive has an end mark. Some packers omit it. Without a known diff id, such an
    /// archive may be truncated.
    pub end_mark: bool,
    /// The layer hides all layers below it.
    pub opaque: bool,
}

#[cfg(test)]
pub(crate) mod tests;
