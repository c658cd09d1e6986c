//! Archives (tar, in its pax form) as they go between host and guests.
//!
//! * [`pack`]: from trees of files to an archive; [`write`] does the format.
//! * [`unpack`]: from an archive to files beneath a directory; [`read`] does the format.
//!
//! Neither side trusts the other: what is read into memory is bounded whatever an archive says, and a name never leads out of
//! the directory that is unpacked into.

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
