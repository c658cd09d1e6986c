//! Volumes in a fleet: each is on one host, and is used through all of them.

use super::lab::{Lab, with_free};
use crate::support::{Answer, TestCaller};
use jiffy_api::{Limits, Scope};
use jiffy_fleet::roster::RosterState;
use jiffy_fleet_core::HostStatus;
use serde_json::{Value, json};

/// Creates a volume through a host. Returns its id and its token.
async fn created(lab: &Lab, host: u32, key: &TestCaller, name: &str) -> (String, String) {
    let body = json!({ "name": name, "sizeMB": 4 });
    let made = lab.call(host, key, "POST", "/volumes", body).await;
    let made = made.expect(201);
    assert_eq!(made.body["host"], format!("h{host}"));
    (made.text("volumeID"), made.text("token"))
}

/// Creates a sandbox with volumes, each of which is mounted at the path of its name.
async fn with_mounts(lab: &Lab, host: u32, key: &TestCaller, names: &[&str]) -> Answer {
    let mounts = names.iter();
    let mounts = mounts.map(|name| json!({ "name": name, "path": format!("/{name}") }));
    let body = json!({ "templateID": "base", "volumeMounts": mounts.collect::<Vec<_>>() });
    lab.call(host, key, "POST", "/sandboxes", body).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_of_one_host_is_used_through_every_host_by_its_key_only() {
    let lab = Lab::with_volumes(3).await;
    let (key, _) = lab.key(Scope::Create);
    let (stranger, _) = lab.key(Scope::Create);
    let (id, secret) = created(&lab, 2, &key, "data").await;
    let token = TestCaller::Key(secret.clone());
    let get = async |host, who: &TestCaller, path: &str| {
        lab.call(host, who, "GET", path, Value::Null).await
    };
    // Another host can be selected.
    let body = json!({ "name": "other", "host": "h3" });
    let other = lab.call(1, &key, "POST", "/volumes", body).await;
    assert_eq!(other.expect(201).body["host"], "h3");
    let body = json!({ "name": "unknown", "host": "h9" });
    let unknown = lab.call(1, &key, "POST", "/volumes", body).await;
    assert_eq!(unknown.expect_error(400), "invalid_request");
    for host in 1..=3 {
        let body = json!({ "name": "data" });
        let taken = lab.call(host, &key, "POST", "/volumes", body).await;
        assert_eq!(taken.expect_error(409), "name_taken");
        let list = get(host, &key, "/volumes").await.expect(200);
        let names = list.items().iter().map(|one| (&one["name"], &one["host"]));
        let names: Vec<_> = names.collect();
        let expected = [(json!("data"), json!("h2")), (json!("other"), json!("h3"))];
        assert_eq!(names, expected.each_ref().map(|(name, host)| (name, host)));
        let page = get(host, &key, "/volumes?limit=1").await.expect(200);
        let next = page.header("x-next-token").unwrap();
        let path = format!("/volumes?limit=1&nextToken={next}");
        assert_eq!(get(host, &key, &path).await.items()[0]["name"], "other");
        let shown = get(host, &key, "/volumes/data").await.expect(200);
        assert_eq!(shown.text("token"), secret);
        // By token, and by the key of the owner.
        let path = format!("/volumecontent/{id}/dir?path=/d{host}");
        let made = lab.call(host, &token, "POST", &path, Value::Null).await;
        made.expect(201);
        let content = get(host, &key, "/volumecontent/data/dir?path=/").await;
        assert_eq!(content.expect(200).items().len(), host as usize);
        // Other keys and tokens have no access.
        assert!(get(host, &stranger, "/volumes").await.items().is_empty());
        for path in [format!("/volumes/{id}"), "/volumes/data".to_owned()] {
            let foreign = get(host, &stranger, &path).await;
            assert_eq!(foreign.expect_error(404), "volume_not_found");
        }
        let path = format!("/volumecontent/{id}/dir?path=/");
        let foreign = get(host, &stranger, &path).await;
        assert_eq!(foreign.expect_error(404), "volume_not_found");
        let wrong = TestCaller::Key("jiffy_volume_wrong".to_owned());
        get(host, &wrong, &path).await.expect(401);
    }
    let removed = lab
        .call(3, &key, "DELETE", "/volumes/data", Value::Null)
        .await;
    removed.expect(204);
    for host in 1..=3 {
        assert_eq!(get(host, &key, "/volumes").await.items().len(), 1);
        get(host, &key, "/volumes/data").await.expect(404);
    }
    // The name is free again.
    created(&lab, 1, &key, "data").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_of_a_volume_is_restored_through_every_host() {
    let lab = Lab::with_volumes(2).await;
    let (key, _) = lab.key(Scope::Create);
    let (stranger, _) = lab.key(Scope::Create);
    let (id, token) = created(&lab, 2, &key, "data").await;
    let token = TestCaller::Key(token);
    let path = format!("/volumecontent/{id}/dir?path=/before");
    let made = lab.call(1, &token, "POST", &path, Value::Null).await;
    made.expect(201);
    let path = "/volumes/data/snapshots";
    let taken = lab.call(1, &key, "POST", path, Value::Null).await;
    let snapshot = taken.expect(201).text("volumeSnapshotID");
    for host in 1..=2 {
        let path = "/volumesnapshots";
        let list = lab.call(host, &key, "GET", path, Value::Null).await;
        assert_eq!(list.expect(200).items().len(), 1);
        let name = format!("copy{host}");
        let body = json!({ "name": name, "volumeSnapshotID": snapshot });
        let foreign = lab
            .call(host, &stranger, "POST", "/volumes", body.clone())
            .await;
        assert_eq!(foreign.expect_error(404), "snapshot_not_found");
        let copy = lab.call(host, &key, "POST", "/volumes", body).await;
        let copy = copy.expect(201);
        // The size is the size of the snapshot's volume.
        assert_eq!(copy.body["sizeMB"], 4);
        assert_eq!(copy.body["host"], format!("h{host}"));
        let path = format!("/volumecontent/{name}/dir?path=/");
        let list = lab.call(3 - host, &key, "GET", &path, Value::Null).await;
        assert_eq!(list.expect(200).items()[0]["name"], "before");
    }
    let path = format!("/volumesnapshots/{snapshot}");
    let foreign = lab.call(1, &stranger, "DELETE", &path, Value::Null).await;
    assert_eq!(foreign.expect_error(404), "snapshot_not_found");
    let removed = lab.call(1, &key, "DELETE", &path, Value::Null).await;
    removed.expect(204);
    let body = json!({ "name": "late", "volumeSnapshotID": snapshot });
    let late = lab.call(1, &key, "POST", "/volumes", body).await;
    assert_eq!(late.expect_error(404), "snapshot_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_runs_on_the_host_of_its_volumes_or_is_rejected_with_the_reason() {
    let lab = Lab::with_volumes(3).await;
    let with_template = |free_memory_mib| HostStatus {
        templates: vec![lab.template_hash("base")],
        ..with_free(free_memory_mib)
    };
    for (host, memory) in [(1, 64_000), (2, 32_000), (3, 16_000)] {
        lab.set_status(host, with_template(memory)).await;
    }
    let (key, _) = lab.key(Scope::Create);
    created(&lab, 1, &key, "data").await;
    created(&lab, 2, &key, "other").await;
    for through in 1..=3 {
        let made = with_mounts(&lab, through, &key, &["data"]).await;
        assert!(lab.has(1, &made.expect(201).id()));
    }
    let both = with_mounts(&lab, 3, &key, &["data", "other"]).await;
    let message = both.text("message");
    assert_eq!(both.expect_error(400), "invalid_request");
    assert!(message.contains("`data` is on host h1, but volume `other` on host h2"));
    let missing = with_mounts(&lab, 3, &key, &["missing"]).await;
    assert_eq!(missing.expect_error(404), "volume_not_found");
    let mounts = json!([{ "name": "data", "path": "/data" }]);
    let body = json!({
        "templateID": "base", "volumeMounts": mounts, "distributionScope": ["h2"]
    });
    let scoped = lab.call(3, &key, "POST", "/sandboxes", body).await;
    assert!(
        scoped
            .text("message")
            .contains("its volumes are on h1 only")
    );
    assert_eq!(scoped.expect_error(503), "host_busy");
    let made = with_mounts(&lab, 2, &key, &["data"]).await.expect(201);
    let removed = lab
        .call(3, &key, "DELETE", "/volumes/data", Value::Null)
        .await;
    assert_eq!(removed.expect_error(409), "volume_mounted");
    // A drain does not move sandboxes with volumes.
    lab.pause_durably(1, &made.id()).await;
    let drain = async |action: &str, body: Value| {
        let path = format!("/fleet/nodes/h1/{action}");
        lab.call(2, &lab.admin(), "POST", &path, body).await
    };
    let drained = drain("drain", json!({ "force": true })).await.expect(200);
    let text = drained.text("text");
    assert!(text.contains("4 paused sandboxes stay"), "{text}");
    let path = format!("/sandboxes/{}/connect", made.id());
    let resumed = lab
        .call(3, &key, "POST", &path, json!({ "timeout": 60 }))
        .await;
    resumed.expect(200);
    assert!(lab.has(1, &made.id()));
    // New sandboxes are not placed on it, and no other host is suitable.
    let rejected = with_mounts(&lab, 3, &key, &["data"]).await;
    let message = rejected.text("message");
    assert_eq!(rejected.expect_error(503), "host_busy");
    for expected in [
        "h1: draining",
        "h2: the volumes of the sandbox are on h1",
        "only h1 has the volumes",
    ] {
        assert!(message.contains(expected), "{message}");
    }
    drain("undrain", Value::Null).await.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_on_volumes_of_a_lost_host_name_it_until_they_are_removed_with_it() {
    let lab = Lab::with_volumes(3).await;
    let (key, _) = lab.key(Scope::Create);
    let (id, token) = created(&lab, 3, &key, "data").await;
    let token = TestCaller::Key(token);
    let path = "/volumes/data/snapshots";
    let taken = lab.call(1, &key, "POST", path, Value::Null).await;
    let snapshot = taken.expect(201).text("volumeSnapshotID");
    let made = with_mounts(&lab, 1, &key, &["data"]).await.expect(201);
    lab.pause_durably(3, &made.id()).await;
    lab.until_listed(3, &made.id(), RosterState::Stored).await;
    lab.stop(3).await;
    let lost = |answer: Answer, what: &str| {
        let message = answer.text("message");
        assert_eq!(answer.expect_error(503), "host_lost", "{what}");
        assert!(message.contains("h3"), "{what}: {message}");
        message
    };
    for host in 1..=2 {
        let call = async |who: &TestCaller, method: &str, path: &str, body: Value| {
            lab.call(host, who, method, path, body).await
        };
        let list = call(&key, "GET", "/volumes", Value::Null).await;
        assert_eq!(list.expect(200).items()[0]["host"], "h3");
        for (who, method, path) in [
            (&key, "GET", "/volumes/data".to_owned()),
            (&key, "DELETE", format!("/volumes/{id}")),
            (&key, "POST", "/volumes/data/snapshots".to_owned()),
            (&key, "GET", "/volumecontent/data/dir?path=/".to_owned()),
            (&token, "GET", format!("/volumecontent/{id}/dir?path=/")),
        ] {
            lost(call(who, method, &path, Value::Null).await, &path);
        }
        let body = json!({ "name": "data" });
        let taken = call(&key, "POST", "/volumes", body).await;
        assert_eq!(taken.expect_error(409), "name_taken");
        lost(with_mounts(&lab, host, &key, &["data"]).await, "create");
        // Its state is in the store, but its volume is not.
        let path = format!("/sandboxes/{}/connect", made.id());
        let resumed = call(&key, "POST", &path, json!({ "timeout": 60 })).await;
        let message = lost(resumed, "resume");
        assert!(message.contains("volume `data`"), "{message}");
    }
    // The snapshot remains, although the lost host has taken it.
    let body = json!({ "name": "copy", "volumeSnapshotID": snapshot });
    let copy = lab.call(1, &key, "POST", "/volumes", body).await;
    assert_eq!(copy.expect(201).body["host"], "h1");
    let path = "/fleet/nodes/h3/remove";
    let removed = lab.call(1, &lab.admin(), "POST", path, Value::Null).await;
    removed.expect(200);
    let gone = async || {
        let path = "/volumes/data";
        let removed = lab.call(2, &key, "DELETE", path, Value::Null).await;
        removed.status
    };
    // The other member learns of the removal within seconds.
    let removed = async {
        while gone().await != 204 {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    let limit = std::time::Duration::from_secs(30);
    tokio::time::timeout(limit, removed).await.unwrap();
    created(&lab, 2, &key, "data").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_volumes_on_all_hosts_count_towards_the_disk_limit_of_a_key() {
    let lab = Lab::with_volumes(2).await;
    let limits = Limits {
        max_disk_mib: Some(20),
        ..Limits::default()
    };
    let (key, _) = lab.limited_key(Scope::Create, limits);
    let create = async |host, name: &str, size: u64| {
        let body = json!({ "name": name, "sizeMB": size });
        lab.call(host, &key, "POST", "/volumes", body).await
    };
    create(1, "a", 12).await.expect(201);
    assert_eq!(create(2, "b", 12).await.expect_error(507), "max_disk");
    create(2, "b", 8).await.expect(201);
    let used = lab.call(2, &key, "GET", "/limits", Value::Null).await;
    assert_eq!(used.expect(200).body["used"]["disk"]["volumes"], 20 << 20);
}
