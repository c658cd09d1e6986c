//! Names and engines of sandboxes, specified by callers. Also waits for a state, restarts and
//! current metrics.

use crate::support;

use jiffy_api::{Limits, Scope};
use serde_json::{Value, json};
use support::fake::OTHER;
use support::{Answer, Api, TestCaller};

async fn create(api: &Api, caller: &TestCaller, name: &str) -> Answer {
    let body = json!({ "templateID": "base", "name": name });
    api.call_as(caller, "POST", "/v2/sandboxes", body).await
}

/// Reads a sandbox by its name or id.
async fn look(api: &Api, caller: &TestCaller, name: &str) -> Answer {
    let path = format!("/sandboxes/{name}");
    api.call_as(caller, "GET", &path, Value::Null).await
}

#[tokio::test]
async fn a_name_is_accepted_for_an_id_and_the_callers_own_wins() {
    let api = Api::new();
    let (alice, _) = api.key(Scope::Create, Limits::default());
    let (mallory, _) = api.key(Scope::Create, Limits::default());
    let created = create(&api, &alice, "web").await.expect(201);
    assert_eq!(created.text("name"), "web");
    assert_eq!(
        look(&api, &alice, "web").await.expect(200).id(),
        created.id()
    );
    assert_eq!(
        create(&api, &alice, "web").await.expect_error(409),
        "name_taken"
    );
    assert_eq!(
        look(&api, &mallory, "web").await.expect_error(404),
        "sandbox_not_found"
    );
    // A caller that sees all sandboxes finds the only match, but prefers its own sandbox.
    assert_eq!(
        look(&api, &TestCaller::Owner, "web").await.expect(200).id(),
        created.id()
    );
    let theirs = create(&api, &mallory, "web").await.expect(201);
    let several = look(&api, &TestCaller::Owner, "web").await.expect(400);
    assert!(several.text("message").contains(&theirs.id()));
    let own = create(&api, &TestCaller::Owner, "web").await.expect(201);
    assert_eq!(
        look(&api, &TestCaller::Owner, "web").await.expect(200).id(),
        own.id()
    );
    assert_eq!(
        look(&api, &alice, "web").await.expect(200).id(),
        created.id()
    );

    let listed = api
        .call_as(&alice, "GET", "/v2/sandboxes?name=web", Value::Null)
        .await;
    assert_eq!(listed.expect(200).ids(), [created.id()]);
    let none = api
        .call_as(&alice, "GET", "/v2/sandboxes?name=api", Value::Null)
        .await;
    assert!(none.expect(200).ids().is_empty());
    let paused = api
        .call_as(&alice, "POST", "/sandboxes/web/pause", Value::Null)
        .await;
    paused.expect(204);
    let ended = api
        .call_as(&alice, "DELETE", "/sandboxes/web", Value::Null)
        .await;
    ended.expect(204);
    look(&api, &alice, "web").await.expect(404);
    look(&api, &mallory, "web").await.expect(200);
}

#[tokio::test]
async fn a_sandbox_is_renamed_and_bad_names_are_refused() {
    let api = Api::new();
    let id = api.sandbox().await;
    let path = format!("/sandboxes/{id}");
    let change = async |name: Value| {
        let body = json!({ "name": name });
        api.call_as(&api.admin, "PATCH", &path, body).await
    };
    assert_eq!(change(json!("web")).await.expect(200).text("name"), "web");
    assert_eq!(api.get("/sandboxes/web").await.expect(200).id(), id);
    let long = "a".repeat(64);
    for bad in ["", "a b", "-a", "a/b", &id, &long] {
        assert_eq!(
            change(json!(bad)).await.expect_error(400),
            "invalid_request"
        );
        let created = create(&api, &api.admin, bad).await;
        assert_eq!(created.expect_error(400), "invalid_request", "{bad}");
    }
    let none = change(Value::Null).await.expect(200);
    assert!(none.body.get("name").is_none());
    api.get("/sandboxes/web").await.expect(404);
    let empty = api.call_as(&api.admin, "PATCH", &path, json!({})).await;
    empty.expect(400);
}

#[tokio::test]
async fn a_wait_ends_when_its_state_is_reached_or_impossible() {
    let api = Api::new();
    let id = api.sandbox().await;
    let wait = async |how: &str| {
        let path = format!("/sandboxes/{id}/wait?{how}");
        api.get(&path).await.expect(200)
    };
    assert_eq!(
        wait("for=running&seconds=10").await.text("state"),
        "running"
    );
    assert_eq!(
        wait("for=ended").await.text("state"),
        "running",
        "without a wait"
    );
    let (reported, _) = tokio::join!(wait("for=paused&seconds=10"), api.host.pause(&id));
    assert_eq!(reported.text("state"), "paused");
    api.host.resume(&id).await.unwrap();
    let (reported, _) = tokio::join!(wait("for=ended&seconds=10"), async {
        api.bench.world.panic_guest(&id);
    });
    assert_eq!(reported.text("state"), "broken");
    assert!(reported.text("reason").contains("panicked"));
    // A broken sandbox never runs again.
    let (reported, _) = tokio::join!(wait("for=running&seconds=10"), api.host.remove(&id));
    assert!(matches!(&reported.text("state")[..], "broken" | "killed"));
    for bad in ["for=ready", "seconds=11", "seconds=x"] {
        let path = format!("/sandboxes/{}/wait?{bad}", api.sandbox().await);
        api.get(&path).await.expect(400);
    }
}

#[tokio::test]
async fn a_restart_preserves_the_sandbox_and_metrics_are_current() {
    let api = Api::new();
    let id = api.sandbox().await;
    let path = format!("/sandboxes/{id}/restart");
    assert_eq!(api.post(&path, Value::Null).await.expect(200).id(), id);
    let long = api.post(&path, json!({ "graceMs": 60_001 })).await;
    long.expect(400);
    // The agent does not answer, so the processes cannot be ended.
    api.bench.world.fail("answer");
    assert_eq!(
        api.post(&path, Value::Null).await.expect_error(409),
        "wrong_state"
    );
    api.bench.world.clear_failures();
    let path = format!("/sandboxes/metrics?now=true&sandbox_ids={id}");
    let now = api.get(&path).await.expect(200);
    // The fake engine reports 100 bytes sent and 200 bytes received.
    let metric = &now.body["sandboxes"][&id];
    assert_eq!(
        (&metric["netBytesOut"], &metric["netBytesIn"]),
        (&json!(100), &json!(200))
    );
    api.host.pause(&id).await.unwrap();
    let path = format!("/sandboxes/{id}/restart");
    assert_eq!(
        api.post(&path, Value::Null).await.expect_error(409),
        "wrong_state"
    );
}

#[tokio::test]
async fn an_engine_can_be_chosen_and_a_missing_one_is_refused() {
    let api = Api::new();
    let create = async |engine: &str| {
        let body = json!({ "templateID": "base", "engine": engine });
        api.post("/v2/sandboxes", body).await
    };
    let created = create(OTHER).await.expect(201);
    assert_eq!(created.text("engine"), OTHER);
    assert_eq!(
        create("microvm").await.expect(201).text("engine"),
        "microvm"
    );
    let refused = create("absent").await.expect(400);
    assert_eq!(refused.text("error_code"), "engine_unavailable");
    let message = refused.text("message");
    assert!(message.contains(OTHER), "{message}");
}
