//! Shares of budgets across members and coordinators.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::match_bool,
    reason = "a panic is a failed test"
)]

#[path = "support/fleet.rs"]
mod fleet;
#[path = "support/samples.rs"]
mod samples;

use fleet::Fleet;
use jiffy_fleet_core::record::MemberState;
use jiffy_fleet_core::{
    BudgetOwner, CreateError, Epoch, HostStatus, MemberId, Millis, RejectionReason, Term,
};
use jiffy_scheduler::PlacementRequest;

const LIMIT: u64 = 10;

fn owner() -> BudgetOwner {
    BudgetOwner("key".to_owned())
}

/// Returns a fleet whose members know the limit and have free resources.
fn fleet_with_limit() -> Fleet {
    let mut fleet = Fleet::new(3);
    for member in fleet.members.values_mut() {
        member.set_limit(&owner(), Some(LIMIT));
        member.set_status(HostStatus {
            free_cpu_milli: 64_000,
            free_memory_mib: 64_000,
            free_disk_mib: 64_000,
            is_store_reachable: true,
            templates: Vec::new(),
        });
    }
    fleet.advance(4_000);
    fleet
}

fn admit(fleet: &mut Fleet, id: MemberId, amount: u64) -> bool {
    let now = Millis(fleet.now);
    fleet.member(id).shares().admit(now, &owner(), amount)
}

fn shares(fleet: &mut Fleet) -> u64 {
    let members = fleet.members.values_mut();
    members
        .map(|member| member.shares().share(&owner()).0)
        .sum()
}

#[test]
fn members_use_the_whole_limit_and_never_more() {
    let mut fleet = fleet_with_limit();
    let ids: Vec<_> = fleet.members.keys().copied().collect();
    let mut in_use = 0;
    for _ in 0..40 {
        for &id in &ids {
            in_use += u64::from(admit(&mut fleet, id, 1));
        }
        fleet.advance(1_000);
        assert!(shares(&mut fleet) <= LIMIT);
    }
    // Unused parts of shares are recalled for members that need them.
    assert_eq!(in_use, LIMIT);
}

#[test]
fn a_new_coordinator_grants_no_share_until_all_members_have_reported_or_are_dead() {
    let mut fleet = fleet_with_limit();
    let lost = fleet.coordinator();
    assert!(!admit(&mut fleet, lost, 8));
    fleet.advance(4_000);
    assert!(admit(&mut fleet, lost, 8));
    let other = fleet
        .members
        .keys()
        .copied()
        .find(|id| *id != lost)
        .unwrap();
    let term = fleet.record.term;
    fleet.silent.insert(lost);
    fleet.wait(20_000, |fleet| fleet.record.term > term);
    while fleet.state(lost).0 == MemberState::Up {
        assert!(!admit(&mut fleet, other, 5), "granted before the verdict");
        fleet.advance(500);
    }
    // Sandboxes of a dead host do not count.
    fleet.wait(10_000, |fleet| fleet.state(lost).0 == MemberState::Dead);
    fleet.advance(5_000);
    assert!(admit(&mut fleet, other, 5));
}

#[test]
fn a_placement_is_accepted_only_by_its_process_epoch_and_term() {
    let mut fleet = fleet_with_limit();
    let coordinator = fleet.coordinator();
    let now = Millis(fleet.now);
    let request = PlacementRequest::default();
    let placement = fleet
        .member(coordinator)
        .place(now, &owner(), &request)
        .unwrap();
    let admission = placement.admission;
    let host = admission.host.member;
    let other = fleet
        .members
        .keys()
        .copied()
        .find(|id| *id != host)
        .unwrap();
    let accept =
        |fleet: &mut Fleet, id, admission| fleet.member(id).accept_placement(now, admission);
    let mut former = admission.clone();
    former.term = Term(1);
    assert_eq!(
        accept(&mut fleet, host, &former),
        Err(RejectionReason::Term)
    );
    let mut ended = admission.clone();
    ended.host.epoch = Epoch(9);
    assert_eq!(
        accept(&mut fleet, host, &ended),
        Err(RejectionReason::EpochEnded)
    );
    let mut restarted = admission.clone();
    restarted.instance.started_ms += 1;
    assert_eq!(
        accept(&mut fleet, host, &restarted),
        Err(RejectionReason::Superseded)
    );
    assert_eq!(
        accept(&mut fleet, other, &admission),
        Err(RejectionReason::EpochEnded)
    );
    assert!(!admit(&mut fleet, host, 1));
    accept(&mut fleet, host, &admission).unwrap();
    assert!(admit(&mut fleet, host, 1));
    assert_eq!(
        fleet.member(other).place(now, &owner(), &request).is_err(),
        other != coordinator
    );
}

#[test]
fn a_placement_beyond_the_limit_or_without_the_store_is_rejected() {
    let mut fleet = fleet_with_limit();
    let coordinator = fleet.coordinator();
    let request = PlacementRequest::default();
    let place = |fleet: &mut Fleet| {
        let now = Millis(fleet.now);
        fleet.member(coordinator).place(now, &owner(), &request)
    };
    let placed = (0..100).take_while(|_| place(&mut fleet).is_ok()).count();
    assert_eq!(placed as u64, LIMIT);
    assert!(matches!(place(&mut fleet), Err(CreateError::Budget(_))));
    fleet.has_store = false;
    fleet.advance(15_000);
    assert!(matches!(place(&mut fleet), Err(CreateError::NoCoordinator)));
}
