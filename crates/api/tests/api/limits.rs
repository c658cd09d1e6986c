//! Quotas of keys: exact under concurrent requests, visible to their holders, and unchanged after a
//! crash. An *exchange* is a request or stream of a key that is in flight.

use crate::support;

use axum::body::Body;
use axum::http::Request;
use futures_util::future::join_all;
use jiffy_api::{App, Config, Keys, Limits, Scope, router};
use jiffy_sandbox_manager::{HostFigures, HostOptions, HostReader};
use serde_json::{Value, json};
use std::sync::Arc;
use support::{Answer, Api, TestCaller};

/// Size in bytes of each guest's snapshot in these tests.
const GUEST: u64 = 1 << 20;
/// Number of concurrent clients.
const CLIENTS: usize = 64;

fn path(id: &str, call: &str) -> String {
    format!("/sandboxes/{id}/{call}")
}

async fn used(api: &Api, caller: &TestCaller) -> Value {
    let budget = api.call_as(caller, "GET", "/limits", Value::Null).await;
    budget.expect(200).body["used"].clone()
}

/// Creates sandboxes of `caller`, whose snapshots have [`GUEST`] bytes each.
async fn sandboxes(api: &Api, caller: &TestCaller, count: usize, body: &Value) -> Vec<String> {
    let mut ids = Vec::new();
    for _ in 0..count {
        let created = api
            .call_as(caller, "POST", "/v2/sandboxes", body.clone())
            .await;
        let id = created.expect(201).id();
        api.bench.world.write(&id, &"x".repeat(GUEST as usize));
        ids.push(id);
    }
    ids
}

fn succeeded(answers: &[Answer]) -> usize {
    answers.iter().filter(|a| a.status < 300).count()
}

/// Asserts that all failed responses have this status and error code.
#[track_caller]
fn refused_with(answers: &[Answer], status: u16, word: &str) {
    for answer in answers.iter().filter(|a| a.status >= 300) {
        assert_eq!(answer.status, status, "{}", answer.body);
        assert_eq!(answer.text("error_code"), word);
    }
}

/// Returns limits with a disk budget of `mib` MiB and no other limit.
fn disk(mib: u64) -> Limits {
    Limits {
        max_disk_mib: Some(mib),
        ..Limits::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_of_64_clients_at_once_fill_a_disk_budget_to_the_byte() {
    let api = Api::new();
    let (caller, _) = api.key(Scope::Create, disk(40));
    let body = json!({ "templateID": "base" });
    let ids = sandboxes(&api, &caller, CLIENTS, &body).await;
    let snapshots = ids.iter().map(|id| {
        let path = path(id, "snapshots");
        let (api, caller) = (&api, &caller);
        async move { api.call_as(caller, "POST", &path, json!({})).await }
    });
    let answers = join_all(snapshots).await;
    assert_eq!(succeeded(&answers), 40);
    refused_with(&answers, 507, "max_disk");
    let used = used(&api, &caller).await;
    assert_eq!(used["diskBytes"], 40 * GUEST);
    assert_eq!(used["disk"]["snapshots"], 40 * GUEST);
    assert_eq!(used["snapshots"], 40);
    // If the quota is exhausted, a pause is rejected, and `body` still finds the running guest.
    let pause = api
        .call_as(&caller, "POST", &path(&ids[0], "pause"), json!({}))
        .await;
    assert_eq!(pause.header("should-retry"), Some("false"));
    let reason = pause.text("message");
    assert!(reason.contains("snapshots 40.0 MiB"), "{reason}");
    assert_eq!(pause.expect_error(507), "max_disk");
    api.bench.world.body(&ids[0]);
    // A removal releases quota immediately.
    let listed = api.call_as(&caller, "GET", "/snapshots", Value::Null).await;
    let id = listed.items()[0]["snapshotID"].as_str().unwrap().to_owned();
    let sandbox = listed.items()[0]["originSandboxID"]
        .as_str()
        .unwrap()
        .to_owned();
    api.call_as(&caller, "DELETE", &path_of(&sandbox), Value::Null)
        .await
        .expect(204);
    api.call_as(&caller, "DELETE", &format!("/templates/{id}"), Value::Null)
        .await
        .expect(204);
    let remaining = ids.iter().find(|i| **i != sandbox).unwrap();
    api.call_as(&caller, "POST", &path(remaining, "snapshots"), json!({}))
        .await
        .expect(201);
}

fn path_of(id: &str) -> String {
    format!("/sandboxes/{id}")
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_pauses_and_snapshots_stay_within_their_limits() {
    let api = Api::new();
    let limits = Limits {
        max_paused: Some(5),
        max_snapshots: Some(7),
        ..Limits::default()
    };
    let (caller, _) = api.key(Scope::Create, limits);
    let body = json!({ "templateID": "base" });
    let ids = sandboxes(&api, &caller, CLIENTS, &body).await;
    let all = |call: &'static str| {
        let (api, caller) = (&api, &caller);
        ids.iter().map(move |id| async move {
            api.call_as(caller, "POST", &path(id, call), json!({}))
                .await
        })
    };
    let (paused, taken) = tokio::join!(join_all(all("pause")), join_all(all("snapshots")));
    assert_eq!(succeeded(&paused), 5);
    refused_with(&paused, 429, "max_paused");
    assert_eq!(succeeded(&taken), 7);
    refused_with(&taken, 429, "max_snapshots");
    let used = used(&api, &caller).await;
    assert_eq!(
        (&used["paused"], &used["snapshots"]),
        (&json!(5), &json!(7))
    );
}

#[tokio::test]
async fn a_sandbox_paused_at_its_timeout_has_its_reservation_from_the_beginning() {
    let api = Api::new();
    let limits = Limits {
        max_paused: Some(2),
        ..Limits::default()
    };
    let (caller, _) = api.key(Scope::Create, limits);
    let body = json!({ "templateID": "base", "autoPause": true });
    let create = || api.call_as(&caller, "POST", "/v2/sandboxes", body.clone());
    let answers = join_all((0..CLIENTS).map(|_| create())).await;
    assert_eq!(succeeded(&answers), 2);
    refused_with(&answers, 429, "max_paused");
    let ids = api
        .call_as(&caller, "GET", "/v2/sandboxes", Value::Null)
        .await
        .ids();
    // Sandboxes with a reservation for a pause need no further one.
    for id in &ids {
        api.call_as(&caller, "POST", &path(id, "pause"), json!({}))
            .await
            .expect(204);
    }
    api.call_as(&caller, "POST", &path(&ids[0], "resume"), json!({}))
        .await
        .expect(201);
    let plain = json!({ "templateID": "base" });
    let id = api
        .call_as(&caller, "POST", "/v2/sandboxes", plain)
        .await
        .expect(201)
        .id();
    let refused = api
        .call_as(&caller, "POST", &path(&id, "pause"), json!({}))
        .await;
    assert_eq!(refused.expect_error(429), "max_paused");
    // Children inherit the timeout action. A sandbox that is killed at its timeout releases quota.
    let fork = api
        .call_as(&caller, "POST", &path(&ids[0], "fork"), json!({}))
        .await;
    assert_eq!(fork.expect_error(429), "max_paused");
    api.call_as(&caller, "DELETE", &path_of(&ids[0]), Value::Null)
        .await
        .expect(204);
    api.call_as(&caller, "POST", &path(&id, "pause"), json!({}))
        .await
        .expect(204);
    let wake = json!({ "autoPause": true });
    api.call_as(&caller, "POST", &path(&id, "resume"), wake)
        .await
        .expect(201);
    assert_eq!(used(&api, &caller).await["paused"], 2);
}

#[tokio::test]
async fn a_snapshot_of_a_paused_sandbox_counts_once_and_adds_no_bytes() {
    let api = Api::new();
    let limits = Limits {
        max_snapshots: Some(1),
        ..disk(1)
    };
    let (caller, _) = api.key(Scope::Create, limits);
    let body = json!({ "templateID": "base" });
    let ids = sandboxes(&api, &caller, 1, &body).await;
    api.call_as(&caller, "POST", &path(&ids[0], "pause"), json!({}))
        .await
        .expect(204);
    for _ in 0..2 {
        api.call_as(&caller, "POST", &path(&ids[0], "snapshots"), json!({}))
            .await
            .expect(201);
    }
    let used = used(&api, &caller).await;
    assert_eq!(
        (&used["snapshots"], &used["diskBytes"]),
        (&json!(1), &json!(GUEST))
    );
}

#[tokio::test]
async fn after_a_crash_existing_data_counts_once() {
    let api = Api::new();
    let (caller, _) = api.key(Scope::Create, disk(3));
    let body = json!({ "templateID": "base" });
    let ids = sandboxes(&api, &caller, 3, &body).await;
    let take = |id: String, call: &'static str| {
        let (api, caller) = (&api, &caller);
        async move {
            api.call_as(caller, "POST", &path(&id, call), json!({}))
                .await
        }
    };
    take(ids[0].clone(), "snapshots").await.expect(201);
    take(ids[1].clone(), "pause").await.expect(204);
    let before = used(&api, &caller).await;
    // Another snapshot is complete on disk when the daemon is killed, but not acknowledged.
    api.bench.world.hang("snapshot-named");
    let hanging = take(ids[2].clone(), "snapshots");
    let limit = std::time::Duration::from_millis(300);
    assert!(tokio::time::timeout(limit, hanging).await.is_err());
    api.bench.world.clear_failures();
    let next = api.bench.open().await;
    let keys = Arc::new(Keys::open(api.bench.dir.path()).unwrap());
    let templates = support::FakeTemplates::of(Vec::new());
    let app = App::new(next, keys, Arc::new(templates), Config::default());
    let api = Api {
        router: router(app),
        ..api
    };
    let after = used(&api, &caller).await;
    assert_eq!(before["diskBytes"], 2 * GUEST);
    assert_eq!(after["diskBytes"], 3 * GUEST, "{after}");
    assert_eq!(after["snapshots"], 2);
    assert_eq!(after["paused"], 1);
    let refused = api
        .call_as(&caller, "POST", &path(&ids[0], "snapshots"), json!({}))
        .await;
    assert_eq!(refused.expect_error(507), "max_disk");
}

#[tokio::test]
async fn a_key_of_scope_create_has_the_default_disk_limit_unless_it_has_its_own() {
    let api = Api::new();
    let config = Config {
        default_key_disk_mib: Some(7),
        ..Config::default()
    };
    let templates = support::FakeTemplates::of(Vec::new());
    let app = App::new(
        api.host.clone(),
        api.keys.clone(),
        Arc::new(templates),
        config,
    );
    let api = Api {
        router: router(app.with_exchange_share(100)),
        ..api
    };
    let limits = async |caller: &TestCaller| {
        let budget = api.call_as(caller, "GET", "/limits", Value::Null).await;
        budget.expect(200).body["limits"].clone()
    };
    let (plain, _) = api.key(Scope::Create, Limits::default());
    let (given, _) = api.key(Scope::Create, disk(9));
    let (admin, _) = api.key(Scope::Admin, Limits::default());
    assert_eq!(limits(&plain).await["diskBytes"], 7 << 20);
    assert_eq!(limits(&plain).await["exchanges"], 100);
    assert_eq!(limits(&given).await["diskBytes"], 9 << 20);
    assert_eq!(limits(&admin).await["diskBytes"], Value::Null);
}

#[tokio::test]
async fn a_budget_is_shown_to_its_holder_and_to_admins() {
    let api = Api::new();
    let (alice, key) = api.key(Scope::Create, disk(5));
    let (mallory, _) = api.key(Scope::Create, Limits::default());
    let (reader, _) = api.key(Scope::Read, Limits::default());
    let id = &key.key.id;
    let path = format!("/limits?key={id}");
    for caller in [&alice, &api.admin, &TestCaller::Owner] {
        let shown = api.call_as(caller, "GET", &path, Value::Null).await;
        assert_eq!(shown.expect(200).text("keyID"), *id);
    }
    for caller in [&mallory, &reader] {
        let refused = api.call_as(caller, "GET", &path, Value::Null).await;
        assert_eq!(refused.expect_error(403), "forbidden");
        // The response does not reveal whether a key exists.
        let unknown = api.call_as(caller, "GET", "/limits?key=nope", Value::Null);
        assert_eq!(unknown.await.expect_error(403), "forbidden");
    }
    let unknown = api.get("/limits?key=nope").await;
    assert_eq!(unknown.expect_error(404), "key_not_found");
    let none = api.call_as(&TestCaller::Owner, "GET", "/limits", Value::Null);
    assert_eq!(none.await.expect_error(400), "invalid_request");
    let nobody = api.call_as(&TestCaller::Nobody, "GET", "/limits", Value::Null);
    nobody.await.expect(401);
}

/// Returns a link to upload files for a template of `caller`.
async fn upload_link(api: &Api, caller: &TestCaller, template: &str, file: usize) -> String {
    let hash = format!("{file:064x}");
    let path = format!("/templates/{template}/files/{hash}");
    let link = api.call_as(caller, "GET", &path, Value::Null).await;
    let url = link.expect(201).text("url");
    url.split_once("/templates/").unwrap().1.to_owned()
}

#[tokio::test]
async fn uploads_of_64_clients_at_once_fill_a_disk_budget_to_the_block() {
    let api = Api::with_builder().await;
    let (caller, _) = api.key(Scope::Create, disk(1));
    let new = json!({ "name": "mine" });
    let requested = api.call_as(&caller, "POST", "/v3/templates", new).await;
    let template = requested.expect(202).text("templateID");
    // Twelve files of 80 KiB and the first blocks of the thirteenth fit.
    let files: Vec<_> = (0..CLIENTS).collect();
    let mut links = Vec::new();
    for file in &files {
        links.push(upload_link(&api, &caller, &template, *file).await);
    }
    let mut answers = Vec::new();
    // In batches of the maximum number of concurrent uploads per key.
    for links in links.chunks(16) {
        let send = links.iter().map(|link| {
            let body = Body::from(vec![7; 80 << 10]);
            api.send(
                Request::put(format!("/templates/{link}"))
                    .body(body)
                    .unwrap(),
            )
        });
        answers.extend(join_all(send).await);
    }
    assert_eq!(succeeded(&answers), 12);
    refused_with(&answers, 507, "max_disk");
    let now = used(&api, &caller).await;
    assert_eq!(
        (&now["uploads"], &now["diskBytes"]),
        (&json!(12), &json!(12 * (80 << 10)))
    );
    // The remaining space suffices for a file of exactly that size, and then for no further byte.
    let rest = (1usize << 20) - 12 * (80 << 10);
    let link = upload_link(&api, &caller, &template, 100).await;
    let send = |link: String, bytes: usize| {
        let body = Body::from(vec![7; bytes]);
        api.send(
            Request::put(format!("/templates/{link}"))
                .body(body)
                .unwrap(),
        )
    };
    send(link, rest).await.expect(200);
    let link = upload_link(&api, &caller, &template, 101).await;
    send(link, 1).await.expect(507);
    // A prune releases quota of the caller only.
    let (other, _) = api.key(Scope::Create, Limits::default());
    api.call_as(&other, "POST", "/templates/prune", json!({}))
        .await
        .expect(200);
    assert_eq!(used(&api, &caller).await["uploads"], 13);
    api.call_as(&caller, "POST", "/templates/prune", json!({}))
        .await
        .expect(200);
    let now = used(&api, &caller).await;
    assert_eq!((&now["uploads"], &now["diskBytes"]), (&json!(0), &json!(0)));
}

#[tokio::test]
async fn waiting_builds_are_limited_per_key() {
    let api = Api::with_builder().await;
    let limits = Limits {
        max_builds: Some(3),
        ..Limits::default()
    };
    let (caller, _) = api.key(Scope::Create, limits);
    let ask = (0..CLIENTS).map(|n| {
        let body = json!({ "name": format!("t{n}") });
        api.call_as(&caller, "POST", "/v3/templates", body)
    });
    let answers = join_all(ask).await;
    assert_eq!(succeeded(&answers), 3);
    refused_with(&answers, 429, "max_builds");
    assert_eq!(used(&api, &caller).await["builds"], 3);
    let first = answers.iter().find(|a| a.status == 202).unwrap();
    let (template, build) = (first.text("templateID"), first.text("buildID"));
    let cancel = format!("/templates/{template}/builds/{build}/cancel");
    api.call_as(&caller, "POST", &cancel, Value::Null)
        .await
        .expect(204);
    api.call_as(&caller, "POST", "/v3/templates", json!({ "name": "next" }))
        .await
        .expect(202);
}

#[tokio::test]
async fn exchanges_of_a_key_are_limited_by_its_own_limit_or_by_its_share() {
    let mut app = None;
    let api = Api::with(|created| {
        let created = created.with_exchange_share(4);
        app = Some(created.clone());
        created
    });
    let app = app.unwrap();
    let limits = Limits {
        max_exchanges: Some(2),
        ..Limits::default()
    };
    let (caller, few) = api.key(Scope::Create, limits);
    let (_, plain) = api.key(Scope::Create, Limits::default());
    let first = app.exchange(&few.key.id).unwrap();
    let _second = app.exchange(&few.key.id).unwrap();
    let refused = app.exchange(&few.key.id).unwrap_err();
    assert!(
        refused.contains("maximum of 2 concurrent requests and streams"),
        "{refused}"
    );
    assert_eq!(used(&api, &caller).await["exchanges"], 2);
    drop(first);
    app.exchange(&few.key.id).unwrap();
    let _all: Vec<_> = (0..4)
        .map(|_| app.exchange(&plain.key.id).unwrap())
        .collect();
    assert!(app.exchange(&plain.key.id).is_err());
}

/// A host whose disk has this number of free MiB above the reserve.
#[derive(Debug)]
struct SmallDisk(u64);

impl HostReader for SmallDisk {
    fn read(&self) -> HostFigures {
        HostFigures {
            disk_free_mib: Some(1024 + self.0),
            disk_total_mib: Some(10_000),
            ..HostFigures::default()
        }
    }
}

#[tokio::test]
async fn disk_reserved_for_guests_is_not_granted_to_keys() {
    // Two disks of 1 GiB, reserved once each, and 100 MiB.
    let reader: Arc<dyn HostReader> = Arc::new(SmallDisk(2 * 1024 + 100));
    let limits = jiffy_sandbox_manager::HostLimits {
        disk_overcommit: 1.0,
        ..jiffy_sandbox_manager::HostLimits::default()
    };
    let options = HostOptions {
        limits,
        reader: Some(reader),
        ..HostOptions::default()
    };
    let api = Api::with_options(options, |app| app);
    let (caller, _) = api.key(Scope::Create, Limits::default());
    let body = json!({ "templateID": "base" });
    let first = sandboxes(&api, &caller, 1, &body).await.remove(0);
    api.call_as(&caller, "POST", &path(&first, "snapshots"), json!({}))
        .await
        .expect(201);
    sandboxes(&api, &caller, 1, &body).await;
    let third = api.call_as(&caller, "POST", "/v2/sandboxes", body).await;
    assert!(third.text("message").contains("disk"), "{}", third.body);
    assert_eq!(third.expect_error(503), "host_busy");
    // The snapshot fits into the remaining 100 MiB.
    api.call_as(&caller, "POST", &path(&first, "snapshots"), json!({}))
        .await
        .expect(201);
    let large = "x".repeat(101 << 20);
    api.bench.world.write(&first, &large);
    let refused = api
        .call_as(&caller, "POST", &path(&first, "snapshots"), json!({}))
        .await;
    // The key is unlimited, but the host's disk is not.
    let reason = refused.text("message");
    assert!(reason.contains("this host has 100.0 MiB"), "{reason}");
    assert_eq!(refused.expect_error(507), "host_disk");
}
