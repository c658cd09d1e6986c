//! Contract between the sandbox manager and an isolation engine.
//!
//! A guest starts in two steps, whether it is booted or restored. The engine starts it up to the
//! point where its agent waits for an identity ([`UnassignedGuest`]). The sandbox manager then
//! assigns a [`SandboxIdentity`] ([`UnassignedGuest::assign_identity`]); the result is a [`Guest`]
//! that may be handed out. A warm pool holds unassigned guests only, so that identities are never
//! used twice.
//!
//! A guest ends with the process that started it, however that process ends, unless the guest is
//! kept ([`Guest::keep`]). A kept guest continues to run, and another process adopts it by its
//! [`GuestHandle`] ([`Engine::adopt`]). Kept guests that are not adopted must be ended
//! ([`Engine::end_unadopted`]).

use crate::{
    EngineDescription, EngineError, Guest, GuestHandle, NetworkRules, SandboxIdentity, SandboxSize,
    SnapshotFiles, Startup, UnassignedGuest,
};
use async_trait::async_trait;
use jiffy_proto::agent::SiteSettings;
use std::sync::Arc;

/// Kept guest to adopt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptGuest {
    /// Handle from [`Guest::keep`].
    pub handle: GuestHandle,
    /// Latest snapshot of the guest, even if the former process ended while the snapshot was
    /// completed ([`SnapshotFiles::ids`]).
    pub snapshot: Option<String>,
    /// Egress rules.
    pub network: NetworkRules,
    /// Snapshot of it that the former process captured and did not complete.
    pub captured: Option<String>,
}

/// State of a template on an engine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TemplateState {
    /// Fingerprint of everything that guests of the template depend on, except their size.
    pub fingerprint: String,
    /// Startup of every sandbox of the template, which runs before the sandbox is handed out; a
    /// snapshot of the booted template contains it.
    pub startup: Startup,
}

impl TemplateState {
    /// Returns the fingerprint of a snapshot of the booted template in `size`: equal fingerprints
    /// may share a snapshot.
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

    /// Returns the capabilities and, if the engine cannot be used on this host, the
    /// reason. `default` is set by [`Engines`](crate::Engines).
    fn description(&self) -> EngineDescription;

    /// Returns the files of its snapshots, which are accessible even if the engine cannot be used.
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
    /// The guest may take `identity` while it starts, before [`UnassignedGuest::assign_identity`]
    /// is called with the same identity; it must not be used earlier than without one.
    async fn restore(
        &self,
        id: &str,
        identity: Option<&SandboxIdentity>,
    ) -> Result<Box<dyn UnassignedGuest>, EngineError>;

    /// Records the working set of snapshot `id` of `template`, which makes restores fast. Called
    /// once, when a template's snapshot has been made; a failure costs time only. `site` are the
    /// settings that its guest was given.
    async fn record_working_set(
        &self,
        _template: &str,
        _id: &str,
        _site: &SiteSettings,
    ) -> Result<(), EngineError> {
        Ok(())
    }

    /// Adopts a guest that an earlier process kept. A snapshot that was being taken then is
    /// committed if it is among [`SnapshotFiles::ids`], and aborted otherwise; the guest runs on
    /// even if it was to end with the snapshot. A guest that cannot be adopted is ended, provided
    /// that it is the guest that the handle identifies.
    async fn adopt(&self, orphan: &KeptGuest) -> Result<Arc<dyn Guest>, EngineError>;

    /// Ends every guest of this engine that an earlier process kept and that is not among `known`;
    /// returns the number of ended guests. If the engine cannot be used, the guests in `known` are
    /// ended as well: no process could reach them.
    async fn end_unadopted(&self, known: &[GuestHandle]) -> Result<usize, EngineError>;

    /// Ends guests that are neither kept nor owned; returns when they have released everything. The
    /// engine is not used afterwards.
    async fn close(&self) {}
}
