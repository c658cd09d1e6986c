//! Writers that are lost, answers that are lost, and records that are damaged or older. The writer
//! is the member that commits the changes of the tables. It is the coordinator, and the term counts
//! the coordinators. The rows are stored in records, the *parts*. One more record, the *index*,
//! lists the last commits.

use super::lab::{Lab, create, fleet, is_revoked, reached, revoke, row};
use crate::records::servers;
use jiffy_fleet::records::{Fault, Outcome};
use jiffy_fleet::tables::{CHANGE_TIMEOUT, TableError, Tables};
use jiffy_fleet::{MemoryRecords, RecordKey, Records, Written};
use jiffy_fleet_core::record::{RowKey, Table, TablePart};
use jiffy_fleet_core::{FleetId, MemberId};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

#[tokio::test(start_paused = true)]
async fn a_key_is_revoked_by_the_next_writer_if_the_writer_dies() {
    let lab = Lab::new(Arc::new(MemoryRecords::default())).await;
    let (one, two, three) = (lab.member(1), lab.member(2), lab.member(3));
    let created = one.change(create("a")).await.unwrap();
    reached(&three, created.number).await;
    lab.remove(1);
    drop(one);
    let pending = tokio::spawn({
        let three = three.clone();
        async move { three.change(revoke("a")).await }
    });
    sleep(Duration::from_secs(15)).await;
    assert!(!pending.is_finished());
    lab.set_writer(2, 2);
    let revoked = pending.await.unwrap().unwrap();
    assert!(is_revoked(&two, "a") && is_revoked(&three, "a"));
    assert!(revoked.number > created.number);

    lab.no_writer();
    let began = Instant::now();
    let error = three.change(create("b")).await.unwrap_err();
    assert_eq!(error, TableError::NoWriter);
    assert!(began.elapsed() <= Duration::from_secs(25));
}

#[tokio::test(start_paused = true)]
async fn a_change_is_made_once_if_answers_of_the_writer_are_lost() {
    let lab = Lab::new(Arc::new(MemoryRecords::default())).await;
    let (one, two) = (lab.member(1), lab.member(2));
    for (lost, id) in [(1, "a"), (3, "b")] {
        lab.lose_answers(lost);
        two.change(create(id)).await.unwrap();
        lab.lose_answers(lost);
        two.change(revoke(id)).await.unwrap();
        lab.lose_answers(0);
        assert!(is_revoked(&one, id));
    }
    assert_eq!(one.rows(Table::Keys).len(), 2);
}

/// Checks that a change is answered only after the outcome of its write is known.
async fn writes_with_lost_answers_are_settled(memory: MemoryRecords) {
    let lab = Lab::new(Arc::new(memory.clone())).await;
    let (one, two) = (lab.member(1), lab.member(2));
    one.change(create("first")).await.unwrap();
    // More lost answers than one call of the records survives.
    memory.inject_writes(Fault::LoseAnswer);
    let pending = tokio::spawn({
        let two = two.clone();
        async move { two.change(revoke("first")).await }
    });
    sleep(Duration::from_secs(10)).await;
    assert!(
        !pending.is_finished(),
        "answered before the outcome is known"
    );
    memory.heal();
    pending.await.unwrap().unwrap();
    assert!(is_revoked(&one, "first") && is_revoked(&two, "first"));
}

#[tokio::test(start_paused = true)]
async fn a_write_with_an_unknown_outcome_is_settled_before_it_is_answered() {
    writes_with_lost_answers_are_settled(MemoryRecords::default()).await;
}

/// Limit of changes on real servers, whose clock is not simulated.
const SHORT: Duration = Duration::from_secs(5);

/// Checks that a change through a former writer fails within `limit` and is not made.
async fn former_writer_changes_nothing(records: Arc<dyn Records>, limit: Duration) {
    let mut lab = Lab::new(records).await;
    lab.change_timeout = limit;
    let (one, two) = (lab.member(1), lab.member(2));
    let created = one.change(create("a")).await.unwrap();
    reached(&two, created.number).await;
    // The first member does not notice that its term has ended.
    lab.deceive(1, 1);
    lab.set_writer(2, 2);
    two.change(revoke("a")).await.unwrap();
    let began = Instant::now();
    let error = one.change(create("b")).await.unwrap_err();
    // The limit may pass while the change waits for the next commit.
    let is_typed = matches!(error, TableError::NoWriter | TableError::Unsettled);
    assert!(is_typed, "{error}");
    assert!(began.elapsed() <= limit + Duration::from_secs(1));
    two.refresh().await.unwrap();
    assert!(row(&two, "b").is_none());
    one.refresh().await.unwrap();
    assert!(is_revoked(&one, "a") && row(&one, "b").is_none());
    // The term of the second member is not affected.
    two.change(create("c")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_former_writer_receives_an_error_and_changes_nothing() {
    former_writer_changes_nothing(Arc::new(MemoryRecords::default()), CHANGE_TIMEOUT).await;
}

#[tokio::test]
async fn a_former_writer_changes_nothing_in_a_store() {
    let dir = tempfile::tempdir().unwrap();
    let Some((_server, address)) = servers::versitygw(dir.path(), &[]) else {
        return;
    };
    former_writer_changes_nothing(servers::store_records(address, false), SHORT).await;
}

#[tokio::test]
async fn a_former_writer_changes_nothing_in_etcd() {
    let dir = tempfile::tempdir().unwrap();
    let Some((_server, address)) = servers::etcd(dir.path()) else {
        return;
    };
    former_writer_changes_nothing(servers::etcd_records(address, false), SHORT).await;
}

fn key(text: &str) -> RecordKey {
    text.parse().unwrap()
}

/// Returns a lab whose rows are in their parts (the records that store rows), and the key of the
/// part that contains the API key `a`.
async fn folded() -> (Lab, Tables, MemoryRecords, RecordKey) {
    let memory = MemoryRecords::default();
    let lab = Lab::new(Arc::new(memory.clone())).await;
    let one = lab.member(1);
    one.change(create("a")).await.unwrap();
    sleep(Duration::from_secs(60)).await;
    let part = RowKey::Key("a".to_owned()).part();
    let part = key(&format!("fleet/tables/keys/{part:02x}"));
    assert!(memory.get(&part).await.unwrap().is_some(), "{part}");
    (lab, one, memory, part)
}

#[tokio::test(start_paused = true)]
async fn damaged_and_foreign_parts_are_rejected_and_change_nothing() {
    let (lab, one, memory, part) = folded().await;
    let stored = memory.get(&part).await.unwrap().unwrap();
    let mut flipped = stored.value.to_vec();
    flipped[40] ^= 1;
    let truncated = stored.value.slice(..stored.value.len() - 1);
    let mut version = stored.version;
    for bytes in [flipped.into(), truncated] {
        let Written::Done(next) = memory.replace(&part, bytes, &version).await.unwrap() else {
            panic!("another writer");
        };
        version = next;
        let two = lab.member(2);
        let error = two.refresh().await.unwrap_err();
        assert!(matches!(error, TableError::Records(_)), "{error}");
        assert!(two.check_contact().is_err() && row(&two, "a").is_none());
        // The member that has the rows continues.
        one.check_contact().unwrap();
        assert!(row(&one, "a").is_some());
        lab.remove(2);
    }
    // Correctly encrypted parts: of another fleet, and of another table.
    let other = FleetId::try_from("other".to_owned()).unwrap();
    let number = RowKey::Key("a".to_owned()).part();
    for (fleet, table) in [(other, Table::Keys), (fleet(), Table::Templates)] {
        let last_commit = 9;
        let foreign = TablePart::new(fleet, table, number, last_commit, Vec::new());
        memory.purge(&part).await.unwrap();
        let sealed = lab.sealed();
        let write = sealed.create(&part, foreign.encode().unwrap()).unwrap();
        assert!(matches!(
            sealed.send(&write).await.unwrap(),
            Outcome::Done(_)
        ));
        let two = lab.member(2);
        let error = two.refresh().await.unwrap_err();
        assert!(matches!(error, TableError::Format(_)), "{error}");
        assert!(two.check_contact().is_err());
        lab.remove(2);
    }
}

#[tokio::test(start_paused = true)]
async fn an_older_index_is_rejected() {
    let (lab, one, memory, _) = folded().await;
    let two = lab.member(2);
    reached(&two, one.number()).await;
    let index = key("fleet/tables/index");
    let old = memory.get(&index).await.unwrap().unwrap();
    one.change(revoke("a")).await.unwrap();
    let current = memory.get(&index).await.unwrap().unwrap();
    let replaced = memory.replace(&index, old.value, &current.version).await;
    assert!(matches!(replaced.unwrap(), Written::Done(_)));
    let error = two.refresh().await.unwrap_err();
    assert!(error.to_string().contains("accept-restore"), "{error}");
    assert!(is_revoked(&two, "a"));
    one.change(create("b")).await.unwrap_err();
    assert!(row(&one, "b").is_none());
    // The operator accepts the restored records on each host.
    for tables in [&one, &two] {
        tables.accept_restore().await.unwrap();
        assert!(!is_revoked(tables, "a"));
    }
    one.change(revoke("a")).await.unwrap();
    assert!(is_revoked(&one, "a") && is_revoked(&two, "a"));
}

#[tokio::test(start_paused = true)]
async fn an_index_whose_part_is_older_is_rejected() {
    let (lab, _one, memory, part) = folded().await;
    // Without its part, the index names a commit that the parts do not contain.
    memory.purge(&part).await.unwrap();
    let two = lab.member(2);
    let error = two.refresh().await.unwrap_err();
    assert!(error.to_string().contains("commits"), "{error}");
    assert!(two.check_contact().is_err());
}

#[tokio::test(start_paused = true)]
async fn a_push_of_a_member_that_is_not_the_writer_changes_nothing() {
    let lab = Lab::new(Arc::new(MemoryRecords::default())).await;
    let (one, two) = (lab.member(1), lab.member(2));
    let created = one.change(create("a")).await.unwrap();
    reached(&two, created.number).await;
    let row = row(&one, "a").unwrap();
    let forged = serde_json::json!({
        "format": 1,
        "fleet": "7kq2",
        "content": { "push": {
            "term": 9,
            "number": created.number + 1,
            "since": created.number,
            "rows": [{
                "revision": created.number + 1,
                "request": row.request,
                "content": { "key": {
                    "id": "forged",
                    "hash": "00".repeat(32),
                    "name": "forged",
                    "scope": "admin",
                    "created_ms": 1,
                }},
            }],
        }},
    });
    let forged = serde_json::to_vec(&forged).unwrap();
    // h1 is the writer, but of term 1 and not of term 9. h3 is not the writer.
    for sender in [1, 3] {
        two.handle(MemberId(sender), &forged).await.unwrap();
        assert_eq!(two.rows(Table::Keys).len(), 1);
        assert_eq!(two.number(), created.number);
    }
    // Requests of another fleet, damaged requests and requests that are too long.
    let text = String::from_utf8(forged).unwrap();
    let long = format!("{text}{}", " ".repeat(1 << 20));
    let bad = [
        text.replace("7kq2", "other"),
        text.replace("\"format\":1", "\"format\":2"),
        text[..text.len() - 1].to_owned(),
        text.replace("\"revision\"", "\"Revision\""),
        long,
        String::new(),
    ];
    for text in bad {
        let error = two.handle(MemberId(1), text.as_bytes()).await.unwrap_err();
        assert!(matches!(error, TableError::Message(_)), "{error}");
    }
}
