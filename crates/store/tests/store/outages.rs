//! Stores that are slow, stall or do not exist.

use crate::support::*;
use jiffy_store::*;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn cache(dir: &std::path::Path) -> Arc<LayerCache> {
    Arc::new(LayerCache::open(dir.join("cache"), u64::MAX).unwrap())
}

/// Time advances only for the store's delays.
#[tokio::test(start_paused = true)]
async fn a_slow_store_is_waited_for_while_bytes_arrive_and_given_up_when_none_do() {
    let dir = tempfile::tempdir().unwrap();
    let settings = BackendSettings {
        request_timeout: Duration::from_secs(30),
        deadline: Duration::from_secs(60),
        hedge_after: Some(Duration::from_secs(25)),
        ..quick()
    };
    let (faulty, store) = in_memory_with(settings);
    let tenant = store.tenant("alice").await.unwrap();
    let source = snapshot(dir.path(), &[1, 2]);
    let options = PushOptions::new(dir.path().join("index"));
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let remote = store.open(&tenant, name.root).await.unwrap();
    let pull = || async {
        let start = tokio::time::Instant::now();
        let cache = cache(&dir.path().join(format!("{:?}", Instant::now())));
        let pulled = store.pull(&remote, 0, Selection::All, &cache).await;
        (pulled, start.elapsed())
    };
    // Each range arrives in ten pieces after 20 s each. It takes 200 s, longer than the maximum
    // time without a received byte.
    faulty.on(|op, key| {
        if op == Op::Get && key.contains("/packs/") {
            Fault::Trickle(Duration::from_secs(20))
        } else {
            Fault::None
        }
    });
    let (pulled, took) = pull().await;
    let (layer, _) = pulled.unwrap();
    assert!(took >= Duration::from_secs(200), "{took:?}");
    assert!(fs::read(layer.path()).unwrap() == content(&source, 0));
    let traffic = store.backend().traffic();
    assert_eq!((traffic.retries, traffic.hedges), (0, 0));
    faulty.on(|op, key| {
        if op == Op::Get && key.contains("/packs/") {
            Fault::Halt
        } else {
            Fault::None
        }
    });
    let (pulled, took) = pull().await;
    let failed = pulled.unwrap_err();
    assert!(failed.is_unavailable(), "{failed}");
    // Each of the 3 attempts receives half of the range, and then waits for at most the deadline of
    // 60 s.
    assert!(took < Duration::from_secs(3 * 61), "{took:?}");
}

#[tokio::test]
async fn a_directory_that_is_gone_is_not_a_store_without_objects() {
    let dir = tempfile::tempdir().unwrap();
    let (place, away) = (dir.path().join("store"), dir.path().join("away"));
    let url: StoreUrl = format!("file://{}", place.display()).parse().unwrap();
    let settings = BackendSettings {
        attempts: 2,
        ..quick()
    };
    let store = SharedStore::new(url.open(settings).unwrap(), keyring());
    let tenant = store.tenant("alice").await.unwrap();
    let options = PushOptions::new(dir.path().join("index"));
    let source = snapshot(dir.path(), &[1, 2, 3]);
    let (name, _) = store.push(&tenant, &source, &options).await.unwrap();
    let remote = store.open(&tenant, name.root).await.unwrap();
    fs::rename(&place, &away).unwrap();
    // An unmounted file system leaves an empty mount point.
    fs::create_dir(&place).unwrap();
    let cache = cache(dir.path());
    let failures = [
        store.pull(&remote, 0, Selection::All, &cache).await.err(),
        store.open(&tenant, name.root).await.err(),
        store.snapshots(&tenant).await.err(),
        store.find_tenant("alice").await.err(),
        store.tenant("bob").await.err(),
        store.backend().head("any").await.err(),
        store.remove_name(&tenant, "id").await.err(),
        store.push(&tenant, &source, &options).await.err(),
    ];
    for failure in failures {
        let failure = failure.unwrap();
        assert!(matches!(failure, StoreError::Absent { .. }), "{failure}");
        let (text, place) = (failure.to_string(), place.display().to_string());
        assert!(text.contains(&place) && text.contains("mount"), "{text}");
    }
    assert_eq!(fs::read_dir(&place).unwrap().count(), 0);
    fs::remove_dir(&place).unwrap();
    fs::rename(&away, &place).unwrap();
    let (layer, _) = store
        .pull(&remote, 0, Selection::All, &cache)
        .await
        .unwrap();
    assert!(fs::read(layer.path()).unwrap() == content(&source, 0));
}
