//! Timeouts and other settings chosen at the creation of a sandbox.

use crate::fake;

use fake::{Bench, base, create_id, until};
use jiffy_sandbox_manager::{
    CreateSpec, NetworkSettings, OnTimeout, OperationError, SandboxSettings, SandboxState,
};
use std::time::Duration;

/// Returns the specification of a sandbox with a timeout in seconds.
fn limited(timeout_s: u64, on_timeout: OnTimeout) -> CreateSpec {
    CreateSpec {
        settings: SandboxSettings {
            timeout_s: Some(timeout_s),
            on_timeout,
            ..SandboxSettings::default()
        },
        ..base()
    }
}

#[tokio::test]
async fn a_timeout_kills_or_pauses_the_sandbox_as_configured() {
    let bench = Bench::new();
    let host = bench.open().await;
    let killed = host
        .create(limited(0, OnTimeout::Kill))
        .await
        .unwrap()
        .id()
        .to_owned();
    let paused = host
        .create(limited(0, OnTimeout::Pause))
        .await
        .unwrap()
        .id()
        .to_owned();
    let other = create_id(&host).await;
    let state = |id: &str| host.get(id).unwrap().state().clone();
    until("the timeouts", || {
        state(&killed) == SandboxState::Killed && state(&paused) == SandboxState::Paused
    })
    .await;
    assert_eq!(state(&other), SandboxState::Running);
    assert_eq!(bench.world.running(), [other]);
}

#[tokio::test]
async fn a_timeout_can_be_changed_and_restarts_with_a_resume() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = host
        .create(limited(3600, OnTimeout::Pause))
        .await
        .unwrap()
        .id()
        .to_owned();
    let first = host.get(&id).unwrap().deadline_ms().unwrap();
    let longer = host.timeouts().set(&id, Some(Duration::from_secs(7200)));
    // The timeout is an hour longer. The difference has a tolerance of 100 seconds.
    assert!(longer.await.unwrap().deadline_ms().unwrap() > first + 3_500_000);
    assert_eq!(
        host.timeouts().set(&id, None).await.unwrap().deadline_ms(),
        None
    );
    host.timeouts()
        .set(&id, Some(Duration::from_millis(1)))
        .await
        .unwrap();
    until("the pause", || {
        *host.get(&id).unwrap().state() == SandboxState::Paused
    })
    .await;
    // A paused sandbox does not time out.
    let far = host
        .timeouts()
        .set(&id, Some(Duration::from_secs(60)))
        .await
        .unwrap();
    assert_eq!(*far.state(), SandboxState::Paused);
    // The timeout of 60 s starts again with the resume.
    let (record, was_resumed) = host.ensure_running(&id).await.unwrap();
    assert!(was_resumed && record.deadline_ms().unwrap() >= far.deadline_ms().unwrap());
    assert!(!host.ensure_running(&id).await.unwrap().1);
    host.kill(&id).await.unwrap();
    let result = host.timeouts().set(&id, None).await;
    assert!(matches!(result, Err(OperationError::State { .. })));
}

#[tokio::test]
async fn a_failed_pause_at_a_timeout_leaves_the_sandbox_running() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = host
        .create(limited(3600, OnTimeout::Pause))
        .await
        .unwrap()
        .id()
        .to_owned();
    bench.world.fail("snapshot");
    let now = host
        .timeouts()
        .set(&id, Some(Duration::ZERO))
        .await
        .unwrap();
    let deadline = now.deadline_ms().unwrap();
    // A failed pause moves the deadline: the pause is tried again 30 s later.
    until("the failure", || {
        host.get(&id).unwrap().deadline_ms().unwrap() > deadline
    })
    .await;
    assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Running);
}

#[tokio::test]
async fn settings_of_paused_sandboxes_survive_a_restart() {
    let bench = Bench::new();
    let host = bench.open().await;
    let spec = CreateSpec {
        settings: SandboxSettings {
            owner: Some("key".into()),
            metadata: [("a".into(), "1".into())].into(),
            ..limited(60, OnTimeout::Kill).settings
        },
        ..base()
    };
    let id = host.create(spec.clone()).await.unwrap().id().to_owned();
    host.pause(&id).await.unwrap();
    drop(host);
    let record = bench.open().await.get(&id).unwrap();
    assert_eq!(
        (record.settings(), record.state()),
        (&spec.settings, &SandboxState::Paused)
    );
    assert!(record.deadline_ms().is_some());
}

#[tokio::test]
async fn every_sandbox_has_its_own_tokens_if_requested() {
    let bench = Bench::new();
    let host = bench.open().await;
    let spec = CreateSpec {
        settings: SandboxSettings {
            secure: true,
            network: NetworkSettings {
                restrict_traffic: true,
                ..NetworkSettings::default()
            },
            ..SandboxSettings::default()
        },
        ..base()
    };
    let parent = host.create(spec).await.unwrap();
    let token = parent.agent_token().unwrap();
    let identity = bench
        .world
        .body(parent.id())
        .sandbox_identity
        .lock()
        .unwrap()
        .clone();
    assert_eq!(identity.access_token.as_deref(), Some(token));
    assert!(parent.traffic_token().is_some() && parent.traffic_token() != parent.agent_token());
    let mut report = host.fork(parent.id(), 1, None).await.unwrap();
    let child = report.children.remove(0).unwrap();
    assert!(child.agent_token().is_some() && child.agent_token() != parent.agent_token());
    assert!(child.traffic_token().is_some() && child.traffic_token() != parent.traffic_token());
    let open = host.create(base()).await.unwrap();
    assert_eq!((open.agent_token(), open.traffic_token()), (None, None));
}

#[tokio::test]
async fn an_extension_never_shortens_the_timeout() {
    let bench = Bench::new();
    let host = bench.open().await;
    let hour = Duration::from_secs(3600);
    let sandbox = host.create(limited(3600, OnTimeout::Kill)).await.unwrap();
    let same = host
        .timeouts()
        .extend(sandbox.id(), hour / 2)
        .await
        .unwrap();
    assert_eq!(same.deadline_ms(), sandbox.deadline_ms());
    let more = host
        .timeouts()
        .extend(sandbox.id(), hour * 2)
        .await
        .unwrap();
    assert!(more.deadline_ms() > sandbox.deadline_ms());
    let unlimited = host.create(base()).await.unwrap();
    let unlimited = host.timeouts().extend(unlimited.id(), hour).await.unwrap();
    assert_eq!(unlimited.deadline_ms(), None);
}

#[tokio::test]
async fn changed_network_rules_survive_a_pause_and_a_restart() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    // Deny all egress.
    let deny = |t: &mut SandboxSettings| t.network.deny_out = vec!["0.0.0.0/0".into()];
    host.change_settings(&id, deny).await.unwrap();
    host.pause(&id).await.unwrap();
    drop(host);
    let host = bench.open().await;
    let sandbox = host.get(&id).unwrap();
    assert_eq!(sandbox.settings().network.deny_out, ["0.0.0.0/0"]);
    host.kill(&id).await.unwrap();
    let result = host.change_settings(&id, |_| ()).await;
    assert!(matches!(result, Err(OperationError::State { .. })));
}
