//! Metrics of a host and its sandboxes, shutdown, and garbage collection.

use crate::fake;

use fake::{Bench, base, create_id, snapshot_id, until};
use jiffy_engine_api::BootMode;
use jiffy_sandbox_manager::{ErrorKind, Figure, HostOptions, SandboxState};
use std::time::{Duration, SystemTime};

fn sampled(every: Duration) -> HostOptions {
    HostOptions {
        sample: every,
        ..HostOptions::default()
    }
}

#[tokio::test]
async fn only_running_sandboxes_are_sampled() {
    let bench = Bench::new();
    let host = bench.open_with(sampled(Duration::from_millis(5))).await;
    let id = create_id(&host).await;
    let samples = |from| host.observe().history(&id, from, None).unwrap();
    until("some samples", || samples(None).len() > 5).await;
    let last = *samples(None).last().unwrap();
    // The fake guest reports the used amounts. The totals are the default size of a sandbox.
    assert_eq!((last.mem_used, last.mem_total), (3 << 20, 512 << 20));
    assert_eq!((last.cpu_count, last.disk_used), (2, 8192));
    let used = samples(None)
        .iter()
        .filter(|s| s.cpu_used_pct > 0.0)
        .count();
    assert!(used > 0);
    host.pause(&id).await.unwrap();
    let (before, runs) = (samples(None).len(), bench.world.running());
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(samples(None).len() <= before + 1 && runs.is_empty());
    // The history remains and continues after the resume.
    let resumed_at = host.resume(&id).await.unwrap().changed_ms();
    until("samples again", || samples(Some(resumed_at)).len() > 2).await;
    assert!(samples(None).len() > before);
}

#[tokio::test]
async fn metrics_contain_states_creates_operations_and_added_figures() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    host.fork(&id, 2, None).await.unwrap();
    host.pause(&id).await.unwrap();
    assert!(host.pause(&id).await.is_err());
    host.figures().add_figures(|| {
        let (name, help) = ("gateway_requests", "Requests");
        vec![Figure {
            name,
            help,
            counter: true,
            value: 7.0,
        }]
    });
    let text = host.figures().render();
    for line in [
        "jiffy_sandboxes{state=\"running\"} 2.0",
        "jiffy_sandboxes{state=\"paused\"} 1.0",
        "jiffy_creates_total{boot_mode=\"snapshot\",outcome=\"ok\"} 1",
        "jiffy_creates_total{boot_mode=\"fork\",outcome=\"ok\"} 2",
        "jiffy_operations_total{operation=\"pause\",outcome=\"ok\"} 1",
        "jiffy_operations_total{operation=\"pause\",outcome=\"conflict\"} 1",
        // Two running sandboxes with 512 MiB each.
        "jiffy_memory_committed_bytes 1073741824.0",
        "jiffy_gateway_requests_total 7.0",
        "# EOF",
    ] {
        assert!(text.lines().any(|l| l == line), "no {line} in {text}");
    }
    let boots = host.figures().boot_times();
    let modes: Vec<_> = boots.iter().map(|b| (b.mode, b.count)).collect();
    assert_eq!(modes, [(BootMode::Fork, 2), (BootMode::Snapshot, 1)]);
}

#[tokio::test]
async fn a_shutdown_waits_for_operations_and_rejects_new_ones() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    bench.world.hang("snapshot");
    let pausing = tokio::spawn({
        let (host, id) = (host.clone(), id.clone());
        async move { host.pause(&id).await }
    });
    let has_draft = || bench.file_names().iter().any(|n| n.starts_with('.'));
    until("the pause to start", has_draft).await;
    assert!(
        !host.finish(Duration::from_millis(30)).await,
        "the pause hangs"
    );
    let error = host.create(base()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.retry_after().is_some());
    pausing.abort();

    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    let pause = {
        let (host, id) = (host.clone(), id.clone());
        tokio::spawn(async move { host.pause(&id).await })
    };
    until("the pause", || {
        *host.get(&id).unwrap().state() == SandboxState::Paused
    })
    .await;
    assert!(host.finish(Duration::from_secs(10)).await);
    pause.await.unwrap().unwrap();
}

#[tokio::test]
async fn orphaned_snapshots_are_removed_while_others_are_taken() {
    let bench = Bench::new();
    let options = HostOptions {
        gc_interval: Duration::from_millis(2),
        ..HostOptions::default()
    };
    let host = bench.open_with(options).await;
    let id = create_id(&host).await;
    let start = SystemTime::now();
    let mut planted = 0;
    // Many garbage collections run while snapshots are taken, used and removed.
    while start.elapsed().unwrap() < Duration::from_millis(600) {
        std::fs::write(bench.files().join(format!("orphan{planted}")), "x").unwrap();
        planted += 1;
        let snapshot = snapshot_id(&host, &id).await;
        assert!(bench.file_names().contains(&snapshot));
        host.rollback(&id, &snapshot).await.unwrap();
        host.pause(&id).await.unwrap();
        host.resume(&id).await.unwrap();
    }
    let orphans = || bench.file_names().iter().any(|n| n.starts_with("orphan"));
    until("the removal of the orphans", || !orphans()).await;
    let recorded = host.snapshots().list(None).unwrap().len();
    assert_eq!(bench.file_names().len(), recorded);
}
