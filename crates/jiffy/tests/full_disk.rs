//! Tests that a full disk fails only the call that requires space.

use crate::support::sandbox_http::sandbox;
use crate::support::small_disk::SmallDisk;
use crate::support::test_home::TestHome;
use crate::support::{engine, wait_for};
use jiffy_test_attributes::jiffy_test;

#[jiffy_test(engine = "each")]
fn a_snapshot_pause_or_fork_on_a_full_disk_fails_and_the_sandbox_continues() {
    let Some(disk) = SmallDisk::new("1g") else {
        return;
    };
    let test_home = TestHome::in_directory(disk.path());
    // Without a small reserve, admission control would reject calls before the disk is full.
    let mut daemon = test_home.serve(&["--warm-pool", "0", "--reserve-disk", "1MiB"]);
    let id = test_home.ok(&["create"]);
    test_home.sh(
        &id,
        "nohup sh -c 'i=0; while :; do i=$((i+1)); echo $i >/tmp/count; sleep 0.02; done' >/dev/null 2>&1 &
         head -c 150000000 /dev/urandom >/dev/shm/bulk; sha256sum /dev/shm/bulk >sum",
    );
    let count = || -> u64 { test_home.sh(&id, "cat /tmp/count").parse().unwrap_or(0) };
    let entries = || {
        let store = if engine::is_gvisor() {
            "gvisor"
        } else {
            "snapshots"
        };
        std::fs::read_dir(test_home.dir.path().join(store))
            .unwrap()
            .count()
    };
    test_home.ok(&["snapshot", &id, "--name", "before"]);
    test_home.sh(
        &id,
        "head -c 150000000 /dev/urandom >/dev/shm/bulk; sha256sum /dev/shm/bulk >sum",
    );
    let (snapshots, stored) = (test_home.json(&["snapshots"]), entries());
    // The remaining space is smaller than the files of one snapshot.
    disk.fill(40 << 20);
    for call in [
        vec!["snapshot", &id],
        vec!["pause", &id],
        vec!["fork", &id, "-n", "2"],
    ] {
        let failed = test_home.call(&call);
        assert_ne!(failed.code, Some(0), "{call:?} found room");
        assert!(
            failed
                .stderr
                .to_lowercase()
                .contains("no space left on device"),
            "{call:?}: {failed:?}"
        );
        let before = count();
        wait_for("the sandbox to continue", || {
            (count() > before + 2).then_some(())
        });
        assert_eq!(
            test_home.sh(&id, "sha256sum -c --quiet sum && echo whole"),
            "whole"
        );
        assert_eq!(test_home.json(&["snapshots"]), snapshots, "after {call:?}");
        wait_for("partial files to be removed", || {
            (entries() == stored).then_some(())
        });
    }
    disk.free();
    let copy = test_home.ok(&["snapshot", &id]);
    let copy = test_home.ok(&["create", "--from", &copy]);
    assert_eq!(
        test_home.sh(&copy, "sha256sum -c --quiet sum && echo whole"),
        "whole"
    );
    test_home.ok(&["pause", &id]);
    test_home.ok(&["resume", &id]);
    assert_eq!(
        test_home.sh(&id, "sha256sum -c --quiet sum && echo whole"),
        "whole"
    );
    test_home.ok(&["serve", "--stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}

#[jiffy_test(not_on_gvisor = "gVisor stores written files in memory")]
fn guest_writes_fail_on_a_full_host_disk_and_the_log_names_the_cause() {
    let Some(disk) = SmallDisk::new("1g") else {
        return;
    };
    let test_home = TestHome::in_directory(disk.path());
    let mut daemon = test_home.serve(&["--warm-pool", "0", "--reserve-disk", "1MiB"]);
    let id = test_home.ok(&["create"]);
    let shell =
        |script: &str| test_home.call(&["exec", "--user", "root", &id, "--", "sh", "-c", script]);
    // The remaining space is smaller than the 60 MiB that the guest writes.
    disk.fill(20 << 20);
    // A program that syncs its data receives an error.
    let synced = shell("dd if=/dev/urandom of=/root/synced bs=1M count=60 conv=fsync 2>&1");
    assert_ne!(synced.code, Some(0), "{synced:?}");
    let words = ["Input/output error", "Read-only file system"];
    let is_reported = |text: &str| words.iter().any(|words| text.contains(words));
    assert!(is_reported(&synced.stdout), "{synced:?}");
    // A program that does not sync receives an error soon: the guest detects the lost data, and no
    // more data is written.
    let refused = wait_for("the file system to reject writes", || {
        let script = "for i in 1 2 3 4; do mkdir -p /root/d$i; head -c 8M /dev/urandom > /root/d$i/f; done; sync";
        shell(script);
        let done = shell("touch /root/new");
        (done.code != Some(0)).then_some(done.stderr)
    });
    assert!(is_reported(&refused), "{refused}");
    let log = test_home.ok(&["logs", &id]);
    let why = "the host cannot serve this disk (No space left on device";
    assert!(log.contains(why), "{log}");
    let failure = sandbox(&test_home, &id)["diskFailure"].clone();
    assert!(
        failure
            .as_str()
            .is_some_and(|failure| failure.contains(why)),
        "{failure}"
    );
    disk.free();
    test_home.ok(&["serve", "--stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}

#[jiffy_test]
fn a_build_on_a_full_disk_is_reported_and_leaves_nothing() {
    let Some(disk) = SmallDisk::new("1g") else {
        return;
    };
    let test_home = TestHome::in_directory(disk.path());
    test_home.own_templates();
    let mut daemon = test_home.serve(&["--warm-pool", "0", "--reserve-disk", "1MiB"]);
    let context = test_home.dir.path().join("context");
    std::fs::create_dir(&context).unwrap();
    let write = |lines: &str| {
        let text = format!("FROM base\nUSER root\nRUN echo first > /first\n{lines}");
        std::fs::write(context.join("Dockerfile"), text).unwrap();
    };
    let build = |name: &str| {
        let context = context.to_str().unwrap();
        test_home.call(&["template", "build", context, "--name", name])
    };
    let large = "RUN head -c 150000000 /dev/urandom > /large && sync\n";
    write("");
    let done = build("small");
    assert_eq!(done.code, Some(0), "{done:?}");
    let templates = || {
        let names = std::fs::read_dir(test_home.dir.path().join("templates")).unwrap();
        let mut names: Vec<_> = names.map(|n| n.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = templates();
    let refused = |what: &str, name: &str| {
        let done = build(name);
        assert_eq!(done.code, Some(1), "{what}: {done:?}");
        let messages = ["No space left on device", "disk is full", "is full"];
        let is_reported = messages.iter().any(|words| done.stderr.contains(words));
        assert!(is_reported, "{what}: {done:?}");
        wait_for("its sandbox to be removed", || {
            let all = test_home.json(&["ls"]);
            all.as_array().unwrap().is_empty().then_some(())
        });
        assert_eq!(templates(), before, "{what}");
    };
    // Leave no space for the data that the step writes.
    write(large);
    disk.fill(80 << 20);
    refused("the step", "large");
    disk.free();
    let done = build("large");
    assert_eq!(done.code, Some(0), "{done:?}");
    test_home.ok(&["template", "rm", "large"]);
    // This removes the image, and retains the cached steps, which were used within the last day.
    test_home.ok(&["template", "prune", "--older-than", "1d"]);
    // The steps are complete, but no space is left for the image.
    disk.fill(80 << 20);
    refused("the image", "large");
    disk.free();
    let done = build("large");
    assert_eq!(done.code, Some(0), "{done:?}");
    let id = test_home.ok(&["create", "--template", "large"]);
    assert_eq!(test_home.sh(&id, "stat -c %s /large"), "150000000");
    let id = test_home.ok(&["create", "--template", "small"]);
    assert_eq!(test_home.sh(&id, "cat /first"), "first");
    test_home.ok(&["serve", "--stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}
