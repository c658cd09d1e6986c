//! Volumes of API keys, and their content by token.

use crate::support::{Api, TestCaller};
use async_trait::async_trait;
use jiffy_api::{Limits, Scope};
use jiffy_sandbox_manager::{HostOptions, MountError, VolumeMount, VolumeMounter};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::mpsc;

/// Mounts all volumes but `removed`, which does not exist any longer.
#[derive(Debug)]
pub struct FakeMounter;

#[async_trait]
impl VolumeMounter for FakeMounter {
    async fn mount(&self, mount: VolumeMount<'_>) -> Result<(), MountError> {
        match mount.volumes.iter().find(|v| v.name == "removed") {
            Some(found) => Err(MountError::Unknown(found.volume.clone()).of(&found.name)),
            None => Ok(()),
        }
    }

    fn take_lost(&self) -> Option<mpsc::Receiver<String>> {
        None
    }
}

/// Creates a volume. Returns its id, and a caller with the token of the volume.
async fn created(api: &Api, caller: &TestCaller, name: &str) -> (String, TestCaller) {
    let body = json!({ "name": name, "sizeMB": 4 });
    let made = api
        .call_as(caller, "POST", "/volumes", body)
        .await
        .expect(201);
    (made.text("volumeID"), TestCaller::Key(made.text("token")))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_reads_and_changes_the_content_of_its_volume_only() {
    let api = Api::new();
    let (caller, _) = api.key(Scope::Create, Limits::default());
    let (id, token) = created(&api, &caller, "data").await;
    let (other, _) = created(&api, &caller, "other").await;
    let path = format!("/volumecontent/{id}");
    let at = format!("{path}/dir?path=/a/b&force=true");
    let made = api.call_as(&token, "POST", &at, Value::Null).await;
    let made = made.expect(201);
    assert_eq!(made.body["type"], "directory");
    assert_eq!(made.body["path"], "/a/b");
    let again = api
        .call_as(
            &token,
            "POST",
            &format!("{path}/dir?path=/a/b"),
            Value::Null,
        )
        .await;
    assert_eq!(again.expect_error(409), "volume_path_exists");
    let at = format!("{path}/dir?path=/&depth=2");
    let list = api.call_as(&token, "GET", &at, Value::Null).await;
    assert_eq!(list.expect(200).items().len(), 2);
    let body = json!({ "mode": 0o700, "uid": 1000 });
    let changed = api
        .call_as(&token, "PATCH", &format!("{path}/path?path=/a"), body)
        .await;
    assert_eq!(changed.expect(200).body["mode"], 0o700);
    let missing = api
        .call_as(&token, "GET", &format!("{path}/path?path=/x"), Value::Null)
        .await;
    assert_eq!(missing.expect_error(404), "volume_path_not_found");
    for bad in ["/../a", "a/../../etc", "%00"] {
        let bad = api
            .call_as(
                &token,
                "GET",
                &format!("{path}/path?path={bad}"),
                Value::Null,
            )
            .await;
        bad.expect(400);
    }
    // Neither the token of another volume nor another key has access.
    let (stranger, _) = api.key(Scope::Create, Limits::default());
    let foreign = format!("/volumecontent/{other}/dir?path=/");
    api.call_as(&token, "GET", &foreign, Value::Null)
        .await
        .expect(401);
    let seen = api.call_as(&stranger, "GET", &foreign, Value::Null).await;
    assert_eq!(seen.expect_error(404), "volume_not_found");
    let seen = api
        .call_as(&stranger, "DELETE", &format!("/volumes/{id}"), Value::Null)
        .await;
    assert_eq!(seen.expect_error(404), "volume_not_found");
    // The key of the owner has access by name.
    let own = "/volumecontent/data/path?path=/a";
    api.call_as(&caller, "DELETE", own, Value::Null)
        .await
        .expect(204);
    let list = api
        .call_as(&token, "GET", &format!("{path}/dir?path=/"), Value::Null)
        .await;
    assert!(list.expect(200).items().is_empty());
    api.call_as(&caller, "DELETE", &format!("/volumes/{id}"), Value::Null)
        .await
        .expect(204);
    let gone = api
        .call_as(&token, "GET", &format!("{path}/dir?path=/"), Value::Null)
        .await;
    gone.expect(401);
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_are_listed_without_tokens_and_removed_with_the_resources_of_a_key_only() {
    let api = Api::new();
    let (caller, key) = api.key(Scope::Create, Limits::default());
    let (id, _) = created(&api, &caller, "data").await;
    let list = api
        .call_as(&caller, "GET", "/volumes", Value::Null)
        .await
        .expect(200);
    assert_eq!(list.items().len(), 1);
    assert!(!list.body.to_string().contains("token"));
    // A volume without a name has its id as its name.
    let named = json!({ "name": "", "driver": "local" });
    let named = api
        .call_as(&caller, "POST", "/volumes", named)
        .await
        .expect(201);
    assert_eq!(named.text("name"), named.text("volumeID"));
    for bad in [
        json!({ "name": "vol-a" }),
        json!({ "name": "a b" }),
        json!({ "name": "a", "driver": "nfs" }),
        json!({ "name": "a", "sizeMB": 0 }),
    ] {
        api.call_as(&caller, "POST", "/volumes", bad)
            .await
            .expect(400);
    }
    // A revocation keeps the volumes, unless it ends the resources of the key.
    let admin = api.admin.clone();
    let path = format!("/keys/{}/revoke", key.key.id);
    api.call_as(&admin, "POST", &path, json!({}))
        .await
        .expect(200);
    let volumes = api.bench.dir.path().join("volumes");
    assert!(volumes.join(&id).exists());
    let end = api
        .call_as(&admin, "POST", &path, json!({ "end": true }))
        .await;
    end.expect(200);
    assert!(!volumes.join(&id).exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_mounts_volumes_of_its_key_at_permitted_paths_only() {
    let api = Api::new();
    let (caller, _) = api.key(Scope::Create, Limits::default());
    let (stranger, _) = api.key(Scope::Create, Limits::default());
    let (id, _) = created(&api, &caller, "data").await;
    let create = async |caller: &TestCaller, mounts: Value| {
        let body = json!({ "templateID": "base", "volumeMounts": mounts });
        api.call_as(caller, "POST", "/sandboxes", body).await
    };
    for which in ["data", &id, "missing"] {
        let mounts = json!([{ "name": which, "path": "/data" }]);
        let foreign = create(&stranger, mounts).await;
        assert_eq!(foreign.expect_error(404), "volume_not_found", "{which}");
    }
    let long = format!("/{}", "x".repeat(256));
    // Paths that are relative, not in their shortest form, too long, or reserved for the kernel.
    for path in [
        "", "/", "data", "/a//b", "/a/", "/a/..", "/./a", "/dev", "/proc/1", "/run/x", "/sys/fs",
        "/a\n", &long,
    ] {
        let mounts = json!([{ "name": "data", "path": path }]);
        let bad = create(&caller, mounts).await;
        assert_eq!(bad.expect_error(400), "invalid_request", "{path:?}");
    }
    let mount = |path: &str| json!({ "name": "data", "path": path });
    // One mount more than permitted.
    let many: Vec<Value> = (0..17).map(|n| mount(&format!("/m{n}"))).collect();
    for bad in [
        json!([mount("/a"), mount("/a")]),
        json!([mount("/a/b"), mount("/a")]),
        json!(many),
    ] {
        let bad = create(&caller, bad).await;
        assert_eq!(bad.expect_error(400), "invalid_request");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mounts_are_shown_and_a_volume_that_is_removed_before_its_mount_is_not_found() {
    let options = HostOptions {
        volumes: Some(Arc::new(FakeMounter)),
        ..HostOptions::default()
    };
    let api = Api::with_options(options, |app| app);
    let (caller, _) = api.key(Scope::Create, Limits::default());
    created(&api, &caller, "data").await;
    created(&api, &caller, "removed").await;
    let create = async |name: &str| {
        let mounts = json!([{ "name": name, "path": "/data", "readOnly": true }]);
        let body = json!({ "templateID": "base", "volumeMounts": mounts });
        api.call_as(&caller, "POST", "/v2/sandboxes", body).await
    };
    assert_eq!(
        create("removed").await.expect_error(404),
        "volume_not_found"
    );
    let made = create("data").await.expect(201);
    let shown = json!([{ "name": "data", "path": "/data", "readOnly": true }]);
    assert_eq!(made.body["jiffy"]["terms"]["volumes"], shown);
    let path = format!("/sandboxes/{}", made.id());
    let one = api.call_as(&caller, "GET", &path, Value::Null).await;
    assert_eq!(one.expect(200).body["volumeMounts"], shown);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sizes_of_volumes_count_towards_the_disk_limit_of_their_key() {
    let api = Api::new();
    let limits = Limits {
        max_disk_mib: Some(20),
        ..Limits::default()
    };
    let (caller, _) = api.key(Scope::Create, limits);
    let create = async |body: Value| api.call_as(&caller, "POST", "/volumes", body).await;
    let too_large = create(json!({ "name": "a", "sizeMB": 21 })).await;
    assert_eq!(too_large.expect_error(507), "max_disk");
    create(json!({ "name": "a", "sizeMB": 15 }))
        .await
        .expect(201);
    // The default is half of the rest.
    let default = create(json!({ "name": "b" })).await.expect(201);
    assert_eq!(default.body["sizeMB"], 2);
    let used = api.call_as(&caller, "GET", "/limits", Value::Null).await;
    let used = used.expect(200).body["used"].clone();
    assert_eq!(used["disk"]["volumes"], 17 << 20);
    assert_eq!(used["diskBytes"], 17 << 20);
    let full = create(json!({ "name": "c", "sizeMB": 4 })).await;
    assert_eq!(full.expect_error(507), "max_disk");
    let removed = api
        .call_as(&caller, "DELETE", "/volumes/a", Value::Null)
        .await;
    removed.expect(204);
    create(json!({ "name": "c", "sizeMB": 4 }))
        .await
        .expect(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_of_a_volume_is_stored_listed_restored_and_removed_by_its_key_only() {
    let api = Api::new();
    let (caller, key) = api.key(Scope::Create, Limits::default());
    let (stranger, _) = api.key(Scope::Create, Limits::default());
    let (id, _) = created(&api, &caller, "data").await;
    let call = async |who: &TestCaller, method: &str, path: &str, body: Value| {
        api.call_as(who, method, path, body).await
    };
    let make = async |volume: &str, directory: &str| {
        let at = format!("/volumecontent/{volume}/dir?path=/{directory}");
        call(&caller, "POST", &at, Value::Null).await.expect(201)
    };
    make(&id, "before").await;
    let take = format!("/volumes/{id}/snapshots");
    let foreign = call(&stranger, "POST", &take, Value::Null).await;
    assert_eq!(foreign.expect_error(404), "volume_not_found");
    let taken = call(&caller, "POST", "/volumes/data/snapshots", Value::Null).await;
    let taken = taken.expect(201);
    let snapshot = taken.text("volumeSnapshotID");
    assert_eq!(taken.text("volumeID"), id);
    make(&id, "after").await;
    let body = json!({ "name": "copy", "volumeSnapshotID": snapshot });
    let foreign = call(&stranger, "POST", "/volumes", body.clone()).await;
    assert_eq!(foreign.expect_error(404), "snapshot_not_found");
    let copy = call(&caller, "POST", "/volumes", body).await.expect(201);
    assert_eq!(copy.body["sizeMB"], 4);
    let copy = copy.text("volumeID");
    let names = async |volume: &str| {
        let at = format!("/volumecontent/{volume}/dir?path=/");
        let list = call(&caller, "GET", &at, Value::Null).await.expect(200);
        let name = |entry: &Value| entry["name"].as_str().unwrap().to_owned();
        list.items().iter().map(name).collect::<Vec<_>>()
    };
    assert_eq!(names(&copy).await, ["before"]);
    // Both volumes are independent, and the snapshot of a removed volume remains.
    make(&copy, "own").await;
    assert_eq!(names(&id).await, ["after", "before"]);
    let path = format!("/volumes/{id}");
    call(&caller, "DELETE", &path, Value::Null)
        .await
        .expect(204);
    let list = async |who: &TestCaller| {
        let list = call(who, "GET", "/volumesnapshots", Value::Null).await;
        list.expect(200).items().len()
    };
    assert_eq!((list(&caller).await, list(&stranger).await), (1, 0));
    let path = format!("/volumesnapshots/{snapshot}");
    let foreign = call(&stranger, "DELETE", &path, Value::Null).await;
    assert_eq!(foreign.expect_error(404), "snapshot_not_found");
    call(&caller, "DELETE", &path, Value::Null)
        .await
        .expect(204);
    assert_eq!(list(&caller).await, 0);
    // The snapshots of a revoked key are removed with its resources.
    let take = format!("/volumes/{copy}/snapshots");
    call(&caller, "POST", &take, Value::Null).await.expect(201);
    let path = format!("/keys/{}/revoke", key.key.id);
    let ended = call(&api.admin, "POST", &path, json!({ "end": true })).await;
    ended.expect(200);
    let names = api.bench.dir.path().join("bucket");
    // Each stored snapshot has a name in the bucket.
    let left = walk(&names)
        .into_iter()
        .filter(|path| path.contains("/names/"));
    assert_eq!(left.count(), 0);
}

/// Returns the paths of all files below a directory.
fn walk(directory: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let below = |path: std::path::PathBuf| {
        if path.is_dir() {
            walk(&path)
        } else {
            vec![path.display().to_string()]
        }
    };
    paths.flat_map(below).collect()
}
