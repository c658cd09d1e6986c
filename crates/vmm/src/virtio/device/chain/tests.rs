//! Tests of descriptor chains, with valid rings and with malformed rings.

use super::*;
use crate::virtio::testing::{
    CountingInterrupt, INDIRECT, NEXT, Ring, WRITE, memory, memory_with, readable, writable,
};
use vm_memory::{Bytes, GuestAddress};

/// Number of descriptors of the rings.
const SIZE: u16 = 8;

/// Returns an empty ring in guest memory: its driver side and its device side.
fn ring(memory: &GuestMemory) -> (Ring, Queue) {
    let ring = Ring::new(memory, 0x1000, SIZE);
    let queue = ring.queue(true);
    (ring, queue)
}

/// Returns the error for a ring that `build` has made malformed.
fn rejection(build: impl FnOnce(&mut Ring)) -> String {
    let memory = memory(0x10000);
    let (mut ring, mut queue) = ring(&memory);
    build(&mut ring);
    match next_chain(&mut queue, &memory) {
        Err(DeviceError::Guest(why)) => why,
        other => panic!("not rejected: {other:?}"),
    }
}

#[test]
fn a_chain_is_complete_and_in_order() {
    let memory = memory(0x10000);
    let (mut ring, mut queue) = ring(&memory);
    ring.add(&[
        readable(0x4000, 16),
        readable(0x5000, 3),
        writable(0x6000, 5),
    ]);
    let chain = next_chain(&mut queue, &memory).unwrap().unwrap();
    assert_eq!(
        (chain.head, chain.readable.len(), chain.writable.len()),
        (0, 19, 5)
    );
    assert!(next_chain(&mut queue, &memory).unwrap().is_none());
}

#[test]
fn an_indirect_chain_is_the_same_as_a_direct_one() {
    let memory = memory(0x10000);
    let (mut ring, mut queue) = ring(&memory);
    ring.add_indirect(0x8000, &[readable(0x4000, 16), writable(0x6000, 5)]);
    let chain = next_chain(&mut queue, &memory).unwrap().unwrap();
    assert_eq!((chain.readable.len(), chain.writable.len()), (16, 5));
}

#[test]
fn a_buffer_may_cross_from_one_region_into_the_next() {
    let memory = memory_with(&[(0, 0x8000), (0x8000, 0x8000)]);
    let (mut ring, mut queue) = ring(&memory);
    ring.add(&[readable(0x7ff0, 0x20)]);
    let chain = next_chain(&mut queue, &memory).unwrap().unwrap();
    assert_eq!(chain.readable.len(), 0x20);
    assert_eq!(chain.readable.slices().len(), 2);
}

#[test]
fn a_looped_chain_is_rejected() {
    let why = rejection(|ring| {
        ring.set_descriptor(0, 0x4000, 8, NEXT, 1);
        ring.set_descriptor(1, 0x4000, 8, NEXT, 0);
        ring.publish(0);
    });
    assert!(why.contains("without an end"), "{why}");
}

#[test]
fn a_chain_that_leaves_the_table_is_rejected() {
    rejection(|ring| {
        ring.set_descriptor(0, 0x4000, 8, NEXT, SIZE);
        ring.publish(0);
    });
    rejection(|ring| ring.publish(SIZE));
    rejection(|ring| ring.publish(u16::MAX));
}

#[test]
fn a_buffer_outside_memory_is_rejected() {
    for (addr, len) in [
        (0x10000, 1),
        (0xfff0, 0x11),
        (u64::MAX, 1),
        (u64::MAX - 7, 0x10),
        (0x4000, u32::MAX),
    ] {
        rejection(|ring| {
            ring.add(&[readable(addr, len)]);
        });
    }
}

#[test]
fn readable_after_writable_is_rejected() {
    rejection(|ring| {
        ring.add(&[writable(0x4000, 8), readable(0x5000, 8)]);
    });
}

#[test]
fn an_indirect_table_longer_than_the_queue_is_rejected() {
    let why = rejection(|ring| {
        let many = vec![readable(0x4000, 1); usize::from(SIZE) + 1];
        ring.add_indirect(0x8000, &many);
    });
    assert!(why.contains("longer"), "{why}");
}

#[test]
fn hostile_indirect_tables_are_rejected() {
    // The tables are nested, of odd length, empty, outside memory, and after a valid descriptor.
    rejection(|ring| {
        ring.set_descriptor_at(0x8000, 0x9000, 16, INDIRECT, 0);
        ring.set_descriptor(0, 0x8000, 16, INDIRECT, 0);
        ring.publish(0);
    });
    for (addr, len) in [(0x8000, 15), (0x8000, 0), (0x10000, 16), (0x8000, u32::MAX)] {
        rejection(|ring| {
            ring.set_descriptor(0, addr, len, INDIRECT, 0);
            ring.publish(0);
        });
    }
    rejection(|ring| {
        ring.set_descriptor(0, 0x4000, 8, NEXT, 1);
        ring.set_descriptor(1, 0x8000, 15, INDIRECT | WRITE, 0);
        ring.publish(0);
    });
}

#[test]
fn an_available_index_that_jumps_is_rejected() {
    rejection(|ring| ring.set_avail_idx(SIZE + 1));
    rejection(|ring| ring.set_avail_idx(u16::MAX));
}

#[test]
fn buffers_are_taken_and_copied_across_pieces() {
    let memory = memory(0x10000);
    let (mut ring, mut queue) = ring(&memory);
    memory.write_slice(b"abcdef", GuestAddress(0x4000)).unwrap();
    memory.write_slice(b"ghi", GuestAddress(0x5000)).unwrap();
    ring.add(&[
        readable(0x4000, 6),
        readable(0x6000, 0),
        readable(0x5000, 3),
    ]);
    let mut rest = next_chain(&mut queue, &memory).unwrap().unwrap().readable;
    assert!(rest.take(10).is_none());
    let front = rest.take(4).unwrap();
    let mut text = [0; 16];
    assert_eq!(front.copy_to(&mut text), 4);
    assert_eq!(&text[..4], b"abcd");
    assert_eq!(rest.copy_to(&mut text), 5);
    assert_eq!(&text[..5], b"efghi");
    assert_eq!(rest.copy_to(&mut text[..3]), 3);
    assert_eq!(rest.take(5).unwrap().len(), 5);
    assert!(rest.is_empty());
    assert_eq!(rest.take(0).unwrap().len(), 0);
}

#[test]
fn draining_interrupts_once_and_enables_the_next_kick() {
    let memory = memory(0x10000);
    let (mut ring, mut queue) = ring(&memory);
    let interrupt = CountingInterrupt::default();
    for _ in 0..3 {
        ring.add(&[writable(0x4000, 8)]);
    }
    let has_more = drain(&mut queue, &memory, &interrupt, usize::MAX, |_| Ok(8)).unwrap();
    assert!(!has_more);
    assert_eq!(ring.used(), [(0, 8), (1, 8), (2, 8)]);
    assert_eq!(interrupt.queue_count(), 1);
    assert_eq!(ring.avail_event(), 3);
}

#[test]
fn work_beyond_the_budget_is_deferred() {
    let memory = memory(0x10000);
    let (mut ring, mut queue) = ring(&memory);
    let interrupt = CountingInterrupt::default();
    for _ in 0..3 {
        ring.add(&[writable(0x4000, 8)]);
    }
    assert!(drain(&mut queue, &memory, &interrupt, 9, |_| Ok(8)).unwrap());
    assert_eq!(ring.used().len(), 2);
    assert!(!drain(&mut queue, &memory, &interrupt, 9, |_| Ok(8)).unwrap());
    assert_eq!(ring.used().len(), 1);
}

#[test]
fn a_driver_that_refills_its_queue_does_not_block_the_device() {
    let memory = memory(0x10000);
    let (mut ring, mut queue) = ring(&memory);
    let interrupt = CountingInterrupt::default();
    ring.add(&[writable(0x4000, 8)]);
    let mut served = 0;
    let has_more = drain(&mut queue, &memory, &interrupt, usize::MAX, |_| {
        served += 1;
        ring.add(&[writable(0x4000, 8)]);
        Ok(8)
    });
    assert!(has_more.unwrap());
    assert_eq!(served, SIZE);
}

#[test]
fn chains_served_before_a_broken_one_are_reported() {
    let memory = memory(0x10000);
    let (mut ring, mut queue) = ring(&memory);
    let interrupt = CountingInterrupt::default();
    ring.add(&[writable(0x4000, 8)]);
    ring.add(&[writable(0x10000, 8)]);
    let outcome = drain(&mut queue, &memory, &interrupt, usize::MAX, |_| Ok(8));
    assert!(matches!(outcome, Err(DeviceError::Guest(_))));
    assert_eq!(ring.used().len(), 1);
    assert_eq!(interrupt.queue_count(), 1);
}

#[test]
fn a_used_ring_over_the_available_index_does_not_block_the_device() {
    let memory = memory(0x10000);
    let interrupt = CountingInterrupt::default();
    let (ring, _) = ring(&memory);
    let mut queue = ring.queue(false);
    // Without event-idx, kicks are enabled by zeroing the used ring's flags, here at 0x2004. The
    // available index is at the same address, and then differs from `next_avail`.
    queue.set_avail_ring_address(Some(0x2002), None);
    queue.set_used_ring_address(Some(0x2004), None);
    queue.set_next_avail(1);
    let outcome = drain(&mut queue, &memory, &interrupt, usize::MAX, |_| Ok(0));
    assert!(matches!(outcome, Err(DeviceError::Guest(_))), "{outcome:?}");
}
