//! Sandboxes that stay: a daemon owns them, and every command finds it, with real guests.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::os::unix::fs::PermissionsExt;
use support::place::Place;
use support::{alive, children, wait_for};

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
fn a_killed_daemon_takes_its_guests_along_and_keeps_what_slept() {
    let test = "a_killed_daemon_takes_its_guests_along_and_keeps_what_slept";
    let Some(place) = Place::new(test) else {
        return;
    };
    let (awake, asleep) = (place.ok(&["create"]), place.ok(&["create"]));
    place.sh(&asleep, "echo dream > /tmp/state");
    place.ok(&["snapshot", &awake, "--name", "kept"]);
    place.ok(&["pause", &asleep]);
    let daemon = place.daemon();
    let vmms = children(daemon);
    assert!(!vmms.is_empty());
    let pid = nix::unistd::Pid::from_raw(daemon.try_into().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    wait_for("the daemon to go", || (!alive(daemon)).then_some(()));
    for vmm in vmms {
        wait_for("a VMM to go", || (!alive(vmm)).then_some(()));
    }
    // The next command starts another one.
    let all = place.json(&["ls"]);
    let state = |id: &str| {
        let of = all.as_array().unwrap().iter().find(|s| s["id"] == id);
        of.unwrap()["state"].as_str().unwrap().to_owned()
    };
    assert_eq!(
        (state(&awake), state(&asleep)),
        ("broken".into(), "paused".into())
    );
    place.ok(&["resume", &asleep]);
    assert_eq!(place.sh(&asleep, "cat /tmp/state"), "dream");
    let refused = place.call(&["exec", &awake, "--", "true"]);
    assert!(
        refused.stderr.contains("the daemon was stopped"),
        "{refused:?}"
    );
    place.ok(&["rollback", &awake, "kept"]);
    place.sh(&awake, "true");
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
    for vmm in children(place.daemon()) {
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
    // What waited in the pool is dead too, and nobody gets it.
    let fresh = place.ok(&["create"]);
    assert_eq!(place.sh(&fresh, "hostname"), fresh);
}
