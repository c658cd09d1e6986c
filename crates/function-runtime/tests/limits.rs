//! Tests for limits of requests, and for the answers to clients.
//!
//! A *slot* is address space for the memory of one instance, which requests use one after the
//! other.
#![allow(clippy::unwrap_used)]

use crate::support::{PROBE, TestTenant, constant};
use jiffy_proto::function::{ControlRequest, FunctionLimits, TenantLimits};
use std::time::{Duration, Instant};

/// Returns the status and code of an error response, in the form of `TestResponse::fault`.
fn fault(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

#[test]
fn a_guest_that_exceeds_a_limit_is_terminated_with_an_error_response() {
    let tenant = TestTenant::start();
    tenant.deploy("probe", PROBE, FunctionLimits::default());
    let mut client = tenant.connect();
    for (path, status, code) in [
        ("/spin", 504, "function_cpu"),
        ("/recursion", 502, "function_trap"),
        ("/memory", 502, "function_memory"),
        ("/table", 502, "function_memory"),
        ("/unreachable", 502, "function_trap"),
        ("/bounds", 502, "function_trap"),
        ("/giant", 502, "response_too_large"),
        ("/none", 502, "function_trap"),
    ] {
        let answer = client.get("probe", path);
        assert_eq!(answer.fault(), fault(status, code), "{path}");
        assert!(
            !answer.text().contains("unreachable"),
            "details are for the log only"
        );
        // The process and the connection continue to work.
        assert_eq!(
            client.request("POST", "probe", "/echo", b"body").text(),
            "body"
        );
    }
    assert_eq!(
        client.get("other", "/").fault(),
        fault(404, "function_not_found")
    );
    let entries = tenant.logs("probe", 0);
    assert!(
        entries
            .iter()
            .any(|entry| entry.text.contains("unreachable")),
        "{entries:?}"
    );
    let metrics = tenant.metrics("probe");
    // Two requests for each of the eight paths, of which four end in a trap.
    assert_eq!((metrics.requests, metrics.running), (16, 0));
    assert_eq!(metrics.faults["function_trap"], 4);
    // The spinning request alone has used its 50 ms (the default of `cpu_ms`).
    assert!(metrics.cpu_us >= 50_000, "{metrics:?}");
}

/// Returns a module whose `jiffy_buf` has the body `body`.
fn with_buf(body: &str) -> String {
    with_exports(body, "(i32.const 0)")
}

/// Returns a module whose functions `jiffy_buf` and `jiffy_out` have these bodies.
fn with_exports(buf: &str, out: &str) -> String {
    format!(
        r#"(module (memory (export "memory") 1)
            (func $deeper (param i32) (result i32)
              (i32.add (call $deeper (local.get 0)) (i32.const 1)))
            (func (export "jiffy_buf") (param i32) (result i32) {buf})
            (func (export "jiffy_handle") (param i32 i32) (result i32) (i32.const 0))
            (func (export "jiffy_out") (result i32) {out}))"#
    )
}

#[test]
fn jiffy_buf_and_jiffy_out_beyond_their_limits_are_terminated() {
    let tenant = TestTenant::start();
    let modules = [
        (
            "spin",
            "(loop $l (br $l)) (unreachable)",
            504,
            "function_cpu",
        ),
        ("deep", "(call $deeper (i32.const 0))", 502, "function_trap"),
        ("trap", "(unreachable)", 502, "function_trap"),
        ("out", "(i32.const 65535)", 502, "function_trap"),
    ];
    for (name, body, ..) in modules {
        tenant.deploy(name, with_buf(body).as_bytes(), FunctionLimits::default());
    }
    let out = with_exports("(i32.const 0)", "(loop $l (br $l)) (unreachable)");
    tenant.deploy("late", out.as_bytes(), FunctionLimits::default());
    tenant.deploy("hello", &constant("hello"), FunctionLimits::default());
    let mut client = tenant.connect();
    // The function `late` spins in `jiffy_out`. The others fail in `jiffy_buf`: `out` returns the
    // address of the last byte of its memory, behind which the request has no room.
    let late = ("late", "", 504, "function_cpu");
    for (name, _, status, code) in modules.into_iter().chain([late]) {
        assert_eq!(client.get(name, "/").fault(), fault(status, code), "{name}");
        assert_eq!(client.get("hello", "/").text(), "hello");
    }
}

/// A module without imports is first run on the stack of the worker. After a few milliseconds this
/// first attempt is aborted, and the request is repeated in a new instance. The aborted attempt has
/// no visible effects. The guest counts its calls in its memory, and answers with the number.
#[test]
fn a_slow_guest_answers_like_a_fast_guest() {
    let tenant = TestTenant::start();
    let module = r#"(module (memory (export "memory") 1) (data (i32.const 0) "200\n\n0")
        (func (export "jiffy_buf") (param i32) (result i32) (i32.const 4096))
        (func (export "jiffy_handle") (param i32 i32) (result i32)
          (local $i i32)
          (i32.store8 (i32.const 5) (i32.add (i32.load8_u (i32.const 5)) (i32.const 1)))
          (loop $next
            (local.set $i (i32.add (local.get $i) (i32.const 1)))
            (br_if $next (i32.lt_u (local.get $i) (i32.const 50000000))))
          (i32.const 6))
        (func (export "jiffy_out") (result i32) (i32.const 0)))"#;
    let limits = FunctionLimits {
        cpu_ms: 5000,
        ..FunctionLimits::default()
    };
    tenant.deploy("slow", module.as_bytes(), limits);
    let mut client = tenant.connect();
    for _ in 0..5 {
        assert_eq!(client.get("slow", "/").text(), "1");
    }
}

#[test]
fn bodies_are_limited_in_size_and_time() {
    let tenant = TestTenant::start();
    let limits = FunctionLimits {
        request_bytes: 100_000,
        request_body_ms: 200,
        ..FunctionLimits::default()
    };
    tenant.deploy("probe", PROBE, limits);
    let head =
        |rest: &str| format!("POST /echo HTTP/1.1\r\nhost: f\r\njiffy-function: probe\r\n{rest}");
    let exchange = |bytes: &[u8]| {
        let mut client = tenant.connect();
        client.send(bytes);
        client.response().unwrap().fault()
    };
    // One byte more than `request_bytes`.
    let too_long = head("content-length: 100001\r\n\r\n");
    assert_eq!(
        exchange(too_long.as_bytes()),
        fault(413, "request_too_large")
    );
    let mut chunked = head("transfer-encoding: chunked\r\n\r\n").into_bytes();
    // Three chunks of 40,000 bytes (0x9c40).
    for _ in 0..3 {
        chunked.extend_from_slice(b"9c40\r\n");
        chunked.extend_from_slice(&[b'x'; 40_000]);
        chunked.extend_from_slice(b"\r\n");
    }
    assert_eq!(exchange(&chunked), fault(413, "request_too_large"));
    // The rest of the body does not arrive within `request_body_ms`.
    let slow = head("content-length: 10\r\n\r\nhalf");
    assert_eq!(exchange(slow.as_bytes()), fault(408, "request_timeout"));
    let body = vec![b'y'; 100_000];
    assert_eq!(
        tenant
            .connect()
            .request("POST", "probe", "/echo", &body)
            .body,
        body
    );
}

#[test]
fn requests_beyond_the_queue_are_rejected_with_retry_after() {
    let tenant = TestTenant::start();
    let limits = FunctionLimits {
        cpu_ms: 2000,
        concurrency: 1,
        queue: 1,
        queue_ms: 300,
        ..FunctionLimits::default()
    };
    tenant.deploy("probe", PROBE, limits.clone());
    let spin = b"GET /spin HTTP/1.1\r\nhost: f\r\njiffy-function: probe\r\n\r\n";
    // One request runs and one waits. The third is rejected at once, and the second after
    // `queue_ms`.
    let mut clients: Vec<_> = (0..3).map(|_| tenant.connect()).collect();
    for client in &mut clients {
        client.send(spin);
    }
    let answers: Vec<_> = clients
        .iter_mut()
        .map(|client| client.response().unwrap())
        .collect();
    let busy: Vec<_> = answers
        .iter()
        .filter(|answer| answer.status == 429)
        .collect();
    assert_eq!(busy.len(), 2, "{answers:?}");
    for answer in busy {
        assert_eq!(answer.fault(), fault(429, "function_busy"));
        assert!(answer.head.contains("retry-after: 1"), "{}", answer.head);
    }
    // The guest would spin for two seconds (`cpu_ms`), but is stopped earlier by `wall_ms`.
    let wall = FunctionLimits {
        wall_ms: 100,
        ..limits
    };
    let order = ControlRequest::Limit {
        function: "probe".to_owned(),
        limits: wall,
    };
    tenant.process.execute(&order).unwrap();
    let start = Instant::now();
    assert_eq!(
        tenant.connect().get("probe", "/spin").fault(),
        fault(504, "function_timeout")
    );
    assert!(
        start.elapsed() < Duration::from_secs(2),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn a_tenant_is_limited_to_its_memory_budget() {
    let limits = TenantLimits {
        memory_bytes: 16 << 20,
        ..TenantLimits::default()
    };
    let tenant = TestTenant::with_limits(&limits);
    tenant.deploy("probe", PROBE, FunctionLimits::default());
    let mut client = tenant.connect();
    // The guest's memory grows until it exceeds the budget of the tenant (16 MiB).
    assert_eq!(
        client.get("probe", "/memory").fault(),
        fault(503, "host_busy")
    );
    // The memory was returned to the budget.
    assert_eq!(
        client
            .request("POST", "probe", "/echo", &[b'z'; 1 << 20])
            .body
            .len(),
        1 << 20
    );
}

#[test]
fn a_truncated_body_is_reported_and_its_memory_is_released() {
    let limits = TenantLimits {
        memory_bytes: 24 << 20,
        ..TenantLimits::default()
    };
    let tenant = TestTenant::with_limits(&limits);
    tenant.deploy("probe", PROBE, FunctionLimits::default());
    let whole = vec![b'x'; 8 << 20];
    let length = whole.len();
    let head = format!(
        "POST /echo HTTP/1.1\r\nhost: f\r\njiffy-function: probe\r\ncontent-length: {length}\r\n\r\n"
    );
    let half = [head.as_bytes(), &whole[..length / 2]].concat();
    // The bodies together exceed the tenant's budget.
    for _ in 0..8 {
        let mut client = tenant.connect();
        client.send(&half);
        client.end_sending();
        let answer = client.response().unwrap();
        assert_eq!(answer.fault(), fault(400, "request_aborted"));
    }
    // Clients that do not wait for the answer.
    for count in 9..=16 {
        tenant.connect().send(&half);
        tenant.wait_for("probe", |metrics| {
            metrics.faults.get("request_aborted") == Some(&count)
        });
    }
    let answer = tenant.connect().request("POST", "probe", "/echo", &whole);
    assert_eq!((answer.status, answer.body.len()), (200, length));
}

#[test]
fn a_request_without_a_free_slot_is_rejected_with_retry_after() {
    let limits = TenantLimits {
        slots: 1,
        ..TenantLimits::default()
    };
    let tenant = TestTenant::with_limits(&limits);
    let limits = FunctionLimits {
        cpu_ms: 1000,
        ..FunctionLimits::default()
    };
    tenant.deploy("probe", PROBE, limits.clone());
    tenant.deploy("other", PROBE, limits);
    let mut first = tenant.connect();
    first.send(b"GET /spin HTTP/1.1\r\nhost: f\r\njiffy-function: probe\r\n\r\n");
    tenant.wait_for("probe", |metrics| metrics.running == 1);
    // All functions share the slot.
    for name in ["probe", "other"] {
        let answer = tenant.connect().get(name, "/spin");
        assert_eq!(answer.fault(), fault(503, "host_busy"), "{name}");
        assert!(answer.head.contains("retry-after: 1"), "{}", answer.head);
    }
    assert_eq!(
        first.response().unwrap().fault(),
        fault(504, "function_cpu")
    );
    let answer = tenant.connect().request("POST", "other", "/echo", b"body");
    assert_eq!(answer.text(), "body");
}

#[test]
fn a_disabled_function_is_distinguished_from_a_missing_one() {
    let tenant = TestTenant::start();
    tenant.deploy("one", &constant("hello"), FunctionLimits::default());
    let enable = |enabled| {
        let order = ControlRequest::Enable {
            function: "one".to_owned(),
            enabled,
        };
        tenant.process.execute(&order).unwrap()
    };
    let mut client = tenant.connect();
    enable(false);
    assert_eq!(
        client.get("one", "/").fault(),
        fault(503, "function_disabled")
    );
    enable(true);
    assert_eq!(client.get("one", "/").text(), "hello");
    tenant
        .process
        .execute(&ControlRequest::Remove {
            function: "one".to_owned(),
        })
        .unwrap();
    assert_eq!(
        client.get("one", "/").fault(),
        fault(404, "function_not_found")
    );
    let again = tenant.process.execute(&ControlRequest::Remove {
        function: "one".to_owned(),
    });
    assert!(again.unwrap_err().to_string().contains("does not exist"));
}
