//! Imports of modules of jiffy-core/1.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use jiffy_proto::function::{ControlRequest, ControlResponse, FunctionLimits, LogStream};
use std::time::{Duration, Instant};
use support::TestTenant;

/// Answers with a letter for each call's result, A for success: output, output from outside of its
/// memory, random numbers, too many of them, a time, a clock that is not there, a directory, and a
/// sleep of 50 ms.
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
    // Errors: V fault, ] invalid, I bad descriptor; B is the one event.
    assert_eq!((answer.status, answer.text()), (200, "AVA]A]IAB"));
    assert!(start.elapsed() >= Duration::from_millis(50));
    let order = ControlRequest::Logs {
        function: "imports".to_owned(),
        sequence: 0,
    };
    let ControlResponse::Logs { entries } = tenant.process.order(&order).unwrap() else {
        panic!("no logs");
    };
    let said: Vec<_> = entries
        .iter()
        .map(|e| (e.stream, e.text.as_str()))
        .collect();
    assert_eq!(said, [(LogStream::Stdout, "hello")]);
}

#[test]
fn imports_of_other_names_are_refused() {
    let tenant = TestTenant::start();
    for (module, part) in [
        (
            r#"(module (import "env" "f" (func)))"#,
            "wasi_snapshot_preview1 only",
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
