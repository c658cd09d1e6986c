//! Tests that KVM exits of a guest are bounded. On hosts without hardware virtualization, exits are
//! most of a sandbox's cost.

use crate::support::test_home::TestHome;
use crate::support::{sandbox_http, skip};
use jiffy_test_attributes::jiffy_test;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Duration for which an idle guest is observed.
const IDLE_WINDOW: Duration = Duration::from_secs(10);
/// Timeout for a guest to become idle.
const REST_LIMIT: Duration = Duration::from_secs(120);
/// Maximum number of exits of an idle guest in this duration. 26 were measured per minute; the
/// remaining exits reseed its random generator.
const MAX_IDLE_EXITS: u64 = 30;
/// Maximum number of exits of a create, which includes the guest's answer. 550 to 700 were
/// measured. Another 170 occur without huge pages for the agent's code, and another 500 without
/// huge pages for the guest kernel's text. Another 1,400 occur if each sandbox reports the free
/// memory of its template.
const MAX_CREATE_EXITS: u64 = 1_000;

#[jiffy_test]
fn an_idle_guest_causes_few_exits() {
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
    // Layers of large guests are written with another method.
    for memory in ["512MiB", "2GiB"] {
        let create = ["create", "--memory", memory];
        // The first create boots the template and records the pages that its guests write.
        test_home.ok(&["rm", &test_home.ok(&create)]);
        let exits = (0..3).map(|_| {
            let id = test_home.ok(&create);
            sandbox_http::exits(&test_home, &id)
        });
        let Some(exits) = exits.collect::<Option<Vec<u64>>>() else {
            skip("this kernel's KVM does not count exits");
            break;
        };
        // Other load on the host delays interrupts, which causes more exits.
        let least = exits.iter().min().unwrap();
        assert!(*least <= MAX_CREATE_EXITS, "{memory}: {exits:?}");
    }
    test_home.ok(&["serve", "--stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}

#[jiffy_test]
fn merging_a_long_lineage_does_not_make_creates_slower() {
    let test_home = TestHome::new();
    test_home.ok(&["rm", &test_home.ok(&["create"])]);
    test_home.ok(&["serve", "--stop"]);
    let mut daemon = test_home.serve(&["--warm-pool", "0"]);
    let id = test_home.ok(&["create"]);
    let first = test_home.ok(&["snapshot", &id]);
    // The minimum of three creates counts, as above.
    let exits_from = |snapshot: &str| {
        let exits = (0..3).map(|_| {
            let clone = test_home.ok(&["create", "--from", snapshot]);
            sandbox_http::exits(&test_home, &clone)
        });
        exits.collect::<Option<Vec<u64>>>()?.into_iter().min()
    };
    let before = exits_from(&first);
    let mut last = first;
    // Create one layer more than a restore reads.
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
