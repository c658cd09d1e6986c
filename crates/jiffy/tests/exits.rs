//! Exits of a guest are bounded: on hosts without hardware virtualization they are most of what a
//! sandbox costs.

use crate::support::test_home::TestHome;
use crate::support::{sandbox_http, skip};
use jiffy_test_attributes::jiffy_test;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time over which an idle guest is watched.
const IDLE_WINDOW: Duration = Duration::from_secs(10);
/// Longest wait for a guest to come to rest.
const REST_LIMIT: Duration = Duration::from_secs(120);
/// Exits of an idle guest in that time. 26 were measured in a minute: what is left are new seeds of
/// its random generator.
const MAX_IDLE_EXITS: u64 = 30;
/// Exits of a create, which waits for the guest's answer. 550 to 700 were measured, 170 more where
/// the agent's code is not in huge pages, 500 more where the text of the guest's kernel is not, and
/// 1,400 more where each sandbox reports the free memory that its template left to it.
const MAX_CREATE_EXITS: u64 = 1_000;

#[jiffy_test]
fn an_idle_guest_comes_to_rest() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    let Some(mut before) = sandbox_http::exits(&test_home, &id) else {
        return skip("this kernel's KVM does not count exits");
    };
    let began = Instant::now();
    loop {
        sleep(IDLE_WINDOW);
        let after = sandbox_http::exits(&test_home, &id).unwrap();
        let exits = after - before;
        if exits <= MAX_IDLE_EXITS {
            return;
        }
        assert!(began.elapsed() < REST_LIMIT, "{exits} exits in 10 s");
        before = after;
    }
}

#[jiffy_test]
fn a_create_takes_a_bounded_number_of_exits() {
    let test_home = TestHome::new();
    let mut daemon = test_home.serve(&["--warm-pool", "0"]);
    // Layers of large guests are written in another way.
    for memory in ["512MiB", "2GiB"] {
        let create = ["create", "--memory", memory];
        // The first boots the template and records what its guests write.
        test_home.ok(&["rm", &test_home.ok(&create)]);
        let exits = (0..3).map(|_| {
            let id = test_home.ok(&create);
            sandbox_http::exits(&test_home, &id)
        });
        let Some(exits) = exits.collect::<Option<Vec<u64>>>() else {
            skip("this kernel's KVM does not count exits");
            break;
        };
        // Other work of the host delays interrupts, which then cost more exits.
        let least = exits.iter().min().unwrap();
        assert!(*least <= MAX_CREATE_EXITS, "{memory}: {exits:?}");
    }
    test_home.ok(&["serve", "--stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}

#[jiffy_test]
fn a_merge_with_a_long_lineage_makes_no_sandbox_dearer() {
    let test_home = TestHome::new();
    test_home.ok(&["rm", &test_home.ok(&["create"])]);
    test_home.ok(&["serve", "--stop"]);
    let mut daemon = test_home.serve(&["--warm-pool", "0"]);
    let id = test_home.ok(&["create"]);
    let first = test_home.ok(&["snapshot", &id]);
    // Least of three, as above.
    let exits_from = |snapshot: &str| {
        let exits = (0..3).map(|_| {
            let clone = test_home.ok(&["create", "--from", snapshot]);
            sandbox_http::exits(&test_home, &clone)
        });
        exits.collect::<Option<Vec<u64>>>()?.into_iter().min()
    };
    let before = exits_from(&first);
    let mut last = first;
    // One more than a restore reads.
    for _ in 0..17 {
        last = test_home.ok(&["snapshot", &id]);
    }
    let after = exits_from(&last);
    test_home.ok(&["serve", "--stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
    let (Some(before), Some(after)) = (before, after) else {
        return skip("this kernel's KVM does not count exits");
    };
    assert!(
        after <= before + before / 4,
        "{before} before, {after} after"
    );
}
