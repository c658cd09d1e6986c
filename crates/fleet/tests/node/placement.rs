//! Placement of sandboxes through any member.
//!
//! A *budget* is the limit of an API key for the sandboxes on all hosts. A *share* is the part that
//! a member may use without a request. A *decision* is the answer to a create: the host, or the
//! reason why no host fits. An *admission* permits the selected host to start the sandbox. A *row*
//! states the host and the state of one sandbox or name.

use super::support::{Fleet, hash};
use jiffy_fleet::node::{
    LimitedNeed, NotPlaced, Operation, PlaceError, PlaceRequest, Placed, PlacementEnd,
    ShareRequest, TakenName,
};
use jiffy_fleet_core::{BudgetNeed, BudgetOwner, HostStatus, MemberId, RowChange, RowState};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::sleep;

/// Hash of the template.
const TEMPLATE: u64 = 77;

fn owner() -> BudgetOwner {
    BudgetOwner("k1:sandboxes".to_owned())
}

/// Returns the need of one sandbox of a key with this limit.
fn need(limit: u64) -> LimitedNeed {
    LimitedNeed {
        need: BudgetNeed {
            owner: owner(),
            amount: 1,
        },
        limit,
    }
}

/// Returns the request for a sandbox of 512 MiB.
fn request() -> PlaceRequest {
    PlaceRequest {
        template: "base".to_owned(),
        templates: vec![TEMPLATE],
        memory_mib: 512,
        ..PlaceRequest::default()
    }
}

/// Returns the status of a host with this free memory and these templates.
fn with_free(memory_mib: u32, templates: &[u64]) -> HostStatus {
    HostStatus {
        free_cpu_milli: 64_000,
        free_memory_mib: memory_mib,
        free_disk_mib: 100_000,
        is_store_reachable: true,
        templates: templates.to_vec(),
        ..HostStatus::default()
    }
}

/// Returns three members with different free memory, of which h1 and h2 have the template.
async fn fleet() -> Fleet {
    let fleet = Fleet::ready(3).await;
    for (id, memory, templates) in [
        (1, 8_000, &[TEMPLATE][..]),
        (2, 4_000, &[TEMPLATE]),
        (3, 2_000, &[]),
    ] {
        *fleet.hosts[&MemberId(id)].state.lock() = Some(with_free(memory, templates));
    }
    sleep(Duration::from_secs(5)).await;
    fleet
}

#[tokio::test]
async fn every_member_places_on_the_tightest_host_that_has_the_template() {
    let fleet = fleet().await;
    for through in 1..=3 {
        let placed = fleet.node(through).place(request()).await.unwrap();
        let host = placed.admission.host.member;
        assert_eq!(host, MemberId(2));
        assert_eq!(placed.address, "10.0.0.2:7946");
        let (own, other) = (fleet.node(2), fleet.node(1));
        let accepted = own.accept_placement(placed.admission.clone()).await;
        accepted.unwrap();
        assert!(other.accept_placement(placed.admission).await.is_err());
    }
    // Three sandboxes of 512 MiB are reserved on h2, whose free memory of 4,000 MiB has room for
    // seven: four more fit.
    let mut hosts = BTreeMap::<u32, u32>::new();
    for _ in 0..8 {
        let placed = fleet.node(3).place(request()).await.unwrap();
        *hosts.entry(placed.admission.host.member.0).or_default() += 1;
    }
    assert_eq!(hosts, BTreeMap::from([(2, 4), (1, 4)]));
    // Reservations expire.
    sleep(Duration::from_secs(12)).await;
    let placed = fleet.node(3).place(request()).await.unwrap();
    assert_eq!(placed.admission.host.member, MemberId(2));
}

#[tokio::test]
async fn warm_pools_follow_the_creates_of_each_host_and_of_the_host_that_is_next() {
    let fleet = fleet().await;
    let guests = |id| {
        let pools = fleet.hosts[&MemberId(id)].pools.lock().clone();
        let pools = pools.iter().map(|pool| (pool.template, pool.guests));
        pools.collect::<Vec<_>>()
    };
    assert_eq!(guests(2), []);
    for through in [1, 2, 3].into_iter().cycle().take(7) {
        let placed = fleet.node(through).place(request()).await.unwrap();
        assert_eq!(placed.admission.host.member, MemberId(2));
    }
    // h2 is full. h1 receives the following sandboxes. No other host is suitable, so none is
    // counted as the next one.
    for _ in 0..15 {
        let placed = fleet.node(3).place(request()).await.unwrap();
        assert_eq!(placed.admission.host.member, MemberId(1));
    }
    sleep(Duration::from_secs(3)).await;
    // A pool covers the creates of 8 s, a minute's creates times 8/60. 7 creates need one guest on
    // h2. They also count for h1, which was the next host. Its 22 creates need three guests.
    assert_eq!(guests(2), [(TEMPLATE, 1)]);
    assert_eq!(guests(1), [(TEMPLATE, 3)]);
    // h3 does not have the template.
    assert_eq!(guests(3), []);
    // Without creates, no pool is needed.
    sleep(Duration::from_secs(600)).await;
    assert_eq!((guests(2), guests(1)), (vec![], vec![]));
}

#[tokio::test]
async fn a_drained_host_is_not_selected_after_the_command_was_acknowledged() {
    let fleet = fleet().await;
    let coordinator = (1..=3).find(|&id| fleet.node(id).view().is_coordinator);
    let node = fleet.node(coordinator.unwrap());
    let placed = async || {
        let placed = node.place(request()).await.unwrap();
        placed.admission.host.member
    };
    for _ in 0..5 {
        node.operate(Operation::Drain(MemberId(2))).await.unwrap();
        assert_eq!(placed().await, MemberId(1));
        node.operate(Operation::Undrain(MemberId(2))).await.unwrap();
        assert_eq!(placed().await, MemberId(2));
        // At another time between two heartbeats.
        sleep(Duration::from_millis(300)).await;
    }
}

#[tokio::test]
async fn a_host_that_has_rejected_a_sandbox_is_not_selected_again() {
    let fleet = fleet().await;
    let mut request = request();
    for expected in [2, 1] {
        let placed = fleet.node(3).place(request.clone()).await.unwrap();
        assert_eq!(placed.admission.host.member, MemberId(expected));
        request.excluded.push(MemberId(expected));
        request.former = Some(placed.decision);
        fleet.node(3).end_placement(PlacementEnd {
            term: placed.admission.term,
            decision: placed.decision,
            rows: Vec::new(),
            rejected: Some("full".to_owned()),
        });
    }
    let error = fleet.node(3).place(request).await.unwrap_err();
    let PlaceError::NotPlaced(NotPlaced::NoHost { decision, reason }) = error else {
        panic!("{error}");
    };
    assert!(
        reason.contains("h3: the template is not on this host"),
        "{reason}"
    );
    assert!(reason.contains("h2: rejected by the host"), "{reason}");
    // The rejected create is found by the id of the decision.
    let decisions = fleet.node(1).decisions(hash("none"), &decision).await;
    let decisions = decisions.unwrap();
    assert_eq!(decisions.len(), 1);
    assert_eq!((decisions[0].host, &decisions[0].reason), (None, &reason));
}

#[tokio::test]
async fn a_sandbox_is_placed_on_the_host_of_its_volumes_or_rejected_with_the_reason() {
    let fleet = fleet().await;
    let mut request = request();
    request.volume_host = Some(MemberId(1));
    let placed = fleet.node(3).place(request.clone()).await.unwrap();
    assert_eq!(placed.admission.host.member, MemberId(1));
    // h3 does not have the template, and is not replaced by a host that has it.
    request.volume_host = Some(MemberId(3));
    let error = fleet.node(2).place(request).await.unwrap_err();
    let PlaceError::NotPlaced(NotPlaced::NoHost { reason, .. }) = error else {
        panic!("{error}");
    };
    for expected in [
        "h1: the volumes of the sandbox are on h3",
        "h3: the template is not on this host",
        "only h3 has the volumes of the sandbox",
    ] {
        assert!(reason.contains(expected), "{reason}");
    }
}

#[tokio::test]
async fn hosts_that_build_a_missing_template_are_named() {
    let fleet = fleet().await;
    let mut building = with_free(4_000, &[]);
    building.builds = vec![5];
    *fleet.hosts[&MemberId(2)].state.lock() = Some(building);
    sleep(Duration::from_secs(5)).await;
    let mut request = request();
    // No host has these templates, and h2 builds the second one.
    request.templates = vec![4, 5];
    let error = fleet.node(3).place(request.clone()).await.unwrap_err();
    let builders = vec![MemberId(2)];
    assert_eq!(error, NotPlaced::NoTemplate { builders }.into());
    // h3 has answered another member that it has the template. Its heartbeats do not contain the
    // template yet.
    request.allowed = vec![MemberId(3)];
    let placed = fleet.node(1).place(request).await.unwrap();
    assert_eq!(placed.admission.host.member, MemberId(3));
}

#[tokio::test]
async fn creates_through_all_members_reach_the_limit_of_a_key_and_never_exceed_it() {
    const LIMIT: u64 = 30;
    let fleet = fleet().await;
    for id in 1..=3 {
        *fleet.hosts[&MemberId(id)].state.lock() = Some(with_free(100_000, &[TEMPLATE]));
    }
    sleep(Duration::from_secs(5)).await;
    let mut running = 0;
    for n in 0..90 {
        let mut request = request();
        request.needs = vec![need(LIMIT)];
        let Ok(placed) = fleet.node(n % 3 + 1).place(request).await else {
            continue;
        };
        let node = fleet.node(placed.admission.host.member.0);
        node.accept_placement(placed.admission).await.unwrap();
        let now = node.now();
        running += u64::from(node.shares().lock().admit(now, &owner(), 1));
    }
    assert_eq!(running, LIMIT);
    // A fork requests a share, because it is not placed on another host. The budget has no free
    // part.
    let request = ShareRequest {
        needs: vec![need(LIMIT)],
    };
    let shares = fleet.node(1).request_shares(request).await.unwrap();
    // `is_known`: the coordinator knows the shares of all members.
    assert!(shares.exhausted.is_some_and(|e| e.is_known));
}

/// Asserts that a placement was rejected because `member` has the name. Returns this rejection.
fn taken(placed: Result<Placed, PlaceError>, member: MemberId) -> TakenName {
    match placed {
        Err(PlaceError::NotPlaced(NotPlaced::NameTaken(taken))) if taken.member == member => taken,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn one_of_two_creates_with_the_same_idempotency_key_is_placed() {
    let fleet = fleet().await;
    let mut request = request();
    request.idempotency = Some(hash("key"));
    request.name = Some(hash("name"));
    let placed = fleet.node(1).place(request.clone()).await.unwrap();
    let host = placed.admission.host.member;
    let again = fleet.node(3).place(request.clone()).await;
    assert_eq!(again, Err(NotPlaced::Received(host).into()));
    let mut other = request.clone();
    other.idempotency = Some(hash("other"));
    taken(fleet.node(3).place(other.clone()).await, host);
    // The host rejects the sandbox: the same create is placed on another host.
    request.excluded.push(host);
    request.former = Some(placed.decision);
    let second = fleet.node(1).place(request).await.unwrap();
    assert_ne!(second.admission.host.member, host);
    // This host runs the sandbox, which is killed later.
    let host = second.admission.host.member;
    let name = super::support::row("name", RowState::Running);
    fleet.node(host.0).change_row(RowChange::Put(name));
    let rows = vec![hash("sandbox")];
    fleet.node(1).end_placement(PlacementEnd {
        term: second.admission.term,
        decision: second.decision,
        rows,
        rejected: None,
    });
    sleep(Duration::from_secs(60)).await;
    let freed = taken(fleet.node(3).place(other.clone()).await, host);
    // The host has killed the sandbox, but the directory still has its row. The create states that
    // the name is freed, and receives it.
    other.freed = Some(freed);
    let placed = fleet.node(3).place(other.clone()).await.unwrap();
    let next = placed.admission.host.member;
    other.idempotency = Some(hash("third"));
    taken(fleet.node(1).place(other.clone()).await, next);
    // The removal by the former host arrives late, and the new host runs the sandbox.
    fleet
        .node(host.0)
        .change_row(RowChange::Removed(hash("name")));
    sleep(Duration::from_secs(1)).await;
    let freed = taken(fleet.node(1).place(other.clone()).await, next);
    assert_eq!(freed.reservation, Some(placed.decision));
    // A member that found no row on the host cannot free the name: the create on this host was
    // still in progress.
    other.freed = Some(freed);
    let name = super::support::row("name", RowState::Running);
    fleet.node(next.0).change_row(RowChange::Put(name));
    sleep(Duration::from_secs(1)).await;
    taken(fleet.node(1).place(other.clone()).await, next);
    // After a kill, the name is free at once.
    fleet
        .node(next.0)
        .change_row(RowChange::Removed(hash("name")));
    sleep(Duration::from_secs(1)).await;
    fleet.node(1).place(other).await.unwrap();
    let decisions = fleet.node(3).decisions(hash("sandbox"), "").await.unwrap();
    // The former decision for the same create is included.
    assert_eq!(decisions.len(), 2);
    assert_eq!(decisions[1].host, Some(host));
    assert!(decisions[1].age_ms >= 60_000);
}

#[tokio::test]
async fn creates_per_minute_are_counted_for_the_whole_fleet() {
    let fleet = fleet().await;
    let mut request = request();
    request.rate = Some(("k1".to_owned(), 2));
    request.memory_mib = 1;
    for through in [1, 2] {
        fleet.node(through).place(request.clone()).await.unwrap();
    }
    let error = fleet.node(3).place(request.clone()).await.unwrap_err();
    // The first of the two creates is counted for the rest of its 60 s.
    assert!(matches!(
        error,
        PlaceError::NotPlaced(NotPlaced::Rate { wait_s: 55..=60 })
    ));
    sleep(Duration::from_secs(61)).await;
    fleet.node(3).place(request).await.unwrap();
}

#[tokio::test]
async fn placements_send_no_request_to_the_records() {
    let fleet = fleet().await;
    let before = fleet.records.requests();
    let start = fleet.elapsed_ms();
    for n in 0..200 {
        let mut request = request();
        request.memory_mib = 1;
        request.needs = vec![need(1_000)];
        fleet.node(n % 3 + 1).place(request).await.unwrap();
    }
    // No simulated time has passed, so no regular replacement of the shard was due.
    assert_eq!(fleet.elapsed_ms(), start, "the shard is replaced every 3 s");
    assert_eq!(fleet.records.requests(), before);
}
