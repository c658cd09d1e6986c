//! Stores that must not hold records.

use super::servers;
use jiffy_fleet::check::{CheckOptions, check};
use jiffy_fleet::{RecordError, Records, StoreRecords};
use jiffy_store::{BackendSettings, StoreError, StoreUrl};
use std::sync::Arc;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_conditional_writes_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    // With `--nometa`, the server has no ETags, which conditional writes compare.
    let Some((_server, address)) = servers::versitygw(dir.path(), &["--nometa"]) else {
        return;
    };
    let records = servers::store_records(address, false);
    let error = check(&records, CheckOptions::default()).await.unwrap_err();
    assert!(matches!(error, RecordError::Unsuitable(_)), "{error}");
    // The short check of a daemon rejects it as well.
    let error = servers::bucket(address)
        .check_conditions()
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::NoConditions { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_suitable_server_passes_the_short_check_repeatedly() {
    let dir = tempfile::tempdir().unwrap();
    let Some((_server, address)) = servers::versitygw(dir.path(), &[]) else {
        return;
    };
    let backend = servers::bucket(address);
    for _ in 0..3 {
        backend.check_conditions().await.unwrap();
    }
    // Several hosts check at the same time.
    let checks = (0..8).map(|_| backend.check_conditions());
    for checked in futures(checks).await {
        checked.unwrap();
    }
}

/// Runs all futures concurrently in this task. Returns their results in the order of their ends.
async fn futures<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut results = Vec::new();
    let mut pending: Vec<_> = futures.map(Box::pin).collect();
    std::future::poll_fn(|context| {
        pending.retain_mut(|future| match future.as_mut().poll(context) {
            std::task::Poll::Ready(result) => {
                results.push(result);
                false
            }
            std::task::Poll::Pending => true,
        });
        if pending.is_empty() {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    results
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_passes_the_check_of_one_host() {
    let dir = tempfile::tempdir().unwrap();
    let url: StoreUrl = format!("file://{}", dir.path().display()).parse().unwrap();
    let backend = url.open(BackendSettings::control()).unwrap();
    let records: Arc<dyn Records> = Arc::new(StoreRecords::new(&backend));
    let options = CheckOptions {
        rounds: 3,
        writers: 8,
    };
    check(&records, options).await.unwrap();
}
