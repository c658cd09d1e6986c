//! Fabricated journals: records of sandboxes and snapshots without guests and files, for
//! measurements and tests of hosts with many of them.
//!
//! The *journal* is the database of the daemon with the records of sandboxes and snapshots.

use crate::journal::{Journal, JournalChange, JournalError};
use crate::sandbox::Sandbox;
use crate::sandbox_settings::SandboxSettings;
use crate::snapshot::Snapshot;
use jiffy_api_types::{BootMode, SandboxSize, SandboxState, SnapshotPurpose};
use jiffy_engine_api::MICROVM;
use std::collections::BTreeMap;
use std::path::Path;

/// Journal of a data directory that no daemon is using.
pub struct FabricatedJournal(Journal);

/// Record of a snapshot that a client requested, of a microVM of the default size.
#[derive(Debug, Clone, Default)]
pub struct FabricatedSnapshot {
    /// Id: letters and digits.
    pub id: String,
    /// Name.
    pub name: Option<String>,
    /// Sandbox that the snapshot was taken of.
    pub sandbox: String,
    /// API key of the owner.
    pub owner: Option<String>,
    /// Template that the snapshot descends from.
    pub template: String,
    /// Parent snapshot.
    pub parent: Option<String>,
    /// Disk space, in bytes.
    pub bytes: u64,
    /// Time of the creation, in milliseconds since 1970.
    pub created_ms: u64,
}

/// Record of a paused sandbox of the default size.
#[derive(Debug, Clone, Default)]
pub struct FabricatedSandbox {
    /// Id: letters and digits.
    pub id: String,
    /// Name.
    pub name: Option<String>,
    /// Template that the sandbox descends from.
    pub template: String,
    /// Snapshot that the sandbox is paused in.
    pub snapshot: String,
    /// Settings of the creator.
    pub settings: SandboxSettings,
    /// Token that clients must present to the agent.
    pub agent_token: Option<String>,
    /// Time of the creation, in milliseconds since 1970.
    pub created_ms: u64,
    /// Time of the pause, in milliseconds since 1970.
    pub changed_ms: u64,
}

impl FabricatedJournal {
    /// Opens or creates the journal in `file`.
    pub fn open(file: &Path) -> Result<Self, JournalError> {
        Journal::open(file).map(Self)
    }

    /// Adds snapshots and sandboxes in one transaction.
    pub fn add(
        &self,
        snapshots: impl IntoIterator<Item = FabricatedSnapshot>,
        sandboxes: impl IntoIterator<Item = FabricatedSandbox>,
    ) -> Result<(), JournalError> {
        let snapshots = snapshots.into_iter();
        let snapshots = snapshots.map(|s| JournalChange::Snapshot(s.into()));
        let sandboxes = sandboxes.into_iter();
        let sandboxes = sandboxes.map(|s| JournalChange::Sandbox(s.into()));
        let changes: Vec<_> = snapshots.chain(sandboxes).collect();
        // One transaction, which is much faster than many for a large host.
        self.0.commit(&changes)
    }

    /// Returns the ids of all snapshots.
    pub fn snapshot_ids(&self) -> Result<Vec<String>, JournalError> {
        let snapshots = self.0.snapshots()?.into_iter();
        Ok(snapshots.map(|s| s.snapshot.id).collect())
    }

    /// Returns the ids of all sandboxes.
    pub fn sandbox_ids(&self) -> Result<Vec<String>, JournalError> {
        Ok(self.0.sandboxes()?.into_iter().map(|s| s.id).collect())
    }
}

impl From<FabricatedSnapshot> for Snapshot {
    fn from(fabricated: FabricatedSnapshot) -> Self {
        Self {
            id: fabricated.id,
            name: fabricated.name,
            purpose: SnapshotPurpose::Requested,
            sandbox: fabricated.sandbox,
            owner: fabricated.owner,
            env: BTreeMap::new(),
            site: Default::default(),
            template: fabricated.template,
            fingerprint: "fabricated".to_owned(),
            size: SandboxSize::default(),
            engine: MICROVM.to_owned(),
            parent: fabricated.parent,
            pruned: None,
            retained: true,
            stopped_ms: 1.0,
            total_ms: 10.0,
            bytes: fabricated.bytes,
            created_ms: fabricated.created_ms,
            content: Default::default(),
            storing: false,
            store: Default::default(),
        }
    }
}

impl From<FabricatedSandbox> for Sandbox {
    fn from(fabricated: FabricatedSandbox) -> Self {
        Self {
            id: fabricated.id,
            name: fabricated.name,
            state: SandboxState::Paused,
            pause_cause: None,
            template: fabricated.template,
            size: SandboxSize::default(),
            env: BTreeMap::new(),
            settings: fabricated.settings,
            deadline_ms: None,
            agent_token: fabricated.agent_token,
            traffic_token: None,
            snapshot: Some(fabricated.snapshot),
            forked_from: None,
            started_from: None,
            rollbacks: Vec::new(),
            boot_mode: Some(BootMode::Snapshot),
            engine: Some(MICROVM.to_owned()),
            boot_ms: Some(15.0),
            created_ms: fabricated.created_ms,
            changed_ms: fabricated.changed_ms,
        }
    }
}
