//! Tests for functions through a daemon: commands, API, host names, keys, restarts.
//!
//! *jiffy-core/1* is the interface between the host and a core WebAssembly module. The *label* of a
//! function is the first part of its host name.

mod client;
mod deployments;
mod direct;
mod other_keys;
mod real_clients;
mod reset;
mod sandbox_keys;
mod shared_modules;
mod source;

use crate::support::remote::Remote;
use crate::support::{alive, wait_for};
use client::{FunctionClient, FunctionResponse};
use jiffy_test_attributes::jiffy_test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Guest for limit tests: `/echo`, `/spin`, `/memory` and others.
const PROBE: &[u8] = include_bytes!("../../../function-runtime/tests/guests/probe.wat");

/// Returns a module of jiffy-core/1 that answers every request with `text`.
fn constant(text: &str) -> Vec<u8> {
    let message = format!("200\\n\\n{text}");
    // An answer starts with its status and an empty list of headers: `200` and two line breaks are
    // five bytes.
    let length = text.len() + 5;
    wat::parse_str(format!(
        r#"(module (memory (export "memory") 1) (data (i32.const 0) "{message}")
            (func (export "jiffy_buf") (param i32) (result i32) (i32.const 4096))
            (func (export "jiffy_handle") (param i32 i32) (result i32) (i32.const {length}))
            (func (export "jiffy_out") (result i32) (i32.const 0)))"#
    ))
    .unwrap()
}

/// Daemon with functions, and the files of their modules.
struct FunctionDaemon {
    remote: Remote,
    modules: tempfile::TempDir,
    /// Address on which public functions answer directly.
    direct: String,
}

impl FunctionDaemon {
    /// Writes a module to a file.
    fn module(&self, module: &[u8]) -> PathBuf {
        let path = self.modules.path().join("module.wasm");
        std::fs::write(&path, module).unwrap();
        path
    }

    /// Deploys a function. Returns its description.
    fn deploy(&self, name: &str, module: &[u8], more: &[&str]) -> Value {
        let path = self.module(module);
        let deploy = ["function", "deploy", name, path.to_str().unwrap()];
        self.remote.json(&[&deploy, more].concat())
    }

    /// Opens a connection whose requests present a key.
    fn connect(&self, key: &str) -> FunctionClient {
        let headers = format!("host: localhost\r\nx-api-key: {key}\r\n");
        FunctionClient::connect(&self.remote.url, &headers)
    }

    /// Requests `path` with a key.
    fn by_path(&self, key: &str, path: &str) -> FunctionResponse {
        self.connect(key).get(path).unwrap()
    }

    /// Requests a function by its host name, without a key unless `headers` contain one.
    fn by_host(&self, label: &str, headers: &str) -> FunctionResponse {
        let headers = format!("host: {label}.fn.localhost\r\n{headers}");
        let mut client = FunctionClient::connect(&self.remote.url, &headers);
        client.get("/path").unwrap()
    }

    /// Creates a key with a scope.
    fn key(&self, scope: &str) -> String {
        let create = ["key", "create", "--name", scope, "--scope", scope];
        self.remote.test_home.ok(&create)
    }

    /// Returns the processes that run functions.
    fn processes(&self) -> Vec<u32> {
        let directory = self.remote.test_home.dir.path().join("functions");
        let owners = std::fs::read_dir(directory).into_iter().flatten().flatten();
        let ids = owners.filter_map(|owner| {
            let text = std::fs::read(owner.path().join("process.json")).ok()?;
            let process: Value = serde_json::from_slice(&text).ok()?;
            u32::try_from(process["pid"].as_u64()?).ok()
        });
        ids.filter(|id| alive(*id)).collect()
    }
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let nested = entries.flat_map(|entry| {
        if entry.file_type().unwrap().is_dir() {
            files(&entry.path())
        } else {
            vec![entry.path()]
        }
    });
    nested.collect()
}

/// Step of the test.
type Step = fn(&FunctionDaemon);

/// All steps use one daemon, because its start takes longer than most steps.
#[jiffy_test]
fn functions_are_deployed_reached_managed_and_survive() {
    let direct = direct::free_address();
    let remote = Remote::new(&["--functions-listen", &direct]);
    let daemon = FunctionDaemon {
        remote,
        modules: tempfile::tempdir().unwrap(),
        direct: format!("http://{direct}"),
    };
    let steps: [(&str, Step); 15] = [
        ("commands and versions", commands_and_versions),
        ("keys and public names", keys_and_public_names),
        ("calls of other keys", other_keys::calls_of_other_keys),
        ("budgets", other_keys::budgets),
        ("refused modules", deployments::refused_modules),
        ("schedules", deployments::schedules),
        ("direct requests", direct::direct_requests),
        ("real clients", real_clients::load_by_real_clients),
        ("limits and logs", limits_and_logs),
        ("swaps under load", swaps_under_load),
        ("scheduled calls", deployments::scheduled_calls),
        ("killed process", killed_process),
        ("restarted daemon", restarted_daemon),
        ("resets", reset::reset_is_reported_and_applied),
        ("removal", removal),
    ];
    for (name, step) in steps {
        let start = Instant::now();
        step(&daemon);
        println!("{name}: {:?}", start.elapsed());
    }
}

/// Tests deployments and the commands for versions.
fn commands_and_versions(daemon: &FunctionDaemon) {
    let remote = &daemon.remote;
    let bad = daemon.module(b"no module");
    let refused = remote.call(&["function", "deploy", "hello", bad.to_str().unwrap()]);
    assert!(
        refused.code == Some(1) && refused.stderr.contains("not a WebAssembly"),
        "{refused:?}"
    );
    assert_eq!(remote.json(&["function", "ls"]), serde_json::json!([]));
    for number in 1..=6 {
        let deployed = daemon.deploy("hello", &constant(&format!("hello {number}")), &[]);
        assert_eq!(deployed["version"], number);
        let answer = remote.ok(&["function", "invoke", "hello", "/some/path?x=1"]);
        assert_eq!(answer, format!("hello {number}"));
    }
    let versions = remote.json(&["function", "versions", "hello"]);
    let numbers: Vec<_> = versions
        .as_array()
        .unwrap()
        .iter()
        .map(|v| &v["version"])
        .collect();
    // The five newest versions are retained.
    assert_eq!(numbers, [6, 5, 4, 3, 2]);
    remote.ok(&["function", "rollback", "hello"]);
    assert_eq!(remote.ok(&["function", "invoke", "hello"]), "hello 5");
    let gone = remote.call(&["function", "rollback", "hello", "1"]);
    assert!(gone.stderr.contains("no longer exists"), "{gone:?}");

    remote.ok(&["function", "disable", "hello"]);
    let refused = daemon
        .by_path(&remote.key, "/functions/hello/invoke/")
        .refusal();
    assert_eq!(refused, (503, "function_disabled".to_owned()));
    remote.ok(&["function", "enable", "hello"]);
    let answer = daemon.by_path(&remote.key, "/functions/hello/invoke");
    assert_eq!((answer.status, answer.text().as_str()), (200, "hello 5"));
    // A page requested by path must not access the control plane on the same origin.
    let policy = answer.header("content-security-policy").unwrap();
    assert!(policy.starts_with("sandbox"), "{policy}");
    let info = remote.ok(&["function", "info", "hello"]);
    assert!(
        info.contains("requests") && info.contains("jiffy-core/1"),
        "{info}"
    );
    let task = ["bench", "functions", "--function", "hello"];
    let bench = remote.json(&[&task[..], &["-n", "50", "-c", "4"]].concat());
    let requests = &bench["series"][0]["samples"];
    assert_eq!(requests.as_array().unwrap().len(), 50, "{bench}");
}

/// Tests which callers reach a function by its name and by its host name.
fn keys_and_public_names(daemon: &FunctionDaemon) {
    let remote = &daemon.remote;
    let info = remote.json(&["function", "info", "hello"]);
    let label = info["label"].as_str().unwrap();
    let key = |key: &str| format!("authorization: Bearer {key}\r\n");
    let own = daemon.by_host(label, &key(&remote.key));
    assert_eq!((own.status, own.text().as_str()), (200, "hello 5"));
    assert!(own.header("content-security-policy").is_none());
    assert_eq!(daemon.by_host(label, "").refusal().0, 401);

    let other = daemon.key("create");
    let unknown = (404, "function_not_found".to_owned());
    assert_eq!(daemon.by_host(label, &key(&other)).refusal(), unknown);
    for call in ["", "/invoke/", "/versions", "/logs", "/metrics"] {
        for name in ["hello", label] {
            let path = format!("/functions/{name}{call}");
            assert_eq!(daemon.by_path(&other, &path).refusal(), unknown, "{path}");
        }
    }
    assert_eq!(daemon.by_path(&other, "/functions?all=true").text(), "[]");
    // Inspecting does not include invoking.
    let reader = daemon.key("read");
    assert_eq!(daemon.by_host(label, &key(&reader)).refusal().0, 403);
    let invoke = daemon.by_path(&reader, &format!("/functions/{label}/invoke/"));
    assert_eq!(invoke.refusal().0, 403);
    let seen = daemon.by_path(&reader, "/functions?all=true").text();
    assert!(seen.contains(label), "{seen}");

    // A function of the same name of another key, in a separate process.
    let path = daemon.module(&constant("the other's"));
    let mut deploy = remote.command(&["function", "deploy", "hello", path.to_str().unwrap()]);
    let deployed = crate::support::finish(deploy.env("JIFFY_API_KEY", &other).spawn().unwrap());
    assert_eq!(deployed.code, Some(0), "{deployed:?}");
    let answer = daemon.by_path(&other, "/functions/hello/invoke/");
    assert_eq!(answer.text(), "the other's");
    let answer = daemon.by_path(&remote.key, "/functions/hello/invoke/");
    assert_eq!(answer.text(), "hello 5");
    assert_eq!(daemon.processes().len(), 2);
    let removed = daemon
        .connect(&other)
        .send("DELETE", "/functions/hello", b"");
    assert_eq!(removed.unwrap().status, 204);

    daemon.deploy("hello", &constant("public"), &["--public"]);
    assert_eq!(daemon.by_host(label, "").text(), "public");
    for missing in ["hello--000000000000", "hello"] {
        assert_eq!(daemon.by_host(missing, &key(&other)).refusal(), unknown);
        // As for private functions: without a key, the existence of a function is not disclosed.
        assert_eq!(daemon.by_host(missing, "").refusal().0, 401);
    }
}

/// Tests that exceeded limits end a request, and that the log shows its output.
fn limits_and_logs(daemon: &FunctionDaemon) {
    let remote = &daemon.remote;
    let module = wat::parse_bytes(PROBE).unwrap();
    daemon.deploy("probe", &module, &["--timeout", "2s", "--concurrency", "2"]);
    let mut client = daemon.connect(&remote.key);
    for (path, status, code) in [
        ("spin", 504, "function_cpu"),
        ("memory", 502, "function_memory"),
        ("unreachable", 502, "function_trap"),
        ("giant", 502, "response_too_large"),
    ] {
        let answer = client
            .get(&format!("/functions/probe/invoke/{path}"))
            .unwrap();
        assert_eq!(answer.refusal(), (status, code.to_owned()), "{path}");
    }
    let echo = "/functions/probe/invoke/echo";
    assert_eq!(client.send("POST", echo, b"body").unwrap().text(), "body");
    let large = vec![0; (10 << 20) + 1];
    let mut sender = daemon.connect(&remote.key);
    let answer = sender.send("POST", echo, &large).unwrap();
    assert_eq!(answer.refusal(), (413, "request_too_large".to_owned()));

    // The log uses the gateway's request id, regardless of the client's headers.
    let mut logs = remote.command(&["function", "logs", "-f", "probe"]);
    let mut logs = logs.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let headers = format!(
        "host: localhost\r\nx-api-key: {}\r\nx-request-id: chosen\r\n",
        remote.key
    );
    let mut client = FunctionClient::connect(&remote.url, &headers);
    let answer = client.get("/functions/probe/invoke/unreachable").unwrap();
    let id = answer.header("x-request-id").unwrap();
    assert_eq!(id.len(), 32, "{id}");
    let mut lines = BufReader::new(logs.stdout.take().unwrap()).lines();
    let line = lines.find(|line| line.as_ref().unwrap().contains(&id));
    let line = line.unwrap().unwrap();
    assert!(
        line.contains("fault") && line.contains("function_trap"),
        "{line}"
    );
    logs.kill().unwrap();
    logs.wait().unwrap();
    let all = remote.ok(&["function", "logs", "probe"]);
    assert!(
        !all.contains("chosen") && all.contains("function_cpu"),
        "{all}"
    );
    let info = remote.json(&["function", "info", "probe"]);
    // `unreachable` was requested twice.
    assert_eq!(info["metrics"]["faults"]["function_trap"], 2, "{info}");
}

/// Tests that no request fails while versions are replaced ten times per second.
fn swaps_under_load(daemon: &FunctionDaemon) {
    let versions = [constant("version 0"), constant("version 1")];
    daemon.deploy("swap", &versions[0], &[]);
    daemon.deploy("swap", &versions[1], &[]);
    let (done, count) = (AtomicBool::new(false), AtomicU32::new(0));
    let seconds = std::env::var("JIFFY_FUNCTION_SWAP_SECONDS");
    let seconds = seconds.map_or(2, |s| s.parse().unwrap());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut client = daemon.connect(&daemon.remote.key);
                while !done.load(Ordering::Relaxed) {
                    let answer = client.get("/functions/swap/invoke/").unwrap();
                    assert_eq!(answer.status, 200, "{answer:?}");
                    assert!(answer.text().starts_with("version "), "{answer:?}");
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let _done = crate::support::SetOnDrop(&done);
        let mut client = daemon.connect(&daemon.remote.key);
        let start = Instant::now();
        for round in 1..=seconds * 10 {
            let due = start + Duration::from_millis(100) * round;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            // Versions 1 and 2 exist.
            let version = 1 + round % 2;
            let body = format!("{{\"version\":{version}}}");
            let answer = client.send("POST", "/functions/swap/rollback", body.as_bytes());
            assert_eq!(answer.unwrap().status, 200);
        }
        // Slow requests would delay the rollbacks: at least five per second are required.
        let elapsed = start.elapsed();
        assert!(
            elapsed < Duration::from_millis(200) * seconds * 10,
            "{elapsed:?}"
        );
    });
    assert!(count.into_inner() > 100);
}

/// Tests the restrictions of a process. Also tests that a killed process is replaced, and that
/// processes of other keys continue.
fn killed_process(daemon: &FunctionDaemon) {
    // Only one key has functions at this point.
    let [id] = daemon.processes()[..] else {
        panic!("{:?}", daemon.processes());
    };
    // The process has no access to the daemon's log, no core files, and a limit of file sizes.
    let error = std::fs::read_link(format!("/proc/{id}/fd/2")).unwrap();
    assert!(error.to_string_lossy().starts_with("pipe:"), "{error:?}");
    let limits = std::fs::read_to_string(format!("/proc/{id}/limits")).unwrap();
    let limit = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().split_whitespace().next().unwrap().to_owned()
    };
    assert_eq!(limit("Max core file size"), "0");
    assert_eq!(limit("Max file size"), (8u64 << 30).to_string());
    let other = daemon.key("create");
    let path = daemon.module(&constant("other"));
    let deploy = ["function", "deploy", "other", path.to_str().unwrap()];
    let mut deploy = daemon.remote.command(&deploy);
    crate::support::finish(deploy.env("JIFFY_API_KEY", &other).spawn().unwrap());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = daemon.connect(&other);
            while !done.load(Ordering::Relaxed) {
                let answer = client.get("/functions/other/invoke/").unwrap();
                assert_eq!(
                    answer.status, 200,
                    "other requests are unaffected: {answer:?}"
                );
            }
        });
        for _ in 0..2 {
            scope.spawn(|| {
                let mut client = daemon.connect(&daemon.remote.key);
                while !done.load(Ordering::Relaxed) {
                    // Requests in flight may fail.
                    let _ = client.get("/functions/swap/invoke/").unwrap();
                }
            });
        }
        let _done = crate::support::SetOnDrop(&done);
        std::thread::sleep(Duration::from_millis(100));
        kill(Pid::from_raw(id as i32), Signal::SIGKILL).unwrap();
        let killed = Instant::now();
        let back = wait_for("the process", || {
            let answer = daemon.by_path(&daemon.remote.key, "/functions/swap/invoke/");
            (answer.status == 200).then(|| killed.elapsed())
        });
        assert!(back < Duration::from_secs(1), "{back:?}");
    });
    let removed = daemon
        .connect(&other)
        .send("DELETE", "/functions/other", b"");
    assert_eq!(removed.unwrap().status, 204);
}

/// Tests that functions answer after the exit of their daemon.
fn restarted_daemon(daemon: &FunctionDaemon) {
    let remote = &daemon.remote;
    let before = daemon.processes();
    assert_eq!(remote.ok(&["function", "invoke", "hello"]), "public");
    remote.test_home.ok(&["daemon", "restart"]);
    assert_eq!(
        daemon.processes(),
        before,
        "the process outlives the daemon"
    );
    let local = |args: &[&str]| remote.test_home.ok(args);
    let status = remote.test_home.json(&["daemon", "status"]);
    let url = status["listen"].as_str().unwrap();
    let headers = format!("host: localhost\r\nx-api-key: {}\r\n", remote.key);
    let mut client = FunctionClient::connect(url, &headers);
    let answer = client.get("/functions/hello/invoke/").unwrap();
    assert_eq!(answer.text(), "public");
    // The process also survives a killed daemon, and the next daemon uses it.
    remote.test_home.kill_daemon();
    local(&["daemon", "start", "--listen", "127.0.0.1:0"]);
    assert_eq!(daemon.processes(), before);
    let all = remote.test_home.json(&["function", "ls", "--all"]);
    // `hello`, `probe` and `swap`.
    assert_eq!(all.as_array().unwrap().len(), 3, "{all}");
    let label = all[0]["label"].as_str().unwrap();
    assert_eq!(local(&["function", "invoke", label]), "public");
    // Without a daemon, the command that kills all sandboxes also kills the process.
    remote.test_home.kill_daemon();
    assert_eq!(daemon.processes(), before);
    local(&["serve", "--stop", "--kill-sandboxes"]);
    assert_eq!(daemon.processes(), [0; 0]);
    local(&["daemon", "start", "--listen", "127.0.0.1:0"]);
    assert_eq!(local(&["function", "invoke", label]), "public");
}

/// Tests that removed functions leave neither files nor processes.
fn removal(daemon: &FunctionDaemon) {
    let home = &daemon.remote.test_home;
    let all = home.json(&["function", "ls", "--all"]);
    let labels = all
        .as_array()
        .unwrap()
        .iter()
        .map(|f| f["label"].as_str().unwrap());
    let labels: Vec<_> = labels.collect();
    home.ok(&[&["function", "rm"][..], &labels].concat());
    let directory = home.dir.path().join("functions");
    assert_eq!(files(&directory), Vec::<PathBuf>::new());
    assert_eq!(daemon.processes(), [0; 0]);
}
