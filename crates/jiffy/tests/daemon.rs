//! Tests for the daemon: start, status, stop, kill and its log; and random operations on real
//! guests while their daemon is killed.

use crate::support::test_home::TestHome;
use crate::support::{alive, finish, jiffy, read_until, wait_for};
use jiffy_test_attributes::jiffy_test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[jiffy_test]
fn the_daemon_starts_reports_restarts_with_its_options_and_stops() {
    let test_home = TestHome::new();
    // The exit code 3 reports that no daemon runs.
    let stopped = test_home.call(&["daemon", "status"]);
    assert_eq!(
        (stopped.code, stopped.stdout.trim()),
        (Some(3), "not running")
    );
    let bad = test_home.call(&["daemon", "start", "--warm-pol", "1"]);
    assert!(
        bad.code != Some(0) && bad.stderr.contains("--warm-pool"),
        "{bad:?}"
    );

    // The first start creates a key. Standard output, which may be a journal, contains only its
    // path.
    let mut first = jiffy(&["serve", "--listen", "127.0.0.1:0", "--warm-pool", "0"])
        .env("JIFFY_HOME", test_home.dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let place = test_home.dir.path().join("api-key").display().to_string();
    let mut output = first.stdout.take().unwrap();
    let mut printed = read_until(&mut output, &place);
    let socket = test_home.dir.path().join("run/jiffy.sock");
    wait_for("the daemon", || UnixStream::connect(&socket).ok());
    test_home.ok(&["daemon", "stop"]);
    first.wait().unwrap();
    output.read_to_string(&mut printed).unwrap();
    let key = std::fs::read_to_string(&place).unwrap();
    assert!(
        !key.trim().is_empty() && !printed.contains(key.trim()),
        "{printed}"
    );

    test_home.ok(&[
        "daemon",
        "start",
        "--listen",
        "127.0.0.1:0",
        "--warm-pool",
        "0",
        "--max-sandboxes",
        "1",
    ]);
    let id = test_home.ok(&["create"]);
    let full = test_home.call(&["create"]);
    assert_eq!(full.code, Some(1));
    assert!(full.stderr.contains("try again in"), "{full:?}");
    let status = test_home.json(&["daemon", "status"]);
    assert_eq!(status["running"], true);
    let listens = status["listen"].as_str().unwrap();
    assert!(listens.starts_with("http://127.0.0.1:"), "{listens}");
    assert_eq!(status["sandboxes"]["running"], 1);
    // The default memory of a sandbox.
    assert_eq!(status["memory_committed_mib"], 512);
    assert_eq!(status["refused"]["sandboxes"], 1);
    let pid = status["pid"].as_u64().unwrap();
    assert!(
        test_home
            .ok(&["daemon", "status"])
            .contains(&format!("process    {pid}"))
    );
    assert!(
        test_home
            .ok(&["daemon", "start"])
            .contains("already running")
    );

    test_home.ok(&["pause", &id]);
    test_home.ok(&["daemon", "restart"]);
    let again = test_home.json(&["daemon", "status"]);
    assert_ne!(again["pid"], status["pid"]);
    assert_eq!(again["arguments"], status["arguments"]);
    assert_eq!(again["sandboxes"]["paused"], 1);
    test_home.ok(&["resume", &id]);
    assert_ne!(
        test_home.call(&["create"]).code,
        Some(0),
        "the limit still applies"
    );
    test_home.ok(&["rm", &id]);
    test_home.ok(&["daemon", "stop"]);
    assert_eq!(test_home.call(&["daemon", "status"]).code, Some(3));

    // A daemon started implicitly by a command has no address until one is requested.
    let created = test_home.json(&["create"]);
    let id = created["id"].as_str().unwrap();
    assert!(test_home.json(&["daemon", "status"])["listen"].is_null());
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = held.local_addr().unwrap().to_string();
    let refused = test_home.call(&["daemon", "start", "--listen", &taken]);
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(refused.stderr.contains("cannot listen on"), "{refused:?}");
    let started = test_home.ok(&["daemon", "start", "--listen", "127.0.0.1:0"]);
    assert!(
        started.contains("listening on http://127.0.0.1:"),
        "{started}"
    );
    assert_eq!(test_home.sh(id, "echo runs on"), "runs on");
    // No output contains tokens of a sandbox.
    let listed = test_home.json(&["ls"]);
    let killed = test_home.json(&["kill", id]);
    for record in [&created, &listed[0], &killed[0]] {
        assert_eq!(record["id"], created["id"]);
        assert!(record["agent_token"].is_null(), "{record}");
    }
    test_home.ok(&["daemon", "stop"]);
}

#[jiffy_test]
fn stopping_daemon_and_sandboxes_does_not_wait_for_streams() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    let mut endless = jiffy(&["exec", &id, "--", "sh", "-c", "echo ready; exec sleep 1000"]);
    endless
        .env("JIFFY_HOME", test_home.dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut endless = endless.spawn().unwrap();
    read_until(endless.stdout.as_mut().unwrap(), "ready");
    let began = Instant::now();
    test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
    // In-flight operations have 10 s to finish, but this operation would not.
    assert!(began.elapsed() < Duration::from_secs(8));
    let done = finish(endless);
    assert_eq!(done.code, Some(125), "{done:?}");
}

#[jiffy_test]
fn the_log_names_request_and_sandbox_of_each_operation_and_no_secret() {
    let test_home = TestHome::new();
    let mut start = jiffy(&["daemon", "start", "--no-listen", "--log-format", "json"]);
    start
        .env("JIFFY_HOME", test_home.dir.path())
        .env("JIFFY_LOG", "trace")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    assert_eq!(finish(start.spawn().unwrap()).code, Some(0));
    let id = test_home.ok(&["create", "-e", "API_KEY=hunter2-in-env"]);
    test_home.ok(&["exec", &id, "-e", "OTHER=hunter3-in-env", "--", "true"]);
    test_home.ok(&["pause", &id]);
    test_home.ok(&["rm", &id]);
    test_home.ok(&["daemon", "stop"]);
    let file = test_home.dir.path().join("run/jiffy.log");
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let text = std::fs::read_to_string(file).unwrap();
    assert!(!text.contains("hunter"), "{text}");
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}")))
        .collect();
    for operation in ["create", "pause", "kill"] {
        let is_logged = lines.iter().any(|l| {
            let request = &l["spans"][0];
            l["span"]["operation"] == operation
                && l["span"]["sandbox"] == id.as_str()
                && l["fields"]["outcome"] == "ok"
                && request["name"] == "request"
                && request["id"].as_str().is_some_and(|id| !id.is_empty())
        });
        assert!(is_logged, "{operation} is not in {text}");
    }
}

/// xorshift (Marsaglia 2003) with a fixed seed.
struct TestRandom(u64);

impl TestRandom {
    /// Returns a number below `sides`.
    fn below(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % sides as u64).unwrap()
    }
}

/// Makes a random call. Returns whether the call succeeded: it may be rejected, or its daemon may
/// be killed.
fn random_call(test_home: &TestHome, random: &mut TestRandom) -> bool {
    let listed = test_home.call(&["ls", "--json"]);
    let Ok(Value::Array(all)) = serde_json::from_str(&listed.stdout) else {
        // The daemon was killed during the call; the next call starts another daemon.
        return false;
    };
    if all.len() < 3 {
        return test_home.call(&["create", "--memory", "128MiB"]).code == Some(0);
    }
    let id = all[random.below(all.len())]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let done = match random.below(8) {
        0 => test_home.call(&["fork", &id]),
        1 => test_home.call(&["pause", &id]),
        2 | 3 => test_home.call(&["resume", &id]),
        4 => test_home.call(&["snapshot", &id]),
        5 if all.len() > 5 => test_home.call(&["rm", &id]),
        6 => test_home.call(&["kill", &id]),
        _ => test_home.call(&["exec", &id, "--timeout", "10s", "--", "true"]),
    };
    done.code == Some(0)
}

#[jiffy_test]
fn random_operations_under_a_killed_daemon_end_with_nothing_wedged_lost_or_left_over() {
    let test_home = TestHome::new();
    test_home.ok(&["create", "--memory", "128MiB"]);
    let limit = Instant::now() + Duration::from_secs(25);
    let done = AtomicUsize::new(0);
    for round in 0..4u64 {
        std::thread::scope(|clients| {
            for client in 0..3u64 {
                let (test_home, done) = (&test_home, &done);
                clients.spawn(move || {
                    let mut random = TestRandom(0x9e37_79b9_7f4a_7c15 ^ (round * 3 + client + 1));
                    for _ in 0..8 {
                        if Instant::now() < limit && random_call(test_home, &mut random) {
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
            if round < 3 {
                // Kill the daemon in the middle of operations.
                std::thread::sleep(Duration::from_millis(300 + 250 * round));
                if let Some(pid) = status_pid(&test_home) {
                    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
                    wait_for("the daemon's end", || {
                        (!alive(pid.unsigned_abs())).then_some(())
                    });
                }
            }
        });
    }
    let done = done.load(Ordering::Relaxed);
    // Four rounds with three clients make at most 96 calls, of which many are interrupted.
    assert!(done > 20, "only {done} calls of 96 were done");
    let all = test_home.json(&["ls"]);
    let all = all.as_array().unwrap();
    assert!(!all.is_empty());
    for sandbox in all {
        let id = sandbox["id"].as_str().unwrap();
        // A sandbox is broken if its guest was killed with a daemon; all other sandboxes work.
        match sandbox["state"].as_str().unwrap() {
            "running" => drop(test_home.ok(&["exec", id, "--", "true"])),
            "paused" => drop(test_home.ok(&["resume", id])),
            state => assert_eq!(state, "broken", "{sandbox}"),
        }
        test_home.ok(&["rm", id]);
    }
    assert_eq!(test_home.json(&["ls"]).as_array().unwrap().len(), 0);
    let status = test_home.json(&["daemon", "status"]);
    // Only sandboxes of the warm pool, of 512 MiB each, still use memory.
    let warm = status["warm"].as_u64().unwrap();
    assert!(
        status["memory_committed_mib"].as_u64().unwrap() <= warm.max(1) * 512,
        "{status}"
    );
    test_home.ok(&["daemon", "stop"]);
    let home = test_home.dir.path().to_str().unwrap().to_owned();
    wait_for("the last process to exit", || {
        (!serves(&home)).then_some(())
    });
}

#[jiffy_test]
fn a_daemon_whose_data_directory_is_replaced_exits_without_removing_snapshots() {
    let test_home = TestHome::new();
    test_home.ok(&["daemon", "start", "--no-listen", "--warm-pool", "0"]);
    test_home.ok(&["create"]);
    let (former, vmms) = (test_home.daemon(), test_home.vmms());
    assert!(!vmms.is_empty());
    // Simulates `rm -r` of the directory and the start of a new daemon in it.
    let home = test_home.dir.path();
    let before = tempfile::tempdir().unwrap();
    let journal = ["state.db", "state.db-shm", "state.db-wal"];
    for part in ["locks", "run", "snapshots"].iter().chain(&journal) {
        std::fs::rename(home.join(part), before.path().join(part)).unwrap();
    }
    test_home.ok(&["daemon", "start", "--no-listen", "--warm-pool", "0"]);
    let id = test_home.ok(&["create"]);
    test_home.ok(&["pause", &id]);
    wait_for("the previous daemon and its guests to exit", || {
        let has_exited = |pid: &u32| !alive(*pid);
        (has_exited(&former) && vmms.iter().all(has_exited)).then_some(())
    });
    let log = std::fs::read_to_string(before.path().join("run/jiffy.log")).unwrap();
    assert!(log.contains("was removed or replaced"), "{log}");
    test_home.ok(&["resume", &id]);
    assert_eq!(test_home.sh(&id, "echo awake"), "awake");
}

/// Returns the process id of the running daemon.
fn status_pid(test_home: &TestHome) -> Option<i32> {
    let done = test_home.call(&["daemon", "status", "--json"]);
    let status: Value = serde_json::from_str(&done.stdout).ok()?;
    status["pid"].as_i64()?.try_into().ok()
}

/// Returns whether any process has a file of `home` open.
fn serves(home: &str) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter(|p| {
            p.file_name()
                .to_str()
                .is_some_and(|n| n.parse::<u32>().is_ok())
        })
        .filter(|p| p.file_name().to_str() != Some(&std::process::id().to_string()))
        .flat_map(|p| {
            std::fs::read_dir(p.path().join("fd"))
                .into_iter()
                .flatten()
                .flatten()
        })
        .filter_map(|fd| std::fs::read_link(fd.path()).ok())
        .any(|target| target.starts_with(home))
}
