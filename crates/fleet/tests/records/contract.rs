//! Contract of [`Records`], which all kinds fulfil: in memory, in an S3 store, and in etcd.

use super::servers;
use bytes::Bytes;
use jiffy_fleet::check::{CheckOptions, check};
use jiffy_fleet::records::MAX_RECORD_BYTES;
use jiffy_fleet::{MemoryRecords, RecordError, RecordKey, Records, Written};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Clients of the same records through separate connections.
pub type Clients = [Arc<dyn Records>; 2];

pub fn key(text: &str) -> RecordKey {
    text.parse().unwrap()
}

pub fn value(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

/// Creates a record and returns its version.
pub async fn put(records: &Arc<dyn Records>, key: &RecordKey, text: &str) -> jiffy_fleet::Version {
    let written = records.create(key, value(text)).await.unwrap();
    let Written::Done(version) = written else {
        panic!("{key} exists: {written:?}");
    };
    version
}

async fn fulfils_the_contract(clients: &Clients) {
    exactly_one_writer_succeeds(clients).await;
    outdated_replacements_are_lost(clients).await;
    listings_are_complete_and_in_order(clients).await;
    records_are_limited_in_size(clients).await;
}

/// In each round of the check, all writers replace the same version of a record at the same time.
/// Exactly one of them may succeed.
async fn exactly_one_writer_succeeds([one, other]: &Clients) {
    let report = check(one, CheckOptions::default()).await.unwrap();
    // The default numbers of a check.
    assert_eq!((report.rounds, report.writers), (20, 32));
    assert!(report.replace_p50_ms > 0.0 && report.replace_p99_ms >= report.replace_p50_ms);
    // The records of the check are removed again.
    let left = other.list(&key("check"), None, 10).await.unwrap();
    assert_eq!(left.keys, []);
}

async fn outdated_replacements_are_lost([one, other]: &Clients) {
    let key = key("contract/one");
    assert_eq!(one.get(&key).await.unwrap(), None);
    let first = put(one, &key, "first").await;
    let read = other.get(&key).await.unwrap().unwrap();
    assert_eq!((&read.value[..], &read.version), (&b"first"[..], &first));
    assert_eq!(
        other.create(&key, value("again")).await.unwrap(),
        Written::Lost(Some(read))
    );
    let replaced = other.replace(&key, value("second"), &first).await.unwrap();
    let Written::Done(second) = replaced else {
        panic!("{replaced:?}");
    };
    assert_ne!(first, second);
    let Written::Lost(Some(current)) = one.replace(&key, value("third"), &first).await.unwrap()
    else {
        panic!("an outdated replacement succeeded");
    };
    assert_eq!(
        (&current.value[..], &current.version),
        (&b"second"[..], &second)
    );
    one.purge(&key).await.unwrap();
    assert_eq!(other.get(&key).await.unwrap(), None);
    let missing = one.replace(&key, value("fourth"), &second).await.unwrap();
    assert_eq!(missing, Written::Lost(None));
    one.purge(&key).await.unwrap();
}

async fn listings_are_complete_and_in_order([one, other]: &Clients) {
    let folder = key("contract/list");
    let permanent: Vec<RecordKey> = (0..30)
        .map(|n| folder.child(&format!("p{n:02}")).unwrap())
        .collect();
    for key in &permanent {
        put(one, key, key.as_str()).await;
    }
    // A record whose key starts with the name of the folder, but is not in it.
    put(one, &key("contract/list2"), "neighbour").await;
    let ended = AtomicBool::new(false);
    let changing = async {
        let mut number = 0;
        while !ended.load(Ordering::SeqCst) {
            let key = folder
                .child(&format!("p{:02}x{number}", number % 30))
                .unwrap();
            put(other, &key, key.as_str()).await;
            other.purge(&key).await.unwrap();
            number += 1;
            // Records in memory respond without waiting.
            tokio::task::yield_now().await;
        }
    };
    let walking = async {
        for _ in 0..5 {
            let (mut seen, mut after) = (Vec::new(), None);
            loop {
                let page = one.list(&folder, after.as_ref(), 7).await.unwrap();
                assert!(page.keys.len() <= 7);
                seen.extend(page.keys);
                after = seen.last().cloned();
                if !page.more {
                    break;
                }
            }
            assert!(seen.is_sorted_by(|a, b| a < b), "{seen:?}");
            let seen: BTreeSet<_> = seen.into_iter().collect();
            for key in &permanent {
                assert!(seen.contains(key), "{key} is missing");
            }
            assert!(!seen.contains(&key("contract/list2")));
        }
        ended.store(true, Ordering::SeqCst);
    };
    tokio::join!(changing, walking);
}

async fn records_are_limited_in_size([one, other]: &Clients) {
    let key = key("contract/size");
    let long = Bytes::from(vec![b'x'; MAX_RECORD_BYTES + 1]);
    let rejected = one.create(&key, long.clone()).await.unwrap_err();
    assert!(
        matches!(rejected, RecordError::TooLarge { .. }),
        "{rejected}"
    );
    assert_eq!(other.get(&key).await.unwrap(), None);
    // A record of the maximum size is written.
    let Written::Done(version) = one.create(&key, long.slice(1..)).await.unwrap() else {
        panic!("not written");
    };
    let rejected = one.replace(&key, long, &version).await.unwrap_err();
    assert!(
        matches!(rejected, RecordError::TooLarge { .. }),
        "{rejected}"
    );
    let read = other.get(&key).await.unwrap().unwrap();
    assert_eq!(
        (read.value.len(), read.version),
        (MAX_RECORD_BYTES, version)
    );
}

#[tokio::test]
async fn records_in_memory_fulfil_the_contract() {
    let records = MemoryRecords::default();
    fulfils_the_contract(&[Arc::new(records.clone()), Arc::new(records)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_in_an_s3_store_fulfil_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    let Some((_server, address)) = servers::versitygw(dir.path(), &[]) else {
        return;
    };
    let client = || servers::store_records(address, false);
    fulfils_the_contract(&[client(), client()]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_in_etcd_fulfil_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    let Some((_server, address)) = servers::etcd(dir.path()) else {
        return;
    };
    let client = || servers::etcd_records(address, false);
    fulfils_the_contract(&[client(), client()]).await;
}
