//! Sandboxes that wait for their creator.
#![allow(clippy::unwrap_used, clippy::panic)]

mod fake;

use fake::{Bench, base, until};
use jiffy_engine::BootMode;
use jiffy_host::Options;

#[tokio::test]
async fn a_create_takes_a_waiting_sandbox_which_nobody_was_before() {
    let bench = Bench::new();
    let host = bench.open_with(Options { warm: 2 });
    assert_eq!(
        host.create(base()).await.unwrap().boot_mode,
        Some(BootMode::Snapshot)
    );
    until("the pool to fill", || host.warm() == 2).await;
    // Those that wait are nobody.
    let nobodies = bench
        .world
        .running()
        .iter()
        .filter(|id| id.is_empty())
        .count();
    assert_eq!(nobodies, 2);
    let a = host.create(base()).await.unwrap();
    let b = host.create(base()).await.unwrap();
    assert_eq!(
        (a.boot_mode, b.boot_mode),
        (Some(BootMode::WarmPool), Some(BootMode::WarmPool))
    );
    assert_ne!(bench.world.body(&a.id).persona.lock().unwrap().id, b.id);
    // An empty pool falls through.
    assert_eq!(
        host.create(base()).await.unwrap().boot_mode,
        Some(BootMode::Snapshot)
    );
    until("the pool to fill again", || host.warm() == 2).await;
    host.kill(&a.id).await.unwrap();
    assert_eq!(host.warm(), 2, "a used one does not come back");
}

#[tokio::test]
async fn the_pool_is_emptied_when_its_template_changes_and_at_the_end() {
    let bench = Bench::new();
    let host = bench.open_with(Options { warm: 1 });
    host.create(base()).await.unwrap();
    until("the pool to fill", || host.warm() == 1).await;
    *bench.world.version.lock().unwrap() += 1;
    assert_eq!(
        host.create(base()).await.unwrap().boot_mode,
        Some(BootMode::Snapshot)
    );
    assert_eq!(host.warm(), 0);
    until("the pool to fill", || host.warm() == 1).await;
    host.stop_all().await;
    assert!(bench.world.running().is_empty());
}
