//! Tests that a replayed table equals the table that `nft` creates, in network namespaces of
//! the tests.
//!
//! `nft` compiles the table of a policy once. The kernel messages that it sends are recorded. They
//! are *replayed*, without `nft`, in the network namespaces of other sandboxes with the same
//! policy.

#![allow(clippy::unwrap_used)]
use super::*;
use crate::test_slot::{in_slot, list, policy};
use jiffy_engine_api::NetworkRules;

/// Returns scripts of policies of every kind.
fn scripts() -> Vec<String> {
    let text = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    let only = |allow: &[&str]| NetworkRules {
        internet: false,
        allow_out: text(allow),
        ..NetworkRules::default()
    };
    let rules = [
        only(&[]),
        only(&["1.1.1.1", "8.8.8.0/24", "8.8.9.0/24", "2a00:1::/32"]),
        only(&["example.com", "*.example.org", "9.9.9.9"]),
        NetworkRules {
            owner: Some("k".to_owned()),
            ..only(&["api.jiffy.internal", "example.com"])
        },
        NetworkRules {
            internet: true,
            owner: Some("k".to_owned()),
            ..only(&["api.jiffy.internal"])
        },
        NetworkRules {
            deny_out: text(&["5.0.0.0/8", "2a00:2::/32"]),
            allow_out: text(&["api.example.com"]),
            egress_mbps: Some(5),
            ..NetworkRules::default()
        },
        NetworkRules::default(),
    ];
    let scripts = [true, false].map(|ipv6| {
        rules
            .iter()
            .filter(|rules| ipv6 || !rules.allow_out.iter().any(|net| net.contains(':')))
            // At most 4096 connections, and a log of rejected packets.
            .map(|rules| policy(rules, ipv6).script(4096, true))
            .collect::<Vec<_>>()
    });
    scripts.concat()
}

#[test]
fn replayed_tables_equal_the_tables_of_nft() {
    let tables = PolicyTables::default();
    for script in scripts() {
        let by_nft = in_slot(|| {
            program::nft(&script).unwrap();
            list()
        });
        let Some(by_nft) = by_nft else {
            return;
        };
        for _ in 0..3 {
            let enforced = in_slot(|| {
                // The new table replaces an existing one.
                program::nft("table inet jiffy { set s { type ipv4_addr; }\n chain c { }\n }")
                    .unwrap();
                tables.enforce(&script).unwrap();
                list()
            });
            assert_eq!(enforced.as_ref(), Some(&by_nft), "{script}");
        }
        let known = tables.recorded.lock().back().cloned().unwrap();
        assert!(known.is_verified && *known.script == *script, "{script}");
    }
    assert!(!tables.is_disabled.load(Ordering::Relaxed));
}

#[test]
fn a_policy_that_cannot_be_replayed_is_enforced_by_nft() {
    let scripts = scripts();
    let read = |script: &str| {
        in_slot(|| {
            program::nft(script).unwrap();
            (
                RecordedRuleset::read(RulesetScope::InetTable(TABLE)).unwrap(),
                list(),
            )
        })
    };
    let (Some((_, expected)), Some((other, _))) = (read(&scripts[0]), read("table inet other { }"))
    else {
        return;
    };
    let tables = PolicyTables::default();
    tables.remember(RecordedTable {
        script: scripts[0].as_str().into(),
        // The recording is empty, because the other namespace has no table `jiffy`. Its replay
        // fails.
        table: Arc::new(other),
        is_verified: true,
    });
    let enforced = in_slot(|| {
        tables.enforce(&scripts[0]).unwrap();
        list()
    });
    assert_eq!(enforced, Some(expected));
    assert!(tables.is_disabled.load(Ordering::Relaxed) && tables.recorded.lock().is_empty());
}

#[test]
fn only_the_most_recently_used_policies_are_retained() {
    let tables = PolicyTables::default();
    let Some(ruleset) = in_slot(|| RecordedRuleset::read(RulesetScope::Everything).unwrap()) else {
        return;
    };
    let table = Arc::new(ruleset);
    let remember = |number: usize| {
        tables.remember(RecordedTable {
            script: number.to_string().into(),
            table: table.clone(),
            is_verified: true,
        });
    };
    (0..MAX_RECORDED_POLICIES).for_each(remember);
    remember(0);
    remember(MAX_RECORDED_POLICIES);
    assert_eq!(tables.recorded.lock().len(), MAX_RECORDED_POLICIES);
    assert!(tables.take("1").is_none() && tables.take("0").is_some());
}
