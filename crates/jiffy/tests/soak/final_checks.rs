//! Checks at the end of a run: all state is consistent, and no resources remain.

use super::model::{SoakModel, State, locked};
use super::operations::LockedSandbox;
use super::random::TestRandom;
use super::spawn::from_snapshot;
use crate::support::test_home::TestHome;
use crate::support::wait_for;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Maximum number of directories between the root of control groups and the groups of sandboxes.
const MAX_GROUP_DEPTH: usize = 4;
/// Number of snapshots that are restored at the end.
const CHECKED_SNAPSHOTS: usize = 5;

/// Checks that exactly the objects of the model exist, and that they are intact.
pub fn verify_all(soak: &SoakModel) -> Result<(), String> {
    let all = locked(&soak.sandboxes).clone();
    let mut random = TestRandom::new(0, 0);
    for sandbox in &all {
        let mut model = sandbox.lock();
        let was = model.state;
        let mut held = LockedSandbox {
            soak,
            sandbox,
            model: &mut model,
        };
        let done = held
            .sync_state(&[was])
            .and_then(|()| match held.model.state {
                State::Running => held.verify(),
                State::Paused => held
                    .resume("resume")
                    .and_then(|()| held.verify_if_running()),
                State::Broken | State::Gone => match held.relative(&mut random) {
                    Some(snapshot) => held
                        .rollback(&snapshot)
                        .and_then(|()| held.verify_if_running()),
                    None => Ok(()),
                },
            });
        // Makes room for the next sandbox.
        done.and_then(|()| held.remove())
            .map_err(|found| format!("{found}\n{}", model.describe(&sandbox.id)))?;
        soak.forget(sandbox);
    }
    let left = soak.records()?;
    if !left.is_empty() {
        return Err(format!("unknown sandboxes: {left:?}"));
    }
    let snapshots = locked(&soak.snapshots).clone();
    for snapshot in snapshots.iter().rev().take(CHECKED_SNAPSHOTS) {
        let made = from_snapshot(soak, snapshot)?.ok_or("the host has no capacity")?;
        let mut model = made.lock();
        let mut held = LockedSandbox {
            soak,
            sandbox: &made,
            model: &mut model,
        };
        held.verify()
            .and_then(|()| held.remove())
            .map_err(|found| format!("{found}\n{}", model.describe(&made.id)))?;
        soak.forget(&made);
    }
    Ok(())
}

/// Removes all snapshots, including those whose removal was interrupted. Starts with the newest,
/// because newer snapshots may be based on older ones.
pub fn remove_all(soak: &SoakModel) {
    let mut left = soak.snapshot_records().unwrap();
    while !left.is_empty() {
        let mut answers = Vec::new();
        for record in &left {
            let path = format!("/templates/{}", record["id"].as_str().unwrap());
            let reply = soak.api.call("DELETE", &path, &Value::Null);
            answers.push(reply.body().to_string());
        }
        let now = soak.snapshot_records().unwrap();
        assert!(now.len() < left.len(), "not removed: {answers:?}");
        left = now;
    }
}

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// Checks that the daemon's directories contain only known objects: snapshots of templates.
pub fn assert_nothing_left(soak: &SoakModel, test_home: &TestHome) {
    let home = test_home.dir.path();
    wait_for("orphaned files to be removed", || {
        let reply = soak
            .api
            .call("GET", "/snapshots?all=true&limit=100", &Value::Null);
        let known: BTreeSet<String> = reply
            .body()
            .as_array()?
            .iter()
            .filter_map(|s| Some(s["snapshotID"].as_str()?.to_owned()))
            .collect();
        let mut there = names(&home.join("snapshots"));
        there.extend(names(&home.join("gvisor")));
        there.is_subset(&known).then_some(())
    });
}

/// Returns the names of the control groups of sandboxes without processes.
fn empty_groups() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut directories = vec![(PathBuf::from("/sys/fs/cgroup"), 0)];
    while let Some((directory, depth)) = directories.pop() {
        let parent = directory.file_name().and_then(|name| name.to_str());
        let ours = matches!(parent, Some("jiffy" | "jiffy-gvisor"));
        for entry in std::fs::read_dir(&directory)
            .into_iter()
            .flatten()
            .flatten()
        {
            let path = entry.path();
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if !ours && depth < MAX_GROUP_DEPTH {
                directories.push((path, depth + 1));
            } else if ours {
                let inside = std::fs::read_to_string(path.join("cgroup.procs"));
                if inside.is_ok_and(|text| text.is_empty()) {
                    found.insert(entry.file_name().to_string_lossy().into_owned());
                }
            }
        }
    }
    found
}

/// Checks that no process has an open file of the directory, that nothing is mounted there, and
/// that no control group of an exited process exists.
pub fn no_process_is_left(soak: &SoakModel, test_home: &TestHome) {
    let home = test_home.dir.path();
    let holds = |process: &Path| {
        let files = std::fs::read_dir(process.join("fd"));
        let mut files = files.into_iter().flatten().flatten();
        files.any(|f| std::fs::read_link(f.path()).is_ok_and(|target| target.starts_with(home)))
    };
    wait_for("the last process to exit", || {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let own = std::process::id().to_string();
        let left: Vec<String> = processes
            .filter(|p| {
                p.file_name()
                    .to_str()
                    .is_some_and(|n| n != own && n.parse::<u32>().is_ok())
            })
            .filter(|p| holds(&p.path()))
            .map(|p| p.path().display().to_string())
            .collect();
        left.is_empty().then_some(())
    });
    let groups = locked(&soak.groups).clone();
    wait_for("control groups without processes to be removed", || {
        (!empty_groups().iter().any(|name| groups.contains(name))).then_some(())
    });
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(home.to_str().unwrap()), "{mounts}");
}
