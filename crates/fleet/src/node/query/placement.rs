//! Queries for the placement of a new sandbox and for shares of budgets. The receiver is the
//! coordinator. A *placement* selects the host of a sandbox. A *budget* is the limit of an API key,
//! and a *share* is the part of it that one member may use.
//!
//! The coordinator's directory has a row for each sandbox, found by a hash of its id. The name of a
//! sandbox and the idempotency key of a create have rows as well, so that both are unique in the
//! fleet. When the coordinator selects a host, it reserves these rows for 30 s. Within this time
//! the host reports them.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor.

use jiffy_fleet_core::record::{HostLabel, MAX_LABELS};
use jiffy_fleet_core::{
    Admission, BudgetExhausted, BudgetNeed, Grant, MemberId, SandboxHash, Term,
};
use serde::{Deserialize, Serialize};

/// Maximum number of budgets, templates and members in a request.
const MAX_ITEMS: usize = 16;
/// Maximum length of a text in a request.
const MAX_TEXT: usize = 128;

/// Amount of a budget, and its limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitedNeed {
    /// Owner and amount.
    pub need: BudgetNeed,
    /// Limit of the owner.
    pub limit: u64,
}

/// Request for a host of a new sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PlaceRequest {
    /// Template as the caller names it, for explanations.
    pub template: String,
    /// Hashes under which hosts may report the template, in the order of precedence. The
    /// coordinator uses the first hash that a host reports.
    pub templates: Vec<u64>,
    /// Budgets of the owner of the sandbox.
    pub needs: Vec<LimitedNeed>,
    /// Owner, and its maximum number of creates per minute.
    pub rate: Option<(String, u32)>,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Disk space in MiB.
    pub disk_mib: u32,
    /// The host must have the engine for microVMs.
    pub needs_microvm: bool,
    /// The host must have the engine for gVisor.
    pub needs_gvisor: bool,
    /// Labels that the host must have.
    pub labels: Vec<HostLabel>,
    /// Only these hosts are considered, unless the list is empty.
    pub allowed: Vec<MemberId>,
    /// Host that has the volumes of the sandbox. Only this host is considered.
    pub volume_host: Option<MemberId>,
    /// Hosts that have rejected the sandbox.
    pub excluded: Vec<MemberId>,
    /// Row of the name, which must not exist.
    pub name: Option<SandboxHash>,
    /// Row of the idempotency key. If it exists, its host answers the request.
    pub idempotency: Option<SandboxHash>,
    /// Number of the former decision for the same create.
    pub former: Option<u64>,
    /// The create was counted before for the maximum per minute.
    pub is_counted: bool,
    /// Row of the name that its host does not have any longer, according to the host.
    pub freed: Option<TakenName>,
}

impl PlaceRequest {
    /// Returns whether all fields are within their limits.
    pub(in crate::node) fn is_bounded(&self) -> bool {
        let lengths = [
            self.templates.len(),
            self.needs.len(),
            self.allowed.len(),
            self.excluded.len(),
        ];
        let owners = self.needs.iter().map(|need| need.need.owner.0.as_str());
        let owners = owners.chain(self.rate.iter().map(|(owner, _)| owner.as_str()));
        lengths.into_iter().all(|length| length <= MAX_ITEMS)
            && self.template.len() <= MAX_TEXT
            && self.labels.len() <= MAX_LABELS
            && self.labels.iter().all(HostLabel::is_valid)
            && owners.into_iter().all(is_owner)
    }
}

/// Returns whether a text is a valid owner of a budget.
pub(in crate::node) fn is_owner(owner: &str) -> bool {
    (1..=63).contains(&owner.len())
}

/// Row of a name that exists or is reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakenName {
    /// Member that has the row.
    pub member: MemberId,
    /// Number of the latest decision that has reserved the row.
    pub reservation: Option<u64>,
    /// True if the member has reported the row. Otherwise the row is only reserved for a create in
    /// progress, and the member does not have it yet.
    pub is_reported: bool,
}

/// Host that was selected for a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// Number of the decision, for [`PlacementEnd`] and [`PlaceRequest::former`].
    pub decision: u64,
    /// Address of the host.
    pub address: String,
    /// Part of the request to the host.
    pub admission: Admission,
}

/// Reason for which a sandbox was not placed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum NotPlaced {
    /// A host has the row of the idempotency key.
    #[error("{0} has received the same create before")]
    Received(MemberId),
    /// A host has the row of the name.
    #[error("{} has a sandbox with this name", .0.member)]
    NameTaken(TakenName),
    /// The owner has reached its maximum number of creates per minute.
    #[error("too many creates per minute: retry in {wait_s} s")]
    Rate {
        /// Time in seconds after which a create is possible.
        wait_s: u64,
    },
    /// A budget is exhausted.
    #[error(transparent)]
    Budget(BudgetExhausted),
    /// No host reports the template.
    #[error("no host has the template")]
    NoTemplate {
        /// Hosts that build it.
        builders: Vec<MemberId>,
    },
    /// No host is suitable.
    #[error("{reason}")]
    NoHost {
        /// Id of the decision.
        decision: String,
        /// Hosts with the reasons of their rejections.
        reason: String,
    },
}

/// End of a placement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementEnd {
    /// Term of the coordinator that decided.
    pub term: Term,
    /// Number of the decision.
    pub decision: u64,
    /// Rows under which the decision is found: id and name of the sandbox. Empty if the host does
    /// not run the sandbox.
    pub rows: Vec<SandboxHash>,
    /// Reason for which the host rejected the sandbox.
    pub rejected: Option<String>,
}

impl PlacementEnd {
    pub(in crate::node) fn is_bounded(&self) -> bool {
        self.rows.len() <= MAX_ITEMS
    }
}

/// Request of a member for a larger share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareRequest {
    /// Missing amounts.
    pub needs: Vec<LimitedNeed>,
}

impl ShareRequest {
    pub(in crate::node) fn is_bounded(&self) -> bool {
        let mut owners = self.needs.iter().map(|need| need.need.owner.0.as_str());
        self.needs.len() <= MAX_ITEMS && owners.all(is_owner)
    }
}

/// Answer to a [`ShareRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shares {
    /// Grants that the member must apply.
    pub grants: Vec<Grant>,
    /// First budget that was exhausted.
    pub exhausted: Option<BudgetExhausted>,
}

/// A decision about a placement, for operators.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Decision {
    /// Id of the decision: term of the coordinator and number.
    pub id: String,
    /// Time since the decision in milliseconds.
    pub age_ms: u64,
    /// Selected host. `None` if the create was rejected.
    pub host: Option<MemberId>,
    /// Explanation: hosts with the reasons of their rejections.
    pub reason: String,
    /// Result: reason for which the host rejected the sandbox, if it did.
    pub rejected: Option<String>,
}
