//! Members of the fleet with their addresses and states, as this member knows them. A *shard* is a
//! part of the fleet's sandboxes, and a fleet has one shard at present. The record of the shard,
//! which the coordinator writes, has one row per member. A *front* is a machine without sandboxes
//! that passes requests of clients to the members.
//!
//! A member reads the record of its shard only if its heartbeats are not acknowledged. It therefore
//! requests the rows of the members from the coordinator, which answers with rows only if they have
//! changed.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor. An
//! *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead. A restart of the daemon continues the epoch, but a reboot of the host does
//! not.

use super::{Inner, Node};
use crate::node::query::{Answer, Query};
use crate::node::view::View;
use jiffy_fleet_core::record::{
    MAX_MEMBERS, MAX_REMOVED_FRONTS, MemberRow, MemberState, ShardRecord,
};
use jiffy_fleet_core::{MemberId, Owner, Term};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// Interval of requests to the coordinator.
const REFRESH_INTERVAL: Duration = Duration::from_secs(2);

/// Members of the fleet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Members {
    /// Term of the coordinator.
    pub term: Term,
    /// Number of the record that contained the rows.
    pub seq: u64,
    /// Coordinator.
    pub coordinator: MemberId,
    /// Rows of all members, in the order of their numbers.
    pub rows: Vec<MemberRow>,
    /// Fronts whose certificates are no longer accepted, in the order of their numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed_fronts: Vec<MemberId>,
}

impl Members {
    fn of_record(record: &ShardRecord) -> Self {
        Self {
            term: record.term,
            seq: record.seq,
            coordinator: record.coordinator,
            rows: record.members.clone(),
            removed_fronts: record.removed_fronts.clone(),
        }
    }

    /// Returns the row of a member.
    #[must_use]
    pub fn row(&self, id: MemberId) -> Option<&MemberRow> {
        let index = self.rows.binary_search_by_key(&id, |row| row.id).ok()?;
        self.rows.get(index)
    }

    /// Returns whether a member is up or draining.
    #[must_use]
    pub fn is_live(&self, id: MemberId) -> bool {
        self.row(id).is_some_and(|row| row.state.is_live())
    }

    /// Returns whether a host or front was removed from the fleet.
    #[must_use]
    pub fn is_removed(&self, id: MemberId) -> bool {
        self.removed_fronts.binary_search(&id).is_ok()
            || self
                .row(id)
                .is_some_and(|row| row.state == MemberState::Left)
    }

    /// Returns whether an owner's epoch is dead. False if that is not known.
    #[must_use]
    pub fn is_dead(&self, owner: Owner) -> bool {
        self.row(owner.member).is_some_and(|row| {
            row.epoch > owner.epoch || row.epoch == owner.epoch && !row.state.is_live()
        })
    }

    /// Returns number and address of the coordinator.
    #[must_use]
    pub fn coordinator(&self) -> Option<(MemberId, String)> {
        let row = self.row(self.coordinator)?;
        Some((row.id, row.address.clone()))
    }

    /// Returns numbers and addresses of all live members except `own`.
    #[must_use]
    pub fn peers(&self, own: MemberId) -> Vec<(MemberId, String)> {
        let rows = self.rows.iter();
        rows.filter(|row| row.state.is_live() && row.id != own)
            .map(|row| (row.id, row.address.clone()))
            .collect()
    }

    /// Returns a digest of everything except the number of the record.
    pub(super) fn digest(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(self.term.0.to_le_bytes());
        hash.update(self.coordinator.0.to_le_bytes());
        hash.update(serde_json::to_vec(&self.rows).unwrap_or_default());
        hash.update(serde_json::to_vec(&self.removed_fronts).unwrap_or_default());
        let digest = hash.finalize();
        digest[..16]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    /// Returns whether an answer of another member obeys the rules of the record.
    fn is_valid(&self) -> bool {
        self.rows.len() <= MAX_MEMBERS
            && self.removed_fronts.len() <= MAX_REMOVED_FRONTS
            && self.removed_fronts.windows(2).all(|pair| pair[0] < pair[1])
            && self.rows.windows(2).all(|pair| pair[0].id < pair[1].id)
            && self.row(self.coordinator).is_some()
    }
}

/// Members with their digest.
#[derive(Debug, Default)]
pub(super) struct Current {
    pub members: Arc<Members>,
    pub digest: String,
}

/// Stores the members if they are newer. Notifies other tasks only if rows or term have changed.
fn update(current: &watch::Sender<Current>, new: Members) {
    current.send_if_modified(|current| {
        if (new.term, new.seq) <= (current.members.term, current.members.seq) {
            return false;
        }
        let is_changed = new.rows != current.members.rows
            || new.removed_fronts != current.members.removed_fronts
            || (new.term, new.coordinator) != (current.members.term, current.members.coordinator);
        if is_changed {
            current.digest = new.digest();
        }
        current.members = Arc::new(new);
        is_changed
    });
}

/// Updates the members until the node stops.
pub(super) async fn run(
    inner: Weak<Inner>,
    mut view: watch::Receiver<Arc<View>>,
    current: watch::Sender<Current>,
) {
    let mut next = Instant::now();
    let mut queried = Term(0);
    loop {
        tokio::select! {
            changed = view.changed() => if changed.is_err() { return },
            () = sleep_until(next) => {}
        }
        let latest = view.borrow_and_update().clone();
        if let Some(record) = &latest.shard {
            update(&current, Members::of_record(record));
        }
        let term = current.borrow().members.term;
        if latest.is_coordinator {
            next = Instant::now() + REFRESH_INTERVAL;
            continue;
        }
        // A new coordinator is queried at once.
        if term == queried && Instant::now() < next {
            continue;
        }
        (next, queried) = (Instant::now() + REFRESH_INTERVAL, term);
        let Some(inner) = inner.upgrade() else { return };
        let (coordinator, digest) = {
            let current = current.borrow();
            (current.members.coordinator(), current.digest.clone())
        };
        let Some((member, address)) = coordinator else {
            continue;
        };
        let node = Node { inner };
        if let Some(Answer::Members(Some(members))) =
            node.query(member, &address, Query::Members(digest)).await
            && members.is_valid()
            && members.coordinator == member
        {
            update(&current, members);
        }
    }
}

impl Node {
    /// Returns the members of the fleet. Changes arrive within a few seconds.
    #[must_use]
    pub fn members(&self) -> Arc<Members> {
        self.inner.members.borrow().members.clone()
    }

    /// Waits for the next change of the members or of the term.
    ///
    /// Returns at once if they have changed since `known`.
    pub async fn members_changed(&self, known: &Members) -> Arc<Members> {
        let mut members = self.inner.members.clone();
        let changed = members
            .wait_for(|current| {
                current.members.term != known.term
                    || current.members.rows != known.rows
                    || current.members.removed_fronts != known.removed_fronts
            })
            .await
            .map(|current| current.members.clone());
        match changed {
            Ok(members) => members,
            // The node has stopped: nothing changes any longer.
            Err(_) => std::future::pending().await,
        }
    }

    /// Waits until a member is not live, or has another epoch than now.
    pub async fn until_lost(&self, member: MemberId) {
        let mut known = self.members();
        let epoch = known.row(member).map(|row| row.epoch);
        while known.is_live(member) && known.row(member).map(|row| row.epoch) == epoch {
            known = self.members_changed(&known).await;
        }
    }

    /// Returns the coordinator and its term. `None` if the coordinator is unknown, or if the record
    /// names this member although this process does not have the role.
    #[must_use]
    pub fn coordinator(&self) -> Option<(MemberId, Term)> {
        let view = self.view();
        let members = self.members();
        let is_own = members.coordinator == view.member;
        (!members.rows.is_empty() && (!is_own || view.is_coordinator))
            .then_some((members.coordinator, members.term))
    }

    /// Returns the answer to [`Query::Members`].
    pub(super) fn members_answer(&self, digest: &str) -> Answer {
        if !self.view().is_coordinator {
            return Answer::Incomplete;
        }
        let current = self.inner.members.borrow();
        let is_same = current.digest == digest;
        Answer::Members((!is_same).then(|| (*current.members).clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_newer_members_are_stored_and_only_changes_are_reported() {
        let (current, receiver) = watch::channel(Current::default());
        let members = |term, seq, coordinator| Members {
            term: Term(term),
            seq,
            coordinator: MemberId(coordinator),
            rows: Vec::new(),
            removed_fronts: Vec::new(),
        };
        update(&current, members(2, 5, 1));
        assert!(receiver.has_changed().unwrap());
        let mut receiver = receiver;
        receiver.mark_unchanged();
        update(&current, members(2, 6, 1));
        update(&current, members(1, 9, 2));
        assert!(!receiver.has_changed().unwrap());
        assert_eq!(*receiver.borrow().members, members(2, 6, 1));
        update(&current, members(3, 1, 2));
        assert!(receiver.has_changed().unwrap());
    }
}
