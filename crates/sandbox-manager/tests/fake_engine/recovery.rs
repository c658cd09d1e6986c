//! A daemon that is killed at any step leaves the old or the new state, and no orphans.

use crate::fake;

use fake::{Bench, base, create_id, until};
use jiffy_sandbox_manager::{SandboxState, Sandboxes};
use std::sync::{Arc, Mutex};

type Work = fn(Sandboxes, String) -> futures::Boxed;

mod futures {
    pub type Boxed = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// Creates a sandbox with text `old`, starts `work` on it, kills the daemon at `step`, and opens
/// the data directory again.
fn killed_in(step: &'static str, work: Work) -> (Bench, Sandboxes, String) {
    let bench = Bench::new();
    let id = Arc::new(Mutex::new(String::new()));
    bench.run_and_kill(async {
        let host = bench.open().await;
        let sandbox = create_id(&host).await;
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
        // Time for the operation to reach the hanging step.
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    });
    bench.world.clear_failures();
    let id = id.lock().unwrap().clone();
    let host = again(&bench);
    (bench, host, id)
}

/// Opens the data directory as the next daemon.
fn again(bench: &Bench) -> Sandboxes {
    let host = Arc::new(Mutex::new(None));
    bench.run_and_kill(async {
        let opened = bench.open().await;
        *host.lock().unwrap() = Some(opened);
    });
    host.lock().unwrap().take().unwrap()
}

/// Checks that the sandbox has one guest in its old state, and supports all operations.
fn runs_on(bench: &Bench, host: &Sandboxes, id: &str) {
    assert_eq!(*host.get(id).unwrap().state(), SandboxState::Running);
    assert_eq!(bench.world.running(), [id]);
    assert_eq!(bench.world.read(id), "old");
    bench.run_and_kill(async {
        bench.world.write(id, "newer");
        let snapshot = host.snapshot(id, None).await.unwrap();
        bench.world.write(id, "newest");
        host.pause(id).await.unwrap();
        assert!(bench.world.running().is_empty());
        host.resume(id).await.unwrap();
        assert_eq!(bench.world.read(id), "newest");
        host.rollback(id, snapshot.id()).await.unwrap();
        assert_eq!(bench.world.read(id), "newer");
        host.kill(id).await.unwrap();
        assert!(bench.world.running().is_empty());
    });
}

fn whole(bench: &Bench, host: &Sandboxes) {
    let recorded: Vec<String> = host
        .snapshots()
        .list(None)
        .unwrap()
        .into_iter()
        .map(|s| s.id().to_owned())
        .collect();
    let mut recorded: Vec<_> = recorded.into_iter().collect();
    recorded.sort();
    host.gc().unwrap();
    let files: Vec<String> = bench.file_names().into_iter().collect();
    assert_eq!(files, recorded, "files and journal tell the same");
}

fn cause(host: &Sandboxes, id: &str) -> String {
    match host.get(id).unwrap().state() {
        SandboxState::Broken { cause, .. } => cause.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn killed_in_a_snapshot_there_is_no_half_of_it_and_the_sandbox_runs_on() {
    let steps = [
        ("snapshot", 2),
        ("snapshot-named", 3),
        ("snapshot-complete", 3),
    ];
    for (step, snapshots) in steps {
        let (bench, host, id) = killed_in(step, |host, id| {
            Box::pin(async move { drop(host.snapshot(&id, None).await) })
        });
        whole(&bench, &host);
        assert_eq!(
            host.snapshots().list(None).unwrap().len(),
            snapshots,
            "{step}"
        );
        runs_on(&bench, &host, &id);
    }
}

#[test]
fn killed_in_a_pause_it_happened_or_it_did_not() {
    let pause: Work = |host, id| Box::pin(async move { drop(host.pause(&id).await) });
    let (bench, host, id) = killed_in("snapshot", pause);
    whole(&bench, &host);
    runs_on(&bench, &host, &id);

    for step in ["snapshot-named", "snapshot-complete"] {
        let (bench, host, id) = killed_in(step, pause);
        assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Paused);
        assert!(bench.world.running().is_empty());
        whole(&bench, &host);
        bench.run_and_kill(async {
            host.resume(&id).await.unwrap();
            assert_eq!(bench.world.read(&id), "old");
        });
    }
}

#[test]
fn killed_in_a_fork_or_create_no_child_is_there() {
    let fork: Work = |host, id| Box::pin(async move { drop(host.fork(&id, 3, None).await) });
    let create: Work = |host, _| Box::pin(async move { drop(host.create(base()).await) });
    for work in [fork, create] {
        for step in ["assign", "keep", "kept"] {
            let (bench, host, id) = killed_in(step, work);
            assert_eq!(host.list().len(), 1);
            whole(&bench, &host);
            runs_on(&bench, &host, &id);
        }
    }
}

#[test]
fn killed_in_a_rollback_the_sandbox_is_what_it_was() {
    for step in ["assign", "keep", "kept"] {
        let (bench, host, id) = killed_in(step, |host, id| {
            Box::pin(async move { drop(host.rollback(&id, "kept").await) })
        });
        whole(&bench, &host);
        runs_on(&bench, &host, &id);
    }
}

#[test]
fn killed_in_a_kill_the_sandbox_is_killed_and_not_lost() {
    for step in ["halt", "stop"] {
        let bench = Bench::new();
        let id = Arc::new(Mutex::new(String::new()));
        bench.run_and_kill(async {
            let host = bench.open().await;
            let sandbox = create_id(&host).await;
            *id.lock().unwrap() = sandbox.clone();
            bench.world.hang(step);
            tokio::spawn(async move { drop(host.kill(&sandbox).await) });
            until("its end", || bench.world.running().is_empty()).await;
            // Time in which the exit of the guest would be noticed.
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        });
        bench.world.clear_failures();
        let host = again(&bench);
        let id = id.lock().unwrap().clone();
        assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Killed);
        assert!(bench.world.running().is_empty());
    }
}

#[test]
fn a_guest_that_ended_while_there_was_no_daemon_is_told_as_such() {
    let bench = Bench::new();
    bench.run_and_kill(async {
        let host = bench.open().await;
        let (dead, lost, fine) = (
            create_id(&host).await,
            create_id(&host).await,
            create_id(&host).await,
        );
        for id in [&dead, &lost, &fine] {
            host.snapshot(id, Some(format!("of {id}"))).await.unwrap();
        }
        host.close().await;
        drop(host);
        bench.world.panic_guest(&dead);
        let host = bench.open().await;
        assert!(cause(&host, &dead).contains("it ended"));
        assert_eq!(bench.world.running().len(), 2);
        drop(host);
        // A guest that cannot be adopted is stopped.
        bench.world.fail("adopt");
        let host = bench.open().await;
        assert!(cause(&host, &lost).contains("made to fail"));
        assert!(bench.world.running().is_empty());
        bench.world.clear_failures();
        for id in [&dead, &lost, &fine] {
            host.rollback(id, &format!("of {id}")).await.unwrap();
        }
        assert_eq!(bench.world.running().len(), 3);
    });
}

#[tokio::test]
async fn an_adopted_guest_that_ends_breaks_its_sandbox() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    drop(host);
    let host = bench.open().await;
    bench.world.panic_guest(&id);
    until("the end to be noticed", || {
        *host.get(&id).unwrap().state() != SandboxState::Running
    })
    .await;
    assert!(cause(&host, &id).contains("panicked"));
}

#[tokio::test]
async fn guests_of_which_the_journal_knows_nothing_are_ended() {
    let bench = Bench::new();
    let host = bench.open().await;
    host.create(base()).await.unwrap();
    let stopped = create_id(&host).await;
    drop(host);
    for file in ["state.db", "state.db-wal", "state.db-shm"] {
        let _ = std::fs::remove_file(bench.dir.path().join(file));
    }
    let host = bench.open().await;
    assert!(host.get(&stopped).is_err());
    assert!(bench.world.running().is_empty());
}

#[tokio::test]
async fn what_sleeps_outlives_the_daemon_and_files_of_nobody_are_removed() {
    let bench = Bench::new();
    let host = bench.open().await;
    let paused = create_id(&host).await;
    bench.world.write(&paused, "dream");
    host.pause(&paused).await.unwrap();
    let killed = create_id(&host).await;
    host.kill(&killed).await.unwrap();
    drop(host);
    std::fs::write(bench.files().join("orphan"), "x").unwrap();
    std::fs::write(bench.files().join(".half"), "x").unwrap();
    let host = bench.open().await;
    // The snapshots of the template and of the paused sandbox remain without an explicit call.
    bench.until_files(2).await;
    whole(&bench, &host);
    assert_eq!(*host.get(&killed).unwrap().state(), SandboxState::Killed);
    host.resume(&paused).await.unwrap();
    assert_eq!(bench.world.read(&paused), "dream");
}

#[tokio::test]
async fn a_sleeper_whose_snapshot_is_gone_says_so() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    let snapshot = host
        .pause(&id)
        .await
        .unwrap()
        .snapshot()
        .unwrap()
        .to_owned();
    drop(host);
    std::fs::remove_file(bench.files().join(snapshot)).unwrap();
    let host = bench.open().await;
    assert!(cause(&host, &id).contains("missing from the disk"));
}
