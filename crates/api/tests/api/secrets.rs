//! Secrets of API keys: their calls, events and removal.

use crate::support::{Api, TestCaller};
use jiffy_api::{Limits, Scope};
use serde_json::{Value, json};

/// Value of a secret.
const VALUE: &str = "value-that-no-call-returns";

/// Stores a secret and returns its id.
async fn stored(api: &Api, caller: &TestCaller, name: &str) -> String {
    let body = json!({ "name": name, "value": VALUE, "metadata": { "team": "a" } });
    let made = api.call_as(caller, "POST", "/secrets", body).await;
    made.expect(201).text("secretID")
}

#[tokio::test]
async fn values_of_secrets_are_written_and_never_returned() {
    let api = Api::new();
    let (caller, key) = api.key(Scope::Create, Limits::default());
    let id = stored(&api, &caller, "API-Token").await;
    let body = json!({ "value": format!("{VALUE}-2") });
    let changed = api.call_as(&caller, "POST", "/secrets/api-token", body);
    let changed = changed.await.expect(200);
    assert_eq!(changed.text("secretID"), id);
    assert_eq!(changed.text("name"), "api-token");
    assert_eq!(changed.body["currentVersion"], 2);
    assert_eq!(changed.body["metadata"], json!({ "team": "a" }));
    // All answers, none of which may contain a value.
    let mut all = changed.body.to_string();
    let path = format!("/secrets/{id}");
    for path in [path.as_str(), "/secrets", "/events"] {
        let read = api.call_as(&caller, "GET", path, Value::Null).await;
        all += &read.expect(200).body.to_string();
    }
    let removed = api.call_as(&caller, "DELETE", &path, Value::Null).await;
    removed.expect(204);
    let missing = api.call_as(&caller, "GET", &path, Value::Null).await;
    assert_eq!(missing.expect_error(404), "secret_not_found");
    let events = api
        .call_as(&caller, "GET", "/events?order=asc", Value::Null)
        .await;
    let events = events.expect(200);
    all += &events.body.to_string();
    assert!(!all.contains(VALUE), "{all}");
    let kinds = events.body["events"].as_array().unwrap().iter();
    let kinds: Vec<&str> = kinds
        .filter(|event| event["name"] == "api-token" && event["caller"] == json!(key.key.id))
        .map(|event| event["type"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds,
        ["secret.created", "secret.changed", "secret.deleted"]
    );
}

#[tokio::test]
async fn names_belong_to_one_key_and_invalid_secrets_are_rejected() {
    let api = Api::new();
    let (caller, _) = api.key(Scope::Create, Limits::default());
    stored(&api, &caller, "token").await;
    stored(&api, &api.admin.clone(), "token").await;
    let again = json!({ "name": "TOKEN", "value": "x" });
    let again = api.call_as(&caller, "POST", "/secrets", again).await;
    assert_eq!(again.expect_error(409), "name_taken");
    for bad in [
        json!({ "name": "sec_a", "value": "x" }),
        json!({ "name": "a b", "value": "x" }),
        json!({ "name": "a", "value": "" }),
        json!({ "name": "a", "value": "x\r\ny: z" }),
        json!({ "name": "a" }),
        json!({ "name": "a", "value": "x", "metadata": { "n": "v".repeat(1025) } }),
    ] {
        let made = api.call_as(&caller, "POST", "/secrets", bad.clone()).await;
        let error = made.expect(400).text("message");
        assert!(!error.contains("x\\r"), "{bad}: {error}");
    }
}

#[tokio::test]
async fn lists_of_secrets_are_paged_by_name() {
    let api = Api::new();
    let (caller, _) = api.key(Scope::Create, Limits::default());
    for name in ["c", "a", "b"] {
        stored(&api, &caller, name).await;
    }
    let mut names = Vec::new();
    let mut path = "/secrets?limit=2".to_owned();
    loop {
        let page = api
            .call_as(&caller, "GET", &path, Value::Null)
            .await
            .expect(200);
        names.extend(
            page.items()
                .iter()
                .map(|s| s["name"].as_str().unwrap().to_owned()),
        );
        let Some(next) = page.header("x-next-token") else {
            break;
        };
        path = format!("/secrets?limit=2&nextToken={next}");
    }
    assert_eq!(names, ["a", "b", "c"]);
}

#[tokio::test]
async fn secrets_are_removed_with_the_resources_of_a_revoked_key_only() {
    let api = Api::new();
    let (caller, key) = api.key(Scope::Create, Limits::default());
    stored(&api, &caller, "token").await;
    let secrets = jiffy_secrets::Secrets::open(api.bench.dir.path()).unwrap();
    let path = format!("/keys/{}/revoke", key.key.id);
    let admin = api.admin.clone();
    let revoked = api.call_as(&admin, "POST", &path, json!({})).await;
    revoked.expect(200);
    assert!(secrets.value(&key.key.id, "token").unwrap().is_some());
    let revoked = api
        .call_as(&admin, "POST", &path, json!({ "end": true }))
        .await;
    revoked.expect(200);
    assert!(secrets.value(&key.key.id, "token").unwrap().is_none());
}
