//! Shares of budgets that the coordinator has granted to members.
//!
//! A budget is the limit of an API key for the sandboxes on all hosts. The *owner* of a budget is
//! this key. A *share* is the part that a member may use without a request. A *grant* is a message
//! with the new size of a share, so that a lost or repeated message changes nothing. A *recall*
//! requests a member to return an unused part.
//!
//! The sum of shares must not exceed the limit, even if messages are lost. Until a member reports
//! that it has applied the latest grant, the coordinator counts the larger of grant and reported
//! share.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor.

use crate::ids::{MemberId, Term};
use crate::message::{
    BudgetNeed, BudgetOwner, Grant, GrantNumber, MAX_SHARES_PER_MESSAGE, Recall, ShareReport,
};
use jiffy_scheduler::BudgetShares;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Budget of one owner.
#[derive(Debug)]
struct Budget {
    shares: BudgetShares,
    /// Latest grant of each member in this term.
    grants: BTreeMap<MemberId, GrantNumber>,
    /// Unused part of each member's share: according to its last report, with later grants added
    /// and later placements subtracted.
    unused: BTreeMap<MemberId, u64>,
}

/// Budgets of all owners.
#[derive(Debug)]
pub(crate) struct Budgets {
    term: Term,
    /// Budgets by owner.
    owners: BTreeMap<BudgetOwner, Budget>,
    /// Limits of owners, also of those without a share.
    limits: BTreeMap<BudgetOwner, u64>,
    /// Members whose shares are unknown since the takeover.
    unreported: BTreeSet<MemberId>,
    /// Members that have registered since their last complete report. Shares that their next
    /// complete report does not contain are removed.
    restarted: BTreeSet<MemberId>,
    /// Owners whose latest grant a member has not reported as applied.
    pending: BTreeMap<MemberId, BTreeSet<BudgetOwner>>,
    /// Amounts that members will be requested to return with the next acknowledgement.
    recalls: BTreeMap<MemberId, BTreeMap<BudgetOwner, u64>>,
    next_grant: u64,
}

impl Budgets {
    /// Creates the budgets of a new coordinator. No share is granted before all members in
    /// `unreported` have reported theirs or are dead.
    pub fn new(
        term: Term,
        limits: BTreeMap<BudgetOwner, u64>,
        unreported: BTreeSet<MemberId>,
    ) -> Self {
        Self {
            term,
            owners: BTreeMap::new(),
            limits,
            unreported,
            restarted: BTreeSet::new(),
            pending: BTreeMap::new(),
            recalls: BTreeMap::new(),
            next_grant: 1,
        }
    }

    /// Permits grants, also if some members have not reported their shares.
    pub fn complete(&mut self) {
        self.unreported.clear();
        self.owners
            .values_mut()
            .for_each(|budget| budget.shares.complete());
    }

    /// Changes the limit of an owner. `None` removes the limit: no share grows, and [`Self::admit`]
    /// admits every sandbox.
    pub fn set_limit(&mut self, owner: &BudgetOwner, limit: Option<u64>) {
        match limit {
            Some(limit) => self.limits.insert(owner.clone(), limit),
            None => self.limits.remove(owner),
        };
        let Some(budget) = self.owners.get_mut(owner) else {
            return;
        };
        budget.shares.set_limit(limit.unwrap_or(0));
        if limit.is_some_and(|limit| budget.shares.granted() > limit) {
            // 0: recall only the amount by which the shares exceed the new limit.
            let recalled = budget.shares.recall(0);
            self.queue_recalls(owner, recalled);
        }
    }

    /// Returns the owners whose shares this coordinator counts.
    pub fn owners(&self) -> impl Iterator<Item = &BudgetOwner> {
        self.owners.keys()
    }

    /// Removes the shares of a member whose sandboxes no longer count.
    pub fn remove(&mut self, member: MemberId) {
        for budget in self.owners.values_mut() {
            budget.shares.remove(member.budget());
            budget.grants.remove(&member);
            budget.unused.remove(&member);
        }
        self.pending.remove(&member);
        self.recalls.remove(&member);
        // A dead member reports no shares: grants must not wait for its report.
        self.reported(member);
    }

    /// Called when a member was registered: forgets the grants to its former process. The first
    /// complete report of the new process contains all shares that the member still holds.
    pub fn restart(&mut self, member: MemberId) {
        for budget in self.owners.values_mut() {
            budget.grants.remove(&member);
        }
        self.pending.remove(&member);
        self.restarted.insert(member);
    }

    /// Applies the reports of a heartbeat. Returns grants and recalls for its acknowledgement.
    ///
    /// The caller must send the grants: a member reports its former share until it has applied its
    /// latest grant. A lost grant is repeated with the next acknowledgement. A lost recall is not
    /// repeated: the next request that exceeds the free amount recalls shares again. A report that
    /// is not complete lacks sandboxes that the member has not counted yet.
    pub fn report(
        &mut self,
        member: MemberId,
        (reports, is_complete): (&[ShareReport], bool),
        members: u32,
    ) -> (Vec<Grant>, Vec<Recall>) {
        if is_complete && self.restarted.remove(&member) {
            let reported: BTreeSet<_> = reports.iter().map(|report| &report.owner).collect();
            for (owner, budget) in &mut self.owners {
                // A grant since the registration may be in transit, so the share is retained.
                if !reported.contains(owner) && !budget.grants.contains_key(&member) {
                    budget.shares.remove(member.budget());
                }
            }
        }
        // Apply all reports first: the last missing report of a new coordinator permits grants.
        for report in reports {
            self.apply(member, report);
        }
        if is_complete {
            self.reported(member);
        }
        for report in reports {
            // Ignore demand from before the latest grant, which may have satisfied it.
            if report.wanted > 0 && self.is_current(member, report) {
                self.hand_out(&report.owner, member, report.wanted, members);
            }
        }
        let owners = self.pending.get(&member).cloned().unwrap_or_default();
        let grants = owners
            .iter()
            .filter_map(|owner| self.latest_grant(owner, member))
            .take(MAX_SHARES_PER_MESSAGE)
            .collect();
        let mut recalls = Vec::new();
        if let Some(waiting) = self.recalls.get_mut(&member) {
            // The rest follows with the next acknowledgements.
            while recalls.len() < MAX_SHARES_PER_MESSAGE
                && let Some((owner, amount)) = waiting.pop_first()
            {
                recalls.push(Recall { owner, amount });
            }
            if waiting.is_empty() {
                self.recalls.remove(&member);
            }
        }
        (grants, recalls)
    }

    /// Ensures that a member may use further amounts of budgets. `members` is the number of
    /// members. Returns the member's latest grants of this term, which the request for the sandbox
    /// must contain. Owners without a limit have no grants.
    ///
    /// # Errors
    /// Returns [`BudgetExhausted`] if a limit is reached or unknown shares may reach it. No budget
    /// is changed then.
    pub fn admit(
        &mut self,
        needs: &[BudgetNeed],
        member: MemberId,
        members: u32,
    ) -> Result<Vec<Grant>, BudgetExhausted> {
        for need in needs {
            self.require(need, member, members)?;
        }
        let mut grants = Vec::new();
        for need in needs {
            let budget = self.owners.get_mut(&need.owner);
            if let Some(unused) = budget.and_then(|budget| budget.unused.get_mut(&member)) {
                *unused = unused.saturating_sub(need.amount);
            }
            if self.limits.contains_key(&need.owner) {
                grants.extend(self.latest_grant(&need.owner, member));
            }
        }
        Ok(grants)
    }

    /// Increases the unused part of a member's share to an amount, if it is smaller.
    fn require(
        &mut self,
        need: &BudgetNeed,
        member: MemberId,
        members: u32,
    ) -> Result<(), BudgetExhausted> {
        if !self.limits.contains_key(&need.owner) {
            return Ok(());
        }
        let unused = |budget: &Budget| budget.unused.get(&member).copied().unwrap_or(0);
        let missing = need.amount.saturating_sub(unused(self.budget(&need.owner)));
        if missing > 0 {
            self.hand_out(&need.owner, member, missing, members);
        }
        let limit = self.limits.get(&need.owner).copied().unwrap_or(0);
        let budget = self.budget(&need.owner);
        // After the limit was lowered, shares exceed it until their unused parts are returned.
        // These parts must not be used.
        let all_unused = budget
            .unused
            .values()
            .fold(0, |sum: u64, n| sum.saturating_add(*n));
        let in_use = budget.shares.granted().saturating_sub(all_unused);
        let is_within = in_use.saturating_add(need.amount) <= limit;
        if unused(budget) >= need.amount && is_within {
            return Ok(());
        }
        Err(self.exhausted(&need.owner, member))
    }

    /// Returns whether a member holds enough unused shares for all needs.
    pub fn holds(&self, needs: &[BudgetNeed], member: MemberId) -> bool {
        needs.iter().all(|need| {
            let budget = self.owners.get(&need.owner);
            let unused = budget.and_then(|budget| budget.unused.get(&member));
            !self.limits.contains_key(&need.owner)
                || unused.is_some_and(|&unused| unused >= need.amount)
        })
    }

    /// Increases the share of a member that needs `wanted` more than it holds. Returns the latest
    /// grant of the member.
    ///
    /// # Errors
    /// Returns [`BudgetExhausted`] if nothing is free. Unused shares of other members are then
    /// recalled.
    pub fn request(
        &mut self,
        need: &BudgetNeed,
        member: MemberId,
        members: u32,
    ) -> Result<Option<Grant>, BudgetExhausted> {
        // The caller has already applied the owner's limit ([`Self::set_limit`]). A request with
        // the amount 0 only serves this purpose: no share grows.
        if need.amount == 0
            || self.hand_out(&need.owner, member, need.amount, members) >= need.amount
        {
            return Ok(self.latest_grant(&need.owner, member));
        }
        Err(self.exhausted(&need.owner, member))
    }

    /// Returns the error for a member whose share cannot grow. The error states whether other
    /// members hold unused parts of the budget.
    fn exhausted(&mut self, owner: &BudgetOwner, member: MemberId) -> BudgetExhausted {
        let is_known = self.unreported.is_empty();
        let unused = self.budget(owner).unused.iter();
        BudgetExhausted {
            is_unused_elsewhere: unused
                .filter(|(other, _)| **other != member)
                .any(|(_, n)| *n > 0),
            owner: owner.clone(),
            is_known,
        }
    }

    /// Stores the share that a member reports. If the member has not applied its latest grant,
    /// counts the larger of grant and reported share.
    fn apply(&mut self, member: MemberId, report: &ShareReport) {
        let is_current = self.is_current(member, report);
        if is_current && let Some(pending) = self.pending.get_mut(&member) {
            pending.remove(&report.owner);
        }
        let budget = self.budget(&report.owner);
        let granted = budget.shares.share(member.budget());
        if is_current {
            budget
                .shares
                .report(member.budget(), report.share, report.in_use);
        } else {
            let share = report.share.max(granted);
            budget.shares.report(member.budget(), share, report.in_use);
        }
        let unused = budget
            .shares
            .share(member.budget())
            .saturating_sub(report.in_use);
        budget.unused.insert(member, unused);
    }

    /// Returns whether the member has applied the latest grant.
    fn is_current(&self, member: MemberId, report: &ShareReport) -> bool {
        let budget = self.owners.get(&report.owner);
        let latest = budget.and_then(|budget| budget.grants.get(&member));
        latest.is_none_or(|&latest| report.grant >= latest)
    }

    /// Increases the share of a member that needs `wanted` more than it holds. `members` is the
    /// number of members, among which the free amount is divided. Returns the amount by which the
    /// share grew. If it is less than `wanted`, unused parts of other shares are recalled.
    fn hand_out(
        &mut self,
        owner: &BudgetOwner,
        member: MemberId,
        wanted: u64,
        members: u32,
    ) -> u64 {
        let number = GrantNumber {
            term: self.term,
            number: self.next_grant,
        };
        let budget = self.budget(owner);
        let granted = budget.shares.hand_out(member.budget(), wanted, members);
        if granted > 0 {
            budget.grants.insert(member, number);
            *budget.unused.entry(member).or_default() += granted;
        }
        let recalled = if granted < wanted {
            budget.shares.recall(wanted - granted)
        } else {
            Vec::new()
        };
        if granted > 0 {
            self.next_grant += 1;
            self.pending
                .entry(member)
                .or_default()
                .insert(owner.clone());
        }
        let others = recalled
            .into_iter()
            .filter(|(other, _)| other.0 != member.0);
        self.queue_recalls(owner, others);
        granted
    }

    /// Stores the amounts that members must return. The next answer to each member's heartbeat
    /// contains its amount.
    fn queue_recalls(
        &mut self,
        owner: &BudgetOwner,
        recalled: impl IntoIterator<Item = (jiffy_scheduler::MemberId, u64)>,
    ) {
        for (member, amount) in recalled {
            let recalls = self.recalls.entry(MemberId(member.0)).or_default();
            recalls.insert(owner.clone(), amount);
        }
    }

    /// Returns the latest grant of a member in this term, whether or not the member has applied it.
    /// `None` if the member has no grant of this term.
    fn latest_grant(&self, owner: &BudgetOwner, member: MemberId) -> Option<Grant> {
        let budget = self.owners.get(owner)?;
        let &number = budget.grants.get(&member)?;
        Some(Grant {
            owner: owner.clone(),
            number,
            share: budget.shares.share(member.budget()),
        })
    }

    /// Marks the shares of a member as known. After the last unreported member, grants are
    /// permitted.
    fn reported(&mut self, member: MemberId) {
        if self.unreported.remove(&member) && self.unreported.is_empty() {
            self.complete();
        }
    }

    /// Returns the budget of an owner, and creates it if necessary. Until all members have reported
    /// their shares to a new coordinator, a created budget grants nothing.
    fn budget(&mut self, owner: &BudgetOwner) -> &mut Budget {
        let limit = self.limits.get(owner).copied().unwrap_or(0);
        let is_complete = self.unreported.is_empty();
        self.owners.entry(owner.clone()).or_insert_with(|| Budget {
            shares: if is_complete {
                BudgetShares::new(limit)
            } else {
                BudgetShares::of_new_coordinator(limit)
            },
            grants: BTreeMap::new(),
            unused: BTreeMap::new(),
        })
    }
}

/// The budget of an owner is exhausted, or shares of members are not known yet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("the budget `{}` is exhausted{}", owner.0, reason(*.is_known, *.is_unused_elsewhere))]
pub struct BudgetExhausted {
    /// Owner of the budget.
    pub owner: BudgetOwner,
    /// False while the shares of some members are not known, after a change of the coordinator.
    pub is_known: bool,
    /// Other members hold unused parts, which were recalled.
    pub is_unused_elsewhere: bool,
}

/// Returns the end of the error message. The times follow from `Timing::PRODUCTION`. 12 s is the
/// grace period of a new coordinator, after which silent members are declared dead. 5 s exceeds two
/// heartbeat intervals: a recall reaches the member with the answer to one heartbeat, and the next
/// one reports the smaller share.
fn reason(is_known: bool, is_unused_elsewhere: bool) -> &'static str {
    match (is_known, is_unused_elsewhere) {
        (false, _) => ", or shares of members are not known yet: retry in 12 s",
        (true, true) => ": unused shares of other hosts are being recalled, retry in 5 s",
        (true, false) => ": release resources or raise the limit",
    }
}
