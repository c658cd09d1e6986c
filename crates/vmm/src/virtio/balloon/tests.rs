//! Tests of the balloon device: which pages it releases to the host. The guest *inflates* the
//! balloon by sending the numbers of pages that it gives up, and *deflates* it by taking pages
//! back. It also *reports* free memory, without giving it up.

use super::*;
use crate::virtio::testing::{DeviceHarness, Ring, memory_with, readable, writable};
use vm_memory::Bytes;

const REGION_BYTES: usize = 1 << 20;
/// Address of the page numbers of a request.
const PFNS_ADDRESS: u64 = 0x9000;

/// Returns an active balloon with its rings.
fn start() -> (Balloon, Vec<Ring>, DeviceHarness) {
    let harness = DeviceHarness::new(memory_with(&[(0, REGION_BYTES), (0x10_0000, REGION_BYTES)]));
    let rings: Vec<_> = (0..3)
        .map(|i| Ring::new(&harness.memory, 0x1000 + 0x2000 * i, 128))
        .collect();
    let mut balloon = Balloon::new().unwrap();
    let queues = rings.iter().map(|ring| ring.queue(true)).collect();
    balloon
        .activate(harness.activation(queues, balloon.features()))
        .unwrap();
    (balloon, rings, harness)
}

/// Writes to all bytes of these pages.
fn fill(harness: &DeviceHarness, pages: Range<u64>) {
    for page in pages {
        harness
            .memory
            .write_slice(&[0xaa; 4096], GuestAddress(page << 12))
            .unwrap();
    }
}

/// Returns a byte of guest memory.
fn byte(harness: &DeviceHarness, addr: u64) -> u8 {
    harness.memory.read_obj(GuestAddress(addr)).unwrap()
}

/// Writes page numbers to address `at`. Returns their size in bytes.
fn write_pfns(harness: &DeviceHarness, at: u64, pfns: &[u32]) -> u32 {
    let bytes: Vec<u8> = pfns.iter().flat_map(|p| p.to_le_bytes()).collect();
    harness
        .memory
        .write_slice(&bytes, GuestAddress(at))
        .unwrap();
    u32::try_from(bytes.len()).unwrap()
}

#[test]
fn inflated_pages_are_dropped_and_their_neighbours_are_not() {
    let (mut balloon, mut rings, harness) = start();
    fill(&harness, 0x80..0x88);
    let len = write_pfns(&harness, PFNS_ADDRESS, &[0x85, 0x81, 0x83, 0x82, 0x82]);
    rings[INFLATE_QUEUE].add(&[readable(PFNS_ADDRESS, len)]);
    balloon.queue_event(INFLATE_QUEUE).unwrap();
    assert_eq!(rings[INFLATE_QUEUE].used(), [(0, 0)]);
    let remaining: Vec<_> = (0x80..0x88)
        .filter(|p| byte(&harness, p << 12) != 0)
        .collect();
    assert_eq!(remaining, [0x80, 0x84, 0x86, 0x87]);
    assert_eq!(harness.interrupt.queue_count(), 1);
}

#[test]
fn contiguous_pages_in_any_order_are_one_run() {
    let (_balloon, mut rings, harness) = start();
    let len = write_pfns(&harness, PFNS_ADDRESS, &[9, 7, 8, 3, 8, u32::MAX]);
    // The second number is in both buffers.
    rings[INFLATE_QUEUE].add(&[
        readable(PFNS_ADDRESS, 6),
        readable(PFNS_ADDRESS + 6, len - 6),
    ]);
    let mut queue = rings[INFLATE_QUEUE].queue(true);
    let chain = crate::virtio::device::chain::next_chain(&mut queue, &harness.memory);
    let max = u64::from(u32::MAX);
    assert_eq!(
        page_runs(&chain.unwrap().unwrap().readable).unwrap(),
        [3..4, 7..10, max..max + 1]
    );
}

#[test]
fn a_run_may_cross_regions() {
    let (mut balloon, mut rings, harness) = start();
    fill(&harness, 0xfe..0x102);
    let len = write_pfns(&harness, PFNS_ADDRESS, &[0xff, 0x100]);
    rings[INFLATE_QUEUE].add(&[readable(PFNS_ADDRESS, len)]);
    balloon.queue_event(INFLATE_QUEUE).unwrap();
    let remaining: Vec<_> = (0xfe..0x102)
        .filter(|p| byte(&harness, p << 12) != 0)
        .collect();
    assert_eq!(remaining, [0xfe, 0x101]);
}

#[test]
fn a_page_outside_memory_is_rejected() {
    // The memory has 0x200 pages.
    for pfn in [0x200, u32::MAX] {
        let (mut balloon, mut rings, harness) = start();
        let len = write_pfns(&harness, PFNS_ADDRESS, &[0x80, pfn]);
        rings[INFLATE_QUEUE].add(&[readable(PFNS_ADDRESS, len)]);
        let outcome = balloon.queue_event(INFLATE_QUEUE);
        assert!(matches!(outcome, Err(DeviceError::Guest(_))), "{outcome:?}");
        // A further call after the error must not panic.
        let _ = balloon.queue_event(INFLATE_QUEUE);
    }
}

#[test]
fn malformed_requests_are_rejected() {
    let cases = [
        (INFLATE_QUEUE, readable(PFNS_ADDRESS, 0)),
        (INFLATE_QUEUE, readable(PFNS_ADDRESS, 3)),
        // More than `MAX_PFNS` page numbers.
        (INFLATE_QUEUE, readable(0x10000, 0x4004)),
        (INFLATE_QUEUE, writable(PFNS_ADDRESS, 4)),
        (DEFLATE_QUEUE, writable(PFNS_ADDRESS, 4)),
        (REPORTING_QUEUE, readable(PFNS_ADDRESS, 0x1000)),
        (REPORTING_QUEUE, writable(0x20_0000, 0x1000)),
        (REPORTING_QUEUE, writable(0, u32::MAX)),
    ];
    for (index, buffer) in cases {
        let (mut balloon, mut rings, _harness) = start();
        rings[index].add(&[buffer]);
        let outcome = balloon.queue_event(index);
        assert!(matches!(outcome, Err(DeviceError::Guest(_))), "{outcome:?}");
    }
}

#[test]
fn only_whole_pages_of_reported_memory_are_dropped() {
    let (mut balloon, mut rings, harness) = start();
    fill(&harness, 0x80..0x88);
    rings[REPORTING_QUEUE].add(&[writable(0x80800, 0x2800), writable(0x85000, 0x1000)]);
    balloon.queue_event(REPORTING_QUEUE).unwrap();
    let remaining: Vec<_> = (0x80..0x88)
        .filter(|p| byte(&harness, p << 12) != 0)
        .collect();
    assert_eq!(remaining, [0x80, 0x83, 0x84, 0x86, 0x87]);
    rings[REPORTING_QUEUE].add(&[writable(0x86100, 0x100)]);
    balloon.queue_event(REPORTING_QUEUE).unwrap();
    assert_ne!(byte(&harness, 0x86100), 0);
}

#[test]
fn deflating_is_acknowledged() {
    let (mut balloon, mut rings, harness) = start();
    let len = write_pfns(&harness, PFNS_ADDRESS, &[0x80]);
    rings[DEFLATE_QUEUE].add(&[readable(PFNS_ADDRESS, len)]);
    balloon.queue_event(DEFLATE_QUEUE).unwrap();
    assert_eq!(rings[DEFLATE_QUEUE].used(), [(0, 0)]);
}

#[test]
fn a_new_target_interrupts_once_and_can_be_read() {
    let (mut balloon, _rings, harness) = start();
    balloon.set_target(3);
    balloon.set_target(3);
    assert_eq!(harness.interrupt.config_count(), 1);
    let mut pages = [0; 4];
    balloon.read_config(0, &mut pages);
    // 3 MiB are 768 pages of 4 KiB.
    assert_eq!(u32::from_le_bytes(pages), 768);
    balloon.set_target(u32::MAX);
    balloon.read_config(0, &mut pages);
    assert_eq!(u32::from_le_bytes(pages), u32::MAX);
}

#[test]
fn the_guest_sets_the_actual_size_and_nothing_else() {
    let (mut balloon, _rings, _harness) = start();
    // The field `actual`, in pages.
    balloon.write_config(4, &(5 * 256u32).to_le_bytes());
    // A MiB has 256 pages.
    assert_eq!(balloon.actual_mib(), 5);
    for offset in [0, 3, 8, u64::MAX] {
        balloon.write_config(offset, &[0xff; 4]);
        let mut target = [9; 4];
        balloon.read_config(0, &mut target);
        assert_eq!(target, [0; 4]);
    }
    let mut beyond = [7; 4];
    balloon.read_config(u64::MAX, &mut beyond);
    assert_eq!(beyond, [7; 4]);
}

#[test]
fn a_reset_balloon_works_again_even_without_all_queues() {
    let (mut balloon, _rings, harness) = start();
    balloon.reset();
    for index in 0..5 {
        balloon.queue_event(index).unwrap();
    }
    let mut ring = Ring::new(&harness.memory, 0x1000, 8);
    let mut absent = ring.queue(true);
    virtio_queue::QueueT::set_ready(&mut absent, false);
    balloon
        .activate(harness.activation(vec![ring.queue(true), absent], 0))
        .unwrap();
    let len = write_pfns(&harness, PFNS_ADDRESS, &[0x80]);
    ring.add(&[readable(PFNS_ADDRESS, len)]);
    for index in 0..5 {
        balloon.queue_event(index).unwrap();
    }
    assert_eq!(ring.used(), [(0, 0)]);
}
