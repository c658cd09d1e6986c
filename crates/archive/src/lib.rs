//! Archives (tar in pax format) exchanged between hosts and guests.
//!
//! * [`pack`] converts file trees to archives; [`write`] implements the format.
//! * [`unpack`] extracts archives below a directory; [`read`] implements the format.
//!
//! Neither side trusts the other: memory usage is bounded for any archive, and no path leads out of
//! the target directory.

pub mod entry;
pub mod error;
mod mode;
pub mod pack;
mod pax;
pub mod read;
pub mod target_dir;
pub mod unpack;
mod whiteout;
pub mod write;
mod xattr;

pub use entry::{ArchiveEntry, ArchiveEntryKind, ContentRange};
pub use error::ArchiveError;
pub use mode::set_mode;
pub use pack::{PackOptions, Packer};
pub use read::{ArchiveReader, ReadLimits};
pub use unpack::{UnpackOptions, UnpackOwner, UnpackStats, unpack};
pub use write::ArchiveWriter;
