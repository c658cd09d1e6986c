//! Random calls of concurrent clients and kills of the daemon: no sandbox is lost, blocked or
//! orphaned.

use crate::fake;

use fake::{Bench, Dice, base, create_id, until};
use jiffy_sandbox_manager::{ErrorKind, OperationError, SandboxState, Sandboxes};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;

/// Minimum number of calls of all clients.
const CALLS: usize = 1000;
/// Number of concurrent clients.
const CLIENTS: usize = 20;
/// Number of kills of the daemon during calls.
const CRASHES: usize = 5;

/// Performs a random call. Its error can only be a rejection, since no step fails here.
async fn call(host: &Sandboxes, dice: &mut Dice) -> Result<(), OperationError> {
    let alive = |r: &&jiffy_sandbox_manager::Sandbox| *r.state() != SandboxState::Killed;
    let ids: Vec<_> = host
        .list()
        .iter()
        .filter(alive)
        .map(|r| r.id().to_owned())
        .collect();
    let Some(id) = dice.pick(&ids).cloned().filter(|_| ids.len() > 3) else {
        return host.create(base()).await.map(drop);
    };
    match dice.throw(12) {
        0 | 1 => host.create(base()).await.map(drop),
        2 => {
            let report = host.fork(&id, 1 + dice.throw(3), None).await?;
            report.children.into_iter().try_for_each(|c| c.map(drop))
        }
        3 => host.pause(&id).await.map(drop),
        4 => host.resume(&id).await.map(drop),
        5 => host.ensure_running(&id).await.map(drop),
        6 => host.snapshot(&id, None).await.map(drop),
        7 => {
            let all: Vec<_> = host
                .snapshots()
                .list(Some(&id))?
                .into_iter()
                .map(|s| s.id().to_owned())
                .collect();
            match dice.pick(&all) {
                Some(snapshot) => host.rollback(&id, snapshot).await.map(drop),
                None => Ok(()),
            }
        }
        8 => host.kill(&id).await.map(drop),
        9 => host.remove(&id).await.map(drop),
        10 => host
            .timeouts()
            .set(&id, Some(Duration::from_secs(600)))
            .await
            .map(drop),
        _ => host.promote(&id).await.map(drop),
    }
}

#[test]
fn random_calls_and_crashes_leave_no_blocked_or_lost_sandbox() {
    let bench = Bench::new();
    let done = Arc::new(AtomicUsize::new(0));
    for round in 0..=CRASHES {
        let goal = CALLS * (round + 1) / (CRASHES + 1);
        bench.run_and_kill(async {
            let host = bench.open().await;
            let mut clients = JoinSet::new();
            for client in 0..CLIENTS {
                let (host, done) = (host.clone(), done.clone());
                // Each client has a seed of its own. The constant sets many bits: the first numbers
                // of a generator with a small seed would be similar.
                let seed = 0x9e37_79b9_7f4a_7c15 ^ (round * CLIENTS + client + 1) as u64;
                clients.spawn(async move {
                    let mut dice = Dice(seed);
                    while done.fetch_add(1, Ordering::Relaxed) < goal || round == CRASHES {
                        if let Err(e) = call(&host, &mut dice).await {
                            let kind = e.kind();
                            let is_rejection =
                                matches!(kind, ErrorKind::Conflict | ErrorKind::Unknown);
                            // The guest was killed during the operation.
                            let is_guest_lost =
                                kind == ErrorKind::Failed && e.to_string().contains("end");
                            // The daemon was killed during the operation.
                            let is_daemon_killed =
                                matches!(e, OperationError::Lost(_)) && round < CRASHES;
                            assert!(
                                is_rejection || is_guest_lost || is_daemon_killed,
                                "{kind:?}: {e}"
                            );
                        }
                        if round == CRASHES && done.load(Ordering::Relaxed) >= CALLS {
                            break;
                        }
                    }
                });
            }
            if round == CRASHES {
                // In the last round all clients end, unless one of them is blocked.
                let end = tokio::time::timeout(Duration::from_secs(60), clients.join_all());
                assert!(end.await.is_ok(), "a client is blocked");
            } else {
                until("enough calls", || done.load(Ordering::Relaxed) >= goal).await;
                // Clients are not waited for: their operations are cut off.
                assert!(clients.try_join_next().is_none_or(|end| end.is_ok()));
                clients.detach_all();
            }
        });
    }
    assert!(done.load(Ordering::Relaxed) >= CALLS);
    bench.run_and_kill(check_consistent(&bench));
}

/// Checks that guests, records, files and reservations agree, and that each sandbox is usable.
async fn check_consistent(bench: &Bench) {
    let host = bench.open().await;
    // Each running sandbox has exactly one guest, and each guest belongs to a sandbox.
    let running = |state: &SandboxState| *state == SandboxState::Running;
    let ids = |host: &Sandboxes| -> HashSet<String> {
        let all = host.list().into_iter().filter(|r| running(r.state()));
        all.map(|r| r.id().to_owned()).collect()
    };
    let guests: HashSet<String> = bench.world.running().into_iter().collect();
    assert_eq!(guests, ids(&host));
    assert_eq!(host.figures().reservations().sandboxes, guests.len());
    // Files and journal agree.
    let recorded: HashSet<String> = host
        .snapshots()
        .list(None)
        .unwrap()
        .into_iter()
        .map(|s| s.id().to_owned())
        .collect();
    let files = || bench.file_names().into_iter().collect::<HashSet<_>>();
    until("files and journal to agree", || files() == recorded).await;
    // No sandbox is blocked: each performs the operations of its state and can be removed.
    assert!(!host.list().is_empty());
    for record in host.list() {
        let id = &record.id().to_owned();
        let limit = Duration::from_secs(10);
        let life = async {
            match record.state() {
                SandboxState::Running => {
                    host.pause(id).await.unwrap();
                    host.resume(id).await.unwrap();
                }
                SandboxState::Paused => drop(host.resume(id).await.unwrap()),
                SandboxState::Broken { .. } => {
                    if let Some(snapshot) = &record.snapshot() {
                        host.rollback(id, snapshot).await.unwrap();
                    }
                }
                SandboxState::Killed => {}
                SandboxState::Creating => panic!("{id} is still being created"),
            }
            host.remove(id).await.unwrap();
        };
        let lived = tokio::time::timeout(limit, life).await;
        assert!(lived.is_ok(), "{id} is blocked");
    }
    assert!(host.list().is_empty() && bench.world.running().is_empty());
    let reservations = host.figures().reservations();
    assert_eq!(
        (
            reservations.sandboxes,
            reservations.starting,
            reservations.memory_mib
        ),
        (0, 0, 0)
    );
}

#[test]
fn concurrent_pauses_and_removals_do_not_collect_snapshots_in_use() {
    let bench = Bench::new();
    bench.run_and_kill(async {
        let host = bench.open().await;
        let mut clients = JoinSet::new();
        for _ in 0..8 {
            let host = host.clone();
            clients.spawn(async move {
                let id = create_id(&host).await;
                for _ in 0..80 {
                    host.pause(&id).await.unwrap();
                    host.resume(&id).await.unwrap();
                    let report = host.fork(&id, 1, None).await.unwrap();
                    for child in report.children {
                        // The snapshot of the fork has no user now, while the next pause takes
                        // another one.
                        host.remove(child.unwrap().id()).await.unwrap();
                    }
                }
                host.remove(&id).await.unwrap();
            });
        }
        clients.join_all().await;
    });
}
