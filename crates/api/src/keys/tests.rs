//! Tests of API keys, in the database of a host and in a fleet.

use super::database::{BUSY_TIMEOUT, SCHEMA};
use super::*;
use fleet::Fleet;
use jiffy_api_types::KeyLimit;
use rusqlite::Connection;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

pub(crate) mod fleet;

/// Runs a test with the keys of one host, and with the keys of a fleet.
fn for_both(test: impl Fn(&Path, &Keys)) {
    let dir = tempfile::tempdir().unwrap();
    test(dir.path(), &Keys::open(dir.path()).unwrap());
    let fleet = Fleet::start();
    test(fleet.home(), &fleet.keys());
}

/// Returns the permissions of a file.
fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn a_key_is_known_by_its_secret_until_another_process_revokes_it() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Keys::open(dir.path()).unwrap();
    // The command `jiffy key` opens the same database.
    let command = Keys::open(dir.path()).unwrap();
    let limits = Limits {
        max_vcpus: Some(8),
        ..Limits::default()
    };
    let created = command.create("ci", Scope::Create, limits).unwrap();
    let hex = created.secret.strip_prefix("e2b_").unwrap();
    assert!(hex.len() == 40 && hex.bytes().all(|b| b"0123456789abcdef".contains(&b)));
    assert_eq!(
        daemon
            .check(&created.secret, None)
            .unwrap()
            .valid()
            .unwrap(),
        created.key
    );
    assert_eq!(daemon.check("e2b_0", None).unwrap(), Verdict::Unknown);
    assert!(command.list().unwrap()[0].used_ms.is_some());
    command.revoke("ci").unwrap();
    assert_eq!(
        daemon.check(&created.secret, None).unwrap(),
        Verdict::Revoked
    );
    assert!(command.revoke(&created.key.id).is_err(), "once is enough");
}

#[test]
fn the_file_contains_no_secret_and_is_private() {
    let dir = tempfile::tempdir().unwrap();
    let keys = Keys::open(dir.path()).unwrap();
    let created = keys.create("x", Scope::Admin, Limits::default()).unwrap();
    for file in fs::read_dir(dir.path()).unwrap() {
        let path = file.unwrap().path();
        assert_eq!(mode(&path), 0o600, "{path:?}");
        let bytes = fs::read(&path).unwrap();
        let needle = &created.secret.as_bytes()[SECRET_PREFIX.len()..];
        assert!(!bytes.windows(needle.len()).any(|w| w == needle));
    }
}

#[test]
fn keys_of_the_first_version_stay_valid_and_have_no_new_limits() {
    let dir = tempfile::tempdir().unwrap();
    let file = Connection::open(dir.path().join("keys.db")).unwrap();
    file.execute_batch(SCHEMA).unwrap();
    file.pragma_update(None, "user_version", 1).unwrap();
    file.execute(
        "INSERT INTO keys (id, hash, name, scope, max_sandboxes, created_ms)
            VALUES ('a', ?1, 'ci', 'create', 3, 5)",
        [hash("e2b_old")],
    )
    .unwrap();
    drop(file);
    // The first iteration migrates the file, the second opens the migrated file.
    for _ in 0..2 {
        let keys = Keys::open(dir.path()).unwrap();
        let key = keys.check("e2b_old", None).unwrap().valid().unwrap();
        let limits = Limits {
            max_sandboxes: Some(3),
            ..Limits::default()
        };
        assert_eq!((key.limits, key.expires_ms), (limits, None));
        assert!(key.addresses.is_empty());
    }
    let newer = Connection::open(dir.path().join("keys.db")).unwrap();
    newer
        .pragma_update(None, "user_version", SCHEMA_VERSION + 1)
        .unwrap();
    assert!(matches!(
        Keys::open(dir.path()),
        Err(KeyError::Version { .. })
    ));
}

#[test]
fn an_ambiguous_key_name_revokes_no_key() {
    for_both(|_, keys| {
        let first = keys.create("a", Scope::Read, Limits::default()).unwrap();
        keys.create("a", Scope::Read, Limits::default()).unwrap();
        assert!(matches!(keys.revoke("a"), Err(KeyError::Unknown(_))));
        keys.revoke(&first.key.id).unwrap();
        keys.revoke("a").unwrap();
        let bad =
            ["", "a\nb", &"x".repeat(101)].map(|n| keys.create(n, Scope::Read, Limits::default()));
        assert!(bad.iter().all(|b| matches!(b, Err(KeyError::Name(_)))));
    });
}

#[test]
fn the_local_key_is_created_once_and_belongs_to_the_owner() {
    for_both(|home, keys| {
        let path = local_key(home, keys).unwrap();
        assert_eq!(path, home.join("api-key"));
        assert_eq!(mode(&path), 0o600);
        let secret = fs::read_to_string(&path).unwrap();
        let key = keys.check(secret.trim(), None).unwrap().valid().unwrap();
        assert_eq!(key.scope, Scope::Admin);
        assert_eq!(local_key(home, keys).unwrap(), path);
        assert_eq!(fs::read_to_string(&path).unwrap(), secret, "the same key");
    });
}

#[test]
fn a_key_is_valid_until_it_expires_and_from_its_networks_only() {
    for_both(|_, keys| {
        let create = |expires_ms, addresses: &[&str]| {
            let addresses = addresses.iter().map(|a| (*a).to_owned()).collect();
            let validity = Validity {
                expires_ms,
                addresses,
            };
            keys.create_within("x", Scope::Create, Limits::default(), &validity)
        };
        assert!(matches!(
            create(Some(now_ms()), &[]),
            Err(KeyError::Expired)
        ));
        let short = create(Some(now_ms() + 50), &[]).unwrap();
        let check = |created: &NewKey, from| keys.check(&created.secret, from).unwrap();
        assert_eq!(
            check(&short, None),
            Verdict::Valid(Box::new(short.key.clone()))
        );
        assert_eq!(keys.status(Some(&short.key.id)), KeyStatus::InForce);
        while now_ms() < short.key.expires_ms.unwrap() {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(check(&short, None), Verdict::Expired);
        assert_eq!(keys.status(Some(&short.key.id)), KeyStatus::Over);
        let bound = create(None, &["192.0.2.0/24"]).unwrap();
        let at = |ip: [u8; 4]| check(&bound, Some(ip.into()));
        assert!(at([192, 0, 2, 9]).valid().is_some());
        assert_eq!(at([192, 0, 3, 9]), Verdict::Elsewhere);
        assert_eq!(check(&bound, None), Verdict::Elsewhere);
    });
}

#[test]
fn a_rotated_key_is_the_same_key_with_another_secret() {
    for_both(|home, keys| {
        let first = keys.create("a", Scope::Create, Limits::default()).unwrap();
        let valid = |created: &NewKey| keys.check(&created.secret, None).unwrap().valid().is_some();
        // Secrets in force are recognised by their hash, so that their requests are not throttled.
        let registered = |created: &NewKey| keys.is_in_force(&hash(&created.secret));
        let hour = Duration::from_secs(3600);
        let second = keys.rotate("a", hour, None).unwrap();
        assert_eq!(second.key.id, first.key.id);
        assert!(valid(&first) && valid(&second) && registered(&first) && registered(&second));
        // Without an overlap, all former secrets end at once.
        let third = keys.rotate(&first.key.id, Duration::ZERO, None).unwrap();
        assert!(!valid(&first) && !valid(&second) && valid(&third));
        assert!(
            !registered(&second) && registered(&third),
            "no overlap was asked for"
        );
        let at = now_ms() + 1_000_000;
        let fourth = keys.rotate("a", hour, Some(at)).unwrap();
        assert_eq!(keys.list().unwrap()[0].expires_ms, Some(at));
        keys.revoke("a").unwrap();
        assert!(
            !valid(&third) && !valid(&fourth),
            "both secrets are the key's"
        );
        assert!(matches!(
            keys.rotate("a", hour, None),
            Err(KeyError::Unknown(_))
        ));
        // The file of the local key gets the new secret.
        let path = local_key(home, keys).unwrap();
        let secret = fs::read_to_string(&path).unwrap();
        let rotated = keys.rotate("local", Duration::ZERO, None).unwrap();
        assert_ne!(secret.trim(), rotated.secret);
        assert_eq!(local_key(home, keys).unwrap(), path);
        assert_eq!(fs::read_to_string(&path).unwrap().trim(), rotated.secret);
    });
}

#[test]
fn limits_change_one_by_one_until_the_key_is_revoked() {
    for_both(|_, keys| {
        let limits = Limits {
            max_sandboxes: Some(1),
            max_paused: Some(2),
            idle_timeout_s: Some(60),
            ..Limits::default()
        };
        let created = keys.create("ci", Scope::Create, limits).unwrap();
        let changes = LimitChanges {
            set: Limits {
                max_sandboxes: Some(7),
                max_disk_mib: Some(u64::from(u32::MAX) + 1),
                ..Limits::default()
            },
            removed: vec![KeyLimit::Paused, KeyLimit::Builds],
        };
        let changed = keys.change_limits("ci", &changes).unwrap();
        let expected = Limits {
            max_sandboxes: Some(7),
            idle_timeout_s: Some(60),
            max_disk_mib: changes.set.max_disk_mib,
            ..Limits::default()
        };
        assert_eq!(changed.limits, expected);
        let verdict = keys.check(&created.secret, None).unwrap();
        assert_eq!(verdict.valid().unwrap().limits, expected);
        keys.revoke(&created.key.id).unwrap();
        let revoked = keys.change_limits(&created.key.id, &changes);
        assert!(matches!(revoked, Err(KeyError::Unknown(_))), "{revoked:?}");
    });
}

#[test]
fn requests_to_sandboxes_do_not_wait_for_a_change_of_the_keys() {
    let dir = tempfile::tempdir().unwrap();
    let keys = Keys::open(dir.path()).unwrap();
    let created = keys.create("a", Scope::Create, Limits::default()).unwrap();
    let other = Connection::open(dir.path().join("keys.db")).unwrap();
    other.execute_batch("BEGIN EXCLUSIVE").unwrap();
    // An API call that records a use holds this lock while it waits for the database.
    let waiting = keys.connection();
    let began = Instant::now();
    assert_eq!(keys.status(Some(&created.key.id)), KeyStatus::InForce);
    assert!(keys.is_in_force(&hash(&created.secret)));
    assert!(began.elapsed() < BUSY_TIMEOUT);
    drop(waiting);
}

#[test]
fn the_end_of_a_key_is_persisted_and_can_be_requested_later() {
    let dir = tempfile::tempdir().unwrap();
    let keys = Keys::open(dir.path()).unwrap();
    let key = keys.create("a", Scope::Create, Limits::default()).unwrap();
    let id = Some(key.key.id.as_str());
    assert_eq!(keys.status(id), KeyStatus::InForce);
    keys.revoke("a").unwrap();
    // A revoked key is over. It has ended once the removal of its resources was requested.
    assert_eq!(keys.status(id), KeyStatus::Over);
    assert!(keys.ended().is_empty());
    let first = keys.revoke_and_end("a").unwrap();
    assert_eq!(keys.revoke_and_end(&key.key.id).unwrap(), first);
    let other = Keys::open(dir.path()).unwrap();
    assert_eq!(other.status(id), KeyStatus::Ended);
    assert_eq!(other.ended(), [key.key.id]);
    assert_eq!(other.status(Some("unknown")), KeyStatus::Over);
    assert_eq!(other.status(None), KeyStatus::InForce, "the host's owner");
}

#[test]
fn a_key_created_by_another_process_is_in_force_immediately() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Keys::open(dir.path()).unwrap();
    let command = Keys::open(dir.path()).unwrap();
    let first = command
        .create("first", Scope::Create, Limits::default())
        .unwrap();
    assert_eq!(daemon.status(Some(&first.key.id)), KeyStatus::InForce);
    // The cache has only the status of `first`, for at most 500 ms. It must not hide a later key.
    std::thread::sleep(std::time::Duration::from_millis(20));
    let second = command
        .create("second", Scope::Create, Limits::default())
        .unwrap();
    assert_eq!(daemon.status(Some(&second.key.id)), KeyStatus::InForce);
}

#[test]
fn a_key_of_a_fleet_is_known_to_all_hosts_until_one_of_them_revokes_it() {
    let fleet = Fleet::start();
    let (one, two) = (fleet.keys(), fleet.other_keys());
    let limits = Limits {
        max_disk_mib: Some(7),
        ..Limits::default()
    };
    let created = one.create("ci", Scope::Create, limits).unwrap();
    let verdict = two.check(&created.secret, None).unwrap();
    assert_eq!(verdict.valid().unwrap(), created.key);
    assert!(one.list().unwrap()[0].used_ms.is_none(), "used elsewhere");
    assert!(two.list().unwrap()[0].used_ms.is_some());
    let revocation = two.revoke("ci").unwrap();
    assert_eq!(revocation.unconfirmed, Vec::<String>::new());
    for keys in [&one, &two] {
        assert_eq!(keys.check(&created.secret, None).unwrap(), Verdict::Revoked);
        assert_eq!(keys.status(Some(&created.key.id)), KeyStatus::Over);
    }
    one.revoke_and_end("ci").unwrap();
    assert_eq!(two.ended(), [created.key.id]);
}

#[test]
fn a_host_without_contact_rejects_keys_but_not_the_traffic_of_sandboxes() {
    let fleet = Fleet::start();
    let keys = fleet.keys();
    let created = keys.create("ci", Scope::Create, Limits::default()).unwrap();
    fleet.cut();
    fleet.lose_records();
    // Exceeds the 60 s for which verified tables are current.
    fleet.advance(Duration::from_secs(61));
    let error = keys.check(&created.secret, None).unwrap_err();
    assert!(matches!(
        error,
        KeyError::Fleet(TableError::Disconnected(_))
    ));
    assert_eq!(keys.status(Some(&created.key.id)), KeyStatus::InForce);
    assert!(keys.is_in_force(&hash(&created.secret)));
}

#[test]
fn a_revocation_names_the_hosts_that_have_not_confirmed_it() {
    let fleet = Fleet::start();
    let (one, two) = (fleet.keys(), fleet.other_keys());
    let created = one.create("ci", Scope::Create, Limits::default()).unwrap();
    assert!(two.check(&created.secret, None).unwrap().valid().is_some());
    fleet.cut();
    let began = Instant::now();
    let revocation = one.revoke("ci").unwrap();
    assert_eq!(revocation.unconfirmed, ["h2"]);
    // A revocation waits 1 s for confirmations. The limit leaves a margin.
    assert!(began.elapsed() < Duration::from_secs(2));
    assert_eq!(one.check(&created.secret, None).unwrap(), Verdict::Revoked);
}

#[test]
fn the_keys_of_a_host_become_rows_of_its_fleet() {
    let dir = tempfile::tempdir().unwrap();
    let host = Keys::open(dir.path()).unwrap();
    let validity = Validity {
        expires_ms: Some(now_ms() + 3_600_000),
        addresses: vec!["10.0.0.0/8".to_owned()],
    };
    let limits = Limits {
        max_sandboxes: Some(3),
        snapshot_ack: Some(SnapshotAck::Captured),
        ..Limits::default()
    };
    let first = host
        .create_within("a", Scope::Create, limits, &validity)
        .unwrap();
    let rotated = host.rotate("a", Duration::from_secs(3600), None).unwrap();
    let revoked = host.create("b", Scope::Read, Limits::default()).unwrap();
    host.revoke("b").unwrap();
    let fleet = Fleet::start();
    assert_eq!(fleet.import(dir.path()), 2);
    assert_eq!(fleet.import(dir.path()), 0, "once");
    let keys = fleet.keys();
    let from = Some([10, 0, 0, 1].into());
    for secret in [&first.secret, &rotated.secret] {
        let key = keys.check(secret, from).unwrap().valid().unwrap();
        assert_eq!((key.id, key.limits), (first.key.id.clone(), limits));
        assert_eq!(keys.check(secret, None).unwrap(), Verdict::Elsewhere);
    }
    assert_eq!(keys.check(&revoked.secret, None).unwrap(), Verdict::Revoked);
}
