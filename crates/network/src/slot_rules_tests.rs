#![allow(clippy::unwrap_used, clippy::panic)]
use super::*;
use crate::device;
use crate::test_slot::{in_slot, list, policy};
use jiffy_engine_api::NetworkRules;

fn usual(ipv6: bool) -> SlotRules {
    SlotRules::new(&policy(&NetworkRules::default(), ipv6), 4096, true)
}

fn is_proven(rules: &SlotRules) -> bool {
    matches!(
        &*rules.recording.lock(),
        Recording::Made { proven: true, .. }
    )
}

#[test]
fn replayed_rules_are_those_that_nft_makes() {
    for ipv6 in [false, true] {
        let rules = usual(ipv6);
        let apply = || {
            rules.apply().unwrap();
            list()
        };
        let Some(by_nft) = in_slot(apply) else {
            return;
        };
        assert!(by_nft.contains("jiffy_guard") && !is_proven(&rules));
        for _ in 0..3 {
            let replayed = in_slot(apply).unwrap();
            assert!(is_proven(&rules), "{:?}", rules.recording);
            assert_eq!(by_nft, replayed);
        }
    }
}

#[test]
fn rules_that_cannot_be_replayed_are_made_by_nft() {
    let expected = in_slot(|| {
        usual(true).apply().unwrap();
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
    // Of a device that slots do not have, so that it is refused; and one that is not all there is.
    for chain in [
        "table netdev other { chain c { type filter hook ingress device \"other0\" priority 0; }; }",
        "table inet other { chain c { counter; }; }",
    ] {
        let script = format!("{chain}\n");
        let ruleset = others(&script);
        let rules = usual(true);
        let ruleset = Arc::new(ruleset.unwrap());
        let proven = false;
        *rules.recording.lock() = Recording::Made { ruleset, proven };
        // As if another kernel had made something else of it.
        let made = in_slot(|| {
            program::nft("table inet before { chain c { }; }").unwrap();
            rules.apply().unwrap();
            list()
        });
        assert_eq!(made.unwrap(), expected, "{:?}", rules.recording);
        assert!(matches!(&*rules.recording.lock(), Recording::Useless));
        let again = in_slot(|| {
            rules.apply().unwrap();
            list()
        });
        assert_eq!(again.unwrap(), expected);
    }
}
