//! Rate limits of disks.
//!
//! The limiter is a token bucket: each request takes a token, and tokens are added at the permitted
//! rate. A *kick* is the driver's notification of the device about new requests.

use super::*;
use crate::virtio::device::chain::DeferredKick;
use jiffy_proto::vm::DiskLimits;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

/// Sectors per request.
const REQUEST_SECTORS: u32 = 8;
/// Maximum wait for a timer, in milliseconds.
const TIMER_LIMIT_MS: u16 = 10_000;

fn limiter(requests_per_s: u64) -> SharedDiskLimiter {
    SharedDiskLimiter::new(DiskLimits {
        bytes_per_s: None,
        requests_per_s: NonZeroU64::new(requests_per_s),
    })
    .unwrap()
}

/// Returns a driver of the disk number `disk` of a guest with this limiter.
fn limited(limiter: &SharedDiskLimiter, disk: u32) -> BlockDriver {
    let backend = DiskBackend::ReadOnly(file(&pattern(1 << 16)));
    let block = Block::new(format!("blk{disk}"), backend).unwrap();
    BlockDriver::with(block.limited(limiter.clone(), disk).unwrap())
}

/// Makes `count` reads available.
fn queue_reads(driver: &mut BlockDriver, count: usize) {
    driver.header(REQUEST_IN, 0);
    for _ in 0..count {
        driver.ring.add(&[
            readable(HEADER_ADDRESS, 16),
            writable(DATA_ADDRESS, REQUEST_SECTORS * 512),
            writable(STATUS_ADDRESS, 1),
        ]);
    }
}

#[test]
fn requests_over_the_limit_stay_in_the_queue_until_the_timer_fires() {
    let mut driver = limited(&limiter(20), 0);
    queue_reads(&mut driver, 40);
    let began = Instant::now();
    driver.block.queue_event(0).unwrap();
    let at_once = driver.ring.used().len();
    // A full bucket has tokens for one second, which are 20 requests. Tokens added while these were
    // served permit some more.
    assert!((20..40).contains(&at_once), "{at_once}");
    assert_eq!(usize::from(driver.block.rings()[0].next_available), at_once);
    let mut served = at_once;
    while served < 40 {
        let ready = driver.harness.ready(TIMER_LIMIT_MS);
        assert_eq!(ready.len(), 1, "{ready:?}");
        assert_ne!(ready[0].token, DeferredKick::TOKEN);
        let (token, flags) = (ready[0].token, ready[0].flags);
        driver.block.host_event(token, flags).unwrap();
        served += driver.ring.used().len();
    }
    // The 20 requests above the full bucket take one second, but one of them may start before its
    // token is added.
    assert!(began.elapsed() >= Duration::from_millis(900));
    // The device requests further kicks.
    assert_eq!(driver.ring.avail_event(), 40);
    assert!(driver.harness.ready(0).is_empty());
}

#[test]
fn kicks_do_not_exceed_the_rate_limit() {
    let mut driver = limited(&limiter(20), 0);
    queue_reads(&mut driver, 40);
    let began = Instant::now();
    for _ in 0..1000 {
        driver.block.queue_event(0).unwrap();
    }
    // A full bucket, one request that starts before its token is added, and one token per 50 ms.
    let max_served = 21 + usize::try_from(began.elapsed().as_millis() / 50).unwrap();
    let served = driver.ring.used().len();
    assert!((20..=max_served).contains(&served), "{served}");
}

#[test]
fn requests_that_wait_during_a_snapshot_are_served_after_the_restore() {
    let mut driver = limited(&limiter(1), 0);
    queue_reads(&mut driver, 5);
    driver.block.queue_event(0).unwrap();
    let before = driver.ring.used().len();
    assert!(before < 5);
    let ring = driver.block.rings()[0];

    // Another machine with the same memory, on a host without limits.
    let backend = DiskBackend::ReadOnly(file(&pattern(1 << 16)));
    let mut restored = Block::new("blk0", backend).unwrap();
    let mut queue = driver.ring.queue(true);
    ring.apply(&mut queue);
    let features = restored.features();
    let harness = DeviceHarness::new(driver.harness.memory.clone());
    restored
        .activate(harness.activation(vec![queue], features))
        .unwrap();
    restored.queue_event(0).unwrap();
    assert_eq!(driver.ring.used().len(), 5 - before);
}

#[test]
fn all_disks_of_a_guest_share_its_limit() {
    let limiter = limiter(20);
    let (mut first, mut second) = (limited(&limiter, 0), limited(&limiter, 1));
    queue_reads(&mut first, 40);
    queue_reads(&mut second, 40);
    let began = Instant::now();
    first.block.queue_event(0).unwrap();
    second.block.queue_event(0).unwrap();
    // The full bucket, one request that starts before its token is added, and one token per 50 ms.
    let max_served = 21 + usize::try_from(began.elapsed().as_millis() / 50).unwrap();
    let served = first.ring.used().len() + second.ring.used().len();
    assert!((20..=max_served).contains(&served), "{served}");
}

#[test]
fn each_discarded_segment_counts() {
    let base = file(&pattern(1 << 16));
    let overlay = file(b"");
    let block = Block::new("blk0", DiskBackend::Overlay { base, overlay }).unwrap();
    let mut driver = BlockDriver::with(block.limited(limiter(20), 0).unwrap());
    let pending_wait =
        |driver: &BlockDriver| driver.block.throttle.as_ref().unwrap().wait_for_tokens();
    assert_eq!(driver.zero(REQUEST_DISCARD, &[(0, 8, 0); 16]), STATUS_OK);
    assert_eq!(pending_wait(&driver), None);
    assert_eq!(driver.zero(REQUEST_DISCARD, &[(0, 8, 0); 16]), STATUS_OK);
    // The 32 segments exceed the 20 tokens of the bucket by 12, which take 600 ms.
    let wait = pending_wait(&driver).unwrap();
    assert!(wait <= Duration::from_millis(600), "{wait:?}");
}

#[test]
fn a_reset_disk_drops_its_timer() {
    let mut driver = limited(&limiter(10), 0);
    queue_reads(&mut driver, 30);
    driver.block.queue_event(0).unwrap();
    assert!(driver.ring.used().len() < 30);
    driver.block.reset();
    // The timer was set to about 100 ms. It is no longer in the event loop.
    assert!(driver.harness.ready(300).is_empty());
    assert!(driver.ring.used().is_empty());
}
