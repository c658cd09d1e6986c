//! Tests for pauses and snapshots without memory: only the file system is stored, and the guest
//! boots from its disk.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

use crate::support::engine::is_gvisor;
use crate::support::sandbox_http;
use crate::support::store::TestStore;
use crate::support::test_home::TestHome;
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};

/// Script whose output differs after each boot.
const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";

/// Returns the record of a snapshot.
fn snapshot(test_home: &TestHome, id: &str) -> Value {
    let all = test_home.json(&["snapshots"]);
    let mut all = all.as_array().unwrap().iter();
    all.find(|snapshot| snapshot["id"] == *id).unwrap().clone()
}

#[jiffy_test(engine = "each")]
fn a_sandbox_paused_without_memory_boots_with_its_files_and_settings() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "--name", "sleeper", "--label", "a=b", "-e", "X=1"]);
    if is_gvisor() {
        let refused = test_home.call(&["pause", "--disk-only", &id]);
        assert!(refused.stderr.contains("without the memory"), "{refused:?}");
        let (status, text) = pause(&test_home, &id, &json!({ "memory": false }));
        assert_eq!(status, 400, "{text}");
        assert!(text.contains("unsupported_option"), "{text}");
        assert_eq!(test_home.sh(&id, "echo runs"), "runs");
        return;
    }
    // These changes are not synced, and are in the guest's memory only.
    test_home.sh(
        &id,
        "for n in $(seq 300); do echo $n > /tmp/file$n; done; echo gone > /dev/shm/file; \
         sleep 1000 >/dev/null 2>&1 &",
    );
    let boot = test_home.sh(&id, BOOT_ID);
    test_home.ok(&["pause", "--disk-only", &id]);
    let paused = sandbox_http::sandbox(&test_home, &id);
    assert_eq!(paused["state"], "paused", "{paused}");
    assert_eq!(paused["pauseMode"], "filesystem", "{paused}");
    assert!(test_home.ok(&["ls"]).contains("paused, disk only"));
    assert!(
        test_home
            .ok(&["inspect", &id])
            .contains("paused, disk only")
    );

    test_home.ok(&["resume", &id]);
    let seen = "cat /tmp/file300; ls /tmp/file* | wc -l; ls /dev/shm/file 2>&1 | grep -c cannot; \
                pgrep -c sleep; hostname; echo $X";
    assert_eq!(test_home.sh(&id, seen), format!("300\n300\n1\n0\n{id}\n1"));
    assert_ne!(test_home.sh(&id, BOOT_ID), boot);
    let resumed = sandbox_http::sandbox(&test_home, "sleeper");
    assert_eq!(resumed["sandboxID"], *id, "{resumed}");
    assert_eq!(resumed["metadata"]["a"], "b", "{resumed}");
    assert_eq!(resumed["bootMode"], "cold", "{resumed}");
    assert_eq!(resumed["pauseMode"], Value::Null, "{resumed}");
}

/// Sends a request to pause a sandbox. Returns the status and the body.
fn pause(test_home: &TestHome, id: &str, body: &Value) -> (u16, String) {
    let path = format!("/sandboxes/{id}/pause");
    let stream = sandbox_http::begin_call(test_home, "POST", &path, body);
    let (status, _, text) = sandbox_http::finish_call(stream).unwrap();
    (status, text)
}

#[jiffy_test(engine = "microvm")]
fn memory_snapshots_after_a_boot_from_a_disk_contain_the_new_memory_only() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    let first = "head -c 30000000 /dev/urandom > /dev/shm/first; sha256sum /dev/shm/first";
    test_home.sh(&id, first);
    // The memory of this pause must not appear in later snapshots.
    test_home.ok(&["pause", &id]);
    test_home.ok(&["resume", &id]);
    test_home.sh(&id, "echo one > /tmp/state");
    test_home.ok(&["pause", "--disk-only", &id]);
    test_home.ok(&["resume", &id]);
    let sum = test_home.sh(
        &id,
        "head -c 20000000 /dev/urandom > /dev/shm/second; sha256sum /dev/shm/second",
    );
    for _ in 0..2 {
        test_home.ok(&["pause", &id]);
        test_home.ok(&["resume", &id]);
        let seen = test_home.sh(
            &id,
            "cat /tmp/state; sha256sum /dev/shm/second; ls /dev/shm",
        );
        assert_eq!(seen, format!("one\n{sum}\nsecond"));
    }
    let child = test_home.json(&["fork", &id, "-n", "1"]);
    let child = child["children"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(test_home.sh(&child, "sha256sum /dev/shm/second"), sum);
}

#[jiffy_test(engine = "microvm")]
fn a_disk_snapshot_of_a_running_sandbox_is_created_from_forked_and_rolled_back_to() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    test_home.sh(&id, "echo memory > /dev/shm/file; echo one > /tmp/state");
    let boot = test_home.sh(&id, BOOT_ID);
    let disk = test_home.ok(&["snapshot", "--disk-only", "--name", "disk", &id]);
    // The sandbox continues with its memory, and its disk is writable again.
    assert_eq!(test_home.sh(&id, "cat /dev/shm/file"), "memory");
    test_home.sh(
        &id,
        "echo two > /tmp/state; echo later > /dev/shm/later; sync",
    );
    let full = test_home.ok(&["snapshot", "--name", "full", &id]);

    let copy = test_home.ok(&["create", "--from", "disk"]);
    assert_eq!(
        test_home.sh(&copy, "cat /tmp/state; ls /dev/shm; hostname"),
        format!("one\n{copy}")
    );
    assert_ne!(test_home.sh(&copy, BOOT_ID), boot);
    // Memory snapshots that are based on the snapshot of the disk are complete.
    let restored = test_home.ok(&["create", "--from", "full"]);
    assert_eq!(
        test_home.sh(&restored, "cat /tmp/state /dev/shm/file /dev/shm/later"),
        "two\nmemory\nlater"
    );

    test_home.ok(&["rollback", &id, &disk]);
    assert_eq!(
        test_home.sh(&id, "cat /tmp/state; ls /dev/shm; hostname"),
        format!("one\n{id}")
    );
    test_home.ok(&["rollback", &id, &full]);
    assert_eq!(
        test_home.sh(&id, "cat /tmp/state /dev/shm/file /dev/shm/later"),
        "two\nmemory\nlater"
    );
    // Children of a sandbox that is paused without memory boot.
    test_home.ok(&["pause", "--disk-only", &copy]);
    let fork = test_home.json(&["fork", &copy, "-n", "2"]);
    let children = fork["children"].as_array().unwrap();
    assert_eq!(children.len(), 2, "{fork}");
    for child in children {
        let child = child["id"].as_str().unwrap();
        assert_eq!(
            test_home.sh(child, "cat /tmp/state; hostname"),
            format!("one\n{child}")
        );
    }
}

#[jiffy_test(engine = "microvm")]
fn a_reboot_discards_the_memory_of_a_pause_and_writes_its_files_first() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    test_home.sh(&id, "echo kept > /tmp/file; echo gone > /dev/shm/file");
    test_home.ok(&["pause", &id]);
    let refused = test_home.call(&["snapshot", "--disk-only", &id]);
    assert!(refused.stderr.contains("resume it"), "{refused:?}");
    test_home.ok(&["resume", "--reboot", &id]);
    assert_eq!(test_home.sh(&id, "cat /tmp/file; ls /dev/shm"), "kept");
}

#[jiffy_test(engine = "microvm")]
fn a_sandbox_that_booted_from_a_disk_survives_its_daemon() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    test_home.sh(&id, "echo first > /dev/shm/file");
    test_home.ok(&["pause", &id]);
    test_home.ok(&["resume", &id]);
    test_home.ok(&["pause", "--disk-only", &id]);
    test_home.ok(&["resume", &id]);
    test_home.sh(&id, "echo second > /dev/shm/file");
    test_home.ok(&["serve", "--stop"]);
    // The next daemon adopts the guest, whose memory is not based on its parent.
    test_home.ok(&["pause", &id]);
    test_home.ok(&["resume", &id]);
    assert_eq!(test_home.sh(&id, "cat /dev/shm/file"), "second");
    let taken = test_home.ok(&["snapshot", "--disk-only", &id]);
    assert_eq!(snapshot(&test_home, &taken)["content"], "filesystem");
    test_home.ok(&["serve", "--stop"]);
    test_home.sh(&id, "echo third > /dev/shm/file");
    test_home.ok(&["pause", &id]);
    test_home.ok(&["resume", &id]);
    assert_eq!(test_home.sh(&id, "cat /dev/shm/file"), "third");
}

#[jiffy_test(engine = "microvm")]
fn a_snapshot_without_memory_boots_on_another_host_of_the_store() {
    let (there, here) = (TestHome::new(), TestHome::new());
    let store = TestStore::new();
    store.start(&there);
    let id = there.ok(&["create"]);
    there.sh(&id, "echo moved > /tmp/file; echo gone > /dev/shm/file");
    let taken = there.ok(&["snapshot", "--disk-only", &id]);
    store.wait_for(None, &taken);
    drop(there);
    store.start(&here);
    let copy = here.ok(&["create", "--from", &taken]);
    assert_eq!(here.sh(&copy, "cat /tmp/file; ls /dev/shm"), "moved");
    here.sh(&copy, "echo new > /dev/shm/file");
    here.ok(&["pause", &copy]);
    here.ok(&["resume", &copy]);
    assert_eq!(here.sh(&copy, "cat /tmp/file /dev/shm/file"), "moved\nnew");
}
