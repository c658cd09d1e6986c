//! Volumes of API keys: directories of files that sandboxes and clients share.
//!
//! [`Volumes`] stores names, owners and tokens in `<home>/volumes.db`. [`VolumeServers`] starts the
//! process that serves the files of a volume (`crates/volume-server`). [`VolumeFiles`] accesses the
//! files from the daemon. [`StoredVolumes`] are snapshots in the store of the host.

mod entry;
mod error;
mod files;
mod host;
mod path;
mod servers;
mod stored;
mod volume;
mod volumes;

pub use entry::{Entry, EntryKind};
pub use error::{FileError, FileErrorKind, VolumeError};
pub use files::{NewAttributes, Upload, VolumeFiles};
pub use host::HostVolumes;
pub use jiffy_volume_server::SessionRights;
pub use jiffy_volume_server::image::ImageError;
pub use jiffy_volume_server::process::ServerWatch;
pub use path::VolumePath;
pub use servers::{ServerProgram, VolumeServers};
pub use stored::{MAX_SNAPSHOTS, SnapshotSizes, StoredVolumes, VolumeSnapshot};
pub use volume::{
    DEFAULT_BYTES, DEFAULT_FILES, ID_PREFIX, MAX_BYTES, MAX_FILES, MAX_KEY_BYTES, MAX_KEY_FILES,
    MAX_NAME, MAX_VOLUMES, MIN_BYTES, NewVolume, Volume,
};
pub use volumes::Volumes;
