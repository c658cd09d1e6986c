//! Creation of sandboxes.

use crate::support;

use axum::body::Body;
use axum::http::Request;
use jiffy_sandbox_manager::{OnTimeout, SandboxState};
use serde_json::{Value, json};
use support::{Api, TestCaller};

#[tokio::test]
async fn a_create_is_201_and_has_every_field_that_clients_require() {
    let api = Api::new();
    let body = json!({ "templateID": "base", "metadata": {}, "envVars": { "SECRET": "x" } });
    let created = api.post("/v2/sandboxes", body.clone()).await.expect(201);
    for field in [
        "templateID",
        "sandboxID",
        "clientID",
        "envdVersion",
        "envdAccessToken",
    ] {
        assert!(!created.text(field).is_empty());
    }
    assert_eq!(created.text("domain"), "sandboxes.example:3000");
    assert!(!created.id().contains('-'), "host names split at `-`");
    assert_eq!(created.body["bootMode"], "snapshot");
    assert_eq!(created.body["engine"], "microvm");
    let record = &created.body["jiffy"];
    assert_eq!(record["id"], created.id());
    assert!(
        record["agent_token"].is_null() && record["env"] == json!({}),
        "only the host's owner sees secrets in the record: {record}"
    );
    let secure = api.post("/sandboxes", body).await.expect(201);
    assert!(api.bench.world.running().contains(&secure.id()));
}

#[tokio::test]
async fn the_answer_about_a_sandbox_has_the_steps_of_create_and_last_operation() {
    let api = Api::new();
    let body = json!({ "templateID": "base" });
    let created = api.post("/sandboxes", body).await.expect(201);
    assert!(created.body["jiffy"].get("steps").is_none());
    let path = format!("/sandboxes/{}", created.id());
    api.post(&format!("{path}/pause"), json!({}))
        .await
        .expect(204);
    let detail = api.get(&path).await.expect(200);
    let steps = &detail.body["jiffy"]["steps"];
    for (name, operation, step) in [
        ("create", "create", "journal"),
        ("last", "pause", "snapshot"),
    ] {
        let times = &steps[name];
        assert_eq!(times["operation"], operation, "{steps}");
        let all = times["steps"].as_array().unwrap();
        assert!(all.iter().any(|s| s["step"] == step), "{steps}");
        let sum: f64 = all.iter().filter_map(|s| s["ms"].as_f64()).sum();
        assert!(sum <= times["ms"].as_f64().unwrap() + 0.001, "{steps}");
    }
}

#[tokio::test]
async fn settings_are_stored_in_either_api_dialect() {
    let api = Api::new();
    // The dialect of E2B.
    let e2b = json!({
        "templateID": "base:default", "timeout": 60, "autoPause": true, "autoResume": { "enabled": true },
        "allow_internet_access": false, "metadata": { "a": "b c" }, "envVars": { "X": "1" },
        "network": { "allowOut": ["example.com"], "denyOut": ["0.0.0.0/0"], "allowPublicTraffic": false },
        "volumeMounts": [], "mcp": { "exa": { "apiKey": "x" } }, "iam": {}, "somethingNew": [1],
    });
    let created = api.post("/v2/sandboxes", e2b).await.expect(201);
    let record = api.host.get(&created.id()).unwrap();
    let settings = &record.settings();
    assert_eq!(
        (settings.timeout_s, settings.on_timeout),
        (Some(60), OnTimeout::Pause)
    );
    assert!(settings.auto_resume && settings.secure && settings.network.restrict_traffic);
    assert_eq!(settings.network.allow_internet_access, Some(false));
    assert_eq!(settings.network.deny_out, ["0.0.0.0/0"]);
    assert_eq!(
        (&settings.metadata["a"], &record.env()["X"]),
        (&"b c".into(), &"1".into())
    );
    assert_eq!(
        created.text("trafficAccessToken"),
        record.traffic_token().unwrap()
    );
    let detail = api
        .get(&format!("/sandboxes/{}", created.id()))
        .await
        .expect(200);
    assert_eq!(
        detail.body["lifecycle"],
        json!({ "onTimeout": "pause", "autoResume": true })
    );
    assert_eq!(detail.body["allowInternetAccess"], false);
    assert_eq!(detail.body["network"]["allowPublicTraffic"], false);
    // The dialect of CubeSandbox, in which -1 means no timeout.
    let cube = json!({
        "templateID": "base", "timeout": -1, "envs": { "X": "2" },
        "lifecycle": { "onTimeout": "pause", "autoResume": true },
    });
    let created = api.post("/sandboxes", cube).await.expect(201);
    let record = api.host.get(&created.id()).unwrap();
    assert_eq!(
        (record.settings().timeout_s, record.deadline_ms()),
        (None, None)
    );
    assert_eq!(
        (record.settings().on_timeout, record.settings().auto_resume),
        (OnTimeout::Pause, true)
    );
    assert_eq!(record.env()["X"], "2");
    let detail = api.get(&format!("/sandboxes/{}", created.id())).await;
    // A sandbox without a timeout has this end, because clients require one.
    assert_eq!(detail.text("endAt"), "2999-12-31T23:59:59Z");
}

#[tokio::test]
async fn the_default_timeout_is_300_seconds() {
    let api = Api::new();
    let id = api.sandbox().await;
    assert_eq!(api.host.get(&id).unwrap().settings().timeout_s, Some(300));
}

#[tokio::test]
async fn a_sandbox_has_the_requested_size_or_its_templates() {
    let api = Api::new();
    let created = api
        .post("/v2/sandboxes", json!({ "templateID": "large" }))
        .await;
    let detail = api
        .get(&format!("/sandboxes/{}", created.expect(201).id()))
        .await;
    assert_eq!(detail.body["diskSizeMB"], 4096);
    let requested = json!({ "templateID": "large", "cpuCount": 4, "memoryMB": 1024 });
    let created = api.post("/v2/sandboxes", requested).await.expect(201);
    let detail = api.get(&format!("/sandboxes/{}", created.id())).await;
    let size = ["cpuCount", "memoryMB", "diskSizeMB"].map(|f| detail.body[f].as_u64().unwrap());
    assert_eq!(size, [4, 1024, 4096]);
    let snapshot = api
        .post(
            &format!("/sandboxes/{}/snapshots", created.id()),
            Value::Null,
        )
        .await;
    let id = snapshot.expect(201).text("snapshotID");
    let sized = json!({ "templateID": id, "cpuCount": 1 });
    api.post("/v2/sandboxes", sized).await.expect(400);
    api.post("/v2/sandboxes", json!({ "templateID": id }))
        .await
        .expect(201);
}

#[tokio::test]
async fn invalid_creates_are_refused_with_a_sentence() {
    let api = Api::new();
    let long = "x".repeat(9000);
    for bad in [
        json!({}),
        json!({ "templateID": 5 }),
        json!({ "templateID": null }),
        json!({ "templateID": "base", "timeout": -2 }),
        json!({ "templateID": "base", "timeout": 1e12 }),
        json!({ "templateID": "base", "timeout": "5" }),
        json!({ "templateID": "base", "cpuCount": 9 }),
        json!({ "templateID": "base", "memoryMB": 1 }),
        json!({ "templateID": "base", "metadata": { "a": 1 } }),
        json!({ "templateID": "base", "metadata": { "a": long } }),
        json!({ "templateID": "base", "metadata": { "host-mount": "[]" } }),
        json!({ "templateID": "base", "envVars": { "A=B": "c" } }),
        json!({ "templateID": "base", "envVars": { "": "c" } }),
        json!({ "templateID": "base", "envVars": { "A": "\u{0}" } }),
        json!({ "templateID": "base", "iam": { "tokens": { "a": { "audience": "b" } } } }),
        json!({ "templateID": "base", "iam": { "roles": {} } }),
        json!({ "templateID": "base", "hostLabels": { "zone": "a" } }),
        json!({ "templateID": "base", "distributionScope": vec!["h1"; 17] }),
        json!({ "templateID": "base", "distributionScope": [""] }),
        json!({ "templateID": "base", "autoPause": true, "autoPauseMemory": false }),
        json!({ "templateID": "base", "network": { "denyOut": ["example.com"] } }),
        json!({ "templateID": "base", "network": [] }),
        json!({ "templateID": "base", "lifecycle": { "onTimeout": "sleep" } }),
    ] {
        for path in ["/v2/sandboxes", "/sandboxes"] {
            let refused = api.post(path, bad.clone()).await.expect(400);
            assert!(refused.text("message").len() > 15, "{}", refused.body);
        }
    }
    assert!(api.host.list().is_empty());
}

#[tokio::test]
async fn an_unknown_template_of_any_name_is_404() {
    let api = Api::new();
    for name in [
        "nope",
        "../../etc",
        "/etc/passwd",
        "",
        "base:v2",
        "team/base",
        "a\u{0}b",
        ".",
    ] {
        let refused = api
            .post("/v2/sandboxes", json!({ "templateID": name }))
            .await;
        assert_eq!(refused.expect_error(404), "template_not_found", "{name}");
    }
    for name in ["base:latest", "base:default"] {
        api.post("/v2/sandboxes", json!({ "templateID": name }))
            .await
            .expect(201);
    }
}

#[tokio::test]
async fn details_of_internal_errors_are_shown_to_the_host_only() {
    let api = Api::new();
    let (tenant, _) = api.key(jiffy_api::Scope::Create, jiffy_api::Limits::default());
    let body = json!({ "templateID": "damaged" });
    let reported = api.post("/v2/sandboxes", body.clone()).await.expect(500);
    assert!(reported.text("message").contains("/secret/path"));
    let reported = api
        .call_as(&tenant, "POST", "/v2/sandboxes", body)
        .await
        .expect(500);
    assert!(!reported.body.to_string().contains("secret"));
    api.bench.world.fail("assign");
    api.post("/v2/sandboxes", json!({ "templateID": "base" }))
        .await
        .expect(500);
    assert!(api.host.list().is_empty());
}

/// Returns a create with an idempotency key.
fn keyed(api: &Api, key: &str, body: &Value) -> Request<Body> {
    let TestCaller::Key(admin) = &api.admin else {
        panic!()
    };
    Request::post("/v2/sandboxes")
        .header("x-api-key", admin)
        .header("content-type", "application/json")
        .header("idempotency-key", key)
        .body(Body::from(body.to_string()))
        .unwrap()
}

#[tokio::test]
async fn a_repeated_create_gets_the_same_response() {
    let api = Api::new();
    let body = json!({ "templateID": "base" });
    let send = || api.send(keyed(&api, "k-1", &body));
    // Concurrent requests and a later request with the same key create one sandbox.
    let (a, b) = tokio::join!(send(), send());
    let c = send().await.expect(201);
    assert_eq!((a.expect(201).id(), b.expect(201).id()), (c.id(), c.id()));
    assert_eq!(api.host.list().len(), 1);
    let other = api.send(keyed(&api, "k-2", &body)).await.expect(201);
    assert_ne!(other.id(), c.id());
    let reused = api
        .send(keyed(&api, "k-1", &json!({ "templateID": "large" })))
        .await;
    assert_eq!(reused.header("should-retry"), Some("false"));
    assert_eq!(reused.expect_error(422), "idempotency_key_reused");
    for bad in ["UPPER", "under_score", "", &"x".repeat(256)] {
        api.send(keyed(&api, bad, &body)).await.expect(400);
    }
}

#[tokio::test]
async fn a_create_that_failed_may_be_tried_again_with_its_key() {
    let api = Api::new();
    let body = json!({ "templateID": "base" });
    api.bench.world.fail("boot");
    api.send(keyed(&api, "k", &body)).await.expect(500);
    api.bench.world.clear_failures();
    api.send(keyed(&api, "k", &body)).await.expect(201);
    assert_eq!(api.host.list().len(), 1);
}

#[tokio::test]
async fn a_create_with_a_key_continues_when_its_client_disconnects() {
    let api = Api::new();
    let body = json!({ "templateID": "base" });
    api.bench.world.hang("boot");
    let disconnected = tokio::time::timeout(
        std::time::Duration::from_millis(50),
        api.send(keyed(&api, "k", &body)),
    );
    assert!(disconnected.await.is_err());
    // The first request is still in flight.
    let again = tokio::time::timeout(
        std::time::Duration::from_millis(50),
        api.send(keyed(&api, "k", &body)),
    );
    assert!(again.await.is_err());
    assert_eq!(*api.bench.world.boots.lock().unwrap(), 1);
    assert!(
        api.host
            .list()
            .iter()
            .all(|r| *r.state() == SandboxState::Creating)
    );
}

#[tokio::test]
async fn authorities_and_a_proxy_are_validated_inherited_and_never_shown() {
    let api = Api::new();
    let pem = include_str!("../../../sandbox-manager/src/site/company.pem");
    let body = json!({
        "templateID": "base", "caCertificates": format!("a comment\n{pem}"),
        "proxy": { "url": "http://me:secret@proxy:3128", "noProxy": ".corp" },
    });
    let created = api.post("/v2/sandboxes", body).await.expect(201);
    let site = |id: &str| api.host.get(id).unwrap().settings().site.clone();
    let retained = site(&created.id());
    assert_eq!(retained.authorities[0].pem, pem);
    assert_eq!(retained.proxy.as_ref().unwrap().no_proxy, ".corp");
    let path = format!("/sandboxes/{}", created.id());
    let taken = api.post(&format!("{path}/snapshots"), json!({})).await;
    let taken = taken.expect(201);
    let from = json!({ "templateID": taken.text("snapshotID") });
    let copy = api.post("/v2/sandboxes", from).await.expect(201);
    assert_eq!(site(&copy.id()), retained);
    let children = api
        .post(&format!("{path}/fork"), json!({}))
        .await
        .expect(201);
    let child = children.body[0]["sandbox"]["sandboxID"].as_str().unwrap();
    assert_eq!(site(child), retained);
    let shown = [
        created.body.to_string(),
        taken.body.to_string(),
        api.get(&path).await.expect(200).body.to_string(),
        api.get("/v2/sandboxes").await.expect(200).body.to_string(),
    ];
    for text in shown {
        assert!(
            !text.contains("BEGIN") && !text.contains("secret"),
            "{text}"
        );
    }
    let long = pem.repeat(100);
    for (field, value, reason) in [
        (
            "caCertificates",
            json!("no certificate"),
            "contains no certificate",
        ),
        ("caCertificates", json!(long), "exceed the limit"),
        (
            "proxy",
            json!({ "url": "ftp://me:secret@x" }),
            "is not a proxy URL",
        ),
        (
            "proxy",
            json!({ "url": "http://x", "noProxy": "a b" }),
            "host for direct connections",
        ),
    ] {
        let body = json!({ "templateID": "base", field: value });
        let refused = api.post("/v2/sandboxes", body).await.expect(400);
        let text = refused.body.to_string();
        assert!(text.contains(reason) && !text.contains("secret"), "{text}");
    }
}
