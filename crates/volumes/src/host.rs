//! Volumes of a host and their servers.
//!
//! A *volume* is a directory of files that sandboxes of an API key share. One process serves each
//! volume in use.

use crate::{
    FileError, NewVolume, ServerProgram, Volume, VolumeError, VolumeFiles, VolumeServers, Volumes,
};
use jiffy_volume_server::image::ImageError;
use std::path::Path;

/// Volumes of a host and their servers. All methods block.
#[derive(Debug)]
pub struct HostVolumes {
    volumes: Volumes,
    servers: VolumeServers,
}

impl HostVolumes {
    /// Opens the volumes of the data directory `home`, whose runtime directory is `run`. Removes
    /// the files of volumes that do not exist.
    pub fn open(home: &Path, run: &Path, program: ServerProgram) -> Result<Self, VolumeError> {
        let failed = |source| VolumeError::File {
            path: home.join("volumes"),
            source,
        };
        let volumes = Volumes::open(home)?;
        let servers = VolumeServers::new(home, run, program).map_err(failed)?;
        // If the look-up of a volume fails, its files are not removed.
        let exists = |id: &str| !matches!(volumes.by_id(id), Ok(None));
        servers.sweep(exists).map_err(failed)?;
        Ok(Self { volumes, servers })
    }

    /// Returns the names, owners and tokens of volumes.
    pub fn volumes(&self) -> &Volumes {
        &self.volumes
    }

    /// Returns the servers.
    pub fn servers(&self) -> &VolumeServers {
        &self.servers
    }

    /// Returns a new volume of `owner`, after checks of its name and sizes. The volume does not
    /// exist before [`Self::create`] or [`crate::StoredVolumes::restore`] is called with it.
    pub fn prepare(&self, owner: &str, new: &NewVolume) -> Result<Volume, VolumeError> {
        Volumes::prepare(owner, new)
    }

    /// Creates an empty volume.
    pub fn create(&self, created: &Volume) -> Result<(), VolumeError> {
        self.create_with(created, |_| Ok(()))
    }

    /// Creates a volume, whose empty directory `fill` fills.
    pub(crate) fn create_with(
        &self,
        created: &Volume,
        fill: impl FnOnce(&Path) -> Result<(), ImageError>,
    ) -> Result<(), VolumeError> {
        let failed = |source| VolumeError::File {
            path: created.id.clone().into(),
            source,
        };
        let directory = self.servers.create(created).map_err(failed)?;
        // Add the volume to the database last: it can be used only after its files are complete.
        let filled = fill(&directory).map_err(VolumeError::from);
        if let Err(e) = filled.and_then(|()| self.volumes.add(created)) {
            // Ignore the error: the first error is reported, and the next start removes the files.
            let _ = self.servers.remove(created);
            return Err(e);
        }
        Ok(())
    }

    /// Removes a volume with its files.
    pub fn remove(&self, volume: &Volume) -> Result<(), VolumeError> {
        self.volumes.remove(&volume.id)?;
        // The files are removed at the next start of the daemon if this fails.
        if let Err(e) = self.servers.remove(volume) {
            tracing::error!(volume = volume.id, error = %e, "cannot remove the files of a volume");
        }
        Ok(())
    }

    /// Returns access to the files of a volume.
    pub fn files(&self, volume: &Volume) -> Result<VolumeFiles, FileError> {
        self.servers.files(volume)
    }
}
