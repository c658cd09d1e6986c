//! `jiffy fleet init`: creates a fleet whose first member is this host.

use super::lab::{Lab, facts};
use jiffy_fleet::init::{check_host, create_fleet};
use jiffy_fleet::settings::Settings;
use jiffy_fleet::{FleetAccess, SetupError};
use jiffy_fleet_core::MemberId;
use jiffy_fleet_core::record::TableIndex;
use std::os::unix::fs::MetadataExt;

#[tokio::test]
async fn a_fleet_starts_with_its_first_member() {
    let lab = Lab::new();
    let home = lab.home("one");
    let (settings, access) = lab.init(&home).await.unwrap();
    assert_eq!(settings.member, MemberId(1));
    assert_eq!(Settings::load(&home).unwrap(), Some(settings.clone()));
    assert_eq!(settings.identity(&home).unwrap().member(), MemberId(1));
    // Guests are limited only on request: not every host can limit them.
    assert_eq!(
        (settings.cpu_level.as_ref(), access.root.cpu_level),
        (None, 3)
    );
    // The tables of keys and templates are known to be empty.
    let key = "fleet/tables/index".parse().unwrap();
    let index = access.records.get(&key).await.unwrap().unwrap();
    let index = TableIndex::decode(&index.content, &settings.fleet).unwrap();
    assert!(index.number > 0 && index.pending.is_empty());
    // The records and secrets are unchanged after a restart.
    let again = FleetAccess::open(&settings, &home, &lab.remote(&home))
        .await
        .unwrap();
    assert_eq!(again.secret, access.secret);
    assert_eq!(again.root.domains, ["sbx.example.com"]);
    for name in ["fleet.toml", "fleet/key.pem", "fleet/certificate.pem"] {
        let mode = std::fs::metadata(home.join(name)).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[tokio::test]
async fn a_member_and_a_directory_are_rejected_with_the_reason() {
    let lab = Lab::new();
    let home = lab.home("one");
    // The lab has a directory as its store.
    let error = check_host(&home, &lab.store()).unwrap_err().to_string();
    assert!(
        error.contains("a directory cannot replace") && error.contains("s3://"),
        "{error}"
    );
    lab.init(&home).await.unwrap();
    let s3 = "s3://bucket/prefix".parse().unwrap();
    let error = check_host(&home, &s3).unwrap_err();
    assert!(matches!(error, SetupError::Member { .. }), "{error}");
}

#[tokio::test]
async fn a_prefix_of_another_fleet_is_rejected() {
    let lab = Lab::new();
    let one = lab.home("one");
    let (settings, _) = lab.init(&one).await.unwrap();
    // A host with the same master keys, and one with others.
    let two = lab.home("two");
    std::fs::create_dir_all(two.join("store")).unwrap();
    std::fs::copy(one.join("store/keys.toml"), two.join("store/keys.toml")).unwrap();
    let error = lab.init(&two).await.unwrap_err().to_string();
    assert!(
        error.contains(&format!("is used by fleet {}", settings.fleet)),
        "{error}"
    );
    let error = lab.init(&lab.home("three")).await.unwrap_err().to_string();
    assert!(error.contains("does not open its root record"), "{error}");
    for name in ["two", "three"] {
        assert!(Settings::load(&lab.home(name)).unwrap().is_none());
    }
}

#[tokio::test]
async fn an_interrupted_init_is_completed_by_its_repetition() {
    let lab = Lab::new();
    let home = lab.home("one");
    let (settings, access) = lab.init(&home).await.unwrap();
    // As if the last step, which renames the draft, had not been executed.
    std::fs::rename(home.join("fleet.toml"), home.join("fleet/fleet.draft.toml")).unwrap();
    let remote = lab.remote(&home);
    let (again, other) = create_fleet(&home, &lab.init_options(), &facts(), &remote)
        .await
        .unwrap();
    assert_eq!(again, settings);
    assert_eq!(other.secret, access.secret);
    assert_eq!(Settings::load(&home).unwrap(), Some(settings));
}
