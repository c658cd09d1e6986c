//! Encryption of records, and detection of a store that returns to an older state, for example
//! after a restore from a backup.

use super::contract::key;
use async_trait::async_trait;
use bytes::Bytes;
use jiffy_fleet::records::{Fault, Outcome};
use jiffy_fleet::{
    MemoryRecords, Page, RecordError, RecordKey, Records, SealedRecords, Version, Versioned,
    Written,
};
use jiffy_store::{BackendSettings, Keyring, SharedStore, StoreUrl, Tenant};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Records whose answers to reads wait for permits.
#[derive(Debug)]
struct SlowAnswers {
    records: MemoryRecords,
    /// One permit for each read that the records have answered.
    reads: Semaphore,
    answers: Semaphore,
}

#[async_trait]
impl Records for SlowAnswers {
    async fn get(&self, key: &RecordKey) -> Result<Option<Versioned>, RecordError> {
        let read = self.records.get(key).await;
        self.reads.add_permits(1);
        self.answers.acquire().await.unwrap().forget();
        read
    }

    async fn create(&self, key: &RecordKey, value: Bytes) -> Result<Written, RecordError> {
        self.records.create(key, value).await
    }

    async fn replace(
        &self,
        key: &RecordKey,
        value: Bytes,
        version: &Version,
    ) -> Result<Written, RecordError> {
        self.records.replace(key, value, version).await
    }

    async fn list(
        &self,
        prefix: &RecordKey,
        after: Option<&RecordKey>,
        limit: usize,
    ) -> Result<Page, RecordError> {
        self.records.list(prefix, after, limit).await
    }

    async fn purge(&self, key: &RecordKey) -> Result<(), RecordError> {
        self.records.purge(key).await
    }
}

/// Returns the keys with which records are encrypted.
async fn tenant(dir: &std::path::Path) -> Arc<Tenant> {
    let url: StoreUrl = format!("file://{}", dir.display()).parse().unwrap();
    let secret = "5".repeat(64);
    let keys = format!("locator = \"{secret}\"\ncurrent = \"k\"\n[keys]\nk = \"{secret}\"\n");
    let keyring = Keyring::parse(&keys).unwrap();
    let store = SharedStore::new(url.open(BackendSettings::default()).unwrap(), keyring);
    store.tenant("fleet").await.unwrap()
}

/// Returns the written record.
fn done(outcome: Outcome) -> jiffy_fleet::Record {
    match outcome {
        Outcome::Done(record) => record,
        Outcome::Lost(current) => panic!("lost to {current:?}"),
    }
}

#[tokio::test]
async fn sealed_records_reject_damaged_moved_and_older_content() {
    let dir = tempfile::tempdir().unwrap();
    let memory = MemoryRecords::default();
    let tenant = tenant(dir.path()).await;
    let sealed = SealedRecords::new(Arc::new(memory.clone()), tenant.clone());
    let (one, two) = (key("fleet/one"), key("fleet/two"));
    let first = sealed.create(&one, b"secret content".to_vec()).unwrap();
    let first = done(sealed.send(&first).await.unwrap());
    let raw_first = memory.get(&one).await.unwrap().unwrap();
    assert!(!raw_first.value.windows(6).any(|part| part == b"secret"));
    let second = sealed.replace(&one, b"second".to_vec(), &first).unwrap();
    let second = done(sealed.send(&second).await.unwrap());
    // The encrypted content contains the number of the write. A lower number than before reveals
    // an older content.
    assert_eq!((first.counter(), second.counter()), (1, 2));
    assert_eq!(sealed.get(&one).await.unwrap().unwrap().content, b"second");

    // A copy under another key is rejected.
    let raw = memory.get(&one).await.unwrap().unwrap();
    memory.create(&two, raw.value.clone()).await.unwrap();
    let error = sealed.get(&two).await.unwrap_err();
    assert!(matches!(error, RecordError::Damaged { .. }), "{error}");

    // Changed bytes and truncated content are rejected.
    let mut version = raw.version;
    let mut damaged: Vec<Bytes> = (0..raw.value.len())
        .step_by(3)
        .map(|at| {
            let mut bytes = raw.value.to_vec();
            bytes[at] ^= 1;
            bytes.into()
        })
        .collect();
    damaged.extend(
        (0..raw.value.len())
            .step_by(5)
            .map(|length| raw.value.slice(..length)),
    );
    for bytes in damaged {
        let written = memory.replace(&one, bytes, &version).await.unwrap();
        let Written::Done(next) = written else {
            panic!("{written:?}");
        };
        version = next;
        let error = sealed.get(&one).await.unwrap_err();
        assert!(matches!(error, RecordError::Damaged { .. }), "{error}");
    }

    // The first content, and a missing record, are older than the content that was seen.
    memory
        .replace(&one, raw_first.value, &version)
        .await
        .unwrap();
    let error = sealed.get(&one).await.unwrap_err();
    assert!(matches!(error, RecordError::Regressed { .. }), "{error}");
    memory.purge(&one).await.unwrap();
    let error = sealed.get(&one).await.unwrap_err();
    assert!(matches!(error, RecordError::Regressed { .. }), "{error}");
    // Another process has not seen the later content.
    let other = SealedRecords::new(Arc::new(memory), tenant);
    assert_eq!(other.get(&one).await.unwrap(), None);
}

#[tokio::test]
async fn a_write_with_an_unknown_outcome_is_repeated_until_it_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let time = Duration::from_millis(50);
    let memory = MemoryRecords::default().with_timeouts(time, time);
    let sealed = SealedRecords::new(Arc::new(memory.clone()), tenant(dir.path()).await);
    let key = key("fleet/one");
    let write = sealed.create(&key, b"content".to_vec()).unwrap();
    memory.inject(Fault::LoseAnswer, 100);
    let error = sealed.send(&write).await.unwrap_err();
    assert!(matches!(error, RecordError::Unknown { .. }), "{error}");
    // The fault ends, and the same write is sent again.
    memory.inject(Fault::LoseAnswer, 0);
    let written = done(sealed.send(&write).await.unwrap());
    assert_eq!(written.content, b"content");
    // A second write with the same content is another write.
    let again = sealed.create(&key, b"content".to_vec()).unwrap();
    assert!(matches!(
        sealed.send(&again).await.unwrap(),
        Outcome::Lost(Some(_))
    ));
}

#[tokio::test]
async fn a_read_beside_a_write_may_return_the_former_content_and_a_later_read_may_not() {
    let dir = tempfile::tempdir().unwrap();
    let slow = Arc::new(SlowAnswers {
        records: MemoryRecords::default(),
        reads: Semaphore::new(0),
        answers: Semaphore::new(0),
    });
    let sealed = Arc::new(SealedRecords::new(slow.clone(), tenant(dir.path()).await));
    let one = key("fleet/one");
    let first = sealed.create(&one, b"first".to_vec()).unwrap();
    let first = done(sealed.send(&first).await.unwrap());
    let raw_first = slow.records.get(&one).await.unwrap().unwrap();
    let (reader, name) = (sealed.clone(), one.clone());
    let read = tokio::spawn(async move { reader.get(&name).await });
    slow.reads.acquire().await.unwrap().forget();
    let second = sealed.replace(&one, b"second".to_vec(), &first).unwrap();
    done(sealed.send(&second).await.unwrap());
    // One permit for this read and one for the last read of the test.
    slow.answers.add_permits(2);
    assert_eq!(read.await.unwrap().unwrap().unwrap().content, b"first");
    // The records return to the former content after the write was seen.
    let current = slow.records.get(&one).await.unwrap().unwrap().version;
    slow.records
        .replace(&one, raw_first.value, &current)
        .await
        .unwrap();
    let error = sealed.get(&one).await.unwrap_err();
    assert!(matches!(error, RecordError::Regressed { .. }), "{error}");
}
