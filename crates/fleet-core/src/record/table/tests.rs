//! Tests of the records with the tables of a fleet: encoding, foreign and damaged records, rows
//! of newer versions.
//!
//! A *table* (API keys, or names of templates) is stored in parts. Their *index* contains the rows
//! of the last commits. To *fold* pending rows is to move them from the index to their part.

use super::super::RecordError;
use super::*;
use crate::ids::{FleetId, MemberId, Term};

/// Returns the id of the fleet of all records.
fn fleet() -> FleetId {
    FleetId::try_from("7kq2".to_owned()).unwrap()
}

/// Returns the row of an API key.
fn key(id: &str, revision: u64) -> Row {
    Row {
        revision,
        request: RequestId([7; 16]),
        removed: false,
        content: RowContent::Key(KeyRow {
            id: id.to_owned(),
            hash: KeyHash([id.len() as u8; 32]),
            name: "ci".to_owned(),
            scope: KeyScope::Create,
            limits: KeyLimits {
                max_sandboxes: Some(3),
                ..KeyLimits::default()
            },
            created_ms: 5,
            used_ms: None,
            revoked_ms: None,
            expires_ms: Some(9),
            end_ms: None,
            addresses: vec!["10.0.0.0/8".to_owned()],
            previous_hash: None,
            previous_until_ms: None,
            unknown: Default::default(),
        }),
    }
}

#[test]
fn a_part_is_read_as_it_was_written_and_only_where_it_belongs() {
    let row = key("abc", 3);
    let number = row.key().part();
    let part = TablePart::new(fleet(), Table::Keys, number, 3, vec![row.clone()]);
    let bytes = part.encode().unwrap();
    let read = |number| TablePart::decode(&bytes, &fleet(), Table::Keys, number);
    assert_eq!(read(number).unwrap(), part);
    let foreign = read(number.wrapping_add(1));
    assert!(matches!(foreign, Err(RecordError::ForeignKey { .. })));
    let templates = TablePart::decode(&bytes, &fleet(), Table::Templates, number);
    assert!(matches!(templates, Err(RecordError::ForeignKey { .. })));
    let other = FleetId::try_from("other".to_owned()).unwrap();
    let foreign = TablePart::decode(&bytes, &other, Table::Keys, number);
    assert!(matches!(foreign, Err(RecordError::ForeignKey { .. })));
    for length in 0..bytes.len() {
        let truncated = TablePart::decode(&bytes[..length], &fleet(), Table::Keys, number);
        assert!(truncated.is_err(), "{length}");
    }
}

#[test]
fn rows_of_another_part_with_invalid_content_or_twice_are_rejected() {
    let row = key("abc", 3);
    let number = row.key().part();
    let with = |rows: Vec<Row>| TablePart::new(fleet(), Table::Keys, number, 3, rows).encode();
    assert!(with(vec![row.clone()]).is_ok());
    assert!(with(vec![row.clone(), row.clone()]).is_err());
    let other = (0..).map(|i| key(&format!("k{i}"), 1));
    let mut other = other.filter(|row| row.key().part() != number);
    assert!(with(vec![other.next().unwrap()]).is_err());
    let changes: [fn(&mut Row); 7] = [
        // The part contains the commits up to 3, and commits start with 1.
        |row| row.revision = 4,
        |row| row.revision = 0,
        // Only the index contains removed rows.
        |row| row.removed = true,
        |row| set(row, |key| key.name = "a\nb".to_owned()),
        |row| set(row, |key| key.name.clear()),
        |row| set(row, |key| key.addresses = vec!["10.0.0.0/33".to_owned()]),
        // The removal of a key's resources requires its revocation.
        |row| set(row, |key| key.end_ms = Some(1)),
    ];
    for (i, change) in changes.iter().enumerate() {
        let mut row = row.clone();
        change(&mut row);
        assert!(with(vec![row]).is_err(), "{i}");
    }
}

/// Changes the API key of a row.
fn set(row: &mut Row, change: impl FnOnce(&mut KeyRow)) {
    if let RowContent::Key(key) = &mut row.content {
        change(key);
    }
}

#[test]
fn the_index_has_pending_rows_until_their_part_is_folded() {
    let mut index = TableIndex::new(fleet(), Term(4), MemberId(2));
    index.commit(&[key("abc", 2)]);
    index.commit(&[key("abc", 3)]);
    assert_eq!((index.number, index.pending.len()), (3, 1));
    let bytes = index.encode().unwrap();
    assert_eq!(TableIndex::decode(&bytes, &fleet()).unwrap(), index);
    let part = index.pending[0].key().part();
    index.fold(Table::Keys, part);
    assert!(index.pending.is_empty());
    assert_eq!(index.folded(Table::Keys)[usize::from(part)], 3);
    // A pending row must be newer than its part, which already contains commit 3.
    index.pending.push(key("abc", 3));
    assert!(index.encode().is_err());
    index.pending[0].revision = 5;
    assert!(index.encode().is_err(), "from the future");
}

#[test]
fn fields_of_newer_formats_are_preserved() {
    let mut index = TableIndex::new(fleet(), Term(4), MemberId(2));
    index.commit(&[key("abc", 2)]);
    let text = String::from_utf8(index.encode().unwrap()).unwrap();
    let text = text.replace("\"name\":", "\"colour\":\"red\",\"name\":");
    let read = TableIndex::decode(text.as_bytes(), &fleet()).unwrap();
    let again = String::from_utf8(read.encode().unwrap()).unwrap();
    assert!(again.contains("\"colour\":\"red\""));
    let newer = text.replacen("\"version\":1", "\"version\":2", 1);
    let error = TableIndex::decode(newer.as_bytes(), &fleet());
    assert!(matches!(error, Err(RecordError::NewerFormat { .. })));
}

#[test]
fn keys_are_spread_over_all_parts() {
    let mut counts = [0_u32; TABLE_PARTS];
    for i in 0..25_600 {
        counts[usize::from(RowKey::Key(format!("key{i}")).part())] += 1;
    }
    // A part has 100 keys on average.
    assert!(counts.iter().all(|count| (50..200).contains(count)));
}

/// Returns the row of a secret.
fn secret(id: &str, revision: u64) -> Row {
    Row {
        revision,
        request: RequestId([7; 16]),
        removed: false,
        content: RowContent::Secret(SecretRow {
            id: id.to_owned(),
            owner: Some("k1".to_owned()),
            name: "api-token".to_owned(),
            version: 2,
            value: "c2VhbGVk".to_owned(),
            metadata: [("team".to_owned(), "a".to_owned())].into(),
            created_ms: 5,
            updated_ms: 6,
            unknown: Default::default(),
        }),
    }
}

#[test]
fn secrets_are_read_as_they_were_written_and_invalid_ones_rejected() {
    let row = secret("sec_a", 3);
    let part = row.key().part();
    let with =
        |row: &Row| TablePart::new(fleet(), Table::Secrets, part, 3, vec![row.clone()]).encode();
    let bytes = with(&row).unwrap();
    let read = TablePart::decode(&bytes, &fleet(), Table::Secrets, part).unwrap();
    assert_eq!(read.rows, std::slice::from_ref(&row));
    let changes: [fn(&mut SecretRow); 7] = [
        |secret| secret.name = "API".to_owned(),
        |secret| secret.name.clear(),
        |secret| secret.name = "a".repeat(129),
        |secret| secret.owner = Some(String::new()),
        |secret| secret.version = 0,
        |secret| secret.value = "a".repeat(13_000),
        |secret| drop(secret.metadata.insert("b".to_owned(), "b".repeat(9_000))),
    ];
    for (i, change) in changes.iter().enumerate() {
        let mut row = row.clone();
        if let RowContent::Secret(secret) = &mut row.content {
            change(secret);
        }
        assert!(with(&row).is_err(), "{i}");
    }
}

#[test]
fn volumes_are_read_as_they_were_written_and_invalid_ones_rejected() {
    let volume = VolumeRow {
        id: "vol-a".to_owned(),
        owner: Some("k1".to_owned()),
        name: "data_Sets-1".to_owned(),
        home: MemberId(2),
        bytes: 1 << 30,
        files: 1000,
        created_ms: 5,
        unknown: Default::default(),
    };
    let row = |volume: &VolumeRow| Row {
        content: RowContent::Volume(volume.clone()),
        ..secret("unused", 3)
    };
    let part = row(&volume).key().part();
    let with = |volume: &VolumeRow| {
        TablePart::new(fleet(), Table::Volumes, part, 3, vec![row(volume)]).encode()
    };
    let read = TablePart::decode(&with(&volume).unwrap(), &fleet(), Table::Volumes, part);
    assert_eq!(read.unwrap().rows, [row(&volume)]);
    let changes: [fn(&mut VolumeRow); 6] = [
        |volume| volume.name = "a/b".to_owned(),
        |volume| volume.name.clear(),
        |volume| volume.name = "a".repeat(129),
        |volume| volume.owner = Some(String::new()),
        |volume| volume.bytes = MAX_OWNER_VOLUME_BYTES + 1,
        |volume| volume.files = MAX_OWNER_VOLUME_FILES + 1,
    ];
    for (i, change) in changes.iter().enumerate() {
        let mut volume = volume.clone();
        change(&mut volume);
        assert!(with(&volume).is_err(), "{i}");
    }
}

#[test]
fn an_index_of_a_version_with_fewer_tables_is_read() {
    let mut index = TableIndex::new(fleet(), Term(4), MemberId(2));
    let text = String::from_utf8(index.encode().unwrap()).unwrap();
    let zeros = vec!["0"; TABLE_PARTS].join(",");
    let mut former = text.clone();
    for table in ["secrets", "webhooks", "identity", "volumes"] {
        former = former.replace(&format!("\"{table}\":[{zeros}],"), "");
    }
    assert!(!former.contains("webhooks") && !former.contains("identity"));
    let read = TableIndex::decode(former.as_bytes(), &fleet()).unwrap();
    assert_eq!(read, index);
    index.commit(&[secret("sec_a", 2)]);
    index.fold(Table::Secrets, secret("sec_a", 2).key().part());
    let again = TableIndex::decode(&index.encode().unwrap(), &fleet()).unwrap();
    assert_eq!(again, index);
    assert!(again.pending.is_empty());
}

#[test]
fn identity_keys_are_one_row_and_invalid_ones_are_rejected() {
    let row = Row {
        revision: 3,
        request: RequestId([7; 16]),
        removed: false,
        content: RowContent::Identity(IdentityRow {
            version: 1,
            keys: vec![IdentityKey {
                created_s: 5,
                sealed: "c2VhbGVk".to_owned(),
            }],
            unknown: Default::default(),
        }),
    };
    assert_eq!(row.key(), RowKey::Identity);
    let part = row.key().part();
    let with =
        |row: &Row| TablePart::new(fleet(), Table::Identity, part, 3, vec![row.clone()]).encode();
    let bytes = with(&row).unwrap();
    let read = TablePart::decode(&bytes, &fleet(), Table::Identity, part).unwrap();
    assert_eq!(read.rows, std::slice::from_ref(&row));
    let changes: [fn(&mut IdentityRow); 4] = [
        |row| row.version = 0,
        |row| row.keys.clear(),
        |row| row.keys = vec![row.keys[0].clone(); 17],
        |row| row.keys[0].sealed = "a".repeat(1025),
    ];
    for (i, change) in changes.iter().enumerate() {
        let mut row = row.clone();
        if let RowContent::Identity(identity) = &mut row.content {
            change(identity);
        }
        assert!(with(&row).is_err(), "{i}");
    }
}
