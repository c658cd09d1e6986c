//! Modules (WebAssembly programs) of functions: found by their digest and retained while a host
//! holds them.

use crate::support::*;
use jiffy_store::*;
use std::time::Duration;

/// Runs a collection without a grace period. It condemns unused objects, and removes the objects
/// that the previous collection condemned.
async fn collect(store: &SharedStore, tenant: &Tenant) -> GcReport {
    // The store's clock has a resolution of milliseconds.
    tokio::time::sleep(Duration::from_millis(3)).await;
    let at_once = GcOptions {
        grace: Duration::ZERO,
        ..GcOptions::default()
    };
    store.collect(tenant, at_once).await.unwrap()
}

#[tokio::test]
async fn a_module_is_retained_until_its_last_host_releases_it() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = in_memory();
    let tenant = store.tenant("alice").await.unwrap();
    let other = store.tenant("bob").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let module = snapshot(dir.path(), &[1, 2, 3]);
    let root = store.root(&tenant, &module).await.unwrap();
    // The module was not pushed yet.
    let early = store.hold_module(&tenant, "d1", root, "one").await;
    assert!(matches!(early, Err(StoreError::Gone(_))), "{early:?}");
    assert_eq!(store.module(&tenant, "d1").await.unwrap(), None);
    let (pushed, _) = store.push(&tenant, &module, &options).await.unwrap();
    assert_eq!(pushed.root, root);
    for host in ["one", "two"] {
        store.hold_module(&tenant, "d1", root, host).await.unwrap();
    }
    assert_eq!(store.module(&other, "d1").await.unwrap(), None);
    let release = |host| store.release_module(&tenant, "d1", root, host);
    release("one").await.unwrap();
    assert_eq!(collect(&store, &tenant).await.condemned, 0);
    assert_eq!(store.module(&tenant, "d1").await.unwrap(), Some(root));
    release("two").await.unwrap();
    assert_eq!(store.module(&tenant, "d1").await.unwrap(), None);
    // Just in time: the module is not condemned yet.
    store
        .hold_module(&tenant, "d1", root, "three")
        .await
        .unwrap();
    for _ in 0..2 {
        let report = collect(&store, &tenant).await;
        assert_eq!((report.condemned, report.removed), (0, 0));
    }
    assert_same(&store, &tenant, root, &module).await;
    release("three").await.unwrap();
    // The manifest, the locations and the pack.
    assert_eq!(collect(&store, &tenant).await.condemned, 3);
    // Too late: the module is condemned, and no holder remains.
    let late = store.hold_module(&tenant, "d1", root, "four").await;
    assert!(matches!(late, Err(StoreError::Gone(_))), "{late:?}");
    assert_eq!(collect(&store, &tenant).await.removed, 3);
    assert_eq!(store.stats(&tenant).await.unwrap().packs, 0);
}
