//! Archives (tar in pax format) that hosts and guests exchange.
//!
//! * [`pack`]: file trees to archives; [`write`]: the format.
//! * [`unpack`]: archives to files below a directory; [`read`]: the format.
//!
//! Neither side trusts the other: memory is bounded for any archive, and no path leads out of the
//! target directory.

pub mod entry;
pub mod error;
pub mod pack;
mod pax;
pub mod place;
pub mod read;
pub mod unpack;
pub mod write;
mod xattr;

pub use entry::{Entry, Kind, Run};
pub use error::ArchiveError;
pub use pack::{Contents, Packer};
pub use read::{Reader, Tolerance};
pub use unpack::{Owner, Rules, Unpacked, unpack};
pub use write::Writer;
