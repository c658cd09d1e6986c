//! Tests that a VMM killed during an operation loses at most the unsaved state of its own sandbox,
//! and that the loss is reported.

use crate::support::test_home::TestHome;
use crate::support::{alive, finish, jiffy, wait_for};
use jiffy_test_attributes::jiffy_test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::process::Stdio;
use std::time::Duration;

/// Writes random data to memory and disk, with checksums to verify it.
const FILL: &str = "head -c 20000000 /dev/urandom >/dev/shm/bulk; cp /dev/shm/bulk .; sync; sha256sum /dev/shm/bulk bulk >sums";
const VERIFY: &str = "sha256sum -c --quiet sums && echo whole";

fn snapshots(test_home: &TestHome) -> BTreeSet<String> {
    let all = test_home.json(&["snapshots"]);
    let ids = all.as_array().unwrap().iter();
    ids.map(|s| s["id"].as_str().unwrap().to_owned()).collect()
}

#[jiffy_test]
fn a_vmm_killed_at_any_moment_of_an_operation_leaves_the_old_state_or_the_new_and_no_orphan() {
    let test_home = TestHome::new();
    let mut daemon = test_home.serve(&["--warm-pool", "0"]);
    let id = test_home.ok(&["create"]);
    test_home.sh(&id, FILL);
    test_home.ok(&["snapshot", &id, "--name", "kept"]);
    let operations: [&[&str]; 5] = [
        &["snapshot", &id],
        &["pause", &id],
        &["resume", &id],
        &["fork", &id, "-n", "2"],
        &["rollback", &id, "kept"],
    ];
    let kills = std::env::var("JIFFY_VMM_KILLS");
    let kills = kills.map_or(15, |kills| kills.parse().unwrap());
    let mut outcomes = BTreeSet::new();
    for (round, operation) in operations.iter().cycle().take(kills).enumerate() {
        test_home.sh(&id, "head -c 10000000 /dev/urandom >/dev/shm/new");
        let mut before = test_home.vmms();
        assert_eq!(before.len(), 1, "{before:?}");
        if operation[0] == "resume" {
            test_home.ok(&["pause", &id]);
            before.clear();
        }
        let known_snapshots = snapshots(&test_home);
        let running = jiffy(operation)
            .env("JIFFY_HOME", test_home.dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The delays are spread over the durations of the operations; a resume waits for the new
        // VMM.
        let victim = before.first().copied().unwrap_or_else(|| {
            wait_for("the VMM of the resume", || {
                test_home.vmms().first().copied()
            })
        });
        // The five operations of a turn have the same delay.
        std::thread::sleep(Duration::from_millis(
            1 + 20 * (round / 5 * 5) as u64 / kills as u64,
        ));
        let _ = kill(Pid::from_raw(victim.try_into().unwrap()), Signal::SIGKILL);
        let done = finish(running);
        wait_for("the killed VMM to exit", || (!alive(victim)).then_some(()));
        // A sandbox whose VMM was killed is reported as broken, regardless of the operation's
        // result. A paused sandbox has no VMM.
        let sandbox = wait_for("the sandbox's state to be reported", || {
            let all = test_home.json(&["ls", "--all"]);
            let mine = all.as_array().unwrap().iter().find(|s| s["id"] == id);
            let mine = mine.unwrap().clone();
            // Children of a fork run in addition: each running sandbox has its own VMM.
            let listed = all.as_array().unwrap().iter();
            let running = listed.filter(|s| s["state"] == "running").count();
            let settled = match mine["state"].as_str().unwrap() {
                "running" => {
                    test_home.vmms().len() >= running && !test_home.vmms().contains(&victim)
                }
                "broken" | "paused" => true,
                _ => false,
            };
            settled.then_some(mine)
        });
        let state = sandbox["state"].as_str().unwrap();
        outcomes.insert((operation[0], done.code == Some(0), state.to_owned()));
        if done.code != Some(0) {
            assert!(!done.stderr.trim().is_empty(), "{operation:?}: {done:?}");
        }
        if state == "broken" {
            let cause = sandbox["cause"].as_str().unwrap();
            assert!(cause.contains("kill"), "{operation:?}: {cause}");
        }
        // Every new snapshot is complete.
        for new in snapshots(&test_home).difference(&known_snapshots) {
            let copy = test_home.ok(&["create", "--from", new]);
            assert_eq!(
                test_home.sh(&copy, VERIFY),
                "whole",
                "{operation:?} left {new}"
            );
            test_home.ok(&["rm", &copy]);
        }
        for sandbox in test_home.json(&["ls"]).as_array().unwrap() {
            let child = sandbox["id"].as_str().unwrap();
            if child != id && sandbox["state"] == "running" {
                assert_eq!(test_home.sh(child, VERIFY), "whole", "{operation:?}");
                test_home.ok(&["rm", child]);
            }
        }
        if state == "paused" {
            test_home.ok(&["resume", &id]);
        } else if state == "broken" {
            test_home.ok(&["rollback", &id, "kept"]);
        }
        assert_eq!(test_home.sh(&id, VERIFY), "whole", "{operation:?}");
        wait_for("orphaned files to be removed", || {
            (test_home.vmms().len() == 1 && test_home.sockets() == 1).then_some(())
        });
    }
    eprintln!("{outcomes:?}");
    // At least one operation was interrupted and failed.
    assert!(outcomes.iter().any(|(_, done, _)| !done), "{outcomes:?}");
    test_home.ok(&["serve", "--stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}
