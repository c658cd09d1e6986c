//! Tests for the functions of WASI that modules of jiffy-core/1 may import.
//!
//! *jiffy-core/1* is the interface between the host and a core WebAssembly module. For each
//! request, the host calls the module's function `jiffy_buf`, writes the request to the returned
//! address, and calls `jiffy_handle`, which returns the length of the response. The host reads the
//! response at the address that `jiffy_out` returns.
#![allow(clippy::unwrap_used)]

use crate::support::TestTenant;
use jiffy_proto::function::{ControlRequest, FunctionLimits, LogStream};
use std::time::{Duration, Instant};

/// Answers with a letter for the result of each call, `A` for success. The calls are: output,
/// output from outside the memory, random numbers, too many random numbers, a time, an unknown
/// clock, a directory, and a sleep of 50 ms.
const IMPORTS: &str = r#"(module
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "random_get" (func $random (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "clock_time_get"
    (func $time (param i32 i64 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_prestat_get" (func $prestat (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "poll_oneoff"
    (func $poll (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 3)
  (data (i32.const 0) "200\n\n")
  (data (i32.const 64) "\60\00\00\00\05\00\00\00")
  (data (i32.const 96) "hello")
  (data (i32.const 128) "\00\00\00\7f\00\10\00\00")
  (global $at (mut i32) (i32.const 5))
  (func $put (param $errno i32)
    (i32.store8 (global.get $at) (i32.add (i32.const 65) (local.get $errno)))
    (global.set $at (i32.add (global.get $at) (i32.const 1))))
  (func (export "jiffy_buf") (param i32) (result i32) (i32.const 65536))
  (func (export "jiffy_handle") (param i32 i32) (result i32)
    (call $put (call $write (i32.const 1) (i32.const 64) (i32.const 1) (i32.const 80)))
    (call $put (call $write (i32.const 1) (i32.const 128) (i32.const 1) (i32.const 80)))
    (call $put (call $random (i32.const 1024) (i32.const 65536)))
    (call $put (call $random (i32.const 1024) (i32.const 65537)))
    (call $put (call $time (i32.const 1) (i64.const 0) (i32.const 200)))
    (call $put (call $time (i32.const 7) (i64.const 0) (i32.const 200)))
    (call $put (call $prestat (i32.const 3) (i32.const 200)))
    (memory.fill (i32.const 256) (i32.const 0) (i32.const 48))
    (i64.store (i32.const 280) (i64.const 50000000))
    (call $put (call $poll (i32.const 256) (i32.const 320) (i32.const 1) (i32.const 400)))
    (call $put (i32.load (i32.const 400)))
    (global.get $at))
  (func (export "jiffy_out") (result i32) (i32.const 0)))"#;

#[test]
fn imports_work_within_their_bounds() {
    let tenant = TestTenant::start();
    tenant.deploy("imports", IMPORTS.as_bytes(), FunctionLimits::default());
    let start = Instant::now();
    let answer = tenant.connect().get("imports", "/");
    // Errors: V fault, ] invalid, I bad descriptor; B is the number of events.
    assert_eq!((answer.status, answer.text()), (200, "AVA]A]IAB"));
    assert!(start.elapsed() >= Duration::from_millis(50));
    let entries = tenant.logs("imports", 0);
    let said: Vec<_> = entries
        .iter()
        .map(|e| (e.stream, e.text.as_str()))
        .collect();
    assert_eq!(said, [(LogStream::Stdout, "hello")]);
}

#[test]
fn unknown_imports_are_rejected() {
    let tenant = TestTenant::start();
    for (module, part) in [
        (
            r#"(module (import "env" "f" (func)))"#,
            "only from wasi_snapshot_preview1",
        ),
        (
            r#"(module (import "wasi_snapshot_preview1" "f" (func)))"#,
            "must export",
        ),
        (
            r#"(module (import "wasi_snapshot_preview1" "m" (memory 1)))"#,
            "must export",
        ),
    ] {
        let refused = tenant.compile(module.as_bytes()).unwrap_err().to_string();
        assert!(refused.contains(part), "{refused}");
    }
}

/// Calls an import in an endless loop. The first letter of the path selects the import: c clock, r
/// random numbers, o output, w a wait of an hour.
const ENDLESS: &str = r#"(module
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "random_get" (func $random (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "clock_time_get"
    (func $time (param i32 i64 i32) (result i32)))
  (import "wasi_snapshot_preview1" "poll_oneoff"
    (func $poll (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 3)
  (data (i32.const 64) "\00\10\00\00\00\10\00\00")
  (func (export "jiffy_buf") (param i32) (result i32) (i32.const 16384))
  (func (export "jiffy_handle") (param $at i32) (param i32) (result i32)
    (local $what i32)
    (local.set $what (i32.load8_u offset=5 (local.get $at)))
    (i32.store (i32.const 272) (i32.const 1))
    (i64.store (i32.const 280) (i64.const 3600000000000))
    (loop $next
      (if (i32.eq (local.get $what) (i32.const 99)) (then
        (drop (call $time (i32.const 1) (i64.const 0) (i32.const 200)))))
      (if (i32.eq (local.get $what) (i32.const 114)) (then
        (drop (call $random (i32.const 65536) (i32.const 65536)))))
      (if (i32.eq (local.get $what) (i32.const 111)) (then
        (drop (call $write (i32.const 1) (i32.const 64) (i32.const 1) (i32.const 80)))))
      (if (i32.eq (local.get $what) (i32.const 119)) (then
        (drop (call $poll (i32.const 256) (i32.const 320) (i32.const 1) (i32.const 400)))))
      (br $next))
    (unreachable))
  (func (export "jiffy_out") (result i32) (i32.const 0)))"#;

#[test]
fn endless_import_calls_are_terminated_and_output_is_bounded() {
    let tenant = TestTenant::start();
    tenant.deploy("endless", ENDLESS.as_bytes(), FunctionLimits::default());
    let mut client = tenant.connect();
    for path in ["/c", "/r", "/o"] {
        let answer = client.get("endless", path);
        assert_eq!(answer.fault(), (504, "function_cpu".to_owned()), "{path}");
    }
    let entries = tenant.logs("endless", 0).into_iter();
    let output = entries.filter(|entry| entry.stream == LogStream::Stdout);
    assert_eq!(
        output.map(|entry| entry.text.len()).sum::<usize>(),
        64 << 10
    );

    // A disconnecting client terminates the wait as well.
    let mut leaving = tenant.connect();
    leaving.send(b"GET /w HTTP/1.1\r\nhost: f\r\njiffy-function: endless\r\n\r\n");
    tenant.wait_for("endless", |metrics| metrics.running == 1);
    drop(leaving);
    tenant.wait_for("endless", |metrics| metrics.running == 0);
    assert!(
        !tenant
            .metrics("endless")
            .faults
            .contains_key("function_timeout")
    );

    let limits = FunctionLimits {
        wall_ms: 300,
        ..FunctionLimits::default()
    };
    let function = "endless".to_owned();
    let order = ControlRequest::Limit { function, limits };
    tenant.process.execute(&order).unwrap();
    let answer = client.get("endless", "/w");
    assert_eq!(answer.fault(), (504, "function_timeout".to_owned()));
}
