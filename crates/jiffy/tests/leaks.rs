//! Tests that the host's state is unchanged after sandboxes ended in different ways.
//!
//! Exit codes of `jiffy run`: 124 = the command timed out, 125 = Jiffy failed, for example because
//! the VMM was killed.

use crate::support::test_home::TestHome;
use crate::support::{alive, finish, jiffy, read_until, vmm_of, wait_for};
use jiffy_test_attributes::jiffy_test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Stdio;

/// Returns all named objects that a sandbox of the data directory could leave on the host.
fn named_objects(home: &Path) -> BTreeSet<String> {
    let mut things = BTreeSet::new();
    let ours = home.display().to_string();
    let digest = Sha256::digest(home.canonicalize().unwrap().as_os_str().as_bytes());
    // Prefix of the network devices of this data directory.
    let prefix = format!("jf{:02x}{:02x}{:02x}-", digest[0], digest[1], digest[2]);
    let mut folders = vec![home.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            things.insert(format!("file {}", entry.path().display()));
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                folders.push(entry.path());
            }
        }
    }
    let lines = |path: &str, what: &str, keep: &dyn Fn(&str) -> bool| -> Vec<String> {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines()
            .filter(|l| keep(l))
            .map(|l| format!("{what} {l}"))
            .collect()
    };
    // Daemons of other tests may add mounts and interfaces at any time.
    things.extend(lines("/proc/self/mounts", "mount", &|l| {
        l.contains(&ours) || l.contains(&prefix)
    }));
    things.extend(lines("/proc/net/unix", "socket", &|l| l.contains(&ours)));
    things.extend(lines("/proc/self/cgroup", "cgroup", &|l| {
        l.contains("jiffy")
    }));
    for entry in std::fs::read_dir("/sys/class/net")
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(&prefix) {
            things.insert(format!("interface {name}"));
        }
    }
    for root in [
        "/sys/fs/cgroup",
        "/sys/fs/cgroup/memory",
        "/sys/fs/cgroup/unified",
    ] {
        for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().contains("jiffy") {
                things.insert(format!("cgroup {}", entry.path().display()));
            }
        }
    }
    things
}

#[jiffy_test]
fn nothing_is_left_behind_however_a_sandbox_ends() {
    // The first run creates caches, which do not belong to the sandbox.
    let test_home = TestHome::new();
    assert_eq!(test_home.call(&["run", "--", "true"]).code, Some(0));
    let before = named_objects(test_home.dir.path());

    assert_eq!(
        test_home.call(&["run", "--", "sh", "-c", "exit 4"]).code,
        Some(4)
    );
    assert_eq!(
        test_home
            .call(&["run", "--timeout", "200ms", "--", "sleep", "60"])
            .code,
        Some(124)
    );

    for victim in ["vmm", "jiffy"] {
        let mut child = jiffy(&[
            "run",
            "-i",
            "--",
            "sh",
            "-c",
            "dd if=/dev/zero of=/tmp/x bs=1M count=8 2>/dev/null; echo up; cat",
        ])
        .env("JIFFY_HOME", test_home.dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
        let mut stdout = child.stdout.take().unwrap();
        read_until(&mut stdout, "up\n");
        let vmm = vmm_of(&child);
        let doomed = if victim == "vmm" { vmm } else { child.id() };
        kill(Pid::from_raw(doomed.try_into().unwrap()), Signal::SIGKILL).unwrap();
        let done = finish(child);
        assert_eq!(
            done.code,
            if victim == "vmm" { Some(125) } else { None },
            "{done:?}"
        );
        // A VMM exits by itself if its controller was killed.
        wait_for("the VMM to exit", || (!alive(vmm)).then_some(()));
    }
    wait_for("the host to return to its initial state", || {
        let now = named_objects(test_home.dir.path());
        // Only new objects are errors. Objects of `before` may be missing: the network of the first
        // run may be removed only after `before` was listed.
        let news: Vec<_> = now.difference(&before).collect();
        news.is_empty().then_some(()).or_else(|| {
            eprintln!("{news:?}");
            None
        })
    });
}

#[jiffy_test]
fn a_killed_launcher_takes_its_guest_along_even_during_boot() {
    for delay_ms in [0, 20, 60, 150] {
        let mut child = jiffy(&["run", "--", "sleep", "60"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let vmm = vmm_of(&child);
        std::thread::sleep(std::time::Duration::from_millis(delay_ms));
        child.kill().unwrap();
        child.wait().unwrap();
        wait_for("the VMM to exit", || (!alive(vmm)).then_some(()));
    }
}
