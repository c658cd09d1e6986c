//! [`VolumeMounter`]: mounts volumes in guests.

use async_trait::async_trait;
use jiffy_engine_api::Guest;
use serde::{Deserialize, Serialize};
use std::fmt;
use tokio::sync::mpsc;

/// A volume of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountedVolume {
    /// Id of the volume.
    pub volume: String,
    /// Name of the volume when it was mounted.
    pub name: String,
    /// Absolute path of the directory in the sandbox.
    pub path: String,
    /// True if the sandbox cannot change the volume.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

impl From<&MountedVolume> for jiffy_api_types::VolumeMount {
    fn from(mounted: &MountedVolume) -> Self {
        Self {
            name: mounted.name.clone(),
            path: mounted.path.clone(),
            read_only: mounted.read_only,
        }
    }
}

/// Mounts of a guest.
#[derive(Clone, Copy)]
pub struct VolumeMount<'a> {
    /// Id of the sandbox.
    pub sandbox: &'a str,
    /// Owner of the sandbox and of its volumes: the id of an API key. `None` for the owner of the
    /// host.
    pub owner: Option<&'a str>,
    /// Volumes.
    pub volumes: &'a [MountedVolume],
    /// Guest.
    pub guest: &'a dyn Guest,
    /// True to serve only existing mounts whose server has exited.
    pub only_if_lost: bool,
}

/// Reason why a volume is not mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The guest rejected the path. The guest determines the text.
    #[error("{0}")]
    Path(String),
    /// The volume does not exist.
    #[error("{0} does not exist")]
    Unknown(String),
    /// The host failed, or the guest did not respond.
    #[error("{0}")]
    Failed(String),
}

impl MountError {
    /// Adds the name of a volume.
    pub fn of(self, name: &str) -> Self {
        match self {
            Self::Path(reason) => Self::Path(format!("volume `{name}`: {reason}")),
            Self::Unknown(_) => Self::Unknown(name.to_owned()),
            Self::Failed(reason) => Self::Failed(format!("volume `{name}`: {reason}")),
        }
    }
}

/// Mounts volumes in guests.
#[async_trait]
pub trait VolumeMounter: fmt::Debug + Send + Sync {
    /// Mounts the volumes of a sandbox in its guest, or serves mounts that the guest has since its
    /// snapshot.
    async fn mount(&self, mount: VolumeMount<'_>) -> Result<(), MountError>;

    /// Returns the receiver of the ids of volumes whose server has exited. `None` after the first
    /// call.
    fn take_lost(&self) -> Option<mpsc::Receiver<String>>;
}
