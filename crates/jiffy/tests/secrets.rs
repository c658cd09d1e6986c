//! Secrets of a daemon that is killed while it stores them.

use crate::support::sandbox_http::{begin_call, finish_call};
use crate::support::test_home::TestHome;
use jiffy_test_attributes::jiffy_test;
use serde_json::json;
use std::collections::BTreeSet;

/// Secrets that clients create at the same time.
const SECRETS: usize = 64;

#[jiffy_test]
fn acknowledged_secrets_survive_a_killed_daemon() {
    let test_home = TestHome::new();
    let mut daemon = test_home.serve(&[]);
    let mut calls: Vec<_> = (0..SECRETS)
        .map(|number| {
            let name = format!("secret-{number}");
            let body = json!({ "name": name, "value": "value" });
            (name, begin_call(&test_home, "POST", "/secrets", &body))
        })
        .collect();
    let mut acknowledged = BTreeSet::new();
    let (name, first) = calls.remove(0);
    assert_eq!(finish_call(first).unwrap().0, 201);
    acknowledged.insert(name);
    test_home.kill_daemon();
    let _ = daemon.wait();
    for (name, call) in calls {
        if finish_call(call).is_some_and(|(status, ..)| status == 201) {
            acknowledged.insert(name);
        }
    }
    let mut daemon = test_home.serve(&[]);
    let listed = test_home.json(&["secret", "ls"]);
    let listed = listed.as_array().unwrap().iter();
    let stored: BTreeSet<String> = listed
        .map(|secret| secret["name"].as_str().unwrap().to_owned())
        .collect();
    let lost: Vec<_> = acknowledged.difference(&stored).collect();
    assert!(lost.is_empty(), "{lost:?} of {acknowledged:?} are lost");
    // Secrets of interrupted calls are complete or absent: each one can be removed.
    for name in &stored {
        test_home.ok(&["secret", "rm", name]);
    }
    test_home.ok(&["serve", "--stop"]);
    assert!(daemon.wait().unwrap().success());
}
