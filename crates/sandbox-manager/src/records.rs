//! Records of sandboxes and snapshots, as the journal keeps them.

mod flat;

use crate::sandbox_settings::SandboxSettings;
use crate::store_copies::StoreCopies;
use flat::{FlatSandbox, FlatSnapshot};
use jiffy_api_types::{
    BootMode, BrokenBy, SandboxInfo, SandboxSize, SandboxState, SnapshotInfo, SnapshotPurpose,
};
use jiffy_engine_api::ExitReason;
use jiffy_proto::agent::SiteSettings;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Records, each at the place in memory where it stays: many are read, and moves cost fresh pages.
pub(crate) type BoxedRecords<T> = Vec<Box<T>>;

/// Operation on a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SandboxOperation {
    /// Streams to its guest.
    Connect,
    /// A snapshot that it survives.
    Snapshot,
    /// Children.
    Fork,
    /// Back to a snapshot.
    Rollback,
    /// Sleep.
    Pause,
    /// Wake, or a new start of one that was broken by missing memory.
    Resume,
}

impl SandboxOperation {
    /// Returns whether the operation makes sense for a sandbox in `state`.
    pub fn is_allowed(self, state: &SandboxState) -> bool {
        use SandboxState::{Broken, Paused, Running};
        match self {
            Self::Connect | Self::Pause => *state == Running,
            Self::Snapshot | Self::Fork => matches!(state, Running | Paused),
            Self::Rollback => matches!(state, Running | Paused | Broken { .. }),
            Self::Resume => *state == Paused || state.is_broken_and_resumable(),
        }
    }
}

/// State of a sandbox whose guest ended by itself.
pub(crate) fn broken_by_end(end: &ExitReason) -> SandboxState {
    let broken_by = match end {
        ExitReason::MissingMemory { .. } => BrokenBy::MissingMemory,
        _ => BrokenBy::GuestEnd,
    };
    SandboxState::Broken {
        cause: end.to_string(),
        broken_by,
    }
}

/// A sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "FlatSandbox")]
pub struct SandboxRecord {
    /// Letters and digits.
    pub id: String,
    /// Name that people call it by, unique among those of its owner that are not killed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// State of the sandbox.
    #[serde(flatten)]
    pub state: SandboxState,
    /// Template it descends from.
    pub template: String,
    /// Resources.
    #[serde(flatten)]
    pub size: SandboxSize,
    /// Environment beside the template's.
    pub env: BTreeMap<String, String>,
    /// Settings that its creator chose.
    #[serde(rename = "terms")]
    pub settings: SandboxSettings,
    /// When its time is over, in milliseconds since 1970; none: never.
    pub deadline_ms: Option<u64>,
    /// Token that clients must show its agent.
    pub agent_token: Option<String>,
    /// Token that clients must show to reach its ports, where that is restricted.
    pub traffic_token: Option<String>,
    /// Latest snapshot it descends from; none if it was booted and never snapshotted.
    pub snapshot: Option<String>,
    /// Sandbox it was forked from.
    pub forked_from: Option<String>,
    /// Boot mode of its guest.
    pub boot_mode: Option<BootMode>,
    /// Engine that isolates its guest, or did last; none: it had none yet.
    pub engine: Option<String>,
    /// From asking for it to its agent's word, in milliseconds.
    pub boot_ms: Option<f64>,
    /// Milliseconds since 1970.
    pub created_ms: u64,
    /// When its state changed last, in milliseconds since 1970.
    pub changed_ms: u64,
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "FlatSnapshot")]
pub struct SnapshotRecord {
    /// Letters and digits.
    pub id: String,
    /// Name that its creator gave it.
    pub name: Option<String>,
    /// Purpose that it was taken for.
    pub purpose: SnapshotPurpose,
    /// Sandbox it was taken of; empty for a template's.
    pub sandbox: String,
    /// API key its sandbox was made with; none: the owner of this host.
    pub owner: Option<String>,
    /// Environment of its sandbox, which those made from it have unless they are given one.
    pub env: BTreeMap<String, String>,
    /// Certificate authorities and proxy of its sandbox, which those made from it have unless they
    /// are given some.
    #[serde(skip_serializing_if = "SiteSettings::is_empty")]
    pub site: SiteSettings,
    /// Template it descends from.
    pub template: String,
    /// Fingerprint of what it depends on besides its parents.
    pub fingerprint: String,
    /// Resources a guest made from it has.
    #[serde(flatten)]
    pub size: SandboxSize,
    /// Name of the engine that took the snapshot and restores it.
    pub engine: String,
    /// Snapshot below it.
    pub parent: Option<String>,
    /// Stays though nothing descends from it.
    pub kept: bool,
    /// Time for which the guest stood still, in milliseconds.
    pub stopped_ms: f64,
    /// From the request to its completion, in milliseconds.
    pub total_ms: f64,
    /// Disk space that it takes itself, without the snapshots below it.
    pub bytes: u64,
    /// Milliseconds since 1970.
    pub created_ms: u64,
    /// Captured in memory, and not complete on disk yet.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub storing: bool,
    /// Copies of it in stores that hosts share.
    #[serde(skip_serializing_if = "StoreCopies::is_empty")]
    pub store: StoreCopies,
}

impl From<SandboxRecord> for SandboxInfo {
    fn from(record: SandboxRecord) -> Self {
        Self {
            id: record.id,
            name: record.name,
            state: record.state,
            template: record.template,
            size: record.size,
            env: record.env,
            settings: record.settings.into(),
            deadline_ms: record.deadline_ms,
            agent_token: record.agent_token,
            traffic_token: record.traffic_token,
            snapshot: record.snapshot,
            forked_from: record.forked_from,
            boot_mode: record.boot_mode,
            engine: record.engine,
            boot_ms: record.boot_ms,
            created_ms: record.created_ms,
            changed_ms: record.changed_ms,
            steps: None,
        }
    }
}

impl From<SnapshotRecord> for SnapshotInfo {
    /// Leaves out certificates and proxy, and the names of the host's buckets.
    fn from(record: SnapshotRecord) -> Self {
        Self {
            id: record.id,
            name: record.name,
            purpose: record.purpose,
            sandbox: record.sandbox,
            owner: record.owner,
            env: record.env,
            template: record.template,
            fingerprint: record.fingerprint,
            size: record.size,
            engine: record.engine,
            parent: record.parent,
            kept: record.kept,
            stopped_ms: record.stopped_ms,
            total_ms: record.total_ms,
            bytes: record.bytes,
            created_ms: record.created_ms,
            storing: record.storing,
        }
    }
}

impl SnapshotRecord {
    /// True if somebody asked for it: it is in lists, and counts in its owner's budget.
    #[must_use]
    pub fn is_asked_for(&self) -> bool {
        self.purpose == SnapshotPurpose::Asked && self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_allowed_by_state() {
        use SandboxOperation::{Connect, Fork, Pause, Resume, Rollback, Snapshot};
        let all = [Connect, Snapshot, Fork, Rollback, Pause, Resume];
        let starved = broken_by_end(&ExitReason::MissingMemory {
            reason: String::new(),
        });
        let table: [(SandboxState, &[SandboxOperation]); 6] = [
            (SandboxState::Creating, &[]),
            (
                SandboxState::Running,
                &[Connect, Snapshot, Fork, Rollback, Pause],
            ),
            (SandboxState::Paused, &[Snapshot, Fork, Rollback, Resume]),
            (SandboxState::broken(""), &[Rollback]),
            (starved, &[Rollback, Resume]),
            (SandboxState::Killed, &[]),
        ];
        for (state, allowed) in table {
            for operation in all {
                let expected = allowed.contains(&operation);
                assert_eq!(
                    operation.is_allowed(&state),
                    expected,
                    "{state:?} {operation:?}"
                );
            }
        }
    }

    #[test]
    fn records_without_the_kind_of_a_cause_are_read() {
        let old = r#"{"state":"broken","cause":"why"}"#;
        let read: SandboxState = serde_json::from_str(old).unwrap();
        assert_eq!(read, SandboxState::broken("why"));
        assert_eq!(serde_json::to_string(&read).unwrap(), old);
        let starved = SandboxState::Broken {
            cause: "why".to_owned(),
            broken_by: BrokenBy::MissingMemory,
        };
        let written = serde_json::to_string(&starved).unwrap();
        assert_eq!(
            written,
            r#"{"state":"broken","cause":"why","broken_by":"missing_memory"}"#
        );
        let read: SandboxState = serde_json::from_str(&written).unwrap();
        assert_eq!(read, starved);
    }
}
