//! Changes of the tables (API keys, template names) without faults. One member, the writer, commits
//! the changes of all members. The rows are stored in records, the *parts*. One more record, the
//! *index*, lists the last commits.

use super::lab::{Lab, create, hash, is_revoked, key_row, reached, revoke, row};
use crate::records::servers;
use jiffy_fleet::tables::{Action, TableError, preview_key};
use jiffy_fleet::{MemoryRecords, Records};
use jiffy_fleet_core::record::{KeyLimits, RowContent, RowKey, Table, TemplateRow};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

async fn changes_reach_all_members(records: Arc<dyn Records>) {
    let lab = Lab::new(records).await;
    let (one, two, three) = (lab.member(1), lab.member(2), lab.member(3));
    let created = two.change(create("a")).await.unwrap();
    // The members have received the change from the writer, or have read it from the records.
    for tables in [&one, &two, &three] {
        reached(tables, created.number).await;
        assert!(!is_revoked(tables, "a"));
        assert!(tables.key_by_hash(&hash("a")).is_some());
        tables.check_contact().unwrap();
    }
    let began = Instant::now();
    let revoked = three.change(revoke("a")).await.unwrap();
    // No member is missing among the confirmations.
    assert_eq!(revoked.unconfirmed, []);
    assert!([&one, &two, &three].iter().all(|t| is_revoked(t, "a")));
    // A revocation does not wait for the interval of the group commit.
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    let again = one.change(revoke("a")).await;
    assert!(matches!(again, Err(TableError::Unknown(_))), "{again:?}");
    // A member that starts later reads everything from the records.
    let four = lab.member(4);
    reached(&four, revoked.number).await;
    assert!(is_revoked(&four, "a"));
}

#[tokio::test]
async fn a_change_through_any_member_reaches_all_members() {
    changes_reach_all_members(Arc::new(MemoryRecords::default())).await;
}

#[tokio::test]
async fn a_change_reaches_all_members_with_records_in_a_store() {
    let dir = tempfile::tempdir().unwrap();
    let Some((_server, address)) = servers::versitygw(dir.path(), &[]) else {
        return;
    };
    changes_reach_all_members(servers::store_records(address, false)).await;
}

#[tokio::test]
async fn a_change_reaches_all_members_with_records_in_etcd() {
    let dir = tempfile::tempdir().unwrap();
    let Some((_server, address)) = servers::etcd(dir.path()) else {
        return;
    };
    changes_reach_all_members(servers::etcd_records(address, false)).await;
}

#[tokio::test(start_paused = true)]
async fn the_writer_validates_the_changes_of_all_members() {
    let lab = Lab::new(Arc::new(MemoryRecords::default())).await;
    let (_one, two) = (lab.member(1), lab.member(2));
    two.change(create("a")).await.unwrap();
    let exists = two.change(create("a")).await;
    assert!(matches!(exists, Err(TableError::Exists(_))), "{exists:?}");
    let mut same_secret = key_row("b");
    same_secret.hash = hash("a");
    let exists = two.change(Action::CreateKey(same_secret)).await;
    assert!(matches!(exists, Err(TableError::Exists(_))), "{exists:?}");
    let mut expired = key_row("c");
    expired.expires_ms = Some(1);
    let mut revoked = key_row("d");
    revoked.revoked_ms = Some(1);
    let mut name = key_row("e");
    name.name = "a\nb".to_owned();
    let mut networks = key_row("f");
    networks.addresses = vec!["everywhere".to_owned()];
    for bad in [expired, revoked, name, networks] {
        let rejected = two.change(Action::CreateKey(bad)).await;
        assert!(
            matches!(rejected, Err(TableError::Invalid(_))),
            "{rejected:?}"
        );
    }
    let unknown = two.change(revoke("x")).await;
    assert!(
        matches!(unknown, Err(TableError::Unknown(_))),
        "{unknown:?}"
    );
    assert_eq!(two.rows(Table::Keys).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_rotated_key_has_both_secrets_and_limits_change_at_all_members() {
    let lab = Lab::new(Arc::new(MemoryRecords::default())).await;
    let (one, two) = (lab.member(1), lab.member(2));
    one.change(create("a")).await.unwrap();
    let rotate = |secret: &str| Action::RotateKey {
        id: "a".to_owned(),
        hash: hash(secret),
        overlap_ms: 60_000,
        expires_ms: None,
    };
    two.change(rotate("second")).await.unwrap();
    assert!(one.key_by_hash(&hash("a")).is_some());
    assert!(one.key_by_hash(&hash("second")).is_some());
    two.change(rotate("third")).await.unwrap();
    assert!(one.key_by_hash(&hash("a")).is_none(), "two rotations ago");
    assert!(one.key_by_hash(&hash("second")).is_some());
    let limits = KeyLimits {
        max_sandboxes: Some(7),
        ..KeyLimits::default()
    };
    let limit = |former, limits| Action::LimitKey {
        id: "a".to_owned(),
        former,
        limits,
    };
    let change = limit(KeyLimits::default(), limits);
    two.change(change).await.unwrap();
    let limits_at_one = || row(&one, "a").unwrap().as_key().unwrap().limits;
    assert_eq!(limits_at_one(), limits);
    // A change that is based on the former limits would undo the first one.
    let late = limit(KeyLimits::default(), KeyLimits::default());
    let rejected = one.change(late).await;
    assert!(
        matches!(rejected, Err(TableError::Changed(_))),
        "{rejected:?}"
    );
    assert_eq!(limits_at_one(), limits);
    one.change(limit(limits, KeyLimits::default()))
        .await
        .unwrap();
    assert_eq!(limits_at_one(), KeyLimits::default());
}

#[tokio::test(start_paused = true)]
async fn a_thousand_keys_created_at_once_share_few_commits() {
    let lab = Lab::new(Arc::new(MemoryRecords::default())).await;
    let (one, two) = (lab.member(1), lab.member(2));
    let first = one.change(create("first")).await.unwrap();
    let changes = (0..1_000).map(|i| {
        let tables = if i % 2 == 0 { one.clone() } else { two.clone() };
        tokio::spawn(async move { tables.change(create(&format!("k{i}"))).await })
    });
    let changes: Vec<_> = changes.collect();
    let mut last = 0;
    for change in changes {
        last = last.max(change.await.unwrap().unwrap().number);
    }
    // Changes that wait for a commit are written together.
    assert!(last <= first.number + 4, "{last} commits");
    // Meanwhile, rows move from the index to their parts, which a new member loads.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let three = lab.member(3);
    reached(&three, last).await;
    for tables in [&one, &two, &three] {
        assert_eq!(tables.rows(Table::Keys).len(), 1_001);
    }
}

#[tokio::test(start_paused = true)]
async fn names_of_templates_are_added_replaced_and_removed() {
    let lab = Lab::new(Arc::new(MemoryRecords::default())).await;
    let (one, two) = (lab.member(1), lab.member(2));
    let template = |version: &str| TemplateRow {
        owner: Some("k1".to_owned()),
        name: "base".to_owned(),
        tag: "latest".to_owned(),
        template_version: version.to_owned(),
        root: Some("ab".repeat(32)),
        home: None,
        public: false,
        updated_ms: 1,
        unknown: Default::default(),
    };
    let key = RowKey::Template(
        Some("k1".to_owned()),
        "base".to_owned(),
        "latest".to_owned(),
    );
    one.change(Action::PutTemplate(template("v1")))
        .await
        .unwrap();
    two.change(Action::PutTemplate(template("v2")))
        .await
        .unwrap();
    let row = one.row(&key).unwrap();
    assert_eq!(row.as_template().unwrap().template_version, "v2");
    let remove = || Action::RemoveTemplate {
        owner: Some("k1".to_owned()),
        name: "base".to_owned(),
        tag: "latest".to_owned(),
    };
    let removed = two.change(remove()).await.unwrap();
    assert!(one.row(&key).is_none() && two.row(&key).is_none());
    let again = two.change(remove()).await;
    assert!(matches!(again, Err(TableError::Unknown(_))), "{again:?}");
    // Meanwhile, the part is rewritten. The row is missing in it, too.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let three = lab.member(3);
    reached(&three, removed.number).await;
    assert!(three.row(&key).is_none());
}

#[tokio::test(start_paused = true)]
async fn rows_of_a_joining_host_are_imported_in_several_changes() {
    let lab = Lab::new(Arc::new(MemoryRecords::default())).await;
    let (one, two) = (lab.member(1), lab.member(2));
    let rows = |count: usize| {
        let ids = (0..count).map(|i| RowContent::Key(key_row(&format!("k{i}"))));
        ids.collect::<Vec<_>>()
    };
    let imported = two.import(rows(2_500)).await.unwrap();
    assert_eq!(imported.rows, 2_500);
    reached(&one, two.number()).await;
    assert_eq!(one.rows(Table::Keys).len(), 2_500);
    let again = two.import(rows(1)).await;
    assert!(matches!(again, Err(TableError::Exists(_))), "{again:?}");
}

#[test]
fn the_key_of_preview_links_is_the_same_on_all_members() {
    assert_eq!(preview_key(&[7; 32]), preview_key(&[7; 32]));
    assert_ne!(preview_key(&[7; 32]), preview_key(&[8; 32]));
}

/// Prints the memory of a member with 100,000 keys: run it alone.
#[tokio::test(start_paused = true)]
#[ignore = "measurement"]
async fn memory_of_a_hundred_thousand_keys() {
    let lab = Lab::new(Arc::new(MemoryRecords::default())).await;
    let one = lab.member(1);
    let rows = (0..100_000).map(|i| RowContent::Key(key_row(&format!("k{i:019}"))));
    one.import(rows.collect()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS"));
        let kib = line.unwrap().split_whitespace().nth(1).unwrap();
        kib.parse::<u64>().unwrap()
    };
    let began = std::time::Instant::now();
    let two = lab.member(2);
    reached(&two, one.number()).await;
    let loaded = began.elapsed();
    // Memory that the import has freed is used again by the first members.
    for member in 3..12 {
        reached(&lab.member(member), one.number()).await;
    }
    let before = resident();
    for member in 12..22 {
        reached(&lab.member(member), one.number()).await;
    }
    let kib = (resident() - before) / 10;
    println!("{kib} KiB per member, loaded in {loaded:?}");
    let began = std::time::Instant::now();
    assert_eq!(two.rows(Table::Keys).len(), 100_000);
    for i in 0..100_000 {
        assert!(two.key_by_hash(&hash(&format!("k{i:019}"))).is_some());
    }
    println!("100,000 look-ups in {:?}", began.elapsed());
}
