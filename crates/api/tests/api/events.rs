//! Events: pages, streams, visibility and E2B's form.

use crate::support;

use axum::body::{Body, BodyDataStream};
use axum::http::Request;
use futures_core::Stream;
use jiffy_api::{Limits, Scope};
use jiffy_api_types::EventType;
use jiffy_event_log::{Event, EventFeed, Retention};
use jiffy_sandbox_manager::HostOptions;
use serde_json::{Value, json};
use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;
use support::{Answer, Api, TestCaller};
use tower::ServiceExt;

/// Time limit for a message of a stream.
const LIMIT: Duration = Duration::from_secs(10);

/// Stream of events.
struct Following {
    body: BodyDataStream,
    text: String,
}

impl Following {
    /// Opens a stream, which resumes after the event `last`.
    async fn open(api: &Api, caller: &TestCaller, path: &str, last: Option<&str>) -> Self {
        let mut request = Request::builder()
            .uri(path)
            .header("accept", "text/event-stream");
        if let TestCaller::Key(key) = caller {
            request = request.header("x-api-key", key);
        }
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        let request = request.body(Body::empty()).unwrap();
        let response = api.router.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let mut following = Self {
            body: response.into_body().into_data_stream(),
            text: String::new(),
        };
        // The stream is open when its first message has arrived.
        following.read().await;
        following
    }

    /// Reads the next part of the stream. Returns false at its end.
    async fn read(&mut self) -> bool {
        let next = poll_fn(|context| Pin::new(&mut self.body).poll_next(context));
        let next = tokio::time::timeout(LIMIT, next).await.unwrap();
        let Some(chunk) = next else { return false };
        self.text += std::str::from_utf8(&chunk.unwrap()).unwrap();
        true
    }

    /// Returns the name and the data of the next event. `None` at the end of the stream.
    async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some((message, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| {
                    let lines = message.lines().filter_map(|line| line.strip_prefix(name));
                    lines.map(str::to_owned).next()
                };
                let event = field("event: ").zip(field("data: "));
                self.text = rest.to_owned();
                if let Some((name, data)) = event {
                    return Some((name, serde_json::from_str(&data).unwrap()));
                }
                continue;
            }
            if !self.read().await {
                return None;
            }
        }
    }
}

impl Api {
    /// Creates a control plane whose event log has these limits. Also returns the directory of the
    /// log.
    fn with_feed(retention: Retention) -> (Self, tempfile::TempDir) {
        let directory = tempfile::tempdir().unwrap();
        let options = HostOptions {
            events: EventFeed::open(directory.path(), None, retention).unwrap(),
            ..HostOptions::default()
        };
        (Self::with_options(options, |app| app), directory)
    }
}

/// Returns limits of a log that suffice for most tests.
fn retention() -> Retention {
    Retention {
        max_bytes: 256 << 10,
        max_age: Duration::from_secs(3600),
    }
}

/// Returns the types of the events of a page.
fn types(answer: &Answer) -> Vec<String> {
    let events = answer.body["events"].as_array().unwrap();
    let text = |event: &Value| event["type"].as_str().unwrap().to_owned();
    events.iter().map(text).collect()
}

async fn get(api: &Api, caller: &TestCaller, path: &str) -> Answer {
    api.call_as(caller, "GET", path, Value::Null).await
}

#[tokio::test]
async fn a_key_sees_the_events_of_its_objects_only_and_an_administrator_sees_all() {
    let api = Api::new();
    let (alice, alice_key) = api.key(Scope::Create, Limits::default());
    let (mallory, _) = api.key(Scope::Create, Limits::default());
    let (reader, _) = api.key(Scope::Read, Limits::default());
    let id = api.sandbox_of(&alice).await;
    let path = format!("/sandboxes/{id}");
    api.call_as(&api.admin, "DELETE", &path, Value::Null)
        .await
        .expect(204);
    let own = get(&api, &alice, "/events").await.expect(200);
    assert_eq!(
        types(&own),
        ["sandbox.created", "sandbox.ready", "sandbox.killed"]
    );
    let events = own.body["events"].as_array().unwrap();
    assert_eq!(events[0]["caller"], json!(alice_key.key.id));
    // The key learns that an administrator acted, but not which.
    assert_eq!(events[2]["caller"], "administrator");
    assert!(events[2].get("requestID").is_none());
    for path in [
        "/events",
        "/events?order=desc",
        "/events?types=sandbox.killed",
    ] {
        let other = get(&api, &mallory, path).await.expect(200);
        assert_eq!(types(&other), [""; 0], "{path}");
    }
    let foreign = format!("/events?sandboxID={id}");
    assert_eq!(
        types(&get(&api, &mallory, &foreign).await.expect(200)),
        [""; 0]
    );
    assert_eq!(
        types(&get(&api, &api.admin, &foreign).await.expect(200)).len(),
        3
    );
    // A reader sees all events with short ids, and selects by them.
    let short = format!("/events?sandboxID={}", &id[..10]);
    let read = get(&api, &reader, &short).await.expect(200);
    assert_eq!(types(&read).len(), 3);
    assert!(!read.body.to_string().contains(&id));
}

#[tokio::test]
async fn pages_continue_after_their_last_event_in_both_orders() {
    let api = Api::new();
    for _ in 0..3 {
        api.sandbox().await;
    }
    for (order, parameter) in [("asc", "after"), ("desc", "before")] {
        let mut seen = Vec::new();
        let mut path = format!("/events?limit=2&order={order}");
        loop {
            let page = api.get(&path).await.expect(200);
            let events = page.body["events"].as_array().unwrap();
            seen.extend(events.iter().map(|e| e["id"].as_str().unwrap().to_owned()));
            if page.body["more"] == false {
                break;
            }
            path = format!(
                "/events?limit=2&order={order}&{parameter}={}",
                page.text("next")
            );
        }
        // Each of the three sandboxes has two events.
        assert_eq!(seen.len(), 6);
        if order == "desc" {
            seen.reverse();
        }
        assert!(seen.is_sorted_by(|a, b| a < b), "{seen:?}");
    }
    for bad in [
        "after=x",
        "before=1-2",
        "types=nope",
        "limit=0",
        "wait=99",
        "since=now",
    ] {
        let refused = api.get(&format!("/events?{bad}")).await;
        assert_eq!(refused.expect_error(400), "invalid_request", "{bad}");
    }
}

#[tokio::test]
async fn a_waiting_request_answers_with_the_next_event() {
    let api = Api::new();
    let next = api.get("/events").await.expect(200).body["next"].clone();
    assert_eq!(next, Value::Null);
    api.sandbox().await;
    let next = api.get("/events").await.expect(200).text("next");
    let path = format!("/events?wait=10&after={next}");
    let (page, _) = tokio::join!(api.get(&path), async {
        tokio::task::yield_now().await;
        api.sandbox().await
    });
    assert_eq!(types(&page.expect(200))[0], "sandbox.created");
}

#[tokio::test]
async fn a_stream_follows_and_resumes_after_the_last_event_of_the_client() {
    let (api, _directory) = Api::with_feed(retention());
    let (alice, _) = api.key(Scope::Create, Limits::default());
    let (mallory, _) = api.key(Scope::Create, Limits::default());
    let mut stream = Following::open(&api, &alice, "/events", None).await;
    let mut other = Following::open(&api, &mallory, "/events?types=sandbox.ready", None).await;
    let id = api.sandbox_of(&alice).await;
    let (name, created) = stream.next().await.unwrap();
    assert_eq!(
        (&*name, &created["sandboxID"]),
        ("sandbox.created", &json!(id))
    );
    drop(stream);
    let last = created["id"].as_str().unwrap();
    let mut resumed = Following::open(&api, &alice, "/events", Some(last)).await;
    assert_eq!(resumed.next().await.unwrap().0, "sandbox.ready");
    // The first event of another key's stream is its own.
    let own = api.sandbox_of(&mallory).await;
    let (_, ready) = other.next().await.unwrap();
    assert_eq!(ready["sandboxID"], json!(own));
    let request = Request::builder()
        .uri("/events")
        .header("accept", "text/event-stream")
        .header("last-event-id", "nonsense");
    let TestCaller::Key(key) = &alice else {
        unreachable!()
    };
    let request = request
        .header("x-api-key", key)
        .body(Body::empty())
        .unwrap();
    assert_eq!(api.send(request).await.expect_error(400), "invalid_request");
}

#[tokio::test]
async fn a_stream_that_cannot_resume_reports_a_gap() {
    let (api, _directory) = Api::with_feed(Retention {
        max_bytes: 64 << 10,
        ..retention()
    });
    let (alice, key) = api.key(Scope::Create, Limits::default());
    let id = api.sandbox_of(&alice).await;
    let first = get(&api, &alice, "/events").await.expect(200);
    let first = first.body["events"][0]["id"].as_str().unwrap().to_owned();
    // Record more events than the memory and the file of the feed retain.
    for _ in 0..1100 {
        let renamed = Event {
            owner: Some(key.key.id.clone()),
            sandbox: Some(id.clone()),
            ..Event::new(EventType::SandboxRenamed)
        };
        api.host.events().append(renamed.because(&"x".repeat(300)));
    }
    let mut stream = Following::open(&api, &alice, "/events", Some(&first)).await;
    let (name, gap) = stream.next().await.unwrap();
    assert_eq!(name, "gap");
    assert!(gap["until"].is_string());
    // The number would disclose events of other keys.
    assert!(gap.get("count").is_none(), "{gap}");
    assert_eq!(stream.next().await.unwrap().0, "sandbox.renamed");
    let all = api.get("/events").await.expect(200);
    assert!(all.body["dropped"]["count"].as_u64().unwrap() > 0);
    // An id that this host has not assigned: the log was removed.
    let host = first.split_once('-').unwrap().1;
    let later = format!("ffffffffffffff-{host}");
    let mut stream = Following::open(&api, &alice, "/events", Some(&later)).await;
    assert_eq!(stream.next().await.unwrap().0, "gap");
}

#[tokio::test]
async fn a_stream_ends_with_the_revocation_of_its_key() {
    let api = Api::new();
    let (alice, key) = api.key(Scope::Create, Limits::default());
    let mut stream = Following::open(&api, &alice, "/events", None).await;
    api.keys.revoke(&key.key.id).unwrap();
    assert_eq!(stream.next().await, None);
}

#[tokio::test]
async fn keys_have_events_that_administrators_see() {
    let api = Api::new();
    let created = api.post("/keys", json!({ "name": "ci" })).await.expect(201);
    let id = created.body["key"]["keyID"].as_str().unwrap().to_owned();
    let path = format!("/keys/{id}/revoke");
    api.post(&path, json!({})).await.expect(200);
    // A second revocation is no event.
    api.post(&path, json!({})).await;
    let page = api
        .get("/events?types=key.created,key.revoked")
        .await
        .expect(200);
    assert_eq!(types(&page), ["key.created", "key.revoked"]);
    assert_eq!(page.body["events"][0]["keyID"], json!(id));
    assert_eq!(page.body["events"][0]["name"], "ci");
}

#[tokio::test]
async fn events_have_the_form_and_the_types_of_e2b() {
    let api = Api::new();
    let (alice, _) = api.key(Scope::Create, Limits::default());
    let (mallory, _) = api.key(Scope::Create, Limits::default());
    let id = api.sandbox_of(&alice).await;
    let path = |call: &str| format!("/sandboxes/{id}/{call}");
    api.call_as(&alice, "POST", &path("timeout"), json!({ "timeout": 600 }))
        .await
        .expect(204);
    api.call_as(&alice, "POST", &path("snapshots"), json!({}))
        .await
        .expect(201);
    api.call_as(&alice, "POST", &path("pause"), Value::Null)
        .await
        .expect(204);
    api.call_as(&alice, "POST", &path("resume"), json!({}))
        .await
        .expect(201);
    let one = format!("/sandboxes/{id}");
    api.call_as(&alice, "DELETE", &one, Value::Null)
        .await
        .expect(204);
    let list = format!("/events/sandboxes/{id}?orderAsc=true");
    let events = get(&api, &alice, &list).await.expect(200);
    let kinds: Vec<_> = events
        .items()
        .iter()
        .map(|e| e["type"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds,
        [
            "sandbox.lifecycle.created",
            "sandbox.lifecycle.updated",
            "sandbox.lifecycle.checkpointed",
            "sandbox.lifecycle.paused",
            "sandbox.lifecycle.resumed",
            "sandbox.lifecycle.killed",
        ]
    );
    let updated = &events.items()[1];
    assert_eq!(updated["sandboxId"], json!(id));
    assert_eq!(updated["sandboxTemplateId"], "base");
    assert!(updated["eventData"]["set_timeout"].is_string());
    let newest = get(&api, &alice, "/events/sandboxes?limit=2&offset=1")
        .await
        .expect(200);
    let kinds: Vec<_> = newest
        .items()
        .iter()
        .map(|e| e["type"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds,
        ["sandbox.lifecycle.resumed", "sandbox.lifecycle.paused"]
    );
    let paths = "/events/sandboxes?types=sandbox.lifecycle.paused,sandbox.lifecycle.killed";
    assert_eq!(get(&api, &alice, paths).await.expect(200).items().len(), 2);
    assert_eq!(
        get(&api, &mallory, "/events/sandboxes")
            .await
            .expect(200)
            .items()
            .len(),
        0
    );
    let foreign = get(&api, &mallory, &format!("/events/sandboxes/{id}")).await;
    assert_eq!(foreign.expect_error(404), "sandbox_not_found");
    // The events of a removed sandbox remain.
    api.host.remove(&id).await.unwrap();
    let events = get(&api, &alice, &format!("/events/sandboxes/{id}"))
        .await
        .expect(200);
    assert_eq!(events.items().len(), 6);
}
