//! [`SharedStore`]: a store that many hosts share, with the operations on it in submodules.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys.

pub(crate) mod collection;
pub(crate) mod condemned;
mod known_chunks;
pub(crate) mod lease;
pub(crate) mod module_holders;
pub(crate) mod pack_index;
pub(crate) mod pull;
pub(crate) mod push;
pub(crate) mod readers;
mod recent_packs;
pub(crate) mod repair;
pub(crate) mod resume;
pub(crate) mod snapshot_names;
pub(crate) mod snapshots;
pub(crate) mod tenant_names;
pub(crate) mod tenant_records;
pub(crate) mod usage;
pub(crate) mod verify;

use crate::keyring::Keyring;
use crate::tenant::Tenant;
use crate::version_memory::VersionMemory;
use crate::{Backend, BackendSettings};
use std::sync::Arc;

/// Store with the master keys of its tenants.
#[derive(Debug)]
pub struct SharedStore {
    pub(crate) backend: Backend,
    /// Client for locks and records of ownership, with short timeouts.
    pub(crate) control: Backend,
    pub(crate) keyring: Keyring,
    /// Highest versions of records that this host has seen, to detect a store that returns to older
    /// versions.
    pub(crate) versions: VersionMemory,
    /// Shared tenant and the time at which its record was read.
    shared: tokio::sync::Mutex<Option<(std::time::Instant, Arc<Tenant>)>>,
}

impl SharedStore {
    /// Opens the store behind `backend`. Sends no request.
    pub fn new(backend: Backend, keyring: Keyring) -> Self {
        Self {
            control: backend.with_settings(BackendSettings::control()),
            backend,
            keyring,
            versions: VersionMemory::default(),
            shared: tokio::sync::Mutex::default(),
        }
    }

    /// Remembers the versions of records in `versions`, usually with a file. Otherwise, they are
    /// only remembered in memory.
    #[must_use]
    pub fn with_versions(self, versions: VersionMemory) -> Self {
        Self { versions, ..self }
    }

    /// Returns the client of the store.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Returns the client for records of ownership, whose requests do not wait for bulk transfers.
    pub fn control(&self) -> &Backend {
        &self.control
    }
}
