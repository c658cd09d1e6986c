//! Snapshots that this program or this host cannot restore are refused in a sentence, and nothing
//! is lost by the try.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use support::place::Place;

/// The files of a snapshot that say what it is.
struct Snapshot {
    manifest: PathBuf,
    state: PathBuf,
    original: (Value, Vec<u8>),
}

impl Snapshot {
    fn of(place: &Place, id: &str) -> Self {
        let directory = place.dir.path().join("snapshots").join(id);
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

    fn field(&self, name: &str, value: Value) {
        let mut changed = self.original.0.clone();
        assert!(changed.get(name).is_some(), "{changed}");
        changed[name] = value;
        replace(&self.manifest, changed.to_string().as_bytes());
    }

    /// A feature of the processor that is not here.
    fn processor(&self) {
        let mut state = self.original.1.clone();
        let name = self.original.0["cpu"].as_str().unwrap();
        let mut places = state.windows(name.len()).enumerate();
        let at = places.find_map(|(at, w)| (w == name.as_bytes()).then_some(at));
        let digit = &mut state[at.unwrap()];
        *digit = if *digit == b'f' { b'0' } else { b'f' };
        replace(&self.state, &state);
    }

    fn mend(&self) {
        replace(&self.manifest, self.original.0.to_string().as_bytes());
        replace(&self.state, &self.original.1);
    }
}

/// As a whole, as snapshots are written: a reader never sees half of it.
fn replace(path: &Path, bytes: &[u8]) {
    let new = path.with_extension("new");
    std::fs::write(&new, bytes).unwrap();
    std::fs::rename(&new, path).unwrap();
}

/// Damage done to a snapshot, and the expected message.
type Change = (fn(&Snapshot), &'static str);

/// Ways in which a snapshot cannot be restored here.
const CHANGES: [Change; 3] = [
    (
        |s| s.field("format", json!(99)),
        "has format 99 and this jiffy reads format",
    ),
    (Snapshot::processor, "whose processor offers other features"),
    (|s| s.field("vcpus", json!("many")), "is damaged"),
];

#[test]
fn a_snapshot_of_another_format_or_processor_is_refused_and_the_sandbox_stays_as_it_was() {
    let test =
        "a_snapshot_of_another_format_or_processor_is_refused_and_the_sandbox_stays_as_it_was";
    let Some(place) = Place::new(test) else {
        return;
    };
    let id = place.ok(&["create"]);
    place.sh(&id, "echo kept > file");
    let snapshot = place.ok(&["snapshot", &id]);
    place.sh(&id, "echo later > file");
    let files = Snapshot::of(&place, &snapshot);
    for (change, sentence) in CHANGES {
        change(&files);
        for call in [
            vec!["create", "--from", &snapshot],
            vec!["rollback", &id, &snapshot],
        ] {
            let refused = place.call(&call);
            assert_ne!(refused.code, Some(0), "{call:?}: not: {sentence}");
            assert!(refused.stderr.contains(sentence), "{refused:?}");
        }
        assert_eq!(place.sh(&id, "cat file"), "later");
        assert_eq!(place.json(&["ls"]).as_array().unwrap().len(), 1);
        files.mend();
    }
    place.ok(&["rollback", &id, &snapshot]);
    assert_eq!(place.sh(&id, "cat file"), "kept");
}

#[test]
fn a_paused_sandbox_that_cannot_wake_on_this_host_sleeps_on_until_it_can() {
    let test = "a_paused_sandbox_that_cannot_wake_on_this_host_sleeps_on_until_it_can";
    let Some(place) = Place::new(test) else {
        return;
    };
    let id = place.ok(&["create"]);
    place.sh(&id, "echo dream > /tmp/state");
    place.ok(&["pause", &id]);
    let asleep = place.json(&["ls", "--all"])[0].clone();
    let files = Snapshot::of(&place, asleep["snapshot"].as_str().unwrap());
    for (change, sentence) in CHANGES {
        change(&files);
        let refused = place.call(&["resume", &id]);
        assert_ne!(refused.code, Some(0), "{refused:?}");
        assert!(refused.stderr.contains(sentence), "{refused:?}");
        let state = place.json(&["ls", "--all"])[0]["state"].clone();
        assert_eq!(state, "paused", "after: {sentence}");
        files.mend();
    }
    // Also over a restart of the daemon in between.
    place.ok(&["serve", "--stop"]);
    place.ok(&["resume", &id]);
    assert_eq!(place.sh(&id, "cat /tmp/state"), "dream");
}
