//! A daemon that is killed at any step of an operation leaves the old or the new state, and no
//! orphaned guests or files.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran. It *detaches* a new
//! guest, so that the guest outlives the daemon. The *steps* of the fake engine are named points
//! at which a test makes it fail or hang: `detach` is before a detachment, and `detached` after it.

use crate::fake;

use fake::{Bench, base, create_id, until};
use jiffy_sandbox_manager::{SandboxState, Sandboxes};
use std::sync::{Arc, Mutex};

type Work = fn(Sandboxes, String) -> futures::Boxed;

mod futures {
    pub type Boxed = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// Creates a sandbox with text `old`, starts `work` on it, kills the daemon when `work` hangs at
/// `step`, and opens the data directory with the next daemon.
fn killed_in(step: &'static str, work: Work) -> (Bench, Sandboxes, String) {
    let bench = Bench::new();
    let id = Arc::new(Mutex::new(String::new()));
    bench.run_and_kill(async {
        let host = bench.open().await;
        let sandbox = create_id(&host).await;
        bench.world.write(&sandbox, "old");
        host.snapshot(&sandbox, Some("name".into())).await.unwrap();
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
    let host = reopen(&bench);
    (bench, host, id)
}

/// Opens the data directory as the next daemon.
fn reopen(bench: &Bench) -> Sandboxes {
    let host = Arc::new(Mutex::new(None));
    bench.run_and_kill(async {
        let opened = bench.open().await;
        *host.lock().unwrap() = Some(opened);
    });
    host.lock().unwrap().take().unwrap()
}

/// Checks that the sandbox runs with its old state, and supports all operations.
fn check_runs(bench: &Bench, host: &Sandboxes, id: &str) {
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

/// Checks that the files and the journal contain the same snapshots.
fn check_consistent(bench: &Bench, host: &Sandboxes) {
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
    assert_eq!(files, recorded, "files and journal agree");
}

/// Returns the reason why the sandbox is broken.
fn cause(host: &Sandboxes, id: &str) -> String {
    match host.get(id).unwrap().state() {
        SandboxState::Broken { cause, .. } => cause.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_crash_during_a_snapshot_leaves_no_partial_snapshot() {
    // The files are complete from the second step on: the recovery then completes the snapshot.
    // Each step has the number of snapshots after the recovery. Two exist before: the template's,
    // and the one with the name `name`.
    let steps = [
        ("snapshot", 2),
        ("snapshot-named", 3),
        ("snapshot-complete", 3),
    ];
    for (step, snapshots) in steps {
        let (bench, host, id) = killed_in(step, |host, id| {
            Box::pin(async move { drop(host.snapshot(&id, None).await) })
        });
        check_consistent(&bench, &host);
        assert_eq!(
            host.snapshots().list(None).unwrap().len(),
            snapshots,
            "{step}"
        );
        check_runs(&bench, &host, &id);
    }
}

#[test]
fn a_crash_during_a_pause_leaves_the_old_or_the_new_state() {
    let pause: Work = |host, id| Box::pin(async move { drop(host.pause(&id).await) });
    let (bench, host, id) = killed_in("snapshot", pause);
    check_consistent(&bench, &host);
    check_runs(&bench, &host, &id);

    for step in ["snapshot-named", "snapshot-complete"] {
        let (bench, host, id) = killed_in(step, pause);
        assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Paused);
        assert!(bench.world.running().is_empty());
        check_consistent(&bench, &host);
        bench.run_and_kill(async {
            host.resume(&id).await.unwrap();
            assert_eq!(bench.world.read(&id), "old");
        });
    }
}

#[test]
fn a_crash_during_a_fork_or_create_leaves_no_new_sandbox() {
    let fork: Work = |host, id| Box::pin(async move { drop(host.fork(&id, 3, None).await) });
    let create: Work = |host, _| Box::pin(async move { drop(host.create(base()).await) });
    for work in [fork, create] {
        for step in ["assign", "detach", "detached"] {
            let (bench, host, id) = killed_in(step, work);
            assert_eq!(host.list().len(), 1);
            check_consistent(&bench, &host);
            check_runs(&bench, &host, &id);
        }
    }
}

#[test]
fn a_crash_during_a_rollback_leaves_the_old_state() {
    for step in ["assign", "detach", "detached"] {
        let (bench, host, id) = killed_in(step, |host, id| {
            Box::pin(async move { drop(host.rollback(&id, "name").await) })
        });
        check_consistent(&bench, &host);
        check_runs(&bench, &host, &id);
    }
}

#[test]
fn a_crash_during_a_kill_leaves_the_sandbox_killed() {
    for step in ["halt", "stop"] {
        let bench = Bench::new();
        let id = Arc::new(Mutex::new(String::new()));
        bench.run_and_kill(async {
            let host = bench.open().await;
            let sandbox = create_id(&host).await;
            *id.lock().unwrap() = sandbox.clone();
            bench.world.hang(step);
            tokio::spawn(async move { drop(host.kill(&sandbox).await) });
            until("the guest to exit", || bench.world.running().is_empty()).await;
            // Time in which the exit of the guest would be noticed.
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        });
        bench.world.clear_failures();
        let host = reopen(&bench);
        let id = id.lock().unwrap().clone();
        assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Killed);
        assert!(bench.world.running().is_empty());
    }
}

#[test]
fn a_guest_that_exited_without_a_daemon_breaks_its_sandbox() {
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
async fn an_adopted_guest_that_exits_breaks_its_sandbox() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    drop(host);
    let host = bench.open().await;
    bench.world.panic_guest(&id);
    until("the exit to be noticed", || {
        *host.get(&id).unwrap().state() != SandboxState::Running
    })
    .await;
    assert!(cause(&host, &id).contains("panicked"));
}

#[tokio::test]
async fn guests_without_a_record_are_stopped() {
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
async fn paused_sandboxes_survive_a_restart_and_orphaned_files_are_removed() {
    let bench = Bench::new();
    let host = bench.open().await;
    let paused = create_id(&host).await;
    bench.world.write(&paused, "text");
    host.pause(&paused).await.unwrap();
    let killed = create_id(&host).await;
    host.kill(&killed).await.unwrap();
    drop(host);
    std::fs::write(bench.files().join("orphan"), "x").unwrap();
    std::fs::write(bench.files().join(".half"), "x").unwrap();
    let host = bench.open().await;
    // The snapshots of the template and of the paused sandbox remain without an explicit call.
    bench.until_files(2).await;
    check_consistent(&bench, &host);
    assert_eq!(*host.get(&killed).unwrap().state(), SandboxState::Killed);
    host.resume(&paused).await.unwrap();
    assert_eq!(bench.world.read(&paused), "text");
}

#[tokio::test]
async fn a_paused_sandbox_without_its_snapshot_is_broken() {
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
