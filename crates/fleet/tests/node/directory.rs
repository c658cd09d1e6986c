//! Location of sandboxes from every member, and reservation of names. The coordinator has a
//! directory with one row per sandbox or name.

use super::support::{Fleet, hash, row};
use jiffy_fleet::node::{LocateError, ReserveError};
use jiffy_fleet_core::{MemberId, RowChange, RowState};
use std::time::Duration;
use tokio::time::{Instant, sleep};

#[tokio::test]
async fn a_sandbox_is_located_from_every_member_and_gone_after_its_kill() {
    let fleet = Fleet::ready(3).await;
    let owner = fleet.others()[0];
    for n in 0..10_000 {
        let row = row(&format!("s{n}"), RowState::Running);
        fleet.node(owner).change_row(RowChange::Put(row));
    }
    sleep(Duration::from_secs(1)).await;
    for id in 1..=3 {
        let node = fleet.node(id);
        for n in [0, 1, 4_999, 9_999] {
            let place = node.locate(hash(&format!("s{n}"))).await.unwrap().unwrap();
            assert_eq!(
                (place.member, place.state),
                (MemberId(owner), RowState::Running)
            );
            assert!(place.is_live);
        }
        assert_eq!(node.locate(hash("unknown")).await, Ok(None));
    }
    fleet.node(owner).change_row(RowChange::Removed(hash("s0")));
    sleep(Duration::from_secs(1)).await;
    for id in 1..=3 {
        let node = fleet.node(id);
        if let Some(place) = node.locate(hash("s0")).await.unwrap() {
            // The member remembered an earlier answer. A request to the owner would show that it is
            // wrong.
            assert!(place.is_remembered);
            node.forget(hash("s0"));
        }
        assert_eq!(node.locate(hash("s0")).await, Ok(None));
    }
}

#[tokio::test]
async fn a_sandbox_is_located_although_the_message_with_its_row_was_lost() {
    let fleet = Fleet::ready(3).await;
    let others = fleet.others();
    let owner = MemberId(others[0]);
    // Messages of the owner are lost, also the one with the row. It still answers queries.
    fleet.network.mute.lock().insert(owner);
    let row = row("new", RowState::Running);
    fleet.node(owner.0).change_row(RowChange::Put(row));
    for id in [others[1], fleet.coordinator().0] {
        let place = fleet.node(id).locate(hash("new")).await.unwrap();
        assert_eq!(place.map(|place| place.member), Some(owner), "h{id}");
        assert_eq!(fleet.node(id).locate(hash("unknown")).await, Ok(None));
    }
    // A member that does not answer may have the sandbox.
    fleet.network.cut.lock().insert(owner);
    let error = fleet.node(others[1]).locate(hash("unknown")).await;
    assert_eq!(error, Err(LocateError::Unreachable(vec![owner])));
}

#[tokio::test]
async fn a_new_coordinator_learns_all_rows() {
    let fleet = Fleet::ready(3).await;
    let former = fleet.coordinator();
    let others = fleet.others();
    for n in 0..9_000 {
        let row = row(&format!("s{n}"), RowState::Paused);
        fleet.node(others[n % 2]).change_row(RowChange::Put(row));
    }
    sleep(Duration::from_secs(1)).await;
    fleet.stop(former.0).await;
    let new = loop {
        sleep(Duration::from_millis(500)).await;
        let coordinators = others.iter().filter(|&&id| {
            let view = fleet.node(id).view();
            view.is_coordinator
        });
        if let Some(&id) = coordinators.into_iter().next() {
            break id;
        }
    };
    // The directory of the new coordinator is complete when the former coordinator is dead.
    fleet.wait(new, 40, |view| view.is_directory_complete).await;
    for n in [0, 1, 8_998, 8_999] {
        let place = fleet.node(new).locate(hash(&format!("s{n}"))).await;
        assert_eq!(place.unwrap().unwrap().member, MemberId(others[n % 2]));
    }
}

#[tokio::test]
async fn without_a_coordinator_all_members_are_queried() {
    let fleet = Fleet::ready(4).await;
    let others = fleet.others();
    fleet
        .node(others[1])
        .change_row(RowChange::Put(row("s", RowState::Running)));
    sleep(Duration::from_secs(1)).await;
    fleet.network.cut.lock().insert(fleet.coordinator());
    let start = Instant::now();
    let place = fleet.node(others[0]).locate(hash("s")).await.unwrap();
    assert_eq!(place.unwrap().member, MemberId(others[1]));
    // The query to the coordinator fails after 1 s, and the queries to all members after 1 s more.
    assert!(start.elapsed() <= Duration::from_millis(2_100));
    // The silent coordinator may have the sandbox.
    let error = fleet.node(others[0]).locate(hash("unknown")).await;
    let expected = LocateError::Unreachable(vec![fleet.coordinator()]);
    assert_eq!(error, Err(expected));
}

#[tokio::test]
async fn exactly_one_member_reserves_a_name() {
    let fleet = Fleet::ready(3).await;
    let nodes = [fleet.node(1), fleet.node(2), fleet.node(3)];
    let (one, two, three) = tokio::join!(
        nodes[0].reserve(hash("name")),
        nodes[1].reserve(hash("name")),
        nodes[2].reserve(hash("name"))
    );
    let results = [one, two, three];
    let winner = results.iter().position(Result::is_ok).unwrap();
    let taken = ReserveError::Taken(MemberId(winner as u32 + 1));
    for (n, result) in results.into_iter().enumerate() {
        if n != winner {
            assert_eq!(result, Err(taken.clone()));
        }
    }
    // The sandbox with the name exists for longer than a reservation.
    nodes[winner].change_row(RowChange::Put(row("name", RowState::Running)));
    sleep(Duration::from_secs(60)).await;
    let other = &nodes[(winner + 1) % 3];
    assert_eq!(other.reserve(hash("name")).await, Err(taken));
    nodes[winner].change_row(RowChange::Removed(hash("name")));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(other.reserve(hash("name")).await, Ok(()));
    // Without a coordinator, no name can be reserved.
    let others = fleet.others();
    fleet.network.cut.lock().insert(fleet.coordinator());
    let result = fleet.node(others[0]).reserve(hash("other")).await;
    assert_eq!(result, Err(ReserveError::NoCoordinator));
}
