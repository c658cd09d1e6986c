//! Layers of images: archives from strangers, turned into directories that nothing leads out of.

pub(crate) mod apart;
mod error;
mod limits;
mod merge;
mod place;
mod proof;
mod store;
mod stream;
mod unpack;

pub use error::{LayerError, Problem};
pub(crate) use jiffy_archive::error::shown;
pub use limits::Limits;
pub(crate) use merge::merge;
pub(crate) use proof::{Proofs, Repository};
pub(crate) use store::{Layer, Layers};
pub(crate) use stream::Stream;
pub use unpack::{unpack, unpack_image};

use serde::{Deserialize, Serialize};

/// What became of an archive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unpacked {
    /// SHA-256 of the archive without its compression, lower-case hexadecimal: the layer's identity ("DiffID").
    pub diff_id: String,
    /// Entries of the archive.
    pub entries: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Device nodes that are not there: the guest has its own.
    pub devices_left_out: u64,
    /// Whether the archive has an end mark. Some packers write none: if its identity is not known either, it may be cut short.
    pub end_mark: bool,
    /// Nothing of the layers below is left.
    pub opaque: bool,
}

#[cfg(test)]
pub(crate) mod tests;
