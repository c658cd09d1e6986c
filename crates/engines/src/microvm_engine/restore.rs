//! Restores of microVMs from snapshots, up to the point where the agent waits for an identity. A
//! restore combines a VMM process, a network slot and a disk overlay.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used. The *overlay* is the file that receives the disk writes of a
//! guest. A *slot* is a network namespace with its devices and rules. Slots are prepared in
//! advance, and each is assigned to one guest. The *lineage* of a snapshot is the snapshot and the
//! chain of its ancestors.

use super::MicroVmEngine;
use super::unassigned::{BootStage, UnassignedMicroVmGuest, boot_error};
use crate::template_cache::chain;
use crate::{agent_identity, guest_nic};
use jiffy_engine_api::{EngineError, SandboxIdentity, steps};
use jiffy_microvm_engine::{MemoryPolicy, MicroVm, RestoreSpec};
use jiffy_network::NicKind;
use jiffy_snapshot::Lineage;

impl MicroVmEngine {
    /// Restores snapshot `id` up to the agent's greeting. `memory` selects the source of the
    /// guest's memory. If `identity` is given, the guest may take this identity while it starts.
    pub(super) async fn restore_unassigned(
        &self,
        id: &str,
        memory: impl Fn(&Lineage) -> MemoryPolicy,
        identity: Option<&SandboxIdentity>,
    ) -> Result<UnassignedMicroVmGuest, EngineError> {
        let mut lineage = self.shared.store.lineage(id).map_err(EngineError::failed)?;
        loop {
            let failure = match self
                .restore_lineage(lineage.clone(), id, &memory, identity)
                .await
            {
                Ok(unassigned) => return Ok(unassigned),
                Err(failure) => failure,
            };
            // A concurrent merge may have replaced layers before they were opened, and garbage
            // collection may have removed the old ones.
            match self.shared.store.lineage(id) {
                // Each retry needs another merge in between, so the loop ends.
                Ok(now) if !now.is_same(&lineage) => lineage = now,
                _ => return Err(failure),
            }
        }
    }

    /// Restores the newest snapshot of `lineage`: opens the template version, takes a disk overlay
    /// and a network slot, and starts the VMM. A snapshot without memory boots instead.
    async fn restore_lineage(
        &self,
        lineage: Lineage,
        id: &str,
        memory: impl Fn(&Lineage) -> MemoryPolicy,
        identity: Option<&SandboxIdentity>,
    ) -> Result<UnassignedMicroVmGuest, EngineError> {
        let newest = lineage.newest().ok_or_else(|| EngineError::Failed {
            reason: format!("snapshot {id} does not exist"),
        })?;
        let manifest = newest.manifest();
        let prepared = self
            .shared
            .templates
            .prepare_version(&manifest.template)
            .await?;
        let disk_mib = manifest.disks.first().map_or(0, |disk| disk.bytes >> 20);
        if manifest.disk_only {
            return self.bootable_from(&lineage, prepared, disk_mib).await;
        }
        // The working set is read from the disk into the page cache in the background, while the
        // steps below run.
        self.cached_working_sets.read_ahead(&lineage);
        let overlay = self
            .shared
            .overlays
            .take(&self.shared.store)
            .map_err(EngineError::failed)?;
        let step = steps::begin("network_slot");
        // A guest that booted without an interface cannot use one.
        let mut lease = if manifest.net {
            Some(guest_nic::required(self.network.as_ref(), NicKind::Tap, id).await?)
        } else {
            None
        };
        drop(step);
        let memory = memory(&lineage);
        let lazy = self.missing_memory(&lineage)?;
        let mut spec: RestoreSpec = prepared
            .restore_spec(lineage, disk_mib, overlay, memory)
            .map_err(chain)?;
        spec.lazy = lazy;
        spec.net = lease.as_mut().and_then(guest_nic::spec);
        let defaults = &prepared.template().manifest.defaults;
        let identity = identity
            .map(|identity| agent_identity::identity(identity, defaults))
            .transpose()
            .map_err(EngineError::failed)?;
        let waiting = MicroVm::restore_unassigned(spec, identity)
            .await
            .map_err(boot_error)?;
        Ok(UnassignedMicroVmGuest {
            stage: BootStage::Restored(Box::new(waiting)),
            prepared,
            shared: self.shared.clone(),
            lease,
        })
    }
}
