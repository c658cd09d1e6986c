//! Tests for uploads of snapshots to the shared store. A *pack* is an object of the store with
//! chunks of snapshots. A *name* is an object that assigns a snapshot of the store to the id of a
//! snapshot.

use crate::support::test_home::TestHome;
use crate::support::wait_for;
use jiffy_test_attributes::jiffy_test;
use std::fs;
use std::path::{Path, PathBuf};

/// Fills memory and disk with incompressible bytes.
const FILL: &str = "head -c 12000000 /dev/urandom > /home/user/file && \
    head -c 12000000 /dev/urandom > /dev/shm/memory && sync";

/// Returns the number of files of a store below directories named `kind`, and their total size.
fn objects(bucket: &Path, kind: &str) -> (usize, u64) {
    let (mut number, mut bytes) = (0, 0);
    let mut remaining = vec![bucket.to_owned()];
    while let Some(dir) = remaining.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => remaining.push(entry.path()),
                Ok(metadata) if entry.path().iter().any(|part| part == kind) => {
                    number += 1;
                    bytes += metadata.len();
                }
                _ => {}
            }
        }
    }
    (number, bytes)
}

fn start(home: &TestHome, bucket: &Path, more: &[&str]) {
    let url = format!("file://{}", bucket.display());
    let options = ["daemon", "start", "--no-listen", "--store", &url];
    home.ok(&[&options[..], more].concat());
}

/// Returns the state of a snapshot in the store.
fn state(home: &TestHome, id: &str) -> String {
    let all = home.json(&["snapshots"]);
    let mut all = all.as_array().unwrap().iter();
    let found = all.find(|snapshot| snapshot["id"] == *id).unwrap();
    found["store_state"].as_str().unwrap_or_default().to_owned()
}

#[jiffy_test(engine = "each")]
fn snapshots_and_paused_sandboxes_reach_the_store() {
    let home = TestHome::new();
    let dir = tempfile::tempdir().unwrap();
    let bucket: PathBuf = dir.path().join("bucket");
    start(&home, &bucket, &[]);
    let id = home.ok(&["create"]);
    home.sh(&id, FILL);
    let snapshot = home.ok(&["snapshot", &id, "--name", "full", "--durable"]);
    assert_eq!(state(&home, &snapshot), "stored");
    assert!(home.ok(&["snapshots"]).contains("STORE"));
    let (_, whole) = objects(&bucket, "packs");
    assert!(whole > 24_000_000, "{whole}");
    // Unchanged chunks are not uploaded again.
    home.sh(&id, "echo changed > /home/user/small");
    home.ok(&["pause", &id, "--durable"]);
    let (_, more) = objects(&bucket, "packs");
    let more = more - whole;
    let listed = home.json(&["ls"]);
    // The bound leaves room for memory that the guest changes by itself. A gVisor checkpoint is
    // complete, and its pages have other offsets in each checkpoint.
    assert!(
        more < 16_000_000 || listed[0]["engine"] == "gvisor",
        "{more} of {whole}"
    );
    assert_eq!(listed[0]["store_state"], "stored", "{listed}");
    // The next daemon uses the same store.
    home.ok(&["daemon", "restart"]);
    home.ok(&["resume", &id]);
    home.sh(&id, "cat /home/user/small");
    let last = home.ok(&["snapshot", &id, "--durable"]);
    // A lease in the store protects the objects of an upload in progress from a garbage collection.
    assert_eq!(objects(&bucket, "leases").0, 0);
    // The removal of a snapshot removes it from the store.
    let (names, _) = objects(&bucket, "names");
    home.ok(&["rm", &id]);
    home.ok(&["rm", &last]);
    wait_for("the names to be removed", || {
        (objects(&bucket, "names").0 < names).then_some(())
    });
    assert_eq!(state(&home, &snapshot), "stored");
    // Without a store, snapshots cannot be durable. All other behaviour is unchanged.
    home.ok(&["daemon", "restart", "--no-listen"]);
    let id = home.ok(&["create", "--from", "full"]);
    let refused = home.call(&["snapshot", &id, "--durable"]);
    assert!(refused.stderr.contains("--store"), "{refused:?}");
    assert!(!home.ok(&["snapshots"]).contains("STORE"));
}

#[jiffy_test]
fn an_upload_goes_on_after_its_daemon_was_killed() {
    let home = TestHome::new();
    let dir = tempfile::tempdir().unwrap();
    let bucket: PathBuf = dir.path().join("bucket");
    start(&home, &bucket, &["--store-upload-limit", "1MiB"]);
    let id = home.ok(&["create"]);
    home.sh(&id, FILL);
    let snapshot = home.ok(&["snapshot", &id]);
    assert_eq!(state(&home, &snapshot), "uploading");
    wait_for("a pack", || (objects(&bucket, "packs").0 > 0).then_some(()));
    home.kill_daemon();
    let (packs, _) = objects(&bucket, "packs");
    start(&home, &bucket, &[]);
    wait_for("the upload", || {
        (state(&home, &snapshot) == "stored").then_some(())
    });
    assert!(objects(&bucket, "packs").0 > packs);
    assert_eq!(objects(&bucket, "names").0, 1);
}

#[jiffy_test]
fn a_template_reaches_another_data_directory_through_the_store() {
    let home = TestHome::new();
    let dir = tempfile::tempdir().unwrap();
    let url = format!("file://{}/bucket", dir.path().display());
    let push = ["template", "push", "base", "--store", &url];
    let pushed = home.json(&push);
    assert_eq!(pushed["shared"], true, "{pushed}");
    let again = home.json(&push);
    assert_eq!(
        (&again["existed"], &again["sent"]),
        (&true.into(), &0.into())
    );
    let keys = home.dir.path().join("store/keys.toml");
    let keys = keys.to_str().unwrap();
    let there = tempfile::tempdir().unwrap();
    let pull = |name: &str, more: &[&str]| {
        let args = [&["template", "pull", name, "--store", &url, "--json"], more].concat();
        let mut command = crate::support::jiffy(&args);
        command.env("JIFFY_HOME", there.path());
        command.output().unwrap()
    };
    // Another master key has no access to the objects.
    let other = pull("base", &[]);
    let report = String::from_utf8_lossy(&other.stderr);
    assert!(report.contains("jiffy template push"), "{report}");
    let pulled = pull("base", &["--store-keys", keys]);
    let report = String::from_utf8_lossy(&pulled.stderr);
    assert!(pulled.status.success(), "{report}");
    let pulled: serde_json::Value = serde_json::from_slice(&pulled.stdout).unwrap();
    assert_eq!(pulled["version"], pushed["version"]);
    let version = pushed["version"].as_str().unwrap();
    let by_version = pull(&format!("base@{version}"), &["--store-keys", keys]);
    assert!(by_version.status.success());
    let retained = there
        .path()
        .join("versions")
        .join(format!("{version}.json"));
    assert!(retained.exists());
}
