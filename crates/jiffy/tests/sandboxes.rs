//! Sandboxes that stay: a daemon owns them, and every command finds it, with real guests.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::os::unix::fs::{FileExt, PermissionsExt};
use support::engine::is_gvisor;
use support::place::Place;
use support::wait_for;

#[test]
fn a_sandbox_stays_between_commands_and_takes_files_both_ways() {
    let test = "a_sandbox_stays_between_commands_and_takes_files_both_ways";
    let Some(place) = Place::new(test) else {
        return;
    };
    let id = place.ok(&["create", "-e", "GREETING=hello"]);
    let short = &id[..6];
    assert_eq!(
        place.sh(short, "echo $GREETING; hostname"),
        format!("hello\n{id}")
    );
    let socket = place.dir.path().join("run/jiffy.sock");
    assert_eq!(
        socket.metadata().unwrap().permissions().mode() & 0o777,
        0o600
    );

    let file = place.dir.path().join("data");
    let data: Vec<u8> = (0..3_000_000u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(&file, &data).unwrap();
    place.ok(&["cp", file.to_str().unwrap(), &format!("{short}:/tmp/")]);
    let back = place.dir.path().join("back");
    place.ok(&["cp", &format!("{short}:/tmp/data"), back.to_str().unwrap()]);
    assert!(std::fs::read(&back).unwrap() == data);

    assert_eq!(
        place
            .call(&["exec", short, "--", "sh", "-c", "exit 7"])
            .code,
        Some(7)
    );
    assert_eq!(
        place.call(&["exec", short, "--", "no-such"]).code,
        Some(127)
    );
    let missing = place.call(&["exec", "zzzz", "--", "true"]);
    assert_eq!(missing.code, Some(125));
    assert!(missing.stderr.contains("no sandbox `zzzz`"), "{missing:?}");
    place.ok(&["rm", short]);
    assert_eq!(place.json(&["ls", "--all"]).as_array().unwrap().len(), 0);
}

#[test]
fn a_sandbox_is_forked_rewound_put_to_sleep_and_woken() {
    let test = "a_sandbox_is_forked_rewound_put_to_sleep_and_woken";
    let Some(place) = Place::new(test) else {
        return;
    };
    let id = place.ok(&["create"]);
    place.sh(&id, "echo one > /tmp/state");
    let snapshot = place.ok(&["snapshot", &id, "--name", "first"]);
    place.sh(&id, "echo two > /tmp/state");

    let fork = place.json(&["fork", &id, "-n", "3"]);
    let children: Vec<String> = fork["children"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(children.len(), 3, "{fork}");
    let look = "cat /tmp/state /etc/machine-id /proc/sys/kernel/random/uuid; hostname; date +%s";
    let seen: Vec<String> = children.iter().map(|c| place.sh(c, look)).collect();
    for (i, text) in seen.iter().enumerate() {
        assert!(text.starts_with("two\n"), "{text}");
        assert!(text.contains(&children[i]));
        let unlike = |n: usize| {
            seen.iter()
                .filter(|o| o.lines().nth(n) == text.lines().nth(n))
                .count()
        };
        assert_eq!((unlike(1), unlike(2)), (1, 1), "{seen:?}");
    }
    place.ok(&["promote", &children[1]]);
    assert_eq!(place.json(&["ls"]).as_array().unwrap().len(), 2);

    for round in 0..3 {
        assert_eq!(place.ok(&["rollback", &id, "first"]), id);
        assert_eq!(
            place.sh(&id, "cat /tmp/state; hostname"),
            format!("one\n{id}")
        );
        place.sh(&id, &format!("echo {round} > /tmp/state"));
    }
    // A relative's snapshot will do too.
    place.ok(&["rollback", &children[1], &snapshot]);
    assert_eq!(place.sh(&children[1], "cat /tmp/state"), "one");

    place.sh(&id, "sleep 1000 >/dev/null 2>&1 & echo asleep > /tmp/state");
    place.ok(&["pause", &id]);
    let refused = place.call(&["exec", &id, "--", "true"]);
    assert!(refused.stderr.contains("jiffy resume"), "{refused:?}");
    place.ok(&["resume", &id]);
    assert_eq!(place.sh(&id, "cat /tmp/state; pgrep -c sleep"), "asleep\n1");

    let copy = place.json(&["create", "--from", "first"]);
    assert_eq!(copy["boot_mode"], "snapshot");
    assert_eq!(
        place.sh(copy["id"].as_str().unwrap(), "cat /tmp/state"),
        "one"
    );
    place.ok(&["kill", &id]);
    assert!(place.ok(&["snapshots"]).contains("first"));
}

#[test]
fn a_create_is_served_from_the_warm_pool_with_an_identity_of_its_own() {
    let test = "a_create_is_served_from_the_warm_pool_with_an_identity_of_its_own";
    let Some(place) = Place::new(test) else {
        return;
    };
    place.ok(&["create"]);
    let look = "hostname; cat /etc/machine-id /proc/sys/kernel/random/uuid";
    let warm: Vec<(String, String)> = (0..2)
        .map(|_| {
            let made = wait_for("a warm sandbox", || {
                let made = place.json(&["create"]);
                (made["boot_mode"] == "warm-pool").then_some(made)
            });
            let id = made["id"].as_str().unwrap().to_owned();
            let seen = place.sh(&id, look);
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

#[test]
fn a_sandbox_whose_vmm_is_killed_is_broken_and_a_rollback_mends_it() {
    let test = "a_sandbox_whose_vmm_is_killed_is_broken_and_a_rollback_mends_it";
    let Some(place) = Place::new(test) else {
        return;
    };
    let id = place.ok(&["create"]);
    place.sh(&id, "echo kept > /tmp/state");
    place.ok(&["snapshot", &id, "--name", "kept"]);
    for vmm in place.vmms() {
        let pid = nix::unistd::Pid::from_raw(vmm.try_into().unwrap());
        // One of the warm pool may leave by itself meanwhile.
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
    }
    let cause = wait_for("the end to be noticed", || {
        let all = place.json(&["ls"]);
        all[0]["cause"].as_str().map(str::to_owned)
    });
    assert!(cause.contains("was killed"), "{cause}");
    place.ok(&["rollback", &id, "kept"]);
    assert_eq!(place.sh(&id, "cat /tmp/state"), "kept");
    // The sandboxes of the pool are dead too, and are not handed out.
    let fresh = place.ok(&["create"]);
    assert_eq!(place.sh(&fresh, "hostname"), fresh);
}

#[test]
fn a_kept_snapshot_is_sealed_by_itself_and_a_flipped_byte_of_it_is_found() {
    let test = "a_kept_snapshot_is_sealed_by_itself_and_a_flipped_byte_of_it_is_found";
    let Some(place) = Place::new(test) else {
        return;
    };
    let id = place.ok(&["create"]);
    let snapshot = place.ok(&["snapshot", &id, "--name", "precious"]);
    let verify = || place.call(&["snapshots", "--verify", "precious", "--json"]);
    let sound = wait_for("the seal", || {
        let done = verify();
        (done.code == Some(0)).then_some(done)
    });
    let verified: serde_json::Value = serde_json::from_str(&sound.stdout).unwrap();
    // It and the template's it lies on.
    assert_eq!(verified.as_array().unwrap().len(), 2, "{verified}");
    let dir = place.dir.path().join("snapshots").join(&snapshot);
    let index = std::fs::File::open(dir.join("memory.index")).unwrap();
    let index = jiffy_snapshot::read_index(&index).unwrap();
    let chunk = index.stored.iter().next().unwrap();
    let mut options = std::fs::File::options();
    let layer = options.read(true).write(true);
    let layer = layer.open(dir.join("memory.layer")).unwrap();
    let (mut byte, at) = ([0], chunk * 65536 + 4097);
    layer.read_exact_at(&mut byte, at).unwrap();
    layer.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    let damaged = place.call(&["snapshots", "--verify", "precious"]);
    assert_eq!(damaged.code, Some(1), "{damaged:?}");
    let named = format!("memory.layer chunk {chunk} ");
    assert!(damaged.stdout.contains(&named), "{damaged:?}");
    place.ok(&["rm", &id]);
    place.ok(&["rm", "precious"]);
    wait_for("the files to go behind the answer", || {
        (!dir.exists()).then_some(())
    });
}

/// Memory of the daemon's VMMs that no file lies behind, in KiB.
fn own_memory(place: &Place) -> Vec<u64> {
    let vmms = place.vmms().into_iter();
    let own = vmms.filter_map(|pid| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        let line = text.lines().find_map(|l| l.strip_prefix("Anonymous:"))?;
        line.trim().trim_end_matches(" kB").parse().ok()
    });
    own.collect()
}

#[test]
fn restores_take_the_measured_policy_on_the_host_it_was_measured_on() {
    let test = "restores_take_the_measured_policy_on_the_host_it_was_measured_on";
    let Some(place) = Place::new(test) else {
        return;
    };
    let table = place.ok(&["doctor", "--measure", "--rounds", "2"]);
    for policy in ["map", "working set", "read all"] {
        assert!(table.contains(policy), "{table}");
    }
    let doctor = || place.ok(&["doctor", "--no-boot"]);
    assert!(doctor().contains("measured on this host"), "{}", doctor());
    let path = place.dir.path().join("host.json");
    let change = |key: &str, value: &str| {
        let text = std::fs::read_to_string(&path).unwrap();
        let mut file: serde_json::Value = serde_json::from_str(&text).unwrap();
        *file.pointer_mut(key).unwrap() = value.into();
        std::fs::write(&path, file.to_string()).unwrap();
    };
    let own = || {
        let id = place.ok(&["create"]);
        place.sh(&id, "true");
        let own = own_memory(&place);
        place.ok(&["rm", &id]);
        place.ok(&["serve", "--stop"]);
        *own.iter().min().unwrap()
    };
    change("/policy", "map");
    let mapped = own();
    let snapshots = std::fs::read_dir(place.dir.path().join("snapshots")).unwrap();
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
    change("/host/cpu", "Another");
    assert!(doctor().contains("another host"), "{}", doctor());
    let foreign = own();
    assert!(foreign * 2 < set, "{foreign}, {set} KiB");
}

#[test]
fn every_sandbox_tells_its_engine_which_tells_what_it_can() {
    let test = "every_sandbox_tells_its_engine_which_tells_what_it_can";
    let Some(place) = Place::new(test) else {
        return;
    };
    let all = place.json(&["engines"]);
    let engine = &all[0];
    assert_eq!(engine["name"], "microvm");
    assert_eq!(engine["usable"], true);
    assert_eq!(engine["default"], true);
    assert_eq!(engine["capabilities"]["liveSnapshot"], true);
    assert_eq!(engine["capabilities"]["nestedKvm"], false);
    let text = place.ok(&["engines"]);
    assert!(text.starts_with("ENGINE"), "{text}");
    assert!(
        text.contains("runs on while a snapshot is written"),
        "{text}"
    );

    let id = place.ok(&["create"]);
    assert_eq!(place.json(&["ls"])[0]["engine"], "microvm");
    place.ok(&["pause", &id]);
    assert_eq!(place.json(&["ls"])[0]["engine"], "microvm");
    // A guest has no KVM, and a kernel whose settings are its own.
    place.ok(&["resume", &id]);
    let file = "/proc/sys/kernel/domainname";
    let own = format!("test ! -e /dev/kvm && echo inside | sudo tee {file} >&2; cat {file}");
    assert_eq!(place.sh(&id, &own), "inside");
    place.ok(&["rm", &id]);
}

/// Ids of processes of the guest whose command line contains `text`.
fn guest_processes(place: &Place, id: &str, text: &str) -> String {
    // The pattern does not match the line that it stands in.
    let pattern = format!("[{}]{}", &text[..1], &text[1..]);
    place.sh(id, &format!("pgrep -f '{pattern}' || true"))
}

#[test]
fn a_command_over_its_time_has_ended_in_the_guest_also_when_its_client_is_gone() {
    let test = "a_command_over_its_time_has_ended_in_the_guest_also_when_its_client_is_gone";
    let Some(place) = Place::new(test) else {
        return;
    };
    let id = place.ok(&["create"]);
    let words = ["exec", "--timeout", "1s", &id, "--"];
    let done = place.call(&[&words[..], &["sleep", "99"]].concat());
    assert_eq!(done.code, Some(124), "{done:?}");
    let told = "timed out after 1 s: the process ran into its timeout and was killed";
    assert!(done.stderr.contains(told), "{done:?}");
    assert_eq!(guest_processes(&place, &id, "sleep 99"), "");

    let mut command = support::jiffy(&[&words[..], &["sleep", "98"]].concat());
    command.env("JIFFY_HOME", place.dir.path());
    let mut client = command.spawn().unwrap();
    wait_for("the command", || {
        Some(()).filter(|()| !guest_processes(&place, &id, "sleep 98").is_empty())
    });
    client.kill().unwrap();
    client.wait().unwrap();
    wait_for("the end of the command", || {
        Some(()).filter(|()| guest_processes(&place, &id, "sleep 98").is_empty())
    });
}

#[test]
fn a_restored_sandbox_lets_programs_make_namespaces_and_loop_mounts() {
    let test = "a_restored_sandbox_lets_programs_make_namespaces_and_loop_mounts";
    let Some(place) = Place::new(test) else {
        return;
    };
    let id = place.ok(&["create"]);
    // The way of bubblewrap and rootless podman; the user has no rights.
    place.sh(&id, "test $(id -u) != 0 && unshare -Urpf --mount-proc true");
    let boot_id = "cat /proc/sys/kernel/random/boot_id";
    let first = place.sh(&id, boot_id);
    assert_eq!(place.sh(&id, boot_id), first);
    let other = place.ok(&["create"]);
    assert_ne!(place.sh(&other, boot_id), first);
    let denied = place.call(&[
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
    assert_eq!(place.sh(&id, modes), "666\n666");
    let mount = "truncate -s 8M /tmp/disk && /sbin/mkfs.ext4 -q /tmp/disk && \
        sudo mount -o loop /tmp/disk /mnt && sudo touch /mnt/file && ls /mnt/file";
    assert_eq!(place.sh(&id, mount), "/mnt/file");
    // Of directories with entries of both layers of the root.
    let inodes = "sudo touch /etc/new /usr/new && python3 -c '
import os
for path in \"/etc\", \"/usr\", \"/\":
    for entry in os.scandir(path):
        if not entry.is_symlink() and not os.path.ismount(entry.path):
            assert entry.inode() == entry.stat().st_ino, entry.path
'";
    place.sh(&id, inodes);
    place.sh(
        &id,
        "grep -q rchar /proc/self/io && zgrep -q CONFIG_NET=y /proc/config.gz && cat /proc/self/schedstat",
    );
}

on_gvisor! {
    a_command_over_its_time_has_ended_in_the_guest_also_when_its_client_is_gone,
    a_restored_sandbox_lets_programs_make_namespaces_and_loop_mounts,
}
