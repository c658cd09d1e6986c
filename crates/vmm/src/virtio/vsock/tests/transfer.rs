//! All bytes arrive in order at any speed.
//!
//! The *credit* of a sender is the free space in the buffer of the receiver. The receiver's packets
//! contain its size, `buf_alloc`, and the number of bytes consumed so far, `fwd_cnt`.
//!
//! The header of a packet has 44 bytes. `shutdown(2)` announces that the guest sends no more data,
//! and `shutdown(3)` closes both directions.

use super::super::credit::BUF_ALLOC_BYTES;
use super::super::header::{HEADER_BYTES, VsockHeader, VsockOp};
use super::super::host_backlog::HostBacklog;
use super::guest::{RX_AREA, RX_BUFFER_BYTES, RX_QUEUE, TX_QUEUE};
use super::{GuestSocket, Pattern, VsockGuest};
use crate::virtio::VirtioDevice;
use crate::virtio::device::chain::next_chain;
use crate::virtio::testing::{Ring, memory, readable, writable};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress};

const TRANSFER_BYTES: usize = 10 << 20;

/// Sends `total` bytes of a pattern from the host in random chunks, then closes the direction from
/// the host to the guest.
fn host_writes(mut stream: UnixStream, seed: u64, total: usize) -> JoinHandle<()> {
    thread::spawn(move || {
        let (mut pattern, mut chunks) = (Pattern(seed), Pattern(seed + 1));
        let mut left = total;
        while left > 0 {
            let count = left.min(1 + chunks.below(100_000));
            stream.write_all(&pattern.bytes(count)).unwrap();
            left -= count;
        }
        stream.shutdown(std::net::Shutdown::Write).unwrap();
    })
}

/// Reads a pattern on the host in random chunks until the end. Returns the number of bytes.
fn host_reads(mut stream: UnixStream, seed: u64) -> JoinHandle<usize> {
    thread::spawn(move || {
        let (mut pattern, mut chunks) = (Pattern(seed), Pattern(seed + 1));
        let mut total = 0;
        loop {
            let mut chunk = vec![0; 1 + chunks.below(100_000)];
            let count = stream.read(&mut chunk).unwrap();
            if count == 0 {
                return total;
            }
            assert!(chunk[..count] == pattern.bytes(count), "at {total}");
            total += count;
        }
    })
}

/// Receives all packets of `link`. Returns whether the host has closed the direction to the guest.
fn take(
    guest: &mut VsockGuest,
    link: &mut GuestSocket,
    pattern: &mut Pattern,
    got: &mut usize,
) -> bool {
    let mut ended = false;
    while let Some((header, data)) = guest.received.pop_front() {
        link.update_credit(&header);
        if header.op == VsockOp::Shutdown as u16 {
            assert_eq!(header.flags, 2);
            ended = true;
        } else if header.op == VsockOp::Rw as u16 {
            assert!(!ended && data == pattern.bytes(data.len()), "at {got}");
            *got += data.len();
            link.fwd_cnt = link.fwd_cnt.wrapping_add(header.len);
        } else {
            let credit = [VsockOp::CreditUpdate as u16, VsockOp::CreditRequest as u16];
            assert!(credit.contains(&header.op), "{header:?}");
        }
    }
    ended
}

#[test]
fn ten_mebibytes_cross_each_way_at_once_through_small_windows() {
    let mut guest = VsockGuest::ready();
    let (mut link, stream) = guest.connected_by_host(22, 9_000);
    let writer = host_writes(stream.try_clone().unwrap(), 11, TRANSFER_BYTES);
    let reader = host_reads(stream, 22);
    let (mut down, mut up, mut chunks) = (Pattern(11), Pattern(22), Pattern(33));
    let (mut got, mut sent, mut announced, mut ended) = (0, 0, 0, false);
    let limit = Instant::now() + Duration::from_secs(60);
    while !ended || sent < TRANSFER_BYTES {
        assert!(Instant::now() < limit, "got {got}, sent {sent}");
        guest.poll_events(if guest.received.is_empty() { 5 } else { 0 });
        ended |= take(&mut guest, &mut link, &mut down, &mut got);
        for _ in 0..chunks.below(4) {
            let count = link
                .available()
                .min(TRANSFER_BYTES - sent)
                .min(chunks.below(70_000));
            if count > 0 {
                let header = link.data(count);
                let cuts = [HEADER_BYTES, 1 + chunks.below(5_000), chunks.below(5_000)];
                let cuts = &cuts[..chunks.below(4)];
                guest.queue_packet(header, &up.bytes(count), cuts);
                sent += count;
                announced = link.fwd_cnt;
            }
        }
        guest.kick(TX_QUEUE).unwrap();
        if link.fwd_cnt.wrapping_sub(announced) > 5_000 {
            guest.send(link.header(VsockOp::CreditUpdate), &[]);
            announced = link.fwd_cnt;
        }
    }
    assert_eq!(got, TRANSFER_BYTES);
    guest.send(link.shutdown(2), &[]);
    guest.run_until_idle();
    writer.join().unwrap();
    let limit = Instant::now() + Duration::from_secs(10);
    while !reader.is_finished() {
        assert!(Instant::now() < limit);
        guest.poll_events(5);
    }
    assert_eq!(reader.join().unwrap(), TRANSFER_BYTES);
}

#[test]
fn a_slow_guest_receives_data_up_to_its_credit_and_a_credit_request() {
    let mut guest = VsockGuest::ready();
    let (mut link, mut stream) = guest.connected_by_host(22, 1_000);
    stream.write_all(&Pattern(5).bytes(2_500)).unwrap();
    let (header, first) = guest.next();
    assert_eq!(header.len, 1_000);
    // Without buffer space, the device sends one credit request after some time, and is then idle.
    assert_eq!(guest.op(), VsockOp::CreditRequest as u16);
    assert_eq!(guest.poll_events(50), 0);
    link.fwd_cnt = 1_000;
    guest.send(link.header(VsockOp::CreditUpdate), &[]);
    let (_, second) = guest.received.pop_front().unwrap();
    link.fwd_cnt = 2_000;
    guest.send(link.header(VsockOp::CreditUpdate), &[]);
    let (_, third) = guest.received.pop_front().unwrap();
    assert_eq!([first, second, third].concat(), Pattern(5).bytes(2_500));
    guest.assert_idle();
}

#[test]
fn a_guest_without_receive_buffers_causes_no_wakeups_and_loses_nothing() {
    let mut guest = VsockGuest::ready();
    let (_, mut stream) = guest.connected_by_host(22, 1 << 20);
    guest.refill = false;
    let all = usize::try_from(RX_BUFFER_BYTES).unwrap() * 200;
    stream.set_nonblocking(true).unwrap();
    let bytes = Pattern(9).bytes(all);
    let mut written = 0;
    let mut got = Vec::new();
    while got.len() < all {
        while let Ok(count) = stream.write(&bytes[written..all.min(written + 50_000)]) {
            written += count;
            if count == 0 {
                break;
            }
        }
        guest.run_until_idle();
        let buffers = guest.received.len();
        if buffers == 0 {
            let start = Instant::now();
            assert_eq!(guest.poll_events(20), 0, "an event without a cause");
            assert!(start.elapsed().as_millis() >= 19);
            guest.add_rx_buffers(3);
        }
        got.extend(guest.received.drain(..).flat_map(|(_, data)| data));
    }
    assert!(got == bytes);
}

#[test]
fn a_host_that_does_not_read_costs_no_more_than_the_credit() {
    let mut guest = VsockGuest::ready();
    let (mut link, mut stream) = guest.connected_by_guest(50, 4096);
    let mut up = Pattern(3);
    let mut sent = 0;
    while link.available() > 0 {
        let count = link.available().min(50_000);
        let header = link.data(count);
        guest.send(header, &up.bytes(count));
        sent += count;
        guest.run_until_idle();
        for (header, _) in guest.received.drain(..) {
            link.update_credit(&header);
        }
    }
    // The guest has used its credit and the stream is full, so no data moves. A timer that was set
    // earlier may fire once.
    assert!(guest.poll_events(30) <= 1);
    assert_eq!(guest.poll_events(30), 0);
    let unread = sent - usize::try_from(link.host_fwd).unwrap();
    assert_eq!(unread, usize::try_from(BUF_ALLOC_BYTES).unwrap());

    let reader = thread::spawn(move || {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        all
    });
    while link.available() < usize::try_from(BUF_ALLOC_BYTES).unwrap() / 2 {
        assert_eq!(guest.op_of(&mut link), VsockOp::CreditUpdate as u16);
    }
    guest.send(link.shutdown(3), &[]);
    assert_eq!(guest.op(), VsockOp::Rst as u16);
    let limit = Instant::now() + Duration::from_secs(10);
    while guest.device.connections() > 0 {
        assert!(Instant::now() < limit);
        guest.poll_events(5);
    }
    assert!(reader.join().unwrap() == Pattern(3).bytes(sent));
}

#[test]
fn the_backlog_holds_no_more_memory_than_the_credit_and_none_when_empty() {
    let memory = memory(1 << 20);
    let mut ring = Ring::new(&memory, 0, 16);
    let mut queue = ring.queue(false);
    let (near, far) = UnixStream::pair().unwrap();
    let mut backlog = HostBacklog::default();
    for _ in 0..4 {
        ring.add(&[readable(0x1_0000, BUF_ALLOC_BYTES / 4)]);
        let chain = next_chain(&mut queue, &memory);
        backlog.push(&chain.unwrap().unwrap().readable);
    }
    assert_eq!(
        backlog.capacity(),
        usize::try_from(BUF_ALLOC_BYTES).unwrap()
    );
    let reader = thread::spawn(move || std::io::copy(&mut &far, &mut std::io::sink()).unwrap());
    let near = near.into();
    while !backlog.is_empty() {
        backlog.flush(&near).1.unwrap();
    }
    assert_eq!(backlog.capacity(), 0);
    drop(near);
    assert_eq!(reader.join().unwrap(), u64::from(BUF_ALLOC_BYTES));
}

#[test]
fn a_guest_that_sends_gets_its_credit_back_before_it_runs_out() {
    let mut guest = VsockGuest::ready();
    let (mut link, stream) = guest.connected_by_guest(50, 4096);
    let reader = host_reads(stream, 8);
    let (mut up, mut updates) = (Pattern(8), 0);
    for _ in 0..100 {
        let header = link.data(40_000);
        guest.send(header, &up.bytes(40_000));
        guest.run_until_idle();
        for (header, _) in guest.received.drain(..) {
            link.update_credit(&header);
            updates += 1;
        }
        while link.available() < 40_000 {
            guest.op_of(&mut link);
            updates += 1;
        }
    }
    // The device sends one update for every half of its buffer (`BUF_ALLOC_BYTES`), not for every
    // packet.
    assert!(updates <= 35, "{updates} updates");
    guest.send(link.shutdown(2), &[]);
    let limit = Instant::now() + Duration::from_secs(10);
    while !reader.is_finished() {
        assert!(Instant::now() < limit);
        guest.poll_events(5);
    }
    assert_eq!(reader.join().unwrap(), 4_000_000);
}

#[test]
fn a_credit_request_is_answered() {
    let mut guest = VsockGuest::ready();
    let (mut link, _stream) = guest.connected_by_guest(50, 4096);
    let header = link.data(3);
    guest.send(header, b"abc");
    guest.assert_idle();
    guest.send(link.header(VsockOp::CreditRequest), &[]);
    let update = guest.next().0;
    assert_eq!(
        (update.op, update.fwd_cnt, update.buf_alloc),
        (VsockOp::CreditUpdate as u16, 3, BUF_ALLOC_BYTES)
    );
}

#[test]
fn connections_take_turns() {
    let mut guest = VsockGuest::new(true);
    guest.refill = false;
    guest.add_rx_buffers(4);
    let mut streams: Vec<_> = (0..4)
        .map(|p| guest.connected_by_host(p, 1 << 20).1)
        .collect();
    for stream in &mut streams {
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[7; 10_000]).is_ok() {}
    }
    guest.assert_idle();
    guest.add_rx_buffers(40);
    let mut share = [0; 4];
    for (header, _) in &guest.received {
        share[usize::try_from(header.dst_port).unwrap()] += 1;
    }
    assert_eq!(share, [10; 4]);
}

#[test]
fn any_cut_of_a_packet_into_descriptors_is_understood() {
    let data = Pattern(4).bytes(300);
    let layouts: [&[usize]; 7] = [
        &[],
        &[44],
        &[1],
        &[43, 2],
        &[20, 24],
        &[44, 100, 1, 100],
        &[10, 10, 10, 10, 10, 10, 10],
    ];
    let mut guest = VsockGuest::ready();
    let (mut link, mut stream) = guest.connected_by_guest(50, 4096);
    for cuts in layouts {
        let header = link.data(data.len());
        guest.queue_packet(header, &data, cuts);
        guest.kick(TX_QUEUE).unwrap();
        let mut got = vec![0; data.len()];
        stream.read_exact(&mut got).unwrap();
        assert_eq!(got, data, "{cuts:?}");
    }
}

#[test]
fn any_cut_of_a_receive_buffer_into_descriptors_is_filled() {
    for cuts in [vec![44, 100], vec![1, 43, 100], vec![45, 99], vec![144]] {
        let mut guest = VsockGuest::new(true);
        let (mut stream, outcome) = guest.connect(22);
        outcome.unwrap();
        let mut at = RX_AREA;
        let buffers: Vec<_> = cuts
            .iter()
            .map(|&len| {
                at += 200;
                writable(at - 200, len)
            })
            .collect();
        guest.rings[RX_QUEUE].add(&buffers);
        guest.device.queue_event(RX_QUEUE).unwrap();
        let packet = |guest: &VsockGuest| -> (VsockHeader, Vec<u8>) {
            let mut bytes = Vec::new();
            for buffer in &buffers {
                let mut part = vec![0; usize::try_from(buffer.len).unwrap()];
                let at = GuestAddress(buffer.addr);
                guest.harness.memory.read_slice(&mut part, at).unwrap();
                bytes.extend(part);
            }
            let data = bytes.split_off(HEADER_BYTES);
            (VsockHeader::from_bytes(&bytes.try_into().unwrap()), data)
        };
        let request = packet(&guest).0;
        assert_eq!(
            (request.op, request.dst_port),
            (VsockOp::Request as u16, 22)
        );
        stream.write_all(&[9; 500]).unwrap();
        let response = GuestSocket::new(22, request.src_port, 4096).header(VsockOp::Response);
        guest.queue_packet(response, &[], &[]);
        guest.device.queue_event(TX_QUEUE).unwrap();
        guest.rings[RX_QUEUE].add(&buffers);
        guest.device.queue_event(RX_QUEUE).unwrap();
        let (header, data) = packet(&guest);
        // The buffers have space for the header and 100 bytes.
        assert_eq!(header.len, 100, "{cuts:?}");
        assert_eq!(data, [9; 100]);
    }
}
