//! Contract of snapshots and of guests restored from them.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! after its boot or restore.
//!
//! The tests recognise that a guest's memory survived by a process that counts. `count` starts the
//! process, and `counted` returns its process id and count.

use super::place::{Place, Running, TEMPLATE, exited, name, new_identity, next_output};
use jiffy_engine_api::{AfterSnapshot, BootMode, ExitReason, SandboxIdentity, SnapshotRequest};
use std::collections::BTreeSet;

pub async fn a_snapshot_is_a_copy_and_its_guest_continues(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    running
        .sh("echo disk > /root/file; echo memory > /dev/shm/file")
        .await;
    running.count().await;
    let at = running.counted().await;
    let id = running.snapshot(AfterSnapshot::Resume).await;
    let id = id.unwrap();
    let at = running.wait_count_above(at).await;
    running.sh("echo later > /root/later").await;
    assert!(engine.snapshot_files().ids().unwrap().contains(&id));

    let copy = place.restored(&engine, &id).await;
    assert_eq!(copy.guest.report().mode, BootMode::Snapshot);
    let files = "cat /root/file /dev/shm/file; ls /root/later 2>&1 | grep -c cannot";
    assert_eq!(copy.sh(files).await, "disk\nmemory\n1");
    let copied = copy.counted().await;
    assert_eq!(copied.0, at.0);
    copy.wait_count_above(copied).await;
    running.wait_count_above(at).await;
    // Changes in one guest must be invisible to the other.
    copy.sh("rm /root/file").await;
    assert_eq!(running.sh("cat /root/file").await, "disk");
    copy.stop().await;
    running.wait_count_above(running.counted().await).await;
    running.stop().await;
}

pub async fn a_stream_stays_open_across_a_snapshot(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    let program = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)";
    let mut spec = jiffy_agent_client::ProcessSpec::new("python3", ["-c", program]);
    spec.stdin = true;
    let mut process = running.agent.start(&spec).await.unwrap();
    let pid = process.pid();
    for (input, output) in [("abc\n", "cba\n"), ("def\n", "fed\n"), ("ghi\n", "ihg\n")] {
        let sent = running.agent.send_stdin(pid, input.as_bytes());
        sent.await.unwrap();
        assert_eq!(next_output(&mut process).await, output);
        let taken = running.snapshot(AfterSnapshot::Resume).await;
        taken.unwrap();
    }
    running.agent.close_stdin(pid).await.unwrap();
    let (status, ..) = process.output(1024).await.unwrap();
    assert_eq!(status.exit_code, 0);
    running.stop().await;
}

pub async fn a_snapshot_that_stops_its_guest_preserves_its_state_and_leaves_no_process(
    place: &Place,
) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    running.count().await;
    let at = running.counted().await;
    let pid = running.guest.pid().unwrap();
    let id = running.snapshot(AfterSnapshot::Stop).await;
    let id = id.unwrap();
    exited(pid).await;
    assert_eq!(running.guest.ended().await, ExitReason::Requested);
    drop(running);
    place.wait_without_guests().await;
    let restored = place.restored(&engine, &id).await;
    restored.wait_count_above(at).await;
    restored.stop().await;
}

pub async fn two_restores_of_one_snapshot_are_two_guests_with_the_same_files(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    running.sh("echo same > /root/file").await;
    let id = running.snapshot(AfterSnapshot::Resume).await;
    let id = id.unwrap();
    let (one, other) = tokio::join!(place.restored(&engine, &id), place.restored(&engine, &id));
    let query = "hostname
cat /etc/machine-id
cat /proc/sys/kernel/random/boot_id
cat /proc/sys/kernel/random/uuid
head -c 32 /dev/urandom | od -An -tx1 | tr -d '\\n '; echo
python3 -c 'import os; print(os.getrandom(32).hex())'
cut -d' ' -f2 /run/jiffy/generation";
    let mut outputs = Vec::new();
    for guest in [&running, &one, &other] {
        assert_eq!(guest.sh("cat /root/file").await, "same");
        outputs.push(guest.sh(query).await);
    }
    let lines: Vec<Vec<&str>> = outputs.iter().map(|text| text.lines().collect()).collect();
    // Each of the seven commands prints a line, which differs between the guests.
    for line in 0..7 {
        let of_all: BTreeSet<&str> = lines.iter().map(|of_one| of_one[line]).collect();
        assert_eq!(of_all.len(), 3, "line {line} of {outputs:#?}");
    }
    // The identity of the running guest (the first three lines) must not change.
    let before: Vec<&str> = outputs[0].lines().take(3).collect();
    let after = running.sh(query).await;
    assert_eq!(after.lines().take(3).collect::<Vec<_>>(), before);
    for guest in [running, one, other] {
        guest.stop().await;
    }
}

pub async fn a_rollback_restores_the_earlier_state_of_the_same_sandbox(place: &Place) {
    let engine = place.open().await;
    let sandbox_identity = SandboxIdentity {
        env: [("WHO".to_owned(), "me".to_owned())].into(),
        ..new_identity()
    };
    let unassigned = engine.boot(TEMPLATE, super::place::size()).await.unwrap();
    let running = Running::assign_identity(unassigned, &sandbox_identity).await;
    running.sh("echo before > /root/file").await;
    running.count().await;
    let generation = running.sh("cat /run/jiffy/generation").await;
    let taken = running.snapshot(AfterSnapshot::Resume).await;
    let id = taken.unwrap();
    running
        .sh("echo after > /root/file; touch /root/more")
        .await;
    let late = running.wait_count_above(running.counted().await).await;
    running.stop().await;

    let rewound_identity = SandboxIdentity {
        rewound: true,
        ..sandbox_identity.clone()
    };
    let unassigned = engine.restore(&id, None).await.unwrap();
    let running = Running::assign_identity(unassigned, &rewound_identity).await;
    let query = "hostname; echo $WHO; cat /root/file; ls /root/more 2>&1 | grep -c cannot";
    let output = running.sh(query).await;
    assert_eq!(output, format!("{}\nme\nbefore\n1", sandbox_identity.id));
    let now = running.counted().await;
    assert_eq!(now.0, late.0);
    running.wait_count_above(now).await;
    // Programs that watch this file are notified of the rollback.
    assert_ne!(running.sh("cat /run/jiffy/generation").await, generation);
    running.stop().await;
}

pub async fn an_identity_given_at_the_start_can_be_replaced(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    let taken = running.snapshot(AfterSnapshot::Resume).await;
    let id = taken.unwrap();
    running.stop().await;

    let announced = new_identity();
    let same_id = SandboxIdentity {
        env: [("WHO".to_owned(), "another value".to_owned())].into(),
        ..announced.clone()
    };
    // The same identity, a modified identity, and another identity.
    for assigned in [announced.clone(), same_id, new_identity()] {
        let unassigned = engine.restore(&id, Some(&announced)).await.unwrap();
        let running = Running::assign_identity(unassigned, &assigned).await;
        let who = assigned.env.get("WHO").map_or("", String::as_str);
        let output = running.sh("hostname; echo $WHO").await;
        assert_eq!(
            output.trim_end(),
            format!("{}\n{who}", assigned.id).trim_end()
        );
        running.stop().await;
    }
}

pub async fn a_failed_snapshot_has_no_effect(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    running.count().await;
    let at = running.counted().await;
    let id = running.snapshot(AfterSnapshot::Resume).await;
    let id = id.unwrap();
    for then in [AfterSnapshot::Resume, AfterSnapshot::Stop] {
        for taken in [&*id, "../up", "", "UPPER"] {
            let guest = &running.guest;
            let request = SnapshotRequest::new(taken, then);
            let refused = guest.take_snapshot(request).await;
            assert!(refused.is_err(), "{taken:?} {then:?}");
            running.wait_count_above(running.counted().await).await;
        }
    }
    assert_eq!(
        engine.snapshot_files().ids().unwrap(),
        std::slice::from_ref(&id)
    );
    // The existing snapshot must be unchanged.
    let copy = place.restored(&engine, &id).await;
    copy.wait_count_above(at).await;
    copy.stop().await;
    running.stop().await;
}

pub async fn a_removed_snapshot_does_not_affect_guests_restored_from_it(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    running.count().await;
    let id = running.snapshot(AfterSnapshot::Stop).await;
    let id = id.unwrap();
    drop(running);
    let restored = place.restored(&engine, &id).await;
    // A snapshot whose memory is shared with sandboxes remains while they need it.
    let all = engine.engines.descriptions();
    // An engine with incremental snapshots maps the memory of a guest from the snapshot's files.
    let shared = all.iter().any(|e| e.default && e.capabilities.incremental);
    let removed = engine.snapshot_files().remove(&id);
    assert_eq!(removed.is_err(), shared, "{removed:?}");
    let at = restored.wait_count_above(restored.counted().await).await;
    let next = restored.snapshot(AfterSnapshot::Stop).await.unwrap();
    drop(restored);
    let restored = place.restored(&engine, &next).await;
    restored.wait_count_above(at).await;
    restored.stop().await;
    // The removal of a snapshot that does not exist is no error: neither a second removal, nor one
    // of an unknown name.
    for id in [&next, &id] {
        for _ in 0..2 {
            engine.snapshot_files().remove(id).unwrap();
        }
        assert!(engine.restore(id, None).await.is_err());
    }
    engine.snapshot_files().remove(&name()).unwrap();
    assert_eq!(engine.snapshot_files().ids().unwrap(), [""; 0]);
}
