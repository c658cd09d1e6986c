//! Secrets of API keys and keys of identity tokens in the tables of a fleet.

use super::lab::{Lab, reached};
use jiffy_fleet::MemoryRecords;
use jiffy_fleet::tables::{Action, TableError};
use jiffy_fleet_core::record::{
    IdentityKey, IdentityRow, MAX_OWNER_SECRETS, RowContent, RowKey, SecretRow, Table,
};
use std::sync::Arc;

fn secret(id: &str, owner: &str, name: &str) -> SecretRow {
    SecretRow {
        id: id.to_owned(),
        owner: Some(owner.to_owned()),
        name: name.to_owned(),
        version: 1,
        value: "c2VhbGVk".to_owned(),
        metadata: Default::default(),
        created_ms: 1,
        updated_ms: 1,
        unknown: Default::default(),
    }
}

/// Returns a secret with its next value.
fn next(row: &SecretRow) -> SecretRow {
    SecretRow {
        version: row.version + 1,
        value: "bmV4dA".to_owned(),
        ..row.clone()
    }
}

#[tokio::test(start_paused = true)]
async fn secrets_are_found_by_owner_and_name_on_all_members() {
    let lab = Lab::new(Arc::new(MemoryRecords::default())).await;
    let (one, two) = (lab.member(1), lab.member(2));
    let row = secret("s1", "a", "token");
    let created = two.change(Action::CreateSecret(row.clone())).await.unwrap();
    for tables in [&one, &two] {
        reached(tables, created.number).await;
        let found = tables.secret(Some("a"), "token").unwrap();
        assert_eq!(found.as_secret(), Some(&row));
        assert!(tables.secret(Some("b"), "token").is_none());
        assert!(tables.secret(None, "token").is_none());
    }
    let replaced = one.change(Action::ReplaceSecret(next(&row))).await.unwrap();
    // A value that is based on a former one is rejected, also if another member commits it.
    let late = two.change(Action::ReplaceSecret(next(&row))).await;
    assert!(matches!(late, Err(TableError::Changed(_))), "{late:?}");
    // A member that starts later reads the secrets from the records.
    let three = lab.member(3);
    for tables in [&two, &three] {
        reached(tables, replaced.number).await;
        let found = tables.secret(Some("a"), "token").unwrap();
        assert_eq!(found.as_secret(), Some(&next(&row)));
    }
    let ids = vec!["s1".to_owned(), "unknown".to_owned()];
    let removed = three
        .change(Action::RemoveSecrets(ids.clone()))
        .await
        .unwrap();
    for tables in [&one, &two, &three] {
        reached(tables, removed.number).await;
        assert!(tables.secret(Some("a"), "token").is_none());
        assert!(tables.rows(Table::Secrets).is_empty());
    }
    let again = one.change(Action::RemoveSecrets(ids)).await;
    assert!(matches!(again, Err(TableError::Unknown(_))), "{again:?}");
    // The name can be used again.
    let another = secret("s2", "a", "token");
    one.change(Action::CreateSecret(another)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn names_are_unique_per_owner_and_the_number_of_secrets_is_bounded() {
    let lab = Lab::new(Arc::new(MemoryRecords::default())).await;
    let (one, two) = (lab.member(1), lab.member(2));
    // Both changes are part of one commit.
    let (first, second) = tokio::join!(
        one.change(Action::CreateSecret(secret("s1", "a", "token"))),
        two.change(Action::CreateSecret(secret("s2", "a", "token"))),
    );
    let exists = [first, second].into_iter().filter_map(Result::err);
    let exists: Vec<_> = exists.collect();
    assert!(matches!(exists[..], [TableError::Exists(_)]), "{exists:?}");
    let other = Action::CreateSecret(secret("s3", "b", "token"));
    one.change(other).await.unwrap();
    let rows = (1..MAX_OWNER_SECRETS).map(|i| {
        let name = format!("n{i}");
        RowContent::Secret(secret(&format!("i{i}"), "a", &name))
    });
    one.import(rows.collect()).await.unwrap();
    let full = one
        .change(Action::CreateSecret(secret("s4", "a", "more")))
        .await;
    assert!(matches!(full, Err(TableError::Full(_))), "{full:?}");
    // A removal in the same commit frees a place.
    let (removed, created) = tokio::join!(
        one.change(Action::RemoveSecrets(vec!["i1".to_owned()])),
        one.change(Action::CreateSecret(secret("s4", "a", "more"))),
    );
    removed.unwrap();
    created.unwrap();
    one.change(Action::CreateSecret(secret("s5", "b", "more")))
        .await
        .unwrap();
}

/// Returns the keys of identity tokens with this version.
fn identity(version: u64, sealed: &str) -> Action {
    Action::ReplaceIdentity(IdentityRow {
        version,
        keys: vec![IdentityKey {
            created_s: 5,
            sealed: sealed.to_owned(),
        }],
        unknown: Default::default(),
    })
}

#[tokio::test(start_paused = true)]
async fn identity_keys_are_replaced_by_one_member_and_read_by_all() {
    let lab = Lab::new(Arc::new(MemoryRecords::default())).await;
    let (one, two) = (lab.member(1), lab.member(2));
    // Two members create the first keys at the same time.
    let (first, second) = tokio::join!(one.change(identity(1, "a")), two.change(identity(1, "b")));
    let results = [first, second];
    let number = results.iter().flatten().map(|changed| changed.number).max();
    let failed: Vec<_> = results.into_iter().filter_map(Result::err).collect();
    assert!(matches!(failed[..], [TableError::Changed(_)]), "{failed:?}");
    for tables in [&one, &two] {
        reached(tables, number.unwrap()).await;
    }
    assert_eq!(one.row(&RowKey::Identity), two.row(&RowKey::Identity));
    // An answer that is lost does not cause a second change.
    lab.lose_answers(1);
    let replaced = two.change(identity(2, "c")).await.unwrap();
    let stale = one.change(identity(2, "d")).await;
    assert!(matches!(stale, Err(TableError::Changed(_))), "{stale:?}");
    // A member that starts after the keys were moved to their part reads them.
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    let three = lab.member(3);
    reached(&three, replaced.number).await;
    let row = three.row(&RowKey::Identity).unwrap();
    assert_eq!(row.as_identity().unwrap().keys[0].sealed, "c");
}
