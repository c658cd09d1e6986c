//! Messages between the members of a fleet and the coordinator of their shard, as JSON. The process
//! of a member (`jiffy_fleet::node`) transfers them over mutual TLS.
//!
//! A *shard* is a part of the fleet's sandboxes. Its record lists the members and names the
//! coordinator.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor. An
//! *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead. A restart of the daemon continues the epoch, but a reboot of the host does
//! not. A *verdict* is the decision that an epoch is dead.
//!
//! A *budget* is the limit of an API key for its sandboxes on all hosts, and a *share* is the part
//! of it that one member may use. The coordinator *grants* shares and *recalls* unused parts. A
//! *row* describes one sandbox in the *directory* of the coordinator.

use crate::directory::{MAX_ROWS_PER_MESSAGE, RowMessage, RowRequest};
use crate::ids::{Epoch, FleetId, Instance, Term, Version};
use crate::record::{Capacity, MAX_ADDRESS_BYTES};
use jiffy_scheduler::Resources;
use serde::{Deserialize, Serialize};

/// Format of messages that this build writes.
pub const MESSAGE_FORMAT: u32 = 1;
/// Oldest format of messages that this build accepts.
pub const OLDEST_MESSAGE_FORMAT: u32 = 1;
/// Maximum size of an encoded message.
pub const MAX_MESSAGE_BYTES: usize = 2 << 20;
/// Maximum number of shares in a message.
pub const MAX_SHARES_PER_MESSAGE: usize = 4_000;
/// Maximum number of templates in a heartbeat.
pub const MAX_TEMPLATES: usize = 4_000;
/// Maximum number of warm pools in an acknowledgement.
pub const MAX_POOLS: usize = 256;
/// Maximum length of the version of a record.
const MAX_VERSION_BYTES: usize = 128;
/// Maximum length of a software version and of an owner's id.
const MAX_NAME_BYTES: usize = 63;

/// Id of the owner of a budget: an API key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BudgetOwner(pub String);

/// Amount of a budget that an operation needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetNeed {
    /// Owner of the budget.
    pub owner: BudgetOwner,
    /// Amount.
    pub amount: u64,
}

/// Message with the fields that its receiver checks first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Format.
    pub format: u32,
    /// Fleet of the sender.
    pub fleet: FleetId,
    /// Term of the coordinator that the sender knows: the highest one.
    pub term: Term,
    /// Epoch of the sender. `None` if the sender is not registered.
    pub epoch: Option<Epoch>,
    /// Content.
    pub body: Body,
}

/// Content of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Body {
    /// Request of a member for an epoch.
    Register(Registration),
    /// The registration is committed in the record of the shard.
    Registered {
        /// Process that registered.
        instance: Instance,
        /// Epoch of the registration.
        epoch: Epoch,
    },
    /// Heartbeat of a member.
    Heartbeat(Heartbeat),
    /// Acknowledgement of a heartbeat.
    Acknowledged(Acknowledgement),
    /// The coordinator rejects a registration or heartbeat.
    Rejected(Rejection),
    /// The sender is the new coordinator.
    Coordinating,
    /// The member leaves the fleet.
    Leave,
    /// Rows for the directory.
    Rows(RowMessage),
    /// Request for rows.
    RowsWanted(RowRequest),
}

/// Registration of a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// Process of the member.
    pub instance: Instance,
    /// Number of the request of this process. A late copy of an earlier request is ignored.
    pub number: u64,
    /// Latest epoch of the member that this process knows to have ended. A new epoch is given only
    /// to a process that knows the end of the former one.
    pub ended: Option<Epoch>,
    /// Address for messages of other members, as `HOST:PORT`.
    pub address: String,
    /// Version of Jiffy.
    pub version: String,
    /// Resources and properties of the host.
    pub capacity: Capacity,
}

/// State of a host for placements.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    /// Free processor time in thousandths of a processor.
    pub free_cpu_milli: u32,
    /// Free memory in MiB.
    pub free_memory_mib: u32,
    /// Free disk space in MiB.
    pub free_disk_mib: u32,
    /// The host can reach the object store.
    pub is_store_reachable: bool,
    /// Templates that are on the host.
    pub templates: Vec<u64>,
    /// Templates that the host is building.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub builds: Vec<u64>,
    /// Creates in progress.
    #[serde(default)]
    pub creates: u32,
}

impl HostStatus {
    /// Returns the free resources.
    #[must_use]
    pub fn free(&self) -> Resources {
        Resources {
            cpu_milli: self.free_cpu_milli,
            memory_mib: self.free_memory_mib,
            disk_mib: self.free_disk_mib,
        }
    }
}

/// Heartbeat of a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Process of the member.
    pub instance: Instance,
    /// Number of the heartbeat of this process.
    pub seq: u64,
    /// State of the host.
    pub status: HostStatus,
    /// Shares of budgets that the member holds or needs.
    pub shares: Vec<ShareReport>,
    /// `shares` includes all sandboxes of the member. False while its daemon starts.
    #[serde(default = "yes")]
    pub is_complete: bool,
    /// Number of the last change of the member's rows.
    pub rows: u64,
}

/// Default of [`Heartbeat::is_complete`], for messages without this field.
fn yes() -> bool {
    true
}

/// Share of a budget, as its member reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareReport {
    /// Owner of the budget.
    pub owner: BudgetOwner,
    /// Share that the member holds.
    pub share: u64,
    /// Part of the share that sandboxes use. It may exceed the share: a member that was declared
    /// dead loses its share, but may return with running sandboxes.
    pub in_use: u64,
    /// Latest grant that the share contains.
    pub grant: GrantNumber,
    /// Amount by which the member needs more.
    pub wanted: u64,
}

/// Number of a grant: the term of its coordinator, and a number within the term.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GrantNumber {
    /// Term of the coordinator.
    pub term: Term,
    /// Number within the term.
    pub number: u64,
}

/// New size of a member's share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Owner of the budget.
    pub owner: BudgetOwner,
    /// Number of the grant. A member ignores grants that do not follow the latest one.
    pub number: GrantNumber,
    /// New size of the share.
    pub share: u64,
}

/// Request to return an unused part of a share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recall {
    /// Owner of the budget.
    pub owner: BudgetOwner,
    /// Amount.
    pub amount: u64,
}

/// Size of the warm pool of a template on a host, according to the demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolDemand {
    /// Template, as the host reports it in [`HostStatus::templates`].
    pub template: u64,
    /// Number of guests.
    pub guests: u32,
}

/// Acknowledgement of a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acknowledgement {
    /// Process that sent the heartbeat.
    pub instance: Instance,
    /// Number of the heartbeat.
    pub seq: u64,
    /// Grants of shares.
    pub grants: Vec<Grant>,
    /// Recalls of shares.
    pub recalls: Vec<Recall>,
    /// Rows that the coordinator needs next.
    pub rows: RowRequest,
    /// Version of the shard's record after the coordinator last replaced it.
    pub record: Version,
    /// Warm pools of the host, the largest first. Pools of other templates have their usual size.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<PoolDemand>,
}

/// Rejection of a registration or heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejection {
    /// Process whose message was rejected.
    pub instance: Instance,
    /// Number of the rejected heartbeat. Zero for a registration.
    pub seq: u64,
    /// Epoch of the member that has ended, for [`RejectionReason::EpochEnded`].
    pub ended: Option<Epoch>,
    /// Reason.
    pub reason: RejectionReason,
}

/// Reason of a rejection.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    thiserror::Error,
)]
#[serde(rename_all = "snake_case")]
pub enum RejectionReason {
    /// The message belongs to another fleet.
    #[error("the message is of another fleet: check the address in fleet.toml")]
    ForeignFleet,
    /// The format of the message is not supported.
    #[error("the format of the message is not supported: upgrade the older host")]
    Format,
    /// A field of the message exceeds its limit.
    #[error("a field of the message is out of range")]
    Invalid,
    /// The receiver is not the coordinator.
    #[error("the receiver is not the coordinator of the shard")]
    NotCoordinator,
    /// The sender does not know the current term.
    #[error("the term of the message is not the current one")]
    Term,
    /// The coordinator cannot replace its record at present.
    #[error("the coordinator cannot reach the records of the fleet")]
    NoAuthority,
    /// The member is not registered.
    #[error("the member is not registered")]
    Unregistered,
    /// The epoch of the member is dead.
    #[error("the epoch of the member is dead: register again")]
    EpochEnded,
    /// The coordinator is about to commit the verdict on the member.
    #[error("the member is about to be declared dead")]
    Condemned,
    /// Another process with the same member id sends heartbeats.
    #[error("another host with the same member id is active: a data directory must not be copied")]
    Duplicate,
    /// A newer process of the same host has registered.
    #[error("a newer process of this host has registered")]
    Superseded,
    /// The member has left the fleet.
    #[error("the member was removed from the fleet: join it again")]
    Left,
    /// The coordinator cannot decide yet whether the former process is dead.
    #[error("the coordinator is new and does not know the former process yet")]
    Grace,
    /// The shard has the maximum number of members.
    #[error("the shard has the maximum number of members")]
    Full,
}

/// Error of a message that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The message exceeds [`MAX_MESSAGE_BYTES`].
    #[error("message has {0} bytes, more than the maximum of {MAX_MESSAGE_BYTES}")]
    TooLarge(usize),
    /// The message is not valid JSON of its format.
    #[error("message is malformed: {0}")]
    Malformed(String),
}

impl Message {
    /// Returns the JSON of the message.
    ///
    /// # Errors
    /// [`MessageError`] if the message exceeds the maximum size.
    pub fn encode(&self) -> Result<Vec<u8>, MessageError> {
        let bytes =
            serde_json::to_vec(self).map_err(|error| MessageError::Malformed(error.to_string()))?;
        if bytes.len() > MAX_MESSAGE_BYTES {
            return Err(MessageError::TooLarge(bytes.len()));
        }
        Ok(bytes)
    }

    /// Returns the message with this JSON. The receiver checks fleet, format, term and bounds.
    ///
    /// # Errors
    /// [`MessageError`] if the message is malformed or too large.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        if bytes.len() > MAX_MESSAGE_BYTES {
            return Err(MessageError::TooLarge(bytes.len()));
        }
        serde_json::from_slice(bytes).map_err(|error| MessageError::Malformed(error.to_string()))
    }

    /// Checks fleet, format and bounds.
    pub(crate) fn check(&self, fleet: &FleetId) -> Result<(), RejectionReason> {
        if self.fleet != *fleet {
            return Err(RejectionReason::ForeignFleet);
        }
        if !(OLDEST_MESSAGE_FORMAT..=MESSAGE_FORMAT).contains(&self.format) {
            return Err(RejectionReason::Format);
        }
        if self.body.is_bounded() {
            Ok(())
        } else {
            Err(RejectionReason::Invalid)
        }
    }
}

impl Body {
    /// Returns whether all lists and texts are within their limits. The message may come from a
    /// hostile member.
    fn is_bounded(&self) -> bool {
        let is_owner = |owner: &BudgetOwner| (1..=MAX_NAME_BYTES).contains(&owner.0.len());
        match self {
            Self::Register(registration) => {
                let is_text = |text: &str, max: usize| {
                    (1..=max).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic())
                };
                is_text(&registration.address, MAX_ADDRESS_BYTES)
                    && is_text(&registration.version, MAX_NAME_BYTES)
                    && registration.capacity.check().is_ok()
                    && registration.capacity.unknown.is_empty()
            }
            Self::Heartbeat(heartbeat) => {
                heartbeat.shares.len() <= MAX_SHARES_PER_MESSAGE
                    && heartbeat.status.templates.len() <= MAX_TEMPLATES
                    && heartbeat.status.builds.len() <= MAX_TEMPLATES
                    && heartbeat.shares.iter().all(|share| is_owner(&share.owner))
            }
            Self::Acknowledged(acknowledgement) => {
                acknowledgement.record.0.len() <= MAX_VERSION_BYTES
                    && acknowledgement.pools.len() <= MAX_POOLS
                    && acknowledgement.grants.len() <= MAX_SHARES_PER_MESSAGE
                    && acknowledgement.recalls.len() <= MAX_SHARES_PER_MESSAGE
                    && acknowledgement
                        .grants
                        .iter()
                        .all(|grant| is_owner(&grant.owner))
            }
            Self::Rows(RowMessage::Changes { changes, .. }) => {
                changes.len() <= MAX_ROWS_PER_MESSAGE
            }
            Self::Rows(RowMessage::Page { rows, .. }) => rows.len() <= MAX_ROWS_PER_MESSAGE,
            Self::Registered { .. }
            | Self::Rejected(_)
            | Self::Coordinating
            | Self::Leave
            | Self::RowsWanted(_) => true,
        }
    }
}
