//! Delivery of events to a server in this process. A *webhook* is a URL to which events of the
//! sandboxes of an API key are posted. Each request is signed with a secret of the webhook.

#![allow(clippy::unwrap_used)]

use jiffy_api_types::{EventType, LifecycleEvent, LifecycleEventType, Moment};
use jiffy_event_log::{EntryId, Event, EventFeed};
use jiffy_secrets::HostKey;
use jiffy_webhooks::{
    Connect, Connecting, Connection, DeliveryState, NewWebhook, SharedWebhooks, StoredWebhook,
    WebhookError, WebhookUpdate, Webhooks,
};
use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use zeroize::Zeroizing;

/// API key that owns the webhooks.
const OWNER: &str = "ownerownerownerowner";
const SECRET: &str = "secret-of-signatures";

/// Connects to loopback for any host.
#[derive(Debug)]
struct Loopback;

impl Connect for Loopback {
    fn connect<'a>(&'a self, _host: &'a str, port: u16, _is_tls: bool) -> Connecting<'a> {
        Box::pin(async move {
            let stream = TcpStream::connect(("127.0.0.1", port)).await;
            let stream: Box<dyn Connection> = Box::new(stream.map_err(|e| e.to_string())?);
            Ok(stream)
        })
    }
}

/// Request of a delivery, and the sender of the status of its response.
struct Received {
    head: String,
    body: serde_json::Value,
    text: String,
    answer: tokio::sync::oneshot::Sender<u16>,
}

impl Received {
    fn header(&self, name: &str) -> &str {
        let prefix = format!("{name}: ");
        let mut lines = self.head.lines();
        lines.find_map(|line| line.strip_prefix(&prefix)).unwrap()
    }

    fn sandbox(&self) -> &str {
        self.body["sandboxId"].as_str().unwrap()
    }

    fn answer(self, status: u16) {
        self.answer.send(status).unwrap();
    }
}

/// Starts a server that passes each request on and waits for its status.
async fn server() -> (u16, mpsc::Receiver<Received>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, receiver) = mpsc::channel(64);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(serve(stream, sender.clone()));
        }
    });
    (port, receiver)
}

/// Receives a request, passes it to the test, and responds with the test's status.
async fn serve(mut stream: TcpStream, sender: mpsc::Sender<Received>) {
    let mut bytes = Vec::new();
    let (head, body) = loop {
        if stream.read_buf(&mut bytes).await.unwrap() == 0 {
            return;
        }
        let text = String::from_utf8_lossy(&bytes);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|l| l.strip_prefix("content-length: "));
            if body.len() == length.unwrap().parse::<usize>().unwrap() {
                break (head.to_owned(), body.to_owned());
            }
        }
    };
    let (answer, status) = tokio::sync::oneshot::channel();
    let received = Received {
        head,
        body: serde_json::from_str(&body).unwrap(),
        text: body,
        answer,
    };
    sender.send(received).await.ok().unwrap();
    if let Ok(status) = status.await {
        let response = format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\nlocation: /b\r\n\r\n");
        stream.write_all(response.as_bytes()).await.unwrap();
    }
}

/// Returns the form in which an event is posted. `None` for events that are not posted.
fn form(id: EntryId, event: Event) -> Option<LifecycleEvent> {
    let sandbox = event.sandbox.unwrap();
    Some(LifecycleEvent {
        version: "v2".to_owned(),
        id: id.to_string(),
        kind: LifecycleEventType::of(event.kind)?,
        event_data: None,
        sandbox_build_id: String::new(),
        sandbox_execution_id: sandbox.clone(),
        sandbox_id: sandbox,
        sandbox_team_id: String::new(),
        sandbox_template_id: String::new(),
        timestamp: Moment("2026-11-29T10:00:00Z".to_owned()),
    })
}

/// Returns an event of a sandbox. An empty owner is the owner of the host.
fn event(kind: EventType, owner: &str, sandbox: &str) -> Event {
    Event {
        owner: Some(owner.to_owned()).filter(|owner| !owner.is_empty()),
        sandbox: Some(sandbox.to_owned()),
        ..Event::new(kind)
    }
}

/// Returns a webhook for all events at the server.
fn new(port: u16) -> NewWebhook {
    NewWebhook {
        name: "hook".to_owned(),
        url: format!("http://hooks.example:{port}/events?a=b"),
        is_enabled: true,
        events: LifecycleEventType::NAMES.map(|(_, kind)| kind).to_vec(),
        secret: Zeroizing::new(SECRET.to_owned()),
    }
}

/// Opens the webhooks of a data directory, and starts their delivery.
fn start(home: &Path, feed: &EventFeed) -> (Webhooks, JoinHandle<()>) {
    let webhooks = Webhooks::open(home).unwrap();
    let run = webhooks.clone().run(feed.clone(), form, Arc::new(Loopback));
    (webhooks, tokio::spawn(run))
}

/// Returns the time of the newest event, in microseconds.
fn newest(feed: &EventFeed) -> u64 {
    feed.newest().map_or(0, |id| id.time_us)
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_the_owner_are_posted_with_a_signature_and_others_are_not() {
    let home = tempfile::tempdir().unwrap();
    let feed = EventFeed::in_memory();
    let (port, mut received) = server().await;
    let (webhooks, task) = start(home.path(), &feed);
    feed.append(event(EventType::SandboxReady, OWNER, "before"));
    let created = webhooks.create(OWNER, &new(port), newest(&feed)).unwrap();
    feed.append(event(EventType::SandboxReady, "anotherkeyanotherkey", "b"));
    feed.append(event(EventType::SandboxReady, "", "c"));
    // Webhooks report a new sandbox when it is ready, and not when it was requested.
    feed.append(event(EventType::SandboxCreated, OWNER, "d"));
    feed.append(event(EventType::SandboxKilled, OWNER, "e"));
    let one = received.recv().await.unwrap();
    assert_eq!(one.sandbox(), "e");
    assert_eq!(one.body["type"], "sandbox.lifecycle.killed");
    assert!(one.head.starts_with("POST /events?a=b HTTP/1.1\r\n"));
    assert_eq!(one.header("host"), format!("hooks.example:{port}"));
    assert_eq!(one.header("e2b-webhook-id"), created.id);
    assert_eq!(one.header("e2b-signature-version"), "v1");
    let expected = {
        use base64::Engine as _;
        use sha2::{Digest as _, Sha256};
        let digest = Sha256::digest(format!("{SECRET}{}", one.text));
        base64::engine::general_purpose::STANDARD_NO_PAD.encode(digest)
    };
    assert_eq!(one.header("e2b-signature"), expected);
    one.answer(204);
    // The next request is for the next event: a delivery that succeeded is not repeated.
    feed.append(event(EventType::SandboxPaused, OWNER, "e"));
    let two = received.recv().await.unwrap();
    assert_eq!(two.body["type"], "sandbox.lifecycle.paused");
    two.answer(200);
    task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_delivery_delays_its_sandbox_only_and_is_sent_again() {
    let home = tempfile::tempdir().unwrap();
    let feed = EventFeed::in_memory();
    let (port, mut received) = server().await;
    let (webhooks, task) = start(home.path(), &feed);
    let created = webhooks.create(OWNER, &new(port), newest(&feed)).unwrap();
    feed.append(event(EventType::SandboxReady, OWNER, "a"));
    feed.append(event(EventType::SandboxKilled, OWNER, "a"));
    feed.append(event(EventType::SandboxReady, OWNER, "b"));
    let mut order = Vec::new();
    let mut is_first_of_a = true;
    while order.len() < 4 {
        let one = received.recv().await.unwrap();
        let kind = one.body["type"].as_str().unwrap().rsplit('.').next();
        order.push(format!("{} {}", one.sandbox(), kind.unwrap()));
        // A redirect is a failure.
        let fails = one.sandbox() == "a" && std::mem::take(&mut is_first_of_a);
        one.answer(if fails { 302 } else { 200 });
    }
    let of_a: Vec<&str> = order
        .iter()
        .filter(|entry| entry.starts_with('a'))
        .map(String::as_str)
        .collect();
    assert_eq!(of_a, ["a created", "a created", "a killed"]);
    let pending = webhooks.deliveries(OWNER, &created.id, None, None, 10);
    // The last response may not be recorded yet.
    assert!(pending.unwrap().len() <= 1);
    task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_survive_a_restart_and_show_their_last_error() {
    let home = tempfile::tempdir().unwrap();
    let feed = EventFeed::in_memory();
    let (port, mut received) = server().await;
    let (webhooks, task) = start(home.path(), &feed);
    let created = webhooks.create(OWNER, &new(port), newest(&feed)).unwrap();
    feed.append(event(EventType::SandboxReady, OWNER, "a"));
    received.recv().await.unwrap().answer(500);
    let failed = loop {
        let found = webhooks.deliveries(OWNER, &created.id, None, None, 10);
        match found.unwrap().pop() {
            Some(found) if found.attempts > 0 => break found,
            _ => tokio::task::yield_now().await,
        }
    };
    assert_eq!(failed.error.as_deref(), Some("the server answered 500"));
    assert_eq!(failed.state, DeliveryState::Pending);
    assert!(failed.next_ms > Some(failed.created_ms));
    task.abort();
    drop(webhooks);
    feed.append(event(EventType::SandboxKilled, OWNER, "a"));
    let (webhooks, task) = start(home.path(), &feed);
    for kind in ["created", "killed"] {
        let again = received.recv().await.unwrap();
        assert_eq!(again.body["type"], format!("sandbox.lifecycle.{kind}"));
        again.answer(200);
    }
    assert_eq!(webhooks.list(OWNER).unwrap(), [created]);
    task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disabled_webhook_receives_nothing_and_no_earlier_events_later() {
    let home = tempfile::tempdir().unwrap();
    let feed = EventFeed::in_memory();
    let (port, mut received) = server().await;
    let (webhooks, task) = start(home.path(), &feed);
    let id = webhooks.create(OWNER, &new(port), 0).unwrap().id;
    let set = |is_enabled| {
        let update = WebhookUpdate {
            is_enabled: Some(is_enabled),
            ..WebhookUpdate::default()
        };
        let changed = webhooks.update(OWNER, &id, &update, newest(&feed));
        assert_eq!(changed.unwrap().is_enabled, is_enabled);
    };
    set(false);
    feed.append(event(EventType::SandboxReady, OWNER, "while-disabled"));
    set(true);
    feed.append(event(EventType::SandboxReady, OWNER, "after"));
    let one = received.recv().await.unwrap();
    assert_eq!(one.sandbox(), "after");
    one.answer(200);
    task.abort();
}

#[test]
fn webhooks_belong_to_one_owner_and_are_limited() {
    let home = tempfile::tempdir().unwrap();
    let webhooks = Webhooks::open(home.path()).unwrap();
    let first = webhooks.create(OWNER, &new(80), 0).unwrap();
    let other = "anotherkeyanotherkey";
    let update = WebhookUpdate::default();
    for refused in [
        webhooks.get(other, &first.id).map(drop),
        webhooks.update(other, &first.id, &update, 0).map(drop),
        webhooks.remove(other, &first.id),
        webhooks
            .deliveries(other, &first.id, None, None, 1)
            .map(drop),
    ] {
        assert!(matches!(refused, Err(WebhookError::Unknown(_))));
    }
    for _ in 1..jiffy_webhooks::MAX_WEBHOOKS {
        webhooks.create(OWNER, &new(80), 0).unwrap();
    }
    let full = webhooks.create(OWNER, &new(80), 0).unwrap_err();
    assert!(matches!(full, WebhookError::Full));
    webhooks.create(other, &new(80), 0).unwrap();
    webhooks.remove_all(OWNER).unwrap();
    assert!(webhooks.list(OWNER).unwrap().is_empty());
    assert_eq!(webhooks.list(other).unwrap().len(), 1);
    // The secret is not in the file.
    let stored = std::fs::read(home.path().join("webhooks.db")).unwrap();
    let log = std::fs::read(home.path().join("webhooks.db-wal")).unwrap_or_default();
    for bytes in [stored, log] {
        let has_secret = bytes.windows(SECRET.len()).any(|b| b == SECRET.as_bytes());
        assert!(!has_secret);
    }
}

/// Webhooks of a fleet, in the memory of this process.
#[derive(Debug)]
struct TestFleet {
    all: Mutex<Vec<StoredWebhook>>,
    number: watch::Sender<u64>,
}

impl TestFleet {
    fn change(&self, change: impl FnOnce(&mut Vec<StoredWebhook>)) {
        change(&mut self.all.lock());
        self.number.send_modify(|number| *number += 1);
    }

    /// Starts the webhooks of a host.
    fn start(self: &Arc<Self>, home: &Path, feed: &EventFeed) -> (Webhooks, JoinHandle<()>) {
        let key = HostKey::of_fleet(&[7; 32], home).unwrap();
        let webhooks = Webhooks::shared(home, key, 3, self.clone()).unwrap();
        let run = webhooks.clone().run(feed.clone(), form, Arc::new(Loopback));
        (webhooks, tokio::spawn(run))
    }
}

impl SharedWebhooks for TestFleet {
    fn all(&self) -> Result<Vec<StoredWebhook>, WebhookError> {
        Ok(self.all.lock().clone())
    }

    fn number(&self) -> watch::Receiver<u64> {
        self.number.subscribe()
    }

    fn create(&self, created: StoredWebhook) -> Result<(), WebhookError> {
        self.change(|all| all.push(created));
        Ok(())
    }

    fn replace(&self, changed: StoredWebhook) -> Result<(), WebhookError> {
        self.change(|all| {
            all.retain(|other| other.webhook.id != changed.webhook.id);
            all.push(changed);
        });
        Ok(())
    }

    fn remove(&self, ids: Vec<String>) -> Result<(), WebhookError> {
        self.change(|all| all.retain(|other| !ids.contains(&other.webhook.id)));
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_of_a_fleet_receives_the_events_of_all_hosts() {
    let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let feeds = [EventFeed::in_memory(), EventFeed::in_memory()];
    let (port, mut received) = server().await;
    let fleet = Arc::new(TestFleet {
        all: Mutex::default(),
        number: watch::Sender::new(1),
    });
    let (one, first) = fleet.start(homes[0].path(), &feeds[0]);
    let (two, second) = fleet.start(homes[1].path(), &feeds[1]);
    feeds[1].append(event(EventType::SandboxReady, OWNER, "before"));
    let created = one.create(OWNER, &new(port), newest(&feeds[0])).unwrap();
    // Events on the other host directly after the answer belong to the webhook.
    feeds[1].append(event(EventType::SandboxReady, OWNER, "b"));
    let request = received.recv().await.unwrap();
    assert_eq!(request.sandbox(), "b");
    assert_eq!(request.header("e2b-webhook-id"), created.id);
    request.answer(500);
    let failed = loop {
        let found = two.deliveries(OWNER, &created.id, None, None, 10);
        match found.unwrap().pop() {
            Some(found) if found.attempts > 0 => break found,
            _ => tokio::task::yield_now().await,
        }
    };
    // The ids of all hosts are in the order of time.
    assert_eq!(failed.id / 2048, failed.created_ms);
    assert!(
        one.deliveries(OWNER, &created.id, None, None, 10)
            .unwrap()
            .is_empty()
    );
    // The delivery is sent again while the webhook is enabled.
    let again = received.recv().await.unwrap();
    let id = format!("{}-1", failed.id);
    assert_eq!(again.header("e2b-delivery-id"), id);
    again.answer(200);
    loop {
        let found = two.deliveries(OWNER, &created.id, None, None, 10);
        match found.unwrap().pop() {
            None => break,
            Some(found) => assert_eq!(found.attempts, 1, "{found:?}"),
        }
        tokio::task::yield_now().await;
    }
    let update = WebhookUpdate {
        is_enabled: Some(false),
        ..WebhookUpdate::default()
    };
    two.update(OWNER, &created.id, &update, 0).unwrap();
    assert!(!one.get(OWNER, &created.id).unwrap().is_enabled);
    feeds[0].append(event(EventType::SandboxReady, OWNER, "while-disabled"));
    one.remove(OWNER, &created.id).unwrap();
    assert!(two.list(OWNER).unwrap().is_empty());
    let another = two.create(OWNER, &new(port), 0).unwrap();
    feeds[0].append(event(EventType::SandboxReady, OWNER, "a"));
    let request = received.recv().await.unwrap();
    assert_eq!(request.sandbox(), "a", "{}", request.head);
    assert_eq!(request.header("e2b-webhook-id"), another.id);
    request.answer(200);
    first.abort();
    second.abort();
    // Until a host knows the webhooks of its fleet, the former copy remains.
    drop(two);
    let unknown = Arc::new(TestFleet {
        all: Mutex::default(),
        number: watch::Sender::new(0),
    });
    let (two, second) = unknown.start(homes[1].path(), &feeds[1]);
    assert_eq!(two.list(OWNER).unwrap(), [another]);
    second.abort();
}
