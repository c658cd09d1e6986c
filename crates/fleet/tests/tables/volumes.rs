//! Volumes of API keys in the tables of a fleet.

use super::lab::{Lab, reached};
use jiffy_fleet::MemoryRecords;
use jiffy_fleet::tables::{Action, TableError};
use jiffy_fleet_core::MemberId;
use jiffy_fleet_core::record::{
    MAX_OWNER_VOLUME_BYTES, MAX_OWNER_VOLUMES, RowContent, RowKey, Table, VolumeRow,
};
use std::sync::Arc;

fn volume(id: &str, owner: &str, name: &str) -> VolumeRow {
    VolumeRow {
        id: id.to_owned(),
        owner: Some(owner.to_owned()),
        name: name.to_owned(),
        home: MemberId(2),
        bytes: 1 << 20,
        files: 10,
        created_ms: 1,
        unknown: Default::default(),
    }
}

#[tokio::test(start_paused = true)]
async fn all_members_know_the_home_of_a_volume_until_it_is_removed() {
    let lab = Lab::new(Arc::new(MemoryRecords::default())).await;
    let (one, two) = (lab.member(1), lab.member(2));
    let row = volume("v1", "a", "data");
    let created = two.change(Action::CreateVolume(row.clone())).await.unwrap();
    // A member that starts later reads the volumes from the records.
    let three = lab.member(3);
    let key = RowKey::Volume("v1".to_owned());
    for tables in [&one, &two, &three] {
        reached(tables, created.number).await;
        assert_eq!(tables.row(&key).unwrap().as_volume(), Some(&row));
    }
    let ids = vec!["v1".to_owned(), "unknown".to_owned()];
    let removed = three.change(Action::RemoveVolumes(ids.clone())).await;
    let removed = removed.unwrap();
    for tables in [&one, &two, &three] {
        reached(tables, removed.number).await;
        assert!(tables.rows(Table::Volumes).is_empty());
    }
    let again = one.change(Action::RemoveVolumes(ids)).await;
    assert!(matches!(again, Err(TableError::Unknown(_))), "{again:?}");
}

#[tokio::test(start_paused = true)]
async fn names_of_volumes_are_unique_per_owner_and_their_number_and_size_are_bounded() {
    let lab = Lab::new(Arc::new(MemoryRecords::default())).await;
    let (one, two) = (lab.member(1), lab.member(2));
    // Both changes are part of one commit.
    let (first, second) = tokio::join!(
        one.change(Action::CreateVolume(volume("v1", "a", "data"))),
        two.change(Action::CreateVolume(volume("v2", "a", "data"))),
    );
    let exists = [first, second].into_iter().filter_map(Result::err);
    let exists: Vec<_> = exists.collect();
    assert!(matches!(exists[..], [TableError::Exists(_)]), "{exists:?}");
    // The name is taken in later commits, too, but not for other owners.
    let later = two.change(Action::CreateVolume(volume("v3", "a", "data")));
    let later = later.await;
    assert!(matches!(later, Err(TableError::Exists(_))), "{later:?}");
    let other = Action::CreateVolume(volume("v3", "b", "data"));
    one.change(other).await.unwrap();
    let large = VolumeRow {
        bytes: MAX_OWNER_VOLUME_BYTES,
        ..volume("v4", "a", "large")
    };
    let large = one.change(Action::CreateVolume(large)).await;
    assert!(matches!(large, Err(TableError::Full(_))), "{large:?}");
    let rows = (1..MAX_OWNER_VOLUMES).map(|i| {
        let name = format!("n{i}");
        RowContent::Volume(volume(&format!("i{i}"), "a", &name))
    });
    one.import(rows.collect()).await.unwrap();
    let full = one.change(Action::CreateVolume(volume("v5", "a", "more")));
    let full = full.await;
    assert!(matches!(full, Err(TableError::Full(_))), "{full:?}");
    // A removal in the same commit frees a place and a name.
    let (removed, created) = tokio::join!(
        one.change(Action::RemoveVolumes(vec!["i1".to_owned()])),
        one.change(Action::CreateVolume(volume("v5", "a", "n1"))),
    );
    removed.unwrap();
    created.unwrap();
}
