//! Kills of sandboxes whose host is lost, and the return of a host.
//!
//! The hosts of a fleet *share* their paused sandboxes through the store. The *head* of a sandbox
//! is a record in the store that decides which host may run it. A host that returns compares its
//! sandboxes with their heads, since other hosts may have changed them. A host owns heads by its
//! number and its *epoch*, a number that is larger after each return of the host.

use crate::fake::Bench;
use crate::shared::{FleetHost, Host};
use crate::uploads::TestStore;
use jiffy_fleet_core::MemberId;
use jiffy_sandbox_manager::{HostOptions, OperationError, Sandbox};
use std::sync::atomic::Ordering;

#[tokio::test]
async fn a_kill_by_a_host_that_shared_its_sandboxes_before_is_recorded_when_it_shares_them_again() {
    let store = TestStore::new();
    let two = Host::start(&store, 2).await;
    let bench = Bench::new();
    let one = Host {
        sandboxes: bench.open_with(store.sharing_options(1)).await,
        bench,
    };
    let id = one.create(None, "killed").await.id().to_owned();
    one.pause_durably(&id).await;
    let Host { bench, sandboxes } = one;
    sandboxes.close().await;
    drop(sandboxes);
    // The host starts without the heads: it records the kill, but does not write it to the store.
    // `has_shared`: an earlier daemon of this data directory has shared its sandboxes.
    let alone = |has_shared| HostOptions {
        heads: None,
        has_shared,
        ..store.sharing_options(1)
    };
    let sandboxes = bench.open_with(alone(true)).await;
    sandboxes.remove(&id).await.unwrap();
    assert!(two.sandboxes.stored_sandbox(None, &id).await.is_ok());
    sandboxes.close().await;
    drop(sandboxes);
    // The host shares its sandboxes again, and marks the head of the killed sandbox.
    let _one = bench.open_with(store.sharing_options(1)).await;
    let was_killed = |stored: &Result<Option<Sandbox>, OperationError>| {
        let error = stored.as_ref().err();
        error.is_some_and(|e| e.to_string().contains("was killed"))
    };
    two.stored_until(&id, was_killed).await.unwrap_err();
}

#[tokio::test]
async fn the_state_of_a_sandbox_that_is_killed_without_its_host_is_removed_from_the_store() {
    let store = TestStore::new();
    let one = FleetHost::start(&store, 1).await;
    let two = FleetHost::start(&store, 2).await;
    let owner = Some("key1");
    let id = one.host.create(owner, "lost").await.id().to_owned();
    one.host.pause_durably(&id).await;
    assert!(store.objects("removed").is_empty());
    // Host 2 considers host 1 dead, and kills the sandbox of this host.
    two.dead.store(1, Ordering::SeqCst);
    let home = Some(MemberId(1));
    two.host
        .sandboxes
        .kill_away(owner, &id, home)
        .await
        .unwrap();
    // At most 30 s.
    for _ in 0..600 {
        // The removal waits for the next collection of the store.
        if !store.objects("removed").is_empty() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("the store still has the state of a killed sandbox");
}

#[tokio::test]
async fn a_sandbox_of_a_host_that_returns_is_not_used_before_its_comparison() {
    let limit = std::time::Duration::from_millis(50);
    let store = TestStore::new();
    let one = FleetHost::start(&store, 1).await;
    let two = FleetHost::start(&store, 2).await;
    let owner = Some("key1");
    let taken = one.host.create(owner, "taken").await.id().to_owned();
    one.host.pause_durably(&taken).await;
    two.host.take_over(owner, &taken).await.unwrap();
    // The first host returns: none of its sandboxes has been compared with its head.
    one.host.sandboxes.expect_comparison();
    assert!(!one.host.sandboxes.until_compared(&taken, limit).await);
    // The return starts epoch 2. Without the store, the comparison fails. Its argument `true`
    // includes sandboxes that were never stored.
    one.epoch.store(2, Ordering::SeqCst);
    store.make_unreachable();
    one.host.sandboxes.reconcile_heads(true).await.unwrap_err();
    assert!(!one.host.sandboxes.until_compared(&taken, limit).await);
    // A sandbox that was created meanwhile needs no comparison.
    let new = one.host.create(Some("key2"), "new").await.id().to_owned();
    assert!(one.host.sandboxes.until_compared(&new, limit).await);
    store.make_reachable();
    let (compared, waited) = tokio::join!(
        one.host.sandboxes.reconcile_heads(true),
        // 30 s: this comparison must succeed, also on a slow machine.
        one.host.sandboxes.until_compared(&taken, limit * 600)
    );
    compared.unwrap();
    assert!(waited);
    assert_eq!(one.host.state(&taken), None);
}
