//! Contract between the sandbox manager and an isolation engine.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used. The *site* is the network in which the sandboxes run. Its
//! settings are certificate authorities and a proxy. The *working set* of a snapshot is the memory
//! that a restored guest touches first. A snapshot is *captured* when its memory is frozen in a
//! process that survives this one.
//!
//! A guest starts in two steps, whether it is booted or restored. The engine starts it up to the
//! point where its agent waits for an identity ([`UnassignedGuest`]). The sandbox manager then
//! assigns a [`SandboxIdentity`] ([`UnassignedGuest::assign_identity`]); the result is a [`Guest`]
//! that may be handed out. A warm pool holds unassigned guests only, so that identities are never
//! used twice.
//!
//! A guest is terminated with the process that started it, unless the guest is detached
//! ([`Guest::detach`]). A detached guest continues to run until another process adopts it by its
//! [`GuestHandle`] ([`Engine::adopt`]). Detached guests that are not adopted must be terminated
//! ([`Engine::end_unadopted`]).

use crate::{
    EngineDescription, EngineError, Guest, GuestHandle, NetworkRules, SandboxIdentity, SandboxSize,
    SnapshotFiles, Startup, UnassignedGuest,
};
use async_trait::async_trait;
use jiffy_proto::agent::SiteSettings;
use std::sync::Arc;

/// Detached guest to adopt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetachedGuest {
    /// Handle from [`Guest::detach`].
    pub handle: GuestHandle,
    /// Latest snapshot of the guest. Includes a snapshot whose files are complete
    /// ([`SnapshotFiles::ids`]) although the former process exited before it committed the record.
    pub snapshot: Option<String>,
    /// Egress rules.
    pub network: NetworkRules,
    /// Snapshot of the guest that the former process captured but did not complete.
    pub captured: Option<String>,
}

/// State of a template on an engine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TemplateState {
    /// Fingerprint of everything that guests of the template depend on, except their size.
    pub fingerprint: String,
    /// Startup of every sandbox of the template. It runs before the sandbox is handed out. A
    /// snapshot of the booted template contains its result.
    pub startup: Startup,
}

impl TemplateState {
    /// Returns the fingerprint of a snapshot of the booted template in `size`. Sandboxes with equal
    /// fingerprints may share a snapshot.
    #[must_use]
    pub fn snapshot_fingerprint(&self, size: SandboxSize) -> String {
        let SandboxSize {
            vcpus,
            memory_mib,
            disk_mib,
        } = size;
        format!("{} {vcpus}c{memory_mib}m{disk_mib}d", self.fingerprint)
    }
}

/// Isolation engine: starts guests from templates and snapshots.
#[async_trait]
pub trait Engine: Send + Sync + 'static {
    /// Returns the name under which records refer to the engine.
    fn name(&self) -> &'static str;

    /// Returns the capabilities and, if the engine cannot be used on this host, the reason.
    /// [`Engines`](crate::Engines) sets the field `default`.
    fn description(&self) -> EngineDescription;

    /// Returns the files of the engine's snapshots. They are accessible even if the engine cannot
    /// be used.
    fn snapshot_files(&self) -> &dyn SnapshotFiles;

    /// Opens `template`. A stock template that is missing or outdated is built first.
    async fn prepare(&self, template: &str) -> Result<TemplateState, EngineError>;

    /// Returns the default size of a sandbox of `template`.
    async fn default_size(&self, _template: &str) -> Result<SandboxSize, EngineError> {
        Ok(SandboxSize::default())
    }

    /// Checks that egress rules can be enforced on this host. The error is a message for the author
    /// of the rules.
    fn check_network(&self, _rules: &NetworkRules) -> Result<(), String> {
        Ok(())
    }

    /// Returns a short description of the sandboxes' network.
    fn network(&self) -> String {
        "off".to_owned()
    }

    /// Boots a template from its kernel.
    async fn boot(
        &self,
        template: &str,
        size: SandboxSize,
    ) -> Result<Box<dyn UnassignedGuest>, EngineError>;

    /// Restores a guest from snapshot `id`, whose template may have changed or been removed since.
    /// If `identity` is given, the guest may take it while it starts; the caller must pass the same
    /// identity to [`UnassignedGuest::assign_identity`]. The guest must not be used before that
    /// call.
    async fn restore(
        &self,
        id: &str,
        identity: Option<&SandboxIdentity>,
    ) -> Result<Box<dyn UnassignedGuest>, EngineError>;

    /// Records the working set of snapshot `id` of `template`, which makes restores fast. Called
    /// once after the snapshot of a template was taken. Restores are only slower if this fails.
    /// `site` are the settings under which the snapshot was taken.
    async fn record_working_set(
        &self,
        _template: &str,
        _id: &str,
        _site: &SiteSettings,
    ) -> Result<(), EngineError> {
        Ok(())
    }

    /// Adopts a guest that an earlier process detached. A snapshot that was in progress is
    /// committed if it is among [`SnapshotFiles::ids`], and aborted otherwise. The guest continues
    /// to run even if it was to stop after the snapshot. If the adoption fails, the guest is
    /// terminated, provided that it is the guest which the handle identifies.
    async fn adopt(&self, orphan: &DetachedGuest) -> Result<Arc<dyn Guest>, EngineError>;

    /// Terminates every detached guest of this engine that is not among `known`. Returns the number
    /// of terminated guests. If the engine cannot be used, the guests in `known` are terminated as
    /// well, because no process could connect to them.
    async fn end_unadopted(&self, known: &[GuestHandle]) -> Result<usize, EngineError>;

    /// Terminates all guests that are neither detached nor owned by a caller, and returns when
    /// their resources are released. The engine must not be used afterwards.
    async fn close(&self) {}
}
