//! Shares of a budget: parts of an owner's limit that members may use without a request. An *owner*
//! is an API key. A *member* is the daemon of one host of a fleet, and the *coordinator* is the
//! member that divides the limits.
//!
//! The coordinator hands out shares, whose sum never exceeds the limit. Members can therefore admit
//! sandboxes without a request to the coordinator, and the limit holds while members and
//! coordinator cannot reach each other.

use std::collections::BTreeMap;

/// Minimum amount by which [`BudgetShares::hand_out`] increases a share, if that much is free.
pub const MIN_SHARE: u64 = 8;

/// Number of a member of the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberId(pub u32);

/// Share of one member.
#[derive(Debug, Clone, Copy, Default)]
struct Share {
    /// Amount that the member may use.
    granted: u64,
    /// Amount that its sandboxes use.
    in_use: u64,
}

/// Shares of the budget of one owner.
#[derive(Debug)]
pub struct BudgetShares {
    /// Maximum sum of all shares.
    limit: u64,
    shares: BTreeMap<MemberId, Share>,
    /// False until a new coordinator knows the shares of its predecessor from the reports of all
    /// members. Until then it grants no share.
    is_complete: bool,
}

impl BudgetShares {
    /// Creates the shares of a new budget, of which no member has a share.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self {
            limit,
            shares: BTreeMap::new(),
            is_complete: true,
        }
    }

    /// Creates the shares of a coordinator that replaces another one. [`Self::hand_out`] grants
    /// no share before [`Self::complete`] is called.
    #[must_use]
    pub fn of_new_coordinator(limit: u64) -> Self {
        Self {
            is_complete: false,
            ..Self::new(limit)
        }
    }

    /// Permits grants by a new coordinator. The caller must know that all members have reported
    /// their shares, or that the shares of silent members have expired.
    pub fn complete(&mut self) {
        self.is_complete = true;
    }

    /// Returns the limit.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Changes the limit. If it is below the sum of the shares, no share grows until members have
    /// returned enough ([`Self::recall`]).
    pub fn set_limit(&mut self, limit: u64) {
        self.limit = limit;
    }

    /// Returns the sum of all shares.
    #[must_use]
    pub fn granted(&self) -> u64 {
        self.shares
            .values()
            .fold(0, |sum, share| sum.saturating_add(share.granted))
    }

    /// Returns the share of a member.
    #[must_use]
    pub fn share(&self, member: MemberId) -> u64 {
        self.shares.get(&member).map_or(0, |share| share.granted)
    }

    /// Records the share that a member holds and the part in use, as the member reports them. A
    /// member never holds less than it uses.
    pub fn report(&mut self, member: MemberId, granted: u64, in_use: u64) {
        self.shares.insert(
            member,
            Share {
                granted: granted.max(in_use),
                in_use,
            },
        );
    }

    /// Hands out a share to a member that needs `wanted` more than it holds. `members` is the
    /// number of members. Returns the amount by which the share grew, which may be less than
    /// `wanted`.
    ///
    /// A share is larger than requested while much of the limit is free: a quarter of the free
    /// amount is divided among the members. Members then rarely need another request.
    pub fn hand_out(&mut self, member: MemberId, wanted: u64, members: u32) -> u64 {
        let free = self.free();
        let ample = (free / (4 * u64::from(members.max(1)))).max(MIN_SHARE);
        let amount = wanted.max(ample).min(free);
        let share = self.shares.entry(member).or_default();
        share.granted += amount;
        amount
    }

    /// Takes back an unused part of a member's share that the member has returned. Returns the
    /// amount that was taken back: a part in use stays.
    pub fn take_back(&mut self, member: MemberId, amount: u64) -> u64 {
        let Some(share) = self.shares.get_mut(&member) else {
            return 0;
        };
        let amount = amount.min(share.granted - share.in_use);
        share.granted -= amount;
        if share.granted == 0 {
            self.shares.remove(&member);
        }
        amount
    }

    /// Removes a member whose sandboxes no longer count.
    pub fn remove(&mut self, member: MemberId) {
        self.shares.remove(&member);
    }

    /// Returns members that should return unused parts of their shares, and the amounts, so that
    /// `wanted` becomes free. Members with the largest unused parts are first.
    #[must_use]
    pub fn recall(&self, wanted: u64) -> Vec<(MemberId, u64)> {
        let over_limit = self.granted().saturating_sub(self.limit);
        let mut missing = wanted
            .saturating_sub(self.free())
            .saturating_add(over_limit);
        let unused = |share: &Share| share.granted - share.in_use;
        let mut members: Vec<_> = self.shares.iter().map(|(&m, s)| (unused(s), m)).collect();
        members.sort_unstable_by(|a, b| b.cmp(a));
        let mut recalled = Vec::new();
        for (unused, member) in members {
            let amount = unused.min(missing);
            if amount == 0 {
                break;
            }
            missing -= amount;
            recalled.push((member, amount));
        }
        recalled
    }

    fn free(&self) -> u64 {
        if self.is_complete {
            self.limit.saturating_sub(self.granted())
        } else {
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: MemberId = MemberId(1);
    const B: MemberId = MemberId(2);

    #[test]
    fn shares_are_ample_while_much_is_free_and_never_exceed_the_limit() {
        let mut shares = BudgetShares::new(1000);
        // A quarter of the free 1,000, divided among two members.
        assert_eq!(shares.hand_out(A, 1, 2), 125);
        assert_eq!(shares.hand_out(B, 900, 2), 875);
        assert_eq!(shares.hand_out(A, 1, 2), 0);
        assert_eq!(shares.granted(), 1000);
    }

    #[test]
    fn the_rest_of_a_limit_is_handed_out_completely() {
        let mut shares = BudgetShares::new(10);
        // The minimum, and then the rest.
        assert_eq!(shares.hand_out(A, 1, 100), 8);
        assert_eq!(shares.hand_out(B, 1, 100), 2);
    }

    #[test]
    fn a_part_in_use_is_not_taken_back() {
        let mut shares = BudgetShares::new(20);
        shares.report(A, 12, 5);
        assert_eq!(shares.take_back(A, 100), 7);
        assert_eq!(shares.share(A), 5);
        assert_eq!(shares.take_back(B, 1), 0);
    }

    #[test]
    fn a_new_coordinator_hands_out_nothing_before_it_knows_all_shares() {
        let mut shares = BudgetShares::of_new_coordinator(20);
        assert_eq!(shares.hand_out(A, 4, 2), 0);
        shares.report(B, 15, 15);
        shares.complete();
        assert_eq!(shares.hand_out(A, 8, 2), 5);
    }

    #[test]
    fn a_lower_limit_recalls_unused_parts() {
        let mut shares = BudgetShares::new(100);
        shares.report(A, 60, 10);
        shares.report(B, 40, 38);
        shares.set_limit(50);
        assert_eq!(shares.hand_out(A, 1, 2), 0);
        // The shares exceed the limit by 50. A has 50 unused, and B has 2.
        assert_eq!(shares.recall(0), [(A, 50)]);
        assert_eq!(shares.recall(10), [(A, 50), (B, 2)]);
    }

    #[test]
    fn an_excessive_report_is_bounded_by_saturation() {
        let mut shares = BudgetShares::new(100);
        shares.report(A, u64::MAX, u64::MAX);
        shares.report(B, u64::MAX, 0);
        assert_eq!(shares.granted(), u64::MAX);
        assert_eq!(shares.hand_out(A, 1, 2), 0);
    }
}
