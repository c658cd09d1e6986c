//! Tests that sandboxes survive the exit of their daemon, and that the next daemon adopts them.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran. The *warm pool* has
//! guests that were started in advance and wait for a create. They exit with their daemon.

use crate::support::test_home::TestHome;
use crate::support::{alive, wait_for};
use jiffy_test_attributes::jiffy_test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

/// Increments a counter in memory, and writes it to a file on disk. A pause or a replaced guest
/// would be visible.
const COUNTER: &str = "nohup sh -c 'i=0; while :; do i=$((i+1)); echo $i >/tmp/count; sleep 0.02; done' >/dev/null 2>&1 & echo $! >/tmp/pid";
/// Process of the counter, boot id and machine id. Together they identify this guest.
const IDENTITY_SCRIPT: &str = "cat /tmp/pid /proc/sys/kernel/random/boot_id /etc/machine-id; hostname; kill -0 $(cat /tmp/pid)";

fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
}

/// Returns the last number that the counter in the guest has written, or 0.
fn count(test_home: &TestHome, id: &str) -> u64 {
    let text = test_home.sh(id, "cat /tmp/count");
    // The counter may be writing the file at this moment.
    text.parse().unwrap_or(0)
}

/// Waits until the counter in the guest has advanced by at least three since `from`.
fn wait_for_counts(test_home: &TestHome, id: &str, from: u64) {
    wait_for("the counter to continue", || {
        (count(test_home, id) > from + 2).then_some(())
    });
}

fn state(test_home: &TestHome, id: &str) -> String {
    let all = test_home.json(&["ls", "--all"]);
    let of = all.as_array().unwrap().iter().find(|s| s["id"] == id);
    of.unwrap()["state"].as_str().unwrap().to_owned()
}

/// Returns the reason why a sandbox is broken.
fn cause(test_home: &TestHome, id: &str) -> String {
    let all = test_home.json(&["ls", "--all"]);
    let of = all.as_array().unwrap().iter().find(|s| s["id"] == id);
    of.unwrap()["cause"].as_str().unwrap().to_owned()
}

#[jiffy_test]
fn five_sandboxes_survive_a_killed_daemon_and_support_all_operations() {
    let test_home = TestHome::new();
    let ids: Vec<String> = (0..5).map(|_| test_home.ok(&["create"])).collect();
    let created = Instant::now();
    for id in &ids {
        test_home.sh(id, COUNTER);
    }
    let who = |id: &String| test_home.sh(id, IDENTITY_SCRIPT);
    let before: Vec<String> = ids.iter().map(who).collect();
    test_home.ok(&["snapshot", &ids[0], "--name", "before"]);
    let counted = count(&test_home, &ids[0]);
    let daemon = test_home.daemon();
    test_home.kill_daemon();
    let vmms = wait_for("the warm-pool VMMs to exit with their daemon", || {
        let vmms = test_home.vmms();
        (vmms.len() == 5).then_some(vmms)
    });
    assert_eq!(test_home.sockets(), 5);
    let directory = test_home.dir.path().join("run/vmm").metadata().unwrap();
    assert_eq!(directory.permissions().mode() & 0o777, 0o700);

    // The next command starts another daemon.
    let began = Instant::now();
    for id in &ids {
        assert_eq!(state(&test_home, id), "running");
    }
    eprintln!(
        "five sandboxes adopted and listed after {:?}",
        began.elapsed()
    );
    assert_ne!(test_home.daemon(), daemon);
    let after: Vec<String> = ids.iter().map(who).collect();
    assert_eq!(before, after, "a guest was replaced");
    assert!(vmms.is_subset(&test_home.vmms()));
    wait_for_counts(&test_home, &ids[0], counted);

    // Each sandbox performs a different operation.
    let counted = count(&test_home, &ids[1]);
    test_home.ok(&["snapshot", &ids[1], "--name", "after"]);
    wait_for_counts(&test_home, &ids[1], counted);
    let copy = test_home.ok(&["create", "--from", "after"]);
    wait_for_counts(&test_home, &copy, counted);
    test_home.ok(&["pause", &ids[2]]);
    test_home.ok(&["resume", &ids[2]]);
    assert_eq!(
        test_home.sh(&ids[2], "cat /tmp/pid"),
        before[2].lines().next().unwrap()
    );
    wait_for_counts(&test_home, &ids[2], 0);
    let children = test_home.json(&["fork", &ids[3], "-n", "2"]);
    let child = children["children"][0]["id"].as_str().unwrap().to_owned();
    wait_for_counts(&test_home, &child, 0);
    assert_ne!(who(&child), before[3]);
    test_home.ok(&["rollback", &ids[0], "before"]);
    wait_for_counts(&test_home, &ids[0], 0);
    test_home.ok(&["kill", &ids[4]]);

    // Repeat with adopted, snapshotted, forked, rolled back and resumed sandboxes.
    let living = [&ids[0], &ids[1], &ids[2], &ids[3], &child, &copy];
    let before: Vec<String> = living.iter().map(|id| who(id)).collect();
    test_home.kill_daemon();
    let after: Vec<String> = living.iter().map(|id| who(id)).collect();
    assert_eq!(before, after);
    let ran = created.elapsed().as_secs_f64();
    for id in living {
        let counted = count(&test_home, id);
        test_home.ok(&["pause", id]);
        test_home.ok(&["resume", id]);
        wait_for_counts(&test_home, id, counted);
    }
    assert_eq!(state(&test_home, &ids[4]), "killed");
    // The usage includes the time before both kills of the daemon. Four sandboxes ran all the time,
    // except for a pause, and at most eight at the same time: the five, the copy and two children.
    let (mut used, mut cpu) = (0.0, 0.0);
    for line in test_home.ok(&["usage", "--key", "owner", "--json"]).lines() {
        let day: serde_json::Value = serde_json::from_str(line).unwrap();
        used += day["sandboxSeconds"].as_f64().unwrap();
        cpu += day["cpuSeconds"].as_f64().unwrap();
    }
    let most = 8.0 * created.elapsed().as_secs_f64();
    assert!(used > 3.5 * ran && used < most, "{used} s of {ran} s");
    // A sandbox has two processors. The bound has some tolerance.
    assert!(cpu > 0.0 && cpu < 3.0 * used, "{cpu} s of {used} s");
}

#[jiffy_test]
fn a_stopped_daemon_leaves_its_sandboxes_running_unless_told_to_kill_them() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    test_home.sh(&id, COUNTER);
    let who = test_home.sh(&id, IDENTITY_SCRIPT);
    test_home.ok(&["snapshot", &id, "--name", "kept"]);
    test_home.ok(&["serve", "--stop"]);
    wait_for("the warm-pool VMMs to exit", || {
        (test_home.vmms().len() == 1).then_some(())
    });
    assert_eq!(test_home.sh(&id, IDENTITY_SCRIPT), who);

    signal(test_home.daemon(), Signal::SIGTERM);
    test_home.wait_for_daemon_exit();
    assert_eq!(test_home.sh(&id, IDENTITY_SCRIPT), who);

    let vmms = test_home.vmms();
    test_home.ok(&["serve", "--stop", "--kill-sandboxes"]);
    assert!(vmms.iter().all(|&vmm| !alive(vmm)), "{vmms:?}");
    assert!(cause(&test_home, &id).contains("the daemon exited"));
    test_home.ok(&["rollback", &id, "kept"]);

    // `--stop --kill-sandboxes` also works without a running daemon.
    test_home.kill_daemon();
    assert!(!test_home.vmms().is_empty());
    test_home.ok(&["serve", "--stop", "--kill-sandboxes"]);
    assert_eq!(test_home.vmms(), BTreeSet::new());
    assert_eq!(test_home.sockets(), 0);
}

#[jiffy_test]
fn sandboxes_that_ended_without_a_daemon_are_reported_and_leave_nothing() {
    let test_home = TestHome::new();
    let (dead, fine, asleep) = (
        test_home.ok(&["create"]),
        test_home.ok(&["create"]),
        test_home.ok(&["create"]),
    );
    test_home.sh(&asleep, "echo dream > /tmp/state");
    test_home.ok(&["snapshot", &dead, "--name", "kept"]);
    test_home.ok(&["pause", &asleep]);
    let resumed_vmm = |id: &str| -> u32 {
        // Pauses and resumes the sandbox, so that the VMM of the resume is the only new process.
        // The VMM of the paused sandbox exits after the answer.
        let sockets = test_home.sockets();
        test_home.ok(&["pause", id]);
        wait_for("the paused VMM to exit", || {
            (test_home.sockets() < sockets).then_some(())
        });
        let before = test_home.vmms();
        test_home.ok(&["resume", id]);
        let news: Vec<u32> = test_home.vmms().difference(&before).copied().collect();
        assert_eq!(news.len(), 1, "{news:?}");
        news[0]
    };
    // Without a warm pool, a new process belongs to the sandbox.
    test_home.ok(&["serve", "--stop"]);
    let mut serve = test_home.serve(&["--warm-pool", "0"]);
    let vmm = resumed_vmm(&dead);
    serve.kill().unwrap();
    serve.wait().unwrap();

    // One VMM is killed, and a file exists that is not a socket.
    signal(vmm, Signal::SIGKILL);
    wait_for("the VMM to exit", || (!alive(vmm)).then_some(()));
    std::fs::write(test_home.dir.path().join("run/vmm/notes"), "x").unwrap();
    // Sockets of `fine` and of the killed VMM, and the file. The next daemon removes two of them.
    assert_eq!(test_home.sockets(), 3);
    assert_eq!(state(&test_home, &fine), "running");
    assert_eq!(test_home.sockets(), 1);
    let report = cause(&test_home, &dead);
    assert!(
        report.contains("the VMM exited while no daemon was running"),
        "{report}"
    );
    test_home.ok(&["resume", &asleep]);
    assert_eq!(test_home.sh(&asleep, "cat /tmp/state"), "dream");
    test_home.ok(&["rollback", &dead, "kept"]);
    test_home.sh(&dead, "true");

    // Without its journal, the daemon has no sandboxes.
    test_home.kill_daemon();
    for name in ["state.db", "state.db-wal", "state.db-shm"] {
        let _ = std::fs::remove_file(test_home.dir.path().join(name));
    }
    assert_eq!(
        test_home.json(&["ls", "--all"]).as_array().unwrap().len(),
        0
    );
    wait_for("all VMMs to exit", || {
        test_home.vmms().is_empty().then_some(())
    });
}

#[jiffy_test]
fn a_hung_vmm_is_killed_and_reported() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    test_home.kill_daemon();
    let vmms = wait_for("the warm-pool VMMs to exit", || {
        let vmms = test_home.vmms();
        (vmms.len() == 1).then_some(vmms)
    });
    for &vmm in &vmms {
        signal(vmm, Signal::SIGSTOP);
    }
    assert_eq!(state(&test_home, &id), "broken");
    let report = cause(&test_home, &id);
    assert!(report.contains("did not reply"), "{report}");
    assert!(vmms.iter().all(|&vmm| !alive(vmm)));
}

#[jiffy_test]
fn a_daemon_killed_at_any_moment_of_an_operation_leaves_each_sandbox_whole_and_nothing_else() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "--memory", "1GiB"]);
    test_home.sh(&id, COUNTER);
    test_home.sh(
        &id,
        "head -c 30000000 /dev/urandom >/dev/shm/bulk; sha256sum /dev/shm/bulk >/tmp/sum",
    );
    test_home.ok(&["snapshot", &id, "--name", "kept"]);
    let pid = test_home.sh(&id, "cat /tmp/pid");
    let operations: [&[&str]; 5] = [
        &["snapshot", &id],
        &["pause", &id],
        &["fork", &id, "-n", "2"],
        &["rollback", &id, "kept"],
        &["create"],
    ];
    let kills = std::env::var("JIFFY_DAEMON_KILLS");
    let kills = kills.map_or(10, |kills| kills.parse().unwrap());
    let mut outcomes = BTreeSet::new();
    for (round, operation) in operations.iter().cycle().take(kills).enumerate() {
        // Create data to be written.
        test_home.sh(&id, "head -c 10000000 /dev/urandom >/dev/shm/new");
        let daemon = test_home.daemon();
        let mut command = crate::support::jiffy(operation);
        command
            .env("JIFFY_HOME", test_home.dir.path())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null());
        let mut running = command.spawn().unwrap();
        // The delays are spread over the durations of the operations. Any operation may be
        // interrupted.
        std::thread::sleep(Duration::from_millis(3 + round as u64 * 90 / kills as u64));
        signal(daemon, Signal::SIGKILL);
        test_home.wait_for_daemon_exit();
        let done = running.wait().unwrap();
        let now = state(&test_home, &id);
        outcomes.insert((operation[0], done.success(), now.clone()));
        match now.as_str() {
            "paused" => drop(test_home.ok(&["resume", &id])),
            "running" => {}
            other => panic!(
                "{operation:?} in round {round}: {other}: {}",
                cause(&test_home, &id)
            ),
        }
        let sum = test_home.sh(&id, "sha256sum -c /tmp/sum >/dev/null && cat /tmp/pid");
        assert_eq!(sum, pid, "{operation:?} in round {round}");
        wait_for_counts(&test_home, &id, 0);
        // The sandbox can still be snapshotted, and the snapshot contains its state.
        let name = format!("round{round}");
        test_home.ok(&["snapshot", &id, "--name", &name]);
        let copy = test_home.ok(&["create", "--from", &name]);
        test_home.sh(
            &copy,
            "sha256sum -c /tmp/sum >/dev/null && kill -0 $(cat /tmp/pid)",
        );
        for sandbox in test_home.json(&["ls"]).as_array().unwrap() {
            if sandbox["id"] != id.as_str() {
                test_home.ok(&["rm", sandbox["id"].as_str().unwrap()]);
            }
        }
        // One sandbox runs, and at most one warm-pool sandbox for each of the two sizes.
        wait_for("orphaned VMMs to exit", || {
            (test_home.sockets() == 1 && test_home.vmms().len() <= 3).then_some(())
        });
    }
    eprintln!("{outcomes:?}");
}

#[jiffy_test]
fn a_captured_snapshot_is_stored_although_the_daemon_or_the_sandbox_is_killed() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "--memory", "1GiB"]);
    let write = |word: &str| {
        let script = format!(
            "sudo mount -o remount,size=600M /dev/shm; head -c 300000000 /dev/urandom \
             >/dev/shm/bulk; sha256sum /dev/shm/bulk >/tmp/sum; echo {word} >/tmp/word"
        );
        test_home.sh(&id, &script);
    };
    let word_of = |id: &str| test_home.sh(id, "sha256sum -c /tmp/sum >/dev/null && cat /tmp/word");
    write("first");
    let first = test_home.ok(&["snapshot", &id, "--ack", "captured"]);
    test_home.kill_daemon();
    let copy = test_home.ok(&["create", "--from", &first]);
    assert_eq!(word_of(&copy), "first");
    assert_eq!(word_of(&id), "first");
    test_home.ok(&["rm", &copy]);

    write("second");
    let second = test_home.json(&["snapshot", &id, "--ack", "captured"]);
    assert_eq!(second["storing"], true);
    test_home.ok(&["kill", &id]);
    assert_eq!(state(&test_home, &id), "killed");
    let second = second["id"].as_str().unwrap();
    let copy = test_home.ok(&["create", "--from", second]);
    assert_eq!(word_of(&copy), "second");
    let shown = test_home.json(&["snapshots"]);
    let shown = shown.as_array().unwrap();
    assert!(shown.iter().all(|s| s.get("storing").is_none()));
    let retained = test_home.dir.path().join("snapshots").read_dir().unwrap();
    let names = retained.map(|e| e.unwrap().file_name().into_string().unwrap());
    // Files of a snapshot that is captured, but not stored yet.
    let left: Vec<String> = names.filter(|name| name.starts_with(".captured")).collect();
    assert_eq!(left, Vec::<String>::new());
}

#[jiffy_test(engine = "gvisor")]
fn a_sandbox_of_a_missing_engine_is_ended_and_reported() {
    let test_home = TestHome::new();
    let options = ["--network", "off", "--warm-pool", "0"];
    let mut daemon = test_home.serve(&options);
    let id = test_home.ok(&["create"]);
    test_home.ok(&["daemon", "stop"]);
    daemon.wait().unwrap();
    // The guest outlives its daemon.
    assert_eq!(test_home.vmms().len(), 1);
    let options = [&options[..], &["--engine", "microvm"]].concat();
    let mut daemon = test_home.serve_with(&options, &[("JIFFY_GVISOR", "/nonexistent")]);
    assert_eq!(state(&test_home, &id), "broken");
    let cause = cause(&test_home, &id);
    assert!(cause.contains("cannot use the engine gvisor"), "{cause}");
    wait_for("the guest to exit", || {
        test_home.vmms().is_empty().then_some(())
    });
    test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}
