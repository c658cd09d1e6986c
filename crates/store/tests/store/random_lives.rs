//! Hosts push, pull, remove and collect at random on a store that fails at random. A snapshot that
//! was pushed and not removed is always complete. `JIFFY_STORE_SOAK_SECONDS` sets a longer
//! duration.

use crate::support::*;
use jiffy_store::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Deterministic pseudorandom numbers.
struct Dice(u64);

impl Dice {
    fn throw(&mut self, sides: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

#[tokio::test]
async fn a_snapshot_that_was_pushed_and_not_removed_is_always_complete() {
    let seconds = std::env::var("JIFFY_STORE_SOAK_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok());
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(5));
    let inner: Arc<dyn object_store::ObjectStore> = Arc::new(object_store::memory::InMemory::new());
    let known = Mutex::new(HashMap::new());
    let host = async |number: u64| {
        let mut dice = Dice(number);
        let dir = tempfile::tempdir().unwrap();
        let faulty = FaultyStore::new(inner.clone());
        let settings = BackendSettings {
            attempts: 8,
            ..quick()
        };
        let store = over(faulty.clone(), settings);
        let mut faults = Dice(number + 100);
        let tenant = store.tenant("alice").await.unwrap();
        faulty.on(move |op, _| match (faults.throw(20), op) {
            (0, Op::Put) => Fault::AnswerLost,
            (0, Op::Get) => Fault::Cut,
            (0, _) => Fault::Unavailable,
            (1, _) => Fault::Slow(Duration::from_millis(2)),
            _ => Fault::None,
        });
        let mut options = PushOptions::new(dir.path().join("index"));
        options.pack_bytes = 200 << 10;
        while Instant::now() < end {
            match dice.throw(6) {
                // Push a snapshot.
                0..3 => {
                    let seeds: Vec<u64> = (0..8).map(|_| dice.throw(30)).collect();
                    let source = snapshot(dir.path(), &seeds);
                    match store.push(&tenant, &source, &options).await {
                        Ok((name, _)) => {
                            known.lock().unwrap().insert(name.root, source);
                        }
                        Err(StoreError::Gone(_) | StoreError::Conflict { .. }) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
                3 => {
                    // Remove a snapshot, unless few remain.
                    let removed = {
                        let mut known = known.lock().unwrap();
                        let root = known.keys().next().copied().filter(|_| known.len() > 3);
                        root.inspect(|root| drop(known.remove(root)))
                    };
                    if let Some(root) = removed {
                        store.remove(&tenant, root).await.unwrap();
                    }
                }
                4 => {
                    // Collect.
                    let at_once = GcOptions {
                        grace: Duration::from_millis(5),
                        lock_time: Duration::from_secs(60),
                        ..GcOptions::default()
                    };
                    match store.collect(&tenant, at_once).await {
                        Ok(_) | Err(StoreError::Collecting(_) | StoreError::Conflict { .. }) => {}
                        Err(StoreError::Missing { .. } | StoreError::Gone(_)) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
                _ => {
                    // Pull a snapshot and compare its content.
                    let some = known
                        .lock()
                        .unwrap()
                        .iter()
                        .next()
                        .map(|(root, source)| (*root, source.clone()));
                    if let Some((root, source)) = some {
                        let remote = store.open(&tenant, root).await;
                        let pulled = match &remote {
                            Ok(remote) => {
                                let cache =
                                    LayerCache::open(dir.path().join("cache"), 64 << 20).unwrap();
                                store
                                    .pull(remote, 0, Selection::All, &Arc::new(cache))
                                    .await
                            }
                            Err(e) => Err(StoreError::Source(e.to_string())),
                        };
                        // Another host may have removed the snapshot concurrently.
                        let still = known.lock().unwrap().contains_key(&root);
                        match pulled {
                            Ok((layer, _)) => {
                                assert!(std::fs::read(layer.path()).unwrap() == content(&source, 0))
                            }
                            Err(e) => assert!(!still, "{e}"),
                        }
                    }
                }
            }
        }
    };
    futures_util::future::join_all((1..=3).map(host)).await;
    let store = over(inner.clone(), quick());
    let tenant = store.tenant("alice").await.unwrap();
    let known = std::mem::take(&mut *known.lock().unwrap());
    for (root, source) in &known {
        assert_same(&store, &tenant, *root, source).await;
    }
}
