//! Members that are cut off from the fleet. A member accepts API keys only while it has contact:
//! its tables were verified in the last 60 s. The records, the writer (the member that commits
//! changes of the tables) or other members verify them. If no member can read the records, more
//! than half of the members must agree.

use super::lab::{Gate, Lab, create, is_revoked, reached, revoke};
use jiffy_fleet::records::Fault;
use jiffy_fleet::tables::Tables;
use jiffy_fleet::{MemoryRecords, SealedRecords};
use jiffy_fleet_core::MemberId;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Returns a lab with three members, and the connection of the third one to the common records. The
/// test can cut this connection.
async fn cut_off() -> (Lab, [Tables; 3], Arc<Gate>) {
    let memory = MemoryRecords::default();
    let lab = Lab::new(Arc::new(memory.clone())).await;
    let own = Arc::new(Gate::new(Arc::new(memory)));
    let sealed = SealedRecords::new(own.clone(), lab.tenant.clone());
    let tables = [
        lab.member(1),
        lab.member(2),
        lab.member_with(3, Arc::new(sealed)),
    ];
    (lab, tables, own)
}

#[tokio::test(start_paused = true)]
async fn a_revoked_key_is_rejected_by_a_member_that_is_cut_off_within_60_s() {
    let (lab, [one, two, three], own) = cut_off().await;
    let created = one.change(create("a")).await.unwrap();
    reached(&three, created.number).await;
    three.check_contact().unwrap();

    lab.cut(3);
    own.disconnect();
    let cut = Instant::now();
    let revoked = two.change(revoke("a")).await.unwrap();
    // The answer names the member that has not confirmed the revocation, after a timeout of 1 s.
    assert_eq!(revoked.unconfirmed, [MemberId(3)], "it is named");
    assert!(cut.elapsed() <= Duration::from_millis(1_500));
    assert!(is_revoked(&one, "a") && is_revoked(&two, "a"));
    assert!(!is_revoked(&three, "a"));
    while three.check_contact().is_ok() {
        sleep(Duration::from_secs(1)).await;
    }
    assert!(
        cut.elapsed() <= Duration::from_secs(61),
        "{:?}",
        cut.elapsed()
    );
    one.check_contact().unwrap();
    two.check_contact().unwrap();

    lab.heal();
    own.connect();
    let healed = Instant::now();
    while three.check_contact().is_err() {
        sleep(Duration::from_secs(1)).await;
    }
    // A read that has started before fails within 6 s, and the next one follows within 5 s.
    assert!(
        healed.elapsed() <= Duration::from_secs(15),
        "{:?}",
        healed.elapsed()
    );
    assert!(is_revoked(&three, "a"), "before any key is accepted");
}

#[tokio::test(start_paused = true)]
async fn a_member_without_records_stays_in_contact_through_the_writer() {
    let (_lab, [one, _two, three], own) = cut_off().await;
    let created = one.change(create("a")).await.unwrap();
    reached(&three, created.number).await;
    own.disconnect();
    sleep(Duration::from_secs(300)).await;
    three.check_contact().unwrap();
    one.change(revoke("a")).await.unwrap();
    assert!(is_revoked(&three, "a"));
}

#[tokio::test(start_paused = true)]
async fn keys_stay_valid_while_the_records_are_unavailable_to_all_members() {
    let memory = MemoryRecords::default();
    let lab = Lab::new(Arc::new(memory.clone())).await;
    let (one, two, three) = (lab.member(1), lab.member(2), lab.member(3));
    let created = one.change(create("a")).await.unwrap();
    reached(&three, created.number).await;
    memory.inject(Fault::Unavailable, usize::MAX);
    // The members verify their tables with one another.
    lab.no_writer();
    for _ in 0..300 {
        sleep(Duration::from_secs(1)).await;
        for tables in [&one, &two, &three] {
            tables.check_contact().unwrap();
        }
    }
    // A member that only reaches itself is not the majority.
    lab.cut(3);
    sleep(Duration::from_secs(75)).await;
    assert!(three.check_contact().is_err());
    one.check_contact().unwrap();
}
