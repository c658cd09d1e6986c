//! Idle timeouts: sandboxes that are not used are paused.

use crate::fake;

use fake::{Bench, base, until};
use jiffy_api_types::{EventType, PauseCause, SandboxInfo};
use jiffy_event_log::{Event, EventFilter, PageQuery, SandboxChoice};
use jiffy_sandbox_manager::{
    CreateSpec, HostOptions, OnTimeout, SandboxSettings, SandboxState, Sandboxes,
};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Minimum idle timeout in seconds.
const SHORT_S: u64 = 1;

fn with_idle_timeout(idle_timeout_s: u64) -> CreateSpec {
    CreateSpec {
        settings: SandboxSettings {
            idle_timeout_s: Some(idle_timeout_s),
            ..SandboxSettings::default()
        },
        ..base()
    }
}

async fn create(host: &Sandboxes, idle_timeout_s: u64) -> String {
    let sandbox = host.create(with_idle_timeout(idle_timeout_s)).await;
    sandbox.unwrap().id().to_owned()
}

/// Returns the pauses of a sandbox.
fn pauses(host: &Sandboxes, id: &str) -> Vec<Event> {
    let filter = EventFilter {
        sandbox: Some(SandboxChoice::Exact(id.to_owned())),
        ..EventFilter::default()
    };
    let query = PageQuery {
        limit: 1000,
        ..PageQuery::default()
    };
    let page = host.events().page(&query, &filter).unwrap();
    let events = page.entries.into_iter().map(|(_, event)| event);
    events
        .filter(|event| event.kind == EventType::SandboxPaused)
        .collect()
}

fn state(host: &Sandboxes, id: &str) -> SandboxState {
    host.get(id).unwrap().state().clone()
}

async fn until_paused(host: &Sandboxes, id: &str) {
    until("the pause", || state(host, id) == SandboxState::Paused).await;
}

/// Returns the cause of the pause that clients see.
fn shown_cause(host: &Sandboxes, id: &str) -> Option<PauseCause> {
    SandboxInfo::from(host.get(id).unwrap()).pause_cause
}

/// Returns after more than one idle timeout of [`SHORT_S`]: another sandbox was paused meanwhile.
async fn after_idle_timeout(host: &Sandboxes) {
    let other = create(host, SHORT_S).await;
    until_paused(host, &other).await;
}

#[tokio::test]
async fn an_idle_sandbox_is_paused_with_its_cause_and_starts_anew_after_a_resume() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create(&host, SHORT_S).await;
    let other = host.create(base()).await.unwrap().id().to_owned();
    let long = create(&host, 3600).await;
    for count in 1..=2 {
        until_paused(&host, &id).await;
        until("the event", || pauses(&host, &id).len() == count).await;
        let paused = pauses(&host, &id).pop().unwrap();
        assert_eq!(paused.cause.as_deref(), Some("idle"));
        assert_eq!((paused.caller, paused.request), (None, None));
        assert!(paused.snapshot.is_some());
        assert_eq!(shown_cause(&host, &id), Some(PauseCause::Idle));
        host.resume(&id).await.unwrap();
        assert_eq!(shown_cause(&host, &id), None);
    }
    for id in [other, long] {
        assert_eq!(state(&host, &id), SandboxState::Running);
        assert!(pauses(&host, &id).is_empty());
    }
}

#[tokio::test]
async fn a_use_in_progress_and_repeated_uses_prevent_the_pause() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create(&host, SHORT_S).await;
    let in_progress = host.uses_of(&id).unwrap().begin();
    after_idle_timeout(&host).await;
    assert_eq!(state(&host, &id), SandboxState::Running);
    drop(in_progress);
    // The timeout starts at the end of the use.
    let uses = host.uses_of(&id).unwrap();
    let other = create(&host, SHORT_S).await;
    until("the pause of the other sandbox", || {
        uses.record();
        state(&host, &other) == SandboxState::Paused
    })
    .await;
    assert_eq!(state(&host, &id), SandboxState::Running);
    assert!(pauses(&host, &id).is_empty());
    until_paused(&host, &id).await;
}

#[tokio::test]
async fn an_idle_timeout_can_be_set_changed_and_removed_while_the_sandbox_runs() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = host.create(base()).await.unwrap().id().to_owned();
    // `change` takes the timeout and the idle timeout. `None` leaves a value unchanged, and
    // `Some(None)` removes it.
    let timeouts = || host.timeouts();
    let idle = |host: &Sandboxes, id: &str| {
        let sandbox = host.get(id).unwrap();
        (
            sandbox.settings().idle_timeout_s,
            sandbox.settings().auto_resume,
        )
    };
    assert_eq!(idle(&host, &id), (None, false));
    // A use that began before the sandbox had an idle timeout prevents the pause.
    let in_progress = host.uses_of(&id).unwrap().begin();
    timeouts()
        .change(&id, None, Some(Some(SHORT_S)))
        .await
        .unwrap();
    assert_eq!(idle(&host, &id), (Some(SHORT_S), true));
    after_idle_timeout(&host).await;
    assert_eq!(state(&host, &id), SandboxState::Running);
    drop(in_progress);
    until_paused(&host, &id).await;
    // A paused sandbox retains the change for its next resume, and a fork has it too.
    timeouts()
        .change(&id, None, Some(Some(3600)))
        .await
        .unwrap();
    host.resume(&id).await.unwrap();
    // `Some(None)`: the child has no timeout.
    let fork = host.fork(&id, 1, Some(None)).await.unwrap();
    let child = fork.children[0].as_ref().unwrap().id().to_owned();
    assert_eq!(idle(&host, &child), (Some(3600), true));
    after_idle_timeout(&host).await;
    assert_eq!(state(&host, &id), SandboxState::Running);
    // A shorter timeout replaces the check that was scheduled, and the removal cancels it.
    timeouts()
        .change(&child, None, Some(Some(SHORT_S)))
        .await
        .unwrap();
    until_paused(&host, &child).await;
    timeouts()
        .change(&id, None, Some(Some(SHORT_S)))
        .await
        .unwrap();
    let limited = timeouts().change(&id, Some(Some(Duration::from_secs(60))), Some(None));
    assert!(limited.await.unwrap().deadline_ms().is_some());
    after_idle_timeout(&host).await;
    assert_eq!(state(&host, &id), SandboxState::Running);
    // The idle timeout has also enabled the automatic resume, which remains enabled.
    assert_eq!(idle(&host, &id), (None, true));
}

#[tokio::test]
async fn operations_are_uses() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create(&host, SHORT_S).await;
    let other = create(&host, SHORT_S).await;
    let paused = |state: &SandboxState| *state == SandboxState::Paused;
    let interval = Duration::from_millis(20);
    while !paused(host.wait(&other, interval, paused).await.unwrap().state()) {
        let extended = host.timeouts().extend(&id, Duration::from_secs(60));
        extended.await.unwrap();
    }
    assert!(pauses(&host, &id).is_empty());
}

#[tokio::test]
async fn a_busy_processor_prevents_the_pause() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create(&host, SHORT_S).await;
    let body = bench.world.body(&id);
    body.is_busy.store(true, Ordering::Relaxed);
    after_idle_timeout(&host).await;
    after_idle_timeout(&host).await;
    assert_eq!(state(&host, &id), SandboxState::Running);
    body.is_busy.store(false, Ordering::Relaxed);
    until_paused(&host, &id).await;
    // The host measures the processor usage without a request to the agent. Only the check right
    // before a pause sends a request, and this check may be repeated.
    assert!(body.requests.load(Ordering::Relaxed) <= 2);
}

#[tokio::test]
async fn a_running_command_prevents_the_pause() {
    let bench = Bench::new();
    let host = bench.open().await;
    let started_at = Instant::now();
    let id = create(&host, SHORT_S).await;
    let body = bench.world.body(&id);
    let requests = || body.requests.load(Ordering::Relaxed);
    body.commands.store(2, Ordering::Relaxed);
    until("a request to the agent", || requests() > 0).await;
    after_idle_timeout(&host).await;
    assert_eq!(state(&host, &id), SandboxState::Running);
    // At most one request per timeout.
    let timeouts = started_at.elapsed().as_secs() / SHORT_S;
    assert!(requests() <= timeouts, "{}", requests());
    body.commands.store(0, Ordering::Relaxed);
    until_paused(&host, &id).await;
}

#[tokio::test]
async fn an_idle_sandbox_whose_agent_fails_is_paused() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create(&host, SHORT_S).await;
    bench.world.fail("answer");
    until_paused(&host, &id).await;
}

#[tokio::test]
async fn children_of_a_fork_have_the_idle_timeout_of_their_parent() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create(&host, SHORT_S).await;
    let fork = host.fork(&id, 1, None).await.unwrap();
    let child = fork.children[0].as_ref().unwrap();
    assert_eq!(child.settings().idle_timeout_s, Some(SHORT_S));
    until_paused(&host, child.id()).await;
    until_paused(&host, &id).await;
}

#[tokio::test]
async fn the_earlier_of_both_timeouts_takes_effect() {
    let bench = Bench::new();
    let host = bench.open().await;
    let mut spec = with_idle_timeout(3600);
    spec.settings.timeout_s = Some(0);
    spec.settings.on_timeout = OnTimeout::Kill;
    let killed = host.create(spec.clone()).await.unwrap();
    spec.settings.timeout_s = Some(3600);
    spec.settings.idle_timeout_s = Some(SHORT_S);
    let paused = host.create(spec).await.unwrap();
    until("the kill", || {
        state(&host, killed.id()) == SandboxState::Killed
    })
    .await;
    until_paused(&host, paused.id()).await;
    let (resumed, _) = host.ensure_running(paused.id()).await.unwrap();
    assert!(resumed.deadline_ms().is_some());
}

#[test]
fn a_restarted_daemon_starts_the_idle_timeout_of_adopted_sandboxes_anew() {
    let bench = Bench::new();
    let created = std::sync::Mutex::new(Vec::new());
    bench.run_and_kill(async {
        let host = bench.open_with(HostOptions::default()).await;
        // With a long timeout, so that the killed daemon does not pause it.
        let long = create(&host, 3600).await;
        let short = create(&host, SHORT_S).await;
        *created.lock().unwrap() = vec![long, short];
    });
    let [long, short] = <[String; 2]>::try_from(created.into_inner().unwrap()).unwrap();
    bench.run_and_kill(async {
        let host = bench.open_with(HostOptions::default()).await;
        assert_eq!(state(&host, &short), SandboxState::Running);
        until_paused(&host, &short).await;
        let causes: Vec<_> = pauses(&host, &short).into_iter().map(|e| e.cause).collect();
        assert_eq!(causes, [Some("idle".to_owned())]);
        let settings = host.get(&long).unwrap();
        assert_eq!(settings.settings().idle_timeout_s, Some(3600));
        assert_eq!(state(&host, &long), SandboxState::Running);
    });
}

#[tokio::test]
async fn a_failed_pause_of_an_idle_sandbox_leaves_it_running() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create(&host, SHORT_S).await;
    bench.world.hold("snapshot");
    until("the attempt to pause", || bench.world.is_stuck("snapshot")).await;
    bench.world.fail("snapshot");
    bench.world.release("snapshot");
    // This operation waits for the failed pause.
    host.rename(&id, Some("still-running".into()))
        .await
        .unwrap();
    assert_eq!(state(&host, &id), SandboxState::Running);
    assert!(pauses(&host, &id).is_empty());
}
