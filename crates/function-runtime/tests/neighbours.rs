//! Tests for the effect of hostile clients and functions on other functions.
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::support::{PROBE, SetOnDrop, TestClient, TestTenant, constant};
use jiffy_proto::function::{FunctionLimits, TenantLimits};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Maximum median and 99th percentile of the latency of a function. They are high enough for a busy
/// host, and far below the time that spinning guests use.
const MAX_MEDIAN: Duration = Duration::from_millis(30);
const MAX_P99: Duration = Duration::from_millis(250);

#[test]
fn a_spinning_function_does_not_starve_its_neighbour() {
    let tenant = TestTenant::start();
    let limits = FunctionLimits {
        cpu_ms: 500,
        ..FunctionLimits::default()
    };
    tenant.deploy("spin", PROBE, limits);
    tenant.deploy("good", &constant("good"), FunctionLimits::default());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut client = tenant.connect();
                while !done.load(Ordering::Relaxed) {
                    assert_eq!(client.get("spin", "/spin").fault().1, "function_cpu");
                }
            });
        }
        let _done = SetOnDrop(&done);
        let [median, p99] = latencies(&mut tenant.connect(), "good", 200);
        println!("median {median:?}, p99 {p99:?}");
        assert!(median < MAX_MEDIAN, "{median:?}");
        assert!(p99 < MAX_P99, "{p99:?}");
    });
}

/// Returns the median and the 99th percentile of the latency of a function that answers with its
/// name.
fn latencies(client: &mut TestClient, name: &str, requests: usize) -> [Duration; 2] {
    let mut times: Vec<_> = (0..requests)
        .map(|_| {
            let start = Instant::now();
            assert_eq!(client.get(name, "/").text(), name);
            start.elapsed()
        })
        .collect();
    times.sort();
    [times[requests / 2], times[requests * 99 / 100 - 1]]
}

#[test]
fn a_tenant_that_spins_on_all_its_slots_does_not_starve_another() {
    const SLOTS: u32 = 8;
    let spinning = TestTenant::with_limits(&TenantLimits {
        slots: SLOTS,
        ..TenantLimits::default()
    });
    let limits = FunctionLimits {
        cpu_ms: 100,
        wall_ms: 60_000,
        ..FunctionLimits::default()
    };
    spinning.deploy("spin", PROBE, limits);
    let neighbour = TestTenant::start();
    neighbour.deploy("good", &constant("good"), FunctionLimits::default());
    let [idle_median, idle_p99] = latencies(&mut neighbour.connect(), "good", 2000);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..SLOTS {
            scope.spawn(|| {
                let mut client = spinning.connect();
                while !done.load(Ordering::Relaxed) {
                    assert_eq!(client.get("spin", "/spin").fault().1, "function_cpu");
                }
            });
        }
        let _done = SetOnDrop(&done);
        spinning.wait_for("spin", |counts| counts.running == u64::from(SLOTS));
        let [median, p99] = latencies(&mut neighbour.connect(), "good", 2000);
        println!("alone: median {idle_median:?}, p99 {idle_p99:?}");
        println!("beside: median {median:?}, p99 {p99:?}");
        assert!(p99 < MAX_P99, "{p99:?}");
        // The guests are still spinning.
        spinning.wait_for("spin", |counts| counts.running == u64::from(SLOTS));
    });
}

#[test]
fn slow_heads_and_silent_clients_take_no_slot() {
    let tenant = TestTenant::start();
    let limits = FunctionLimits {
        concurrency: 1,
        queue: 0,
        ..FunctionLimits::default()
    };
    tenant.deploy("good", &constant("good"), limits);
    let mut slow: Vec<_> = (0..50).map(|_| tenant.connect()).collect();
    for (number, client) in slow.iter_mut().enumerate() {
        // A third of the clients stops within the head, a third stops within the body, and the
        // others send nothing.
        match number % 3 {
            0 => client.send(b"GET / HTTP/1.1\r\nhost"),
            1 => client.send(
                b"POST / HTTP/1.1\r\nhost: f\r\njiffy-function: good\r\ncontent-length: 9\r\n\r\nx",
            ),
            _ => {}
        }
    }
    // Only one request may run, and none may wait. A slow client with a slot would cause errors.
    let mut client = tenant.connect();
    for _ in 0..20 {
        assert_eq!(client.get("good", "/").text(), "good");
    }
    // The clients disconnect in the middle of a body.
    drop(slow);
    assert_eq!(client.get("good", "/").text(), "good");
}

#[test]
fn an_oversized_or_invalid_head_is_rejected_and_the_server_continues() {
    let tenant = TestTenant::start();
    tenant.deploy("good", &constant("good"), FunctionLimits::default());
    for head in [
        format!(
            "GET / HTTP/1.1\r\nhost: f\r\nx: {}\r\n\r\n",
            "y".repeat(200_000)
        ),
        "GET / HTTP/9.9\r\n\r\n".to_owned(),
        "\0\0\0\0\r\n\r\n".to_owned(),
    ] {
        let mut client = tenant.connect();
        client.try_send(head.as_bytes());
        let status = client.response().map(|answer| answer.status);
        // The server may also end the connection without a response.
        assert!(
            status.is_none_or(|status| (400..500).contains(&status)),
            "{status:?}"
        );
    }
    assert_eq!(tenant.connect().get("good", "/").text(), "good");
}
