//! Ends of connections, orderly and not: nothing is lost, nothing is left.

use super::super::header::Op;
use super::{Guest, Link, Pattern};
use crate::virtio::VirtioDevice;
use crate::virtio::testing::writable;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress};

/// Fills the stream and the device's backlog from the guest's side; returns what was sent.
fn stuff(guest: &mut Guest, link: &mut Link, seed: u64) -> Vec<u8> {
    let mut pattern = Pattern(seed);
    let mut sent = Vec::new();
    while link.room() > 0 {
        let bytes = pattern.bytes(link.room().min(60_000));
        let header = link.data(bytes.len());
        guest.send(header, &bytes);
        sent.extend(bytes);
        guest.settle();
        for (header, _) in guest.inbox.drain(..) {
            link.heard(&header);
        }
    }
    sent
}

/// Everything the host can read, while the device goes on.
fn read_all(guest: &mut Guest, stream: &mut UnixStream) -> Vec<u8> {
    stream.set_nonblocking(true).unwrap();
    let limit = Instant::now() + Duration::from_secs(10);
    let mut all = Vec::new();
    let mut chunk = vec![0; 100_000];
    loop {
        assert!(Instant::now() < limit, "no end after {} bytes", all.len());
        match stream.read(&mut chunk) {
            Ok(0) => return all,
            Ok(count) => all.extend(&chunk[..count]),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                guest.turn(5);
            }
            Err(e) => panic!("{e}"),
        }
    }
}

fn gone(guest: &mut Guest) {
    let limit = Instant::now() + Duration::from_secs(5);
    while guest.device.connections() > 0 {
        assert!(Instant::now() < limit);
        guest.turn(5);
    }
}

#[test]
fn the_end_of_the_hosts_data_reaches_the_guest_after_the_data_and_the_guest_may_still_answer() {
    let mut guest = Guest::ready();
    let (mut link, mut stream) = guest.dialled(22, 1 << 20);
    let question = Pattern(1).bytes(30_000);
    stream.write_all(&question).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut got = Vec::new();
    loop {
        let (header, data) = guest.next();
        got.extend(data);
        if header.op == Op::Shutdown as u16 {
            assert_eq!(header.flags, 2);
            break;
        }
    }
    assert!(got == question);
    // At rest, although the stream stays at its end for ever.
    assert_eq!(guest.turn(20), 0);
    let header = link.data(6);
    guest.send(header, b"answer");
    guest.send(link.shutdown(3), &[]);
    assert_eq!(guest.op(), Op::Rst as u16);
    assert_eq!(read_all(&mut guest, &mut stream), b"answer");
    gone(&mut guest);
}

#[test]
fn the_end_of_the_guests_data_reaches_the_host_after_the_data_and_the_host_may_still_answer() {
    let mut guest = Guest::ready();
    let (mut link, mut stream) = guest.opened(50, 1 << 20);
    let sent = stuff(&mut guest, &mut link, 2);
    guest.send(link.shutdown(2), &[]);
    assert!(read_all(&mut guest, &mut stream) == sent);
    stream.set_nonblocking(false).unwrap();
    stream.write_all(b"thanks").unwrap();
    let answer = loop {
        let (header, data) = guest.next();
        if header.op == Op::Rw as u16 {
            break data;
        }
    };
    assert_eq!(answer, b"thanks");
    drop(stream);
    let header = guest.next().0;
    assert_eq!((header.op, header.flags), (Op::Shutdown as u16, 3));
    guest.send(link.header(Op::Rst), &[]);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn what_the_host_sent_before_it_closed_reaches_the_guest() {
    let mut guest = Guest::ready();
    let (mut link, mut stream) = guest.dialled(22, 5_000);
    let sent = Pattern(3).bytes(100_000);
    stream.write_all(&sent).unwrap();
    drop(stream);
    let mut got = Vec::new();
    loop {
        let (header, data) = guest.next();
        got.extend(data);
        if header.op == Op::Shutdown as u16 && header.flags == 3 {
            break;
        }
        link.fwd_cnt = u32::try_from(got.len()).unwrap();
        guest.send(link.header(Op::CreditUpdate), &[]);
    }
    assert!(got == sent);
    // The timer for starved connections may ring once more.
    guest.turn(20);
    assert_eq!(guest.turn(20), 0);
    guest.send(link.header(Op::Rst), &[]);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn what_the_guest_sent_before_it_closed_reaches_the_host() {
    for rude in [false, true] {
        let mut guest = Guest::ready();
        let (mut link, mut stream) = guest.opened(50, 4096);
        let sent = stuff(&mut guest, &mut link, 4);
        if rude {
            guest.send(link.header(Op::Rst), &[]);
            guest.silent();
        } else {
            guest.send(link.shutdown(3), &[]);
            assert_eq!(guest.op(), Op::Rst as u16);
        }
        // The guest may use the same ports at once.
        let (mut again, mut second) = guest.opened(50, 4096);
        let header = again.data(3);
        guest.send(header, b"new");
        let mut new = [0; 3];
        second.read_exact(&mut new).unwrap();
        assert_eq!(&new, b"new");
        assert!(read_all(&mut guest, &mut stream) == sent);
        guest.send(again.header(Op::Rst), &[]);
        gone(&mut guest);
    }
}

#[test]
fn a_host_that_stops_reading_stops_the_guest() {
    let mut guest = Guest::ready();
    let (mut link, stream) = guest.opened(50, 4096);
    stuff(&mut guest, &mut link, 5);
    drop(stream);
    let mut told = 0;
    while told != 3 {
        let header = guest.next().0;
        if header.op == Op::Shutdown as u16 {
            told = header.flags;
        }
        link.heard(&header);
    }
    // What was on its way meanwhile is dropped, not punished.
    let header = link.data(1_000);
    guest.send(header, &[1; 1_000]);
    guest.silent();
    guest.send(link.header(Op::Rst), &[]);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_host_that_only_stops_reading_may_go_on_sending() {
    let mut guest = Guest::ready();
    let (mut link, mut stream) = guest.opened(50, 4096);
    stream.shutdown(Shutdown::Read).unwrap();
    let header = link.data(3);
    guest.send(header, b"abc");
    let header = guest.next().0;
    assert_eq!((header.op, header.flags), (Op::Shutdown as u16, 1));
    stream.write_all(b"still here").unwrap();
    assert_eq!(guest.next().1, b"still here");
}

#[test]
fn a_guest_that_stops_receiving_stops_the_host() {
    let mut guest = Guest::ready();
    let (mut link, mut stream) = guest.opened(50, 4096);
    guest.send(link.shutdown(1), &[]);
    let error = stream.write_all(&[0; 10]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    let header = link.data(3);
    guest.send(header, b"abc");
    let mut got = [0; 3];
    stream.read_exact(&mut got).unwrap();
    drop(stream);
    let header = guest.next().0;
    assert_eq!((header.op, header.flags), (Op::Shutdown as u16, 3));
}

#[test]
fn a_guest_that_does_not_confirm_the_end_is_reset() {
    let mut guest = Guest::ready();
    let (_, stream) = guest.opened(50, 4096);
    guest.set_patience(30, 30, 30);
    drop(stream);
    assert_eq!(guest.op(), Op::Shutdown as u16);
    assert_eq!(guest.op(), Op::Rst as u16);
    assert_eq!(guest.device.connections(), 0);
    guest.silent();
}

#[test]
fn both_may_close_at_once() {
    let mut guest = Guest::ready();
    let (link, stream) = guest.opened(50, 4096);
    drop(stream);
    assert_eq!(guest.op(), Op::Shutdown as u16);
    guest.send(link.shutdown(3), &[]);
    assert_eq!(guest.op(), Op::Rst as u16);
    guest.send(link.header(Op::Rst), &[]);
    guest.silent();
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_copy_of_the_stream_that_the_host_kept_does_not_keep_it_open() {
    let mut guest = Guest::ready();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let kept = theirs.try_clone().unwrap();
    guest.device.connect(22, theirs.into()).unwrap();
    guest.interrupted();
    let request = guest.next().0;
    guest.send(Link::new(22, request.src_port, 0).header(Op::Rst), &[]);
    assert_eq!(ours.read(&mut [0; 1]).unwrap(), 0);
    // Nor does it keep the event loop busy.
    assert_eq!(guest.turn(20), 0);
    drop(kept);
}

fn ends(stream: &mut UnixStream) {
    let limit = Some(Duration::from_secs(5));
    stream.set_read_timeout(limit).unwrap();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn a_reset_by_the_driver_closes_every_stream_and_a_new_driver_starts_afresh() {
    let mut guest = Guest::ready();
    let mut streams: Vec<_> = (0..20).map(|p| guest.opened(p, 4096).1).collect();
    streams.extend((0..20).map(|p| guest.dialled(p, 4096).1));
    guest.device.reset();
    assert_eq!(guest.device.connections(), 0);
    streams.iter_mut().for_each(ends);
    assert_eq!(guest.turn(20), 0);
    guest.activate();
    guest.fill();
    let (_, mut stream) = guest.dialled(22, 4096);
    stream.write_all(b"again").unwrap();
    assert_eq!(guest.next().1, b"again");
}

#[test]
fn a_device_that_failed_closes_every_stream() {
    let mut guest = Guest::ready();
    let (_, mut stream) = guest.opened(50, 4096);
    guest.rings[1].set_avail_idx(40_000);
    assert!(guest.device.queue_event(1).is_err());
    ends(&mut stream);
    assert!(guest.device.queue_event(1).is_ok());
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn no_descriptor_is_left_behind() {
    // Tests share a process and its descriptors: this one runs in a process of its own.
    const CHILD: &str = "VSOCK_DESCRIPTOR_TEST";
    if std::env::var_os(CHILD).is_none() {
        let name = concat!(module_path!(), "::no_descriptor_is_left_behind");
        let outcome = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--test-threads=1"])
            .arg(name.split_once("::").unwrap().1)
            .env(CHILD, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&outcome.stdout);
        assert!(said.contains("1 passed"), "{said}");
        return;
    }
    let mut guest = Guest::ready();
    guest.set_patience(10, 10, 10);
    let before = descriptors();
    for end in 0..6 {
        let (link, stream) = guest.opened(50, 4096);
        let mut stream = Some(stream);
        guest.connect(22).1.unwrap();
        match end {
            0 => guest.send(link.header(Op::Rst), &[]),
            1 => guest.send(link.shutdown(3), &[]),
            2 => stream = None,
            3 => guest.device.transport_reset().unwrap(),
            4 => guest.device.reset(),
            _ => guest.rings[0].set_avail_idx(40_000),
        }
        if end == 5 {
            assert!(guest.device.queue_event(1).is_ok());
            assert!(guest.connect(22).1.is_err());
        }
        if end == 4 {
            guest.activate();
            guest.fill();
        }
        gone(&mut guest);
        drop(stream);
        guest.settle();
        guest.inbox.clear();
        while guest.host.try_recv().is_ok() {}
        // A failed device has closed its timer, too.
        assert_eq!(descriptors(), before - usize::from(end == 5), "{end}");
    }
}

#[test]
fn a_transport_reset_drops_everything_and_the_guest_is_told_once() {
    let mut guest = Guest::ready();
    let (_, mut first) = guest.opened(50, 4096);
    let (_, mut second) = guest.dialled(22, 4096);
    let memory = guest.around.memory.clone();
    memory
        .write_slice(&[0xff; 8], GuestAddress(0x4_0000))
        .unwrap();
    // The guest has no event buffer yet: it is told once it has.
    guest.device.transport_reset().unwrap();
    assert_eq!(guest.device.connections(), 0);
    ends(&mut first);
    ends(&mut second);
    guest.silent();
    guest.rings[2].add(&[writable(0x4_0000, 4)]);
    guest.kick(2).unwrap();
    assert_eq!(guest.events, 1);
    let mut event = [0; 8];
    memory
        .read_slice(&mut event, GuestAddress(0x4_0000))
        .unwrap();
    assert_eq!(event, [0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    guest.rings[2].add(&[writable(0x4_0000, 4)]);
    guest.device.queue_event(2).unwrap();
    guest.interrupted();
    assert_eq!(guest.events, 1);
    guest.device.transport_reset().unwrap();
    guest.interrupted();
    assert_eq!(guest.events, 2);
    guest.opened(50, 4096);
}
