//! Setting up connections.

use super::super::header::{Header, Op};
use super::super::{ConnectError, MAX_CONNECTIONS};
use super::{CID, Guest, Link, Pattern};
use crate::virtio::VirtioDevice;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::io::{Read, Write};
use std::time::Instant;

#[test]
fn the_guest_finds_its_context_id_in_the_configuration() {
    let guest = Guest::new(true);
    let mut cid = [0xff; 10];
    guest.device.read_config(0, &mut cid);
    assert_eq!(cid[..8], u64::from(CID).to_le_bytes());
    let mut beyond = [0; 4];
    guest.device.read_config(u64::MAX - 1, &mut beyond);
    assert_eq!(beyond, [0; 4]);
    assert_eq!(guest.device.device_id(), 19);
    assert!(guest.device.quiet_interrupts());
}

#[test]
fn the_guest_reaches_a_port_of_the_host() {
    for event_idx in [true, false] {
        let mut guest = Guest::new(event_idx);
        guest.fill();
        let (mut link, mut stream) = guest.opened(50, 4096);
        let header = link.data(5);
        guest.send(header, b"hello");
        let mut got = [0; 5];
        stream.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
        stream.write_all(b"welcome").unwrap();
        let (header, data) = guest.next();
        assert_eq!((header.op, data.as_slice()), (5, b"welcome".as_slice()));
        assert_eq!(header.fwd_cnt, 5);
    }
}

#[test]
fn the_host_reaches_a_port_of_the_guest() {
    let mut guest = Guest::ready();
    let (mut link, mut stream) = guest.dialled(22, 4096);
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
fn what_the_host_wrote_before_the_answer_is_there_with_the_answer() {
    let mut guest = Guest::ready();
    let (mut stream, outcome) = guest.connect(22);
    outcome.unwrap();
    stream.write_all(b"early").unwrap();
    drop(stream);
    let request = guest.next().0;
    guest.settle();
    let link = Link::new(22, request.src_port, 4096);
    guest.send(link.header(Op::Response), &[]);
    assert_eq!(guest.inbox.pop_front().unwrap().1, b"early");
    let end = guest.next().0;
    assert_eq!((end.op, end.flags), (Op::Shutdown as u16, 3));
}

#[test]
fn a_port_that_is_not_offered_is_refused() {
    let mut guest = Guest::ready();
    let link = Link::new(50, 1026, 4096);
    guest.send(link.header(Op::Request), &[]);
    let reset = guest.next().0;
    assert_eq!(
        (reset.op, reset.src_port, reset.dst_port),
        (Op::Rst as u16, 1026, 50)
    );
    assert_eq!(guest.device.connections(), 0);
    assert!(guest.host.try_recv().is_err());
}

#[test]
fn a_connection_nobody_takes_is_refused() {
    let mut guest = Guest::ready();
    guest.host = std::sync::mpsc::channel().1;
    guest.send(Link::new(50, 1024, 4096).header(Op::Request), &[]);
    assert_eq!(guest.op(), Op::Rst as u16);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_refusal_by_the_guest_closes_the_stream_without_a_byte() {
    let mut guest = Guest::ready();
    let (mut stream, outcome) = guest.connect(22);
    outcome.unwrap();
    let request = guest.next().0;
    let link = Link::new(22, request.src_port, 0);
    guest.send(link.header(Op::Rst), &[]);
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(guest.device.connections(), 0);
    guest.silent();
}

#[test]
fn a_guest_that_does_not_answer_is_given_up() {
    let mut guest = Guest::ready();
    guest.set_patience(30, 30, 30);
    let (mut stream, outcome) = guest.connect(22);
    outcome.unwrap();
    let request = guest.next().0;
    let reset = guest.next().0;
    assert_eq!(
        (reset.op, reset.src_port),
        (Op::Rst as u16, request.src_port)
    );
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    let link = Link::new(22, request.src_port, 4096);
    guest.send(link.header(Op::Response), &[]);
    assert_eq!(guest.op(), Op::Rst as u16);
}

#[test]
fn without_a_driver_nobody_is_reached() {
    let mut guest = Guest::new(true);
    guest.device.reset();
    let (mut stream, outcome) = guest.connect(22);
    assert!(matches!(outcome, Err(ConnectError::NotActive)));
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn an_answer_to_no_request_is_reset() {
    let mut guest = Guest::new(true);
    let (_stream, outcome) = guest.connect(22);
    outcome.unwrap();
    guest.send(Link::new(22, 77, 4096).header(Op::Response), &[]);
    guest.fill();
    let ops = [guest.op(), guest.op()];
    assert_eq!(ops, [Op::Rst as u16, Op::Request as u16]);
}

#[test]
fn a_second_request_for_the_same_ports_ends_the_first() {
    let mut guest = Guest::ready();
    let (link, mut stream) = guest.opened(50, 4096);
    guest.send(link.header(Op::Request), &[]);
    assert_eq!(guest.op(), Op::Rst as u16);
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn one_connection_too_many_is_refused_and_the_others_go_on() {
    // Two descriptors each, both in this process.
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let mut guest = Guest::ready();
    let mut streams = Vec::new();
    let most = u32::try_from(MAX_CONNECTIONS).unwrap();
    for port in 0..most {
        streams.push(guest.opened(port, 4096));
    }
    assert_eq!(guest.device.connections(), MAX_CONNECTIONS);
    guest.send(Link::new(most, 1024, 4096).header(Op::Request), &[]);
    assert_eq!(guest.op(), Op::Rst as u16);
    let (_, outcome) = guest.connect(22);
    assert!(matches!(outcome, Err(ConnectError::TooMany)));

    let mut pattern = Pattern(7);
    for _ in 0..50 {
        let (link, stream) = &mut streams[pattern.below(MAX_CONNECTIONS)];
        stream.write_all(b"x").unwrap();
        let header = guest.next().0;
        assert_eq!(header.dst_port, link.guest);
    }
    let (link, _) = &streams[9];
    guest.send(link.header(Op::Rst), &[]);
    assert_eq!(guest.device.connections(), MAX_CONNECTIONS - 1);
    guest.opened(most, 4096);
}

#[test]
fn every_connection_into_the_guest_has_a_port_of_its_own() {
    let mut guest = Guest::ready();
    let mut ports = std::collections::HashSet::new();
    let mut streams = Vec::new();
    for _ in 0..100 {
        streams.push(guest.connect(22).0);
        let request: Header = guest.next().0;
        assert!(request.src_port >= 1 << 30);
        assert!(ports.insert(request.src_port));
    }
}

#[test]
fn many_events_cost_one_interrupt() {
    let mut guest = Guest::ready();
    let before = guest.around.interrupt.queue_count();
    for port in 0..40 {
        let header = Link::new(port, 1024, 4096).header(Op::Request);
        guest.queue_packet(header, &[], &[]);
    }
    guest.kick(1).unwrap();
    assert_eq!(guest.inbox.len(), 40);
    assert!(guest.around.interrupt.queue_count() - before <= 1);
}

#[test]
fn an_idle_connection_costs_nothing() {
    let mut guest = Guest::ready();
    guest.set_patience(100, 100, 100);
    let (_a, _b) = (guest.dialled(22, 4096), guest.opened(50, 4096));
    guest.settle();
    // The connection attempt's own timer may ring once more.
    guest.turn(200);
    let before = guest.around.interrupt.queue_count();
    let start = Instant::now();
    assert_eq!(guest.turn(100), 0);
    assert!(start.elapsed().as_millis() >= 90);
    assert_eq!(guest.around.interrupt.queue_count(), before);
}
