//! Hostile guests, which must only harm themselves. The header of a packet has 44 bytes.
//!
//! The numbers of a `GuestSocket` are its port, the host's port and the size of the guest's receive
//! buffer in bytes. `shutdown(2)` announces that the guest sends no more data, and `shutdown(3)`
//! closes both directions.

use super::super::credit::BUF_ALLOC_BYTES;
use super::super::header::{HEADER_BYTES, VsockHeader, VsockOp};
use super::super::{Vsock, VsockConfig};
use super::guest::{MEMORY_BYTES, RX_QUEUE, TX_AREA, TX_QUEUE};
use super::{GUEST_CID, GuestSocket, Pattern, VsockGuest};
use crate::virtio::testing::{
    DeviceHarness, INDIRECT, NEXT, Ring, WRITE, memory, readable, writable,
};
use crate::virtio::{DeviceError, VirtioDevice};
use std::io::Read;
use vm_memory::{Bytes, GuestAddress};

/// Notifies the device of a queue, and checks that the device fails and closes all connections.
fn assert_device_fails(guest: &mut VsockGuest, ring: usize) {
    let outcome = guest.device.queue_event(ring);
    assert!(matches!(outcome, Err(DeviceError::Guest(_))), "{outcome:?}");
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_guest_that_sends_more_than_its_credit_is_reset() {
    let mut guest = VsockGuest::ready();
    let (mut link, mut stream) = guest.connected_by_guest(50, 4096);
    let limit = usize::try_from(BUF_ALLOC_BYTES).unwrap();
    let header = link.data(limit + 1);
    guest.send(header, &vec![0; limit + 1]);
    assert_eq!(guest.op(), VsockOp::Rst as u16);
    assert_eq!(guest.device.connections(), 0);
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn a_packet_shorter_than_its_stated_length_is_reset() {
    let mut guest = VsockGuest::ready();
    for len in [11, 1 << 20, u32::MAX] {
        let (mut link, mut stream) = guest.connected_by_guest(50, 4096);
        let header = VsockHeader {
            len,
            ..link.data(10)
        };
        guest.send(header, b"0123456789");
        assert_eq!(guest.op(), VsockOp::Rst as u16);
        assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    }
}

#[test]
fn bytes_beyond_the_stated_length_are_ignored() {
    let mut guest = VsockGuest::ready();
    let (mut link, mut stream) = guest.connected_by_guest(50, 4096);
    let header = link.data(3);
    guest.send(header, b"abcdef");
    let header = link.data(0);
    guest.send(header, b"ghi");
    guest.send(link.shutdown(3), &[]);
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    assert_eq!(got, b"abc");
}

#[test]
fn a_flood_of_connection_requests_pauses_the_transmit_queue() {
    let mut guest = VsockGuest::ready();
    let (mut link, mut stream) = guest.connected_by_guest(50, 4096);
    // The host has no port 9, so each request is answered with a reset.
    let request = GuestSocket::new(51, 9, 4096).header(VsockOp::Request);
    let mut answered = 0;
    loop {
        guest.send(request, &[]);
        if guest.received.pop_front().is_none() {
            break;
        }
        answered += 1;
        assert!(answered < 5000, "the device never pauses the queue");
    }
    // The device pauses the queue at about 1024 requests (`connect_limit`).
    assert!(answered >= 1000, "{answered}");
    // Later packets wait, and none is lost.
    let header = link.data(3);
    guest.send(header, b"abc");
    assert_eq!(guest.op(), VsockOp::Rst as u16);
    guest.assert_idle();
    let mut got = [0; 3];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"abc");
}

#[test]
fn short_connections_of_the_host_do_not_count_as_a_flood() {
    let mut guest = VsockGuest::ready();
    for _ in 0..1500 {
        let (link, _stream) = guest.connected_by_host(22, 4096);
        guest.send(link.shutdown(3), &[]);
        assert_eq!(guest.op(), VsockOp::Rst as u16);
        // Simulates a guest that closed at the same time.
        guest.send(link.header(VsockOp::Rst), &[]);
    }
    let request = GuestSocket::new(51, 9, 4096).header(VsockOp::Request);
    guest.send(request, &[]);
    let at_once = guest.received.pop_front().unwrap();
    assert_eq!(at_once.0.op, VsockOp::Rst as u16);
}

#[test]
fn packets_with_other_context_ids_are_ignored() {
    let mut guest = VsockGuest::ready();
    let (link, _stream) = guest.connected_by_guest(50, 4096);
    let header = link.header(VsockOp::Rst);
    // Only packets from guest 3 to host 2 are valid.
    for (src_cid, dst_cid) in [
        (4, 2),
        (2, 2),
        (3, 3),
        (3, 1),
        (3 | 1 << 32, 2),
        (3, 2 | 1 << 32),
    ] {
        let header = VsockHeader {
            src_cid,
            dst_cid,
            ..header
        };
        guest.send(header, &[]);
        guest.send(
            VsockHeader {
                op: VsockOp::Request as u16,
                src_port: 51,
                ..header
            },
            &[],
        );
    }
    guest.assert_idle();
    assert_eq!(guest.device.connections(), 1);
}

#[test]
fn socket_types_other_than_streams_are_rejected() {
    let mut guest = VsockGuest::ready();
    // Socket type, operation, and whether the device answers. It never answers a reset (3).
    for (kind, op, answer) in [(2, 1, true), (0, 5, true), (77, 77, true), (2, 3, false)] {
        let header = VsockHeader {
            kind,
            op,
            ..GuestSocket::new(50, 1024, 4096).header(VsockOp::Request)
        };
        guest.send(header, &[]);
        if answer {
            let reset = guest.next().0;
            assert_eq!((reset.op, reset.kind), (VsockOp::Rst as u16, kind));
        }
        guest.assert_idle();
    }
}

#[test]
fn unknown_operations_are_ignored_or_reset() {
    let mut guest = VsockGuest::ready();
    let (link, _stream) = guest.connected_by_guest(50, 4096);
    for op in [0, 8, u16::MAX] {
        let of_open_connection = VsockHeader {
            op,
            ..link.header(VsockOp::Rw)
        };
        guest.send(of_open_connection, &[]);
        guest.assert_idle();
        let without_connection = VsockHeader {
            src_port: 51,
            ..of_open_connection
        };
        guest.send(without_connection, &[]);
        assert_eq!(guest.op(), VsockOp::Rst as u16);
    }
    assert_eq!(guest.device.connections(), 1);
}

#[test]
fn packets_without_a_connection_are_reset_except_resets() {
    let mut guest = VsockGuest::ready();
    for op in [
        VsockOp::Response,
        VsockOp::Shutdown,
        VsockOp::Rw,
        VsockOp::CreditUpdate,
        VsockOp::CreditRequest,
    ] {
        guest.send(GuestSocket::new(50, 1024, 4096).header(op), &[]);
        assert_eq!(guest.op(), VsockOp::Rst as u16);
    }
    guest.send(GuestSocket::new(50, 1024, 4096).header(VsockOp::Rst), &[]);
    guest.assert_idle();
}

#[test]
fn data_after_the_end_of_data_is_reset() {
    let mut guest = VsockGuest::ready();
    let (mut link, _stream) = guest.connected_by_guest(50, 4096);
    guest.send(link.shutdown(2), &[]);
    let header = link.data(1);
    guest.send(header, &[1]);
    assert_eq!(guest.op(), VsockOp::Rst as u16);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_flood_of_requests_causes_a_bounded_number_of_resets() {
    let mut guest = VsockGuest::new(true);
    // The limit of connection requests is disabled. It would pause the transmit queue, and the test
    // does not wait for free descriptors.
    guest.device.allow_all_connects();
    let header = GuestSocket::new(50, 9, 4096).header(VsockOp::Request);
    for _ in 0..200 {
        for _ in 0..100 {
            guest.queue_packet(header, &[], &[]);
        }
        guest.kick(TX_QUEUE).unwrap();
    }
    guest.fill();
    let mut count = 0;
    while !guest.received.is_empty() || guest.poll_events(0) > 0 {
        count += guest.received.drain(..).count();
    }
    // `MAX_RESETS` of the multiplexer. Further resets are dropped.
    assert_eq!(count, 2048);
    // Connections work after the flood.
    guest.connected_by_guest(50, 4096);
}

#[test]
fn a_guest_that_sends_continuously_does_not_block_the_event_loop() {
    let harness = DeviceHarness::new(memory(MEMORY_BYTES));
    let mut rings = [1, 2, 3].map(|i| Ring::new(&harness.memory, 0x1_0000 * i, 128));
    let index = GuestAddress(rings[TX_QUEUE].avail_addr() + 2);
    let shared = harness.memory.clone();
    // Each served request makes two more available, as another vCPU could.
    let listener = move |_, _| {
        let now: u16 = shared.read_obj(index).unwrap();
        shared.write_obj(now.wrapping_add(2), index).unwrap();
        Ok(())
    };
    let config = VsockConfig {
        guest_cid: GUEST_CID,
        host_ports: vec![1024],
    };
    let mut device = Vsock::new(config, Box::new(listener));
    let queues = rings.iter().map(|r| r.queue(true)).collect();
    device.activate(harness.activation(queues, 0)).unwrap();
    let bytes = GuestSocket::new(50, 1024, 0)
        .header(VsockOp::Request)
        .to_bytes();
    let memory = &harness.memory;
    memory.write_slice(&bytes, GuestAddress(TX_AREA)).unwrap();
    rings[TX_QUEUE].set_descriptor(0, TX_AREA, 44, 0, 0);
    rings[TX_QUEUE].publish(0);
    device.queue_event(TX_QUEUE).unwrap();
    let served = rings[TX_QUEUE].used_idx();
    // The device handles at most 512 packets per event (`MAX_BATCH_PACKETS`).
    assert!((100..=512).contains(&served), "{served}");
    // The remaining packets follow after other events.
    let ready = harness.ready(5_000);
    device.host_event(ready[0].token, ready[0].flags).unwrap();
    assert!(rings[TX_QUEUE].used_idx() > served);
}

#[test]
fn broken_transmit_chains_fail_the_device_and_nothing_else() {
    type BreakRing = fn(&mut VsockGuest);
    let cases: [BreakRing; 9] = [
        |g| _ = g.rings[TX_QUEUE].add(&[readable(TX_AREA, 43)]),
        |g| _ = g.rings[TX_QUEUE].add(&[writable(TX_AREA, 44)]),
        |g| _ = g.rings[TX_QUEUE].add(&[readable(MEMORY_BYTES as u64 - 40, 44)]),
        |g| _ = g.rings[TX_QUEUE].add(&[readable(TX_AREA, 44), readable(u64::MAX - 3, 10)]),
        |g| _ = g.rings[TX_QUEUE].add(&[readable(TX_AREA, 44), readable(TX_AREA, u32::MAX)]),
        |g| {
            // A loop.
            g.rings[TX_QUEUE].set_descriptor(0, TX_AREA, 44, NEXT, 0);
            g.rings[TX_QUEUE].publish(0);
        },
        |g| {
            // A table outside memory.
            g.rings[TX_QUEUE].set_descriptor(0, 1 << 40, 32, INDIRECT, 0);
            g.rings[TX_QUEUE].publish(0);
        },
        |g| g.rings[TX_QUEUE].publish(500),
        |g| g.rings[TX_QUEUE].set_avail_idx(200),
    ];
    for break_ring in cases {
        let mut guest = VsockGuest::ready();
        let (_link, mut stream) = guest.connected_by_guest(50, 4096);
        break_ring(&mut guest);
        assert_device_fails(&mut guest, TX_QUEUE);
        assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    }
}

#[test]
fn broken_receive_chains_fail_the_device_and_nothing_else() {
    type BreakRing = fn(&mut VsockGuest);
    let cases: [BreakRing; 5] = [
        |g| _ = g.rings[RX_QUEUE].add(&[writable(TX_AREA, 44)]),
        |g| _ = g.rings[RX_QUEUE].add(&[readable(TX_AREA, 4096)]),
        |g| _ = g.rings[RX_QUEUE].add(&[writable(MEMORY_BYTES as u64 - 40, 4096)]),
        |g| g.rings[RX_QUEUE].publish(500),
        |g| {
            g.rings[RX_QUEUE].set_descriptor(0, TX_AREA, 4096, WRITE | NEXT, 0);
            g.rings[RX_QUEUE].publish(0);
        },
    ];
    for break_ring in cases {
        let mut guest = VsockGuest::new(true);
        break_ring(&mut guest);
        let header = GuestSocket::new(50, 1024, 4096).header(VsockOp::Request);
        guest.queue_packet(header, &[], &[]);
        assert_device_fails(&mut guest, TX_QUEUE);
    }
}

#[test]
fn empty_descriptors_are_skipped() {
    let mut guest = VsockGuest::ready();
    let header = GuestSocket::new(50, 9, 4096)
        .header(VsockOp::Request)
        .to_bytes();
    let memory = guest.harness.memory.clone();
    memory.write_slice(&header, GuestAddress(TX_AREA)).unwrap();
    guest.rings[TX_QUEUE].add(&[
        readable(TX_AREA, 0),
        readable(TX_AREA, 40),
        readable(0, 0),
        readable(TX_AREA + 40, 4),
        readable(u64::MAX, 0),
    ]);
    guest.kick(TX_QUEUE).unwrap();
    assert_eq!(guest.op(), VsockOp::Rst as u16);
}

#[test]
fn queues_outside_memory_are_rejected_at_activation() {
    let mut guest = VsockGuest::new(true);
    for broken in 0..3 {
        let mut queues: Vec<_> = guest.rings.iter().map(|r| r.queue(true)).collect();
        virtio_queue::QueueT::set_used_ring_address(&mut queues[broken], Some(0xffff_0000), None);
        let activation = guest.harness.activation(queues, 0);
        assert!(guest.device.activate(activation).is_err());
    }
    let queues = guest.rings[..2].iter().map(|r| r.queue(true)).collect();
    let activation = guest.harness.activation(queues, 0);
    assert!(guest.device.activate(activation).is_err());
}

#[test]
fn packets_of_random_bytes_do_not_break_anything() {
    let mut guest = VsockGuest::ready();
    // The limit of connection requests is disabled. It would pause the transmit queue, and the test
    // does not wait for free descriptors.
    guest.device.allow_all_connects();
    let (mut pattern, mut streams) = (Pattern(99), Vec::new());
    for _ in 0..20_000 {
        let mut header = GuestSocket::new(pattern.below(4).try_into().unwrap(), 1024, 0)
            .header(VsockOp::from_number(1 + u16::try_from(pattern.below(7)).unwrap()).unwrap());
        header.flags = u32::try_from(pattern.below(4)).unwrap();
        header.buf_alloc = u32::try_from(pattern.number() & 0xffff_ffff).unwrap();
        header.fwd_cnt = u32::try_from(pattern.below(1000)).unwrap();
        header.len = u32::try_from(pattern.below(600)).unwrap();
        let data = pattern.bytes(pattern.clone().below(500));
        guest.queue_packet(
            header,
            &data,
            &[pattern.below(HEADER_BYTES), pattern.below(90)],
        );
        guest.kick(TX_QUEUE).unwrap();
        guest.received.clear();
        streams.extend(guest.host.try_iter().map(|(_, stream)| stream));
        if streams.len() > 6 {
            let index = pattern.below(streams.len());
            streams.swap_remove(index);
        }
        guest.run_until_idle();
    }
}
