//! Tests for privileges and limits of a VMM on the host.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran. A *spare* is a VMM
//! process that the daemon starts in advance for the next guest. The *jail* of a VMM consists of
//! its own user, its namespaces and an empty root directory.

use crate::support::test_home::TestHome;
use crate::support::wait_for;
use jiffy_test_attributes::jiffy_test;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// First user id of VMMs.
const FIRST_UID: u32 = 1_900_000_000;

fn status(pid: u32, key: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(key)).unwrap();
    let (_, value) = line.split_once(':').unwrap();
    value.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns whether root runs the test.
fn root() -> bool {
    nix::unistd::Uid::effective().is_root()
}

/// Returns the control groups of a process that are named after it.
fn groups(pid: u32) -> Vec<PathBuf> {
    let own = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let below = format!("/jiffy/{pid}");
    let mut groups = Vec::new();
    for line in own.lines().filter(|line| line.ends_with(&below)) {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next().unwrap(), parts.next().unwrap());
        let tree = match controllers {
            "" => "/sys/fs/cgroup".to_owned(),
            one => format!("/sys/fs/cgroup/{one}"),
        };
        groups.push(Path::new(&tree).join(path.trim_start_matches('/')));
    }
    groups
}

/// Returns the content of the first of `files` that exists in a group. The files have different
/// names in the two versions of control groups.
fn limit(groups: &[PathBuf], files: [&str; 2]) -> Option<String> {
    let paths = groups.iter().flat_map(|g| files.map(|f| g.join(f)));
    let mut texts = paths.filter_map(|path| fs::read_to_string(path).ok());
    texts.next().map(|text| text.trim().to_owned())
}

#[jiffy_test]
fn every_vmm_has_its_own_user_without_privileges_and_a_limited_group() {
    let test_home = TestHome::new();
    if !root() {
        crate::support::skip("the jail requires root");
        return;
    }
    let id = test_home.ok(&["create", "--memory", "256MiB", "--cpus", "1"]);
    // Includes sandboxes created from a snapshot and resumed sandboxes.
    test_home.ok(&["fork", &id, "-n", "2"]);
    test_home.ok(&["pause", &id]);
    test_home.ok(&["resume", &id]);
    test_home.sh(&id, "true");
    let vmms = test_home.vmms();
    assert!(vmms.len() >= 3, "{vmms:?}");
    let mut users = BTreeSet::new();
    for &vmm in &vmms {
        let user: u32 = status(vmm, "Uid")
            .split(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap();
        assert_eq!(user, FIRST_UID + vmm);
        users.insert(user);
        for rights in ["CapPrm", "CapEff", "CapInh", "CapBnd", "CapAmb"] {
            assert_eq!(status(vmm, rights), "0000000000000000");
        }
        assert_eq!(status(vmm, "NoNewPrivs"), "1");
        // Filter mode (proc_pid_status(5)).
        assert_eq!(status(vmm, "Seccomp"), "2");
        assert_eq!(status(vmm, "Groups"), "");
        assert!(
            status(vmm, "NSpid").ends_with(" 1"),
            "{}",
            status(vmm, "NSpid")
        );
        let files = fs::read_dir(format!("/proc/{vmm}/root")).unwrap().count();
        assert_eq!(files, 0);
        for namespace in ["user", "mnt", "net", "ipc", "uts", "pid"] {
            let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{namespace}")).unwrap();
            assert_ne!(of(&vmm.to_string()), of("self"), "{namespace}");
        }
        let limits = fs::read_to_string(format!("/proc/{vmm}/limits")).unwrap();
        let longest = limits.lines().find(|l| l.starts_with("Max file size"));
        let longest: Vec<&str> = longest.unwrap().split_whitespace().skip(3).collect();
        let soft: u64 = longest[0].parse().unwrap();
        // At least the memory of the guest, and at most slightly more than its disk.
        assert!((256 << 20..=11 << 30).contains(&soft), "{longest:?}");
        assert_eq!(longest[0], longest[1], "the limit cannot be raised");
        let groups = groups(vmm);
        if groups.is_empty() {
            continue;
        }
        assert_eq!(
            limit(&groups, ["pids.max", "pids.max"]).as_deref(),
            Some("64")
        );
        let memory = limit(&groups, ["memory.max", "memory.limit_in_bytes"]).unwrap();
        // The upper bound is far above the limits of these guests. It excludes the value for no
        // limit.
        let memory: u64 = memory.parse().unwrap();
        assert!((256 << 20..=4 << 30).contains(&memory), "{memory}");
    }
    assert_eq!(users.len(), vmms.len());
    let groups: Vec<PathBuf> = vmms.iter().flat_map(|&vmm| groups(vmm)).collect();
    test_home.ok(&["serve", "--stop", "--kill-sandboxes"]);
    wait_for("the control groups to be removed", || {
        groups.iter().all(|g| !g.exists()).then_some(())
    });
}

#[jiffy_test]
fn the_control_group_of_an_adopted_sandbox_is_removed_with_it() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    test_home.kill_daemon();
    let vmm = wait_for("the warm-pool VMMs to exit", || {
        let vmms = test_home.vmms();
        (vmms.len() == 1).then(|| vmms.first().copied()).flatten()
    });
    let groups = groups(vmm);
    if groups.is_empty() {
        crate::support::skip("this host has no control groups");
        return;
    }
    // The next daemon adopts the sandbox, and its limits still apply.
    test_home.sh(&id, "true");
    assert!(groups.iter().all(|g| g.exists()));
    test_home.ok(&["kill", &id]);
    wait_for("the control groups to be removed", || {
        groups.iter().all(|g| !g.exists()).then_some(())
    });
}

/// Returns the spare processes of `daemon`, which have no guest yet.
fn spares(daemon: u32) -> BTreeSet<u32> {
    let is_spare = |process: &Path| {
        let text = fs::read_to_string(process.join("status")).ok()?;
        let waits = text.starts_with("Name:\tjiffy-vmm-spare\n");
        let parent = text.lines().find_map(|line| line.strip_prefix("PPid:\t"))?;
        let pid = process.file_name()?.to_str()?.parse().ok()?;
        (waits && parent == daemon.to_string()).then_some(pid)
    };
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes.filter_map(|p| is_spare(&p.path())).collect()
}

#[jiffy_test]
fn spare_vmms_are_confined_limited_when_assigned_and_exit_with_their_daemon() {
    let test_home = TestHome::new();
    if !root() {
        crate::support::skip("the jail requires root");
        return;
    }
    let mut daemon =
        test_home.serve(&["--warm-pool", "0", "--network", "off", "--spare-vmms", "2"]);
    let two = || {
        wait_for("two spares", || {
            Some(spares(test_home.daemon())).filter(|spares| spares.len() == 2)
        })
    };
    for spare in two() {
        wait_for("the process to be confined", || {
            (status(spare, "NoNewPrivs") == "1").then_some(())
        });
        assert_eq!(status(spare, "CapEff"), "0000000000000000");
        let user = format!("{} ", FIRST_UID + spare);
        assert!(status(spare, "Uid").starts_with(&user));
        let files = fs::read_dir(format!("/proc/{spare}/root")).unwrap().count();
        assert_eq!(files, 0);
    }
    // A spare that is still being moved to its control groups is not assigned to a guest: create
    // sandboxes until one uses a spare.
    let (id, vmm) = wait_for("a guest to use a spare process", || {
        let waiting = two();
        let id = test_home.ok(&["create"]);
        let vmm = test_home.vmms().first().copied().unwrap();
        if waiting.contains(&vmm) {
            return Some((id, vmm));
        }
        test_home.ok(&["kill", &id]);
        wait_for("its VMM to exit", || {
            (!crate::support::alive(vmm)).then_some(())
        });
        None
    });
    assert_eq!(status(vmm, "Name"), "jiffy-vmm");
    assert_eq!(status(vmm, "Seccomp"), "2");
    let groups = groups(vmm);
    if !groups.is_empty() {
        let tasks = limit(&groups, ["pids.max", "pids.max"]);
        assert_eq!(tasks.as_deref(), Some("64"));
        let memory = limit(&groups, ["memory.max", "memory.limit_in_bytes"]).unwrap();
        assert!(memory.parse::<u64>().unwrap() <= 4 << 30, "{memory}");
    }
    let remaining = two();
    test_home.kill_daemon();
    daemon.wait().unwrap();
    wait_for("the spare processes to exit", || {
        (!remaining.iter().any(|&spare| crate::support::alive(spare))).then_some(())
    });
    assert!(crate::support::alive(vmm));
    test_home.sh(&id, "true");
    test_home.ok(&["serve", "--stop", "--kill-sandboxes"]);
}

#[jiffy_test]
fn the_data_directory_of_a_daemon_is_private() {
    let test_home = TestHome::new();
    let mut daemon = test_home.serve(&["--network", "off", "--warm-pool", "0"]);
    test_home.ok(&["key", "create", "--name", "test"]);
    let id = test_home.ok(&["create"]);
    test_home.ok(&["snapshot", &id]);
    let out = test_home.call(&["doctor", "--security", "--json"]);
    let findings: serde_json::Value = serde_json::from_str(&out.stdout).unwrap();
    for what in ["data", "owner", "secrets", "directories"] {
        let finding = findings.as_array().unwrap().iter();
        let finding = finding.clone().find(|f| f["what"] == what).unwrap();
        assert_eq!(finding["status"], "ok", "{finding}");
    }
    test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}

#[test]
fn doctor_reports_the_protections_of_this_host() {
    let out = crate::support::call(&["doctor", "--security", "--json"]);
    let findings: serde_json::Value = serde_json::from_str(&out.stdout).unwrap();
    let named = |what: &str| {
        let all = findings.as_array().unwrap();
        all.iter()
            .find(|f| f["what"] == what)
            .unwrap_or_else(|| panic!("{what}"))
            .clone()
    };
    for what in [
        "virtualization",
        "jail",
        "limits",
        "daemon",
        "data",
        "smt",
        "ksm",
        "swap",
        "landlock",
        "kernel",
        "connections",
        "namespaces",
    ] {
        let finding = named(what);
        assert!(finding["found"].as_str().is_some_and(|f| !f.is_empty()));
        assert!(
            finding["status"] == "ok" || finding["remedy"].is_string(),
            "{finding}"
        );
    }
    if root() {
        assert_eq!(named("jail")["status"], "ok");
    }
}
