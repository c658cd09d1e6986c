//! Shares of a budget under random use by many members (hosts). A share is the part of an API key's
//! limit that one member may use.

use crate::support::Random;
use jiffy_scheduler::{BudgetShares, MemberId};
use std::collections::BTreeMap;

/// Members that admit sandboxes within their shares never exceed the limit together, and can use
/// all of it. Each step creates or ends one sandbox of a random member.
#[test]
fn members_never_exceed_a_limit_and_reach_it() {
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let limit = 100 + u64::from(random.below(10_000));
        let members = 1 + random.below(16);
        let mut shares = BudgetShares::new(limit);
        let mut in_use: BTreeMap<u32, u64> = BTreeMap::new();
        let mut rejected = false;
        for _ in 0..40_000 {
            let member = random.below(members);
            let used = in_use.entry(member).or_default();
            if random.below(4) == 0 && *used > 0 {
                *used -= 1;
                shares.report(MemberId(member), shares.share(MemberId(member)), *used);
                continue;
            }
            if *used == shares.share(MemberId(member)) {
                shares.hand_out(MemberId(member), 1, members);
            }
            if *used == shares.share(MemberId(member)) {
                // The coordinator recalls unused parts of other shares.
                for (other, amount) in shares.recall(1) {
                    assert!(shares.take_back(other, amount) <= amount);
                }
                shares.hand_out(MemberId(member), 1, members);
            }
            if *used < shares.share(MemberId(member)) {
                *used += 1;
                shares.report(MemberId(member), shares.share(MemberId(member)), *used);
            } else {
                rejected = true;
                assert_eq!(
                    in_use.values().sum::<u64>(),
                    limit,
                    "seed {seed}: rejected too early"
                );
            }
            assert!(shares.granted() <= limit, "seed {seed}");
        }
        assert!(in_use.values().sum::<u64>() <= limit);
        assert!(rejected, "seed {seed}: the limit was never reached");
    }
}
