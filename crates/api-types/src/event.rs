//! Events of sandboxes, builds, keys, secrets and volumes, and entries of the audit log.

use crate::parts::Moment;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Type of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum EventType {
    /// A sandbox was registered. It is being started.
    #[serde(rename = "sandbox.created")]
    SandboxCreated,
    /// A new sandbox can be used.
    #[serde(rename = "sandbox.ready")]
    SandboxReady,
    /// A sandbox was paused.
    #[serde(rename = "sandbox.paused")]
    SandboxPaused,
    /// A paused sandbox is running again.
    #[serde(rename = "sandbox.resumed")]
    SandboxResumed,
    /// A sandbox was rolled back to a snapshot.
    #[serde(rename = "sandbox.rolledBack")]
    SandboxRolledBack,
    /// A snapshot of a sandbox was taken.
    #[serde(rename = "sandbox.snapshotTaken")]
    SandboxSnapshotTaken,
    /// Children of a sandbox were created.
    #[serde(rename = "sandbox.forked")]
    SandboxForked,
    /// A child of a fork was retained, and its siblings were removed.
    #[serde(rename = "sandbox.promoted")]
    SandboxPromoted,
    /// The name of a sandbox changed.
    #[serde(rename = "sandbox.renamed")]
    SandboxRenamed,
    /// The timeout of a sandbox changed.
    #[serde(rename = "sandbox.timeoutChanged")]
    SandboxTimeoutChanged,
    /// The network rules of a sandbox changed.
    #[serde(rename = "sandbox.networkChanged")]
    SandboxNetworkChanged,
    /// All processes of a sandbox were stopped, and its start command was run.
    #[serde(rename = "sandbox.restarted")]
    SandboxRestarted,
    /// A sandbox was killed, by a call or at its timeout.
    #[serde(rename = "sandbox.killed")]
    SandboxKilled,
    /// A sandbox could not be started, or lost its guest.
    #[serde(rename = "sandbox.failed")]
    SandboxFailed,
    /// A template build was started.
    #[serde(rename = "build.started")]
    BuildStarted,
    /// A template build succeeded, failed or was cancelled.
    #[serde(rename = "build.finished")]
    BuildFinished,
    /// An API key was created.
    #[serde(rename = "key.created")]
    KeyCreated,
    /// An API key was revoked.
    #[serde(rename = "key.revoked")]
    KeyRevoked,
    /// A secret was created.
    #[serde(rename = "secret.created")]
    SecretCreated,
    /// The value of a secret was replaced.
    #[serde(rename = "secret.changed")]
    SecretChanged,
    /// A volume was created.
    #[serde(rename = "volume.created")]
    VolumeCreated,
    /// A volume was removed with its files.
    #[serde(rename = "volume.deleted")]
    VolumeDeleted,
    /// A secret was removed.
    #[serde(rename = "secret.deleted")]
    SecretDeleted,
}

impl EventType {
    /// All types, in the order of the documentation.
    pub const ALL: [Self; 23] = [
        Self::SandboxCreated,
        Self::SandboxReady,
        Self::SandboxPaused,
        Self::SandboxResumed,
        Self::SandboxRolledBack,
        Self::SandboxSnapshotTaken,
        Self::SandboxForked,
        Self::SandboxPromoted,
        Self::SandboxRenamed,
        Self::SandboxTimeoutChanged,
        Self::SandboxNetworkChanged,
        Self::SandboxRestarted,
        Self::SandboxKilled,
        Self::SandboxFailed,
        Self::BuildStarted,
        Self::BuildFinished,
        Self::KeyCreated,
        Self::KeyRevoked,
        Self::SecretCreated,
        Self::SecretChanged,
        Self::SecretDeleted,
        Self::VolumeCreated,
        Self::VolumeDeleted,
    ];

    /// Returns the name of the type.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::SandboxCreated => "sandbox.created",
            Self::SandboxReady => "sandbox.ready",
            Self::SandboxPaused => "sandbox.paused",
            Self::SandboxResumed => "sandbox.resumed",
            Self::SandboxRolledBack => "sandbox.rolledBack",
            Self::SandboxSnapshotTaken => "sandbox.snapshotTaken",
            Self::SandboxForked => "sandbox.forked",
            Self::SandboxPromoted => "sandbox.promoted",
            Self::SandboxRenamed => "sandbox.renamed",
            Self::SandboxTimeoutChanged => "sandbox.timeoutChanged",
            Self::SandboxNetworkChanged => "sandbox.networkChanged",
            Self::SandboxRestarted => "sandbox.restarted",
            Self::SandboxKilled => "sandbox.killed",
            Self::SandboxFailed => "sandbox.failed",
            Self::BuildStarted => "build.started",
            Self::BuildFinished => "build.finished",
            Self::KeyCreated => "key.created",
            Self::KeyRevoked => "key.revoked",
            Self::SecretCreated => "secret.created",
            Self::SecretChanged => "secret.changed",
            Self::SecretDeleted => "secret.deleted",
            Self::VolumeCreated => "volume.created",
            Self::VolumeDeleted => "volume.deleted",
        }
    }
}

/// An event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// Id of the event. The ids of all hosts, as texts, are in the order of time.
    pub id: String,
    /// Type of the event.
    #[serde(rename = "type")]
    pub kind: EventType,
    /// Time of the event.
    pub time: Moment,
    /// Host that recorded the event.
    pub host: String,
    /// API key that owns the object; null if the host's owner does.
    pub owner: Option<String>,
    /// Caller: the id of an API key, `owner` for the owner of the host, `administrator` for a
    /// caller that the reader may not know. Absent for events of the host itself, such as timeouts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caller: Option<String>,
    /// Id of the request that caused the event.
    #[serde(default, rename = "requestID", skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// Sandbox.
    #[serde(default, rename = "sandboxID", skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// Name of the sandbox, snapshot, template, key, secret or volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Template of the sandbox or of the build.
    #[serde(
        default,
        rename = "templateID",
        skip_serializing_if = "Option::is_none"
    )]
    pub template_id: Option<String>,
    /// Snapshot that was taken or restored.
    #[serde(
        default,
        rename = "snapshotID",
        skip_serializing_if = "Option::is_none"
    )]
    pub snapshot_id: Option<String>,
    /// Sandbox that the sandbox was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forked_from: Option<String>,
    /// Build.
    #[serde(default, rename = "buildID", skip_serializing_if = "Option::is_none")]
    pub build_id: Option<String>,
    /// API key that was created or revoked.
    #[serde(default, rename = "keyID", skip_serializing_if = "Option::is_none")]
    pub key_id: Option<String>,
    /// Number of children of a fork, or of sandboxes that a promotion removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// New deadline of the sandbox. Absent if it has no deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_at: Option<Moment>,
    /// Cause: the reason of a failure, or `timeout`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
}

/// Entries that are no longer retained.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DroppedEntries {
    /// Number of dropped entries. Only administrators see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// Time of the newest dropped entry.
    pub until: Moment,
}

/// Page of events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EventPage {
    /// Events.
    pub events: Vec<Event>,
    /// Position after this page: the parameter `after` (`before` in descending order) of the next
    /// page. Absent if the log is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// True if the log continues after this page.
    pub more: bool,
    /// Events that are no longer retained and may be missing from this page. Absent if none are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped: Option<DroppedEntries>,
}

/// Event of a sandbox in E2B's form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LifecycleEvent {
    /// Version of this form.
    pub version: String,
    /// Id of the event.
    pub id: String,
    /// Type of the event.
    #[serde(rename = "type")]
    pub kind: LifecycleEventType,
    /// Details; null if there are none.
    pub event_data: Option<LifecycleEventData>,
    /// Always equal to `sandboxTemplateId`.
    pub sandbox_build_id: String,
    /// Always equal to `sandboxId`.
    pub sandbox_execution_id: String,
    /// Sandbox.
    pub sandbox_id: String,
    /// Always the same, because a host has one team.
    pub sandbox_team_id: String,
    /// Template of the sandbox.
    pub sandbox_template_id: String,
    /// Time of the event.
    pub timestamp: Moment,
}

/// Details of an event in E2B's form.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LifecycleEventData {
    /// New deadline of the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub set_timeout: Option<Moment>,
}

/// Type of an event in E2B's form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LifecycleEventType {
    /// A new sandbox can be used.
    #[serde(rename = "sandbox.lifecycle.created")]
    Created,
    /// Name, timeout or network rules of a sandbox changed.
    #[serde(rename = "sandbox.lifecycle.updated")]
    Updated,
    /// A sandbox was paused.
    #[serde(rename = "sandbox.lifecycle.paused")]
    Paused,
    /// A sandbox was resumed, rolled back or restarted.
    #[serde(rename = "sandbox.lifecycle.resumed")]
    Resumed,
    /// A snapshot of a sandbox was taken.
    #[serde(rename = "sandbox.lifecycle.checkpointed")]
    Checkpointed,
    /// A sandbox was killed.
    #[serde(rename = "sandbox.lifecycle.killed")]
    Killed,
}

impl LifecycleEventType {
    /// Names of all types.
    pub const NAMES: [(&'static str, Self); 6] = [
        ("sandbox.lifecycle.created", Self::Created),
        ("sandbox.lifecycle.updated", Self::Updated),
        ("sandbox.lifecycle.paused", Self::Paused),
        ("sandbox.lifecycle.resumed", Self::Resumed),
        ("sandbox.lifecycle.checkpointed", Self::Checkpointed),
        ("sandbox.lifecycle.killed", Self::Killed),
    ];

    /// Returns the name of the type.
    #[must_use]
    pub fn name(self) -> &'static str {
        let mut all = Self::NAMES.into_iter();
        all.find(|(_, kind)| *kind == self)
            .map_or("", |(name, _)| name)
    }

    /// Returns the types of events that E2B's clients know by this type.
    #[must_use]
    pub fn types(self) -> &'static [EventType] {
        match self {
            Self::Created => &[EventType::SandboxReady],
            Self::Updated => &[
                EventType::SandboxRenamed,
                EventType::SandboxTimeoutChanged,
                EventType::SandboxNetworkChanged,
            ],
            Self::Paused => &[EventType::SandboxPaused],
            Self::Resumed => &[
                EventType::SandboxResumed,
                EventType::SandboxRolledBack,
                EventType::SandboxRestarted,
            ],
            Self::Checkpointed => &[EventType::SandboxSnapshotTaken, EventType::SandboxForked],
            Self::Killed => &[EventType::SandboxKilled],
        }
    }

    /// Returns the type by which E2B's clients know an event. `None` if they do not know it.
    #[must_use]
    pub fn of(kind: EventType) -> Option<Self> {
        let mut all = Self::NAMES.into_iter().map(|(_, kind)| kind);
        all.find(|known| known.types().contains(&kind))
    }
}

/// Kind of a caller in the audit log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AuditCaller {
    /// The owner of the host, over the socket or with a code for the console.
    Owner,
    /// The holder of an API key.
    Key,
    /// A function with a key for sandboxes.
    Function,
    /// The holder of the access token of a sandbox or volume, or any client of a sandbox without
    /// one. The entry names the key that owns the sandbox or volume.
    Token,
    /// A caller without a valid key or token.
    Unknown,
}

/// Entry of the audit log: one call of the API.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AuditEntry {
    /// Id of the entry. The ids of all hosts, as texts, are in the order of time.
    pub id: String,
    /// Time of the response.
    pub time: Moment,
    /// Host that received the call.
    pub host: String,
    /// Kind of the caller.
    pub caller: AuditCaller,
    /// API key of the caller. Absent for other callers.
    #[serde(default, rename = "keyID", skip_serializing_if = "Option::is_none")]
    pub key_id: Option<String>,
    /// Console session of the caller. Absent if the call was not made in the console.
    #[serde(default, rename = "sessionID", skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    /// Address of the client. Absent for callers on the host itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Id of the request.
    #[serde(default, rename = "requestID", skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// Method and path of the call, with the names of its parameters.
    pub call: String,
    /// Sandbox of the call, as the caller wrote it, or sandbox that the call has created.
    #[serde(default, rename = "sandboxID", skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// Other object of the call, as the caller wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// Command that the call started in the sandbox, in one line of at most 1 KiB. Only recorded
    /// with `jiffy serve --audit-commands`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Paths in the sandbox that the call accessed, at most 8 with 4 KiB in total. Only recorded
    /// with `jiffy serve --audit-commands`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
    /// Status of the response. 499 if the client has closed the connection before.
    pub status: u16,
    /// Error code of the response. Absent if the call succeeded.
    #[serde(
        default,
        rename = "error_code",
        skip_serializing_if = "Option::is_none"
    )]
    pub error_code: Option<String>,
    /// Duration of the call in milliseconds.
    pub ms: u64,
    /// Number of rejected calls that this entry stands for. The entry describes the last of them.
    pub count: u64,
}

/// Page of the audit log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AuditPage {
    /// Entries.
    pub entries: Vec<AuditEntry>,
    /// Position after this page: the parameter `after` (`before` in descending order) of the next
    /// page. Absent if the log is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// True if the log continues after this page.
    pub more: bool,
    /// Entries that are no longer retained and may be missing from this page. Absent if none are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped: Option<DroppedEntries>,
}
