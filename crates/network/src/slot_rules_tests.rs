//! Tests that replayed rules of a slot equal the rules that `nft` creates, in network
//! namespaces.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

#![allow(clippy::unwrap_used, clippy::panic)]
use super::*;
use crate::device;
use crate::test_slot::{in_slot, list, policy};
use jiffy_engine_api::NetworkRules;

/// Returns the default rules of a slot, with IPv6 if `ipv6` is true.
fn default_rules(ipv6: bool) -> SlotRules {
    SlotRules::new(&policy(&NetworkRules::default(), ipv6), 4096, true)
}

/// Returns whether a replay was compared with the recording.
fn is_verified(rules: &SlotRules) -> bool {
    matches!(
        &*rules.recording.lock(),
        Recording::Recorded {
            is_verified: true,
            ..
        }
    )
}

#[test]
fn replayed_rules_equal_the_rules_of_nft() {
    for ipv6 in [false, true] {
        let rules = default_rules(ipv6);
        let apply = || {
            rules.apply().unwrap();
            list()
        };
        let Some(by_nft) = in_slot(apply) else {
            return;
        };
        assert!(by_nft.contains("jiffy_guard") && !is_verified(&rules));
        for _ in 0..3 {
            let replayed = in_slot(apply).unwrap();
            assert!(is_verified(&rules), "{:?}", rules.recording);
            assert_eq!(by_nft, replayed);
        }
    }
}

#[test]
fn rules_that_cannot_be_replayed_are_applied_by_nft() {
    let expected = in_slot(|| {
        default_rules(true).apply().unwrap();
        list()
    });
    let Some(expected) = expected else {
        return;
    };
    let others = |script: &str| {
        in_slot(|| {
            let _other = device::tap("other0").unwrap();
            program::nft(script).unwrap();
            RecordedRuleset::read(RulesetScope::Everything).unwrap()
        })
    };
    // Neither ruleset can be replayed. The first has a device that slots do not have, so the kernel
    // rejects it. The second is applied, but the comparison with the rules read back fails.
    for chain in [
        "table netdev other { chain c { type filter hook ingress device \"other0\" priority 0; }; }",
        "table inet other { chain c { counter; }; }",
    ] {
        let script = format!("{chain}\n");
        let ruleset = others(&script);
        let rules = default_rules(true);
        let ruleset = Arc::new(ruleset.unwrap());
        let is_verified = false;
        *rules.recording.lock() = Recording::Recorded {
            ruleset,
            is_verified,
        };
        // The existing table simulates a kernel on which replayed rules differ from the recorded
        // ones.
        let ruleset = in_slot(|| {
            program::nft("table inet before { chain c { }; }").unwrap();
            rules.apply().unwrap();
            list()
        });
        assert_eq!(ruleset.unwrap(), expected, "{:?}", rules.recording);
        assert!(matches!(&*rules.recording.lock(), Recording::Unsupported));
        let again = in_slot(|| {
            rules.apply().unwrap();
            list()
        });
        assert_eq!(again.unwrap(), expected);
    }
}
