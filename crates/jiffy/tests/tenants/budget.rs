//! Tests for quotas of a key: exact, persistent across a crash, and without effect on other keys.

use super::two_keys::TwoKeys;
use crate::support::wait_for;
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};

/// Creates a key with these limits.
fn key(keys: &TwoKeys, limits: &[&str]) -> String {
    keys.remote
        .test_home
        .ok(&[&["key", "create"], limits].concat())
}

fn post(keys: &TwoKeys, key: &str, path: &str, body: &Value) -> (u16, Value) {
    keys.http(key, "POST", path, body)
}

/// Returns the usage of a key.
fn usage_of(keys: &TwoKeys, key: &str) -> Value {
    let (status, budget) = keys.http(key, "GET", "/limits", &Value::Null);
    assert_eq!(status, 200, "{budget}");
    budget["used"].clone()
}

#[track_caller]
fn refused(answer: (u16, Value), status: u16, word: &str) {
    let (got, body) = answer;
    assert_eq!((got, &body["error_code"]), (status, &json!(word)), "{body}");
}

#[jiffy_test(root)]
fn a_key_stays_within_its_quota_even_across_a_crash() {
    let mut keys = TwoKeys::with_templates(&["--warm-pool", "0"]);
    let limits = [
        "--name=hoarder",
        "--max-sandboxes=1",
        "--max-paused=2",
        "--max-snapshots=3",
        "--max-disk=1GiB",
    ];
    let hoarder = key(&keys, &limits);
    let create = json!({ "templateID": "base" });
    let mut ids = Vec::new();
    for _ in 0..2 {
        let (status, created) = post(&keys, &hoarder, "/v2/sandboxes", &create);
        assert_eq!(status, 201, "{created}");
        let id = created["sandboxID"].as_str().unwrap().to_owned();
        let path = format!("/sandboxes/{id}/pause");
        let (status, answer) = post(&keys, &hoarder, &path, &json!({}));
        assert_eq!(status, 204, "{answer}");
        ids.push(id);
    }
    let (_, created) = post(&keys, &hoarder, "/v2/sandboxes", &create);
    let third = created["sandboxID"].as_str().unwrap().to_owned();
    let pause = format!("/sandboxes/{third}/pause");
    refused(post(&keys, &hoarder, &pause, &json!({})), 429, "max_paused");
    let snapshot = format!("/sandboxes/{third}/snapshots");
    for n in 0..3 {
        let (status, taken) = post(&keys, &hoarder, &snapshot, &json!({}));
        assert_eq!(status, 201, "{n}: {taken}");
    }
    refused(
        post(&keys, &hoarder, &snapshot, &json!({})),
        429,
        "max_snapshots",
    );

    // Each charged byte belongs to an existing file.
    let before = usage_of(&keys, &hoarder);
    let bytes = before["diskBytes"].as_u64().unwrap();
    let disk = &before["disk"];
    let parts = ["paused", "snapshots"].map(|part| disk[part].as_u64().unwrap());
    assert!(parts.iter().all(|part| *part > 0), "{before}");
    assert_eq!(parts.iter().sum::<u64>(), bytes, "{before}");
    assert!(on_disk(&keys) >= bytes, "{before}");

    // The usage is unchanged after the daemon was killed; the next daemon computes it from the
    // disk.
    keys.restart(&["--warm-pool", "0"]);
    let after = usage_of(&keys, &hoarder);
    for what in ["paused", "snapshots", "sandboxes", "diskBytes", "disk"] {
        assert_eq!(before[what], after[what], "{what}");
    }
    refused(
        post(&keys, &hoarder, &snapshot, &json!({})),
        429,
        "max_snapshots",
    );

    // Snapshots, pauses and forks beyond the quota fail, and the guest continues to run. The 100 MB
    // of the guest's memory exceed the quota of 24 MiB.
    let small = key(&keys, &["--name=small", "--max-disk=24MiB"]);
    let (_, created) = post(&keys, &small, "/v2/sandboxes", &create);
    let id = created["sandboxID"].as_str().unwrap().to_owned();
    let fill = "head -c 100000000 /dev/urandom > /dev/shm/x && echo full";
    assert_eq!(
        keys.ok(&small, &["exec", &id, "--", "sh", "-c", fill]),
        "full"
    );
    for call in ["snapshots", "pause", "fork"] {
        let path = format!("/sandboxes/{id}/{call}");
        let (status, answer) = post(&keys, &small, &path, &json!({}));
        assert_eq!(
            (status, &answer["error_code"]),
            (507, &json!("max_disk")),
            "{call}: {answer}"
        );
    }
    assert_eq!(usage_of(&keys, &small)["diskBytes"], 0);
    let count = ["exec", &id, "--", "stat", "-c", "%s", "/dev/shm/x"];
    assert_eq!(keys.ok(&small, &count), "100000000");

    // The operator sees the total. A new daemon charges the checksums that the earlier daemon wrote
    // after its answers, as soon as it has read the directories.
    let test_home = &keys.remote.test_home;
    let of = |name: &str| {
        let listed = test_home.json(&["key", "ls"]);
        let mut all = listed.as_array().unwrap().iter();
        all.find(|key| key["name"] == name).unwrap()["budget"].clone()
    };
    let reader = format!("X-API-KEY: {}\r\n", key(&keys, &["--scope=read"]));
    wait_for("equal usage values", || {
        let bytes = usage_of(&keys, &hoarder)["diskBytes"].as_u64().unwrap();
        let (_, figures) = keys.raw("GET", "/metrics", &reader, &Value::Null);
        let own = of("hoarder");
        let line = format!(
            "jiffy_key_disk_bytes{{key=\"{}\"}} {bytes}.0",
            own["keyID"].as_str().unwrap()
        );
        let same = own["used"]["diskBytes"] == bytes && figures.lines().any(|l| l == line);
        same.then_some(())
    });
    let now = usage_of(&keys, &hoarder)["diskBytes"].as_u64().unwrap();
    assert!((bytes..=bytes + (1 << 20)).contains(&now), "{bytes}, {now}");
    assert_eq!(of("hoarder")["limits"]["diskBytes"], 1u64 << 30);
    // A key without a quota has a part of the disk as its limit.
    assert!(of("mallory")["limits"]["diskBytes"].as_u64().unwrap() > 0);
    let table = test_home.ok(&["key", "ls"]);
    assert!(table.contains("3/3 snapshots"), "{table}");

    // Keys within their quota are unaffected.
    let (status, other) = post(&keys, &keys.alice.clone(), "/v2/sandboxes", &create);
    assert_eq!(status, 201, "{other}");
}

/// Returns the bytes of all snapshots of the daemon.
fn on_disk(keys: &TwoKeys) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let store = keys.remote.test_home.dir.path().join("snapshots");
    let snapshots = std::fs::read_dir(store).unwrap().flatten();
    let files = snapshots.flat_map(|s| std::fs::read_dir(s.path()).unwrap().flatten());
    files.map(|f| f.metadata().unwrap().blocks() * 512).sum()
}

/// Starts a build of `key` with one command. Returns its template and build.
fn build(keys: &TwoKeys, key: &str, name: &str, command: &str) -> (String, String) {
    let (status, new) = post(keys, key, "/v3/templates", &json!({ "name": name }));
    assert_eq!(status, 202, "{new}");
    let text = |field: &str| new[field].as_str().unwrap().to_owned();
    let (template, build) = (text("templateID"), text("buildID"));
    let path = format!("/v2/templates/{template}/builds/{build}");
    let steps = json!({
        "fromTemplate": "base",
        "steps": [{ "type": "RUN", "args": [command] }],
    });
    let (status, answer) = post(keys, key, &path, &steps);
    assert_eq!(status, 202, "{answer}");
    (template, build)
}

/// Returns the status of a build.
fn status(keys: &TwoKeys, key: &str, (template, build): &(String, String)) -> String {
    let path = format!("/templates/{template}/builds/{build}/status");
    let (_, status) = keys.http(key, "GET", &path, &Value::Null);
    status["status"].as_str().unwrap().to_owned()
}

#[jiffy_test(root)]
fn sleeping_builds_of_one_key_do_not_delay_builds_of_another() {
    let options = ["--warm-pool", "0", "--builds", "2"];
    let keys = TwoKeys::with_templates(&options);
    let sleeping: Vec<_> = ["one", "two", "three"]
        .map(|name| {
            build(
                &keys,
                &keys.mallory,
                name,
                &format!("sleep 600; echo {name}"),
            )
        })
        .into();
    wait_for("a sleeping build", || {
        (status(&keys, &keys.mallory, &sleeping[0]) == "building").then_some(())
    });
    let quick = build(&keys, &keys.alice, "quick", "echo done > /tmp/done");
    wait_for("the other key's build", || {
        match status(&keys, &keys.alice, &quick).as_str() {
            "ready" => Some(()),
            "error" => panic!("it failed"),
            _ => None,
        }
    });
    // The template and the step of `quick` are charged to the key that built them.
    let after = usage_of(&keys, &keys.alice);
    assert_eq!(after["templates"], 1, "{after}");
    assert!(after["disk"]["templates"].as_u64().unwrap() > 0, "{after}");
    assert!(after["disk"]["buildSteps"].as_u64().unwrap() > 0, "{after}");
    let of_sleeper = usage_of(&keys, &keys.mallory);
    assert_eq!(of_sleeper["builds"], 3, "{of_sleeper}");
    // Of the two builds that may run at the same time, one key runs at most one.
    let states: Vec<String> = (sleeping.iter())
        .map(|of| status(&keys, &keys.mallory, of))
        .collect();
    assert_eq!(
        states.iter().filter(|s| *s == "building").count(),
        1,
        "{states:?}"
    );
    // A waiting build and a sleeping build can both be cancelled.
    for (template, build) in &sleeping {
        let path = format!("/templates/{template}/builds/{build}/cancel");
        let (status, answer) = post(&keys, &keys.mallory, &path, &Value::Null);
        assert_eq!(status, 204, "{answer}");
    }
    wait_for("no build", || {
        (usage_of(&keys, &keys.mallory)["builds"] == 0).then_some(())
    });
    let (status, answer) = post(&keys, &keys.alice, "/templates/prune", &json!({}));
    assert_eq!((status, &answer["steps"]), (200, &json!(1)), "{answer}");
    assert_eq!(usage_of(&keys, &keys.alice)["disk"]["buildSteps"], 0);
}
