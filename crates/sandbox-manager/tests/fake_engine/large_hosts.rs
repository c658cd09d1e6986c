//! Hosts with many snapshots and paused sandboxes: the cost of a call or of a start does not depend
//! on their number.

use crate::fake;

use fake::{Bench, until};
use jiffy_sandbox_manager::{
    FabricatedJournal, FabricatedSandbox, FabricatedSnapshot, HostOptions, LineageObject,
    ListOrder, ListedSandboxes, ListedSnapshots, MAX_LINEAGE_NODES, SandboxSettings, Sandboxes,
    UnfoldedSeries,
};
use std::cell::Cell;
use std::fs;
use std::time::{Duration, Instant};

/// Number of snapshots, and of sandboxes paused in them.
const NUMBER: u64 = 2000;
/// Items per page.
const PAGE: usize = 10;
/// Key that owns every `OWNER_SHARE`th item.
const OWNER: &str = "few";
const OWNER_SHARE: u64 = 100;

fn owner_of(at: u64) -> Option<String> {
    at.is_multiple_of(OWNER_SHARE).then(|| OWNER.to_owned())
}

/// Returns the snapshot of the sandbox with the number `at`.
fn snapshot(at: u64) -> FabricatedSnapshot {
    FabricatedSnapshot {
        id: format!("snapshot{at}"),
        sandbox: format!("sandbox{at}"),
        owner: owner_of(at),
        template: "base".to_owned(),
        bytes: 1,
        created_ms: at,
        ..FabricatedSnapshot::default()
    }
}

/// Returns the paused sandbox with the number `at`.
fn sandbox(at: u64) -> FabricatedSandbox {
    FabricatedSandbox {
        id: format!("sandbox{at}"),
        template: "base".to_owned(),
        settings: SandboxSettings {
            owner: owner_of(at),
            ..SandboxSettings::default()
        },
        snapshot: format!("snapshot{at}"),
        created_ms: at,
        changed_ms: at,
        ..FabricatedSandbox::default()
    }
}

/// Returns a host whose journal has all sandboxes and snapshots. No daemon is running.
fn large() -> Bench {
    let bench = Bench::new();
    let journal = FabricatedJournal::open(&bench.dir.path().join("state.db")).unwrap();
    journal
        .add((0..NUMBER).map(snapshot), (0..NUMBER).map(sandbox))
        .unwrap();
    for at in 0..NUMBER {
        fs::write(bench.files().join(snapshot(at).id), "memory").unwrap();
    }
    bench
}

#[tokio::test]
async fn a_page_of_a_list_reads_only_its_own_items() {
    let host = large().open().await;
    let middle = Some((NUMBER / 2, format!("sandbox{}", NUMBER / 2)));
    for descending in [false, true] {
        for after in [None, middle.clone()] {
            let order = ListOrder { descending, after };
            let reads = Cell::new(0);
            let count = || reads.set(reads.get() + 1);
            let sandboxes = host
                .index()
                .in_order(ListedSandboxes::All, &order, PAGE, |_| {
                    count();
                    true
                });
            let snapshots = host
                .snapshots()
                .in_order(ListedSnapshots::All, &order, PAGE, |_| {
                    count();
                    true
                });
            assert_eq!((sandboxes.len(), snapshots.len()), (PAGE, PAGE));
            assert_eq!(reads.get(), 2 * PAGE);
            let first = match (descending, &order.after) {
                (false, None) => 0,
                (true, None) => NUMBER - 1,
                (false, Some(_)) => NUMBER / 2 + 1,
                (true, Some(_)) => NUMBER / 2 - 1,
            };
            assert_eq!(sandboxes[0].created_ms(), first);
        }
    }
    let of_one = host.snapshots().list(Some("sandbox7")).unwrap();
    let ids: Vec<_> = of_one.iter().map(|s| s.id()).collect();
    assert_eq!(ids, [snapshot(7).id]);
}

#[tokio::test]
async fn lists_by_owner_and_of_running_sandboxes_read_no_others() {
    let host = large().open().await;
    let reads = Cell::new(0);
    let count = || reads.set(reads.get() + 1);
    for descending in [false, true] {
        let (mut after, mut after_snapshot) = (None, None);
        let mut ages_seen = Vec::new();
        for length in [PAGE, PAGE, 0] {
            let order = ListOrder { descending, after };
            let of_owner = ListedSandboxes::OfOwner(OWNER);
            let sandboxes = host.index().in_order(of_owner, &order, PAGE, |_| {
                count();
                true
            });
            after = sandboxes
                .last()
                .map(|s| (s.created_ms(), s.id().to_owned()));
            let requested = ListedSnapshots::RequestedBy(OWNER);
            let order = ListOrder {
                descending,
                after: after_snapshot,
            };
            let snapshots = host.snapshots().in_order(requested, &order, PAGE, |_| {
                count();
                true
            });
            assert_eq!((sandboxes.len(), snapshots.len()), (length, length));
            assert_eq!(reads.take(), 2 * length);
            let ages = sandboxes.iter().map(|s| s.created_ms());
            assert!(ages.eq(snapshots.iter().map(|s| s.created_ms())));
            ages_seen.extend(snapshots.iter().map(|s| s.created_ms()));
            after_snapshot = snapshots
                .last()
                .map(|s| (s.created_ms(), s.id().to_owned()));
        }
        if descending {
            ages_seen.reverse();
        }
        let own = (0..NUMBER).filter(|at| owner_of(*at).is_some());
        assert!(ages_seen.into_iter().eq(own));
    }
    let order = ListOrder::default();
    let running = ListedSandboxes::Running;
    let sandboxes = host.index().in_order(running, &order, usize::MAX, |_| {
        count();
        true
    });
    assert_eq!((sandboxes.len(), reads.get()), (0, 0));
}

#[tokio::test]
async fn a_gc_round_walks_a_part_of_the_files_and_all_are_walked() {
    let bench = large();
    let orphan = bench.files().join("orphan");
    fs::write(&orphan, "no record").unwrap();
    let options = HostOptions {
        gc_interval: Duration::from_millis(50),
        ..HostOptions::default()
    };
    let _host = bench.open_with(options).await;
    until("the removal of the orphan", || !orphan.exists()).await;
    let runs = || *bench.world.gc_runs.lock().unwrap();
    let walked = || *bench.world.walked.lock().unwrap();
    // Wait for the end of the first pass.
    until("the next round", || runs() > 1).await;
    let before = (runs(), walked());
    until("further rounds", || runs() > before.0 + 3).await;
    let walked_files = walked() - before.1;
    // A round walks over at most 1,000 files. The last round may still be running.
    let rounds = runs() - before.0 + 1;
    assert!(
        walked_files <= rounds * 1000,
        "{walked_files} in {rounds} rounds"
    );
}

#[tokio::test]
async fn orphaned_files_are_removed_at_the_start_without_gc() {
    let bench = large();
    let orphan = bench.files().join("orphan");
    fs::write(&orphan, "no record").unwrap();
    let _host = bench.open().await;
    until("the removal of the orphan", || !orphan.exists()).await;
    assert_eq!(*bench.world.walked.lock().unwrap(), 0);
    assert_eq!(bench.file_names().len() as u64, NUMBER);
}

#[tokio::test]
async fn a_restart_reads_no_snapshot_and_corrects_sizes_in_the_background() {
    let bench = large();
    let host = bench.open().await;
    assert_eq!(host.list().len() as u64, NUMBER);
    let bytes = |at: u64| host.snapshots().like(&snapshot(at).id)[0].bytes();
    until("the last size", || {
        (0..NUMBER).all(|at| bytes(at) == "memory".len() as u64)
    })
    .await;
    let measured_by = bench.world.measured_by.lock().unwrap().clone();
    assert!(
        measured_by.iter().all(|thread| thread == "upkeep"),
        "{measured_by:?}"
    );
}

/// Opens a host with the sandboxes of [`large`], and a chain of `length` sandboxes of `OWNER`, each
/// of which was created from a snapshot of the one before.
async fn with_chain(length: u64) -> Sandboxes {
    let bench = large();
    let journal = FabricatedJournal::open(&bench.dir.path().join("state.db")).unwrap();
    let owner = Some(OWNER.to_owned());
    let snapshots = (0..length).map(|at| FabricatedSnapshot {
        id: format!("taken{at}"),
        sandbox: format!("member{at}"),
        parent: at.checked_sub(1).map(|before| format!("taken{before}")),
        owner: owner.clone(),
        ..snapshot(at)
    });
    let sandboxes = (0..length).map(|at| FabricatedSandbox {
        id: format!("member{at}"),
        snapshot: format!("taken{at}"),
        settings: SandboxSettings {
            owner: owner.clone(),
            ..SandboxSettings::default()
        },
        ..sandbox(at)
    });
    journal.add(snapshots, sandboxes).unwrap();
    for at in 0..length {
        fs::write(bench.files().join(format!("taken{at}")), "memory").unwrap();
    }
    drop(journal);
    bench.open().await
}

#[tokio::test]
async fn a_lineage_of_2000_objects_takes_300_ms_and_reads_no_objects_of_others() {
    let host = with_chain(1000).await;
    let reads = Cell::new(0);
    let is_visible = |owner: Option<&str>| {
        reads.set(reads.get() + 1);
        assert_eq!(owner, Some(OWNER));
        true
    };
    let walk = || {
        reads.set(0);
        let start = Instant::now();
        let lineage = host.lineage(
            LineageObject::Sandbox("member700".to_owned()),
            &UnfoldedSeries::None,
            is_visible,
        );
        (start.elapsed(), lineage)
    };
    // The fastest of several walks, because other tests use the processors too.
    let walks = (0..5).map(|_| walk());
    let (took, lineage) = walks.min_by_key(|(took, _)| *took).unwrap();
    assert_eq!((lineage.nodes.len(), lineage.is_truncated), (2000, false));
    // Each snapshot was taken of a sandbox, and each sandbox but the first has an origin.
    assert_eq!(lineage.edges.len(), 1999);
    // Each object is read several times, for example for its own node and for its neighbours. The
    // limit of ten reads per object excludes a walk that reads the whole lineage for each object.
    assert!(reads.get() < 10 * 2000, "{}", reads.get());
    assert!(took <= Duration::from_millis(300), "{took:?}");
    println!("a lineage of 2000 objects took {took:?}");
}

#[tokio::test]
async fn a_lineage_of_too_many_objects_has_the_nearest_ones() {
    // The lineage has this number of sandboxes and as many snapshots, so it exceeds the limit.
    let host = with_chain(MAX_LINEAGE_NODES as u64).await;
    let middle = LineageObject::Sandbox("member2500".to_owned());
    let lineage = host.lineage(middle, &UnfoldedSeries::None, |_| true);
    assert_eq!(lineage.nodes.len(), MAX_LINEAGE_NODES);
    assert!(lineage.is_truncated);
    let has = |id: &str| lineage.nodes.iter().any(|node| node.id == id);
    assert!(has("member2500") && has("member2499") && has("member2501"));
    // The first and the last member of the chain.
    assert!(!has("member0") && !has("member4999"));
    // No edge leads to an object that is missing.
    assert!(lineage.edges.iter().all(|e| has(&e.from) && has(&e.to)));
}
