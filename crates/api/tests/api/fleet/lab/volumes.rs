//! Volumes of the hosts of a laboratory.

use super::Lab;
use crate::support::base_templates;
use async_trait::async_trait;
use jiffy_api::{HomedVolume, VolumeTable, VolumeTableError, router};
use jiffy_volumes::{HostVolumes, ServerProgram, StoredVolumes, VolumeError};
use parking_lot::Mutex;
use std::sync::Arc;

/// Table of the volumes that all members share at once.
#[derive(Default)]
struct SharedTable(Mutex<Vec<HomedVolume>>);

#[async_trait]
impl VolumeTable for SharedTable {
    fn is_loaded(&self) -> bool {
        true
    }

    fn all(&self) -> Vec<HomedVolume> {
        self.0.lock().clone()
    }

    fn by_id(&self, id: &str) -> Option<HomedVolume> {
        self.0
            .lock()
            .iter()
            .find(|one| one.volume.id == id)
            .cloned()
    }

    async fn add(&self, added: HomedVolume) -> Result<(), VolumeTableError> {
        let mut all = self.0.lock();
        let new = &added.volume;
        let is_same = |one: &HomedVolume| {
            (&one.volume.owner, &one.volume.name) == (&new.owner, &new.name)
                || one.volume.id == new.id
        };
        if all.iter().any(is_same) {
            let name = new.name.clone();
            return Err(VolumeTableError::Exists(VolumeError::Exists(name)));
        }
        all.push(added);
        Ok(())
    }

    async fn remove(&self, ids: Vec<String>) -> Result<(), VolumeTableError> {
        self.0.lock().retain(|one| !ids.contains(&one.volume.id));
        Ok(())
    }
}

impl Lab {
    /// Starts members with volumes, whose servers are threads, and with a store.
    pub async fn with_volumes(members: u32) -> Self {
        let lab = Self::with_store(members).await;
        let table = Arc::new(SharedTable::default());
        for member in lab.members.values() {
            let home = member.bench.dir.path();
            let volumes = HostVolumes::open(home, &home.join("run"), ServerProgram::Thread);
            let volumes = Arc::new(volumes.unwrap());
            let store = member.store.clone().unwrap();
            let stored = StoredVolumes::open(home, volumes.clone(), store).unwrap();
            let templates = Arc::new(base_templates());
            let app = lab.app_with(member, templates, |app, fleet| {
                fleet.set_volumes(table.clone());
                app.with_volumes(volumes).with_stored_volumes(Some(stored))
            });
            let id = member.node.id();
            lab.network.routers.lock().unwrap().insert(id, router(app));
        }
        lab
    }
}
