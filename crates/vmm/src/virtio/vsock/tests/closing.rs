//! Regular and irregular closing of connections: no data is lost, and no resources leak. The flags
//! of a shutdown packet are 1 if its sender will receive no more, 2 if it will send no more, and 3
//! for both (`header::SHUT_*`).

use super::super::header::VsockOp;
use super::guest::{EVENT_QUEUE, RX_QUEUE, TX_QUEUE};
use super::{GuestSocket, Pattern, VsockGuest};
use crate::virtio::VirtioDevice;
use crate::virtio::testing::writable;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress};

/// Address of the buffer for events.
const EVENT_ADDRESS: u64 = 0x4_0000;

/// Sends data of the guest until its credit is used. The host does not read, so the stream and the
/// device's backlog are full. Returns the sent bytes.
fn fill_window(guest: &mut VsockGuest, link: &mut GuestSocket, seed: u64) -> Vec<u8> {
    let mut pattern = Pattern(seed);
    let mut sent = Vec::new();
    while link.available() > 0 {
        let bytes = pattern.bytes(link.available().min(60_000));
        let header = link.data(bytes.len());
        guest.send(header, &bytes);
        sent.extend(bytes);
        guest.run_until_idle();
        for (header, _) in guest.received.drain(..) {
            link.update_credit(&header);
        }
    }
    sent
}

/// Reads to the end of the stream while the device is served.
fn read_all(guest: &mut VsockGuest, stream: &mut UnixStream) -> Vec<u8> {
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
                guest.poll_events(5);
            }
            Err(e) => panic!("{e}"),
        }
    }
}

/// Waits until the device has no connection.
fn wait_until_closed(guest: &mut VsockGuest) {
    let limit = Instant::now() + Duration::from_secs(5);
    while guest.device.connections() > 0 {
        assert!(Instant::now() < limit);
        guest.poll_events(5);
    }
}

#[test]
fn the_end_of_the_hosts_data_reaches_the_guest_after_the_data_and_the_guest_may_still_answer() {
    let mut guest = VsockGuest::ready();
    let (mut link, mut stream) = guest.connected_by_host(22, 1 << 20);
    let question = Pattern(1).bytes(30_000);
    stream.write_all(&question).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut got = Vec::new();
    loop {
        let (header, data) = guest.next();
        got.extend(data);
        if header.op == VsockOp::Shutdown as u16 {
            assert_eq!(header.flags, 2);
            break;
        }
    }
    assert!(got == question);
    // The device no longer waits for the stream, which is at its end and therefore always readable.
    guest.assert_quiet();
    let header = link.data(6);
    guest.send(header, b"answer");
    guest.send(link.shutdown(3), &[]);
    assert_eq!(guest.op(), VsockOp::Rst as u16);
    assert_eq!(read_all(&mut guest, &mut stream), b"answer");
    wait_until_closed(&mut guest);
}

#[test]
fn the_end_of_the_guests_data_reaches_the_host_after_the_data_and_the_host_may_still_answer() {
    let mut guest = VsockGuest::ready();
    let (mut link, mut stream) = guest.connected_by_guest(50, 1 << 20);
    let sent = fill_window(&mut guest, &mut link, 2);
    guest.send(link.shutdown(2), &[]);
    assert!(read_all(&mut guest, &mut stream) == sent);
    stream.set_nonblocking(false).unwrap();
    stream.write_all(b"thanks").unwrap();
    let answer = loop {
        let (header, data) = guest.next();
        if header.op == VsockOp::Rw as u16 {
            break data;
        }
    };
    assert_eq!(answer, b"thanks");
    drop(stream);
    let header = guest.next().0;
    assert_eq!((header.op, header.flags), (VsockOp::Shutdown as u16, 3));
    guest.send(link.header(VsockOp::Rst), &[]);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn data_that_the_host_sent_before_it_closed_reaches_the_guest() {
    let mut guest = VsockGuest::ready();
    let (mut link, mut stream) = guest.connected_by_host(22, 5_000);
    let sent = Pattern(3).bytes(100_000);
    stream.write_all(&sent).unwrap();
    drop(stream);
    let mut got = Vec::new();
    loop {
        let (header, data) = guest.next();
        got.extend(data);
        if header.op == VsockOp::Shutdown as u16 && header.flags == 3 {
            break;
        }
        link.fwd_cnt = u32::try_from(got.len()).unwrap();
        guest.send(link.header(VsockOp::CreditUpdate), &[]);
    }
    assert!(got == sent);
    guest.assert_quiet();
    guest.send(link.header(VsockOp::Rst), &[]);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn data_that_the_guest_sent_before_it_closed_reaches_the_host() {
    for is_reset in [false, true] {
        let mut guest = VsockGuest::ready();
        let (mut link, mut stream) = guest.connected_by_guest(50, 4096);
        let sent = fill_window(&mut guest, &mut link, 4);
        if is_reset {
            guest.send(link.header(VsockOp::Rst), &[]);
            guest.assert_idle();
        } else {
            guest.send(link.shutdown(3), &[]);
            assert_eq!(guest.op(), VsockOp::Rst as u16);
        }
        // The guest may use the same ports again at once.
        let (mut second_link, mut second) = guest.connected_by_guest(50, 4096);
        let header = second_link.data(3);
        guest.send(header, b"new");
        let mut new = [0; 3];
        second.read_exact(&mut new).unwrap();
        assert_eq!(&new, b"new");
        assert!(read_all(&mut guest, &mut stream) == sent);
        guest.send(second_link.header(VsockOp::Rst), &[]);
        wait_until_closed(&mut guest);
    }
}

#[test]
fn a_host_that_stops_reading_stops_the_guest() {
    let mut guest = VsockGuest::ready();
    let (mut link, stream) = guest.connected_by_guest(50, 4096);
    fill_window(&mut guest, &mut link, 5);
    drop(stream);
    let mut announced = 0;
    while announced != 3 {
        let header = guest.next().0;
        if header.op == VsockOp::Shutdown as u16 {
            announced = header.flags;
        }
        link.update_credit(&header);
    }
    // Data that was in flight is dropped without a reset.
    let header = link.data(1_000);
    guest.send(header, &[1; 1_000]);
    guest.assert_idle();
    guest.send(link.header(VsockOp::Rst), &[]);
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_host_that_only_stops_reading_may_continue_to_send() {
    let mut guest = VsockGuest::ready();
    let (mut link, mut stream) = guest.connected_by_guest(50, 4096);
    stream.shutdown(Shutdown::Read).unwrap();
    let header = link.data(3);
    guest.send(header, b"abc");
    let header = guest.next().0;
    assert_eq!((header.op, header.flags), (VsockOp::Shutdown as u16, 1));
    stream.write_all(b"still here").unwrap();
    assert_eq!(guest.next().1, b"still here");
}

#[test]
fn a_guest_that_stops_receiving_stops_the_host() {
    let mut guest = VsockGuest::ready();
    let (mut link, mut stream) = guest.connected_by_guest(50, 4096);
    guest.send(link.shutdown(1), &[]);
    let error = stream.write_all(&[0; 10]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    let header = link.data(3);
    guest.send(header, b"abc");
    let mut got = [0; 3];
    stream.read_exact(&mut got).unwrap();
    drop(stream);
    let header = guest.next().0;
    assert_eq!((header.op, header.flags), (VsockOp::Shutdown as u16, 3));
}

#[test]
fn a_guest_that_does_not_confirm_the_end_is_reset() {
    let mut guest = VsockGuest::ready();
    let (_, stream) = guest.connected_by_guest(50, 4096);
    guest.set_timeouts(30, 30, 30);
    drop(stream);
    assert_eq!(guest.op(), VsockOp::Shutdown as u16);
    assert_eq!(guest.op(), VsockOp::Rst as u16);
    assert_eq!(guest.device.connections(), 0);
    guest.assert_idle();
}

#[test]
fn both_sides_may_close_at_the_same_time() {
    let mut guest = VsockGuest::ready();
    let (link, stream) = guest.connected_by_guest(50, 4096);
    drop(stream);
    assert_eq!(guest.op(), VsockOp::Shutdown as u16);
    guest.send(link.shutdown(3), &[]);
    assert_eq!(guest.op(), VsockOp::Rst as u16);
    guest.send(link.header(VsockOp::Rst), &[]);
    guest.assert_idle();
    assert_eq!(guest.device.connections(), 0);
}

#[test]
fn a_duplicate_of_the_stream_does_not_keep_the_connection_open() {
    let mut guest = VsockGuest::ready();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let duplicate = theirs.try_clone().unwrap();
    guest.device.connect(22, theirs.into()).unwrap();
    guest.handle_interrupt();
    let request = guest.next().0;
    guest.send(
        GuestSocket::new(22, request.src_port, 0).header(VsockOp::Rst),
        &[],
    );
    assert_eq!(ours.read(&mut [0; 1]).unwrap(), 0);
    // The event loop is idle.
    guest.assert_quiet();
    drop(duplicate);
}

fn assert_stream_ended(stream: &mut UnixStream) {
    let limit = Some(Duration::from_secs(5));
    stream.set_read_timeout(limit).unwrap();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn a_reset_by_the_driver_closes_every_stream_and_a_new_driver_works() {
    let mut guest = VsockGuest::ready();
    let mut streams: Vec<_> = (0..20)
        .map(|p| guest.connected_by_guest(p, 4096).1)
        .collect();
    streams.extend((0..20).map(|p| guest.connected_by_host(p, 4096).1));
    guest.device.reset();
    assert_eq!(guest.device.connections(), 0);
    streams.iter_mut().for_each(assert_stream_ended);
    assert_eq!(guest.poll_events(20), 0);
    guest.activate();
    guest.fill();
    let (_, mut stream) = guest.connected_by_host(22, 4096);
    stream.write_all(b"again").unwrap();
    assert_eq!(guest.next().1, b"again");
}

#[test]
fn a_device_that_failed_closes_every_stream() {
    let mut guest = VsockGuest::ready();
    let (_, mut stream) = guest.connected_by_guest(50, 4096);
    // The index is invalid: it is ahead of the device by more than the size of the ring.
    guest.rings[TX_QUEUE].set_avail_idx(40_000);
    assert!(guest.device.queue_event(TX_QUEUE).is_err());
    assert_stream_ended(&mut stream);
    // A failed device ignores kicks.
    assert!(guest.device.queue_event(TX_QUEUE).is_ok());
}

/// Returns the number of open descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn no_descriptor_leaks() {
    // Tests share a process and its descriptors, so this test runs in a separate process.
    const CHILD: &str = "VSOCK_DESCRIPTOR_TEST";
    if std::env::var_os(CHILD).is_none() {
        let name = concat!(module_path!(), "::no_descriptor_leaks");
        let outcome = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--test-threads=1"])
            .arg(name.split_once("::").unwrap().1)
            .env(CHILD, "1")
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&outcome.stdout);
        assert!(output.contains("1 passed"), "{output}");
        return;
    }
    let mut guest = VsockGuest::ready();
    guest.set_timeouts(10, 10, 10);
    let before = descriptors();
    // Each round ends the connections in another way.
    for end in 0..6 {
        let (link, stream) = guest.connected_by_guest(50, 4096);
        let mut stream = Some(stream);
        guest.connect(22).1.unwrap();
        match end {
            0 => guest.send(link.header(VsockOp::Rst), &[]),
            1 => guest.send(link.shutdown(3), &[]),
            2 => stream = None,
            3 => guest.device.transport_reset().unwrap(),
            4 => guest.device.reset(),
            _ => guest.rings[RX_QUEUE].set_avail_idx(40_000),
        }
        if end == 5 {
            // The device does not use the broken receive ring before it has a packet to send.
            assert!(guest.device.queue_event(TX_QUEUE).is_ok());
            assert!(guest.connect(22).1.is_err());
        }
        if end == 4 {
            // A reset device needs a new driver.
            guest.activate();
            guest.fill();
        }
        wait_until_closed(&mut guest);
        drop(stream);
        guest.run_until_idle();
        guest.received.clear();
        while guest.host.try_recv().is_ok() {}
        // A failed device has also closed its timer, whose descriptor existed before the loop.
        assert_eq!(descriptors(), before - usize::from(end == 5), "{end}");
    }
}

#[test]
fn a_transport_reset_drops_everything_and_sends_one_event() {
    let mut guest = VsockGuest::ready();
    let (_, mut first) = guest.connected_by_guest(50, 4096);
    let (_, mut second) = guest.connected_by_host(22, 4096);
    let memory = guest.harness.memory.clone();
    memory
        .write_slice(&[0xff; 8], GuestAddress(EVENT_ADDRESS))
        .unwrap();
    // The guest has no event buffer yet: the event is sent when a buffer is available.
    guest.device.transport_reset().unwrap();
    assert_eq!(guest.device.connections(), 0);
    assert_stream_ended(&mut first);
    assert_stream_ended(&mut second);
    guest.assert_idle();
    guest.rings[EVENT_QUEUE].add(&[writable(EVENT_ADDRESS, 4)]);
    guest.kick(EVENT_QUEUE).unwrap();
    assert_eq!(guest.events, 1);
    let mut event = [0; 8];
    memory
        .read_slice(&mut event, GuestAddress(EVENT_ADDRESS))
        .unwrap();
    // The device wrote only the 4 bytes of the event, whose id is 0 (transport reset).
    assert_eq!(event, [0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    // A further buffer does not cause a second event.
    guest.rings[EVENT_QUEUE].add(&[writable(EVENT_ADDRESS, 4)]);
    guest.device.queue_event(EVENT_QUEUE).unwrap();
    guest.handle_interrupt();
    assert_eq!(guest.events, 1);
    guest.device.transport_reset().unwrap();
    guest.handle_interrupt();
    assert_eq!(guest.events, 2);
    guest.connected_by_guest(50, 4096);
}
