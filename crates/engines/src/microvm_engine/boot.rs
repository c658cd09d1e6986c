//! Boots of microVMs: from the images of a template, or from the disk of a snapshot without memory.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. The *identity* of a
//! sandbox consists of id, host name, entropy and clock. A guest receives it before its sandbox can
//! be used. A *lease* is a network slot (a namespace with devices for one guest) that is assigned
//! to a guest.

use super::MicroVmEngine;
use super::unassigned::{BootStage, UnassignedMicroVmGuest};
use crate::guest_nic;
use crate::host::PreparedTemplate;
use crate::template_cache::chain;
use jiffy_engine_api::{EngineError, SandboxSize, steps};
use jiffy_microvm_engine::BootDisk;
use jiffy_network::NicKind;
use jiffy_proto::agent::Identity;
use jiffy_snapshot::Lineage;
use std::sync::Arc;

impl MicroVmEngine {
    /// Returns a guest that boots from the disk of the newest snapshot of `lineage`, with the
    /// images of the template version `prepared`. The memory of the lineage is not read.
    pub(super) async fn bootable_from(
        &self,
        lineage: &Lineage,
        prepared: Arc<PreparedTemplate>,
        disk_mib: u64,
    ) -> Result<UnassignedMicroVmGuest, EngineError> {
        let disk = BootDisk::open(lineage).map_err(EngineError::failed)?;
        let manifest = lineage.newest().map(|newest| newest.manifest());
        let size = SandboxSize {
            vcpus: manifest.map_or(0, |manifest| manifest.vcpus),
            memory_mib: manifest
                .and_then(|manifest| u32::try_from(manifest.memory.bytes >> 20).ok())
                .unwrap_or(0),
            disk_mib,
        };
        self.bootable(prepared, size, Some(disk)).await
    }

    /// Returns a guest of `prepared` that boots when its identity is assigned: from an empty disk,
    /// or from `disk`.
    pub(super) async fn bootable(
        &self,
        prepared: Arc<PreparedTemplate>,
        size: SandboxSize,
        disk: Option<BootDisk>,
    ) -> Result<UnassignedMicroVmGuest, EngineError> {
        let overlay = self
            .shared
            .overlays
            .take(&self.shared.store)
            .map_err(EngineError::failed)?;
        let mut spec = prepared
            .boot_spec(size, overlay, Identity::default())
            .map_err(chain)?;
        spec.disk = disk;
        let step = steps::begin("network_slot");
        let mut lease = match &self.network {
            Some(network) => Some(
                network
                    .take(NicKind::Tap)
                    .await
                    .map_err(EngineError::failed)?,
            ),
            None => None,
        };
        drop(step);
        if let Some(lease) = &mut lease {
            spec.net = guest_nic::spec(lease);
            spec.extra_cmdline = jiffy_network::guest::cmdline();
        }
        Ok(UnassignedMicroVmGuest {
            // A microVM boots with its identity, so the boot waits for the assignment.
            stage: BootStage::Bootable(Box::new(spec)),
            prepared,
            shared: self.shared.clone(),
            lease,
        })
    }
}
