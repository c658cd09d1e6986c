//! Traces of a request that later ones could find: none, however the request ended.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use jiffy_functions::limits::FunctionLimits;
use std::sync::atomic::{AtomicU32, Ordering};
use support::{TRACES, TestTenant};

const REQUESTS: u32 = 10_000;

#[test]
fn no_request_finds_a_mark_of_one_of_ten_thousand_others() {
    let tenant = TestTenant::start();
    let limits = FunctionLimits {
        // Requests that spin use it up; others must not on a busy host.
        cpu_ms: 100,
        wall_ms: 10_000,
        ..FunctionLimits::default()
    };
    // Two functions, so that slots change between modules.
    tenant.deploy("one", TRACES, limits.clone());
    tenant.deploy("two", TRACES, limits);
    let next = AtomicU32::new(0);
    let kinds = [const { AtomicU32::new(0) }; 4];
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut client = tenant.connect();
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= REQUESTS {
                        return;
                    }
                    let name = ["one", "two"][number as usize % 2];
                    let count = |kind: usize| kinds[kind].fetch_add(1, Ordering::Relaxed);
                    if number % 500 == 3 {
                        count(0);
                        assert_eq!(client.get(name, "/spin").fault().1, "function_cpu");
                    } else if number % 50 == 7 {
                        count(1);
                        assert_eq!(client.get(name, "/trap").fault().1, "function_trap");
                    } else if number % 100 == 9 {
                        count(2);
                        let mut gone = tenant.connect();
                        let head =
                            format!("GET /x HTTP/1.1\r\nhost: f\r\njiffy-function: {name}\r\n\r\n");
                        gone.send(head.as_bytes());
                    } else {
                        count(3);
                        assert_eq!(client.get(name, "/x").text(), "clean", "request {number}");
                    }
                }
            });
        }
    });
    assert!(
        kinds.iter().all(|kind| kind.load(Ordering::Relaxed) > 0),
        "{kinds:?}"
    );
}
