//! Details of a sandbox: the `jiffy` object of answers.

use crate::engine::BootMode;
use crate::identity_token::IdentityTokens;
use crate::network::NetworkSettings;
use crate::sandbox::VolumeMount;
use crate::size::SandboxSize;
use crate::snapshot::SnapshotContent;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// State of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum SandboxState {
    /// Being created; its agent has not answered yet.
    Creating,
    /// Its agent has answered.
    Running,
    /// Stored as a snapshot. The sandbox holds no memory.
    Paused,
    /// The guest was lost. The snapshots are intact, and a rollback to one of them repairs the
    /// sandbox.
    Broken {
        /// Reason why the guest was lost.
        cause: String,
        /// Kind of the reason. Records of earlier versions have none.
        #[serde(default, skip_serializing_if = "BrokenBy::is_guest_end")]
        broken_by: BrokenBy,
    },
    /// Terminated on request. The record stays until it is removed.
    Killed,
}

/// Kind of the reason why a sandbox lost its guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BrokenBy {
    /// The guest terminated by itself, or was lost together with a daemon.
    #[default]
    GuestEnd,
    /// Memory of the guest did not arrive from the store in time. A resume restarts the sandbox
    /// from the snapshot that it descends from.
    MissingMemory,
}

impl BrokenBy {
    fn is_guest_end(&self) -> bool {
        *self == Self::GuestEnd
    }
}

/// Cause of a pause that no request has caused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PauseCause {
    /// The timeout of the sandbox was over.
    Timeout,
    /// The sandbox was not used for its idle timeout.
    Idle,
}

/// State of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "SandboxState")]
pub enum StateName {
    /// Being created; its agent has not answered yet.
    Creating,
    /// Its agent has answered.
    Running,
    /// Stored as a snapshot. The sandbox holds no memory.
    Paused,
    /// The guest was lost. A rollback to a snapshot repairs the sandbox.
    Broken,
    /// Terminated on request.
    Killed,
}

impl StateName {
    /// All states.
    pub const ALL: [Self; 5] = [
        Self::Running,
        Self::Paused,
        Self::Broken,
        Self::Creating,
        Self::Killed,
    ];

    /// Name of the state.
    pub fn name(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Broken => "broken",
            Self::Killed => "killed",
        }
    }
}

impl SandboxState {
    /// Returns the state without its details.
    pub fn kind(&self) -> StateName {
        match self {
            Self::Creating => StateName::Creating,
            Self::Running => StateName::Running,
            Self::Paused => StateName::Paused,
            Self::Broken { .. } => StateName::Broken,
            Self::Killed => StateName::Killed,
        }
    }

    /// Name of the state.
    pub fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// Returns the state of a sandbox that lost its guest for the reason `cause` and needs a
    /// rollback.
    pub fn broken(cause: impl Into<String>) -> Self {
        Self::Broken {
            cause: cause.into(),
            broken_by: BrokenBy::GuestEnd,
        }
    }

    /// Returns whether the sandbox is broken and a resume repairs it.
    pub fn is_broken_and_resumable(&self) -> bool {
        let missing_memory = BrokenBy::MissingMemory;
        matches!(self, Self::Broken { broken_by, .. } if *broken_by == missing_memory)
    }
}

/// Fields of [`SandboxState`] for the schema.
#[derive(Serialize, JsonSchema)]
struct StateFields {
    /// State of the sandbox.
    state: StateName,
    /// Reason why a broken sandbox lost its guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<String>,
    /// Kind of the reason. Defaults to `guest_end`.
    #[serde(skip_serializing_if = "Option::is_none")]
    broken_by: Option<BrokenBy>,
}

/// Action at a sandbox's timeout.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// The sandbox is killed.
    #[default]
    Kill,
    /// The sandbox is paused.
    Pause,
}

/// Settings chosen by a sandbox's creator.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SandboxTerms {
    /// API key that created the sandbox; null if the host's owner did.
    pub owner: Option<String>,
    /// Metadata chosen by the creator.
    pub metadata: BTreeMap<String, String>,
    /// Timeout that was set last, in seconds; null: no limit.
    pub timeout_s: Option<u64>,
    /// Action at the timeout.
    pub on_timeout: OnTimeout,
    /// Content of a pause at the timeout.
    pub pause_mode: SnapshotContent,
    /// Time without use after which the sandbox is paused, in seconds. Absent if it never is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_timeout_s: Option<u64>,
    /// True if traffic resumes the sandbox.
    pub auto_resume: bool,
    /// True if the sandbox's agent requires an access token.
    pub secure: bool,
    /// Network rules.
    pub network: NetworkSettings,
    /// Identity tokens by name. Absent if the sandbox has none.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub identity_tokens: IdentityTokens,
    /// Mounted volumes. Absent if the sandbox has none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeMount>,
}

/// Durations of operations on a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SandboxSteps {
    /// Durations of the create. Absent if the daemon was restarted since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub create: Option<OperationSteps>,
    /// Durations of the last operation. Absent if the daemon was restarted since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<OperationSteps>,
}

/// Duration of an operation and of its steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OperationSteps {
    /// Name of the operation.
    pub operation: String,
    /// Duration of the operation in milliseconds, at least the sum of its steps.
    #[schemars(range(min = 0.0))]
    pub ms: f64,
    /// Steps in order of completion.
    pub steps: Vec<OperationStep>,
}

/// Duration of a step of an operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OperationStep {
    /// Name of the step.
    pub step: String,
    /// Duration in milliseconds.
    #[schemars(range(min = 0.0))]
    pub ms: f64,
}

/// Details of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SandboxInfo {
    /// Id of the sandbox: letters and digits.
    pub id: String,
    /// Name, unique among the owner's sandboxes that are not killed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// State of the sandbox.
    #[serde(flatten)]
    #[schemars(with = "StateFields")]
    pub state: SandboxState,
    /// Template that the sandbox descends from.
    pub template: String,
    /// Resources.
    #[serde(flatten)]
    pub size: SandboxSize,
    /// Environment variables in addition to the template's. Only the host's owner receives them.
    pub env: BTreeMap<String, String>,
    /// Settings chosen by the creator.
    #[serde(rename = "terms")]
    pub settings: SandboxTerms,
    /// Timeout in milliseconds since 1970; null if the sandbox has none.
    pub deadline_ms: Option<u64>,
    /// Token that the agent requires. Only the host's owner receives it in this object.
    pub agent_token: Option<String>,
    /// Token that the ports require if traffic is restricted. Only the host's owner receives it in
    /// this object.
    pub traffic_token: Option<String>,
    /// Latest snapshot that the sandbox descends from; null if it was booted and never snapshotted.
    pub snapshot: Option<String>,
    /// Content of the pause. Absent if the sandbox is not paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_mode: Option<SnapshotContent>,
    /// Cause of the pause. Absent if the sandbox is not paused, or a request paused it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_cause: Option<PauseCause>,
    /// Sandbox that this sandbox was forked from.
    pub forked_from: Option<String>,
    /// Origin of the guest.
    pub boot_mode: Option<BootMode>,
    /// Engine of the current or last guest; null before the first guest.
    pub engine: Option<String>,
    /// Time from the request to the agent's answer, in milliseconds.
    #[schemars(range(min = 0.0))]
    pub boot_ms: Option<f64>,
    /// Time of the creation in milliseconds since 1970.
    pub created_ms: u64,
    /// Time of the last change of state in milliseconds since 1970.
    pub changed_ms: u64,
    /// Durations of the create and of the last operation. Only in answers about one sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<SandboxSteps>,
}
