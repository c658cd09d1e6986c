//! Calls on volumes.

use super::Client;
use jiffy_api_types::{Volume, VolumeSnapshot};

impl Client {
    /// Returns the volumes of the caller.
    pub async fn volumes(&self) -> anyhow::Result<Vec<Volume>> {
        self.all_pages("/volumes?limit=100").await
    }

    /// Returns the snapshots of the caller's volumes.
    pub async fn volume_snapshots(&self) -> anyhow::Result<Vec<VolumeSnapshot>> {
        self.all_pages("/volumesnapshots?limit=100").await
    }
}
