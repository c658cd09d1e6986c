//! Members and coordinators without random faults of the network: times of the protocol, and
//! rejections.
//!
//! A *front* is a machine without sandboxes that passes requests of clients to the members. The
//! certificate of a removed front remains valid, so the record of the shard lists removed fronts
//! for all later coordinators. A *verdict* declares a member dead. An *epoch* of a member lasts
//! from its registration with the coordinator until the coordinator declares it dead. *Mass
//! silence* means that more than half of the live members send no heartbeats. The *authority* of a
//! member is its right to start stored sandboxes.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::match_bool,
    reason = "a panic is a failed test"
)]

use crate::fleet::Fleet;
use jiffy_fleet_core::record::MemberState;
use jiffy_fleet_core::{
    Body, Effect, Epoch, Event, MAX_MESSAGE_BYTES, Member, MemberId, MembershipError, Message,
    MessageError, Millis, Owner, RejectionReason, Term,
};
use jiffy_scheduler::PlacementRequest;

const H1: MemberId = MemberId(1);
const H2: MemberId = MemberId(2);
const H3: MemberId = MemberId(3);
/// Boot of a host that was rebooted, or of another host. `Fleet::new` gives host N the boot N.
const OTHER_BOOT: u8 = 99;

#[test]
fn a_removed_front_remains_removed_under_the_next_coordinator() {
    let mut fleet = Fleet::new(3);
    let first = fleet.coordinator();
    let (one, two) = (MemberId(9).front(), MemberId(4).front());
    let now = Millis(fleet.now);
    for front in [one, two] {
        fleet.member(first).remove(now, front).unwrap();
    }
    let again = fleet.member(first).remove(now, one).unwrap_err();
    assert!(again.to_string().contains("f9 was removed"), "{again}");
    // A front has no row in the record, so other commands do not find it.
    let drained = fleet.member(first).set_draining(one, true).unwrap_err();
    assert_eq!(drained, MembershipError::Unknown(one));
    fleet.advance(4_000);
    // The list is sorted.
    assert_eq!(fleet.record.removed_fronts, [two, one]);
    fleet.silent.insert(first);
    fleet.wait(40_000, |fleet| fleet.record.coordinator != first);
    fleet.advance(4_000);
    assert_eq!(fleet.record.removed_fronts, [two, one]);
}

#[test]
fn the_first_member_of_a_new_fleet_is_the_coordinator_at_once() {
    let mut fleet = Fleet::empty(2);
    fleet.start(H2, 2);
    fleet.advance(5_000);
    assert_eq!(fleet.record.term, Term(1), "another member waits");
    fleet.start(H1, 1);
    fleet.wait(500, |fleet| fleet.record.term == Term(2));
    assert_eq!(fleet.record.coordinator, H1);
    fleet.wait(4_000, |fleet| fleet.authority(H1).is_some());
    // After a restart, an acknowledgement of its former process may still be in use.
    fleet.start(H1, OTHER_BOOT);
    fleet.advance(9_000);
    assert_eq!(fleet.record.term, Term(2));
}

#[test]
fn authority_ends_10_s_after_the_last_acknowledged_heartbeat() {
    let mut fleet = Fleet::new(3);
    fleet.has_store = false;
    let ended = fleet.wait(20_000, |fleet| fleet.authority(H2).is_none());
    // The coordinator acknowledges heartbeats for 9 s after it last replaced the record in the
    // store, which it did up to 3 s before. The last acknowledged heartbeat was sent up to 2 s
    // before this end, and gives authority for 10 s. So the authority ends after at least 14 s (9 -
    // 3 - 2 + 10), and at most 19 s (9 + 10) plus one step of 100 ms.
    assert!((14_000..=19_100).contains(&ended), "{ended}");
    fleet.advance(300_000);
    // Without the store, the coordinator decides nothing. When the store returns, the same
    // coordinator continues.
    let is_rejection = |effect: &Effect| *effect == Effect::Rejected(RejectionReason::NoAuthority);
    assert!(
        fleet
            .reported
            .iter()
            .all(|(_, _, effect)| is_rejection(effect))
    );
    fleet.has_store = true;
    let returned = fleet.wait(5_000, |fleet| fleet.authority(H2).is_some());
    println!("authority ended after {ended} ms, returned after {returned} ms");
    assert_eq!(fleet.record.term, Term(2));
}

#[test]
fn a_silent_member_is_dead_within_15_s_and_returns_with_a_new_epoch() {
    let mut fleet = Fleet::new(3);
    let lost = if fleet.coordinator() == H2 { H3 } else { H2 };
    fleet.silent.insert(lost);
    let dead = fleet.wait(15_000, |fleet| fleet.state(lost).0 == MemberState::Dead);
    // A member is dead after 12 s of silence, and its last heartbeat was sent up to 2 s before it
    // fell silent.
    assert!(dead >= 10_000, "{dead}");
    assert!(fleet.authority(lost).is_none());
    let verdict = Effect::Verdict(Owner {
        member: lost,
        epoch: Epoch(1),
    });
    assert!(
        fleet
            .reported
            .iter()
            .any(|(_, _, effect)| *effect == verdict)
    );
    fleet.silent.remove(&lost);
    let returned = fleet.wait(15_000, |fleet| fleet.authority(lost).is_some());
    println!("verdict after {dead} ms, return after {returned} ms");
    assert_eq!(fleet.state(lost), (MemberState::Up, 2));
}

#[test]
fn a_host_without_heartbeat_for_5_s_receives_no_sandboxes_until_its_next_one() {
    let mut fleet = Fleet::new(3);
    let coordinator = fleet.coordinator();
    let lost = if coordinator == H2 { H3 } else { H2 };
    let request = PlacementRequest::default();
    let explain = |fleet: &Fleet| fleet.members[&coordinator].explain(&request).unwrap();
    assert_eq!(explain(&fleet).suitable, 3);
    fleet.silent.insert(lost);
    let excluded = fleet.wait(6_000, |fleet| explain(fleet).suitable == 2);
    // The last heartbeat was sent up to 2 s before. The coordinator checks the hosts every 500 ms.
    assert!((2_900..=5_600).contains(&excluded), "{excluded}");
    assert_eq!(fleet.state(lost).0, MemberState::Up);
    for _ in 0..10 {
        let now = Millis(fleet.now);
        let placed = fleet.member(coordinator).place(now, &[], &request);
        assert_ne!(placed.unwrap().admission.host.member, lost);
    }
    let reason = format!("h{}: no recent heartbeat", lost.0);
    assert!(explain(&fleet).to_string().contains(&reason));
    fleet.silent.remove(&lost);
    fleet.wait(3_000, |fleet| explain(fleet).suitable == 3);
    assert_eq!(fleet.state(lost), (MemberState::Up, 1));
}

#[test]
fn a_lost_coordinator_is_replaced_within_20_s_and_dead_within_30_s() {
    for offset in (0..3_000).step_by(300) {
        let mut fleet = Fleet::new(3);
        fleet.advance(offset);
        let lost = fleet.coordinator();
        let term = fleet.record.term;
        fleet.silent.insert(lost);
        let takeover = fleet.wait(20_000, |fleet| fleet.record.term > term);
        let dead = takeover + fleet.wait(20_000, |fleet| fleet.state(lost).0 == MemberState::Dead);
        println!("offset {offset}: takeover after {takeover} ms, verdict after {dead} ms");
        assert!(
            // Another member takes over if the record is unchanged for 12 s. Its last replacement
            // was up to 3 s before the loss.
            takeover >= 12_000 - 3_000 && dead <= 30_000,
            "{takeover} {dead}"
        );
        // The former coordinator returns as a member.
        fleet.silent.remove(&lost);
        fleet.wait(20_000, |fleet| fleet.authority(lost).is_some());
        assert!(!fleet.members[&lost].is_coordinator());
    }
}

#[test]
fn mass_silence_permits_no_verdict_until_an_operator_confirms_it() {
    let mut fleet = Fleet::new(5);
    let coordinator = fleet.coordinator();
    let others: Vec<_> = fleet
        .members
        .keys()
        .copied()
        .filter(|id| *id != coordinator)
        .collect();
    let (present, lost) = (others[0], &others[1..]);
    fleet.advance(20_000);
    fleet.silent.extend(&others);
    fleet.advance(120_000);
    assert!(
        others
            .iter()
            .all(|&id| fleet.state(id).0 == MemberState::Up)
    );
    let silence = fleet
        .reported
        .iter()
        .find_map(|(_, _, effect)| match effect {
            Effect::MassSilence { silent, members } => Some((*silent, *members)),
            _ => None,
        });
    assert_eq!(silence, Some((4, 5)));
    fleet.silent.remove(&present);
    fleet.advance(5_000);
    let now = Millis(fleet.now);
    let error = fleet.member(coordinator).confirm_dead(now, present);
    assert!(
        matches!(error, Err(MembershipError::Active { .. })),
        "{error:?}"
    );
    fleet
        .member(coordinator)
        .confirm_dead(now, lost[0])
        .unwrap();
    fleet.advance(5_000);
    assert_eq!(fleet.state(lost[0]).0, MemberState::Dead);
    let error = fleet.member(present).confirm_dead(now, lost[1]);
    assert!(matches!(
        error,
        Err(MembershipError::NotCoordinator(Some(_)))
    ));
}

#[test]
fn members_that_fall_silent_together_are_not_condemned_one_by_one() {
    let mut fleet = Fleet::new(5);
    let coordinator = fleet.coordinator();
    let others: Vec<_> = fleet
        .members
        .keys()
        .copied()
        .filter(|id| *id != coordinator)
        .collect();
    // The heartbeats of three members end at different times within 2 s.
    for &id in &others[..3] {
        fleet.silent.insert(id);
        fleet.advance(600);
    }
    fleet.advance(60_000);
    assert!(
        others
            .iter()
            .all(|&id| fleet.state(id).0 == MemberState::Up)
    );
}

#[test]
fn a_restarted_daemon_keeps_its_epoch_and_a_rebooted_host_receives_a_new_one() {
    let mut fleet = Fleet::new(3);
    let id = if fleet.coordinator() == H2 { H3 } else { H2 };
    // The boot is the same: only the daemon is restarted.
    fleet.start(id, id.0 as u8);
    let restarted = fleet.wait(10_000, |fleet| fleet.authority(id).is_some());
    assert_eq!(fleet.state(id), (MemberState::Up, 1));
    fleet.start(id, OTHER_BOOT);
    let rebooted = fleet.wait(30_000, |fleet| fleet.authority(id).is_some());
    assert_eq!(fleet.state(id), (MemberState::Up, 2));
    println!("restart: {restarted} ms, reboot: {rebooted} ms");
}

#[test]
fn a_copied_data_directory_is_rejected_while_the_first_host_is_active() {
    let mut fleet = Fleet::new(3);
    let coordinator = fleet.coordinator();
    let id = if coordinator == H2 { H3 } else { H2 };
    let first = fleet.members.remove(&id).unwrap();
    // Both hosts send for a while, in turns. The copy is rejected.
    fleet.start(id, OTHER_BOOT);
    let copy = fleet.members.remove(&id).unwrap();
    let mut hosts = [first, copy];
    for _ in 0..300 {
        for index in [0, 1] {
            let host = std::mem::replace(&mut hosts[index], idle_member());
            fleet.members.insert(id, host);
            fleet.advance(100);
            hosts[index] = fleet.members.remove(&id).unwrap();
        }
    }
    assert!(fleet.rejections(id).contains(&RejectionReason::Duplicate));
    assert!(hosts[1].epoch().is_none());
    // After the end of the first host, the copy is registered in a new epoch.
    let [_, copy] = hosts;
    fleet.members.insert(id, copy);
    fleet.wait(40_000, |fleet| fleet.authority(id).is_some());
    assert_eq!(fleet.state(id).1, 2);
}

#[test]
fn a_host_that_is_declared_dead_and_removed_by_one_write_receives_its_verdict() {
    let mut fleet = Fleet::new(3);
    let coordinator = fleet.coordinator();
    let others: Vec<_> = fleet.members.keys().copied().collect();
    let others: Vec<_> = others.into_iter().filter(|id| *id != coordinator).collect();
    fleet.advance(20_000);
    // Mass silence: no verdict without an operator.
    fleet.silent.extend(&others);
    fleet.advance(60_000);
    let (now, lost) = (Millis(fleet.now), others[0]);
    let member = fleet.member(coordinator);
    member.set_wall_clock(1_700_000_000_000);
    member.confirm_dead(now, lost).unwrap();
    member.remove(now, lost).unwrap();
    fleet.advance(4_000);
    assert_eq!(fleet.state(lost).0, MemberState::Left);
    assert_eq!(
        fleet.record.row(lost).unwrap().dead_since_ms,
        Some(1_700_000_000_000)
    );
    let verdict = Effect::Verdict(Owner {
        member: lost,
        epoch: Epoch(1),
    });
    let verdicts = fleet.reported.iter().filter(|(_, _, e)| *e == verdict);
    assert_eq!(verdicts.count(), 1);
}

/// Returns a member that does nothing, as a placeholder.
fn idle_member() -> Member {
    let mut fleet = Fleet::empty(1);
    fleet.start(H1, 1);
    fleet.members.remove(&H1).unwrap()
}

#[test]
fn drain_leave_and_remove_require_the_right_state() {
    let mut fleet = Fleet::new(2);
    let coordinator = fleet.coordinator();
    let other = if coordinator == H1 { H2 } else { H1 };
    let now = Millis(fleet.now);
    let member = fleet.member(coordinator);
    member.set_draining(other, true).unwrap();
    // All other hosts are draining.
    let error = member.set_draining(coordinator, true).unwrap_err();
    assert_eq!(error, MembershipError::LastHost(coordinator));
    let error = member.set_draining(other, true).unwrap_err();
    assert!(matches!(error, MembershipError::State { .. }), "{error}");
    let error = member.remove(now, other).unwrap_err();
    assert!(matches!(error, MembershipError::Active { .. }), "{error}");
    let error = member.set_draining(MemberId(9), true).unwrap_err();
    assert_eq!(error, MembershipError::Unknown(MemberId(9)));
    fleet.advance(4_000);
    assert_eq!(fleet.state(other).0, MemberState::Draining);
    let mut effects = Vec::new();
    fleet.member(other).leave(&mut effects);
    for effect in effects {
        if let Effect::Send { to, message, .. } = effect {
            fleet.event(
                to,
                Event::Message {
                    from: other,
                    message,
                },
            );
        }
    }
    fleet.advance(4_000);
    assert_eq!(fleet.state(other).0, MemberState::Left);
    fleet.advance(20_000);
    assert!(fleet.authority(other).is_none());
    assert!(fleet.rejections(other).contains(&RejectionReason::Left));
}

#[test]
fn messages_with_unknown_values_are_rejected_with_the_reason() {
    let mut fleet = Fleet::new(3);
    let coordinator = fleet.coordinator();
    let other = if coordinator == H2 { H3 } else { H2 };
    let heartbeat = heartbeat_of(&mut fleet, other);
    let answer = |fleet: &mut Fleet, from: MemberId, message: Message| {
        let now = Millis(fleet.now);
        let mut effects = Vec::new();
        let event = Event::Message {
            from,
            message: Box::new(message),
        };
        fleet.member(coordinator).handle(now, event, &mut effects);
        effects.into_iter().find_map(|effect| match effect {
            Effect::Send { message, .. } => match message.body {
                Body::Rejected(rejection) => Some(rejection.reason),
                _ => None,
            },
            _ => None,
        })
    };
    let mut foreign = heartbeat.clone();
    foreign.fleet = "zzzz".to_owned().try_into().unwrap();
    assert_eq!(
        answer(&mut fleet, other, foreign),
        Some(RejectionReason::ForeignFleet)
    );
    let mut newer = heartbeat.clone();
    newer.format = 2;
    assert_eq!(
        answer(&mut fleet, other, newer),
        Some(RejectionReason::Format)
    );
    let mut former = heartbeat.clone();
    former.term = Term(1);
    assert_eq!(
        answer(&mut fleet, other, former),
        Some(RejectionReason::Term)
    );
    let mut ended = heartbeat.clone();
    ended.epoch = Some(Epoch(7));
    assert_eq!(
        answer(&mut fleet, other, ended),
        Some(RejectionReason::EpochEnded)
    );
    let mut large = heartbeat.clone();
    if let Body::Heartbeat(heartbeat) = &mut large.body {
        heartbeat.status.templates = vec![1; 5_000];
    }
    assert_eq!(
        answer(&mut fleet, other, large),
        Some(RejectionReason::Invalid)
    );
    // The coordinator sends the heartbeat of the other member as its own. The heartbeat's process
    // is not registered under the coordinator's id, so the answer is a request to register.
    assert_eq!(
        answer(&mut fleet, coordinator, heartbeat),
        Some(RejectionReason::Unregistered)
    );
    assert!(matches!(
        Message::decode(&vec![b'a'; MAX_MESSAGE_BYTES + 1]),
        Err(MessageError::TooLarge(_))
    ));
    assert!(matches!(
        Message::decode(b"{}"),
        Err(MessageError::Malformed(_))
    ));
}

/// Returns the next heartbeat of a member.
fn heartbeat_of(fleet: &mut Fleet, id: MemberId) -> Message {
    for _ in 0..100 {
        fleet.now += 100;
        let now = Millis(fleet.now);
        let mut effects = Vec::new();
        fleet.member(id).handle(now, Event::Timer, &mut effects);
        for effect in effects {
            if let Effect::Send { message, .. } = effect
                && matches!(message.body, Body::Heartbeat(_))
            {
                return *message;
            }
        }
    }
    panic!("no heartbeat");
}
