//! Types of the control plane's requests and answers, shared by the daemon and its clients.
//!
//! `/openapi.json` is derived from these types: the comments on types and fields are its
//! descriptions. A changed field must be listed in CHANGELOG.md (test `released_fields`).

mod build;
mod comparison;
mod egress_proxy;
mod engine;
mod error;
mod event;
mod fleet;
mod function;
mod guest;
mod guest_process;
mod header_rule;
mod host;
mod identity_token;
mod image_template;
mod key;
mod lineage;
mod network;
mod parts;
mod recipe;
mod sandbox;
mod sandbox_info;
mod sandbox_requests;
mod secret;
mod size;
mod snapshot;
mod template;
mod template_network;
mod usage;
mod volume;
mod webhook;

pub use build::{
    BuildLogs, BuildProgress, BuildSecret, BuildStart, BuildState, BuildStatus, BuildStep,
    FailureReason, ImageRegistry, MAX_BUILD_SECRETS, MAX_BUILD_SSH_AGENTS, MAX_BUILD_STEPS,
    MAX_IDENTITY_BYTES, MAX_SSH_ID_BYTES, MAX_TRUST_ROOT_BYTES, MAX_VERIFY_IDENTITIES,
    MAX_VERIFY_KEYS, SignerIdentity,
};
pub use comparison::{
    ComparedContent, ComparedFile, ComparedState, ComparedType, Comparison, ComparisonSummary,
    DifferenceCount, DifferenceKind, FileDifference,
};
pub use egress_proxy::{
    EgressProxy, EgressProxyTls, MAX_PROXY_CERTIFICATES, MAX_PROXY_CREDENTIAL, NewEgressProxy,
    NewEgressProxyTls,
};
pub use engine::{BootMode, Capabilities, EngineDescription};
pub use error::ErrorBody;
pub use event::{
    AuditCaller, AuditEntry, AuditPage, DroppedEntries, Event, EventPage, EventType,
    LifecycleEvent, LifecycleEventData, LifecycleEventType,
};
pub use fleet::{
    AcceptedRestore, BackendStatus, DrainHost, FleetDecision, FleetInfo, FleetNode, FleetNodes,
    FleetWhy, HostLoss, HostOperation, MassSilence,
};
pub use function::{
    DeployFunction, DeployLimits, DeploySettings, Function, FunctionLimits, FunctionLog,
    FunctionLogEntry, FunctionMetrics, FunctionSchedule, FunctionState, FunctionVersion,
    LatencyBucket, LogStream, ModuleState, RollbackFunction, SandboxKeyScope,
};
pub use guest::{
    AllMetrics, Connection, Connections, ConsoleLine, HeaderRequest, LogEntry, LogLevel, Logs,
    LogsV2, Metric, Preview, Process, RefusalReason, Verdict,
};
pub use guest_process::{GuestProcess, GuestProcesses, SignalName, SignalProcess};
pub use header_rule::{
    HeaderAudit, HeaderRule, HeaderScheme, MAX_HEADER_RULES, MAX_RULE_HEADERS, MatchRule,
    NetworkRule, NetworkRulesByHost, NetworkTransform, NewNetworkRules, RuleAction, RuleInject,
    RuleMatch, rules_by_host,
};
pub use host::{
    Budget, BudgetLimits, BudgetUsage, DaemonStatus, DiskUsage, Health, HealthStatus, Host, Pool,
    PruneHost, PruneItem, PruneKind, PrunedHost, RevokeKey, RevokedKey, SetPool, StopHost, Team,
};
pub use identity_token::{
    IdentityToken, IdentityTokenType, IdentityTokens, MAX_AUDIENCE, MAX_IDENTITY_TOKENS,
    MAX_TOKEN_NAME, NewIdentity,
};
pub use image_template::{
    ImageBuild, ImageRebuild, MAX_IMAGE_ITEMS, NewAlias, NewImageTemplate, TagAssignment,
    TagAssignments, TagCount, TagExists, TagGroup, TagGroups,
};
pub use key::{ApiKey, ChangeKey, CreateKey, KeyLimit, KeyLimits, KeyScope, NewApiKey, RotateKey};
pub use lineage::{Lineage, LineageEdge, LineageKind, LineageNode, LineageRelation, LineageState};
pub use network::{
    MAX_EGRESS_MBPS, MAX_NETWORK_ENTRIES, NetworkBody, NetworkSettings, NetworkUpdate,
    SandboxNetwork,
};
pub use parts::Moment;
pub use recipe::{Recipe, RecipeBuild, RecipeState};
pub use sandbox::{
    Forked, JiffyFields, Lifecycle, ListedSandbox, Promoted, RollbackStatus, RolledBack, Sandbox,
    SandboxDetail, VolumeMount, Waited,
};
pub use sandbox_info::{
    BrokenBy, OnTimeout, OperationStep, OperationSteps, PauseCause, SandboxInfo, SandboxState,
    SandboxSteps, SandboxTerms, StateName,
};
pub use sandbox_requests::{
    AutoResume, ChangeSandbox, ConnectSandbox, ForkSandbox, MAX_AUTHORITIES_BYTES, MAX_NAME,
    MAX_NO_PROXY, MAX_PAIRS, MAX_PROXY_URL, MAX_REFRESH_S, MAX_RESTART_GRACE_MS, MAX_SANDBOX_NAME,
    MAX_SCOPE, MAX_SCOPE_ENTRY, MAX_VALUE, NewLifecycle, NewSandbox, OnNodeLoss, PauseSandbox,
    Prefetch, Proxy, Refresh, RestartSandbox, ResumeFrom, ResumeSandbox, RollbackSandbox,
    SetTimeout,
};
pub use secret::{
    MAX_SECRET_NAME, MAX_SECRET_VALUE, NewSecret, Secret, SecretMetadata, SecretUpdate,
};
pub use size::{SandboxSize, SizeError};
pub use snapshot::{
    DamagedChunk, MAX_SNAPSHOT_NAME, Snapshot, SnapshotAck, SnapshotContent, SnapshotInfo,
    SnapshotPurpose, SnapshotSandbox, SnapshotStatus, StoreState, VerifiedSnapshot,
};
pub use template::{
    AddTags, AddedTags, Alias, ChangedTemplate, NewTemplate, Prune, Pruned, RemoveTags,
    RequestedBuild, Tag, Template, TemplateBuild, TemplateBuildStatus, TemplateChange, UploadLink,
};
pub use template_network::TemplateNetwork;
pub use usage::{DailyUsage, UsagePage};
pub use volume::{
    MAX_VOLUME_FILES, MAX_VOLUME_MB, NewVolume, NewVolumeMount, Volume, VolumeAndToken,
    VolumeDriver, VolumeEntry, VolumeEntryChange, VolumeEntryType, VolumeSnapshot,
};
pub use webhook::{
    MAX_WEBHOOK_NAME, MAX_WEBHOOK_SECRET, MAX_WEBHOOK_URL, NewWebhook, Webhook, WebhookDelivery,
    WebhookDeliveryState, WebhookUpdate,
};
