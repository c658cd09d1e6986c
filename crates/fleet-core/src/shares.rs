//! Shares of budgets that this member holds. A budget is the limit of an API key for its sandboxes
//! on all hosts, and a share is the part that one member may use. The daemon admits sandboxes
//! within its shares without a request to the coordinator. Heartbeats report the shares, and
//! acknowledgements grant or recall parts of them.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead.

use crate::ids::Millis;
use crate::message::{
    BudgetOwner, Grant, GrantNumber, MAX_SHARES_PER_MESSAGE, Recall, ShareReport,
};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Time after which an owner without a share is removed. Until then the number of its last grant is
/// retained, so that a late copy of an older grant is recognised.
const FORGOTTEN_MS: u64 = 600_000;

/// Share of one budget on this member.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    /// Amount that this member may use.
    share: u64,
    /// Amount that its sandboxes use.
    in_use: u64,
    /// Number of the latest grant.
    grant: GrantNumber,
    /// Amount that this member needs beyond its share. 0 without a request.
    wanted: u64,
    /// Time at which a sandbox was last admitted, rejected or released.
    unused_since: Millis,
}

/// Shares of a member, for the parts of a daemon that admit operations. Clones are the same shares.
#[derive(Debug, Clone, Default)]
pub struct SharedShares(Arc<Mutex<MemberShares>>);

impl SharedShares {
    /// Locks the shares. The caller must not wait for other members meanwhile.
    pub fn lock(&self) -> MutexGuard<'_, MemberShares> {
        self.0.lock()
    }
}

/// Shares of a member. The member admits sandboxes within its shares without a request.
#[derive(Debug, Default)]
pub struct MemberShares {
    owners: BTreeMap<BudgetOwner, Held>,
    /// True if sandboxes that former processes of the daemon started are not counted yet.
    is_incomplete: bool,
}

impl MemberShares {
    /// Sets whether the sandboxes that former processes started are counted. Until they are, the
    /// coordinator does not conclude from a report that a share is unused.
    pub fn set_complete(&mut self, is_complete: bool) {
        self.is_incomplete = !is_complete;
    }

    /// Returns whether the sandboxes of former processes are counted.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        !self.is_incomplete
    }

    /// Replaces the part of a share that is in use. The share grows if it is smaller than this
    /// part, because the sandboxes run already. Returns false for a new owner if a report has the
    /// maximum number of owners.
    pub fn set_in_use(&mut self, now: Millis, owner: &BudgetOwner, in_use: u64) -> bool {
        let is_known = self.owners.contains_key(owner);
        if !is_known && in_use == 0 {
            return true;
        }
        if !is_known && self.owners.len() >= MAX_SHARES_PER_MESSAGE {
            return false;
        }
        let held = self.owners.entry(owner.clone()).or_default();
        if held.in_use != in_use {
            held.unused_since = now;
        }
        held.in_use = in_use;
        held.share = held.share.max(in_use);
        true
    }

    /// Returns the owners with a share or a request.
    pub fn owners(&self) -> impl Iterator<Item = &BudgetOwner> {
        self.owners.keys()
    }

    /// Admits `amount` within the share of an owner. Returns false if the share is too small: the
    /// missing amount is then requested with the next heartbeat. Also returns false for a new owner
    /// if a report has the maximum number of owners.
    pub fn admit(&mut self, now: Millis, owner: &BudgetOwner, amount: u64) -> bool {
        if self.owners.len() >= MAX_SHARES_PER_MESSAGE && !self.owners.contains_key(owner) {
            return false;
        }
        let held = self.owners.entry(owner.clone()).or_default();
        held.unused_since = now;
        let in_use = held.in_use.saturating_add(amount);
        if in_use > held.share {
            held.wanted = held.wanted.max(in_use - held.share);
            return false;
        }
        held.in_use = in_use;
        true
    }

    /// Counts `amount` that existed before this process started, even beyond the share.
    pub fn count(&mut self, owner: &BudgetOwner, amount: u64) {
        let held = self.owners.entry(owner.clone()).or_default();
        held.in_use = held.in_use.saturating_add(amount);
        held.share = held.share.max(held.in_use);
    }

    /// Releases `amount` of an owner.
    pub fn release(&mut self, now: Millis, owner: &BudgetOwner, amount: u64) {
        if let Some(held) = self.owners.get_mut(owner) {
            held.in_use = held.in_use.saturating_sub(amount);
            held.unused_since = now;
        }
    }

    /// Returns the share of an owner and the part in use.
    #[must_use]
    pub fn share(&self, owner: &BudgetOwner) -> (u64, u64) {
        self.owners
            .get(owner)
            .map_or((0, 0), |held| (held.share, held.in_use))
    }

    /// Applies a grant. Returns false if the grant is older than the share.
    pub fn apply(&mut self, now: Millis, grant: &Grant) -> bool {
        let held = self.owners.entry(grant.owner.clone()).or_default();
        if grant.number <= held.grant {
            return false;
        }
        held.grant = grant.number;
        held.share = grant.share.max(held.in_use);
        held.wanted = 0;
        held.unused_since = now;
        true
    }

    /// Returns unused parts that the coordinator recalls.
    pub fn recall(&mut self, recall: &Recall) {
        if let Some(held) = self.owners.get_mut(&recall.owner) {
            held.share -= recall.amount.min(held.share - held.in_use);
        }
    }

    /// Returns all unused parts of shares that were not used for `unused_ms`.
    pub(crate) fn return_unused(&mut self, now: Millis, unused_ms: u64) {
        for held in self.owners.values_mut() {
            if now.since(held.unused_since) >= unused_ms {
                held.share = held.in_use;
                held.wanted = 0;
            }
        }
    }

    /// Returns all unused parts, because the coordinator does not count them in a new epoch.
    pub(crate) fn return_all_unused(&mut self) {
        for held in self.owners.values_mut() {
            held.share = held.in_use;
            held.wanted = 0;
        }
    }

    /// Returns the report for a heartbeat.
    pub fn report(&mut self, now: Millis) -> Vec<ShareReport> {
        self.owners.retain(|_, held| {
            held.share > 0 || held.wanted > 0 || now.since(held.unused_since) < FORGOTTEN_MS
        });
        self.owners
            .iter()
            .map(|(owner, held)| ShareReport {
                owner: owner.clone(),
                share: held.share,
                in_use: held.in_use,
                grant: held.grant,
                wanted: held.wanted,
            })
            .take(MAX_SHARES_PER_MESSAGE)
            .collect()
    }
}
