//! [`View`]: state of a node after its latest event. The executor publishes it for all other tasks.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead. A restart of the daemon continues the epoch, but a reboot of the host does
//! not. The *term* counts the coordinators of a fleet: each has a higher term than its predecessor.
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox. A *shard* is a part of the fleet's sandboxes. Its record lists the members and
//! names the coordinator. During *mass silence*, more than half of the members send no heartbeats,
//! and no member is declared dead.

use super::query::HostSummary;
use jiffy_fleet_core::record::{MemberRow, ShardRecord};
use jiffy_fleet_core::{Epoch, FleetId, Member, MemberId, Millis, Owner, RejectionReason, Term};
use std::sync::Arc;

/// State of a node after its latest event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// This member.
    pub member: MemberId,
    /// Epoch. `None` if this member is not registered.
    pub epoch: Option<Epoch>,
    /// End of the authority (the right to claim stored sandboxes), on the node's clock.
    pub deadline: Option<Millis>,
    /// Epoch in which all local sandboxes were compared with their heads.
    pub reconciled: Option<Epoch>,
    /// This member is the coordinator.
    pub is_coordinator: bool,
    /// This member is the coordinator and knows the rows of all live members.
    pub is_directory_complete: bool,
    /// Record of the shard. `None` before the first read.
    pub shard: Option<Arc<ShardRecord>>,
    /// Reason of the latest rejection since the last registration.
    pub rejected: Option<RejectionReason>,
    /// Numbers of silent members and of all members during mass silence, on the coordinator only.
    pub mass_silence: Option<(usize, usize)>,
    /// Term and number of the record of the shard, if it is older than at an earlier read.
    pub regressed: Option<(Term, u64)>,
}

impl View {
    pub(super) fn new(member: MemberId) -> Self {
        Self {
            member,
            epoch: None,
            deadline: None,
            reconciled: None,
            is_coordinator: false,
            is_directory_complete: false,
            shard: None,
            rejected: None,
            mass_silence: None,
            regressed: None,
        }
    }

    /// Updates the fields that the state machine knows.
    pub(super) fn update(&mut self, member: &Member) {
        self.epoch = member.epoch();
        self.deadline = member.deadline();
        self.is_coordinator = member.is_coordinator();
        self.is_directory_complete = member.is_directory_complete();
        let number = |record: &ShardRecord| (record.term, record.seq);
        let known = self.shard.as_deref().map(number);
        // Each replacement increments the number. The large record is copied only if it has
        // changed.
        if member.shard().map(number) != known {
            self.shard = member.shard().cloned().map(Arc::new);
        }
    }

    /// Returns this member and its epoch if it may claim, resume and restore stored sandboxes.
    #[must_use]
    pub fn authority(&self, now: Millis) -> Option<Owner> {
        let epoch = self.epoch?;
        (now < self.deadline?).then_some(Owner {
            member: self.member,
            epoch,
        })
    }

    /// Returns whether the heads of all sandboxes were compared in the current epoch.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.epoch.is_some() && self.reconciled == self.epoch
    }

    /// Returns the row of a member.
    #[must_use]
    pub fn row(&self, id: MemberId) -> Option<&MemberRow> {
        self.shard.as_ref()?.row(id)
    }
}

/// Coordinator in a [`FleetStatus`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoordinatorStatus {
    /// Member.
    pub member: MemberId,
    /// Term.
    pub term: Term,
    /// True if the coordinator answered a query and knows the rows of all live members.
    pub is_directory_complete: bool,
}

/// State of the fleet, as one member sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetStatus {
    /// Fleet.
    pub fleet: FleetId,
    /// This member.
    pub member: MemberId,
    /// This member and its epoch while it has authority.
    pub authority: Option<Owner>,
    /// The heads of all sandboxes of this host were compared in this epoch.
    pub is_ready: bool,
    /// Coordinator. `None` if the record of the shard was not read yet.
    pub coordinator: Option<CoordinatorStatus>,
    /// Reason for which the coordinator rejects this member.
    pub rejected: Option<RejectionReason>,
    /// Numbers of silent members and of all members during mass silence.
    pub mass_silence: Option<(usize, usize)>,
    /// The record of the shard was probably restored from a backup.
    pub is_regressed: bool,
    /// All members.
    pub nodes: Vec<NodeStatus>,
}

/// Member in a [`FleetStatus`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeStatus {
    /// Row in the record of the shard.
    pub row: MemberRow,
    /// Time since its last heartbeat in milliseconds. `None` if the coordinator did not report it.
    pub heartbeat_age_ms: Option<u64>,
    /// Numbers of its sandboxes. `None` if it did not answer within 1 s.
    pub summary: Option<HostSummary>,
}
