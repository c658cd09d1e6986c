//! Shares of budgets across members and coordinators. A *budget* is the limit of an API key for its
//! sandboxes on all hosts. A *share* is the part of it that one member may use without a request to
//! the coordinator. A *verdict* declares a member dead.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::match_bool,
    reason = "a panic is a failed test"
)]

use crate::fleet::Fleet;
use jiffy_fleet_core::record::MemberState;
use jiffy_fleet_core::{
    BudgetNeed, BudgetOwner, CreateError, CreatePlacement, Epoch, HostStatus,
    MAX_SHARES_PER_MESSAGE, MemberId, Millis, RejectionReason, Term,
};
use jiffy_scheduler::{PlacementRequest, Resources};
use std::collections::BTreeMap;

/// Limit of the owner's budget.
const LIMIT: u64 = 10;

fn owner() -> BudgetOwner {
    BudgetOwner("key".to_owned())
}

/// Returns the need of one sandbox.
fn one() -> [BudgetNeed; 1] {
    [BudgetNeed {
        owner: owner(),
        amount: 1,
    }]
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
            ..HostStatus::default()
        });
    }
    fleet.advance(4_000);
    fleet
}

/// Admits `amount` within the share of a member. Returns false if the share is too small: the
/// member then requests the missing amount with its next heartbeat.
fn admit(fleet: &mut Fleet, id: MemberId, amount: u64) -> bool {
    let now = Millis(fleet.now);
    fleet.member(id).shares().admit(now, &owner(), amount)
}

/// Returns the sum of the shares of all members.
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
    // The first coordinator is lost. The other member requests a share from its successor.
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
        .place(now, &one(), &request)
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
    // Each coordinator has a higher term. The coordinator of this fleet has term 2.
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
    // Only the coordinator places sandboxes.
    assert_eq!(
        fleet.member(other).place(now, &one(), &request).is_err(),
        other != coordinator
    );
}

/// Places one sandbox through the coordinator.
fn place(fleet: &mut Fleet) -> Result<CreatePlacement, CreateError> {
    let (coordinator, now) = (fleet.coordinator(), Millis(fleet.now));
    let request = PlacementRequest::default();
    fleet.member(coordinator).place(now, &one(), &request)
}

#[test]
fn a_placement_beyond_the_limit_or_without_the_store_is_rejected() {
    let mut fleet = fleet_with_limit();
    let placed = (0..100).take_while(|_| place(&mut fleet).is_ok()).count();
    assert_eq!(placed as u64, LIMIT);
    assert!(matches!(place(&mut fleet), Err(CreateError::Budget(_))));
    // Without the store, the term of the coordinator ends.
    fleet.has_store = false;
    fleet.advance(15_000);
    assert!(matches!(place(&mut fleet), Err(CreateError::NoCoordinator)));
}

#[test]
fn a_lowered_limit_holds_for_the_next_placement_although_shares_exceed_it() {
    let mut fleet = fleet_with_limit();
    let coordinator = fleet.coordinator();
    // The first placement hands out a share of eight, the minimum.
    for _ in 0..3 {
        place(&mut fleet).unwrap();
    }
    fleet.member(coordinator).set_limit(&owner(), Some(4));
    place(&mut fleet).unwrap();
    let error = place(&mut fleet);
    assert!(matches!(error, Err(CreateError::Budget(_))), "{error:?}");
    fleet.member(coordinator).set_limit(&owner(), Some(6));
    place(&mut fleet).unwrap();
    place(&mut fleet).unwrap();
    let error = place(&mut fleet);
    assert!(matches!(error, Err(CreateError::Budget(_))), "{error:?}");
}

#[test]
fn a_placement_that_no_host_can_accept_counts_nothing() {
    let mut fleet = fleet_with_limit();
    let coordinator = fleet.coordinator();
    let now = Millis(fleet.now);
    let request = PlacementRequest {
        needs: Resources {
            memory_mib: u32::MAX,
            ..Resources::default()
        },
        ..PlacementRequest::default()
    };
    // No host has enough memory. If failed placements counted, they would exhaust the budget.
    for _ in 0..2 * LIMIT {
        let placed = fleet.member(coordinator).place(now, &one(), &request);
        assert!(matches!(placed, Err(CreateError::Placement(_))));
    }
    let request = PlacementRequest::default();
    for _ in 0..LIMIT {
        let placed = fleet.member(coordinator).place(now, &one(), &request);
        placed.unwrap();
    }
}

#[test]
fn a_sandbox_is_placed_on_a_host_with_an_unused_share_if_nothing_else_is_free() {
    let mut fleet = fleet_with_limit();
    let coordinator = fleet.coordinator();
    let ids: Vec<_> = fleet.members.keys().copied().collect();
    let holder = *ids.iter().find(|id| **id != coordinator).unwrap();
    // The first admission fails and requests a share, which has at least eight.
    assert!(!admit(&mut fleet, holder, 1));
    fleet.advance(4_000);
    assert_eq!(fleet.member(holder).shares().share(&owner()).0, 8);
    let now = Millis(fleet.now);
    let request = PlacementRequest::default();
    let mut hosts = Vec::new();
    for _ in 0..LIMIT {
        let placed = fleet.member(coordinator).place(now, &one(), &request);
        hosts.push(placed.unwrap().admission.host.member);
    }
    assert!(hosts.iter().filter(|host| **host == holder).count() >= 8);
    let error = fleet.member(coordinator).place(now, &one(), &request);
    assert!(matches!(error, Err(CreateError::Budget(error)) if error.is_known));
}

#[test]
fn a_share_that_is_requested_is_granted_at_once_or_recalled_from_others() {
    let mut fleet = fleet_with_limit();
    let coordinator = fleet.coordinator();
    let ids: Vec<_> = fleet.members.keys().copied().collect();
    let request = |fleet: &mut Fleet, id, amount| {
        let now = Millis(fleet.now);
        let need = BudgetNeed {
            owner: owner(),
            amount,
        };
        let grant = fleet.member(coordinator).request_share(now, id, &need)?;
        fleet.member(id).shares().apply(now, &grant.unwrap());
        Ok::<_, CreateError>(())
    };
    request(&mut fleet, ids[0], 1).unwrap();
    assert!(admit(&mut fleet, ids[0], 1));
    // The first member received a share of eight and uses one. Two of the limit are free, and seven
    // are unused by the first member, which returns them.
    let error = request(&mut fleet, ids[1], 6).unwrap_err();
    assert!(matches!(&error, CreateError::Budget(error) if error.is_unused_elsewhere));
    fleet.advance(6_000);
    // A share grows by at least eight if that much is free, also for a smaller request.
    request(&mut fleet, ids[1], 4).unwrap();
    assert!(admit(&mut fleet, ids[1], 6));
    assert!(shares(&mut fleet) <= LIMIT);
}

#[test]
fn recalls_beyond_the_maximum_of_a_message_are_sent_later() {
    let mut fleet = fleet_with_limit();
    let owners: Vec<_> = (0..MAX_SHARES_PER_MESSAGE)
        .map(|n| BudgetOwner(format!("key{n}")))
        .collect();
    let coordinator = fleet.coordinator();
    let ids: Vec<_> = fleet.members.keys().copied().collect();
    let (holder, other) = (ids[0], ids[1]);
    let now = Millis(fleet.now);
    let need = |owner: &BudgetOwner, amount| BudgetNeed {
        owner: owner.clone(),
        amount,
    };
    for owner in &owners {
        fleet.member(coordinator).set_limit(owner, Some(8));
        let grant = fleet
            .member(coordinator)
            .request_share(now, holder, &need(owner, 8));
        let grant = grant.unwrap().unwrap();
        fleet.member(holder).shares().apply(now, &grant);
    }
    // The last owner is one more than a message contains.
    let last = owner();
    let grant = fleet
        .member(coordinator)
        .request_share(now, holder, &need(&last, LIMIT));
    let grant = grant.unwrap().unwrap();
    fleet.member(holder).shares().apply(now, &grant);
    for owner in owners.iter().chain([&last]) {
        let denied = fleet
            .member(coordinator)
            .request_share(now, other, &need(owner, 1));
        assert!(denied.is_err());
    }
    // Members also return unused shares by themselves, but after a longer time.
    fleet.advance(6_000);
    for owner in owners.iter().chain([&last]) {
        let granted = if *owner == last { LIMIT } else { 8 };
        let (share, _) = fleet.member(holder).shares().share(owner);
        assert!(share < granted, "{owner:?} was not recalled: {share}");
    }
}

#[test]
fn a_restarted_member_keeps_its_share_until_it_has_counted_its_sandboxes() {
    let mut fleet = fleet_with_limit();
    let coordinator = fleet.coordinator();
    let ids: Vec<_> = fleet.members.keys().copied().collect();
    let restarted = *ids.iter().find(|id| **id != coordinator).unwrap();
    assert!(!admit(&mut fleet, restarted, LIMIT));
    fleet.advance(4_000);
    assert!(admit(&mut fleet, restarted, LIMIT));
    fleet.advance(2_000);
    // The same boot as before: the daemon is restarted, and the host is not.
    fleet.start(restarted, restarted.0 as u8);
    fleet.member(restarted).shares().set_complete(false);
    fleet.advance(6_000);
    assert!(fleet.authority(restarted).is_some());
    let now = Millis(fleet.now);
    let request = PlacementRequest::default();
    let place = |fleet: &mut Fleet| {
        let placed = fleet.member(coordinator).place(now, &one(), &request);
        placed.is_ok()
    };
    // The member has not counted its sandboxes, so its whole share may be in use.
    assert!(!place(&mut fleet));
    let mut shares = fleet.member(restarted).shares();
    shares.set_in_use(now, &owner(), 4);
    shares.set_complete(true);
    drop(shares);
    // Six of the share are unused.
    fleet.advance(2_000);
    assert!(place(&mut fleet));
}

/// Simulates creates whose two steps, the placement and the arrival at the selected host,
/// interleave in random order.
#[test]
fn fifty_thousand_concurrent_creates_reach_a_limit_of_ten_thousand_and_never_exceed_it() {
    const CREATES: u64 = 50_000;
    const MAX: u64 = 10_000;
    const MEMBERS: u32 = 16;
    let mut fleet = Fleet::new(MEMBERS);
    for member in fleet.members.values_mut() {
        member.set_limit(&owner(), Some(MAX));
        member.set_status(HostStatus {
            free_cpu_milli: 64_000_000,
            free_memory_mib: 64_000_000,
            free_disk_mib: 64_000_000,
            is_store_reachable: true,
            ..HostStatus::default()
        });
    }
    fleet.advance(4_000);
    let coordinator = fleet.coordinator();
    let ids: Vec<_> = fleet.members.keys().copied().collect();
    let mut seed = 7_u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) as usize % below
    };
    let mut in_use: BTreeMap<MemberId, u64> = BTreeMap::new();
    let (mut waiting, mut started, mut denied, mut retried) = (Vec::new(), 0, 0, 0);
    while started < CREATES || !waiting.is_empty() {
        let now = Millis(fleet.now);
        // Once 400 creates are in flight, half of the steps are placements, and half are arrivals
        // at a host.
        if started < CREATES && (waiting.len() < 400 || random(2) == 0) {
            started += 1;
            let memory_mib = 128 << random(4);
            let request = PlacementRequest {
                needs: Resources {
                    memory_mib,
                    ..Resources::default()
                },
                ..PlacementRequest::default()
            };
            match fleet.member(coordinator).place(now, &one(), &request) {
                Ok(placement) => waiting.push(placement),
                Err(CreateError::Budget(_)) => denied += 1,
                Err(error) => panic!("{error}"),
            }
        } else {
            let placement = waiting.swap_remove(random(waiting.len()));
            let host = placement.admission.host.member;
            let member = fleet.member(host);
            member.accept_placement(now, &placement.admission).unwrap();
            let is_running = member.shares().admit(now, &owner(), 1);
            if is_running {
                *in_use.entry(host).or_default() += 1;
            } else {
                retried += 1;
            }
            let reservation = placement.reservation;
            fleet
                .member(coordinator)
                .end_placement(reservation, is_running);
        }
        // A member also admits sandboxes without a placement, for example forks.
        if random(50) == 0 {
            let id = ids[random(ids.len())];
            if admit(&mut fleet, id, 1) {
                *in_use.entry(id).or_default() += 1;
            }
        }
        if random(100) == 0 {
            fleet.advance(100);
            let total: u64 = in_use.values().sum();
            assert!(total <= MAX && shares(&mut fleet) <= MAX);
        }
    }
    let total: u64 = in_use.values().sum();
    println!("{total} of {MAX} running, {denied} denied, {retried} rejected by their host");
    assert!(total <= MAX, "{total} sandboxes exceed the limit");
    assert!(total * 100 >= MAX * 99, "only {total} sandboxes run");
}
