//! Snapshots, rollback, templates and pools.

use crate::support;
use jiffy_api_types::DaemonStatus;

use jiffy_api::{Limits, Scope};
use serde_json::{Value, json};
use support::fake::until;
use support::{Api, TestCaller};

fn path(id: &str, call: &str) -> String {
    format!("/sandboxes/{id}/{call}")
}

async fn snapshot(api: &Api, id: &str, name: Value) -> String {
    let body = json!({ "name": name });
    let taken = api.post(&path(id, "snapshots"), body).await.expect(201);
    taken.text("snapshotID")
}

#[tokio::test]
async fn a_snapshot_outlives_its_sandbox_and_can_create_others() {
    let api = Api::new();
    let id = api.sandbox().await;
    api.bench.world.write(&id, "saved");
    let taken = api
        .post(&path(&id, "snapshots"), json!({ "name": "team/env:v1" }))
        .await;
    let taken = taken.expect(201);
    assert_eq!(taken.body["names"], json!(["team/env:v1"]));
    api.delete(&format!("/sandboxes/{id}")).await.expect(204);
    for template in [taken.text("snapshotID"), "team/env:v1".into()] {
        let created = api
            .post("/v2/sandboxes", json!({ "templateID": template }))
            .await
            .expect(201);
        assert_eq!(api.bench.world.read(&created.id()), "saved");
        assert_eq!(created.body["snapshotID"], taken.body["snapshotID"]);
    }
    let listed = api
        .get(&format!("/snapshots?sandboxID={id}"))
        .await
        .expect(200);
    assert_eq!(listed.items().len(), 1);
    assert_eq!(listed.body[0]["originSandboxID"], json!(id));
    assert_eq!(
        api.get("/snapshots?name=team%2Fenv%3Av1")
            .await
            .items()
            .len(),
        1
    );
    assert!(api.get("/snapshots?name=other").await.items().is_empty());
    let one = format!("/snapshots/{}", taken.text("snapshotID"));
    assert_eq!(api.get(&one).await.expect(200).text("status"), "ready");
    api.get("/snapshots/nope").await.expect(404);
}

#[tokio::test]
async fn a_sandbox_from_a_snapshot_inherits_its_environment_unless_specified() {
    let api = Api::new();
    let body =
        json!({ "templateID": "base", "envVars": { "GREETING": "hello", "TOKEN": "secret" } });
    let id = api.post("/v2/sandboxes", body).await.expect(201).id();
    let snapshot = snapshot(&api, &id, Value::Null).await;
    api.delete(&format!("/sandboxes/{id}")).await.expect(204);
    let env_given = |env: Value| {
        let body = json!({ "templateID": snapshot, "envVars": env });
        let api = &api;
        async move {
            let created = api.post("/v2/sandboxes", body).await.expect(201).id();
            let sandbox = api.host.get(&created).unwrap();
            let env = sandbox.env().iter();
            env.map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>()
        }
    };
    let all = ["GREETING=hello", "TOKEN=secret"];
    assert_eq!(env_given(Value::Null).await, all);
    // Some clients always send an object.
    assert_eq!(env_given(json!({})).await, all);
    assert_eq!(
        env_given(json!({ "GREETING": "bye" })).await,
        ["GREETING=bye"]
    );
}

#[tokio::test]
async fn names_of_snapshots_are_plain() {
    let api = Api::new();
    let id = api.sandbox().await;
    for bad in ["", " ", "a b", "/a", "../x", "a\n", &"x".repeat(129)] {
        api.post(&path(&id, "snapshots"), json!({ "name": bad }))
            .await
            .expect(400);
    }
}

#[tokio::test]
async fn a_snapshot_is_deleted_as_a_template_is_by_its_encoded_id_while_its_sandbox_lives() {
    let api = Api::new();
    let id = api.sandbox().await;
    snapshot(&api, &id, json!("snap:tag")).await;
    api.delete("/templates/snap%3Atag").await.expect(204);
    api.delete("/templates/snap%3Atag").await.expect(404);
    assert!(api.get("/snapshots").await.items().is_empty());
    api.post("/v2/sandboxes", json!({ "templateID": "snap:tag" }))
        .await
        .expect(404);
    api.get(&format!("/sandboxes/{id}")).await.expect(200);
    api.delete("/templates/%ff").await.expect(400);
}

#[tokio::test]
async fn snapshots_are_listed_in_pages() {
    let api = Api::new();
    let id = api.sandbox().await;
    let mut taken = Vec::new();
    for _ in 0..5 {
        taken.push(snapshot(&api, &id, Value::Null).await);
    }
    let (mut visible, mut next) = (Vec::new(), Some(String::new()));
    while let Some(token) = next {
        let page = api
            .get(&format!("/snapshots?limit=2&order=asc&nextToken={token}"))
            .await;
        let page = page.expect(200);
        visible.extend(
            page.items()
                .iter()
                .map(|s| s["snapshotID"].as_str().unwrap().to_owned()),
        );
        next = page.header("x-next-token").map(str::to_owned);
    }
    taken.sort();
    visible.sort();
    assert_eq!(visible, taken);
}

#[tokio::test]
async fn a_rollback_preserves_the_id_and_accepts_any_ancestor() {
    let api = Api::new();
    let id = api.sandbox().await;
    // The snapshot of the template, from which the sandbox started.
    let root = api.host.get(&id).unwrap().snapshot().unwrap().to_owned();
    api.bench.world.write(&id, "one");
    let one = snapshot(&api, &id, Value::Null).await;
    api.bench.world.write(&id, "two");
    let two = snapshot(&api, &id, Value::Null).await;
    for (to, expected) in [(&one, "one"), (&two, "two"), (&root, "fresh base")] {
        let done = api
            .post(
                &path(&id, "rollback"),
                json!({ "snapshotID": to, "backend": null }),
            )
            .await;
        let done = done.expect(200);
        assert_eq!(
            (done.id(), done.text("snapshotID")),
            (id.clone(), to.clone())
        );
        assert_eq!(
            (done.text("status"), done.text("operationID").len()),
            ("completed".into(), 20)
        );
        assert_eq!(api.bench.world.read(&id), expected);
    }
    let nowhere = api
        .post(&path(&id, "rollback"), json!({ "snapshotID": "nope" }))
        .await;
    assert_eq!(nowhere.expect_error(404), "snapshot_not_found");
    api.post(&path(&id, "rollback"), json!({}))
        .await
        .expect(400);
    let large = api
        .post("/v2/sandboxes", json!({ "templateID": "large" }))
        .await
        .expect(201);
    // A snapshot of a sandbox with another template.
    let strange = api
        .post(&path(&large.id(), "rollback"), json!({ "snapshotID": one }))
        .await;
    assert_eq!(strange.expect_error(409), "wrong_snapshot");
}

#[tokio::test]
async fn snapshots_are_invisible_to_other_keys() {
    let api = Api::new();
    let (a, _) = api.key(Scope::Create, Limits::default());
    let (b, _) = api.key(Scope::Create, Limits::default());
    let id = api.sandbox_of(&a).await;
    let taken = api
        .call_as(
            &a,
            "POST",
            &path(&id, "snapshots"),
            json!({ "name": "mine" }),
        )
        .await;
    let taken = taken.expect(201).text("snapshotID");
    assert!(
        api.call_as(&b, "GET", "/snapshots", Value::Null)
            .await
            .items()
            .is_empty()
    );
    let own = api.sandbox_of(&b).await;
    for snapshot in [taken.as_str(), "mine", &taken[..10]] {
        let create = json!({ "templateID": snapshot });
        api.call_as(&b, "POST", "/v2/sandboxes", create)
            .await
            .expect(404);
        api.call_as(&b, "DELETE", &format!("/templates/{snapshot}"), Value::Null)
            .await
            .expect(404);
        api.call_as(&b, "GET", &format!("/snapshots/{snapshot}"), Value::Null)
            .await
            .expect(404);
        let back = json!({ "snapshotID": snapshot });
        api.call_as(&b, "POST", &path(&own, "rollback"), back)
            .await
            .expect(404);
    }
    // A name must not look like an id.
    let named = json!({ "name": taken });
    api.call_as(&b, "POST", &path(&own, "snapshots"), named)
        .await
        .expect(400);
    api.bench.world.write(&id, "a's");
    let created = api
        .call_as(&a, "POST", "/v2/sandboxes", json!({ "templateID": taken }))
        .await;
    assert_eq!(created.expect(201).body["snapshotID"], json!(taken));
}

#[tokio::test]
async fn admins_see_and_remove_templates() {
    let api = Api::new();
    let listed = api.get("/templates").await.expect(200);
    assert_eq!(listed.items().len(), 2);
    let one = api.get("/templates/base").await.expect(200);
    assert_eq!(one.text("buildID"), "abababab-abab-abab-abab-abababababab");
    assert_eq!(one.body["diskSizeMB"], 1024);
    assert_eq!(
        api.get("/templates/aliases/base")
            .await
            .expect(200)
            .text("templateID"),
        "base"
    );
    api.get("/templates/aliases/nope").await.expect(404);
    assert_eq!(
        api.get("/templates/base/tags").await.expect(200).body[0]["tag"],
        "default"
    );
    let status = format!("/templates/base/builds/{}/status", one.text("buildID"));
    assert_eq!(api.get(&status).await.expect(200).text("status"), "ready");
    api.get("/templates/base/builds/other/status")
        .await
        .expect(404);
    api.get(&format!("{status}?limit=101")).await.expect(400);
    let (tenant, _) = api.key(Scope::Create, Limits::default());
    api.call_as(&tenant, "DELETE", "/templates/base", Value::Null)
        .await
        .expect(403);
    api.delete("/templates/base").await.expect(204);
    api.get("/templates/base").await.expect(404);
    assert_eq!(
        api.get("/teams").await.expect(200).body[0]["isDefault"],
        true
    );
}

#[tokio::test]
async fn unsupported_calls_are_refused_with_a_message() {
    let api = Api::new();
    let put = |method, path| api.call_as(&api.admin, method, path, json!({ "name": "x" }));
    for (method, path) in [
        ("POST", "/v3/templates"),
        ("POST", "/v2/templates/base/builds/b"),
        ("PATCH", "/v2/templates/base"),
        ("POST", "/templates/tags"),
        ("DELETE", "/templates/tags"),
    ] {
        let refused = put(method, path).await;
        assert_eq!(refused.header("should-retry"), Some("false"));
        assert_eq!(refused.expect_error(501), "unsupported", "{method} {path}");
    }
    assert_eq!(
        api.get("/templates/base/files/abc").await.expect_error(501),
        "unsupported"
    );
}

#[tokio::test]
async fn engines_are_listed_for_all_callers_and_failures_for_the_owner() {
    let api = Api::new();
    let reported = api.get("/engines").await.expect(200);
    // The default engine of the tests is used although it reports that it is unusable.
    let engine = &reported.items()[0];
    assert_eq!(
        (&engine["name"], &engine["usable"], &engine["default"]),
        (&json!("microvm"), &json!(false), &json!(true))
    );
    assert_eq!(engine["capabilities"]["rollback"], true);
    assert_eq!(engine["capabilities"]["liveSnapshot"], false);
    assert_eq!(engine["why"], Value::Null);
    let reported = api
        .call_as(&TestCaller::Owner, "GET", "/engines", Value::Null)
        .await;
    assert_eq!(reported.expect(200).body[0]["why"], "it is a fake");
}

#[tokio::test]
async fn unsupported_operations_are_refused_with_an_engine_that_supports_them() {
    let api = Api::new();
    let taken = snapshot(&api, &api.sandbox().await, Value::Null).await;
    let verify = format!("/snapshots/{taken}/verify");
    let refused = api.post(&verify, Value::Null).await.expect(501);
    let sentence = "the engine microvm cannot verify snapshots; use the engine microvm";
    assert!(refused.text("message").ends_with(sentence), "{refused:?}");
    assert_eq!(refused.expect_error(501), "unsupported");
}

#[tokio::test]
async fn admins_set_the_size_of_pools() {
    let api = Api::new();
    assert!(api.get("/pools").await.expect(200).items().is_empty());
    let set = api
        .put("/pools/base", json!({ "size": 2 }))
        .await
        .expect(200);
    assert_eq!(
        (&set.body["templateID"], &set.body["size"]),
        (&json!("base"), &json!(2))
    );
    until("the pool to fill", || api.host.pool().waiting() == 2).await;
    assert_eq!(api.get("/pools").await.expect(200).body[0]["ready"], 2);
    let created = api
        .post("/v2/sandboxes", json!({ "templateID": "base" }))
        .await
        .expect(201);
    assert_eq!(created.body["bootMode"], "warm-pool");
    api.put("/pools/base", json!({ "size": 0 }))
        .await
        .expect(200);
    assert_eq!(api.host.pool().waiting(), 0);
    api.put("/pools/nope", json!({ "size": 1 }))
        .await
        .expect(404);
    for bad in [json!({}), json!({ "size": -1 }), json!({ "size": 1001 })] {
        api.put("/pools/base", bad).await.expect(400);
    }
    let (tenant, _) = api.key(Scope::Create, Limits::default());
    api.call_as(&tenant, "GET", "/pools", Value::Null)
        .await
        .expect(403);
    let size = json!({ "size": 1 });
    api.call_as(&tenant, "PUT", "/pools/base", size)
        .await
        .expect(403);
}

#[tokio::test]
async fn the_hosts_owner_sees_every_snapshot_and_record() {
    let api = Api::new();
    let id = api.sandbox().await;
    let taken = snapshot(&api, &id, Value::Null).await;
    let api = &api;
    let owner = |path: String| async move {
        api.call_as(&TestCaller::Owner, "GET", &path, Value::Null)
            .await
    };
    let all = owner("/snapshots?all=true".into()).await.expect(200);
    let of = |purpose: &str| {
        let mut found = all.items().iter().filter(|s| s["purpose"] == purpose);
        found.next().unwrap()["jiffy"]["id"].clone()
    };
    assert_eq!(all.items().len(), 2);
    assert_eq!(of("asked"), json!(taken));
    assert_ne!(of("template"), json!(taken));
    // The parameter has no effect for keys of any scope.
    assert_eq!(api.get("/snapshots?all=true").await.items().len(), 1);
    // The host's owner may use a prefix of an id.
    let one = owner(format!("/sandboxes/{}", &id[..8])).await.expect(200);
    assert_eq!(
        (one.id(), &one.body["jiffy"]["id"]),
        (id.clone(), &json!(id))
    );
    api.get(&format!("/sandboxes/{}", &id[..8]))
        .await
        .expect(404);
    api.call_as(
        &TestCaller::Owner,
        "DELETE",
        &format!("/sandboxes/{id}"),
        Value::Null,
    )
    .await
    .expect(204);
    let killed = owner("/sandboxes?state=killed".into()).await.expect(200);
    assert_eq!(killed.ids(), [id]);
}

#[tokio::test]
async fn admins_see_the_host_and_its_owner_stops_it() {
    let reported = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let flag = reported.clone();
    let stop = move |how: jiffy_api_types::StopHost| {
        flag.store(how.kill_sandboxes, std::sync::atomic::Ordering::SeqCst)
    };
    let about = || DaemonStatus {
        uptime_s: 7,
        ..DaemonStatus::default()
    };
    let api = Api::with(|app| app.with_stop(stop).with_about(about));
    let id = api.sandbox().await;
    let host = api.get("/host").await.expect(200);
    assert!(host.body.get("jiffy").is_none());
    let owner = |path: String| {
        let api = &api;
        async move {
            api.call_as(&TestCaller::Owner, "GET", &path, Value::Null)
                .await
        }
    };
    // The details of the daemon and its processes are visible to the owner of the host only.
    let all = owner("/host".into()).await.expect(200);
    assert_eq!(all.body["jiffy"]["uptime_s"], 7);
    api.get(&format!("/sandboxes/{id}/process"))
        .await
        .expect(403);
    owner("/sandboxes/nobody/process".into()).await.expect(404);
    assert_eq!(
        (&host.body["running"], &host.body["warm"]),
        (&json!(1), &json!(0))
    );
    let (tenant, _) = api.key(Scope::Create, Limits::default());
    api.call_as(&tenant, "GET", "/host", Value::Null)
        .await
        .expect(403);
    api.post("/host/stop", Value::Null).await.expect(403);
    let how = json!({ "killSandboxes": true });
    api.call_as(&TestCaller::Owner, "POST", "/host/stop", how)
        .await
        .expect(202);
    assert!(reported.load(std::sync::atomic::Ordering::SeqCst));
    // A daemon that cannot be stopped by a call.
    let silent = Api::new();
    silent
        .call_as(&TestCaller::Owner, "POST", "/host/stop", Value::Null)
        .await
        .expect(501);
}

#[tokio::test]
async fn a_used_snapshot_is_deleted_with_its_last_user() {
    let api = Api::new();
    let id = api.sandbox().await;
    let taken = snapshot(&api, &id, Value::Null).await;
    let path = format!("/templates/{taken}");
    let remove = async || {
        api.call_as(&TestCaller::Owner, "DELETE", &path, Value::Null)
            .await
    };
    // The first call marks the snapshot for removal. Its files stay until its sandbox ends.
    remove().await.expect(204);
    assert_eq!(remove().await.expect_error(409), "in_use");
    api.delete(&format!("/sandboxes/{id}")).await.expect(204);
    let verify = format!("/snapshots/{taken}/verify");
    api.post(&verify, Value::Null).await.expect(404);
}
