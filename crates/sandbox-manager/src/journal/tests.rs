//! Tests of the journal: commits, crashes, migrations and damaged records.
//!
//! An *intent* records a snapshot that is about to be written. A *retraction* records a copy of a
//! snapshot that must still be removed from a store.

use super::*;
use crate::sandbox_settings::SandboxSettings;
use jiffy_api_types::SnapshotPurpose;
use jiffy_engine_api::SandboxSize;
use std::collections::BTreeMap;

/// Returns the record of a sandbox.
fn sandbox(id: &str) -> Sandbox {
    Sandbox {
        id: id.into(),
        name: None,
        state: SandboxState::broken("x"),
        template: "base".into(),
        size: SandboxSize::default(),
        env: BTreeMap::from([("A".into(), "1".into())]),
        settings: SandboxSettings {
            owner: Some("k".into()),
            ..SandboxSettings::default()
        },
        deadline_ms: Some(3),
        agent_token: Some("t".into()),
        traffic_token: None,
        snapshot: None,
        forked_from: None,
        started_from: None,
        rollbacks: Vec::new(),
        pause_cause: None,
        boot_mode: None,
        engine: Some("microvm".into()),
        boot_ms: Some(1.5),
        created_ms: 1,
        changed_ms: 2,
    }
}

/// Returns the record of a snapshot.
fn snapshot(id: &str) -> Snapshot {
    Snapshot {
        id: id.into(),
        name: None,
        purpose: SnapshotPurpose::Requested,
        sandbox: "a".into(),
        owner: None,
        env: BTreeMap::from([("A".into(), "b".into())]),
        site: Default::default(),
        template: "base".into(),
        fingerprint: String::new(),
        size: SandboxSize::default(),
        engine: "microvm".to_owned(),
        parent: Some("p".into()),
        retained: true,
        stopped_ms: 0.0,
        total_ms: 0.0,
        bytes: 0,
        created_ms: 1,
        pruned: None,
        content: Default::default(),
        storing: false,
        store: Default::default(),
    }
}

#[test]
fn committed_changes_survive_a_crash() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.db");
    let journal = Journal::open(&file).unwrap();
    journal
        .commit(&[
            JournalChange::Sandbox(sandbox("a")),
            JournalChange::Sandbox(sandbox("b")),
            JournalChange::Intent(snapshot("s")),
            JournalChange::Intent(snapshot("t")),
        ])
        .unwrap();
    journal
        .commit(&[
            JournalChange::NoSandbox("b".into()),
            JournalChange::Snapshot(snapshot("s")),
        ])
        .unwrap();
    // Leaks the connection, as a killed daemon would.
    std::mem::forget(journal);
    let journal = Journal::open(&file).unwrap();
    assert_eq!(journal.sandboxes().unwrap(), [sandbox("a")]);
    let complete: Vec<(String, bool)> = journal
        .snapshots()
        .unwrap()
        .into_iter()
        .map(|s| (s.snapshot.id, s.complete))
        .collect();
    assert_eq!(complete, [("s".into(), true), ("t".into(), false)]);
}

#[test]
fn changes_that_failed_to_be_written_are_written_with_the_next_change() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.db");
    let journal = Journal::open(&file).unwrap();
    // Makes all writes to the database fail, or succeed again.
    let fails = |fails: bool| {
        let connection = &journal.database().connection;
        connection.pragma_update(None, "query_only", fails).unwrap();
    };
    // `commit` returns the error and drops its change. `commit_write_behind` retains its change for
    // the next successful commit.
    fails(true);
    assert!(
        journal
            .commit(&[JournalChange::Sandbox(sandbox("a"))])
            .is_err()
    );
    journal.commit_write_behind(&[JournalChange::Sandbox(sandbox("b"))]);
    assert!(
        journal
            .commit(&[JournalChange::Sandbox(sandbox("c"))])
            .is_err()
    );
    assert_eq!(journal.sandboxes().unwrap(), []);
    fails(false);
    journal
        .commit(&[JournalChange::Sandbox(sandbox("d"))])
        .unwrap();
    assert_eq!(journal.sandboxes().unwrap(), [sandbox("b"), sandbox("d")]);
}

#[test]
fn guest_handles_are_stored_only_for_running_sandboxes() {
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::open(&dir.path().join("state.db")).unwrap();
    let running = |id| Sandbox {
        state: SandboxState::Running,
        ..sandbox(id)
    };
    let guest =
        |id: &str, handle: &str| JournalChange::Guest(id.into(), GuestHandle(handle.into()));
    for id in ["a", "b", "c"] {
        let changes = [JournalChange::Sandbox(running(id)), guest(id, "first")];
        journal.commit(&changes).unwrap();
    }
    let changes = [JournalChange::Sandbox(running("a")), guest("a", "second")];
    journal.commit(&changes).unwrap();
    journal
        .commit(&[JournalChange::Sandbox(sandbox("b"))])
        .unwrap();
    journal
        .commit(&[JournalChange::NoSandbox("c".into())])
        .unwrap();
    let guests = journal.guests().unwrap();
    assert_eq!(
        guests,
        HashMap::from([("a".into(), GuestHandle("second".into()))])
    );
}

#[test]
fn a_journal_of_a_previous_version_is_migrated() {
    let dir = tempfile::tempdir().unwrap();
    for version in [1, 2] {
        let file = dir.path().join(format!("{version}.db"));
        let connection = Connection::open(&file).unwrap();
        connection.execute_batch(SCHEMA_V1).unwrap();
        if version == 2 {
            connection.execute_batch(SCHEMA_V2).unwrap();
        }
        connection
            .pragma_update(None, "user_version", version)
            .unwrap();
        drop(connection);
        // The second pass opens the migrated journal.
        for _ in 0..2 {
            let journal = Journal::open(&file).unwrap();
            assert_eq!(journal.guests().unwrap(), HashMap::new());
            assert_eq!(journal.retractions().unwrap(), []);
        }
    }
}

#[test]
fn a_removal_from_a_store_is_recorded_until_it_is_done() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.db");
    let retraction = |id: &str| StoreRetraction {
        store: "file:///s".into(),
        tenant: "host".into(),
        id: id.into(),
        root: None,
        content: true,
        head: false,
    };
    let journal = Journal::open(&file).unwrap();
    for id in ["a", "b", "a"] {
        let change = JournalChange::Retraction(retraction(id));
        journal.commit(&[change]).unwrap();
    }
    let change = JournalChange::Retracted(retraction("a"));
    journal.commit(&[change]).unwrap();
    drop(journal);
    let journal = Journal::open(&file).unwrap();
    assert_eq!(journal.retractions().unwrap(), [retraction("b")]);
}

#[test]
fn a_damaged_record_is_named_in_the_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.db");
    let journal = Journal::open(&file).unwrap();
    let changes = ["a", "b"].map(|id| JournalChange::Sandbox(sandbox(id)));
    journal.commit(&changes).unwrap();
    journal
        .commit(&[JournalChange::Snapshot(snapshot("s"))])
        .unwrap();
    let damage = |table: &str, id: &str, sql: &str| {
        let connection = &journal.database().connection;
        let change = format!("UPDATE {table} SET record = {sql} WHERE id = ?1");
        assert_eq!(connection.execute(&change, [id]).unwrap(), 1);
    };
    for (sql, problem) in [
        ("substr(record, 1, 100)", "EOF"),
        (
            "replace(record, '\"state\":\"broken\"', '\"state\":\"x\"')",
            "x",
        ),
        ("replace(record, '\"cause\":\"x\",', '')", "cause"),
        ("replace(record, '\"vcpus\":2', '\"vcpus\":-2')", "-2"),
    ] {
        let before = sandbox("b");
        damage("sandboxes", "b", sql);
        let message = journal.sandboxes().unwrap_err().to_string();
        assert!(message.contains("sandbox b"), "{message}");
        assert!(message.contains(problem), "{message}");
        journal.commit(&[JournalChange::Sandbox(before)]).unwrap();
    }
    assert_eq!(journal.sandboxes().unwrap().len(), 2);
    damage("snapshots", "s", "'{}'");
    let message = journal.snapshots().unwrap_err().to_string();
    assert!(message.contains("snapshot s"), "{message}");
}

#[test]
fn a_journal_of_a_newer_version_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.db");
    drop(Journal::open(&file).unwrap());
    let connection = Connection::open(&file).unwrap();
    connection.pragma_update(None, "user_version", 99).unwrap();
    drop(connection);
    let message = Journal::open(&file).unwrap_err().to_string();
    assert!(message.contains("version 99"), "{message}");
}

#[test]
fn reading_a_table_in_parts_preserves_all_rows_and_their_order() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("state.db");
    let journal = Journal::open(&file).unwrap();
    let read = || {
        let opened = OpenedJournal::read(&file).unwrap();
        let ids = opened.sandboxes.iter().map(|r| r.id.clone());
        (ids.collect::<Vec<_>>(), opened.snapshots.len())
    };
    assert_eq!(read(), (Vec::new(), 0));
    // The order of these ids differs from the order of their rows.
    let ids: Vec<String> = (0..5000).rev().map(|n| format!("s{n}")).collect();
    let changes = ids.iter().map(|id| JournalChange::Sandbox(sandbox(id)));
    journal.commit(&changes.collect::<Vec<_>>()).unwrap();
    journal
        .commit(&[JournalChange::Snapshot(snapshot("only"))])
        .unwrap();
    assert_eq!(read(), (ids.clone(), 1));
    // Some parts have no row.
    let removed = ids[1000..4990].iter().cloned();
    let changes: Vec<_> = removed.map(JournalChange::NoSandbox).collect();
    journal.commit(&changes).unwrap();
    assert_eq!(read(), ([&ids[..1000], &ids[4990..]].concat(), 1));
}
