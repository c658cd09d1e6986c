//! A daemon that is killed at any moment leaves the old or the new state, and nothing that belongs to nobody.
#![allow(clippy::unwrap_used, clippy::panic)]

mod fake;

use fake::{Bench, FakeEngine, base, until};
use jiffy_host::{Sandboxes, State};
use std::sync::{Arc, Mutex};

type Work = fn(Sandboxes<FakeEngine>, String) -> futures::Boxed;

mod futures {
    pub type Boxed = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// Makes a sandbox with text `old`, begins `work` on it, dies when `step` is reached, and opens again.
fn killed_in(step: &'static str, work: Work) -> (Bench, Sandboxes<FakeEngine>, String) {
    let bench = Bench::new();
    let id = Arc::new(Mutex::new(String::new()));
    bench.doomed(async {
        let host = bench.open();
        let sandbox = host.create(base()).await.unwrap().id;
        bench.world.write(&sandbox, "old");
        host.snapshot(&sandbox, Some("kept".into())).await.unwrap();
        *id.lock().unwrap() = sandbox.clone();
        bench.world.hang(step);
        let files = bench.file_names();
        let restores = *bench.world.restores.lock().unwrap();
        tokio::spawn(work(host, sandbox));
        until("the step", || {
            bench.file_names() != files || *bench.world.restores.lock().unwrap() != restores
        })
        .await;
        // Enough for what follows the file to reach the hanging step.
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    });
    bench.world.mend();
    let id = id.lock().unwrap().clone();
    let host = {
        let _runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        bench.open()
    };
    (bench, host, id)
}

fn whole(bench: &Bench, host: &Sandboxes<FakeEngine>) {
    let known: Vec<String> = host
        .snapshots(None)
        .unwrap()
        .into_iter()
        .map(|s| s.id)
        .collect();
    let mut known: Vec<_> = known.into_iter().collect();
    known.sort();
    let files: Vec<String> = bench.file_names().into_iter().collect();
    assert_eq!(files, known, "files and journal tell the same");
}

fn cause(host: &Sandboxes<FakeEngine>, id: &str) -> String {
    match host.get(id).unwrap().state {
        State::Broken { cause } => cause,
        other => panic!("{other:?}"),
    }
}

#[test]
fn killed_in_a_snapshot_there_is_no_half_of_it() {
    for step in ["snapshot", "snapshot-complete"] {
        let (bench, host, id) = killed_in(step, |host, id| {
            Box::pin(async move { drop(host.snapshot(&id, None).await) })
        });
        assert!(cause(&host, &id).contains("daemon was stopped"));
        whole(&bench, &host);
        assert_eq!(host.snapshots(None).unwrap().len(), 2);
    }
}

#[test]
fn killed_in_a_pause_it_happened_or_it_did_not() {
    let pause: Work = |host, id| Box::pin(async move { drop(host.pause(&id).await) });
    let (bench, host, id) = killed_in("snapshot", pause);
    assert!(cause(&host, &id).contains("daemon was stopped"));
    whole(&bench, &host);

    let (bench, host, id) = killed_in("snapshot-complete", pause);
    assert_eq!(host.get(&id).unwrap().state, State::Paused);
    whole(&bench, &host);
    bench.doomed(async {
        host.resume(&id).await.unwrap();
        assert_eq!(bench.world.read(&id), "old");
    });
}

#[test]
fn killed_in_a_fork_or_create_no_child_is_there() {
    let fork: Work = |host, id| Box::pin(async move { drop(host.fork(&id, 3).await) });
    let create: Work = |host, _| Box::pin(async move { drop(host.create(base()).await) });
    for work in [fork, create] {
        let (bench, host, _) = killed_in("welcome", work);
        assert_eq!(host.list().len(), 1);
        whole(&bench, &host);
    }
}

#[test]
fn killed_in_a_rollback_the_sandbox_can_be_rolled_back_again() {
    let (bench, host, id) = killed_in("welcome", |host, id| {
        Box::pin(async move { drop(host.rollback(&id, "kept").await) })
    });
    assert!(cause(&host, &id).contains("daemon was stopped"));
    whole(&bench, &host);
    bench.doomed(async {
        host.rollback(&id, "kept").await.unwrap();
        assert_eq!(bench.world.read(&id), "old");
    });
}

#[tokio::test]
async fn what_sleeps_outlives_the_daemon_and_files_of_nobody_are_removed() {
    let bench = Bench::new();
    let host = bench.open();
    let sleeper = host.create(base()).await.unwrap().id;
    bench.world.write(&sleeper, "dream");
    host.pause(&sleeper).await.unwrap();
    let killed = host.create(base()).await.unwrap().id;
    host.kill(&killed).await.unwrap();
    drop(host);
    std::fs::write(bench.files().join("orphan"), "x").unwrap();
    std::fs::write(bench.files().join(".half"), "x").unwrap();
    let host = bench.open();
    whole(&bench, &host);
    assert_eq!(host.get(&killed).unwrap().state, State::Killed);
    host.resume(&sleeper).await.unwrap();
    assert_eq!(bench.world.read(&sleeper), "dream");
}

#[tokio::test]
async fn a_sleeper_whose_snapshot_is_gone_says_so() {
    let bench = Bench::new();
    let host = bench.open();
    let id = host.create(base()).await.unwrap().id;
    let snapshot = host.pause(&id).await.unwrap().snapshot.unwrap();
    drop(host);
    std::fs::remove_file(bench.files().join(snapshot)).unwrap();
    let host = bench.open();
    assert!(cause(&host, &id).contains("gone from the disk"));
}
