//! Rollback of a running microVM to a snapshot in place. The VMM process and the network slot
//! remain.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use crate::agent_identity;
use crate::microvm_engine::guest::MicroVmGuest;
use crate::microvm_engine::unassigned::boot_error;
use jiffy_engine_api::{RollbackCommit, RollbackFailure, SandboxIdentity};
use jiffy_microvm_engine::{RollbackError, RollbackSpec};

/// Returns the failure of a rollback that has changed nothing.
fn refused(reason: impl std::fmt::Display) -> RollbackFailure {
    RollbackFailure::Refused {
        reason: reason.to_string(),
    }
}

impl MicroVmGuest {
    /// Rolls the guest back to snapshot `id`. All checks come before `commit`, after which the
    /// guest changes.
    pub(in crate::microvm_engine) async fn roll_back_in_place(
        &self,
        id: &str,
        identity: &SandboxIdentity,
        commit: &mut RollbackCommit<'_>,
    ) -> Result<(), RollbackFailure> {
        let lineage = self.shared.store.lineage(id).map_err(refused)?;
        let newest = lineage
            .newest()
            .ok_or_else(|| refused(format!("snapshot {id} does not exist")))?;
        let manifest = newest.manifest();
        if manifest.template != self.image || manifest.modules != self.vm.modules().await {
            return Err(refused(
                "the snapshot is of another version of the template",
            ));
        }
        if manifest.disk_only {
            return Err(refused(
                "the snapshot contains no memory: the guest boots from it",
            ));
        }
        // Devices cannot be added to or removed from a running VMM.
        if manifest.net != self.nic.is_connected() {
            return Err(refused(
                "the network interfaces of the snapshot and the sandbox differ",
            ));
        }
        let prepared = self
            .shared
            .templates
            .prepare_version(&manifest.template)
            .await
            .map_err(refused)?;
        let defaults = &prepared.template().manifest.defaults;
        let assigned = agent_identity::identity(identity, defaults).map_err(refused)?;
        // Pages that guests of this snapshot write first. The VMM makes private copies of them in
        // advance.
        let (populate, populate_later) = prepared.first_writes(&lineage);
        let spec = RollbackSpec {
            overlay: self
                .shared
                .overlays
                .take(&self.shared.store)
                .map_err(refused)?,
            identity: assigned.clone(),
            memory: self.shared.memory(&lineage),
            populate,
            populate_later,
            lineage,
        };
        // The sandbox already has these rules, so they may remain if the rollback fails afterwards.
        let ruled = self.nic.set_rules(&identity.network).await;
        ruled.map_err(refused)?;
        // The journal must record the rollback before the guest changes.
        if !commit() {
            return Err(refused("the rollback could not be recorded in the journal"));
        }
        let report = self
            .vm
            .roll_back(spec, self.nic.forget_connections())
            .await
            .map_err(|e| match e {
                RollbackError::Refused(reason) => RollbackFailure::Refused { reason },
                RollbackError::Lost(e) => RollbackFailure::Lost(boot_error(e)),
            })?;
        tracing::debug!(?report, "rolled back a guest in place");
        // The next daemon reads the identity from the handle.
        self.set_identity(assigned);
        Ok(())
    }
}
