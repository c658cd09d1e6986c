//! Guests that come out of snapshots.

use super::MicroVmEngine;
use super::unassigned::{BootStage, UnassignedMicroVmGuest, boot_error};
use crate::template_cache::chain;
use crate::{agent_identity, guest_nic};
use jiffy_engine_api::{EngineError, SandboxIdentity};
use jiffy_microvm_engine::{MemoryPolicy, MicroVm, RestoreSpec};
use jiffy_network::NicKind;
use jiffy_snapshot::Lineage;

impl MicroVmEngine {
    /// A guest of snapshot `id` that waits to be told who it is, its memory from where `memory`
    /// says. It is told while it starts if that is known already.
    pub(super) async fn arrive(
        &self,
        id: &str,
        memory: impl Fn(&Lineage) -> MemoryPolicy,
        known: Option<&SandboxIdentity>,
    ) -> Result<UnassignedMicroVmGuest, EngineError> {
        let mut lineage = self.store.lineage(id).map_err(EngineError::failed)?;
        loop {
            let failure = match self.arrive_from(lineage.clone(), id, &memory, known).await {
                Ok(unassigned) => return Ok(unassigned),
                Err(failure) => failure,
            };
            // A merge in the background may have replaced layers before they were opened, and gc
            // removed those that nobody needs any more.
            match self.store.lineage(id) {
                Ok(now) if !now.is_same(&lineage) => lineage = now,
                _ => return Err(failure),
            }
        }
    }

    async fn arrive_from(
        &self,
        lineage: Lineage,
        id: &str,
        memory: impl Fn(&Lineage) -> MemoryPolicy,
        known: Option<&SandboxIdentity>,
    ) -> Result<UnassignedMicroVmGuest, EngineError> {
        self.cached_working_sets.read_ahead(&lineage);
        let newest = lineage.newest().ok_or_else(|| EngineError::Failed {
            reason: format!("there is no snapshot {id}"),
        })?;
        let manifest = newest.manifest();
        let prepared = self.templates.prepare_version(&manifest.template).await?;
        let disk_mib = manifest.disks.first().map_or(0, |disk| disk.bytes >> 20);
        let overlay = self
            .overlays
            .take(&self.store)
            .map_err(EngineError::failed)?;
        let mut lease = match manifest.net {
            true => Some(guest_nic::needed(self.network.as_ref(), NicKind::Tap, id).await?),
            false => None,
        };
        let memory = memory(&lineage);
        let lazy = self.missing_memory(&lineage)?;
        let mut spec: RestoreSpec = prepared
            .restore_spec(lineage, disk_mib, overlay, memory)
            .map_err(chain)?;
        spec.lazy = lazy;
        spec.net = lease.as_mut().and_then(guest_nic::spec);
        let defaults = &prepared.template().manifest.defaults;
        let known = known.map(|known| agent_identity::identity(known, defaults));
        let known = known.transpose().map_err(EngineError::failed)?;
        let waiting = MicroVm::restore_unassigned(spec, known)
            .await
            .map_err(boot_error)?;
        let socket_directory = self.socket_directory.clone();
        Ok(UnassignedMicroVmGuest {
            coming: BootStage::Restored(Box::new(waiting)),
            prepared,
            socket_directory,
            lease,
        })
    }
}
