//! Tests that other sandboxes survive and no resources remain when gVisor's helper, a sandbox's
//! process or the daemon is killed. The *helper* is the process `jiffy-gvisor` that starts and
//! drives the sandboxes of a daemon.

use crate::support::test_home::TestHome;
use crate::support::{children, finish, wait_for};
use jiffy_test_attributes::jiffy_test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
}

/// Returns the helper of the daemon of `test_home`.
fn helper(test_home: &TestHome) -> u32 {
    let directory = test_home.dir.path().join("run/gvisor");
    let mut all = children(test_home.daemon()).into_iter();
    let found = all.find(|pid| {
        let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.contains(&format!("\0serve\0{}\0", directory.display()))
    });
    found.unwrap()
}

/// Waits for the process that isolates the next sandbox of a helper.
fn next_process(helper: u32, before: &[u32]) -> u32 {
    let isolates = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        !before.contains(pid) && line.starts_with(b"runsc-sandbox\0")
    };
    wait_for("the sandbox's process", || {
        children(helper).into_iter().find(isolates)
    })
}

/// Returns the control groups of a process that isolates a sandbox.
fn groups(pid: u32) -> BTreeSet<PathBuf> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let own = text.lines().filter_map(|line| {
        let (_, id) = line.split_once("/jiffy-gvisor/")?;
        Some(id.to_owned())
    });
    let own: BTreeSet<String> = own.collect();
    let trees = fs::read_dir("/sys/fs/cgroup").unwrap().flatten();
    let trees = trees.map(|tree| tree.path().join("jiffy-gvisor"));
    trees
        .chain([PathBuf::from("/sys/fs/cgroup/jiffy-gvisor")])
        .flat_map(|tree| own.iter().map(move |id| tree.join(id)))
        .filter(|group| group.exists())
        .collect()
}

/// Returns the number of pipes that two processes share.
fn common_pipes(one: u32, other: u32) -> usize {
    let pipes = |pid: u32| -> BTreeSet<PathBuf> {
        let files = fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten();
        let targets = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        targets
            .filter(|target| target.to_string_lossy().starts_with("pipe:"))
            .collect()
    };
    pipes(one).intersection(&pipes(other)).count()
}

/// Waits until only the sandboxes with the processes `retained` remain, and no control group of
/// `groups`.
fn nothing_else_is_left(
    test_home: &TestHome,
    retained: &BTreeSet<u32>,
    groups: &BTreeSet<PathBuf>,
) {
    let directory = test_home.dir.path().join("run/gvisor");
    let names = |path: PathBuf| {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        entries.count()
    };
    wait_for("processes of sandboxes to exit", || {
        (test_home.vmms() == *retained).then_some(())
    });
    wait_for("control groups to be removed", || {
        (!groups.iter().any(|group| group.exists())).then_some(())
    });
    // The directory contains one directory per sandbox, and the directory `state`. The latter
    // contains three files per sandbox: a record, its lock, and a socket.
    wait_for("files to be removed", || {
        let records = names(directory.join("state"));
        let sandboxes = names(directory.clone()) - 1;
        (sandboxes == retained.len() && records <= 3 * retained.len()).then_some(())
    });
}

#[jiffy_test(engine = "gvisor")]
fn a_sandbox_killed_while_it_is_made_leaves_no_process_file_or_control_group() {
    let test_home = &TestHome::new();
    let mut daemon = test_home.serve(&["--warm-pool", "0"]);
    for _ in 0..3 {
        let (helper, before) = (helper(test_home), children(helper(test_home)));
        let create = test_home.begin(&["create"]);
        let victim = next_process(helper, &before);
        let groups = groups(victim);
        signal(victim, Signal::SIGKILL);
        // Both results of the create are permitted: the signal may have arrived too late.
        let created = finish(create);
        if created.code == Some(0) {
            test_home.ok(&["rm", created.stdout.trim()]);
        }
        nothing_else_is_left(test_home, &BTreeSet::new(), &groups);
    }
    test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}

#[jiffy_test(engine = "gvisor")]
fn a_sandbox_is_killed_however_long_the_removal_of_its_groups_takes() {
    let test_home = &TestHome::new();
    let mut daemon = test_home.serve(&["--warm-pool", "0"]);
    let id = test_home.ok(&["create"]);
    let groups = groups(*test_home.vmms().first().unwrap());
    // The kernel does not remove a group that contains a process.
    let mut intruder = Command::new("sleep").arg("600").spawn().unwrap();
    let pid = intruder.id().to_string();
    let entered = groups
        .iter()
        .filter(|group| fs::write(group.join("cgroup.procs"), &pid).is_ok());
    assert_ne!(entered.count(), 0, "{groups:?}");
    let began = Instant::now();
    test_home.ok(&["kill", &id]);
    let took = began.elapsed();
    let state = test_home.json(&["ls", "--all"])[0]["state"].clone();
    intruder.kill().unwrap();
    intruder.wait().unwrap();
    // gVisor retries for 5 s, and its helper for another 10 s.
    assert!(took < Duration::from_secs(4), "{took:?}");
    assert_eq!(state, "killed");
    nothing_else_is_left(test_home, &BTreeSet::new(), &groups);
    test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}

#[jiffy_test(engine = "gvisor")]
fn a_helper_killed_while_it_makes_a_sandbox_leaves_no_process_file_or_control_group() {
    let test_home = &TestHome::new();
    let mut daemon = test_home.serve(&["--warm-pool", "0"]);
    let bystander = test_home.ok(&["create"]);
    let retained = test_home.vmms();
    let (helper, before) = (helper(test_home), children(helper(test_home)));
    let create = test_home.begin(&["create"]);
    let sandbox = next_process(helper, &before);
    signal(helper, Signal::SIGSTOP);
    let groups = groups(sandbox);
    // The process of the sandbox first shares two pipes with the helper: its standard input, and
    // the pipe for the message that it is ready. When it has started, it has closed the second one.
    wait_for("the sandbox's process to start", || {
        (common_pipes(helper, sandbox) < 2).then_some(())
    });
    signal(helper, Signal::SIGKILL);
    let created = finish(create);
    assert_ne!(created.code, Some(0), "{created:?}");
    nothing_else_is_left(test_home, &retained, &groups);
    // The next helper continues to serve all sandboxes.
    assert_eq!(test_home.sh(&bystander, "echo here"), "here");
    let another = test_home.ok(&["create"]);
    assert_eq!(test_home.sh(&another, "echo here"), "here");
    test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}

#[jiffy_test(engine = "gvisor")]
fn a_sandbox_killed_without_a_daemon_is_reported_and_removed_and_all_others_are_adopted() {
    let test_home = &TestHome::new();
    let mut daemon = test_home.serve(&["--warm-pool", "0"]);
    let dead = test_home.ok(&["create"]);
    let victim = *test_home.vmms().first().unwrap();
    let groups = groups(victim);
    let others: Vec<String> = (0..3).map(|_| test_home.ok(&["create"])).collect();
    test_home.kill_daemon();
    daemon.wait().unwrap();
    signal(victim, Signal::SIGKILL);
    let process = PathBuf::from(format!("/proc/{victim}"));
    // Zombies count as well, because the process id is still assigned.
    wait_for("the sandbox's process to exit", || {
        (!process.exists()).then_some(())
    });
    let retained = test_home.vmms();
    let mut daemon = test_home.serve(&["--warm-pool", "0"]);
    let states = test_home.json(&["ls", "--all"]);
    for sandbox in states.as_array().unwrap() {
        let expected = if sandbox["id"] == dead.as_str() {
            "broken"
        } else {
            "running"
        };
        assert_eq!(sandbox["state"], expected, "{states}");
    }
    for id in &others {
        assert_eq!(test_home.sh(id, "echo here"), "here");
    }
    nothing_else_is_left(test_home, &retained, &groups);
    test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}
