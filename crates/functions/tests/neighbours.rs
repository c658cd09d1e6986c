//! Effect of hostile clients and functions on others.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use jiffy_proto::function::FunctionLimits;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::{PROBE, SetOnDrop, TestTenant, constant};

/// Slow enough for a busy host, and far below what spinning guests use.
const MAX_MEDIAN: Duration = Duration::from_millis(30);
const MAX_P99: Duration = Duration::from_millis(250);

#[test]
fn a_spinning_function_leaves_its_neighbour_time() {
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
        let mut client = tenant.connect();
        let mut times: Vec<_> = (0..200)
            .map(|_| {
                let start = Instant::now();
                assert_eq!(client.get("good", "/").text(), "good");
                start.elapsed()
            })
            .collect();
        times.sort();
        println!("median {:?}, p99 {:?}", times[100], times[197]);
        assert!(times[100] < MAX_MEDIAN, "{:?}", times[100]);
        assert!(times[197] < MAX_P99, "{:?}", times[197]);
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
        match number % 3 {
            0 => client.send(b"GET / HTTP/1.1\r\nhost"),
            1 => client.send(
                b"POST / HTTP/1.1\r\nhost: f\r\njiffy-function: good\r\ncontent-length: 9\r\n\r\nx",
            ),
            _ => {}
        }
    }
    let mut client = tenant.connect();
    for _ in 0..20 {
        assert_eq!(client.get("good", "/").text(), "good");
    }
    // Clients that leave in the middle of a body.
    drop(slow);
    assert_eq!(client.get("good", "/").text(), "good");
}

#[test]
fn an_oversized_or_broken_head_is_refused_and_the_server_goes_on() {
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
        assert!(
            status.is_none_or(|status| (400..500).contains(&status)),
            "{status:?}"
        );
    }
    assert_eq!(tenant.connect().get("good", "/").text(), "good");
}
