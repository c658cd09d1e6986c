//! Heads: of several hosts exactly one runs a stored sandbox, also with faults of the records.
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox.
//!
//! To *claim* a sandbox means to become its owner in the head. To *publish* a pause means to enter
//! the root of its snapshot in the head: any host may then resume it. The *root* is the digest that
//! identifies the snapshot in the store.
#![allow(clippy::unwrap_used, clippy::panic)]

use bytes::Bytes;
use jiffy_fleet::records::Fault;
use jiffy_fleet::{HeadError, Heads, MemoryRecords, Publication, RecordError};
use jiffy_fleet_core::{Epoch, MemberId, Owner, SandboxId};
use jiffy_store::host::{RemoteSettings, RemoteStore, STORE_TIMEOUT};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const ID: &str = "abcdefghijkmnpqrstuv";
const ROOT: &str = "1111111111111111111111111111111111111111111111111111111111111111";
const OTHER_ROOT: &str = "2222222222222222222222222222222222222222222222222222222222222222";
/// Limits of an attempt and of a call.
const SHORT: Duration = Duration::from_millis(40);

struct Fleet {
    records: MemoryRecords,
    remote: Arc<RemoteStore>,
    _dir: tempfile::TempDir,
}

/// Opens the store below `dir`.
fn remote(dir: &Path) -> Arc<RemoteStore> {
    let settings = RemoteSettings {
        url: format!("file://{}/bucket", dir.display()).parse().unwrap(),
        keyring: None,
        home: dir.join("home"),
        cache_bytes: 1 << 20,
        upload_bytes_per_second: None,
        timeout: STORE_TIMEOUT,
    };
    RemoteStore::open(&settings).unwrap()
}

impl Fleet {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self {
            records: MemoryRecords::default().with_timeouts(SHORT, SHORT),
            remote: remote(dir.path()),
            _dir: dir,
        }
    }

    /// Encrypts the content of the head of [`ID`].
    async fn sealed(&self, content: &[u8]) -> Bytes {
        let tenant = self.remote.tenant(None).await.unwrap();
        // The slot, derived from the id, is a part of the key of the head.
        let slot = SandboxId::try_from(ID).unwrap().slot().number();
        let key = tenant.head_key(slot, ID).unwrap();
        tenant.seal_record(&key, content).unwrap().into()
    }

    /// Returns the access of host `number` to the heads.
    fn host(&self, number: u32) -> Heads {
        let owner = Owner {
            member: MemberId(number),
            epoch: Epoch(1),
        };
        Heads::with_records(self.remote.clone(), Arc::new(self.records.clone()), owner)
    }
}

/// Returns the publication of a pause with this snapshot and root.
fn pause<'a>(snapshot: &'a str, root: &'a str) -> Publication<'a> {
    Publication {
        sandbox: ID,
        snapshot,
        root,
        taken_ms: 1,
        record: "record".to_owned(),
    }
}

/// Claims the sandbox for a resume from a snapshot, and retains the claim. In this file, the owner
/// `None` of a sandbox is the owner of the host. `false`: a sandbox that ran on a dead host is not
/// claimed.
async fn claim(host: &Heads, snapshot: &str) -> Result<(), HeadError> {
    let claim = host.claim(None, ID, snapshot, false).await?;
    claim.unwrap().retain();
    Ok(())
}

#[tokio::test]
async fn a_pause_is_claimed_by_one_host_and_published_by_its_owner_only() {
    let fleet = Fleet::new();
    let (one, two) = (fleet.host(1), fleet.host(2));
    assert!(one.claim(None, ID, "s1", false).await.unwrap().is_none());
    assert!(one.stored(None, ID).await.unwrap().is_none());
    one.publish(None, &pause("s1", ROOT)).await.unwrap();
    // A repeated publication changes nothing.
    one.publish(None, &pause("s1", ROOT)).await.unwrap();
    let stored = two.stored(None, ID).await.unwrap().unwrap();
    assert_eq!((&*stored.snapshot, &*stored.record), ("s1", "record"));
    claim(&two, "s1").await.unwrap();
    // A host that claimed a sandbox claims it again after a restart.
    claim(&two, "s1").await.unwrap();
    for moved in [
        claim(&one, "s1").await,
        one.publish(None, &pause("s1", ROOT)).await.map(drop),
        one.stored(None, ID).await.map(drop),
    ] {
        assert!(
            matches!(moved, Err(HeadError::Elsewhere { .. })),
            "{moved:?}"
        );
    }
    two.publish(None, &pause("s2", OTHER_ROOT)).await.unwrap();
    for moved in [
        claim(&one, "s1").await,
        one.publish(None, &pause("s1", ROOT)).await.map(drop),
    ] {
        assert!(matches!(moved, Err(HeadError::Newer { .. })), "{moved:?}");
    }
    claim(&one, "s2").await.unwrap();
    // A kill by a host that does not own the sandbox changes nothing.
    two.kill(None, ID).await.unwrap();
    let stays = two.stored(None, ID).await;
    assert!(
        matches!(stays, Err(HeadError::Elsewhere { .. })),
        "{stays:?}"
    );
    one.kill(None, ID).await.unwrap();
    one.kill(None, ID).await.unwrap();
    for killed in [
        claim(&one, "s2").await,
        two.publish(None, &pause("s2", OTHER_ROOT)).await.map(drop),
    ] {
        assert!(
            matches!(killed, Err(HeadError::Killed { .. })),
            "{killed:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_concurrent_claims_one_succeeds() {
    let fleet = Fleet::new();
    for round in 0..20 {
        let snapshot = format!("s{round}");
        let root = format!("{round:064x}");
        let home = fleet.host(1);
        match home.publish(None, &pause(&snapshot, &root)).await {
            Ok(_) => {}
            // Another host owns the sandbox since the last round.
            Err(HeadError::Elsewhere { host, .. }) => {
                let owner = fleet.host(host.trim_start_matches('h').parse().unwrap());
                owner.publish(None, &pause(&snapshot, &root)).await.unwrap();
            }
            Err(e) => panic!("{e}"),
        }
        let claims = (1..=16).map(|number| {
            let (host, snapshot) = (fleet.host(number), snapshot.clone());
            tokio::spawn(async move { claim(&host, &snapshot).await })
        });
        let mut winners = 0;
        for ended in claims.collect::<Vec<_>>() {
            match ended.await.unwrap() {
                Ok(()) => winners += 1,
                Err(e) => assert!(e.is_moved() || e.is_temporary(), "{e}"),
            }
        }
        assert_eq!(winners, 1, "round {round}");
    }
}

#[tokio::test]
async fn a_claim_with_an_unknown_outcome_leaves_the_sandbox_to_any_host() {
    let fleet = Fleet::new();
    let (one, two) = (fleet.host(1), fleet.host(2));
    one.publish(None, &pause("s1", ROOT)).await.unwrap();
    for fault in [Fault::LoseAnswer, Fault::Unavailable] {
        // The head can be read, and all attempts at the write fail.
        fleet.records.inject_writes(fault);
        let claimed = one.claim(None, ID, "s1", false).await;
        let error = claimed.unwrap_err();
        assert!(
            matches!(
                &error,
                HeadError::Record {
                    source: RecordError::Unknown { .. },
                    ..
                }
            ),
            "{fault:?}: {error}"
        );
        assert!(error.is_temporary());
        fleet.records.heal();
        // The outcome is settled in the background, and the sandbox is released.
        let start = std::time::Instant::now();
        while let Err(e) = claim(&two, "s1").await {
            assert!(start.elapsed() < Duration::from_secs(30), "{fault:?}: {e}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        two.release(None, ID).await.unwrap();
    }
}

#[tokio::test]
async fn a_dropped_claim_releases_the_sandbox() {
    let fleet = Fleet::new();
    let (one, two) = (fleet.host(1), fleet.host(2));
    one.publish(None, &pause("s1", ROOT)).await.unwrap();
    drop(one.claim(None, ID, "s1", false).await.unwrap().unwrap());
    let start = std::time::Instant::now();
    while let Err(e) = claim(&two, "s1").await {
        assert!(start.elapsed() < Duration::from_secs(30), "{e}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_failed_read_of_a_release_is_repeated_after_one_pause() {
    let fleet = Fleet::new();
    let (one, two) = (fleet.host(1), fleet.host(2));
    one.publish(None, &pause("s1", ROOT)).await.unwrap();
    let held = one.claim(None, ID, "s1", false).await.unwrap().unwrap();
    fleet.records.inject(Fault::Unavailable, usize::MAX);
    let start = std::time::Instant::now();
    drop(held);
    // The read fails within its limit.
    tokio::time::sleep(10 * SHORT).await;
    fleet.records.heal();
    // The first pause is one second. With a second pause, the release would take three seconds.
    while let Err(e) = claim(&two, "s1").await {
        assert!(start.elapsed() < Duration::from_millis(2_500), "{e}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_release_that_cannot_read_the_head_fails() {
    let fleet = Fleet::new();
    let (one, two) = (fleet.host(1), fleet.host(2));
    one.publish(None, &pause("s1", ROOT)).await.unwrap();
    claim(&one, "s1").await.unwrap();
    fleet.records.inject(Fault::Unavailable, usize::MAX);
    let error = one.release(None, ID).await.unwrap_err();
    assert!(error.is_temporary(), "{error}");
    fleet.records.heal();
    // The sandbox still belongs to the host, which repeats the call.
    let owned = claim(&two, "s1").await;
    assert!(
        matches!(owned, Err(HeadError::Elsewhere { .. })),
        "{owned:?}"
    );
    one.release(None, ID).await.unwrap();
    claim(&two, "s1").await.unwrap();
}

/// Executes a change of the sandbox whose head another host has replaced by `content`.
async fn after_unreadable(fleet: &Fleet, change: &str, content: Bytes) -> Result<(), HeadError> {
    let host = fleet.host(1);
    host.publish(None, &pause("s1", ROOT)).await.unwrap();
    if matches!(change, "release" | "publish") {
        claim(&host, "s1").await.unwrap();
    }
    fleet.records.inject_content(content);
    match change {
        "claim" => claim(&host, "s1").await,
        "release" => host.release(None, ID).await,
        "kill" => host.kill(None, ID).await,
        "kill_away" => {
            let killed = host.kill_away(None, ID, Some(MemberId(1))).await;
            killed.map(drop)
        }
        _ => host.publish(None, &pause("s2", OTHER_ROOT)).await.map(drop),
    }
}

#[tokio::test]
async fn a_change_that_loses_against_an_unreadable_head_fails_and_nothing_counts_as_killed() {
    for change in ["claim", "release", "kill", "kill_away", "publish"] {
        let fleet = Fleet::new();
        // The counter of the record, and a head of a format that this host does not know.
        let content = [&9_u64.to_le_bytes()[..], b"head"].concat();
        let result = after_unreadable(&fleet, change, fleet.sealed(&content).await).await;
        assert!(
            matches!(result, Err(HeadError::Damaged { .. })),
            "{change}: {result:?}"
        );
        let fleet = Fleet::new();
        let result = after_unreadable(&fleet, change, Bytes::from_static(b"damaged")).await;
        let is_damaged = matches!(
            result,
            Err(HeadError::Record {
                source: RecordError::Damaged { .. },
                ..
            })
        );
        assert!(is_damaged, "{change}: {result:?}");
    }
}

#[tokio::test]
async fn a_kill_without_the_home_names_the_state_to_remove_once() {
    let fleet = Fleet::new();
    let (one, two) = (fleet.host(1), fleet.host(2));
    // The dead host that has files of the sandbox.
    let home = Some(MemberId(1));
    one.publish(None, &pause("s1", ROOT)).await.unwrap();
    // The first kill returns the stored state, which the caller must remove.
    let state = two.kill_away(None, ID, home).await.unwrap().unwrap();
    assert_eq!((&*state.snapshot, &*state.root), ("s1", ROOT));
    assert_eq!(two.kill_away(None, ID, home).await.unwrap(), None);
    // The kill of a sandbox that was never stored leaves no state to remove.
    let other = "bcdefghijkmnpqrstuva";
    assert_eq!(two.kill_away(None, other, home).await.unwrap(), None);
}

#[tokio::test]
async fn a_change_that_other_hosts_precede_is_written_at_most_eight_times() {
    const MAX_WRITES: usize = 8;
    let fleet = Fleet::new();
    let one = fleet.host(1);
    one.publish(None, &pause("s1", ROOT)).await.unwrap();
    // Before each of these requests (one read and all writes), another client replaces the head.
    fleet.records.inject(Fault::Precede, 1 + MAX_WRITES);
    let contended = one.kill(None, ID).await;
    assert!(
        matches!(contended, Err(HeadError::Contended { .. })),
        "{contended:?}"
    );
    // The last write succeeds.
    fleet.records.inject(Fault::Precede, MAX_WRITES);
    one.kill(None, ID).await.unwrap();
    let killed = claim(&one, "s1").await;
    assert!(
        matches!(killed, Err(HeadError::Killed { .. })),
        "{killed:?}"
    );
}

#[tokio::test]
async fn malformed_ids_and_records_of_other_owners_are_not_found() {
    let fleet = Fleet::new();
    let one = fleet.host(1);
    one.publish(Some("key1"), &pause("s1", ROOT)).await.unwrap();
    assert!(one.stored(Some("key2"), ID).await.unwrap().is_none());
    assert!(one.stored(None, ID).await.unwrap().is_none());
    for id in ["", "x", "../../etc", "abcdefghijkmnpqrstu1"] {
        let result = one.stored(Some("key1"), id).await;
        assert!(matches!(result, Err(HeadError::Damaged { .. })), "{id}");
    }
    // More than 64 KiB, the maximum of a record in a head.
    let long = Publication {
        record: "x".repeat(70_000),
        ..pause("s1", ROOT)
    };
    let rejected = fleet.host(1).publish(Some("key3"), &long).await;
    assert!(
        matches!(rejected, Err(HeadError::Damaged { .. })),
        "{rejected:?}"
    );
}
