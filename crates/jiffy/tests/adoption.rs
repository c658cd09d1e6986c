//! Sandboxes outlive their daemon, and the next daemon takes them over, with real guests.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};
use support::engine::on_gvisor;
use support::place::Place;
use support::{alive, wait_for};

/// Counts in memory, and shows how far it is in a file on the disk; what a pause or a lost guest
/// would not survive unnoticed.
const COUNTER: &str = "nohup sh -c 'i=0; while :; do i=$((i+1)); echo $i >/tmp/count; sleep 0.02; done' >/dev/null 2>&1 & echo $! >/tmp/pid";
/// The counter's process, the boot id and the machine id: what only this very guest has.
const WHO: &str = "cat /tmp/pid /proc/sys/kernel/random/boot_id /etc/machine-id; hostname; kill -0 $(cat /tmp/pid)";

fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
}

fn count(place: &Place, id: &str) -> u64 {
    let text = place.sh(id, "cat /tmp/count");
    // The counter may just be writing it.
    text.parse().unwrap_or(0)
}

fn counts_on(place: &Place, id: &str, from: u64) {
    wait_for("the counter to go on", || {
        (count(place, id) > from + 2).then_some(())
    });
}

fn state(place: &Place, id: &str) -> String {
    let all = place.json(&["ls", "--all"]);
    let of = all.as_array().unwrap().iter().find(|s| s["id"] == id);
    of.unwrap()["state"].as_str().unwrap().to_owned()
}

fn cause(place: &Place, id: &str) -> String {
    let all = place.json(&["ls", "--all"]);
    let of = all.as_array().unwrap().iter().find(|s| s["id"] == id);
    of.unwrap()["cause"].as_str().unwrap().to_owned()
}

#[test]
fn five_sandboxes_outlive_a_killed_daemon_and_everything_can_be_done_with_them() {
    let test = "five_sandboxes_outlive_a_killed_daemon_and_everything_can_be_done_with_them";
    let Some(place) = Place::new(test) else {
        return;
    };
    let ids: Vec<String> = (0..5).map(|_| place.ok(&["create"])).collect();
    for id in &ids {
        place.sh(id, COUNTER);
    }
    let who = |id: &String| place.sh(id, WHO);
    let before: Vec<String> = ids.iter().map(who).collect();
    place.ok(&["snapshot", &ids[0], "--name", "before"]);
    let counted = count(&place, &ids[0]);
    let daemon = place.daemon();
    place.kill_daemon();
    let vmms = wait_for("the warm pool to go with its daemon", || {
        let vmms = place.vmms();
        (vmms.len() == 5).then_some(vmms)
    });
    assert_eq!(place.sockets(), 5);
    let directory = place.dir.path().join("run/vmm").metadata().unwrap();
    assert_eq!(directory.permissions().mode() & 0o777, 0o700);

    // The next command starts another daemon.
    let began = Instant::now();
    for id in &ids {
        assert_eq!(state(&place, id), "running");
    }
    eprintln!(
        "five sandboxes adopted and listed after {:?}",
        began.elapsed()
    );
    assert_ne!(place.daemon(), daemon);
    let after: Vec<String> = ids.iter().map(who).collect();
    assert_eq!(before, after, "a guest is not the one it was");
    assert!(vmms.is_subset(&place.vmms()));
    counts_on(&place, &ids[0], counted);

    // Each does something else.
    let counted = count(&place, &ids[1]);
    place.ok(&["snapshot", &ids[1], "--name", "after"]);
    counts_on(&place, &ids[1], counted);
    let copy = place.ok(&["create", "--from", "after"]);
    counts_on(&place, &copy, counted);
    place.ok(&["pause", &ids[2]]);
    place.ok(&["resume", &ids[2]]);
    assert_eq!(
        place.sh(&ids[2], "cat /tmp/pid"),
        before[2].lines().next().unwrap()
    );
    counts_on(&place, &ids[2], 0);
    let children = place.json(&["fork", &ids[3], "-n", "2"]);
    let child = children["children"][0]["id"].as_str().unwrap().to_owned();
    counts_on(&place, &child, 0);
    assert_ne!(who(&child), before[3]);
    place.ok(&["rollback", &ids[0], "before"]);
    counts_on(&place, &ids[0], 0);
    place.ok(&["kill", &ids[4]]);

    // Again, with what was adopted, snapshotted, forked, rewound and woken.
    let living = [&ids[0], &ids[1], &ids[2], &ids[3], &child, &copy];
    let before: Vec<String> = living.iter().map(|id| who(id)).collect();
    place.kill_daemon();
    let after: Vec<String> = living.iter().map(|id| who(id)).collect();
    assert_eq!(before, after);
    for id in living {
        let counted = count(&place, id);
        place.ok(&["pause", id]);
        place.ok(&["resume", id]);
        counts_on(&place, id, counted);
    }
    assert_eq!(state(&place, &ids[4]), "killed");
}

#[test]
fn a_stopped_daemon_leaves_its_sandboxes_running_unless_told_to_end_them() {
    let test = "a_stopped_daemon_leaves_its_sandboxes_running_unless_told_to_end_them";
    let Some(place) = Place::new(test) else {
        return;
    };
    let id = place.ok(&["create"]);
    place.sh(&id, COUNTER);
    let who = place.sh(&id, WHO);
    place.ok(&["snapshot", &id, "--name", "kept"]);
    place.ok(&["serve", "--stop"]);
    wait_for("the warm pool to go", || {
        (place.vmms().len() == 1).then_some(())
    });
    assert_eq!(place.sh(&id, WHO), who);

    signal(place.daemon(), Signal::SIGTERM);
    place.daemon_went();
    assert_eq!(place.sh(&id, WHO), who);

    let vmms = place.vmms();
    place.ok(&["serve", "--stop", "--kill-sandboxes"]);
    assert!(vmms.iter().all(|&vmm| !alive(vmm)), "{vmms:?}");
    assert!(cause(&place, &id).contains("the daemon was stopped"));
    place.ok(&["rollback", &id, "kept"]);

    // Also when there is no daemon to tell it.
    place.kill_daemon();
    assert!(!place.vmms().is_empty());
    place.ok(&["serve", "--stop", "--kill-sandboxes"]);
    assert_eq!(place.vmms(), BTreeSet::new());
    assert_eq!(place.sockets(), 0);
}

#[test]
fn what_became_of_sandboxes_without_a_daemon_is_told_and_nothing_is_left_of_them() {
    let test = "what_became_of_sandboxes_without_a_daemon_is_told_and_nothing_is_left_of_them";
    let Some(place) = Place::new(test) else {
        return;
    };
    let (dead, fine, asleep) = (
        place.ok(&["create"]),
        place.ok(&["create"]),
        place.ok(&["create"]),
    );
    place.sh(&asleep, "echo dream > /tmp/state");
    place.ok(&["snapshot", &dead, "--name", "kept"]);
    place.ok(&["pause", &asleep]);
    let names = |id: &str| -> u32 {
        // The one VMM that goes when this sandbox does.
        let before = place.vmms();
        place.ok(&["rollback", id, "kept"]);
        let news: Vec<u32> = place.vmms().difference(&before).copied().collect();
        assert_eq!(news.len(), 1, "{news:?}");
        news[0]
    };
    // Without a warm pool a new process is the sandbox's.
    place.ok(&["serve", "--stop"]);
    let mut serve = place.serve(&["--warm-pool", "0"]);
    let vmm = names(&dead);
    serve.kill().unwrap();
    serve.wait().unwrap();

    // One is killed, and there is a file that is no socket of anybody.
    signal(vmm, Signal::SIGKILL);
    wait_for("the VMM to go", || (!alive(vmm)).then_some(()));
    std::fs::write(place.dir.path().join("run/vmm/notes"), "x").unwrap();
    assert_eq!(place.sockets(), 3);
    assert_eq!(state(&place, &fine), "running");
    assert_eq!(place.sockets(), 1);
    let told = cause(&place, &dead);
    assert!(told.contains("it ended while nobody watched it"), "{told}");
    place.ok(&["resume", &asleep]);
    assert_eq!(place.sh(&asleep, "cat /tmp/state"), "dream");
    place.ok(&["rollback", &dead, "kept"]);
    place.sh(&dead, "true");

    // A journal that is gone knows of no sandbox, and so there is none.
    place.kill_daemon();
    for name in ["state.db", "state.db-wal", "state.db-shm"] {
        let _ = std::fs::remove_file(place.dir.path().join(name));
    }
    assert_eq!(place.json(&["ls", "--all"]).as_array().unwrap().len(), 0);
    wait_for("all VMMs to go", || place.vmms().is_empty().then_some(()));
}

#[test]
fn a_vmm_that_hangs_is_ended_and_told_as_such() {
    let test = "a_vmm_that_hangs_is_ended_and_told_as_such";
    let Some(place) = Place::new(test) else {
        return;
    };
    let id = place.ok(&["create"]);
    place.kill_daemon();
    let vmms = wait_for("the warm pool to go", || {
        let vmms = place.vmms();
        (vmms.len() == 1).then_some(vmms)
    });
    for &vmm in &vmms {
        signal(vmm, Signal::SIGSTOP);
    }
    assert_eq!(state(&place, &id), "broken");
    let told = cause(&place, &id);
    assert!(told.contains("did not answer"), "{told}");
    assert!(vmms.iter().all(|&vmm| !alive(vmm)));
}

#[test]
fn a_daemon_killed_at_any_moment_of_an_operation_leaves_each_sandbox_whole_and_nothing_else() {
    let test =
        "a_daemon_killed_at_any_moment_of_an_operation_leaves_each_sandbox_whole_and_nothing_else";
    let Some(place) = Place::new(test) else {
        return;
    };
    let id = place.ok(&["create", "--memory", "1GiB"]);
    place.sh(&id, COUNTER);
    place.sh(
        &id,
        "head -c 30000000 /dev/urandom >/dev/shm/bulk; sha256sum /dev/shm/bulk >/tmp/sum",
    );
    place.ok(&["snapshot", &id, "--name", "kept"]);
    let pid = place.sh(&id, "cat /tmp/pid");
    let operations: [&[&str]; 5] = [
        &["snapshot", &id],
        &["pause", &id],
        &["fork", &id, "-n", "2"],
        &["rollback", &id, "kept"],
        &["create"],
    ];
    let mut outcomes = BTreeSet::new();
    for (round, operation) in operations.iter().cycle().take(15).enumerate() {
        // Something to be written.
        place.sh(&id, "head -c 10000000 /dev/urandom >/dev/shm/new");
        let daemon = place.daemon();
        let mut command = support::jiffy(operation);
        command
            .env("JIFFY_HOME", place.dir.path())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null());
        let mut running = command.spawn().unwrap();
        // At moments spread over what the operations take; which one is hit does not matter.
        std::thread::sleep(Duration::from_millis(3 + round as u64 * 6));
        signal(daemon, Signal::SIGKILL);
        place.daemon_went();
        let done = running.wait().unwrap();
        let now = state(&place, &id);
        outcomes.insert((operation[0], done.success(), now.clone()));
        match now.as_str() {
            "paused" => drop(place.ok(&["resume", &id])),
            "running" => {}
            other => panic!(
                "{operation:?} in round {round}: {other}: {}",
                cause(&place, &id)
            ),
        }
        let sum = place.sh(&id, "sha256sum -c /tmp/sum >/dev/null && cat /tmp/pid");
        assert_eq!(sum, pid, "{operation:?} in round {round}");
        counts_on(&place, &id, 0);
        // It can still be saved, and what is saved is what it is.
        let name = format!("round{round}");
        place.ok(&["snapshot", &id, "--name", &name]);
        let copy = place.ok(&["create", "--from", &name]);
        place.sh(
            &copy,
            "sha256sum -c /tmp/sum >/dev/null && kill -0 $(cat /tmp/pid)",
        );
        for sandbox in place.json(&["ls"]).as_array().unwrap() {
            if sandbox["id"] != id.as_str() {
                place.ok(&["rm", sandbox["id"].as_str().unwrap()]);
            }
        }
        // This sandbox runs, and at most one of the warm pool for each of the two sizes.
        wait_for("what nobody owns to go", || {
            (place.sockets() == 1 && place.vmms().len() <= 3).then_some(())
        });
    }
    eprintln!("{outcomes:?}");
}

#[test]
fn a_sandbox_whose_engine_is_gone_ends_and_is_told_as_such() {
    on_gvisor(|| {
        let Some(place) = Place::new("a_sandbox_whose_engine_is_gone_ends_and_is_told_as_such")
        else {
            return;
        };
        let options = ["--network", "off", "--warm-pool", "0"];
        let mut daemon = place.serve(&options);
        let id = place.ok(&["create"]);
        place.ok(&["daemon", "stop"]);
        daemon.wait().unwrap();
        assert_eq!(place.vmms().len(), 1);
        let options = [&options[..], &["--engine", "microvm"]].concat();
        let mut daemon = place.serve_with(&options, &[("JIFFY_GVISOR", "/nonexistent")]);
        assert_eq!(state(&place, &id), "broken");
        let cause = cause(&place, &id);
        assert!(cause.contains("gvisor cannot be used here"), "{cause}");
        wait_for("the guest to end", || place.vmms().is_empty().then_some(()));
        place.ok(&["daemon", "stop", "--kill-sandboxes"]);
        daemon.wait().unwrap();
    });
}
