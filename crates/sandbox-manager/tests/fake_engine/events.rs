//! Events of sandboxes.

use crate::fake;

use fake::{Bench, base, create_id, snapshot_id, until};
use jiffy_api_types::EventType;
use jiffy_event_log::{Event, EventFeed, EventFilter, PageQuery, Retention, SandboxChoice};
use jiffy_sandbox_manager::{
    CreateSpec, HostOptions, OnTimeout, SandboxSettings, SandboxSource, Sandboxes,
};
use std::time::Duration;

/// Returns all events of a sandbox, or of all sandboxes if `sandbox` is `None`, oldest first.
fn events(feed: &EventFeed, sandbox: Option<&str>) -> Vec<Event> {
    let query = PageQuery {
        limit: 1000,
        ..PageQuery::default()
    };
    let filter = EventFilter {
        sandbox: sandbox.map(|id| SandboxChoice::Exact(id.to_owned())),
        ..EventFilter::default()
    };
    let page = feed.page(&query, &filter).unwrap();
    page.entries.into_iter().map(|(_, event)| event).collect()
}

/// Returns the kinds of the events of a sandbox, oldest first.
fn kinds(host: &Sandboxes, sandbox: &str) -> Vec<&'static str> {
    let all = events(host.events(), Some(sandbox));
    all.iter().map(|event| event.kind.name()).collect()
}

/// Opens the event log of the data directory.
fn feed(bench: &Bench) -> EventFeed {
    let retention = Retention {
        max_bytes: 1 << 20,
        max_age: Duration::from_secs(3600),
    };
    EventFeed::open(&bench.dir.path().join("events"), None, retention).unwrap()
}

#[tokio::test]
async fn every_operation_on_a_sandbox_is_an_event() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    let snapshot = snapshot_id(&host, &id).await;
    host.rename(&id, Some("web".into())).await.unwrap();
    host.timeouts()
        .set(&id, Some(Duration::from_secs(3600)))
        .await
        .unwrap();
    host.pause(&id).await.unwrap();
    host.resume(&id).await.unwrap();
    host.rollback(&id, &snapshot).await.unwrap();
    let fork = host.fork(&id, 2, None).await.unwrap();
    let child = fork.children[0].as_ref().unwrap().id().to_owned();
    host.promote(&child).await.unwrap();
    host.kill(&id).await.unwrap();
    // A second kill changes nothing.
    host.kill(&id).await.unwrap();
    assert_eq!(
        kinds(&host, &id),
        [
            "sandbox.created",
            "sandbox.ready",
            "sandbox.snapshotTaken",
            "sandbox.renamed",
            "sandbox.timeoutChanged",
            "sandbox.paused",
            "sandbox.resumed",
            "sandbox.rolledBack",
            "sandbox.forked",
            "sandbox.killed",
        ]
    );
    assert_eq!(
        kinds(&host, &child),
        ["sandbox.created", "sandbox.ready", "sandbox.promoted"]
    );
    let all = events(host.events(), None);
    let of = |kind| all.iter().find(|event| event.kind == kind).unwrap();
    assert_eq!(of(EventType::SandboxRolledBack).snapshot, Some(snapshot));
    assert_eq!(of(EventType::SandboxForked).count, Some(2));
    // The promotion of one of two children has removed the other one.
    assert_eq!(of(EventType::SandboxPromoted).count, Some(1));
    assert_eq!(of(EventType::SandboxRenamed).name.as_deref(), Some("web"));
    let created = all.iter().find(|e| e.sandbox.as_ref() == Some(&child));
    assert_eq!(created.unwrap().forked_from, Some(id));
}

#[tokio::test]
async fn a_failed_create_and_a_lost_guest_are_events_with_their_cause() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    bench.world.panic_guest(&id);
    until("the loss of the guest", || {
        kinds(&host, &id).contains(&"sandbox.failed")
    })
    .await;
    let lost = events(host.events(), Some(&id)).pop().unwrap();
    assert!(lost.cause.is_some(), "{lost:?}");
    bench.world.fail("restore");
    let failing = CreateSpec {
        source: SandboxSource::Template("base".into()),
        ..base()
    };
    assert!(host.create(failing).await.is_err());
    let last = events(host.events(), None).pop().unwrap();
    assert_eq!(last.kind, EventType::SandboxFailed);
    // The message of an internal error may name files of the host.
    assert!(last.cause.unwrap().starts_with("internal error"));
}

#[tokio::test]
async fn a_kill_at_the_deadline_has_the_cause_timeout() {
    let bench = Bench::new();
    let host = bench.open().await;
    let spec = CreateSpec {
        settings: SandboxSettings {
            timeout_s: Some(0),
            on_timeout: OnTimeout::Kill,
            ..SandboxSettings::default()
        },
        ..base()
    };
    let id = host.create(spec).await.unwrap().id().to_owned();
    until("the timeout", || {
        kinds(&host, &id).contains(&"sandbox.killed")
    })
    .await;
    let killed = events(host.events(), Some(&id)).pop().unwrap();
    assert_eq!(killed.cause.as_deref(), Some("timeout"));
    assert_eq!(killed.caller, None);
}

#[test]
fn events_survive_a_killed_daemon_which_does_not_repeat_them() {
    let bench = Bench::new();
    let created = std::sync::Mutex::new(String::new());
    let options = |bench: &Bench| HostOptions {
        events: feed(bench),
        ..HostOptions::default()
    };
    bench.run_and_kill(async {
        let host = bench.open_with(options(&bench)).await;
        let id = create_id(&host).await;
        host.pause(&id).await.unwrap();
        *created.lock().unwrap() = id;
    });
    let id = created.lock().unwrap().clone();
    bench.run_and_kill(async {
        let host = bench.open_with(options(&bench)).await;
        host.resume(&id).await.unwrap();
        assert_eq!(
            kinds(&host, &id),
            [
                "sandbox.created",
                "sandbox.ready",
                "sandbox.paused",
                "sandbox.resumed"
            ]
        );
    });
}
