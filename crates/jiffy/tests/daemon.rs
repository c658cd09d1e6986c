//! The daemon: started, looked at, stopped, killed; its log; and random lives of real guests under
//! a daemon that dies.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::place::Place;
use support::{alive, finish, jiffy, read_until, wait_for};

#[test]
fn the_daemon_is_started_looked_at_restarted_with_its_options_and_stopped() {
    let test = "the_daemon_is_started_looked_at_restarted_with_its_options_and_stopped";
    let Some(place) = Place::new(test) else {
        return;
    };
    let stopped = place.call(&["daemon", "status"]);
    assert_eq!(
        (stopped.code, stopped.stdout.trim()),
        (Some(3), "not running")
    );
    let bad = place.call(&["daemon", "start", "--warm-pol", "1"]);
    assert!(
        bad.code != Some(0) && bad.stderr.contains("--warm-pool"),
        "{bad:?}"
    );

    place.ok(&[
        "daemon",
        "start",
        "--listen",
        "127.0.0.1:0",
        "--warm-pool",
        "0",
        "--max-sandboxes",
        "1",
    ]);
    let id = place.ok(&["create"]);
    let full = place.call(&["create"]);
    assert_eq!(full.code, Some(1));
    assert!(full.stderr.contains("try again in"), "{full:?}");
    let status = place.json(&["daemon", "status"]);
    assert_eq!(status["running"], true);
    let listens = status["listen"].as_str().unwrap();
    assert!(listens.starts_with("http://127.0.0.1:"), "{listens}");
    assert_eq!(status["sandboxes"]["running"], 1);
    assert_eq!(status["memory_committed_mib"], 512);
    assert_eq!(status["refused"]["sandboxes"], 1);
    let pid = status["pid"].as_u64().unwrap();
    assert!(
        place
            .ok(&["daemon", "status"])
            .contains(&format!("process    {pid}"))
    );
    assert!(place.ok(&["daemon", "start"]).contains("runs already"));

    place.ok(&["pause", &id]);
    place.ok(&["daemon", "restart"]);
    let again = place.json(&["daemon", "status"]);
    assert_ne!(again["pid"], status["pid"]);
    assert_eq!(again["arguments"], status["arguments"]);
    assert_eq!(again["sandboxes"]["paused"], 1);
    place.ok(&["resume", &id]);
    assert_ne!(
        place.call(&["create"]).code,
        Some(0),
        "the limit is still there"
    );
    place.ok(&["rm", &id]);
    place.ok(&["daemon", "stop"]);
    assert_eq!(place.call(&["daemon", "status"]).code, Some(3));

    // One that a command starts by itself has no address, until it is asked for.
    let made = place.json(&["create"]);
    let id = made["id"].as_str().unwrap();
    assert!(place.json(&["daemon", "status"])["listen"].is_null());
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = held.local_addr().unwrap().to_string();
    let refused = place.call(&["daemon", "start", "--listen", &taken]);
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(refused.stderr.contains("cannot listen on"), "{refused:?}");
    let started = place.ok(&["daemon", "start", "--listen", "127.0.0.1:0"]);
    assert!(
        started.contains("listening on http://127.0.0.1:"),
        "{started}"
    );
    assert_eq!(place.sh(id, "echo runs on"), "runs on");
    // Tokens of a sandbox are in no output.
    let listed = place.json(&["ls"]);
    let killed = place.json(&["kill", id]);
    for record in [&made, &listed[0], &killed[0]] {
        assert_eq!(record["id"], made["id"]);
        assert!(record["agent_token"].is_null(), "{record}");
    }
    place.ok(&["daemon", "stop"]);
}

#[test]
fn an_end_of_daemon_and_sandboxes_waits_for_no_stream_into_them() {
    let test = "an_end_of_daemon_and_sandboxes_waits_for_no_stream_into_them";
    let Some(place) = Place::new(test) else {
        return;
    };
    let id = place.ok(&["create"]);
    let mut endless = jiffy(&["exec", &id, "--", "sh", "-c", "echo ready; exec sleep 1000"]);
    endless
        .env("JIFFY_HOME", place.dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut endless = endless.spawn().unwrap();
    read_until(endless.stdout.as_mut().unwrap(), "ready");
    let began = Instant::now();
    place.ok(&["daemon", "stop", "--kill-sandboxes"]);
    // Operations under way have 10 s to finish, and this one would not.
    assert!(began.elapsed() < Duration::from_secs(8));
    let done = finish(endless);
    assert_eq!(done.code, Some(125), "{done:?}");
}

#[test]
fn the_log_tells_each_operation_by_request_and_sandbox_and_no_secret() {
    let test = "the_log_tells_each_operation_by_request_and_sandbox_and_no_secret";
    let Some(place) = Place::new(test) else {
        return;
    };
    let mut start = jiffy(&["daemon", "start", "--no-listen", "--log-format", "json"]);
    start
        .env("JIFFY_HOME", place.dir.path())
        .env("JIFFY_LOG", "trace")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    assert_eq!(finish(start.spawn().unwrap()).code, Some(0));
    let id = place.ok(&["create", "-e", "API_KEY=hunter2-in-env"]);
    place.ok(&["exec", &id, "-e", "OTHER=hunter3-in-env", "--", "true"]);
    place.ok(&["pause", &id]);
    place.ok(&["rm", &id]);
    place.ok(&["daemon", "stop"]);
    let file = place.dir.path().join("run/jiffy.log");
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let text = std::fs::read_to_string(file).unwrap();
    assert!(!text.contains("hunter"), "{text}");
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}")))
        .collect();
    for operation in ["create", "pause", "kill"] {
        let told = lines.iter().any(|l| {
            let request = &l["spans"][0];
            l["span"]["operation"] == operation
                && l["span"]["sandbox"] == id.as_str()
                && l["fields"]["outcome"] == "ok"
                && request["name"] == "request"
                && request["id"].as_str().is_some_and(|id| !id.is_empty())
        });
        assert!(told, "{operation} is not in {text}");
    }
}

/// xorshift (Marsaglia 2003): the same throws every time.
struct Dice(u64);

impl Dice {
    fn throw(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % sides as u64).unwrap()
    }
}

/// True if it was done: others may be refused, or their daemon killed.
fn random_call(place: &Place, dice: &mut Dice) -> bool {
    let listed = place.call(&["ls", "--json"]);
    let Ok(Value::Array(all)) = serde_json::from_str(&listed.stdout) else {
        // The daemon was killed under it; the next call starts another.
        return false;
    };
    if all.len() < 3 {
        return place.call(&["create", "--memory", "128MiB"]).code == Some(0);
    }
    let id = all[dice.throw(all.len())]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let done = match dice.throw(8) {
        0 => place.call(&["fork", &id]),
        1 => place.call(&["pause", &id]),
        2 | 3 => place.call(&["resume", &id]),
        4 => place.call(&["snapshot", &id]),
        5 if all.len() > 5 => place.call(&["rm", &id]),
        6 => place.call(&["kill", &id]),
        _ => place.call(&["exec", &id, "--timeout", "10s", "--", "true"]),
    };
    done.code == Some(0)
}

#[test]
fn random_lives_under_a_daemon_that_is_killed_end_with_nothing_wedged_lost_or_left_over() {
    let test =
        "random_lives_under_a_daemon_that_is_killed_end_with_nothing_wedged_lost_or_left_over";
    let Some(place) = Place::new(test) else {
        return;
    };
    place.ok(&["create", "--memory", "128MiB"]);
    let limit = Instant::now() + Duration::from_secs(25);
    let done = AtomicUsize::new(0);
    for round in 0..4u64 {
        std::thread::scope(|clients| {
            for client in 0..3u64 {
                let (place, done) = (&place, &done);
                clients.spawn(move || {
                    let mut dice = Dice(0x9e37_79b9_7f4a_7c15 ^ (round * 3 + client + 1));
                    for _ in 0..8 {
                        if Instant::now() < limit && random_call(place, &mut dice) {
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
            if round < 3 {
                // In the middle of whatever they do.
                std::thread::sleep(Duration::from_millis(300 + 250 * round));
                if let Some(pid) = status_pid(&place) {
                    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
                    wait_for("the daemon's end", || {
                        (!alive(pid.unsigned_abs())).then_some(())
                    });
                }
            }
        });
    }
    let done = done.load(Ordering::Relaxed);
    assert!(done > 20, "only {done} calls of 96 were done");
    let all = place.json(&["ls"]);
    let all = all.as_array().unwrap();
    assert!(!all.is_empty());
    for sandbox in all {
        let id = sandbox["id"].as_str().unwrap();
        // Broken where its guest went with a daemon; whatever else is there works.
        match sandbox["state"].as_str().unwrap() {
            "running" => drop(place.ok(&["exec", id, "--", "true"])),
            "paused" => drop(place.ok(&["resume", id])),
            state => assert_eq!(state, "broken", "{sandbox}"),
        }
        place.ok(&["rm", id]);
    }
    assert_eq!(place.json(&["ls"]).as_array().unwrap().len(), 0);
    let status = place.json(&["daemon", "status"]);
    // Sandboxes of the warm pool have no owner.
    let warm = status["warm"].as_u64().unwrap();
    assert!(
        status["memory_committed_mib"].as_u64().unwrap() <= warm.max(1) * 512,
        "{status}"
    );
    place.ok(&["daemon", "stop"]);
    let home = place.dir.path().to_str().unwrap().to_owned();
    wait_for("the last process to leave", || {
        (!serves(&home)).then_some(())
    });
}

fn status_pid(place: &Place) -> Option<i32> {
    let done = place.call(&["daemon", "status", "--json"]);
    let status: Value = serde_json::from_str(&done.stdout).ok()?;
    status["pid"].as_i64()?.try_into().ok()
}

/// True if any process has a file of `home` open.
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
