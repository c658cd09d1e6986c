//! Records of sandboxes and snapshots, as the journal keeps them.

mod flat;

use crate::sandbox_settings::SandboxSettings;
use crate::store_copies::StoreCopies;
use flat::{FlatSandbox, FlatSnapshot};
use jiffy_engine_api::{BootMode, ExitReason, SandboxSize};
use jiffy_proto::agent::SiteSettings;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Records, each at the place in memory where it stays: many are read, and moves cost fresh pages.
pub(crate) type BoxedRecords<T> = Vec<Box<T>>;

/// Longest name of a sandbox: what a host name's label may have.
pub const MAX_SANDBOX_NAME: usize = 63;

/// State of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum SandboxState {
    /// Being made; its agent has not answered yet.
    Creating,
    /// Its agent has answered.
    Running,
    /// Asleep in a snapshot; holds no memory.
    Paused,
    /// Lost its guest. Its snapshots are good, and a rollback to one of them mends it.
    Broken {
        /// Why.
        cause: String,
        /// Kind of the cause; records of earlier versions have none.
        #[serde(default, skip_serializing_if = "BrokenBy::is_guest_end")]
        broken_by: BrokenBy,
    },
    /// Ended on request. The record stays until it is removed.
    Killed,
}

/// Kind of the cause for which a sandbox lost its guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BrokenBy {
    /// Its guest ended by itself, or was lost with a daemon.
    #[default]
    GuestEnd,
    /// Memory of its guest did not arrive from the store in time. The snapshot that it descends
    /// from is good, and a resume starts it again from that.
    MissingMemory,
}

impl BrokenBy {
    fn is_guest_end(&self) -> bool {
        *self == Self::GuestEnd
    }
}

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

impl SandboxState {
    /// All words that [`Self::name`] has.
    pub const NAMES: [&str; 5] = ["creating", "running", "paused", "broken", "killed"];

    /// One word for it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Broken { .. } => "broken",
            Self::Killed => "killed",
        }
    }

    /// Broken for `cause`, which only a rollback mends.
    pub fn broken(cause: impl Into<String>) -> Self {
        Self::Broken {
            cause: cause.into(),
            broken_by: BrokenBy::GuestEnd,
        }
    }

    /// Broken because its guest ended by itself.
    pub fn ended(end: &ExitReason) -> Self {
        let broken_by = match end {
            ExitReason::MissingMemory { .. } => BrokenBy::MissingMemory,
            _ => BrokenBy::GuestEnd,
        };
        Self::Broken {
            cause: end.to_string(),
            broken_by,
        }
    }

    /// True if it is broken, and a resume mends that.
    pub fn is_broken_and_resumable(&self) -> bool {
        matches!(self, Self::Broken { .. }) && self.allows(SandboxOperation::Resume)
    }

    /// True if `operation` makes sense in this state.
    pub fn allows(&self, operation: SandboxOperation) -> bool {
        use SandboxOperation::{Connect, Fork, Pause, Resume, Rollback, Snapshot};
        match operation {
            Connect | Pause => *self == Self::Running,
            Snapshot | Fork => matches!(self, Self::Running | Self::Paused),
            Rollback => matches!(self, Self::Running | Self::Paused | Self::Broken { .. }),
            Resume => matches!(
                self,
                Self::Paused
                    | Self::Broken {
                        broken_by: BrokenBy::MissingMemory,
                        ..
                    }
            ),
        }
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

/// Purpose of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotPurpose {
    /// A template, booted; creates start from it.
    Template,
    /// Requested by a caller: it stays until it is removed.
    Asked,
    /// A fork; goes when nothing descends from it.
    Fork,
    /// A pause; goes when nothing descends from it.
    Pause,
    /// A step of a template's build, which later builds take up; its fingerprint says of which
    /// step.
    Step,
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
        let starved = SandboxState::ended(&ExitReason::MissingMemory {
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
                assert_eq!(state.allows(operation), expected, "{state:?} {operation:?}");
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
