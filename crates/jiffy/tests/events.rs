//! Events on a real host: they survive the death of the daemon, and `jiffy events` follows them.

use crate::support::test_home::TestHome;
use crate::support::wait_for;
use jiffy_test_attributes::jiffy_test;
use serde_json::Value;
use std::io::{BufRead, BufReader};

/// Returns the types of printed events.
fn types(lines: &str) -> Vec<String> {
    let event = |line: &str| -> Value { serde_json::from_str(line).unwrap() };
    let events = lines.lines().map(event);
    events
        .map(|event| event["type"].as_str().unwrap().to_owned())
        .collect()
}

#[jiffy_test]
fn events_survive_a_killed_daemon_and_are_followed_over_its_restart() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "--name", "web"]);
    let mut following = test_home.begin(&["events", "--follow", "--json", "--sandbox", "web"]);
    let mut lines = BufReader::new(following.stdout.take().unwrap()).lines();
    let mut next = || {
        let line = lines.next().unwrap().unwrap();
        types(&line).remove(0)
    };
    assert_eq!(next(), "sandbox.created");
    assert_eq!(next(), "sandbox.ready");
    test_home.kill_daemon();
    // The next command starts another daemon.
    test_home.ok(&["pause", &id]);
    assert_eq!(next(), "sandbox.paused");
    test_home.ok(&["kill", &id]);
    assert_eq!(next(), "sandbox.killed");
    following.kill().unwrap();
    following.wait().unwrap();
    let printed = test_home.ok(&["events", "--json", "--sandbox", &id]);
    let all = [
        "sandbox.created",
        "sandbox.ready",
        "sandbox.paused",
        "sandbox.killed",
    ];
    assert_eq!(types(&printed), all);
    // `jiffy key` changes the keys without the daemon, which notices the change.
    test_home.ok(&["key", "create", "--name", "ci"]);
    wait_for("the event of the key", || {
        let printed = test_home.ok(&["events", "--json", "--type", "key.created"]);
        (!printed.is_empty()).then_some(())
    });
}
