#![allow(clippy::unwrap_used, clippy::panic)]
use super::*;
use crate::device;
use crate::policy::HostReachability;
use jiffy_engine::NetworkRules;
use nix::sched::{CloneFlags, unshare};
use std::thread;

/// Runs `work` on a thread in a network namespace of its own with the devices of a slot, if this
/// machine and user can make one.
fn in_slot<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    let able = nix::unistd::Uid::effective().is_root() && program::find("nft").is_some();
    if !able {
        eprintln!("skipped: network namespaces and `nft` are needed");
        return None;
    }
    thread::scope(|scope| {
        let inside = || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            let _tap = device::tap(TAP).unwrap();
            work()
        };
        Some(scope.spawn(inside).join().unwrap())
    })
}

fn policy(rules: &NetworkRules, ipv6: bool) -> EgressPolicy {
    let reach = HostReachability {
        ipv6,
        ..HostReachability::default()
    };
    EgressPolicy::new(rules, &reach).unwrap()
}

fn usual(ipv6: bool) -> SlotRules {
    SlotRules::new(&policy(&NetworkRules::default(), ipv6), 4096, true)
}

fn listed() -> String {
    program::run("nft", &["-j", "list", "ruleset"], "").unwrap()
}

/// `nft`'s list without the numbers that differ from slot to slot.
fn without_handles(list: &str) -> String {
    let mut value: serde_json::Value = serde_json::from_str(list).unwrap();
    for object in value["nftables"].as_array_mut().unwrap() {
        for (_, object) in object.as_object_mut().unwrap() {
            object.as_object_mut().unwrap().remove("handle");
        }
    }
    serde_json::to_string_pretty(&value).unwrap()
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
            without_handles(&listed())
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
        without_handles(&listed())
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
            without_handles(&listed())
        });
        assert_eq!(made.unwrap(), expected, "{:?}", rules.recording);
        assert!(matches!(&*rules.recording.lock(), Recording::Useless));
        let again = in_slot(|| {
            rules.apply().unwrap();
            without_handles(&listed())
        });
        assert_eq!(again.unwrap(), expected);
    }
}
