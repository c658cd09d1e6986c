//! Batches need few interrupts and few calls to the host, and lose no data. A *batch* consists of
//! all events that the event loop receives at once.

use super::super::header::VsockOp;
use super::guest::{RX_BUFFER_BYTES, TX_QUEUE};
use super::{GuestSocket, Pattern, VsockGuest};
use crate::virtio::VirtioDevice;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Returns the number of interrupts so far.
fn interrupts(guest: &VsockGuest) -> usize {
    guest.harness.interrupt.queue_count()
}

#[test]
fn streams_that_are_ready_at_once_cost_one_interrupt() {
    let mut guest = VsockGuest::ready();
    let mut links: Vec<(GuestSocket, UnixStream)> = (0..16)
        .map(|port| guest.connected_by_host(100 + port, 65_536))
        .collect();
    guest.run_until_idle();
    for (link, stream) in &mut links {
        stream.write_all(&link.guest.to_le_bytes()).unwrap();
    }
    let before = interrupts(&guest);
    let ready = guest.harness.ready(1_000);
    guest.device.begin_batch();
    for event in &ready {
        guest.device.host_event(event.token, event.flags).unwrap();
    }
    assert_eq!(
        interrupts(&guest),
        before,
        "an interrupt came before the end of the batch"
    );
    guest.device.end_batch().unwrap();
    assert_eq!(interrupts(&guest), before + 1);
    guest.handle_interrupt();
    guest.run_until_idle();
    let mut ports: Vec<u32> = Vec::new();
    while let Some((header, data)) = guest.received.pop_front() {
        assert_eq!(header.op, VsockOp::Rw as u16);
        assert_eq!(data, header.dst_port.to_le_bytes());
        ports.push(header.dst_port);
    }
    ports.sort_unstable();
    assert_eq!(ports, (100..116).collect::<Vec<u32>>());
}

#[test]
fn an_empty_batch_and_one_after_a_reset_do_nothing() {
    let mut guest = VsockGuest::ready();
    guest.device.begin_batch();
    guest.device.end_batch().unwrap();
    guest.device.begin_batch();
    guest.device.queue_event(TX_QUEUE).unwrap();
    guest.device.reset();
    guest.device.end_batch().unwrap();
    guest.device.end_batch().unwrap();
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_device_that_was_reset_within_a_batch_handles_later_events() {
    let mut guest = VsockGuest::ready();
    guest.device.begin_batch();
    guest.device.reset();
    // No `end_batch` follows: it is not called for an inactive device.
    guest.activate();
    guest.fill();
    guest.connected_by_guest(50, 4096);
}

#[test]
fn much_data_fills_many_buffers_and_little_data_returns_unused_buffers() {
    let mut guest = VsockGuest::ready();
    let (mut link, mut stream) = guest.connected_by_host(22, 1 << 20);
    guest.run_until_idle();
    let mut pattern = Pattern(5);
    // Each buffer starts with the packet's header of 44 bytes.
    let buffer = usize::try_from(RX_BUFFER_BYTES).unwrap() - 44;
    for bytes in [
        1,
        buffer - 1,
        buffer,
        buffer + 1,
        10 * buffer,
        10 * buffer + 7,
        100_000,
    ] {
        stream.write_all(&pattern.clone().bytes(bytes)).unwrap();
        let expected = pattern.bytes(bytes);
        let mut got = Vec::new();
        while got.len() < bytes {
            let (header, data) = guest.next();
            assert_eq!(header.op, VsockOp::Rw as u16);
            assert!(!data.is_empty());
            got.extend(data);
        }
        assert!(got == expected, "{bytes} bytes");
        link.fwd_cnt = link.fwd_cnt.wrapping_add(u32::try_from(bytes).unwrap());
        guest.send(link.header(VsockOp::CreditUpdate), &[]);
        guest.assert_idle();
    }
}

#[test]
fn data_beyond_the_guests_credit_waits_even_if_many_buffers_are_free() {
    let mut guest = VsockGuest::ready();
    let credit = 20_000;
    let (mut link, mut stream) = guest.connected_by_host(22, credit);
    let data = Pattern(9).bytes(50_000);
    stream.write_all(&data).unwrap();
    let mut got = Vec::new();
    while got.len() < data.len() {
        let consumed = link.fwd_cnt;
        while got.len() < usize::try_from(consumed + credit).unwrap().min(data.len()) {
            got.extend(guest.next().1);
        }
        guest.run_until_idle();
        while let Some((header, _)) = guest.received.pop_front() {
            assert_eq!(header.op, VsockOp::CreditRequest as u16);
        }
        link.fwd_cnt = u32::try_from(got.len()).unwrap();
        guest.send(link.header(VsockOp::CreditUpdate), &[]);
    }
    assert!(got == data);
}

#[test]
fn sent_packets_are_reported_with_the_next_interrupt_or_after_a_delay() {
    let mut guest = VsockGuest::ready();
    let (mut link, mut stream) = guest.connected_by_host(22, 65_536);
    guest.run_until_idle();
    // Deadline of the wait for the timer at the end of this test.
    let limit = Instant::now() + Duration::from_secs(5);
    let before = interrupts(&guest);
    let header = link.data(1);
    guest.send(header, b"a");
    assert_eq!(
        interrupts(&guest),
        before,
        "an interrupt came for one packet"
    );
    // With data for the guest: the interrupt for the data also reports the sent packet.
    let mut byte = [0];
    stream.read_exact(&mut byte).unwrap();
    stream.write_all(b"b").unwrap();
    assert_eq!(guest.next().1, b"b");
    let before = interrupts(&guest);
    guest.run_until_idle();
    // Without data: the timer interrupts after the maximum delay of the sent packet.
    let header = link.data(1);
    guest.send(header, b"c");
    while interrupts(&guest) == before {
        assert!(
            Instant::now() < limit,
            "the device did not return the buffer"
        );
        guest.poll_events(20);
    }
}

#[test]
fn a_busy_sender_receives_its_buffers_before_its_ring_is_full() {
    let mut guest = VsockGuest::ready();
    let (mut link, _stream) = guest.connected_by_host(22, 65_536);
    guest.run_until_idle();
    let before = interrupts(&guest);
    for _ in 0..128 {
        let header = link.data(1);
        // The header of 44 bytes has a descriptor of its own.
        guest.queue_packet(header, b"x", &[44]);
        guest.device.queue_event(TX_QUEUE).unwrap();
    }
    assert!(interrupts(&guest) > before);
}
