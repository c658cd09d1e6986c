//! Traces of a request that later ones could find: none, however the request ended.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use jiffy_proto::function::{FunctionLimits, SlotReset, TenantLimits};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use support::{HTTP, SetOnDrop, TRACES, TestTenant};

const REQUESTS: u32 = 10_000;
const COMPACTION_INTERVAL: Duration = Duration::from_millis(20);

#[test]
fn no_request_finds_a_mark_of_one_of_ten_thousand_others() {
    look_for_marks(&TestTenant::start());
}

/// Memory is compacted all the while, which only root can ask for. Requests write 512 KiB each: a
/// tenant that kept none of their pages would not have scanned for them inside of its jail.
#[test]
fn the_fast_reset_leaves_no_mark_while_memory_is_compacted() {
    let tenant = TestTenant::with_limits(&TenantLimits {
        reset: SlotReset::Fast,
        slots: 8,
        ..TenantLimits::default()
    });
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                // Without root there is none.
                let _ = std::fs::write("/proc/sys/vm/compact_memory", "1");
                std::thread::sleep(COMPACTION_INTERVAL);
            }
        });
        let _done = SetOnDrop(&done);
        look_for_marks(&tenant);
    });
    let kept = anonymous_kib(tenant.process.id());
    let strict = TestTenant::start();
    strict.deploy("one", TRACES, FunctionLimits::default());
    assert_eq!(strict.connect().get("one", "/x").text(), "clean");
    let given_back = anonymous_kib(strict.process.id());
    assert!(
        kept > given_back + 400,
        "{kept} KiB, strict {given_back} KiB"
    );
}

/// Most requests write to pages that others wrote to, so that their reset knows them; new pages
/// come again and again.
#[test]
fn no_request_of_a_component_finds_a_mark_of_another() {
    for reset in [SlotReset::Strict, SlotReset::Fast] {
        let tenant = TestTenant::with_limits(&TenantLimits {
            reset,
            slots: 4,
            ..TenantLimits::default()
        });
        for name in ["one", "two"] {
            tenant.deploy(name, HTTP, FunctionLimits::default());
        }
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let tenant = &tenant;
                scope.spawn(move || {
                    let mut client = tenant.connect();
                    for number in 0..1000 {
                        let name = ["one", "two"][number / 250 % 2];
                        let path = format!("/m{}", (number / 40 + thread) % 6);
                        let answer = client.get(name, &path);
                        assert_eq!(answer.text(), "hello from a component", "{number}");
                    }
                });
            }
        });
    }
}

fn anonymous_kib(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let words = line.unwrap().split_whitespace().next();
    words.unwrap().parse().unwrap()
}

fn look_for_marks(tenant: &TestTenant) {
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
