//! Registration, verdicts and authority of members. A *verdict* is the coordinator's decision that
//! a member is dead. The *authority* of a member is its permission to claim sandboxes (to become
//! their owner). It ends 10 s after the last acknowledged heartbeat of the member.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox. To
//! *reconcile* means to compare all sandboxes of a member with their heads.

use super::support::{Fleet, START_MS, fleet_id};
use jiffy_fleet::node::Members;
use jiffy_fleet::records::Fault;
use jiffy_fleet_core::record::MemberState;
use jiffy_fleet_core::{Body, MESSAGE_FORMAT, MemberId, Message, RejectionReason, Term};
use std::time::Duration;
use tokio::time::{Instant, sleep};

fn is_dead(id: u32) -> impl Fn(&Members) -> bool {
    move |members| {
        let row = members.row(MemberId(id));
        row.is_some_and(|row| row.state == MemberState::Dead)
    }
}

#[tokio::test]
async fn members_register_with_one_coordinator_and_reconcile_before_they_are_ready() {
    let fleet = Fleet::start(3, true).await;
    *fleet.hosts[&MemberId(2)].failures.lock() = 2;
    for id in 1..=3 {
        fleet.wait(id, 40, |view| view.is_ready()).await;
    }
    // The failed reconciliations were repeated.
    // Two attempts failed, and the third one succeeded.
    assert_eq!(fleet.hosts[&MemberId(2)].reconciled.lock().len(), 3);
    let coordinators = (1..=3).filter(|&id| fleet.node(id).view().is_coordinator);
    assert_eq!(coordinators.count(), 1);
    sleep(Duration::from_secs(5)).await;
    for id in 1..=3 {
        let owner = fleet.node(id).authority().unwrap();
        assert_eq!(owner.member, MemberId(id));
        let status = fleet.node(id).status().await;
        assert_eq!(status.nodes.len(), 3);
        for node in &status.nodes {
            // Each host of the tests reports three running sandboxes.
            assert_eq!(node.summary.as_ref().unwrap().running, 3);
            // Heartbeats are sent each 2 s.
            assert!(node.heartbeat_age_ms.unwrap() <= 2_100, "{node:?}");
        }
    }
}

#[tokio::test]
async fn a_lost_coordinator_is_replaced_within_20_s() {
    let fleet = Fleet::ready(3).await;
    let former = fleet.coordinator();
    let term = fleet.node(former.0).view().shard.as_ref().unwrap().term;
    fleet.stop(former.0).await;
    let start = Instant::now();
    let remaining: Vec<u32> = (1..=3).filter(|&id| id != former.0).collect();
    for &id in &remaining {
        fleet
            .wait(id, 20, |view| {
                view.shard.as_ref().is_some_and(|record| record.term > term)
            })
            .await;
    }
    assert!(start.elapsed() <= Duration::from_secs(20));
    let coordinator = fleet.coordinator();
    assert_ne!(coordinator, former);
    for &id in &remaining {
        fleet.wait_members(id, 15, is_dead(former.0)).await;
        assert!(fleet.node(id).authority().is_some());
    }
    let verdicts = fleet.hosts[&coordinator].verdicts.lock().clone();
    assert_eq!(verdicts.len(), 1);
    assert_eq!(verdicts[0].member, former);
}

#[tokio::test]
async fn a_silent_member_is_dead_within_20_s_and_returns_with_a_new_epoch() {
    let mut fleet = Fleet::ready(3).await;
    let (coordinator, silent) = (fleet.coordinator(), fleet.others()[0]);
    let former = fleet.node(silent).authority().unwrap();
    fleet.network.cut.lock().insert(MemberId(silent));
    // The member has authority when it is cut off, so it already knows the end of the authority
    // (`deadline`): this wait ends at once.
    let waited = fleet.wait(silent, 15, |view| view.deadline.is_some()).await;
    assert!(waited < Duration::from_secs(1));
    let duration = fleet.wait_members(coordinator.0, 20, is_dead(silent)).await;
    // A member is dead after 12 s of silence. Its last heartbeat was sent up to 2 s before it was
    // cut off.
    assert!(duration >= Duration::from_secs(10), "{duration:?}");
    // The authority has ended before the verdict.
    assert_eq!(fleet.node(silent).authority(), None);
    assert!(fleet.node(coordinator.0).is_dead(former));
    assert_eq!(*fleet.hosts[&coordinator].verdicts.lock(), [former]);
    // The member returns, and compares its sandboxes with their heads.
    fleet.network.cut.lock().clear();
    fleet
        .wait(silent, 20, |view| {
            view.is_ready() && view.epoch > Some(former.epoch)
        })
        .await;
    let host = &fleet.hosts[&MemberId(silent)];
    assert_eq!(*host.ended.lock(), [former.epoch]);
    // Once after the start, and once after the return.
    assert_eq!(host.reconciled.lock().len(), 2);
    // A restarted daemon registers as well.
    fleet.stop(silent).await;
    fleet.start_node(silent);
    fleet.wait(silent, 30, |view| view.is_ready()).await;
}

#[tokio::test]
async fn without_records_no_verdict_is_made_and_authority_ends() {
    let fleet = Fleet::ready(3).await;
    let epochs: Vec<_> = (1..=3).map(|id| fleet.node(id).view().epoch).collect();
    fleet.records.inject(Fault::Unavailable, usize::MAX);
    sleep(Duration::from_secs(20)).await;
    for id in 1..=3 {
        assert_eq!(fleet.node(id).authority(), None, "h{id}");
    }
    // In addition, one member is silent.
    let silent = fleet.others()[0];
    fleet.network.cut.lock().insert(MemberId(silent));
    // Five minutes in total.
    sleep(Duration::from_secs(280)).await;
    for id in 1..=3 {
        let view = fleet.node(id).view();
        let record = view.shard.as_ref().unwrap();
        assert!(
            record
                .members
                .iter()
                .all(|row| row.state == MemberState::Up)
        );
        assert!(fleet.hosts[&MemberId(id)].verdicts.lock().is_empty());
    }
    fleet.network.cut.lock().clear();
    fleet.records.heal();
    for id in 1..=3 {
        let node = fleet.node(id);
        fleet
            .wait(id, 60, |view| view.is_ready() && node.authority().is_some())
            .await;
        // Only the silent member may have been declared dead, after the return of the records.
        if id != silent {
            assert_eq!(fleet.node(id).view().epoch, epochs[id as usize - 1]);
        }
    }
}

#[tokio::test]
async fn a_member_that_does_not_answer_delays_no_other_member() {
    let fleet = Fleet::ready(5).await;
    let silent = fleet.others()[0];
    fleet.network.cut.lock().insert(MemberId(silent));
    for _ in 0..40 {
        sleep(Duration::from_secs(1)).await;
        for id in (1..=5).filter(|&id| id != silent) {
            let node = fleet.node(id);
            let view = node.view();
            let deadline = view.deadline.unwrap().0;
            let now = START_MS + fleet.elapsed_ms();
            // Heartbeats are sent each 2 s and acknowledged at once. Each extends the authority to
            // 10 s, of which at least 8 s remain at the next heartbeat, with 1 s of tolerance.
            assert!(deadline >= now + 7_000, "h{id}: {deadline} at {now}");
        }
    }
    let status = fleet.node(fleet.coordinator().0).status().await;
    // Only the silent member does not answer.
    let without: Vec<_> = status
        .nodes
        .iter()
        .filter(|n| n.summary.is_none())
        .collect();
    assert_eq!(without.len(), 1);
    assert_eq!(without[0].row.id, MemberId(silent));
}

#[tokio::test]
async fn messages_of_another_fleet_and_of_unknown_members_are_rejected() {
    let fleet = Fleet::ready(2).await;
    let coordinator = fleet.node(fleet.coordinator().0);
    let heartbeat = |fleet: &str| {
        let json = format!(
            "{{\"format\":{MESSAGE_FORMAT},\"fleet\":\"{fleet}\",\"term\":1,\"epoch\":1,\
             \"body\":{{\"heartbeat\":{{\"instance\":{{\"boot\":\"{}\",\"started_ms\":1}},\
             \"seq\":1,\"status\":{{\"free_cpu_milli\":0,\"free_memory_mib\":0,\
             \"free_disk_mib\":0,\"is_store_reachable\":true,\"templates\":[]}},\
             \"shares\":[],\"rows\":0}}}}}}",
            "00".repeat(16)
        );
        Message::decode(json.as_bytes()).unwrap()
    };
    for (message, expected) in [
        (heartbeat("other"), Some(RejectionReason::ForeignFleet)),
        // An unknown member has no address, so it receives no answer.
        (heartbeat("7kq2"), None),
    ] {
        let replies = coordinator.deliver(MemberId(9), message).await.unwrap();
        let reasons = replies.iter().map(|reply| match &reply.body {
            Body::Rejected(rejection) => rejection.reason,
            body => panic!("{body:?}"),
        });
        assert_eq!(reasons.collect::<Vec<_>>(), Vec::from_iter(expected));
        assert!(
            replies
                .iter()
                .all(|reply| reply.fleet == fleet_id() && reply.term >= Term(2))
        );
    }
    let members = coordinator.members();
    assert_eq!(members.row(MemberId(9)), None);
}

/// An idle member must not use more than 0.5 % of a processor. The time is not simulated, and all
/// members run in the thread of the test.
#[tokio::test]
async fn an_idle_member_uses_at_most_half_a_percent_of_a_processor() {
    let fleet = Fleet::start(3, false).await;
    let cpu = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    // Wait for the takeover and the registrations, whose processor time is not counted.
    for id in 1..=3 {
        fleet.wait(id, 40, |view| view.is_ready()).await;
    }
    let (start, used) = (Instant::now(), cpu());
    sleep(Duration::from_secs(6)).await;
    let (elapsed, used) = (start.elapsed(), cpu() - used);
    let share = used.as_secs_f64() / elapsed.as_secs_f64() / 3.0;
    println!("{:.3} % of a processor per member", share * 100.0);
    assert!(share <= 0.005, "{:.3} %", share * 100.0);
}
