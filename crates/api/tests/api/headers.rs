//! Rules for headers of requests, at creates and changes.

use crate::support::{Api, TestCaller};
use jiffy_api::{Limits, Scope};
use serde_json::{Value, json};

const LITERAL: &str = "text-that-is-not-shown";

fn rules(value: &str) -> Value {
    json!({ "rules": { "a.example": [{ "transform": { "headers": { "Authorization": value } } }] } })
}

async fn create(api: &Api, caller: &TestCaller, network: Value) -> crate::support::Answer {
    let body = json!({ "templateID": "base", "network": network });
    api.call_as(caller, "POST", "/sandboxes", body).await
}

#[tokio::test]
async fn rules_are_returned_without_values_and_refer_to_secrets_of_the_key_only() {
    let api = Api::new();
    let (alice, _) = api.key(Scope::Create, Limits::default());
    let (mallory, _) = api.key(Scope::Create, Limits::default());
    let secret = json!({ "name": "token", "value": "value" });
    api.call_as(&alice, "POST", "/secrets", secret)
        .await
        .expect(201);
    let value = "Bearer ${e2b.secrets.token}";
    let mut both = rules(value);
    both["rules"]["b.example"] = json!([{ "transform": { "headers": { "x-key": LITERAL } } }]);
    let id = create(&api, &alice, both).await.expect(201).id();
    let path = format!("/sandboxes/{id}");
    let info = api
        .call_as(&alice, "GET", &path, Value::Null)
        .await
        .expect(200);
    let shown = &info.body["network"]["rules"];
    let header = |host: &str, name: &str| shown[host][0]["transform"]["headers"][name].clone();
    assert_eq!(header("a.example", "authorization"), value);
    assert_eq!(header("b.example", "x-key"), "***");
    assert!(!info.body.to_string().contains(LITERAL));
    assert!(!info.body.to_string().contains("jiffy.sealed"));
    // The answer does not depend on the secrets of other keys.
    let foreign = create(&api, &mallory, rules(value)).await;
    let missing = create(&api, &mallory, rules("Bearer ${e2b.secrets.other}")).await;
    let foreign = foreign.expect(400).text("message");
    assert_eq!(
        foreign,
        missing
            .expect(400)
            .text("message")
            .replace("other", "token")
    );
    // A change replaces the rules, and absent rules are removed.
    let path = format!("/sandboxes/{id}/network");
    let put = api.call_as(&alice, "PUT", &path, rules(LITERAL)).await;
    put.expect(204);
    let put = api.call_as(&mallory, "PUT", &path, rules(LITERAL)).await;
    put.expect(404);
    api.call_as(&alice, "PUT", &path, json!({}))
        .await
        .expect(204);
    let path = format!("/sandboxes/{id}");
    let info = api
        .call_as(&alice, "GET", &path, Value::Null)
        .await
        .expect(200);
    assert!(info.body["network"].get("rules").is_none());
}

#[tokio::test]
async fn a_host_without_secrets_rejects_rules() {
    let api = Api::new();
    let caller = api.admin.clone();
    for network in [
        json!({ "rules": {} }),
        json!({ "rules": [] }),
        json!({ "rules": null }),
    ] {
        create(&api, &caller, network).await.expect(201);
    }
    let api = api.without_secrets();
    let rejected = create(&api, &caller, rules(LITERAL)).await;
    assert_eq!(rejected.expect_error(400), "unsupported_option");
}
