//! Tests that snapshots which this program or this host cannot restore are rejected with a message,
//! and that the attempt loses no data.

use crate::support::test_home::TestHome;
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Metadata files of a snapshot.
struct Snapshot {
    manifest: PathBuf,
    state: PathBuf,
    original: (Value, Vec<u8>),
}

impl Snapshot {
    /// Reads the files of a snapshot, so that a change can be undone.
    fn of(test_home: &TestHome, id: &str) -> Self {
        let directory = test_home.dir.path().join("snapshots").join(id);
        let manifest = directory.join("manifest.json");
        let state = directory.join("state.bin");
        let original = (
            serde_json::from_slice(&std::fs::read(&manifest).unwrap()).unwrap(),
            std::fs::read(&state).unwrap(),
        );
        Self {
            manifest,
            state,
            original,
        }
    }

    /// Changes a field of the original manifest.
    fn field(&self, name: &str, value: Value) {
        let mut changed = self.original.0.clone();
        assert!(changed.get(name).is_some(), "{changed}");
        changed[name] = value;
        replace(&self.manifest, changed.to_string().as_bytes());
    }

    /// Changes the processor features in the state, so that they do not match this host.
    fn processor(&self) {
        let mut state = self.original.1.clone();
        let name = self.original.0["cpu"].as_str().unwrap();
        let mut places = state.windows(name.len()).enumerate();
        let at = places.find_map(|(at, w)| (w == name.as_bytes()).then_some(at));
        let digit = &mut state[at.unwrap()];
        *digit = if *digit == b'f' { b'0' } else { b'f' };
        replace(&self.state, &state);
    }

    /// Writes the original manifest and state.
    fn restore(&self) {
        replace(&self.manifest, self.original.0.to_string().as_bytes());
        replace(&self.state, &self.original.1);
    }
}

/// Replaces a file atomically, in the same way as snapshots are written.
fn replace(path: &Path, bytes: &[u8]) {
    let new = path.with_extension("new");
    std::fs::write(&new, bytes).unwrap();
    std::fs::rename(&new, path).unwrap();
}

/// Modification of a snapshot, and the expected message.
type Change = (fn(&Snapshot), &'static str);

/// Reasons why a snapshot cannot be restored on this host.
const CHANGES: [Change; 3] = [
    (
        |s| s.field("format", json!(99)),
        "has format 99, but this version of jiffy reads format",
    ),
    (Snapshot::processor, "whose processor offers other features"),
    (|s| s.field("vcpus", json!("many")), "is damaged"),
];

#[jiffy_test]
fn an_incompatible_snapshot_is_rejected_and_the_sandbox_is_unchanged() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    test_home.sh(&id, "echo kept > file");
    let snapshot = test_home.ok(&["snapshot", &id]);
    test_home.sh(&id, "echo later > file");
    let files = Snapshot::of(&test_home, &snapshot);
    for (change, sentence) in CHANGES {
        change(&files);
        for call in [
            vec!["create", "--from", &snapshot],
            vec!["rollback", &id, &snapshot],
        ] {
            let refused = test_home.call(&call);
            assert_ne!(refused.code, Some(0), "{call:?}: not: {sentence}");
            assert!(refused.stderr.contains(sentence), "{refused:?}");
        }
        assert_eq!(test_home.sh(&id, "cat file"), "later");
        assert_eq!(test_home.json(&["ls"]).as_array().unwrap().len(), 1);
        files.restore();
    }
    test_home.ok(&["rollback", &id, &snapshot]);
    assert_eq!(test_home.sh(&id, "cat file"), "kept");
}

#[jiffy_test]
fn a_paused_sandbox_that_cannot_resume_on_this_host_stays_paused_until_it_can() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    test_home.sh(&id, "echo dream > /tmp/state");
    test_home.ok(&["pause", &id]);
    let asleep = test_home.json(&["ls", "--all"])[0].clone();
    let files = Snapshot::of(&test_home, asleep["snapshot"].as_str().unwrap());
    for (change, sentence) in CHANGES {
        change(&files);
        let refused = test_home.call(&["resume", &id]);
        assert_ne!(refused.code, Some(0), "{refused:?}");
        assert!(refused.stderr.contains(sentence), "{refused:?}");
        let state = test_home.json(&["ls", "--all"])[0]["state"].clone();
        assert_eq!(state, "paused", "after: {sentence}");
        files.restore();
    }
    // With its original files, the snapshot can be resumed, also after a restart of the daemon.
    test_home.ok(&["serve", "--stop"]);
    test_home.ok(&["resume", &id]);
    assert_eq!(test_home.sh(&id, "cat /tmp/state"), "dream");
}

/// Returns whether the processor restricts guests to the requested features.
fn has_hardware_virtualization() -> bool {
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let mut words = flags.split_whitespace();
    words.any(|word| word == "vmx" || word == "svm")
}

#[jiffy_test]
fn guests_and_snapshots_report_their_processor_level() {
    let test_home = TestHome::new();
    let unknown = test_home.call(&["daemon", "start", "--cpu-level", "x86-64-v9"]);
    assert!(unknown.stderr.contains("x86-64-v2"), "{unknown:?}");
    let start = ["daemon", "start", "--no-listen", "--cpu-level", "x86-64-v2"];
    if !has_hardware_virtualization() {
        // On this host, programs in guests see all features of the host's processor, regardless of
        // the KVM settings. The daemon therefore rejects the option.
        let refused = test_home.call(&start);
        assert_ne!(refused.code, Some(0));
        assert!(refused.stderr.contains("VT-x"), "{refused:?}");
        return;
    }
    test_home.ok(&start);
    let id = test_home.ok(&["create"]);
    let flags = test_home.sh(&id, "grep -m1 ^flags /proc/cpuinfo");
    let flags: Vec<&str> = flags.split_whitespace().collect();
    assert!(
        flags.contains(&"sse4_2") && flags.contains(&"popcnt"),
        "{flags:?}"
    );
    for later in ["avx", "avx2", "avx512f", "aes", "xsave"] {
        assert!(!flags.contains(&later), "{later}: {flags:?}");
    }
    let snapshot = test_home.ok(&["snapshot", &id]);
    let files = Snapshot::of(&test_home, &snapshot);
    let cpu = files.original.0["cpu"].as_str().unwrap();
    assert!(cpu.starts_with("x86-64-v2:"), "{cpu}");
    let copy = test_home.ok(&["create", "--from", &snapshot]);
    assert_eq!(test_home.sh(&copy, "echo up"), "up");
}
