//! Tests for limits of a component's calls to the host.

use super::component::{ComponentText, dispatch_by_letter};
use crate::support::TestTenant;
use jiffy_proto::function::{ControlRequest, FunctionLimits, LogStream};
use std::fs::File;

/// Texts in the memory of the components.
const TEXTS: &[(&str, &str)] = &[("name", "x-a"), ("value", "v")];
/// Maximum number of logged output bytes of a request.
const MAX_LOGGED_BYTES: usize = 64 << 10;

/// Handlers that exceed a limit in a call, by letter, with a part of the expected log entry. The
/// log has `no free keys` if a component has too many handles.
const TOO_FAR: [(char, &str, &str); 9] = [
    (
        'a',
        "(loop $next (drop (call $fields)) (br $next))",
        "no free keys",
    ),
    (
        'b',
        "(local.set $b (call $stdout))
         (loop $next (drop (call $output-ready (local.get $b))) (br $next))",
        "no free keys",
    ),
    (
        'c',
        "(loop $next (drop (call $timer (i64.const 1))) (br $next))",
        "no free keys",
    ),
    (
        // A field of 65 KiB.
        'd',
        "(memory.fill (i32.const 4096) (i32.const 120) (i32.const 66560))
         (call $fields-append (call $fields) {name} (i32.const 4096) (i32.const 66560)
           (global.get $R))",
        "total size of fields",
    ),
    (
        'e',
        "(local.set $b (call $fields))
         (loop $next
           (call $fields-append (local.get $b) {name} {value} (global.get $R))
           (br $next))",
        "total size of fields",
    ),
    (
        'f',
        "(local.set $b (call $fields-clone (call $headers (local.get $in))))
         (memory.fill (i32.const 4096) (i32.const 120) (i32.const 65400))
         (call $fields-append (local.get $b) {name} (i32.const 4096) (i32.const 65400)
           (global.get $R))",
        "total size of fields",
    ),
    (
        'g',
        "(call $random-bytes (i64.const 65537) (global.get $R))",
        "exceeds limit",
    ),
    (
        // An argument of 17 MiB.
        'h',
        "(drop (memory.grow (i32.const 300)))
         (call $fields-append (call $fields) {name} (i32.const 65536) (i32.const 17825792)
           (global.get $R))",
        "fuel allocated for hostcalls",
    ),
    (
        // One byte more than the stream accepts.
        'i',
        "(call $body (call $response (call $fields)) (global.get $R)) (call $ok)
         (call $body-write (i32.load offset=4 (global.get $R)) (global.get $R)) (call $ok)
         (local.set $b (i32.load offset=4 (global.get $R)))
         (call $block (call $output-ready (local.get $b)))
         (call $check-write (local.get $b) (global.get $R)) (call $ok)
         (call $write-permitted (local.get $b) (i32.const 4096)
           (i32.add (i32.load offset=8 (global.get $R)) (i32.const 1)) (global.get $R))",
        "write exceeded budget",
    ),
];

/// Handlers that call the host in an endless loop.
const ENDLESS: [(char, &str); 4] = [
    ('r', "(loop $next (drop (call $random-number)) (br $next))"),
    ('n', "(loop $next (drop (call $now)) (br $next))"),
    (
        'o',
        "(local.set $b (call $stdout))
         (loop $next
           (call $write (local.get $b) (i32.const 4096) (i32.const 4096) (global.get $R))
           (br $next))",
    ),
    (
        'p',
        "(loop $next
           (local.set $b (call $timer (i64.const 0)))
           (call $block (local.get $b))
           (call $drop-pollable (local.get $b))
           (br $next))",
    ),
];

/// Handler that waits for an hour.
const WAIT: (char, &str) = (
    'w',
    "(call $block (call $timer (i64.const 3600000000000))) (call $done)",
);

/// Handler that comes close to the limits without exceeding them. It creates and drops 10,000
/// handles, retains 200 handles, appends a field of 60 KiB, and requests 64 KiB of random bytes.
const FAR: (char, &str) = (
    'z',
    "(local.set $b (i32.const 10000))
     (loop $next
       (call $drop-fields (call $fields))
       (br_if $next (local.tee $b (i32.sub (local.get $b) (i32.const 1)))))
     (local.set $b (i32.const 200))
     (loop $next
       (drop (call $fields))
       (br_if $next (local.tee $b (i32.sub (local.get $b) (i32.const 1)))))
     (memory.fill (i32.const 4096) (i32.const 120) (i32.const 61440))
     (call $fields-append (call $fields) {name} (i32.const 4096) (i32.const 61440)
       (global.get $R)) (call $ok)
     (call $random-bytes (i64.const 65536) (global.get $R))
     (call $check (i32.eq (i32.load offset=4 (global.get $R)) (i32.const 65536)))
     (call $done)",
);

/// Tenant with all handlers as the function `f`.
fn tenant() -> TestTenant {
    let mut handlers = vec![WAIT, FAR];
    handlers.extend(ENDLESS);
    handlers.extend(TOO_FAR.map(|(letter, handler, _)| (letter, handler)));
    let text = ComponentText {
        texts: TEXTS,
        handler: &dispatch_by_letter(&handlers),
        ..ComponentText::default()
    };
    let tenant = TestTenant::start();
    tenant.deploy("f", &text.build(), FunctionLimits::default());
    tenant
}

/// Permits the processor time of 20,000 calls of a runtime that is not optimised.
fn allow_many_calls(tenant: &TestTenant) {
    let patient = FunctionLimits {
        cpu_ms: 5000,
        ..FunctionLimits::default()
    };
    limit(tenant, patient);
}

fn limit(tenant: &TestTenant, limits: FunctionLimits) {
    let function = "f".to_owned();
    let order = ControlRequest::Limit { function, limits };
    tenant.process.execute(&order).unwrap();
}

#[test]
fn a_component_that_exceeds_a_call_limit_is_terminated_with_a_log_entry() {
    let tenant = tenant();
    allow_many_calls(&tenant);
    let mut client = tenant.connect();
    for (letter, _, reason) in TOO_FAR {
        let answer = client.get("f", &format!("/{letter}"));
        assert_eq!(
            answer.fault(),
            (502, "function_trap".to_owned()),
            "{letter}"
        );
        let logged = tenant.logs("f", 0).pop().unwrap();
        assert!(logged.text.contains(reason), "{letter}: {}", logged.text);
        assert_eq!(client.get("f", "/z").text(), "ok", "after {letter}");
    }
    // Heads of requests have a limit, too (431 is Request Header Fields Too Large).
    let field = "x".repeat(200 << 10);
    let head = format!("GET /z HTTP/1.1\r\nhost: f\r\njiffy-function: f\r\nx-a: {field}\r\n\r\n");
    let mut client = tenant.connect();
    client.try_send(head.as_bytes());
    assert_eq!(client.status(), 431);
}

#[test]
fn endless_host_calls_are_terminated_and_output_is_bounded() {
    let tenant = tenant();
    let mut client = tenant.connect();
    for (letter, _) in ENDLESS {
        let answer = client.get("f", &format!("/{letter}"));
        assert_eq!(answer.fault(), (504, "function_cpu".to_owned()), "{letter}");
    }
    let entries = tenant.logs("f", 0).into_iter();
    let output = entries.filter(|entry| entry.stream == LogStream::Stdout);
    let bytes: usize = output.map(|entry| entry.text.len()).sum();
    assert_eq!(bytes, MAX_LOGGED_BYTES);
    let short = FunctionLimits {
        wall_ms: 300,
        ..FunctionLimits::default()
    };
    limit(&tenant, short);
    let answer = client.get("f", "/w");
    assert_eq!(answer.fault(), (504, "function_timeout".to_owned()));
}

#[test]
fn a_client_that_disconnects_before_the_response_terminates_its_guest() {
    let tenant = tenant();
    allow_many_calls(&tenant);
    let mut client = tenant.connect();
    client.send(b"GET /w HTTP/1.1\r\nhost: f\r\njiffy-function: f\r\n\r\n");
    tenant.wait_for("f", |metrics| metrics.running == 1);
    drop(client);
    tenant.wait_for("f", |metrics| metrics.running == 0);
    assert_eq!(tenant.metrics("f").faults.len(), 0);
    assert_eq!(tenant.connect().get("f", "/z").text(), "ok");
}

#[test]
fn a_component_of_too_many_instances_is_not_loaded() {
    let tenant = TestTenant::start();
    let load = |instances: usize| {
        let instances = "(core instance (instantiate $Empty))".repeat(instances);
        let text = ComponentText {
            handler: "(call $done)",
            more: &format!("(core module $Empty) {instances}"),
            ..ComponentText::default()
        };
        let compiled = tenant.compile(&text.build()).unwrap();
        let file = File::open(&compiled.0).unwrap();
        let limits = FunctionLimits::default();
        tenant.process.load("f", &file, &compiled.1, limits)
    };
    // A component may have 32 core instances.
    load(24).unwrap();
    let refused = load(40).unwrap_err().to_string();
    assert!(refused.contains("core module instances"), "{refused}");
    // The previous version remains active.
    assert_eq!(tenant.connect().get("f", "/").text(), "ok");
}
