//! Server of one volume: its files, and sessions that access them by the FUSE protocol.
//!
//! A [`Volume`] stores names and attributes in `catalog.db` and the content of each file in a file
//! that is named by a number. Names of guests therefore never become paths of the host, and links,
//! devices and set-user-ID bits have no effect on the host. A [`Session`] answers the requests of
//! one client: a guest's kernel or the daemon. [`process`] is the confined process with the
//! sessions.

pub mod abi;
mod attributes;
mod catalog;
mod contents;
mod directory_stream;
mod error;
pub mod image;
mod locks;
pub mod process;
mod session;
mod usage;
mod volume;

pub use attributes::{Attributes, Change, Creation, Time};
pub use error::VolumeError;
pub use locks::LateReply;
pub use session::{MAX_MESSAGE, MAX_WRITE, Session, SessionRights};
pub use usage::Quota;
pub use volume::{MAX_NAME, ROOT, RenameMode, Space, Volume, remove};
