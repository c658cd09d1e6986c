//! Setting up connections.
//!
//! The numbers of a [`GuestSocket`] are the port of the guest, the port of the host, and the size
//! of the guest's receive buffer in bytes.

use super::super::header::{VsockHeader, VsockOp};
use super::super::{MAX_CONNECTIONS, VsockConnectError};
use super::guest::TX_QUEUE;
use super::{GUEST_CID, GuestSocket, Pattern, VsockGuest};
use crate::virtio::VirtioDevice;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::io::{Read, Write};
use std::time::Instant;

#[test]
fn the_guest_finds_its_context_id_in_the_configuration() {
    let guest = VsockGuest::new(true);
    let mut cid = [0xff; 10];
    guest.device.read_config(0, &mut cid);
    assert_eq!(cid[..8], u64::from(GUEST_CID).to_le_bytes());
    let mut beyond = [0; 4];
    guest.device.read_config(u64::MAX - 1, &mut beyond);
    assert_eq!(beyond, [0; 4]);
    // 19 is the virtio id of a socket device.
    assert_eq!(guest.device.device_id(), 19);
    assert!(guest.device.quiet_interrupts());
}

#[test]
fn the_guest_reaches_a_port_of_the_host() {
    for event_idx in [true, false] {
        let mut guest = VsockGuest::new(event_idx);
        guest.fill();
        let (mut link, mut stream) = guest.connected_by_guest(50, 4096);
        let header = link.data(5);
        guest.send(header, b"hello");
        let mut got = [0; 5];
        stream.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
        stream.write_all(b"welcome").unwrap();
        let (header, data) = guest.next();
        let expected = (VsockOp::Rw as u16, b"welcome".as_slice());
        assert_eq!((header.op, data.as_slice()), expected);
        assert_eq!(header.fwd_cnt, 5);
    }
}

#[test]
fn the_host_reaches_a_port_of_the_guest() {
    let mut guest = VsockGuest::ready();
    let (mut link, mut stream) = guest.connected_by_host(22, 4096);
    stream.write_all(b"ping").unwrap();
    assert_eq!(guest.next().1, b"ping");
    let header = link.data(4);
    guest.send(header, b"pong");
    let mut got = [0; 4];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"pong");
    assert_eq!(guest.device.connections(), 1);
}

#[test]
fn data_written_before_the_response_is_sent_with_the_response() {
    let mut guest = VsockGuest::ready();
    let (mut stream, outcome) = guest.connect(22);
    outcome.unwrap();
    stream.write_all(b"early").unwrap();
    drop(stream);
    let request = guest.next().0;
    guest.run_until_idle();
    let link = GuestSocket::new(22, request.src_port, 4096);
    guest.send(link.header(VsockOp::Response), &[]);
    assert_eq!(guest.received.pop_front().unwrap().1, b"early");
    let end = guest.next().0;
    // 3: both directions.
    assert_eq!((end.op, end.flags), (VsockOp::Shutdown as u16, 3));
}

#[test]
fn a_port_that_is_not_offered_is_rejected() {
    let mut guest = VsockGuest::ready();
    // The device of the test has the host ports 1024 and 1025.
    let link = GuestSocket::new(50, 1026, 4096);
    guest.send(link.header(VsockOp::Request), &[]);
    let reset = guest.next().0;
    assert_eq!(
        (reset.op, reset.src_port, reset.dst_port),
        (VsockOp::Rst as u16, 1026, 50)
    );
    assert_eq!(guest.device.connections(), 0);
    assert!(guest.host.try_recv().is_err());
}

#[test]
fn a_connection_without_a_listener_is_rejected() {
    let mut guest = VsockGuest::ready();
    guest.host = std::sync::mpsc::channel().1;
    guest.send(
        GuestSocket::new(50, 1024, 4096).header(VsockOp::Request),
        &[],
    );
    assert_eq!(guest.op(), VsockOp::Rst as u16);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_rejection_by_the_guest_closes_the_stream_without_data() {
    let mut guest = VsockGuest::ready();
    let (mut stream, outcome) = guest.connect(22);
    outcome.unwrap();
    let request = guest.next().0;
    let link = GuestSocket::new(22, request.src_port, 0);
    guest.send(link.header(VsockOp::Rst), &[]);
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(guest.device.connections(), 0);
    guest.assert_idle();
}

#[test]
fn a_connection_to_an_unresponsive_guest_times_out() {
    let mut guest = VsockGuest::ready();
    // All timeouts are 30 ms.
    guest.set_timeouts(30, 30, 30);
    let (mut stream, outcome) = guest.connect(22);
    outcome.unwrap();
    let request = guest.next().0;
    let reset = guest.next().0;
    assert_eq!(
        (reset.op, reset.src_port),
        (VsockOp::Rst as u16, request.src_port)
    );
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    let link = GuestSocket::new(22, request.src_port, 4096);
    guest.send(link.header(VsockOp::Response), &[]);
    assert_eq!(guest.op(), VsockOp::Rst as u16);
}

#[test]
fn without_a_driver_no_port_is_reached() {
    let mut guest = VsockGuest::new(true);
    guest.device.reset();
    let (mut stream, outcome) = guest.connect(22);
    assert!(matches!(outcome, Err(VsockConnectError::NotActive)));
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn a_response_without_a_request_is_reset() {
    let mut guest = VsockGuest::new(true);
    let (_stream, outcome) = guest.connect(22);
    outcome.unwrap();
    guest.send(
        GuestSocket::new(22, 77, 4096).header(VsockOp::Response),
        &[],
    );
    guest.fill();
    let ops = [guest.op(), guest.op()];
    assert_eq!(ops, [VsockOp::Rst as u16, VsockOp::Request as u16]);
}

#[test]
fn a_second_request_for_the_same_ports_ends_the_first() {
    let mut guest = VsockGuest::ready();
    let (link, mut stream) = guest.connected_by_guest(50, 4096);
    guest.send(link.header(VsockOp::Request), &[]);
    assert_eq!(guest.op(), VsockOp::Rst as u16);
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_connection_above_the_limit_is_rejected_and_the_others_continue() {
    // Each connection needs two descriptors: both ends of its stream are in this process.
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let mut guest = VsockGuest::ready();
    let mut streams = Vec::new();
    let limit = u32::try_from(MAX_CONNECTIONS).unwrap();
    for port in 0..limit {
        streams.push(guest.connected_by_guest(port, 4096));
    }
    assert_eq!(guest.device.connections(), MAX_CONNECTIONS);
    guest.send(
        GuestSocket::new(limit, 1024, 4096).header(VsockOp::Request),
        &[],
    );
    assert_eq!(guest.op(), VsockOp::Rst as u16);
    let (_, outcome) = guest.connect(22);
    assert!(matches!(outcome, Err(VsockConnectError::TooMany)));

    let mut pattern = Pattern(7);
    for _ in 0..50 {
        let (link, stream) = &mut streams[pattern.below(MAX_CONNECTIONS)];
        stream.write_all(b"x").unwrap();
        let header = guest.next().0;
        assert_eq!(header.dst_port, link.guest);
    }
    let (link, _) = &streams[9];
    guest.send(link.header(VsockOp::Rst), &[]);
    assert_eq!(guest.device.connections(), MAX_CONNECTIONS - 1);
    guest.connected_by_guest(limit, 4096);
}

#[test]
fn every_connection_into_the_guest_has_a_port_of_its_own() {
    let mut guest = VsockGuest::ready();
    let mut ports = std::collections::HashSet::new();
    let mut streams = Vec::new();
    for _ in 0..100 {
        streams.push(guest.connect(22).0);
        let request: VsockHeader = guest.next().0;
        // `FIRST_EPHEMERAL` of the multiplexer.
        assert!(request.src_port >= 1 << 30);
        assert!(ports.insert(request.src_port));
    }
}

#[test]
fn many_events_cost_one_interrupt() {
    let mut guest = VsockGuest::ready();
    let before = guest.harness.interrupt.queue_count();
    for port in 0..40 {
        let header = GuestSocket::new(port, 1024, 4096).header(VsockOp::Request);
        guest.queue_packet(header, &[], &[]);
    }
    guest.kick(TX_QUEUE).unwrap();
    assert_eq!(guest.received.len(), 40);
    assert!(guest.harness.interrupt.queue_count() - before <= 1);
}

#[test]
fn an_idle_connection_costs_nothing() {
    let mut guest = VsockGuest::ready();
    guest.set_timeouts(100, 100, 100);
    let (_a, _b) = (
        guest.connected_by_host(22, 4096),
        guest.connected_by_guest(50, 4096),
    );
    guest.run_until_idle();
    // The timer of the connection attempt may fire once more.
    guest.poll_events(200);
    let before = guest.harness.interrupt.queue_count();
    let start = Instant::now();
    assert_eq!(guest.poll_events(100), 0);
    assert!(start.elapsed().as_millis() >= 90);
    assert_eq!(guest.harness.interrupt.queue_count(), before);
}
