//! [`Shared`]: state that the microVM engine shares with all of its guests.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.

use super::guest::SocketDirectory;
use super::overlays::OverlaysAhead;
use crate::host::Host;
use crate::restore_policy::{HostFingerprint, PolicyInForce, RestorePolicy};
use crate::template_cache::TemplateCache;
use jiffy_engine_api::EngineError;
use jiffy_microvm_engine::MemoryPolicy;
use jiffy_snapshot::{Lineage, Store};
use std::sync::Arc;

/// Name of the directory of snapshots, in the data directory.
const SNAPSHOTS: &str = "snapshots";

/// State that the engine shares with its guests.
pub(super) struct Shared {
    pub store: Store,
    pub policy: PolicyInForce,
    pub socket_directory: SocketDirectory,
    pub templates: Arc<TemplateCache>,
    pub overlays: OverlaysAhead,
}

impl Shared {
    /// Opens the snapshots and sockets of a host, and selects the memory policy.
    pub fn open(templates: Arc<TemplateCache>) -> Result<Self, EngineError> {
        let host = templates.host();
        let store = Store::open(host.home().path().join(SNAPSHOTS)).map_err(EngineError::failed)?;
        let socket_directory =
            SocketDirectory::open(&host.home().run()).map_err(EngineError::failed)?;
        // The policy is read only once: a later measurement takes effect with the next start of the
        // daemon.
        let policy = PolicyInForce::find(host.home().path(), &HostFingerprint::here());
        tracing::info!(policy = %policy.policy, reason = %policy.why, "selected the memory of restored sandboxes");
        Ok(Self {
            store,
            policy,
            socket_directory,
            templates,
            overlays: OverlaysAhead::default(),
        })
    }

    pub fn host(&self) -> &Host {
        self.templates.host()
    }

    /// Returns the source of memory for a guest restored from `lineage` on this host.
    pub fn memory(&self, lineage: &Lineage) -> MemoryPolicy {
        match self.policy.policy {
            RestorePolicy::Map => MemoryPolicy::Map,
            RestorePolicy::CopyAll => MemoryPolicy::CopyAll,
            RestorePolicy::CopyWorkingSet => match lineage.working_set() {
                Ok(Some((_, file))) => MemoryPolicy::CopyWorkingSet(file),
                Ok(None) => MemoryPolicy::Map,
                Err(e) => {
                    tracing::warn!(error = %e, "cannot read the working set, mapping memory instead");
                    MemoryPolicy::Map
                }
            },
        }
    }
}
