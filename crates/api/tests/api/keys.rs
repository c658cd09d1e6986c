//! Permissions and limits of keys.

use crate::support;

use axum::body::Body;
use axum::http::Request;
use jiffy_api::{AutoResume, Limits, ResumeError, Scope};
use jiffy_sandbox_manager::SandboxState;
use serde_json::{Value, json};
use support::{Api, TestCaller};

fn path(id: &str, call: &str) -> String {
    format!("/sandboxes/{id}/{call}")
}

#[tokio::test]
async fn a_key_is_accepted_in_either_header_until_it_is_revoked() {
    let api = Api::new();
    let (caller, created) = api.key(Scope::Create, Limits::default());
    let with = |name: &str, value: String| {
        let request = Request::get("/v2/sandboxes").header(name, value);
        api.send(request.body(Body::empty()).unwrap())
    };
    with("X-API-KEY", created.secret.clone()).await.expect(200);
    with("Authorization", format!("Bearer {}", created.secret))
        .await
        .expect(200);
    with("Authorization", format!("bearer  {}", created.secret))
        .await
        .expect(200);
    // No secret, another scheme, and a secret that is too long.
    for bad in [
        "",
        "Bearer",
        "Bearer ",
        "Basic abc",
        &format!("Bearer {}", "x".repeat(5000)),
    ] {
        with("Authorization", bad.to_owned()).await.expect(401);
    }
    api.keys.revoke(&created.key.id).unwrap();
    api.call_as(&caller, "GET", "/v2/sandboxes", Value::Null)
        .await
        .expect(401);
}

#[tokio::test]
async fn sandboxes_are_invisible_to_other_keys() {
    let api = Api::new();
    let (a, _) = api.key(Scope::Create, Limits::default());
    let (b, _) = api.key(Scope::Create, Limits::default());
    let id = api.sandbox_of(&a).await;
    assert!(
        api.call_as(&b, "GET", "/v2/sandboxes", Value::Null)
            .await
            .ids()
            .is_empty()
    );
    for call in [
        "logs",
        "connections",
        "metrics",
        "preview?port=1",
        "ports/1",
    ] {
        api.call_as(&b, "GET", &path(&id, call), Value::Null)
            .await
            .expect(404);
    }
    api.call_as(&b, "GET", &format!("/sandboxes/{id}"), Value::Null)
        .await
        .expect(404);
    api.call_as(&b, "DELETE", &format!("/sandboxes/{id}"), Value::Null)
        .await
        .expect(404);
    api.call_as(&b, "PUT", &path(&id, "network"), json!({}))
        .await
        .expect(404);
    let bodies = [
        ("pause", json!({})),
        ("resume", json!({})),
        ("connect", json!({})),
        ("timeout", json!({ "timeout": 1 })),
        ("refreshes", json!({})),
        ("snapshots", json!({})),
        ("fork", json!({})),
        ("promote", Value::Null),
        ("rollback", json!({ "snapshotID": "x" })),
    ];
    for (call, body) in bodies {
        api.call_as(&b, "POST", &path(&id, call), body)
            .await
            .expect(404);
    }
    // A prefix of an id is not accepted either.
    api.call_as(&a, "GET", &format!("/sandboxes/{}", &id[..10]), Value::Null)
        .await
        .expect(404);
    assert_eq!(
        api.get("/v2/sandboxes").await.ids(),
        std::slice::from_ref(&id),
        "admins see all"
    );
    api.call_as(
        &TestCaller::Owner,
        "GET",
        &format!("/sandboxes/{id}"),
        Value::Null,
    )
    .await
    .expect(200);
}

#[tokio::test]
async fn a_read_key_cannot_change_anything_or_read_secrets() {
    let api = Api::new();
    let (reader, _) = api.key(Scope::Read, Limits::default());
    let id = api.sandbox().await;
    let visible = api
        .call_as(&reader, "GET", &format!("/sandboxes/{id}"), Value::Null)
        .await;
    assert!(visible.expect(200).body["envdAccessToken"].is_null());
    let bodies = [
        (
            "POST",
            "/v2/sandboxes".to_owned(),
            json!({ "templateID": "base" }),
        ),
        ("POST", path(&id, "pause"), json!({})),
        ("POST", path(&id, "connect"), json!({})),
        ("DELETE", format!("/sandboxes/{id}"), Value::Null),
        ("PUT", path(&id, "network"), json!({})),
    ];
    for (method, path, body) in bodies {
        let refused = api.call_as(&reader, method, &path, body).await;
        assert_eq!(refused.expect_error(403), "forbidden");
    }
    let link = api
        .call_as(&reader, "GET", &path(&id, "preview?port=80"), Value::Null)
        .await;
    link.expect(403);
    api.get(&format!("/sandboxes/{id}")).await.expect(200);
}

fn limits(max_sandboxes: u32) -> Limits {
    Limits {
        max_sandboxes: Some(max_sandboxes),
        ..Limits::default()
    }
}

#[tokio::test]
async fn the_number_of_running_sandboxes_of_a_key_is_limited() {
    let api = Api::new();
    let (caller, _) = api.key(Scope::Create, limits(2));
    let first = api.sandbox_of(&caller).await;
    let second = api.sandbox_of(&caller).await;
    let body = json!({ "templateID": "base" });
    let refused = api.call_as(&caller, "POST", "/v2/sandboxes", body).await;
    assert_eq!(refused.header("should-retry"), Some("false"));
    assert_eq!(refused.expect_error(429), "max_sandboxes");
    let fork = api
        .call_as(&caller, "POST", &path(&first, "fork"), json!({}))
        .await;
    assert_eq!(fork.expect_error(429), "max_sandboxes");
    // A paused sandbox releases quota, and its resume is rejected while the quota is in use.
    api.call_as(&caller, "POST", &path(&first, "pause"), Value::Null)
        .await
        .expect(204);
    let third = api.sandbox_of(&caller).await;
    for call in ["connect", "resume"] {
        let wake = api
            .call_as(&caller, "POST", &path(&first, call), json!({}))
            .await;
        assert_eq!(wake.expect_error(429), "max_sandboxes");
    }
    for id in [second, third] {
        api.call_as(&caller, "DELETE", &format!("/sandboxes/{id}"), Value::Null)
            .await
            .expect(204);
    }
    api.call_as(&caller, "POST", &path(&first, "connect"), json!({}))
        .await
        .expect(200);
    // Other keys have separate quotas.
    api.sandbox().await;
}

#[tokio::test]
async fn concurrent_creates_fill_a_limit_exactly() {
    let api = Api::new();
    let (caller, _) = api.key(Scope::Create, limits(5));
    let body = json!({ "templateID": "base" });
    let one = || api.call_as(&caller, "POST", "/v2/sandboxes", body.clone());
    let (a, b, c, d) = tokio::join!(one(), one(), one(), one());
    let (e, f, g, h) = tokio::join!(one(), one(), one(), one());
    let answers = [a, b, c, d, e, f, g, h];
    let created = answers.iter().filter(|a| a.status == 201).count();
    assert_eq!((created, api.host.list().len()), (5, 5));
    // A sandbox and its two children fill a limit of three.
    let (caller, _) = api.key(Scope::Create, limits(3));
    let id = api.sandbox_of(&caller).await;
    let two = json!({ "count": 2 });
    api.call_as(&caller, "POST", &path(&id, "fork"), two)
        .await
        .expect(201);
}

#[tokio::test]
async fn processors_and_memory_of_a_key_are_limited_together() {
    let api = Api::new();
    let (caller, _) = api.key(
        Scope::Create,
        Limits {
            max_vcpus: Some(4),
            max_memory_mib: Some(1024),
            ..Limits::default()
        },
    );
    let ask = |cpus: u8, memory: u32| {
        let body = json!({ "templateID": "base", "cpuCount": cpus, "memoryMB": memory });
        api.call_as(&caller, "POST", "/v2/sandboxes", body)
    };
    ask(3, 512).await.expect(201);
    assert_eq!(ask(2, 128).await.expect_error(429), "max_vcpus");
    assert_eq!(ask(1, 513).await.expect_error(429), "max_memory");
    ask(1, 512).await.expect(201);
}

#[tokio::test]
async fn creates_per_minute_are_limited_with_a_retry_delay() {
    let api = Api::new();
    let (caller, _) = api.key(
        Scope::Create,
        Limits {
            creates_per_minute: Some(2),
            ..Limits::default()
        },
    );
    let id = api.sandbox_of(&caller).await;
    // More children than the limit permits in any minute: a retry does not help.
    let fork = api
        .call_as(&caller, "POST", &path(&id, "fork"), json!({ "count": 3 }))
        .await;
    assert_eq!(
        fork.header("should-retry"),
        Some("false"),
        "the count exceeds the limit"
    );
    assert_eq!(fork.expect_error(429), "creates_per_minute");
    api.call_as(&caller, "POST", &path(&id, "fork"), json!({}))
        .await
        .expect(201);
    let body = json!({ "templateID": "base" });
    let refused = api.call_as(&caller, "POST", "/v2/sandboxes", body).await;
    // The delay ends a minute after the first create.
    let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((55..=61).contains(&wait), "{wait}");
    assert_eq!(refused.header("should-retry"), Some("true"));
    assert_eq!(refused.expect_error(429), "creates_per_minute");
}

#[tokio::test]
async fn an_auto_resumed_sandbox_counts_for_its_key_once() {
    let mut auto_resume = None;
    let api = Api::with(|app| {
        auto_resume = Some(AutoResume::new(app.clone()));
        app
    });
    let auto_resume = auto_resume.unwrap();
    let (caller, key) = api.key(Scope::Create, limits(1));
    let sleeper = api.sandbox_of(&caller).await;
    api.call_as(&caller, "POST", &path(&sleeper, "pause"), Value::Null)
        .await
        .expect(204);
    let other = api.sandbox_of(&caller).await;
    let refused = auto_resume.ensure_running(&sleeper).await.unwrap_err();
    assert!(matches!(refused, ResumeError::Limit(_)), "{refused}");
    assert_eq!(
        *api.host.get(&sleeper).unwrap().state(),
        SandboxState::Paused
    );
    api.call_as(
        &caller,
        "DELETE",
        &format!("/sandboxes/{other}"),
        Value::Null,
    )
    .await
    .expect(204);
    // Concurrent requests reserve quota for one resume.
    let one = || auto_resume.ensure_running(&sleeper);
    let (a, b, c) = tokio::join!(one(), one(), one());
    assert!([a, b, c].iter().all(Result::is_ok));
    assert_eq!(
        *api.host.get(&sleeper).unwrap().state(),
        SandboxState::Running
    );
    // Without the key the sandbox belongs to the host's owner, who has no limits.
    api.call_as(&caller, "POST", &path(&sleeper, "pause"), Value::Null)
        .await
        .expect(204);
    let another = api.sandbox_of(&caller).await;
    api.keys.revoke(&key.key.id).unwrap();
    auto_resume.ensure_running(&sleeper).await.unwrap();
    assert_eq!(
        *api.host.get(&another).unwrap().state(),
        SandboxState::Running
    );
    assert!(auto_resume.ensure_running("nope").await.is_err());
}

#[tokio::test]
async fn keys_are_created_listed_and_rotated_by_administrators_only() {
    let api = Api::new();
    let (create, _) = api.key(Scope::Create, Limits::default());
    let (read, _) = api.key(Scope::Read, Limits::default());
    let body = json!({
        "name": "ci",
        "limits": { "sandboxes": 1, "diskMB": 512 },
        "expiresAt": "2099-01-01T00:00:00Z",
        "addresses": ["10.1.2.3/16"],
    });
    for caller in [&create, &read] {
        for (method, path) in [
            ("GET", "/keys"),
            ("POST", "/keys"),
            ("PATCH", "/keys/ci"),
            ("POST", "/keys/ci/rotate"),
        ] {
            let answer = api.call_as(caller, method, path, body.clone()).await;
            answer.expect(403);
        }
    }
    let created = api.post("/keys", body).await.expect(201).body;
    let key = &created["key"];
    assert_eq!(key["limits"], json!({ "sandboxes": 1, "diskMB": 512 }));
    // The address of the network replaces the address of a host in it.
    assert_eq!(key["addresses"], json!(["10.1.0.0/16"]));
    assert_eq!(
        (&key["name"], &key["scope"]),
        (&json!("ci"), &json!("create"))
    );
    let secret = created["secret"].as_str().unwrap();
    let from = Some([10, 1, 0, 1].into());
    assert!(api.keys.check(secret, from).unwrap().valid().is_some());

    // A rotation replaces the secret at once.
    let rotated = api
        .post("/keys/ci/rotate", Value::Null)
        .await
        .expect(200)
        .body;
    assert_eq!(rotated["key"]["keyID"], key["keyID"]);
    assert!(api.keys.check(secret, from).unwrap().valid().is_none());
    let secret = rotated["secret"].as_str().unwrap();
    assert!(api.keys.check(secret, from).unwrap().valid().is_some());

    // Limits are set and removed, and the others stay.
    let change = |body| api.patch("/keys/ci", body);
    let limits = json!({ "sandboxes": 3, "vcpus": 8 });
    let change_limits = json!({ "limits": limits, "removeLimits": ["diskMB"] });
    let changed = change(change_limits).await.expect(200).body;
    assert_eq!(
        (&changed["limits"], &changed["keyID"]),
        (&limits, &key["keyID"])
    );
    for bad in [
        json!({ "limits": { "sandboxes": -1 } }),
        json!({ "limits": { "idleTimeout": u64::MAX } }),
        json!({ "removeLimits": ["sandbox"] }),
    ] {
        change(bad).await.expect(400);
    }
    let nothing = api.patch("/keys/nothing", json!({})).await;
    assert_eq!(nothing.expect_error(404), "key_not_found");

    let revoke = format!("/keys/{}/revoke", key["keyID"].as_str().unwrap());
    let revoked = api.post(&revoke, json!({})).await.expect(200).body;
    // Only a fleet has hosts that may not confirm the revocation.
    assert!(revoked.get("unconfirmedHosts").is_none());
    let listed = api.get("/keys").await.expect(200).body;
    let listed = listed.as_array().unwrap();
    let found = listed.iter().find(|listed| listed["keyID"] == key["keyID"]);
    assert!(found.unwrap()["revokedAt"].is_string());
    assert!(listed.iter().all(|key| key.get("secret").is_none()));

    for bad in [
        json!({ "name": "" }),
        json!({ "name": "x".repeat(101) }),
        json!({ "scope": "owner" }),
        json!({ "expiresAt": "tomorrow" }),
        json!({ "expiresAt": "2001-01-01T00:00:00Z" }),
        json!({ "addresses": ["everywhere"] }),
        json!({ "limits": { "sandboxes": -1 } }),
    ] {
        api.post("/keys", bad).await.expect(400);
    }
    let nothing = api.post("/keys/nothing/rotate", json!({})).await;
    assert_eq!(nothing.expect_error(404), "key_not_found");
}
