//! Tests for compilation, loading, and replacement of versions.
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::support::{
    OWNER, PROBE, SetOnDrop, TestClient, TestTenant, constant, many_functions, repeated,
};
use jiffy_function_manager::tenant_process::{
    HTTP_SOCKET, ProcessError, ProcessSettings, TenantProcess,
};
use jiffy_function_runtime::artifact::HEADER_BYTES;
use jiffy_proto::function::{
    CompileLimits, ControlRequest, FunctionLimits, MAX_MODULE_BYTES, TenantLimits,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use wasm_encoder::{Function, ValType};

fn refused(tenant: &TestTenant, module: &[u8]) -> String {
    match tenant.compile(module) {
        Err(ProcessError::Compile(message)) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_module_that_cannot_run_is_rejected_with_the_reason() {
    let tenant = TestTenant::start();
    for (module, reason) in [
        (&b""[..], "not a WebAssembly"),
        (b"#!/bin/sh\nexit 0\n", "not a WebAssembly"),
        (b"(module)", "must export a 32-bit memory"),
        (
            b"(module (memory (export \"memory\") 1))",
            "jiffy_buf(i32) -> i32",
        ),
        (b"(module (import \"env\" \"f\" (func)))", "not env.f"),
        (b"(component)", "wasi:http/incoming-handler"),
        (b"\0asm\x01\0\0\0\xff\xff", "not valid"),
    ] {
        let message = refused(&tenant, module);
        assert!(message.contains(reason), "{message}");
    }
}

/// Returns a module with a single function of 800,000 additions.
fn one_large_function() -> Vec<u8> {
    let mut function = Function::new([(1, ValType::I64)]);
    let mut code = function.instructions();
    for _ in 0..800_000 {
        code.local_get(0).i64_const(1).i64_add().local_set(0);
    }
    code.end();
    repeated(1, &function)
}

#[test]
fn a_module_beyond_compile_limits_is_rejected_and_requests_continue() {
    let tenant = TestTenant::start();
    tenant.deploy("one", &constant("first"), FunctionLimits::default());
    let (many, one) = (many_functions(), one_large_function());
    let too_short = CompileLimits {
        cpu_s: 1,
        ..CompileLimits::default()
    };
    let too_small = CompileLimits {
        memory_bytes: 200 << 20,
        ..CompileLimits::default()
    };
    let too_slow = CompileLimits {
        time: Duration::from_millis(300),
        ..CompileLimits::default()
    };
    // These limits suffice for other modules.
    for limits in [too_short, too_small] {
        tenant.compile_within(PROBE, OWNER, limits).unwrap();
    }
    let done = AtomicBool::new(false);
    let answered = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = tenant.connect();
            while !done.load(Ordering::Relaxed) {
                assert_eq!(client.get("one", "/").text(), "first");
                answered.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _done = SetOnDrop(&done);
        for (module, limits, reason) in [
            (&many, too_short, "ran out of memory or time (signal: 9"),
            // The filter denies signals, also to the process itself, so that abort ends in a fault.
            (&one, too_small, "ran out of memory or time (signal: 11"),
            (&many, too_slow, "takes too long to compile"),
        ] {
            let before = answered.load(Ordering::Relaxed);
            let start = Instant::now();
            let refused = tenant.compile_within(module, OWNER, limits);
            println!("rejected within {:?}", start.elapsed());
            let message = refused.unwrap_err().to_string();
            assert!(message.contains(reason), "{message}");
            assert!(answered.load(Ordering::Relaxed) > before + 10, "{reason}");
        }
    });
}

#[test]
fn a_module_above_the_limit_of_size_is_not_compiled() {
    let tenant = TestTenant::start();
    let mut module = vec![0; usize::try_from(MAX_MODULE_BYTES).unwrap()];
    // Only the magic number, without a version.
    module[..4].copy_from_slice(b"\0asm");
    let message = refused(&tenant, &module);
    assert!(message.contains("not a WebAssembly"), "{message}");
    module.push(0);
    let message = refused(&tenant, &module);
    assert_eq!(message, "the module is larger than 64 MiB");
}

#[test]
fn truncated_and_mutated_modules_are_rejected_or_run_harmlessly() {
    let tenant = TestTenant::start();
    tenant.deploy("good", &constant("good"), FunctionLimits::default());
    let whole = wat::parse_bytes(PROBE).unwrap().into_owned();
    // Linear congruential generator with a fixed seed, so that a failure can be reproduced.
    let mut seed = 7u32;
    let mut random = |bound: usize| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as usize % bound
    };
    for round in 0..40 {
        let mut module = whole.clone();
        match round % 2 {
            0 => module.truncate(random(whole.len())),
            // One bit after the magic number and version, which have eight bytes.
            _ => module[8 + random(whole.len() - 8)] ^= 1 << random(8),
        }
        if let Ok(compiled) = tenant.compile(&module) {
            let file = File::open(&compiled.0).unwrap();
            let limits = FunctionLimits {
                cpu_ms: 10,
                ..FunctionLimits::default()
            };
            let loaded = tenant.process.load("mutant", &file, &compiled.1, limits);
            if loaded.is_ok() {
                tenant.connect().get("mutant", "/echo");
            }
        }
        assert_eq!(tenant.connect().get("good", "/").text(), "good");
    }
}

#[test]
fn forged_stale_and_foreign_files_are_not_loaded() {
    let tenant = TestTenant::start();
    tenant.deploy("one", &constant("first"), FunctionLimits::default());
    let refused = |path: &std::path::Path, digest: &str| {
        let file = File::open(path).unwrap();
        let loaded = tenant
            .process
            .load("one", &file, digest, FunctionLimits::default());
        loaded.unwrap_err().to_string()
    };
    let (path, digest) = tenant.compile(&constant("second")).unwrap();
    // Flips a bit of the byte at `at`, and loads the changed file with its own digest if
    // `forge_digest` is true, or else with the original digest. Returns the error.
    let edit = |at: usize, forge_digest: bool| {
        let forged = tenant.path();
        std::fs::copy(&path, &forged).unwrap();
        let file = File::options()
            .read(true)
            .write(true)
            .open(&forged)
            .unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at as u64).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at as u64).unwrap();
        let own = blake3::hash(&std::fs::read(&forged).unwrap())
            .to_hex()
            .to_string();
        refused(&forged, if forge_digest { &own } else { &digest })
    };
    // The daemon's digest of the file protects the code, and so does the digest in its header.
    assert!(
        edit(HEADER_BYTES + 5000, false).contains("digest of the compiled module does not match")
    );
    assert!(
        edit(HEADER_BYTES + 5000, true).contains("digest of the compiled module does not match")
    );
    // The header begins with the magic number (8 bytes), the kind of the module in byte 8, and 7
    // reserved bytes. Byte 16 is the first byte of the engine's fingerprint.
    assert!(edit(16, true).contains("another version"));
    assert!(edit(8, true).contains("another format"));
    let (foreign, foreign_digest) = tenant.compile_for(&constant("x"), "tenant-2").unwrap();
    assert!(refused(&foreign, &foreign_digest).contains("another owner"));
    assert!(refused(&path, "no digest").contains("digest"));
    assert_eq!(tenant.connect().get("one", "/").text(), "first");
}

#[test]
fn a_version_that_cannot_start_does_not_replace_the_previous_one() {
    let tenant = TestTenant::start();
    tenant.deploy("one", &constant("first"), FunctionLimits::default());
    let exports = r#"(memory (export "memory") 1)
        (func (export "jiffy_buf") (param i32) (result i32) (i32.const 0))
        (func (export "jiffy_handle") (param i32 i32) (result i32) (i32.const 0))
        (func (export "jiffy_out") (result i32) (i32.const 0))"#;
    for (start, reason) in [
        ("(unreachable)", "unreachable"),
        ("(loop $l (br $l))", "processor time"),
    ] {
        let module = format!("(module {exports} (func $start {start}) (start $start))");
        let (path, digest) = tenant.compile(module.as_bytes()).unwrap();
        let file = File::open(path).unwrap();
        let loaded = tenant
            .process
            .load("one", &file, &digest, FunctionLimits::default());
        let message = loaded.unwrap_err().to_string();
        assert!(message.contains(reason), "{message}");
    }
    assert_eq!(tenant.connect().get("one", "/").text(), "first");
}

#[test]
fn no_request_fails_while_versions_are_replaced_ten_times_a_second() {
    let tenant = TestTenant::start();
    let versions = [constant("version 1"), constant("version 2")];
    let versions = versions.map(|module| tenant.compile(&module).unwrap());
    tenant.load("one", &versions[0], FunctionLimits::default());
    let done = AtomicBool::new(false);
    let seen = [const { AtomicU32::new(0) }; 2];
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut client = tenant.connect();
                while !done.load(Ordering::Relaxed) {
                    let answer = client.get("one", "/");
                    assert_eq!(answer.status, 200, "{answer:?}");
                    let version = usize::from(answer.text() == "version 2");
                    seen[version].fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let _done = SetOnDrop(&done);
        let start = Instant::now();
        for round in 1..=30u32 {
            let due = start + Duration::from_millis(100) * round;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            tenant.load(
                "one",
                &versions[round as usize % 2],
                FunctionLimits::default(),
            );
        }
        // The number would be lower than ten per second with slow requests.
        assert!(start.elapsed() < Duration::from_secs(6));
    });
    assert!(
        seen.iter().all(|count| count.load(Ordering::Relaxed) > 10),
        "{seen:?}"
    );
}

#[test]
fn a_process_is_adopted_by_the_next_daemon_and_exits_without_one() {
    // The tenant's process outlives the thread that started it.
    let tenant = std::thread::spawn(TestTenant::start).join().unwrap();
    tenant.deploy("one", &constant("first"), FunctionLimits::default());
    let (directory, id) = (tenant.directory, tenant.process.id());
    tenant.process.detach();
    drop(tenant.process);
    let get = || TestClient::connect(&directory.path().join(HTTP_SOCKET)).get("one", "/");
    assert_eq!(get().text(), "first");
    let adopted = TenantProcess::adopt(directory.path()).unwrap();
    assert_eq!(adopted.id(), id);
    let refused = adopted.execute(&ControlRequest::Remove {
        function: "two".to_owned(),
    });
    assert!(matches!(refused, Err(ProcessError::Refused(_))));
    assert_eq!(get().text(), "first");
    // A killed process is not adopted.
    adopted.kill();
    let start = Instant::now();
    while !adopted.has_exited() {
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "the process is still running"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    adopted.detach();
    drop(adopted);
    assert!(TenantProcess::adopt(directory.path()).is_none());

    let settings = ProcessSettings {
        grace: Duration::from_secs(1),
        ..crate::support::settings(TenantLimits::default())
    };
    let process = TenantProcess::start(&settings, directory.path()).unwrap();
    let ended = File::from(process.pidfd().unwrap());
    process.detach();
    drop(process);
    let mut ended = [PollFd::new(ended.as_fd(), PollFlags::POLLIN)];
    let count = poll(&mut ended, PollTimeout::from(10_000u16)).unwrap();
    assert_eq!(count, 1, "the process keeps running without a daemon");
}

#[test]
fn a_request_without_a_valid_function_is_rejected() {
    let tenant = TestTenant::start();
    tenant.deploy("one", &constant("first"), FunctionLimits::default());
    for head in [
        "CONNECT one:80 HTTP/1.1\r\nhost: one\r\njiffy-function: one\r\n\r\n",
        "GET / HTTP/1.1\r\njiffy-function: one\r\n\r\n",
    ] {
        let mut client = tenant.connect();
        client.send(head.as_bytes());
        let answer = client.response().unwrap();
        assert_eq!(
            answer.fault(),
            (400, "invalid_request".to_owned()),
            "{head}"
        );
    }
}
