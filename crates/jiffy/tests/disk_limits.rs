//! Tests for bandwidth limits of a guest's disks.

use crate::support::test_home::TestHome;
use crate::support::wait_for;
use jiffy_test_attributes::jiffy_test;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Bytes per second that the guests of these tests may transfer.
const RATE: u64 = 10_000_000;

/// Writes `mib` MiB to the guest's disk, bypassing its page cache.
fn write(test_home: &TestHome, id: &str, mib: u64) {
    let script =
        format!("dd if=/dev/zero of=/var/tmp/zeroes bs=1M count={mib} oflag=direct 2>/dev/null");
    test_home.sh(id, &script);
}

#[jiffy_test]
fn a_guest_that_writes_continuously_gets_its_rate_and_stays_responsive() {
    let test_home = TestHome::new();
    let rate = (RATE / 1_000_000).to_string();
    let mut daemon = test_home.serve(&["--warm-pool", "0", "--disk-mbps", &rate]);
    let id = test_home.ok(&["create"]);
    // Uses up the tokens that have accumulated: bytes that the limiter lets pass without delay.
    write(&test_home, &id, 20);
    let began = Instant::now();
    write(&test_home, &id, 40);
    let took = began.elapsed();
    // Tokens accumulated before the first byte, and the one request that may exceed the limit, are
    // less than a quarter.
    let exact = Duration::from_secs_f64((40 * MIB) as f64 / RATE as f64);
    assert!(took > exact * 3 / 4, "{took:?}");
    assert!(took < exact * 3, "{took:?}");

    snapshot_in_the_middle(&test_home, &id);
    test_home.ok(&["serve", "--stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}

/// A guest with waiting requests runs commands and is snapshotted. Neither the guest nor sandboxes
/// created from the snapshot lose requests.
fn snapshot_in_the_middle(test_home: &TestHome, id: &str) {
    // Writes different pieces of 8 MiB until a file appears.
    const PIECE: &str = "piece() { seq $(($1 + 1000000)) 20000000 | head -c 8388608; }";
    let writer = format!(
        "{PIECE}; n=0; until [ -e /var/tmp/enough ]; do
            piece $n | dd of=/var/tmp/numbers bs=1M seek=$((n * 8)) iflag=fullblock oflag=direct conv=notrunc
            n=$((n + 1))
        done; echo $n > /var/tmp/count; mv /var/tmp/count /var/tmp/done"
    );
    let begin = format!("setsid nohup sh -c '{writer}' </dev/null >/dev/null 2>&1 &");
    test_home.sh(id, &begin);
    wait_for("the first bytes", || {
        let bytes = test_home.sh(id, "stat -c %s /var/tmp/numbers 2>/dev/null || echo 0");
        (bytes.parse::<u64>().unwrap() > 20 * MIB).then_some(())
    });
    // Reads use another disk than writes, but the same limit.
    test_home.sh(
        id,
        "find /usr/share -type f | head -n 50 | xargs cat | wc -c",
    );
    let snapshot = test_home.ok(&["snapshot", id]);
    let clone = test_home.ok(&["create", "--from", &snapshot]);
    for guest in [id, &clone] {
        test_home.sh(guest, "touch /var/tmp/enough");
        wait_for("the last byte", || {
            let done = test_home.sh(guest, "test -e /var/tmp/done && echo done || true");
            (done == "done").then_some(())
        });
        let sums = format!(
            "{PIECE}; last=$(cat /var/tmp/done); n=0
            while [ $n -lt $last ]; do piece $n; n=$((n + 1)); done | sha256sum
            sha256sum < /var/tmp/numbers"
        );
        let sums = test_home.sh(guest, &sums);
        let (expected, found) = sums.split_once('\n').unwrap();
        assert_eq!(expected, found);
    }
}

#[jiffy_test]
fn a_guest_with_limited_requests_does_not_exceed_its_limit() {
    let test_home = TestHome::new();
    let options = [
        "--warm-pool",
        "0",
        "--disk-mbps",
        "0",
        "--disk-iops",
        "1000",
    ];
    let mut daemon = test_home.serve(&options);
    let id = test_home.ok(&["create"]);
    let write = |count: u64| {
        let script = format!(
            "dd if=/dev/zero of=/var/tmp/small bs=4k count={count} oflag=direct 2>/dev/null"
        );
        test_home.sh(&id, &script);
    };
    // Uses up the accumulated tokens. The further 4,000 requests take about 4 s.
    write(1500);
    let began = Instant::now();
    write(4000);
    let took = began.elapsed();
    assert!(took > Duration::from_secs(3), "{took:?}");
    assert!(took < Duration::from_secs(15), "{took:?}");
    test_home.ok(&["serve", "--stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}
