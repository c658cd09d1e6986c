//! Expiry, address restrictions, the scope `read` and revocation of keys; throttling of failed
//! authentications.

use crate::support;

use axum::body::Body;
use axum::http::Request;
use jiffy_api::{App, ClientAddress, Config, Limits, NewKey, Scope, Validity, end_revoked, router};
use jiffy_sandbox_manager::SandboxState;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use support::{Answer, Api, FakeTemplates, TestCaller};

/// Calls on a sandbox, with valid bodies.
fn sandbox_calls(id: &str) -> Vec<(&'static str, String, Value)> {
    let of = |call: &str| format!("/sandboxes/{id}{call}");
    vec![
        ("GET", of(""), Value::Null),
        ("DELETE", of(""), Value::Null),
        ("POST", of("/connect"), json!({})),
        ("POST", format!("/v2{}", of("/connect")), json!({})),
        ("POST", of("/resume"), json!({})),
        ("POST", of("/pause"), json!({})),
        ("POST", of("/timeout"), json!({ "timeout": 1 })),
        ("POST", of("/refreshes"), json!({})),
        ("POST", of("/fork"), json!({})),
        ("POST", of("/promote"), Value::Null),
        ("POST", of("/rollback"), json!({ "snapshotID": "x" })),
        ("POST", of("/snapshots"), json!({ "name": "x" })),
        ("PUT", of("/network"), json!({})),
        ("GET", of("/metrics"), Value::Null),
        ("GET", of("/logs"), Value::Null),
        ("GET", format!("/v2{}", of("/logs")), Value::Null),
        ("GET", of("/connections"), Value::Null),
        ("GET", of("/preview?port=80"), Value::Null),
        ("GET", of("/process"), Value::Null),
        ("GET", of("/ports/80"), Value::Null),
        ("POST", of("/lease"), Value::Null),
        ("GET", format!("/snapshots?sandboxID={id}"), Value::Null),
        (
            "GET",
            format!("/sandboxes/metrics?sandbox_ids={id}"),
            Value::Null,
        ),
    ]
}

/// Calls on a snapshot, by id or name. `own` is the sandbox of the caller that is rolled back to
/// it.
fn snapshot_calls(id: &str, own: &str) -> Vec<(&'static str, String, Value)> {
    let rollback = json!({ "snapshotID": id });
    let create = json!({ "templateID": id });
    vec![
        ("GET", format!("/snapshots/{id}"), Value::Null),
        ("POST", format!("/snapshots/{id}/verify"), Value::Null),
        ("DELETE", format!("/templates/{id}"), Value::Null),
        ("GET", format!("/snapshots?name={id}"), Value::Null),
        ("POST", format!("/sandboxes/{own}/rollback"), rollback),
        ("POST", "/sandboxes".to_owned(), create.clone()),
        ("POST", "/v2/sandboxes".to_owned(), create),
    ]
}

#[tokio::test]
async fn foreign_ids_and_names_are_answered_like_unknown_ones() {
    let api = Api::new();
    let (alice, _) = api.key(Scope::Create, Limits::default());
    let (mallory, _) = api.key(Scope::Create, Limits::default());
    let (there, own) = (api.sandbox_of(&alice).await, api.sandbox_of(&mallory).await);
    let body = json!({ "name": "secret-name" });
    let path = format!("/sandboxes/{there}/snapshots");
    let taken = api.call_as(&alice, "POST", &path, body).await.expect(201);
    let snapshot = taken.text("snapshotID");
    let no_sandbox = "i2345672345672345672";
    let no_snapshot = "z2345672345672345672";
    let sandboxes = (
        there.as_str(),
        no_sandbox,
        sandbox_calls(&there),
        sandbox_calls(no_sandbox),
    );
    let by_id = (
        snapshot.as_str(),
        no_snapshot,
        snapshot_calls(&snapshot, &own),
        snapshot_calls(no_snapshot, &own),
    );
    let by_name = (
        "secret-name",
        "secret-word",
        snapshot_calls("secret-name", &own),
        snapshot_calls("secret-word", &own),
    );
    // Mallory gets the same answer for Alice's objects as for objects that do not exist.
    for (theirs, nothing, real, made_up) in [sandboxes, by_id, by_name] {
        for ((method, path, body), (_, other, other_body)) in real.into_iter().zip(made_up) {
            let real = api.call_as(&mallory, method, &path, body).await;
            let unknown = api.call_as(&mallory, method, &other, other_body).await;
            let without_id = |answer: &Answer, id: &str| answer.body.to_string().replace(id, "ID");
            assert_eq!(
                (real.status, without_id(&real, theirs)),
                (unknown.status, without_id(&unknown, nothing)),
                "{method} {path}"
            );
        }
    }
    let path = format!("/sandboxes/{there}");
    let untouched = api.call_as(&alice, "GET", &path, Value::Null).await;
    assert_eq!(untouched.expect(200).body["state"], "running");
}

#[tokio::test]
async fn a_sandbox_is_secure_by_default_in_either_version() {
    let api = Api::new();
    let make = |path: &'static str, secure: Option<bool>| {
        let mut body = json!({ "templateID": "base" });
        if let Some(secure) = secure {
            body["secure"] = json!(secure);
        }
        let api = &api;
        async move { api.post(path, body).await.expect(201) }
    };
    for secure in [None, Some(true)] {
        for path in ["/sandboxes", "/v2/sandboxes"] {
            let made = make(path, secure).await;
            assert_eq!(made.text("envdAccessToken").len(), 40, "{path} {secure:?}");
        }
    }
    let open = make("/sandboxes", Some(false)).await;
    assert!(open.body["envdAccessToken"].is_null());
}

#[tokio::test]
async fn responses_to_a_read_key_contain_no_link_to_a_port() {
    let api = Api::new();
    let (reader, _) = api.key(Scope::Read, Limits::default());
    let body = json!({
        "templateID": "base", "secure": false, "envVars": { "SECRET": "hunter2" },
    });
    let id = api.post("/sandboxes", body).await.expect(201).id();
    let path = format!("/sandboxes/{id}/fork");
    let child = api.post(&path, json!({})).await.expect(201);
    let child = child.body[0]["sandbox"]["sandboxID"]
        .as_str()
        .unwrap()
        .to_owned();
    let path = format!("/sandboxes/{id}/snapshots");
    api.post(&path, json!({})).await.expect(201);
    // Read-only callers are shown the first ten characters of ids.
    let short = &id[..10];
    let read = |path: String| {
        let (api, reader) = (&api, &reader);
        async move {
            api.call_as(reader, "GET", &path, Value::Null)
                .await
                .expect(200)
        }
    };
    for path in [
        "/sandboxes".to_owned(),
        "/v2/sandboxes?limit=1".to_owned(),
        "/v2/sandboxes".to_owned(),
        format!("/sandboxes/{short}"),
        format!("/sandboxes/{id}"),
        format!("/sandboxes/metrics?sandbox_ids={short}"),
        format!("/sandboxes/{short}/metrics"),
        format!("/sandboxes/{short}/logs"),
        "/snapshots".to_owned(),
        format!("/snapshots?sandboxID={short}"),
    ] {
        let answer = read(path.clone()).await;
        let next = answer.header("x-next-token").unwrap_or_default().to_owned();
        let next = base64_decoded(&next);
        for secret in [&id, &child, &"hunter2".to_owned()] {
            let text = answer.body.to_string();
            assert!(!text.contains(secret.as_str()), "{path}: {text}");
            assert!(!next.contains(secret.as_str()), "{path}: {next}");
        }
    }
    assert_eq!(read(format!("/sandboxes/{short}")).await.id(), short);
    let taken = read(format!("/snapshots?sandboxID={short}")).await;
    assert_eq!(taken.items().len(), 1);
    // A shorter prefix is rejected, and callers that know the complete id may not use a prefix.
    let path = format!("/sandboxes/{}", &id[..9]);
    api.call_as(&reader, "GET", &path, Value::Null)
        .await
        .expect(404);
    api.get(&format!("/sandboxes/{short}")).await.expect(404);
}

fn base64_decoded(text: &str) -> String {
    use base64::Engine;
    let bytes = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(text);
    String::from_utf8(bytes.unwrap()).unwrap()
}

impl Api {
    /// Lists sandboxes as a client with the address `ip` and the key `secret`.
    async fn from(&self, ip: &str, secret: Option<&str>) -> Answer {
        let address = ClientAddress(ip.parse().unwrap());
        let mut request = Request::get("/v2/sandboxes").extension(address);
        if let Some(secret) = secret {
            request = request.header("x-api-key", secret);
        }
        self.send(request.body(Body::empty()).unwrap()).await
    }

    fn key_within(&self, validity: &Validity) -> NewKey {
        let made = self
            .keys
            .create_within("x", Scope::Create, Limits::default(), validity);
        made.unwrap()
    }
}

/// Returns a secret that no key has.
fn wrong() -> String {
    format!("e2b_{}", "0".repeat(40))
}

#[tokio::test]
async fn only_an_address_that_guesses_keys_is_throttled() {
    let api = Api::new();
    let (_, made) = api.key(Scope::Create, Limits::default());
    let guesser = "192.0.2.1";
    let mut refused = 0;
    while api.from(guesser, Some(&wrong())).await.status == 401 {
        refused += 1;
        // An address is throttled after a burst of 100 failures. The test also accepts other
        // numbers of this order.
        assert!(refused <= 200, "the address is not throttled");
    }
    assert!(refused >= 20, "{refused}: throttled too early");
    let answer = api.from(guesser, Some(&wrong())).await;
    let wait: u64 = answer.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&wait));
    assert_eq!(answer.expect_error(429), "authentication_failures");
    let without = api.from(guesser, None).await;
    assert_eq!(without.expect_error(429), "authentication_failures");
    // Neither a key in force nor another address is affected.
    api.from(guesser, Some(&made.secret)).await.expect(200);
    api.from("192.0.2.2", Some(&wrong())).await.expect(401);
    let rotated = api.keys.rotate(&made.key.id, Duration::ZERO, None).unwrap();
    api.from(guesser, Some(&rotated.secret)).await.expect(200);
    // The old secret is wrong after the rotation, so the throttled address is rejected with it.
    let old = api.from(guesser, Some(&made.secret)).await;
    assert_eq!(old.expect_error(429), "authentication_failures");
    // An IPv6 network of 64 bits counts as one client.
    for n in 0..=refused {
        api.from(&format!("2001:db8::{n:x}"), None).await;
    }
    api.from("2001:db8::ffff:1", None).await.expect(429);
    api.from("2001:db8:0:1::1", None).await.expect(401);
}

#[tokio::test]
async fn a_key_is_rejected_after_its_expiry_and_from_other_addresses() {
    let api = Api::new();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let soon = now + Duration::from_millis(300);
    let brief = api.key_within(&Validity {
        expires_ms: Some(u64::try_from(soon.as_millis()).unwrap()),
        ..Validity::default()
    });
    api.from("192.0.2.1", Some(&brief.secret)).await.expect(200);
    let bound = api.key_within(&Validity {
        addresses: vec!["198.51.100.0/24".to_owned(), "2001:db8::/32".to_owned()],
        ..Validity::default()
    });
    let from = async |ip: &str| api.from(ip, Some(&bound.secret)).await;
    from("198.51.100.7").await.expect(200);
    from("2001:db8:1::1").await.expect(200);
    from("::ffff:198.51.100.7").await.expect(200);
    assert_eq!(
        from("192.0.2.1").await.expect_error(403),
        "address_not_allowed"
    );
    // Headers do not determine the client's address.
    let forged = Request::get("/v2/sandboxes")
        .extension(ClientAddress([192, 0, 2, 1].into()))
        .header("x-api-key", &bound.secret)
        .header("x-forwarded-for", "198.51.100.7")
        .header("forwarded", "for=198.51.100.7");
    let forged = api.send(forged.body(Body::empty()).unwrap()).await;
    assert_eq!(forged.expect_error(403), "address_not_allowed");
    // An unknown address is rejected, too.
    let who = TestCaller::Key(bound.secret.clone());
    let untold = api.call_as(&who, "GET", "/v2/sandboxes", Value::Null).await;
    untold.expect(403);
    while api
        .keys
        .check(&brief.secret, None)
        .unwrap()
        .valid()
        .is_some()
    {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let late = api.from("192.0.2.1", Some(&brief.secret)).await;
    assert_eq!(late.expect_error(401), "key_expired");
}

#[tokio::test]
async fn sandboxes_end_with_their_key() {
    let api = Api::new();
    let (alice, made) = api.key(Scope::Create, Limits::default());
    let (bob, _) = api.key(Scope::Create, Limits::default());
    let (running, paused) = (api.sandbox_of(&alice).await, api.sandbox_of(&alice).await);
    let others = api.sandbox_of(&bob).await;
    let path = format!("/sandboxes/{paused}/pause");
    api.call_as(&alice, "POST", &path, json!({}))
        .await
        .expect(204);
    let end = json!({ "end": true });
    let revoke = format!("/keys/{}/revoke", made.key.id);
    for (who, status) in [(&alice, 403), (&bob, 403), (&TestCaller::Nobody, 401)] {
        api.call_as(who, "POST", &revoke, end.clone())
            .await
            .expect(status);
    }
    // A key can be revoked first and its resources removed later.
    api.post(&revoke, json!({})).await.expect(200);
    assert_eq!(
        *api.host.get(&running).unwrap().state(),
        SandboxState::Running
    );
    // Without `end`, a key that is already revoked is not found.
    let again = api.post(&revoke, json!({})).await;
    assert_eq!(again.expect_error(404), "key_not_found");
    let ended = api.post(&revoke, end.clone()).await.expect(200);
    assert_eq!(ended.body["sandboxes"], 2, "{}", ended.body);
    for id in [running, paused] {
        assert_eq!(*api.host.get(&id).unwrap().state(), SandboxState::Killed);
    }
    assert_eq!(
        *api.host.get(&others).unwrap().state(),
        SandboxState::Running
    );
    let ended = api.post(&revoke, end.clone()).await.expect(200);
    assert_eq!(ended.body["sandboxes"], 0);
    let nothing = api.post("/keys/nothing/revoke", end).await;
    assert_eq!(nothing.expect_error(404), "key_not_found");
}

#[tokio::test]
async fn resources_of_a_key_revoked_without_a_daemon_are_removed_by_the_next_daemon() {
    let api = Api::new();
    let (alice, made) = api.key(Scope::Create, Limits::default());
    let before = api.sandbox_of(&alice).await;
    // Revoke the key in the database, as another process would.
    let command = jiffy_api::Keys::open(api.bench.dir.path()).unwrap();
    command.revoke_and_end(&made.key.id).unwrap();
    let templates = Arc::new(FakeTemplates::of(Vec::new()));
    let app = App::new(
        api.host.clone(),
        api.keys.clone(),
        templates,
        Config::default(),
    );
    let _serves = router(app.clone());
    let daemon = tokio::spawn(end_revoked(app));
    let killed = async |id: &str| {
        while *api.host.get(id).unwrap().state() != SandboxState::Killed {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let limit = Duration::from_secs(30);
    tokio::time::timeout(limit, killed(&before)).await.unwrap();
    // A sandbox whose creation was in flight is killed, too. Here, an existing sandbox gets the
    // revoked key as its owner.
    let late = api.sandbox().await;
    let owner = made.key.id.clone();
    let change =
        move |settings: &mut jiffy_sandbox_manager::SandboxSettings| settings.owner = Some(owner);
    api.host.change_settings(&late, change).await.unwrap();
    tokio::time::timeout(limit, killed(&late)).await.unwrap();
    daemon.abort();
}

#[tokio::test]
async fn links_end_with_their_key() {
    let api = Api::with_builder().await;
    let (alice, made) = api.key(Scope::Create, Limits::default());
    let body = json!({ "name": "mine" });
    let asked = api.call_as(&alice, "POST", "/v3/templates", body).await;
    let template = asked.expect(202).text("templateID");
    let path = format!("/templates/{template}/files/{}", "0f".repeat(32));
    let link = api.call_as(&alice, "GET", &path, Value::Null).await;
    let url = link.expect(201).text("url");
    let at = url.find("/templates/uploads/").unwrap();
    let put = || {
        let request = Request::put(&url[at..]);
        api.send(request.body(Body::from("files")).unwrap())
    };
    put().await.expect(200);
    api.keys.revoke(&made.key.id).unwrap();
    assert_eq!(put().await.expect_error(404), "upload_not_found");
    // Administrators get no links to the sandboxes of a revoked key either.
    let links = Arc::new(|id: &str, port: u16, _: u64| format!("http://{id}/{port}"));
    let api = Api::with(|app| app.with_preview(links));
    let (bob, made) = api.key(Scope::Create, Limits::default());
    let path = format!("/sandboxes/{}/preview?port=80", api.sandbox_of(&bob).await);
    api.get(&path).await.expect(200);
    api.keys.revoke(&made.key.id).unwrap();
    assert_eq!(api.get(&path).await.expect_error(409), "key_over");
}

#[tokio::test]
async fn builds_end_with_their_key() {
    let api = Api::with_builder().await;
    let (alice, made) = api.key(Scope::Create, Limits::default());
    let (bob, _) = api.key(Scope::Create, Limits::default());
    let mut builds = Vec::new();
    for who in [&alice, &bob] {
        let body = json!({ "name": "mine" });
        let asked = api.call_as(who, "POST", "/v3/templates", body).await;
        let asked = asked.expect(202);
        let (template, build) = (asked.text("templateID"), asked.text("buildID"));
        builds.push(format!("/templates/{template}/builds/{build}/status"));
    }
    let path = format!("/keys/{}/revoke", made.key.id);
    let ended = api.post(&path, json!({ "end": true })).await.expect(200);
    assert_eq!(
        (&ended.body["builds"], &ended.body["sandboxes"]),
        (&json!(1), &json!(0))
    );
    let status = async |path: &str| api.get(path).await.expect(200).text("status");
    assert_eq!(status(&builds[0]).await, "error");
    assert_eq!(status(&builds[1]).await, "waiting");
    let again = api.post(&path, json!({ "end": true })).await.expect(200);
    assert_eq!(again.body["builds"], 0);
}
