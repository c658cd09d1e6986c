//! Tests for persistent sandboxes with real guests: a daemon owns them, and every command finds the
//! daemon.
//!
//! The *working set* of a snapshot consists of the pages that a restored guest touches first. The
//! *seal* of a snapshot is the file with checksums of its chunks, which is written later.

use crate::support::engine::is_gvisor;
use crate::support::test_home::TestHome;
use crate::support::{SetOnDrop, sandbox_http, wait_for};
use jiffy_test_attributes::jiffy_test;
use serde_json::Value;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Maximum time until a connection to a rolled-back guest is closed.
const CUT_OFF_LIMIT: Duration = Duration::from_secs(15);

#[jiffy_test]
fn a_sandbox_persists_between_commands_and_files_are_copied_both_ways() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "-e", "GREETING=hello"]);
    let short = &id[..6];
    assert_eq!(
        test_home.sh(short, "echo $GREETING; hostname"),
        format!("hello\n{id}")
    );
    let socket = test_home.dir.path().join("run/jiffy.sock");
    assert_eq!(
        socket.metadata().unwrap().permissions().mode() & 0o777,
        0o600
    );

    let file = test_home.dir.path().join("data");
    let data: Vec<u8> = (0..3_000_000u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(&file, &data).unwrap();
    test_home.ok(&["cp", file.to_str().unwrap(), &format!("{short}:/tmp/")]);
    let back = test_home.dir.path().join("back");
    test_home.ok(&["cp", &format!("{short}:/tmp/data"), back.to_str().unwrap()]);
    assert!(std::fs::read(&back).unwrap() == data);

    assert_eq!(
        test_home
            .call(&["exec", short, "--", "sh", "-c", "exit 7"])
            .code,
        Some(7)
    );
    assert_eq!(
        test_home.call(&["exec", short, "--", "no-such"]).code,
        Some(127)
    );
    let missing = test_home.call(&["exec", "zzzz", "--", "true"]);
    assert_eq!(missing.code, Some(125));
    assert!(
        missing.stderr.contains("sandbox `zzzz` does not exist"),
        "{missing:?}"
    );
    test_home.ok(&["rm", short]);
    assert_eq!(
        test_home.json(&["ls", "--all"]).as_array().unwrap().len(),
        0
    );
}

#[jiffy_test]
fn a_sandbox_is_forked_rolled_back_paused_and_resumed() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    test_home.sh(&id, "echo one > /tmp/state");
    let snapshot = test_home.ok(&["snapshot", &id, "--name", "first"]);
    test_home.sh(&id, "echo two > /tmp/state");

    let fork = test_home.json(&["fork", &id, "-n", "3"]);
    let children: Vec<String> = fork["children"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(children.len(), 3, "{fork}");
    let look = "cat /tmp/state /etc/machine-id /proc/sys/kernel/random/uuid; hostname; date +%s";
    let seen: Vec<String> = children.iter().map(|c| test_home.sh(c, look)).collect();
    for (i, text) in seen.iter().enumerate() {
        assert!(text.starts_with("two\n"), "{text}");
        assert!(text.contains(&children[i]));
        // Returns the number of children with the same line, including this child.
        let same_count = |n: usize| {
            seen.iter()
                .filter(|o| o.lines().nth(n) == text.lines().nth(n))
                .count()
        };
        // Machine id and random UUID are different in each child.
        assert_eq!((same_count(1), same_count(2)), (1, 1), "{seen:?}");
    }
    test_home.ok(&["promote", &children[1]]);
    assert_eq!(test_home.json(&["ls"]).as_array().unwrap().len(), 2);

    for round in 0..3 {
        assert_eq!(test_home.ok(&["rollback", &id, "first"]), id);
        assert_eq!(
            test_home.sh(&id, "cat /tmp/state; hostname"),
            format!("one\n{id}")
        );
        test_home.sh(&id, &format!("echo {round} > /tmp/state"));
    }
    // A snapshot of a related sandbox can be used as well.
    test_home.ok(&["rollback", &children[1], &snapshot]);
    assert_eq!(test_home.sh(&children[1], "cat /tmp/state"), "one");

    test_home.sh(&id, "sleep 1000 >/dev/null 2>&1 & echo asleep > /tmp/state");
    test_home.ok(&["pause", &id]);
    let refused = test_home.call(&["exec", &id, "--", "true"]);
    assert!(refused.stderr.contains("jiffy resume"), "{refused:?}");
    test_home.ok(&["resume", &id]);
    assert_eq!(
        test_home.sh(&id, "cat /tmp/state; pgrep -c sleep"),
        "asleep\n1"
    );

    let copy = test_home.json(&["create", "--from", "first"]);
    assert_eq!(copy["boot_mode"], "snapshot");
    assert_eq!(
        test_home.sh(copy["id"].as_str().unwrap(), "cat /tmp/state"),
        "one"
    );
    test_home.ok(&["kill", &id]);
    assert!(test_home.ok(&["snapshots"]).contains("first"));
}

#[jiffy_test]
fn a_create_is_served_from_the_warm_pool_with_an_identity_of_its_own() {
    let test_home = TestHome::new();
    test_home.ok(&["create"]);
    let look = "hostname; cat /etc/machine-id /proc/sys/kernel/random/uuid";
    let warm: Vec<(String, String)> = (0..2)
        .map(|_| {
            let created = wait_for("a warm sandbox", || {
                let created = test_home.json(&["create"]);
                (created["boot_mode"] == "warm-pool").then_some(created)
            });
            let id = created["id"].as_str().unwrap().to_owned();
            let seen = test_home.sh(&id, look);
            (id, seen)
        })
        .collect();
    for (id, seen) in &warm {
        assert_eq!(seen.lines().next(), Some(id.as_str()));
    }
    for line in 0..3 {
        assert_ne!(warm[0].1.lines().nth(line), warm[1].1.lines().nth(line));
    }
}

#[jiffy_test]
fn requests_during_rollbacks_are_answered_or_cut_off() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    let serve = "cd /tmp; python3 -m http.server 8000 >/dev/null 2>&1 & \
                 until curl -s localhost:8000 >/dev/null; do sleep 0.1; done";
    test_home.sh(&id, serve);
    test_home.ok(&["snapshot", &id, "--name", "serving"]);
    let over = AtomicBool::new(false);
    let (home, sandbox, done) = (&test_home, id.as_str(), &over);
    let answered = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(move || {
                    let mut answered = 0;
                    while !done.load(Ordering::Relaxed) {
                        let mut stream =
                            sandbox_http::send(home, sandbox, 8000, "GET", "/", &Value::Null);
                        stream.set_read_timeout(Some(CUT_OFF_LIMIT)).unwrap();
                        let mut answer = Vec::new();
                        match stream.read_to_end(&mut answer) {
                            Err(e) if e.kind() == ErrorKind::WouldBlock => return None,
                            _ => answered += u32::from(answer.starts_with(b"HTTP/1.0 200")),
                        }
                    }
                    Some(answered)
                })
            })
            .collect();
        let set = SetOnDrop(&over);
        for _ in 0..50 {
            test_home.ok(&["rollback", &id, "serving"]);
        }
        drop(set);
        let ended = clients.into_iter().map(|client| client.join().unwrap());
        ended.collect::<Vec<_>>()
    });
    let all: Option<u32> = answered.iter().copied().sum();
    assert!(all.is_some_and(|all| all > 0), "{answered:?}");
}

#[jiffy_test]
fn a_sandbox_whose_vmm_is_killed_is_broken_and_a_rollback_repairs_it() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    test_home.sh(&id, "echo kept > /tmp/state");
    test_home.ok(&["snapshot", &id, "--name", "kept"]);
    for vmm in test_home.vmms() {
        let pid = nix::unistd::Pid::from_raw(vmm.try_into().unwrap());
        // The warm-pool sandbox may exit by itself in the meantime.
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
    }
    let cause = wait_for("the exit to be detected", || {
        let all = test_home.json(&["ls"]);
        all[0]["cause"].as_str().map(str::to_owned)
    });
    assert!(cause.contains("was killed"), "{cause}");
    test_home.ok(&["rollback", &id, "kept"]);
    assert_eq!(test_home.sh(&id, "cat /tmp/state"), "kept");
    // The sandboxes of the pool are dead as well, and are not assigned.
    let fresh = test_home.ok(&["create"]);
    assert_eq!(test_home.sh(&fresh, "hostname"), fresh);
}

#[jiffy_test]
fn a_retained_snapshot_gets_checksums_that_detect_a_flipped_byte() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    let snapshot = test_home.ok(&["snapshot", &id, "--name", "precious"]);
    let verify = || test_home.call(&["snapshots", "--verify", "precious", "--json"]);
    let sound = wait_for("the seal", || {
        let done = verify();
        (done.code == Some(0)).then_some(done)
    });
    let verified: serde_json::Value = serde_json::from_str(&sound.stdout).unwrap();
    // The snapshot, and the template's snapshot that it is based on.
    assert_eq!(verified.as_array().unwrap().len(), 2, "{verified}");
    let dir = test_home.dir.path().join("snapshots").join(&snapshot);
    let index = std::fs::File::open(dir.join("memory.index")).unwrap();
    let index = jiffy_snapshot::read_index(&index).unwrap();
    let chunk = index.stored.iter().next().unwrap();
    let mut options = std::fs::File::options();
    let layer = options.read(true).write(true);
    let layer = layer.open(dir.join("memory.layer")).unwrap();
    // A chunk has 64 KiB. Any byte in it may be changed.
    let (mut byte, at) = ([0], chunk * 65536 + 4097);
    layer.read_exact_at(&mut byte, at).unwrap();
    layer.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    let damaged = test_home.call(&["snapshots", "--verify", "precious"]);
    assert_eq!(damaged.code, Some(1), "{damaged:?}");
    let named = format!("memory.layer chunk {chunk} ");
    assert!(damaged.stdout.contains(&named), "{damaged:?}");
    test_home.ok(&["rm", &id]);
    test_home.ok(&["rm", "precious"]);
    wait_for("the files to be removed after the answer", || {
        (!dir.exists()).then_some(())
    });
}

/// Returns the memory of the daemon's VMMs that no file backs, in KiB.
fn own_memory(test_home: &TestHome) -> Vec<u64> {
    let vmms = test_home.vmms().into_iter();
    let own = vmms.filter_map(|pid| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        let line = text.lines().find_map(|l| l.strip_prefix("Anonymous:"))?;
        line.trim().trim_end_matches(" kB").parse().ok()
    });
    own.collect()
}

/// Evicts the files below `directory` from the page cache.
fn evict_from_page_cache(directory: &std::path::Path) {
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() {
            evict_from_page_cache(&entry.path());
            continue;
        }
        let file = std::fs::File::open(entry.path()).unwrap();
        file.sync_all().unwrap();
        let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
        nix::fcntl::posix_fadvise(&file, 0, 0, advice).unwrap();
    }
}

#[jiffy_test]
fn a_paused_sandbox_on_disk_is_prefetched_and_not_read_fault_by_fault() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "--memory", "1GiB"]);
    test_home.sh(&id, "true");
    test_home.ok(&["pause", &id]);
    let snapshots = test_home.dir.path().join("snapshots");
    let recorded = std::fs::read_dir(&snapshots).unwrap().flatten();
    let recorded = recorded.filter(|s| s.path().join("working-set.index").exists());
    // The working sets of the template and of the pause.
    assert_eq!(recorded.count(), 2);
    evict_from_page_cache(&snapshots);
    test_home.ok(&["resume", &id]);
    test_home.sh(&id, "true");
    let vmm = *test_home.vmms().first().unwrap();
    let Ok(io) = std::fs::read_to_string(format!("/proc/{vmm}/io")) else {
        crate::support::skip("reading a VMM's I/O counters requires root");
        return;
    };
    let read = io.lines().find_map(|l| l.strip_prefix("read_bytes: "));
    let read: u64 = read.unwrap().parse().unwrap();
    // The VMM would read about 60 MiB if it read around each of its page faults.
    assert!(read < 24 << 20, "{read} bytes were read by the VMM");
}

#[jiffy_test]
fn restores_take_the_measured_policy_on_the_host_it_was_measured_on() {
    let test_home = TestHome::new();
    let table = test_home.ok(&["doctor", "--measure", "--rounds", "2"]);
    for policy in ["map", "working set", "read all"] {
        assert!(table.contains(policy), "{table}");
    }
    // `map` reads memory when it is touched. The other policies copy the working set or all memory.
    let doctor = || test_home.ok(&["doctor", "--no-boot"]);
    assert!(doctor().contains("measured on this host"), "{}", doctor());
    let path = test_home.dir.path().join("host.json");
    let change = |key: &str, value: &str| {
        let text = std::fs::read_to_string(&path).unwrap();
        let mut file: serde_json::Value = serde_json::from_str(&text).unwrap();
        *file.pointer_mut(key).unwrap() = value.into();
        std::fs::write(&path, file.to_string()).unwrap();
    };
    let own = || {
        let id = test_home.ok(&["create"]);
        test_home.sh(&id, "true");
        let own = own_memory(&test_home);
        test_home.ok(&["rm", &id]);
        test_home.ok(&["serve", "--stop"]);
        *own.iter().min().unwrap()
    };
    change("/policy", "map");
    let mapped = own();
    let snapshots = std::fs::read_dir(test_home.dir.path().join("snapshots")).unwrap();
    let set = snapshots
        .flatten()
        .next()
        .unwrap()
        .path()
        .join("working-set.index");
    assert!(set.exists(), "the template's working set was not recorded");
    change("/policy", "copy_working_set");
    let set = own();
    change("/policy", "copy_all");
    let all = own();
    assert!(mapped * 2 < set && set < all, "{mapped}, {set}, {all} KiB");
    // A policy that was measured on another host is not used. The default is `map`.
    change("/host/cpu", "Another");
    assert!(doctor().contains("another host"), "{}", doctor());
    let foreign = own();
    assert!(foreign * 2 < set, "{foreign}, {set} KiB");
}

#[jiffy_test]
fn every_sandbox_names_its_engine_and_every_engine_its_capabilities() {
    let test_home = TestHome::new();
    let all = test_home.json(&["engines"]);
    let engine = &all[0];
    assert_eq!(engine["name"], "microvm");
    assert_eq!(engine["usable"], true);
    assert_eq!(engine["default"], true);
    assert_eq!(engine["capabilities"]["liveSnapshot"], true);
    assert_eq!(engine["capabilities"]["nestedKvm"], false);
    let text = test_home.ok(&["engines"]);
    assert!(text.starts_with("ENGINE"), "{text}");
    assert!(
        text.contains("continues while a snapshot is written"),
        "{text}"
    );

    let id = test_home.ok(&["create"]);
    assert_eq!(test_home.json(&["ls"])[0]["engine"], "microvm");
    test_home.ok(&["pause", &id]);
    assert_eq!(test_home.json(&["ls"])[0]["engine"], "microvm");
    // A guest has no KVM, and a kernel with its own settings.
    test_home.ok(&["resume", &id]);
    let file = "/proc/sys/kernel/domainname";
    let own = format!("test ! -e /dev/kvm && echo inside | sudo tee {file} >&2; cat {file}");
    assert_eq!(test_home.sh(&id, &own), "inside");
    test_home.ok(&["rm", &id]);
}

/// Returns the ids of the guest's processes whose command line contains `text`.
fn guest_processes(test_home: &TestHome, id: &str, text: &str) -> String {
    // The pattern does not match its own command line.
    let pattern = format!("[{}]{}", &text[..1], &text[1..]);
    test_home.sh(id, &format!("pgrep -f '{pattern}' || true"))
}

#[jiffy_test(engine = "each")]
fn a_timed_out_command_is_killed_even_if_its_client_disconnected() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    let words = ["exec", "--timeout", "1s", &id, "--"];
    let done = test_home.call(&[&words[..], &["sleep", "99"]].concat());
    assert_eq!(done.code, Some(124), "{done:?}");
    let report = "timed out after 1 s: the process ran into its timeout and was killed";
    assert!(done.stderr.contains(report), "{done:?}");
    assert_eq!(guest_processes(&test_home, &id, "sleep 99"), "");

    let mut command = crate::support::jiffy(&[&words[..], &["sleep", "98"]].concat());
    command.env("JIFFY_HOME", test_home.dir.path());
    let mut client = command.spawn().unwrap();
    wait_for("the command", || {
        Some(()).filter(|()| !guest_processes(&test_home, &id, "sleep 98").is_empty())
    });
    client.kill().unwrap();
    client.wait().unwrap();
    wait_for("the end of the command", || {
        Some(()).filter(|()| guest_processes(&test_home, &id, "sleep 98").is_empty())
    });
}

#[jiffy_test(engine = "each")]
fn a_restored_sandbox_lets_programs_make_namespaces_and_loop_mounts() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    // The command acts like bubblewrap and rootless podman. The user has no privileges.
    test_home.sh(&id, "test $(id -u) != 0 && unshare -Urpf --mount-proc true");
    let boot_id = "cat /proc/sys/kernel/random/boot_id";
    let first = test_home.sh(&id, boot_id);
    assert_eq!(test_home.sh(&id, boot_id), first);
    let other = test_home.ok(&["create"]);
    assert_ne!(test_home.sh(&other, boot_id), first);
    let denied = test_home.call(&[
        "exec",
        &id,
        "--",
        "sh",
        "-c",
        "echo 1 > /proc/sys/kernel/random/boot_id",
    ]);
    assert_ne!(denied.code, Some(0), "{denied:?}");
    if is_gvisor() {
        return;
    }
    let modes = "stat -c %a /dev/fuse /dev/net/tun";
    assert_eq!(test_home.sh(&id, modes), "666\n666");
    let mount = "truncate -s 8M /tmp/disk && /sbin/mkfs.ext4 -q /tmp/disk && \
        sudo mount -o loop /tmp/disk /mnt && sudo touch /mnt/file && ls /mnt/file";
    assert_eq!(test_home.sh(&id, mount), "/mnt/file");
    // The directories have entries of both layers of the root.
    let inodes = "sudo touch /etc/new /usr/new && python3 -c '
import os
for path in \"/etc\", \"/usr\", \"/\":
    for entry in os.scandir(path):
        if not entry.is_symlink() and not os.path.ismount(entry.path):
            assert entry.inode() == entry.stat().st_ino, entry.path
'";
    test_home.sh(&id, inodes);
    test_home.sh(
        &id,
        "grep -q rchar /proc/self/io && zgrep -q CONFIG_NET=y /proc/config.gz && cat /proc/self/schedstat",
    );
}
