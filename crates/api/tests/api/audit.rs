//! Audit log: callers, results and floods of rejected calls.

use crate::support;

use axum::body::Body;
use axum::http::Request;
use jiffy_api::{Caller, ClientAddress, ConsoleSession, Limits, Scope, TerminalAudit};
use jiffy_event_log::{AuditLog, Retention};
use serde_json::{Value, json};
use std::net::IpAddr;
use std::time::Duration;
use support::{Answer, Api, TestCaller};
use tower::ServiceExt;

/// Address of a client.
const ADDRESS: &str = "192.0.2.7";

/// Returns a control plane with an audit log, and the directory of the log.
fn audited() -> (Api, AuditLog, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let retention = Retention {
        max_bytes: 1 << 20,
        max_age: Duration::from_secs(3600),
    };
    let log = AuditLog::open(directory.path(), None, retention).unwrap();
    let recorded = log.clone();
    (Api::with(|app| app.with_audit(recorded)), log, directory)
}

/// Returns the recorded calls except reads of the log itself, oldest first.
async fn entries(api: &Api, query: &str) -> Vec<Value> {
    let answer = api.get(&format!("/audit?limit=1000&{query}")).await;
    let entries = answer.expect(200).body["entries"].clone();
    let Value::Array(mut entries) = entries else {
        unreachable!()
    };
    entries.retain(|entry| entry["call"] != "GET /audit");
    entries
}

#[tokio::test]
async fn each_call_is_recorded_with_its_caller_object_and_result() {
    let (api, _, _directory) = audited();
    let (alice, key) = api.key(Scope::Create, Limits::default());
    let (mallory, other) = api.key(Scope::Create, Limits::default());
    let (reader, _) = api.key(Scope::Read, Limits::default());
    let body = json!({ "templateID": "base", "envVars": { "SECRET": "hidden" } });
    let id = api
        .call_as(&alice, "POST", "/v2/sandboxes", body)
        .await
        .expect(201)
        .id();
    let path = format!("/sandboxes/{id}/pause");
    api.call_as(&mallory, "POST", &path, Value::Null)
        .await
        .expect(404);
    api.call_as(&reader, "POST", &path, Value::Null)
        .await
        .expect(403);
    api.call_as(&TestCaller::Nobody, "POST", &path, Value::Null)
        .await
        .expect(401);
    api.call_as(&alice, "POST", &path, Value::Null)
        .await
        .expect(204);
    let all = entries(&api, "").await;
    let fields = |entry: &Value| {
        (
            entry["caller"].as_str().unwrap().to_owned(),
            entry["call"].as_str().unwrap().to_owned(),
            entry["status"].as_u64().unwrap(),
            entry["error_code"].as_str().unwrap_or("").to_owned(),
        )
    };
    let pause = "POST /sandboxes/{sandboxID}/pause";
    let expected = [
        ("key", "POST /v2/sandboxes", 201, ""),
        ("key", pause, 404, "sandbox_not_found"),
        ("key", pause, 403, "forbidden"),
        ("unknown", pause, 401, "unauthenticated"),
        ("key", pause, 204, ""),
    ]
    .map(|(caller, call, status, error)| {
        (caller.to_owned(), call.to_owned(), status, error.to_owned())
    });
    assert_eq!(all.iter().map(fields).collect::<Vec<_>>(), expected);
    assert_eq!(all[0]["keyID"], json!(key.key.id));
    assert_eq!(all[1]["keyID"], json!(other.key.id));
    // The call that created the sandbox names it too.
    assert!(all.iter().all(|entry| entry["sandboxID"] == json!(id)));
    // Bodies and values are not recorded.
    assert!(!json!(all).to_string().contains("hidden"));
    let of_key = entries(&api, &format!("keyID={}", key.key.id)).await;
    assert_eq!(of_key.len(), 2);
    assert_eq!(entries(&api, "rejected=true").await.len(), 3);
    assert_eq!(entries(&api, &format!("sandboxID={id}")).await.len(), 5);
    assert_eq!(entries(&api, "call=/v2/sandboxes").await.len(), 1);
}

#[tokio::test]
async fn only_administrators_read_the_audit_log() {
    let (api, _, _directory) = audited();
    for scope in [Scope::Create, Scope::Read] {
        let (caller, _) = api.key(scope, Limits::default());
        let refused = api.call_as(&caller, "GET", "/audit", Value::Null).await;
        assert_eq!(refused.expect_error(403), "forbidden");
    }
    api.call_as(&TestCaller::Owner, "GET", "/audit", Value::Null)
        .await
        .expect(200);
    let without_log = Api::new();
    assert_eq!(
        without_log.get("/audit").await.expect_error(501),
        "unsupported"
    );
}

#[tokio::test]
async fn a_flood_of_rejected_calls_is_one_entry_with_a_count_and_its_address() {
    let (api, log, _directory) = audited();
    let address: IpAddr = ADDRESS.parse().unwrap();
    let knock = async || -> Answer {
        let request = Request::builder()
            .uri("/sandboxes")
            .header("x-api-key", "e2b_wrong")
            .extension(ClientAddress(address));
        api.send(request.body(Body::empty()).unwrap()).await
    };
    for _ in 0..200 {
        let status = knock().await.status;
        assert!(matches!(status, 401 | 429), "{status}");
    }
    let all_periods = true;
    log.write_counted(all_periods);
    let found = entries(&api, &format!("address={ADDRESS}")).await;
    // Per status and minute, five calls have entries of their own, and one entry counts the others:
    // six entries. The calls have the status 401, and 429 when the address is throttled. A minute
    // may end during the calls, which adds a third combination of status and minute. The limit
    // leaves a margin above these 18 entries.
    assert!(found.len() <= 22, "{}", found.len());
    let count: u64 = found
        .iter()
        .map(|entry| entry["count"].as_u64().unwrap())
        .sum();
    assert_eq!(count, 200);
    assert!(found.iter().all(|entry| entry["address"] == ADDRESS));
}

#[tokio::test]
async fn hostile_paths_and_headers_are_bounded_and_secrets_omitted() {
    let (api, _, _directory) = audited();
    let (_, key) = api.key(Scope::Create, Limits::default());
    let TestCaller::Key(admin) = api.admin.clone() else {
        unreachable!("the administrator has a key");
    };
    let path = format!("/sandboxes/{}", "a%0A".repeat(1000));
    let request = Request::builder()
        .uri(path)
        .header("x-api-key", &admin)
        .header("x-request-id", "r".repeat(10_000));
    let request = request.body(Body::empty()).unwrap();
    api.send(request).await.expect(404);
    // The secret instead of the id, and in a query.
    let revoke = format!("/keys/{}/revoke?secret={}", key.secret, key.secret);
    api.post(&revoke, json!({})).await.expect(404);
    let request = Request::builder()
        .method("M".repeat(10_000).as_str())
        .uri("/v2/sandboxes")
        .header("x-api-key", &admin)
        .body(Body::empty())
        .unwrap();
    let refused = api.router.clone().oneshot(request).await.unwrap();
    assert_eq!(refused.status(), 405);
    let all = entries(&api, "").await;
    assert_eq!(all.len(), 3, "{all:?}");
    // The maximum of 128 characters.
    assert_eq!(all[0]["sandboxID"], "a\n".repeat(64));
    assert_eq!(all[0]["requestID"], "r".repeat(128));
    // Only the prefix of a secret is recorded.
    assert_eq!(all[1]["object"], "e2b_");
    assert!(!json!(all).to_string().contains(&key.secret));
    // An unknown method is cut to 16 characters.
    assert_eq!(all[2]["call"], format!("{} /v2/sandboxes", "M".repeat(16)));
}

#[tokio::test]
async fn a_reader_that_follows_the_log_is_not_answered_by_its_own_reads() {
    let (api, log, _directory) = audited();
    api.get("/v2/sandboxes").await.expect(200);
    let next = api.get("/audit").await.expect(200).text("next");
    // The log has a later entry: the read of the administrator.
    let newest = log.newest();
    let idle = api.get(&format!("/audit?wait=1&after={next}")).await;
    let entries = idle.expect(200).body["entries"].clone();
    assert_eq!(entries.as_array().unwrap().len(), 1);
    assert_eq!(entries[0]["call"], "GET /audit");
    // The wait has ended by its limit of 1 s: reads of the log are returned, but do not end it. A
    // wait that has found no other call is not recorded.
    assert_eq!(log.newest(), newest);
    let follow = format!("/audit?wait=20&after={next}");
    let (followed, _) = tokio::join!(api.get(&follow), api.get("/v2/sandboxes"));
    let entries = followed.expect(200).body["entries"].clone();
    let calls: Vec<_> = entries.as_array().unwrap().iter().collect();
    assert!(
        calls
            .iter()
            .any(|entry| entry["call"] == "GET /v2/sandboxes")
    );
}

#[tokio::test]
async fn a_call_whose_client_has_gone_is_recorded() {
    let (api, _, _directory) = audited();
    let id = api.sandbox().await;
    let waiting = format!("/sandboxes/{id}/wait?for=paused&seconds=10");
    // The call is polled until it waits, and is then dropped.
    let call = api.get(&waiting);
    tokio::select! {
        biased;
        answer = call => unreachable!("{answer:?}"),
        () = std::future::ready(()) => {}
    }
    let all = entries(&api, "call=/wait").await;
    assert_eq!(all.len(), 1, "{all:?}");
    // The status of calls whose client has disconnected.
    assert_eq!(all[0]["status"], 499);
    assert_eq!(all[0]["caller"], "key");
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_on_files_of_a_volume_are_recorded_with_the_key_of_the_volume() {
    let (api, _, _directory) = audited();
    let (alice, key) = api.key(Scope::Create, Limits::default());
    let made = api.call_as(
        &alice,
        "POST",
        "/volumes",
        json!({ "name": "data", "sizeMB": 4 }),
    );
    let made = made.await.expect(201);
    let token = TestCaller::Key(made.text("token"));
    let path = format!("/volumecontent/{}/dir?path=/", made.text("volumeID"));
    for caller in [&token, &alice] {
        let list = api.call_as(caller, "GET", &path, Value::Null);
        list.await.expect(200);
    }
    let forged = TestCaller::Key("jiffy_volume_forged".to_owned());
    let list = api.call_as(&forged, "GET", &path, Value::Null);
    list.await.expect(401);
    let all = entries(&api, "").await;
    let calls = all
        .iter()
        .filter(|entry| entry["call"] == "GET /volumecontent/{volumeID}/dir");
    let callers = calls.map(|entry| (entry["caller"].clone(), entry["keyID"].clone()));
    let callers: Vec<_> = callers.collect();
    let expected = [
        (json!("token"), json!(key.key.id)),
        (json!("key"), json!(key.key.id)),
        (json!("unknown"), Value::Null),
    ];
    assert_eq!(callers, expected);
}

#[tokio::test]
async fn terminals_of_the_console_are_recorded_and_their_commands_only_if_enabled() {
    for has_commands in [false, true] {
        let (directory, mut shared) = (tempfile::tempdir().unwrap(), None);
        let retention = Retention {
            max_bytes: 1 << 20,
            max_age: Duration::from_secs(3600),
        };
        let log = AuditLog::open(directory.path(), None, retention).unwrap();
        let api = Api::with(|app| {
            let app = app.with_audit(log);
            let app = if has_commands {
                app.with_audited_commands()
            } else {
                app
            };
            shared = Some(app.clone());
            app
        });
        let app = shared.unwrap();
        let session = ConsoleSession("s".repeat(16));
        let from = ClientAddress(ADDRESS.parse().unwrap());
        let call = |call, status, error| TerminalAudit {
            call,
            sandbox: "abc".to_owned(),
            terminal: Some("t1".to_owned()),
            command: (call == "GET /live open").then(|| "sh -l".to_owned()),
            status,
            error,
        };
        for terminal in [
            call("GET /live open", 200, None),
            call("GET /live attach", 200, None),
            call("GET /live attach", 404, Some("sandbox_not_found")),
        ] {
            app.record_terminal(&Caller::Owner, &session, from, terminal);
        }
        let recorded = entries(&api, "sandboxID=abc").await;
        let seen: Vec<_> = recorded
            .iter()
            .map(|e| (e["call"].as_str().unwrap(), e["status"].as_u64().unwrap()))
            .collect();
        let expected = [
            ("GET /live open", 200),
            ("GET /live attach", 200),
            ("GET /live attach", 404),
        ];
        assert_eq!(seen, expected, "{recorded:?}");
        let command = if has_commands {
            json!("sh -l")
        } else {
            Value::Null
        };
        assert_eq!(recorded[0]["command"], command);
        assert_eq!(recorded[2]["error_code"], "sandbox_not_found");
        for entry in &recorded {
            assert_eq!(entry["caller"], "owner");
            assert_eq!(entry["sessionID"], "s".repeat(16));
            assert_eq!(
                (&entry["address"], &entry["object"]),
                (&json!(ADDRESS), &json!("t1"))
            );
        }
    }
}
