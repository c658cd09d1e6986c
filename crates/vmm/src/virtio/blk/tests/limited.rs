//! Disks that are no faster than they are allowed to be.

use super::*;
use crate::virtio::device::chain::Again;
use jiffy_proto::vm::DiskLimits;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

/// Sectors of one request.
const SECTORS: u32 = 8;
/// Longest time that is waited for a timer.
const LIMIT_MS: u16 = 10_000;

fn limiter(requests_per_s: u64) -> SharedLimiter {
    SharedLimiter::new(DiskLimits {
        bytes_per_s: None,
        requests_per_s: NonZeroU64::new(requests_per_s),
    })
    .unwrap()
}

fn limited(limiter: &SharedLimiter, disk: u32) -> Driver {
    let backend = Backend::ReadOnly(file(&pattern(1 << 16)));
    let block = Block::new(format!("blk{disk}"), backend).unwrap();
    Driver::with(block.limited(limiter.clone(), disk).unwrap())
}

/// Makes `count` reads available.
fn ask(driver: &mut Driver, count: usize) {
    driver.header(IN, 0);
    for _ in 0..count {
        driver.ring.add(&[
            readable(HEADER, 16),
            writable(DATA, SECTORS * 512),
            writable(STATUS, 1),
        ]);
    }
}

#[test]
fn requests_over_the_limit_stay_in_the_queue_until_the_timer_rings() {
    let mut driver = limited(&limiter(20), 0);
    ask(&mut driver, 40);
    let began = Instant::now();
    driver.block.queue_event(0).unwrap();
    let at_once = driver.ring.used().len();
    // A second's worth, and what came in while they were served.
    assert!((20..40).contains(&at_once), "{at_once}");
    assert_eq!(usize::from(driver.block.rings()[0].next_available), at_once);
    let mut served = at_once;
    while served < 40 {
        let ready = driver.around.ready(LIMIT_MS);
        assert_eq!(ready.len(), 1, "{ready:?}");
        assert_ne!(ready[0].token, Again::TOKEN);
        let (token, flags) = (ready[0].token, ready[0].flags);
        driver.block.host_event(token, flags).unwrap();
        served += driver.ring.used().len();
    }
    // Twenty more than were saved up take a second, less the one that is ahead.
    assert!(began.elapsed() >= Duration::from_millis(900));
    // The guest is asked to kick again.
    assert_eq!(driver.ring.avail_event(), 40);
    assert!(driver.around.ready(0).is_empty());
}

#[test]
fn kicks_do_not_get_a_guest_more_than_its_share() {
    let mut driver = limited(&limiter(20), 0);
    ask(&mut driver, 40);
    let began = Instant::now();
    for _ in 0..1000 {
        driver.block.queue_event(0).unwrap();
    }
    let most = 21 + usize::try_from(began.elapsed().as_millis() / 50).unwrap();
    let served = driver.ring.used().len();
    assert!((20..=most.max(21)).contains(&served), "{served}");
}

#[test]
fn what_waits_when_a_snapshot_is_taken_is_served_where_it_is_restored() {
    let mut driver = limited(&limiter(1), 0);
    ask(&mut driver, 5);
    driver.block.queue_event(0).unwrap();
    let before = driver.ring.used().len();
    assert!(before < 5);
    let ring = driver.block.rings()[0];

    // Another machine over the same memory, on a host without limits.
    let backend = Backend::ReadOnly(file(&pattern(1 << 16)));
    let mut restored = Block::new("blk0", backend).unwrap();
    let mut queue = driver.ring.queue(true);
    ring.apply(&mut queue);
    let features = restored.features();
    let around = Surroundings::new(driver.around.memory.clone());
    restored
        .activate(around.activation(vec![queue], features))
        .unwrap();
    restored.queue_event(0).unwrap();
    assert_eq!(driver.ring.used().len(), 5 - before);
}

#[test]
fn all_disks_of_a_guest_share_what_it_may_take() {
    let limiter = limiter(20);
    let (mut first, mut second) = (limited(&limiter, 0), limited(&limiter, 1));
    ask(&mut first, 40);
    ask(&mut second, 40);
    let began = Instant::now();
    first.block.queue_event(0).unwrap();
    second.block.queue_event(0).unwrap();
    let most = 21 + usize::try_from(began.elapsed().as_millis() / 50).unwrap();
    let served = first.ring.used().len() + second.ring.used().len();
    assert!((20..=most).contains(&served), "{served}");
}

#[test]
fn each_piece_that_is_discarded_counts() {
    let base = file(&pattern(1 << 16));
    let overlay = file(b"");
    let block = Block::new("blk0", Backend::Overlay { base, overlay }).unwrap();
    let mut driver = Driver::with(block.limited(limiter(20), 0).unwrap());
    let waits = |driver: &Driver| driver.block.throttle.as_ref().unwrap().hold();
    assert_eq!(driver.zero(DISCARD, &[(0, 8, 0); 16]), OK);
    assert_eq!(waits(&driver), None);
    assert_eq!(driver.zero(DISCARD, &[(0, 8, 0); 16]), OK);
    // 12 more than there were.
    let wait = waits(&driver).unwrap();
    assert!(wait <= Duration::from_millis(600), "{wait:?}");
}

#[test]
fn a_disk_that_is_reset_forgets_what_it_waited_for() {
    let mut driver = limited(&limiter(10), 0);
    ask(&mut driver, 30);
    driver.block.queue_event(0).unwrap();
    assert!(driver.ring.used().len() < 30);
    driver.block.reset();
    // The timer was set for some 100 ms; nobody listens to it any more.
    assert!(driver.around.ready(300).is_empty());
    assert!(driver.ring.used().is_empty());
}
