//! Contract between the host and an isolation engine.
//!
//! A guest comes up in two steps, whether booted or restored. The engine brings it to the point
//! where its agent waits for an identity ([`UnassignedGuest`]). The host then assigns a
//! [`SandboxIdentity`] ([`UnassignedGuest::assign_identity`]), which makes it a [`Guest`] that may
//! be handed out. A warm pool holds unassigned guests only, so their identity is always fresh.
//!
//! Guests end with the process that made them, however that ends, unless they are kept
//! ([`Guest::keep`]): a kept guest runs on, and another process adopts it by its [`GuestHandle`]
//! ([`Engine::adopt`]). Kept guests that are not adopted must be ended ([`Engine::end_unadopted`]).

use crate::{
    AfterSnapshot, BootReport, CaptureNotice, ConnectionLog, EngineDescription, EngineError,
    ExistingSnapshot, ExitReason, FoldPace, FoldPreparation, FoldResult, GuestStream, GuestUsage,
    ImportedFiles, LineageLimits, NetworkRules, RollbackFailure, SandboxSize, SnapshotImport,
    SnapshotParts, SnapshotTimes, Startup, VerifiedSnapshot,
};
use jiffy_proto::agent::SiteSettings;
use jiffy_proto::snapshot::FoldedLayers;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::sync::Arc;
use tokio::net::UnixStream;

/// Identity of a sandbox. Clock and entropy are added when it is assigned.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxIdentity {
    /// Sandbox id; also its host name.
    pub id: String,
    /// Id of its template as its owner knows it, for programs in the sandbox. `None` for guests
    /// that are no sandboxes.
    #[serde(default)]
    pub template: Option<String>,
    /// Environment of every process, in addition to the template's.
    pub env: BTreeMap<String, String>,
    /// Access token that clients must send to its agent; none: it answers every client.
    #[serde(default)]
    pub access_token: Option<String>,
    /// True for a rollback to an earlier state, false for a new or resumed sandbox.
    pub rewound: bool,
    /// Egress rules.
    #[serde(default)]
    pub network: NetworkRules,
    /// Certificate authorities and proxy of its network.
    #[serde(default)]
    pub site: SiteSettings,
}

/// Handle of a kept guest, opaque to the host and stored as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GuestHandle(pub String);

/// Kept guest that is to be adopted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptGuest {
    /// Handle from [`Guest::keep`].
    pub handle: GuestHandle,
    /// Its latest snapshot, including one that was completed as the former process ended
    /// ([`Engine::snapshots`]).
    pub snapshot: Option<String>,
    /// Egress rules.
    pub network: NetworkRules,
    /// Snapshot of it that the former process captured and did not complete.
    pub captured: Option<String>,
}

/// Ids of snapshots, read from the disk as they are taken.
pub type SnapshotWalk = Box<dyn Iterator<Item = Result<String, EngineError>> + Send>;

/// Isolation engine with the files that it starts guests from.
pub trait Engine: Send + Sync + 'static {
    /// Guest type of the engine.
    type Guest: Guest;
    /// Guest type before an identity is assigned.
    type UnassignedGuest: UnassignedGuest<Guest = Self::Guest>;

    /// Engines that it consists of: itself, or several, of which each guest uses one. One of them
    /// is the default.
    fn engines(&self) -> Vec<EngineDescription>;

    /// Fingerprint of everything that a snapshot of the booted template depends on: equal
    /// fingerprints may share a snapshot. `engine` is one of [`Engine::engines`]; none: the
    /// default.
    fn fingerprint(
        &self,
        engine: Option<&str>,
        template: &str,
        size: SandboxSize,
    ) -> impl Future<Output = Result<String, EngineError>> + Send;

    /// Startup of every sandbox of `template` before it is handed out; a snapshot of the booted
    /// template contains it.
    fn startup(
        &self,
        _template: &str,
    ) -> impl Future<Output = Result<Startup, EngineError>> + Send {
        std::future::ready(Ok(Startup::default()))
    }

    /// Default size of a sandbox of `template`.
    fn default_size(
        &self,
        _template: &str,
    ) -> impl Future<Output = Result<SandboxSize, EngineError>> + Send {
        std::future::ready(Ok(SandboxSize::default()))
    }

    /// Checks that egress rules can be enforced here; the error is a message for their author.
    fn check_network(&self, _rules: &NetworkRules) -> Result<(), String> {
        Ok(())
    }

    /// Short description of the sandboxes' network.
    fn network(&self) -> String {
        "off".to_owned()
    }

    /// Boots a template from its kernel, on `engine`, one of [`Engine::engines`]; none: the
    /// default.
    fn boot(
        &self,
        engine: Option<&str>,
        template: &str,
        size: SandboxSize,
    ) -> impl Future<Output = Result<Self::UnassignedGuest, EngineError>> + Send;

    /// Restores a guest from snapshot `id` of `template`, which may have changed or been removed
    /// since.
    fn restore(
        &self,
        template: &str,
        id: &str,
    ) -> impl Future<Output = Result<Self::UnassignedGuest, EngineError>> + Send;

    /// Like [`Self::restore`], for a sandbox that is known already: the guest may take `identity`
    /// while it starts, before [`UnassignedGuest::assign_identity`] is called with the same one.
    /// Until then it is as little to be used as any other.
    fn restore_for(
        &self,
        template: &str,
        id: &str,
        _identity: &SandboxIdentity,
    ) -> impl Future<Output = Result<Self::UnassignedGuest, EngineError>> + Send {
        self.restore(template, id)
    }

    /// Puts `guest` back to snapshot `id` in its place: process, limits and network slot stay.
    /// Returns when `identity` is in effect. `begin` is called before anything is lost; if it
    /// returns false, nothing is done.
    fn roll_back(
        &self,
        _guest: &Self::Guest,
        _id: &str,
        _identity: &SandboxIdentity,
        _begin: impl FnOnce() -> bool + Send,
    ) -> impl Future<Output = Result<(), RollbackFailure>> + Send {
        std::future::ready(Err(RollbackFailure::Refused {
            reason: "its engine makes a new guest of a snapshot".to_owned(),
        }))
    }

    /// Takes snapshot `id` of `guest`, whose latest ancestor is `parent`. Afterwards it is either
    /// complete or does not exist. A snapshot larger than `max_bytes` ([`Engine::snapshot_size`])
    /// is refused ([`EngineError::SnapshotTooLarge`]). `notice` is told when the snapshot is
    /// captured, after which it is completed also if this process ends ([`KeptGuest::captured`]);
    /// an engine that captures none drops it.
    fn snapshot(
        &self,
        guest: &Self::Guest,
        id: &str,
        parent: Option<&str>,
        then: AfterSnapshot,
        max_bytes: Option<u64>,
        notice: Option<CaptureNotice>,
    ) -> impl Future<Output = Result<SnapshotTimes, EngineError>> + Send;

    /// Completes the snapshot with which `guest` was adopted ([`KeptGuest::captured`]).
    fn finish_captured(
        &self,
        guest: &Self::Guest,
    ) -> impl Future<Output = Result<SnapshotTimes, EngineError>> + Send {
        std::future::ready(Err(EngineError::Unsupported {
            engine: guest.engine(),
            what: "capture a snapshot",
            instead: None,
        }))
    }

    /// Removes the files of a captured snapshot whose guest is lost. Blocks.
    fn discard_captured(&self, _id: &str) {}

    /// Records the working set of snapshot `id` of `template`, which makes restores fast. Called
    /// once, when a template's snapshot has been made; a failure costs time only. `site` is the
    /// setting that its guest was given.
    fn record_working_set(
        &self,
        _template: &str,
        _id: &str,
        _site: &SiteSettings,
    ) -> impl Future<Output = Result<(), EngineError>> + Send {
        async { Ok(()) }
    }

    /// Prefetches the working set of snapshot `id` into memory. Blocks.
    fn prefetch(&self, _id: &str) -> Result<(), EngineError> {
        Ok(())
    }

    /// Writes the checksums of snapshot `id` and its ancestors, once; it may be removed meanwhile.
    /// Blocks.
    fn write_checksums(&self, _id: &str) -> Result<(), EngineError> {
        Ok(())
    }

    /// Compares snapshot `id` and its ancestors with their checksums, oldest first. Blocks.
    fn verify(&self, id: &str) -> Result<Vec<VerifiedSnapshot>, EngineError>;

    /// Adopts a guest that an earlier process kept. A snapshot that was being taken then is
    /// committed if it is among [`Engine::snapshots`], and aborted otherwise; the guest runs on
    /// even if it was to end with the snapshot. A guest that cannot be adopted is ended, if it is
    /// the one that the handle identifies.
    fn adopt(
        &self,
        orphan: &KeptGuest,
    ) -> impl Future<Output = Result<Self::Guest, EngineError>> + Send;

    /// Ends every guest that an earlier process kept and that is not among `known`; returns their
    /// number.
    fn end_unadopted(
        &self,
        known: &[GuestHandle],
    ) -> impl Future<Output = Result<usize, EngineError>> + Send;

    /// Ends guests that are neither kept nor owned; returns when nothing is left of them. The
    /// engine is not used afterwards.
    fn close(&self) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Complete snapshots on this host, read from disk.
    fn snapshots(&self) -> Result<Vec<String>, EngineError>;

    /// The same, read as they are taken, in no order. Removes incomplete ones of dead processes.
    fn walk_snapshots(&self) -> Result<SnapshotWalk, EngineError> {
        Ok(Box::new(self.snapshots()?.into_iter().map(Ok)))
    }

    /// Looks for damage of snapshot `id` without reading its layers: files that are missing, or not
    /// as they were written. Its ancestors are not looked at. Returns the first damage found.
    /// Blocks.
    fn damage(&self, _id: &str) -> Option<String> {
        None
    }

    /// Returns true if snapshot `id` needs no files of its ancestors. An engine may merge it by
    /// itself, to keep restores fast. Called under a lock: it reads one small file at most.
    fn is_independent(&self, _id: &str) -> bool {
        false
    }

    /// Removes incomplete files of the engine that no process will complete, beside snapshots.
    /// Returns their number. Called soon after the start and every minute.
    fn gc(&self) -> Result<usize, EngineError> {
        Ok(0)
    }

    /// Disk space of snapshot `id` in bytes, without its ancestors. Merges and folds change it.
    fn snapshot_size(&self, _id: &str) -> Option<u64> {
        None
    }

    /// True if the files of snapshot `id` lie on those of `ancestor`. Called under a lock: where
    /// that is its parent it reads one small file at most.
    fn lies_on(&self, id: &str, _ancestor: &str) -> bool {
        !self.is_independent(id)
    }

    /// Upper bound of the bytes by which snapshot `id` grows when it is merged with its lineage,
    /// which keeps restores fast; none: its lineage is within `limits`.
    fn merge_growth(&self, _id: &str, _limits: LineageLimits) -> Option<u64> {
        None
    }

    /// Merges snapshot `id` with its ancestors, if its lineage is beyond `limits`.
    fn merge(
        &self,
        _id: &str,
        _limits: LineageLimits,
    ) -> impl Future<Output = Result<(), EngineError>> + Send {
        std::future::ready(Ok(()))
    }

    /// Snapshot on whose files those of `id` lie directly, if any. Reads one small file.
    fn parent_on_disk(&self, _id: &str) -> Option<String> {
        None
    }

    /// Prepares the fold of [`Engine::parent_on_disk`] of snapshot `id` into it, so that the parent
    /// can be removed. Refused if the parent has other children, or if the copy would be larger
    /// than both the snapshot and `max_copy` bytes. Guests, restores and uploads of both go on.
    /// Blocks.
    fn prepare_fold(&self, _id: &str, _max_copy: u64, _pace: &mut FoldPace<'_>) -> FoldResult {
        Ok(FoldPreparation::Refused)
    }

    /// Returns true if new sandboxes of `template` may still start from its snapshot `id`, and
    /// false if the template has changed or was removed.
    fn is_current(&self, _template: &str, _id: &str) -> bool {
        true
    }

    /// Checks that this host can restore a snapshot that another host made, before its layers are
    /// fetched ([`EngineError::Incompatible`]).
    fn check_import(
        &self,
        import: &SnapshotImport,
    ) -> impl Future<Output = Result<(), EngineError>> + Send {
        std::future::ready(Err(no_import(import)))
    }

    /// Puts a snapshot in place that another host made, whose parent is there. Afterwards it is
    /// either complete or does not exist.
    fn import_snapshot(
        &self,
        import: &SnapshotImport,
        _files: ImportedFiles,
        _existing: ExistingSnapshot,
    ) -> impl Future<Output = Result<(), EngineError>> + Send {
        std::future::ready(Err(no_import(import)))
    }

    /// Returns true if a guest of `engine` can be restored from a snapshot whose memory has not all
    /// arrived ([`jiffy_engine_api::ImportedFile::missing`](crate::ImportedFile::missing)).
    fn restores_lazily(&self, _engine: &str) -> bool {
        false
    }

    /// Asks that all memory of snapshot `id` and its ancestors be got while a guest runs from it.
    fn want_all(&self, _id: &str) -> Result<(), EngineError> {
        Ok(())
    }

    /// Place of the memory that snapshot `id` lacks, in the importer's words
    /// ([`jiffy_engine_api::ImportedFile::missing`](crate::ImportedFile::missing)); none: all of it
    /// is here. Says nothing about its ancestors. Blocks.
    fn missing_memory(&self, _id: &str) -> Result<Option<String>, EngineError> {
        Ok(None)
    }

    /// Gets the memory that snapshot `id` lacks, and not that of its ancestors.
    fn complete_memory(&self, _id: &str) -> impl Future<Output = Result<(), EngineError>> + Send {
        std::future::ready(Ok(()))
    }

    /// Opens the files of snapshot `id` with what the snapshots below it have of them. Blocks.
    fn snapshot_parts(&self, id: &str) -> Result<SnapshotParts, EngineError> {
        Err(EngineError::Failed {
            reason: format!("the engine of snapshot {id} has no files for other hosts"),
        })
    }

    /// Removes a snapshot's files; a missing snapshot is no error. Blocks.
    fn remove_snapshot(&self, id: &str) -> Result<(), EngineError>;
}

fn no_import(import: &SnapshotImport) -> EngineError {
    EngineError::Incompatible {
        reason: format!(
            "snapshot {} was taken with the engine {}, which takes none from other hosts here",
            import.id, import.engine
        ),
    }
}

/// Guest whose agent waits for an identity. Dropping it ends the guest.
pub trait UnassignedGuest: Send + 'static {
    /// Guest type after the assignment.
    type Guest: Guest;

    /// Returns true if it still waits.
    fn is_waiting(&self) -> bool;

    /// Uses it once under an identity that is taken back afterwards, so that its first real use is
    /// fast; returns it waiting as before. `site` are the settings under which its snapshot was
    /// taken.
    fn rehearse(
        self,
        _site: &SiteSettings,
    ) -> impl Future<Output = Result<Self, EngineError>> + Send
    where
        Self: Sized,
    {
        std::future::ready(Ok(self))
    }

    /// Assigns the identity; returns when it is in effect.
    fn assign_identity(
        self,
        sandbox_identity: &SandboxIdentity,
    ) -> impl Future<Output = Result<Self::Guest, EngineError>> + Send;
}

/// Running guest. Dropping it ends it, unless it is kept: then dropping it only releases it.
pub trait Guest: Send + Sync + 'static {
    /// Name of the engine that isolates it.
    fn engine(&self) -> &'static str;

    /// Keeps the guest running beyond this process. Called once per guest, not again after an
    /// adoption.
    fn keep(&self) -> impl Future<Output = Result<GuestHandle, EngineError>> + Send;

    /// Handle of a kept guest as it is now; a rollback in place changes it.
    fn handle(&self) -> impl Future<Output = Result<GuestHandle, EngineError>> + Send {
        std::future::ready(Err(EngineError::Unsupported {
            engine: self.engine(),
            what: "renew a guest's handle",
            instead: None,
        }))
    }

    /// Closes the lower of two layers that were folded into one ([`Engine::prepare_fold`]), whose
    /// disk space is not free until then. Does not wait.
    fn fold_layers(&self, _layers: &FoldedLayers) {}

    /// Boot mode and durations.
    fn report(&self) -> BootReport;

    /// Isolating process, if there is one.
    fn pid(&self) -> Option<u32>;

    /// Resource usage, read without waking an idle guest. None if unknown.
    fn usage(&self) -> Option<GuestUsage> {
        None
    }

    /// Number of exits from the guest to the host so far, if known.
    fn exits(&self) -> impl Future<Output = Option<u64>> + Send {
        async { None }
    }

    /// Opens a stream to `port` in the guest. A refused connection reads as closed.
    fn connect(&self, port: u32) -> impl Future<Output = io::Result<UnixStream>> + Send;

    /// Connects to TCP `port` of the guest over its network interface. The connection ends with the
    /// guest. None: nothing takes connections there in time, or there is no such way; the agent may
    /// still reach the port from inside.
    fn connect_tcp(&self, _port: u16) -> impl Future<Output = Option<GuestStream>> + Send {
        async { None }
    }

    /// Uses it once, so that the first use of guests restored from its next snapshot is fast.
    /// A failure is not reported.
    fn rehearse(&self) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Replaces its egress rules, also for existing connections.
    fn set_network(
        &self,
        _rules: &NetworkRules,
    ) -> impl Future<Output = Result<(), EngineError>> + Send {
        async { Ok(()) }
    }

    /// Connection log, also readable when it has ended; none: it has no network.
    fn connections(&self) -> Option<Arc<dyn ConnectionLog>> {
        None
    }

    /// Waits until it has ended; returns the reason.
    fn ended(&self) -> impl Future<Output = ExitReason> + Send;

    /// Last console output, without control characters.
    fn console_tail(&self) -> String;

    /// Failure of the host to read or write its disk, if one occurred: its programs saw I/O errors.
    fn disk_failure(&self) -> Option<String> {
        None
    }

    /// Kills it; returns when nothing of it is left. May be called twice.
    fn stop(&self) -> impl Future<Output = ()> + Send;

    /// Kills it; returns when it runs no more. Its process and network may be there until
    /// [`Self::stop`] returns, which must be called as well.
    fn halt(&self) -> impl Future<Output = ()> + Send {
        self.stop()
    }
}
