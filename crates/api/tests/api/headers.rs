//! Rules for headers of requests, at creates and changes.

use crate::support::{Api, TestCaller};
use jiffy_api::{Limits, Scope};
use jiffy_identity::TokenIssuer;
use jiffy_secrets::HostKey;
use serde_json::{Value, json};
use std::sync::Arc;

/// Value of a header that no response may contain.
const LITERAL: &str = "text-that-is-not-shown";

/// Returns network settings with a rule that sets the header `Authorization` in requests to
/// `a.example`.
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
    // Settings without a rule are accepted.
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

/// Returns a control plane that issues identity tokens, and its data directory.
fn with_issuer() -> (Api, tempfile::TempDir) {
    let home = tempfile::tempdir().unwrap();
    let key = HostKey::open(home.path()).unwrap();
    let url = "https://issuer.example".parse().unwrap();
    let issuer = Arc::new(TokenIssuer::new(home.path(), key, url));
    (Api::with(|app| app.with_issuer(Some(issuer))), home)
}

/// Returns a request for a sandbox with the identity token `aws`, and a rule with this value.
fn with_token(value: &str) -> Value {
    let token = json!({ "audience": "sts.amazonaws.com", "tokenType": "JWT-SVID" });
    json!({ "templateID": "base", "iam": { "tokens": { "aws": token } }, "network": rules(value) })
}

#[tokio::test]
async fn identity_tokens_are_registered_by_a_create_and_referred_to_by_rules() {
    let (api, _home) = with_issuer();
    let (alice, key) = api.key(Scope::Create, Limits::default());
    let value = "Bearer ${e2b.identity.tokens.aws}";
    let created = api
        .call_as(&alice, "POST", "/v2/sandboxes", with_token(value))
        .await;
    let id = created.expect(201).id();
    let path = format!("/sandboxes/{id}");
    let info = api
        .call_as(&alice, "GET", &path, Value::Null)
        .await
        .expect(200);
    let header = &info.body["network"]["rules"]["a.example"][0]["transform"]["headers"];
    assert_eq!(header["authorization"], value);
    let shown = &info.body["jiffy"]["terms"]["identity_tokens"];
    assert_eq!(*shown, with_token(value)["iam"]["tokens"]);
    // Changed rules refer to the tokens of the create.
    let network = format!("{path}/network");
    let put = api
        .call_as(&alice, "PUT", &network, rules("${e2b.identity.tokens.gcp}"))
        .await;
    let message = put.expect(400).text("message");
    assert!(message.contains("identity token `gcp`"), "{message}");
    api.call_as(&alice, "PUT", &network, rules(value))
        .await
        .expect(204);
    // A fork has an identity of its own.
    let fork = format!("{path}/fork");
    let forked = api
        .call_as(&alice, "POST", &fork, json!({}))
        .await
        .expect(201);
    let child = forked.body[0]["sandbox"]["sandboxID"]
        .as_str()
        .unwrap()
        .to_owned();
    for sandbox in [&id, &child] {
        let rules = api.host.get(sandbox).unwrap().network_rules();
        let workload = rules.headers.unwrap().workload.unwrap();
        assert_eq!(
            (&workload.sandbox, &workload.owner),
            (sandbox, &Some(key.key.id.clone()))
        );
        assert_eq!(workload.tokens["aws"].audience, "sts.amazonaws.com");
    }
    let mut foreign = with_token("${e2b.identity.tokens.gcp}");
    api.call_as(&alice, "POST", "/sandboxes", foreign.clone())
        .await
        .expect(400);
    for iam in [
        json!({ "roles": {} }),
        json!({ "tokens": { "aws": { "audience": "a", "tokenType": "JWT-SVID", "ttl": 1 } } }),
        json!({ "tokens": { "aws": { "audience": "a", "tokenType": "JWT" } } }),
        json!({ "tokens": { "aws": { "audience": "", "tokenType": "JWT-SVID" } } }),
        json!({ "tokens": { "a}b": { "audience": "a", "tokenType": "JWT-SVID" } } }),
    ] {
        foreign["iam"] = iam;
        foreign["network"] = json!({});
        api.call_as(&alice, "POST", "/sandboxes", foreign.clone())
            .await
            .expect(400);
    }
}

#[tokio::test]
async fn the_issuer_of_identity_tokens_is_described_without_a_key() {
    let (api, _home) = with_issuer();
    let get = async |path: &str| {
        let answer = api
            .call_as(&TestCaller::Nobody, "GET", path, Value::Null)
            .await
            .expect(200);
        assert_eq!(answer.header("cache-control"), Some("public, max-age=3600"));
        answer.body
    };
    let description = get("/.well-known/openid-configuration").await;
    assert_eq!(description["issuer"], "https://issuer.example");
    assert_eq!(
        description["jwks_uri"],
        "https://issuer.example/.well-known/jwks.json"
    );
    let keys = get("/.well-known/jwks.json").await;
    let [key] = &keys["keys"].as_array().unwrap()[..] else {
        panic!("{keys}")
    };
    assert_eq!((&key["kty"], &key["alg"]), (&json!("EC"), &json!("ES256")));
    assert!(key.get("d").is_none(), "{keys}");
}

#[tokio::test]
async fn a_host_without_an_issuer_rejects_identity_tokens() {
    let api = Api::new();
    let rejected = api.post("/v2/sandboxes", with_token("x")).await;
    assert_eq!(rejected.expect_error(400), "unsupported_option");
    for iam in [
        json!({ "tokens": {} }),
        json!({ "tokens": null }),
        json!({}),
        json!(null),
    ] {
        let body = json!({ "templateID": "base", "iam": iam });
        api.post("/v2/sandboxes", body).await.expect(201);
    }
    for path in [
        "/.well-known/openid-configuration",
        "/.well-known/jwks.json",
    ] {
        let missing = api
            .call_as(&TestCaller::Nobody, "GET", path, Value::Null)
            .await;
        assert_eq!(missing.expect_error(404), "no_such_call");
    }
}

#[tokio::test]
async fn a_change_of_some_network_rules_retains_the_others() {
    let api = Api::new();
    let network = json!({
        "allowOut": ["1.1.1.1"], "denyOut": ["0.0.0.0/0"], "dnsServers": ["9.9.9.9"],
        "egressMbps": 100, "maskRequestHost": "a.example", "allowPublicTraffic": false,
        "rules": rules(LITERAL)["rules"],
        "egressProxy": { "address": "proxy.example:1080", "username": "u", "password": "p" },
    });
    let body = json!({
        "templateID": "base", "network": network, "allow_internet_access": false,
    });
    let id = api.post("/v2/sandboxes", body).await.expect(201).id();
    let path = format!("/sandboxes/{id}/network");
    let settings = || api.host.get(&id).unwrap().settings().clone();
    let before = settings();
    let patch = |body: Value| api.call_as(&api.admin, "PATCH", &path, body);
    // Empty and rejected changes have no effect.
    patch(json!({})).await.expect(204);
    patch(json!({ "denyOut": ["a.example"] })).await.expect(400);
    patch(json!({ "rules": rules("${e2b.secrets.missing}")["rules"] }))
        .await
        .expect(400);
    patch(json!({ "unknown": 1 })).await.expect(400);
    assert_eq!(settings(), before);
    patch(json!({ "denyOut": [], "egressMbps": 50 }))
        .await
        .expect(204);
    let mut expected = before.clone();
    expected.network.deny_out = Vec::new();
    expected.network.egress_mbps = Some(50);
    assert_eq!(settings(), expected);
    // Rules and the proxy are removed by empty values.
    patch(json!({ "rules": {}, "egressProxy": {}, "allow_internet_access": true }))
        .await
        .expect(204);
    expected.network.rules = Vec::new();
    expected.network.allow_internet_access = Some(true);
    (expected.network.egress_proxy, expected.egress_proxy_secrets) = (None, None);
    assert_eq!(settings(), expected);
}
