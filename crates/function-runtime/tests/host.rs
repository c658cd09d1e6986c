//! Tests for functions of a host without a daemon: versions on disk and lifetime of a tenant's
//! process.
#![allow(clippy::unwrap_used, clippy::panic)]

mod kills;
mod modules;
mod refused_modules;
mod shares;

use crate::support::constant;
use http_body_util::{BodyExt, Empty};
use hyper::Request;
use jiffy_function_manager::egress::EgressSettings;
use jiffy_function_manager::{
    BoxError, DeployChanges, DeployQuota, FunctionError, FunctionHostSettings, FunctionRecord,
    Functions, MAX_UPLOADS, RequestBody, owner,
};
use jiffy_proto::function::{CompileLimits, MAX_FUNCTIONS, TenantLimits};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::future::poll_fn;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

/// Module that searches for marks of earlier requests.
#[cfg(feature = "fast-reset")]
const MARKS: &[u8] = include_bytes!("guests/marks.wat");
/// Name of the function, and id of the API key that owns it.
const NAME: &str = "hello";
const KEY: Option<&str> = Some("k1");
/// Maximum time of a request that waits for the start of a process, in an optimised build.
const BACK_WITHIN: Duration = Duration::from_millis(50);
/// Module that returns an empty answer and logs the received request.
const LOGGING: &str = r#"(module
    (import "wasi_snapshot_preview1" "fd_write"
        (func $write (param i32 i32 i32 i32) (result i32)))
    (memory (export "memory") 1) (data (i32.const 0) "200\n\n")
    (func (export "jiffy_buf") (param i32) (result i32) (i32.const 4096))
    (func (export "jiffy_handle") (param $at i32) (param $length i32) (result i32)
        (i32.store (i32.const 64) (local.get $at))
        (i32.store (i32.const 68) (local.get $length))
        (drop (call $write (i32.const 1) (i32.const 64) (i32.const 1) (i32.const 80)))
        (i32.const 5))
    (func (export "jiffy_out") (result i32) (i32.const 0)))"#;

/// Returns the settings of a function host with this data directory and idle timeout.
fn settings(directory: &Path, idle: Duration) -> FunctionHostSettings {
    FunctionHostSettings {
        directory: directory.to_owned(),
        program: Some(crate::support::program().to_owned()),
        jailed: true,
        cgroups: None,
        limits: TenantLimits::default(),
        compile: CompileLimits::default(),
        idle,
        grace: Duration::from_secs(10),
        egress: EgressSettings::default(),
    }
}

fn open(directory: &Path) -> Functions {
    Functions::open(settings(directory, Duration::from_secs(600)))
}

/// Deploys a module in binary or text form.
async fn deploy_module(
    functions: &Functions,
    key: Option<&str>,
    name: &str,
    module: &[u8],
) -> Result<Arc<FunctionRecord>, FunctionError> {
    let mut upload = functions.upload().unwrap();
    let binary = wat::parse_bytes(module).map_or(module.to_vec(), |binary| binary.into_owned());
    upload.write(&binary).unwrap();
    let changes = DeployChanges::default();
    functions.deploy(key, name, changes, upload).await
}

async fn deploy(functions: &Functions, text: &str) -> Arc<FunctionRecord> {
    let deployed = deploy_module(functions, KEY, NAME, &constant(text)).await;
    deployed.unwrap()
}

fn body() -> RequestBody {
    let body = Empty::new();
    body.map_err(|never| -> BoxError { match never {} })
        .boxed_unsync()
}

/// Sends a request to a function and returns the body of its response.
async fn try_get(functions: &Functions, key: Option<&str>, name: &str) -> Result<String, String> {
    let record = functions.find(key, name).map_err(|e| e.to_string())?;
    let request = Request::builder().uri("/").header("host", "f");
    let response = functions
        .send(&record, request.body(body()).unwrap())
        .await
        .map_err(|e| e.to_string())?;
    assert_eq!(response.status(), 200);
    let bytes = response.into_body().collect().await;
    let bytes = bytes.map_err(|e| e.to_string())?.to_bytes();
    Ok(String::from_utf8(bytes.to_vec()).unwrap())
}

async fn get(functions: &Functions) -> String {
    try_get(functions, KEY, NAME).await.unwrap()
}

fn process(functions: &Functions) -> u32 {
    let ids = functions.process_ids();
    assert_eq!(ids.len(), 1, "{ids:?}");
    ids[0].1
}

/// Returns the files below a directory, without files of a process.
fn files(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut remaining = vec![directory.to_owned()];
    while let Some(at) = remaining.pop() {
        for entry in std::fs::read_dir(at).into_iter().flatten().flatten() {
            if entry.file_type().unwrap().is_dir() {
                remaining.push(entry.path())
            } else {
                found.push(entry.file_name().to_string_lossy().into_owned())
            }
        }
    }
    found.retain(|name| !name.ends_with(".sock") && name != "process.json");
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_are_deployed_rolled_back_and_removed_without_a_trace() {
    let directory = tempfile::tempdir().unwrap();
    let functions = open(directory.path());
    for number in 1..=7 {
        let text = format!("version {number}");
        assert_eq!(deploy(&functions, &text).await.answering, number);
        assert_eq!(get(&functions).await, text);
    }
    // The record, and the module and the machine code of five versions.
    assert_eq!(files(directory.path()).len(), 1 + 5 + 5);
    functions.roll_back(KEY, NAME, Some(3)).await.unwrap();
    assert_eq!(get(&functions).await, "version 3");
    let refused = functions.roll_back(KEY, NAME, Some(2)).await;
    assert!(matches!(refused, Err(FunctionError::NoVersion { .. })));

    // A module that does not compile or start leaves the previous version unchanged, and adds no
    // file.
    let before = files(directory.path()).len();
    let trap = r#"(module (memory (export "memory") 1) (func $start unreachable) (start $start)
        (func (export "jiffy_buf") (param i32) (result i32) (i32.const 0))
        (func (export "jiffy_handle") (param i32 i32) (result i32) (i32.const 0))
        (func (export "jiffy_out") (result i32) (i32.const 0)))"#;
    for bad in [&b"no module"[..], b"(module)", trap.as_bytes()] {
        let refused = deploy_module(&functions, KEY, NAME, bad).await;
        assert!(
            matches!(refused, Err(FunctionError::Module(_))),
            "{refused:?}"
        );
        assert_eq!(get(&functions).await, "version 3");
        assert_eq!(files(directory.path()).len(), before);
    }

    // Another owner has its own process, and neither owner can access functions of the other.
    deploy_module(&functions, None, NAME, &constant("the host's"))
        .await
        .unwrap();
    assert_eq!(try_get(&functions, None, NAME).await.unwrap(), "the host's");
    assert_eq!(get(&functions).await, "version 3");
    assert!(functions.find(Some("k2"), NAME).is_err());
    let label = jiffy_function_manager::owner::label(KEY, NAME);
    assert_eq!(functions.find_label(&label).unwrap().owner.as_deref(), KEY);
    assert_eq!(functions.process_ids().len(), 2);
    functions.remove(None, NAME).await.unwrap();
    assert_eq!(get(&functions).await, "version 3");
    functions.remove_all(KEY).await;
    assert!(functions.process_ids().is_empty() && functions.list().is_empty());
    assert_eq!(files(directory.path()), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_has_a_thousand_functions_at_most() {
    let directory = tempfile::tempdir().unwrap();
    let functions = open(directory.path());
    deploy(&functions, "first").await;
    functions.stop_all().await;
    drop(functions);
    let records = directory.path().join(owner::directory_name(KEY));
    let records = records.join("records");
    let record = std::fs::read_to_string(records.join(format!("{NAME}.json"))).unwrap();
    for number in 1..MAX_FUNCTIONS {
        let name = format!("f{number}");
        let record = record.replace(
            &format!(r#""name":"{NAME}""#),
            &format!(r#""name":"{name}""#),
        );
        std::fs::write(records.join(format!("{name}.json")), record).unwrap();
    }

    let functions = open(directory.path());
    assert_eq!(functions.count(KEY), MAX_FUNCTIONS);
    let more = || deploy_module(&functions, KEY, "more", b"\0asm\x01\0\0\0");
    let refused = more().await;
    assert!(
        matches!(refused, Err(FunctionError::TooMany)),
        "{refused:?}"
    );
    // Existing functions can be changed at the limit, and other owners have their own limit.
    deploy(&functions, "second").await;
    assert_eq!(get(&functions).await, "second");
    let module = constant("another owner's");
    let other = deploy_module(&functions, None, "more", &module).await;
    other.unwrap();
    functions.remove(KEY, "f1").await.unwrap();
    // The limit no longer applies. The module is rejected because it is empty.
    let refused = more().await;
    assert!(
        matches!(refused, Err(FunctionError::Module(_))),
        "{refused:?}"
    );
    functions.stop_all().await;
}

#[tokio::test]
async fn concurrent_uploads_of_an_owner_are_bounded_and_others_wait() {
    let directory = tempfile::tempdir().unwrap();
    let functions = open(directory.path());
    let mut arriving = Vec::new();
    for _ in 0..MAX_UPLOADS {
        arriving.push(
            functions
                .upload_of(KEY, DeployQuota::default())
                .await
                .unwrap(),
        );
    }
    let mut waiting = pin!(functions.upload_of(KEY, DeployQuota::default()));
    assert!(poll_fn(|context| Poll::Ready(waiting.as_mut().poll(context).is_pending())).await);
    let another = functions.upload_of(Some("another"), DeployQuota::default());
    another.await.unwrap();
    arriving.pop();
    drop(waiting.await.unwrap());
    drop(arriving);
    assert_eq!(files(directory.path()), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_is_restarted_within_a_second_under_load() {
    let directory = tempfile::tempdir().unwrap();
    let functions = open(directory.path());
    deploy(&functions, "mine").await;
    deploy_module(&functions, None, "other", &constant("other"))
        .await
        .unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let failures = Arc::new(AtomicU32::new(0));
    let other = {
        let (functions, done, failures) = (functions.clone(), done.clone(), failures.clone());
        tokio::spawn(async move {
            while !done.load(Ordering::Relaxed) {
                if try_get(&functions, None, "other").await.is_err() {
                    failures.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                // The runtime cannot shut down while a task never yields.
                tokio::task::yield_now().await;
            }
        })
    };
    for _ in 0..3 {
        let ids = functions.process_ids();
        let (_, id) = *ids.iter().find(|(key, _)| key.as_deref() == KEY).unwrap();
        kill(Pid::from_raw(id as i32), Signal::SIGKILL).unwrap();
        let start = Instant::now();
        // A repeatable request succeeds.
        assert_eq!(get(&functions).await, "mine");
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "{:?}",
            start.elapsed()
        );
    }
    done.store(true, Ordering::Relaxed);
    other.await.unwrap();
    assert_eq!(failures.load(Ordering::Relaxed), 0);
    functions.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_and_its_metrics_survive_the_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let functions = open(directory.path());
    deploy(&functions, "first").await;
    assert_eq!(get(&functions).await, "first");
    let id = process(&functions);
    functions.detach_all().await;
    drop(functions);
    // Files of an interrupted deployment.
    let owner = std::fs::read_dir(directory.path()).unwrap().flatten();
    let owner = owner.map(|e| e.path()).find(|p| p.join("modules").exists());
    let stray = owner.unwrap().join("modules").join("stray.wasm");
    std::fs::write(&stray, "").unwrap();

    let functions = open(directory.path());
    assert_eq!(process(&functions), id);
    assert!(!stray.exists());
    assert_eq!(get(&functions).await, "first");
    assert_eq!(functions.metrics(KEY, NAME).await.unwrap().requests, 2);
    deploy(&functions, "second").await;
    assert_eq!(get(&functions).await, "second");
    // A killed daemon leaves the process as well. A process that exits meanwhile is started again.
    functions.detach_all().await;
    drop(functions);
    kill(Pid::from_raw(id as i32), Signal::SIGKILL).unwrap();
    let functions = open(directory.path());
    assert_eq!(get(&functions).await, "second");
    assert_ne!(process(&functions), id);
    functions.stop_all().await;
}

#[cfg(feature = "fast-reset")]
#[tokio::test(flavor = "multi_thread")]
async fn a_process_with_another_reset_is_replaced_and_its_metrics_remain() {
    use jiffy_proto::function::SlotReset;
    let directory = tempfile::tempdir().unwrap();
    let open = |reset| {
        let mut settings = settings(directory.path(), Duration::from_secs(600));
        settings.limits.reset = reset;
        Functions::open(settings)
    };
    let functions = open(SlotReset::Strict);
    let deployed = deploy_module(&functions, KEY, NAME, MARKS).await;
    deployed.unwrap();
    assert_eq!(get(&functions).await, "clean");
    let strict = process(&functions);
    functions.detach_all().await;
    drop(functions);

    let functions = open(SlotReset::Fast);
    assert_eq!(functions.process_ids(), []);
    // The process has exited, although its parent, this test, has not waited for it.
    let words = std::fs::read(format!("/proc/{strict}/cmdline")).unwrap_or_default();
    assert_eq!(words, b"");
    for _ in 0..3 {
        assert_eq!(get(&functions).await, "clean");
    }
    let fast = process(&functions);
    let words = std::fs::read(format!("/proc/{fast}/cmdline")).unwrap();
    let words = String::from_utf8(words).unwrap();
    assert!(words.contains("--reset\0fast\0"), "{words:?}");
    // One request to the first process, and three to the second.
    assert_eq!(functions.metrics(KEY, NAME).await.unwrap().requests, 4);
    functions.detach_all().await;
    drop(functions);

    let functions = open(SlotReset::Fast);
    assert_eq!(process(&functions), fast);
    assert_eq!(get(&functions).await, "clean");
    functions.detach_all().await;
    drop(functions);
    let functions = open(SlotReset::Strict);
    assert_eq!(get(&functions).await, "clean");
    assert_ne!(process(&functions), fast);
    functions.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_process_is_stopped_and_restarted_for_the_next_request() {
    let directory = tempfile::tempdir().unwrap();
    let idle = Duration::from_millis(100);
    let functions = Functions::open(settings(directory.path(), idle));
    deploy(&functions, "here").await;
    assert_eq!(get(&functions).await, "here");
    let mut best = Duration::MAX;
    // Other programs may occupy the processors: the best of five rounds counts.
    for round in 1..=5 {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !functions.process_ids().is_empty() {
            assert!(
                Instant::now() < deadline,
                "the idle process is still running"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let start = Instant::now();
        assert_eq!(get(&functions).await, "here");
        best = best.min(start.elapsed());
        let metrics = functions.metrics(KEY, NAME).await.unwrap();
        assert_eq!(metrics.requests, round + 1);
        if best < BACK_WITHIN {
            break;
        }
    }
    println!("restarted in {best:?}");
    // Test programs are not optimised, and may take three times as long.
    assert!(best < BACK_WITHIN * 3, "{best:?}");
    functions.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_fails_while_versions_are_deployed() {
    let directory = tempfile::tempdir().unwrap();
    let functions = open(directory.path());
    deploy(&functions, "version 0").await;
    deploy(&functions, "version 1").await;
    let done = Arc::new(AtomicBool::new(false));
    let clients = (0..3).map(|_| {
        let (functions, done) = (functions.clone(), done.clone());
        tokio::spawn(async move {
            let mut count = 0u32;
            while !done.load(Ordering::Relaxed) {
                assert!(get(&functions).await.starts_with("version"));
                count += 1;
            }
            count
        })
    });
    let clients: Vec<_> = clients.collect();
    let start = Instant::now();
    for round in 1..=30u32 {
        let due = start + Duration::from_millis(100) * round;
        tokio::time::sleep(due.saturating_duration_since(Instant::now())).await;
        deploy(&functions, &format!("version {}", round % 2)).await;
    }
    // The number would be lower than ten per second with slow requests.
    let elapsed = start.elapsed();
    assert!(elapsed < Duration::from_secs(6), "{elapsed:?}");
    done.store(true, Ordering::Relaxed);
    for client in clients {
        assert!(client.await.unwrap() > 10);
    }
    functions.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scheduled_function_is_called_at_its_times() {
    let directory = tempfile::tempdir().unwrap();
    let functions = open(directory.path());
    let mut upload = functions.upload().unwrap();
    let module = wat::parse_str(LOGGING).unwrap();
    upload.write(&module).unwrap();
    let changes = DeployChanges {
        // Once a year, on the first of January.
        schedule: Some("0 0 1 1 *".to_owned()),
        ..DeployChanges::default()
    };
    functions.deploy(KEY, NAME, changes, upload).await.unwrap();
    let status = || functions.schedule_status(KEY, NAME).unwrap().unwrap();
    let next = status().next_ms.unwrap();
    functions.run_schedules(jiff::Timestamp::from_millisecond(next).unwrap());
    let deadline = Instant::now() + Duration::from_secs(20);
    while status().last_status != Some(200) {
        assert!(Instant::now() < deadline, "{:?}", status());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(status().last_ms, Some(next));
    let logs = functions.logs(KEY, NAME, 0, Duration::ZERO).await.unwrap();
    // The function logs the scheduled request that it receives.
    let request: Vec<_> = logs.0.iter().map(|entry| entry.text.as_str()).collect();
    let expected = "POST /\nhost: localhost\njiffy-schedule: 0 0 1 1 *\n";
    assert!(request.concat().starts_with(expected), "{request:?}");
    assert_eq!(functions.metrics(KEY, NAME).await.unwrap().requests, 1);
    let changes = DeployChanges {
        schedule: Some(String::new()),
        ..DeployChanges::default()
    };
    let mut upload = functions.upload().unwrap();
    upload.write(&module).unwrap();
    functions.deploy(KEY, NAME, changes, upload).await.unwrap();
    assert_eq!(functions.schedule_status(KEY, NAME).unwrap(), None);
    functions.stop_all().await;
}
