use super::*;
use crate::virtio::testing::{Buffer, Ring, Surroundings, memory, readable, writable};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use vm_memory::{Bytes, GuestAddress};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
const BUFFERS: u64 = 0x10_0000;
const OUT: u64 = 0x2_0000;
const MRG: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;

mod kernel;

/// A card over a socket, its driver, and the far end of the wire.
struct Driver {
    net: Net,
    rx: Ring,
    tx: Ring,
    wire: UnixDatagram,
    around: Surroundings,
}

fn file(socket: UnixDatagram) -> File {
    File::from(OwnedFd::from(socket))
}

impl Driver {
    fn new(features: u64) -> Self {
        let (card, wire) = UnixDatagram::pair().unwrap();
        wire.set_nonblocking(true).unwrap();
        let net = Net::over_datagrams(file(card), MAC, 1500).unwrap();
        let around = Surroundings::new(memory(4 << 20));
        let mut driver = Self {
            net,
            rx: Ring::new(&around.memory, 0x1000, 256),
            tx: Ring::new(&around.memory, 0x4000, 256),
            wire,
            around,
        };
        driver.activate(features);
        driver
    }

    fn activate(&mut self, features: u64) {
        let queues = vec![self.rx.queue(true), self.tx.queue(true)];
        self.net
            .activate(self.around.activation(queues, features))
            .unwrap();
    }

    /// Runs the event loop until nothing is ready.
    fn settle(&mut self) -> usize {
        let mut events = 0;
        loop {
            let ready = self.around.ready(0);
            if ready.is_empty() {
                return events;
            }
            events += ready.len();
            assert!(events < 1000, "the event loop does not come to rest");
            for ready in ready {
                self.net.host_event(ready.token, ready.flags).unwrap();
            }
        }
    }

    /// A frame comes in from the wire: a header and `bytes` bytes that tell their place.
    fn arrive(&self, bytes: usize) -> Vec<u8> {
        let mut frame = vec![0; HEADER];
        frame.extend((0..bytes).map(|i| u8::try_from(i * 7 % 251).unwrap()));
        self.wire.send(&frame).unwrap();
        frame
    }

    /// Offers a receive buffer of `len` bytes, the `index`th.
    fn offer(&mut self, index: u64, len: u32) {
        self.rx.add(&[writable(BUFFERS + (index << 16), len)]);
    }

    fn bytes(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.around
            .memory
            .read_slice(&mut data, GuestAddress(addr))
            .unwrap();
        data
    }

    fn send(&mut self, header: [u8; HEADER], payload: &[u8]) -> Result<(), DeviceError> {
        let memory = &self.around.memory;
        memory.write_slice(&header, GuestAddress(OUT)).unwrap();
        memory.write_slice(payload, GuestAddress(OUT + 12)).unwrap();
        let len = u32::try_from(payload.len()).unwrap();
        self.tx.add(&[readable(OUT, 7), readable(OUT + 7, 5 + len)]);
        self.net.queue_event(TX)
    }

    fn refused(features: u64, index: usize, buffers: &[Buffer]) {
        let mut driver = Self::new(features);
        driver.arrive(60);
        driver.settle();
        let ring = if index == RX {
            &mut driver.rx
        } else {
            &mut driver.tx
        };
        ring.add(buffers);
        let outcome = driver.net.queue_event(index);
        assert!(matches!(outcome, Err(DeviceError::Guest(_))), "{outcome:?}");
        let _ = driver.net.queue_event(index);
        let _ = driver.net.host_event(TAP, EpollFlags::EPOLLIN);
    }
}

#[test]
fn a_frame_arrives_in_the_guest_with_one_interrupt() {
    let mut driver = Driver::new(MRG);
    driver.offer(0, 2048);
    driver.offer(1, 2048);
    driver.net.queue_event(RX).unwrap();
    let first = driver.arrive(1500);
    let second = driver.arrive(60);
    driver.settle();
    assert_eq!(driver.rx.used(), [(0, 1512), (1, 72)]);
    assert_eq!(driver.around.interrupt.queue_count(), 1);
    assert_eq!(driver.bytes(BUFFERS + 12, 1500), first[12..]);
    assert_eq!(driver.bytes(BUFFERS + 0x1000c, 60), second[12..]);
    assert_eq!(driver.bytes(BUFFERS + 10, 2), [1, 0]);
    assert_eq!(driver.net.counters().rx_frames, 2);
}

#[test]
fn a_long_frame_is_spread_over_several_buffers_and_published_at_once() {
    let mut driver = Driver::new(MRG);
    for i in 0..4 {
        driver.offer(i, 1000);
    }
    let frame = driver.arrive(2500);
    driver.settle();
    assert_eq!(driver.rx.used(), [(0, 1000), (1, 1000), (2, 512)]);
    assert_eq!(driver.bytes(BUFFERS + 10, 2), [3, 0]);
    let mut got = driver.bytes(BUFFERS + 12, 988);
    got.extend(driver.bytes(BUFFERS + 0x10000, 1000));
    got.extend(driver.bytes(BUFFERS + 0x20000, 512));
    assert_eq!(got, frame[12..]);
    // The buffer that was not needed serves the next frame.
    driver.arrive(60);
    driver.settle();
    assert_eq!(driver.rx.used(), [(3, 72)]);
}

#[test]
fn a_frame_waits_for_buffers_without_a_busy_loop() {
    let mut driver = Driver::new(MRG);
    driver.arrive(100);
    driver.arrive(200);
    assert_eq!(driver.settle(), 1);
    assert_eq!(driver.rx.avail_event(), 0);
    driver.offer(0, 2048);
    driver.net.queue_event(RX).unwrap();
    assert_eq!(driver.rx.used(), [(0, 112)]);
    driver.offer(1, 2048);
    driver.net.queue_event(RX).unwrap();
    assert_eq!(driver.rx.used(), [(1, 212)]);
    assert_eq!(driver.settle(), 0);
}

#[test]
fn a_frame_longer_than_the_buffers_at_hand_waits_for_one_more() {
    let mut driver = Driver::new(MRG);
    driver.offer(0, 1000);
    driver.arrive(1900);
    driver.settle();
    assert!(driver.rx.used().is_empty());
    // The kick is asked for behind the buffer that is there already.
    assert_eq!(driver.rx.avail_event(), 1);
    driver.offer(1, 1000);
    driver.net.queue_event(RX).unwrap();
    assert_eq!(driver.rx.used(), [(0, 1000), (1, 912)]);
}

#[test]
fn without_mergeable_buffers_a_frame_that_does_not_fit_is_dropped() {
    let mut driver = Driver::new(0);
    driver.offer(0, 1000);
    driver.arrive(1500);
    driver.arrive(100);
    driver.settle();
    assert_eq!(driver.rx.used(), [(0, 112)]);
    assert_eq!(driver.bytes(BUFFERS + 10, 2), [1, 0]);
    assert_eq!(driver.net.counters().rx_dropped, 1);
}

#[test]
fn a_ring_full_of_tiny_buffers_does_not_stop_the_card() {
    let mut driver = Driver::new(MRG);
    for _ in 0..256 {
        driver.offer(0, 1);
    }
    driver.arrive(1500);
    driver.arrive(100);
    driver.settle();
    assert_eq!(driver.net.counters().rx_dropped, 1);
    assert_eq!(driver.rx.used().len(), 112);
}

#[test]
fn a_flood_is_taken_in_turns() {
    let mut driver = Driver::new(MRG);
    let mut total = 0;
    for round in 0..30 {
        for _ in 0..8 {
            driver.arrive(60);
        }
        for i in 0..8 {
            driver.offer((round * 8 + i) % 16, 256);
        }
        driver.net.queue_event(RX).unwrap();
        driver.settle();
        total += driver.rx.used().len();
    }
    assert_eq!(total, 240);
}

#[test]
fn a_sent_frame_reaches_the_wire_as_it_is() {
    let mut driver = Driver::new(0);
    let payload: Vec<u8> = (0..200).collect();
    driver.send([0; HEADER], &payload).unwrap();
    assert_eq!(driver.tx.used(), [(0, 0)]);
    let mut frame = [0; 300];
    assert_eq!(driver.wire.recv(&mut frame).unwrap(), 212);
    assert_eq!(frame[12..212], payload);
    assert_eq!(driver.net.counters().tx_frames, 1);
    assert_eq!(driver.around.interrupt.queue_count(), 1);
}

#[test]
fn the_largest_frame_is_sent_and_a_larger_one_is_refused() {
    let mut driver = Driver::new(0);
    driver
        .send([0; HEADER], &vec![1; MAX_FRAME - HEADER])
        .unwrap();
    assert_eq!(driver.wire.recv(&mut vec![0; 70_000]).unwrap(), MAX_FRAME);
    let outcome = driver.send([0; HEADER], &vec![1; MAX_FRAME - HEADER + 1]);
    assert!(matches!(outcome, Err(DeviceError::Guest(_))));
}

#[test]
fn offloads_that_were_not_negotiated_are_dropped() {
    let csum = 1 << VIRTIO_NET_F_CSUM;
    let tso4 = 1 << VIRTIO_NET_F_HOST_TSO4;
    for (features, flags, gso, passes) in [
        (0, 0, 0, true),
        (0, 1, 0, false),
        (csum, 1, 0, true),
        (csum, 1, 1, false),
        (csum | tso4, 1, 1, true),
        (csum | tso4, 0, 1, false),
        (csum | tso4, 1, 4, false),
        (u64::MAX, 1, 4, true),
        (u64::MAX, 1, 3, false),
        (u64::MAX, 1, 0x81, false),
        (u64::MAX, 1, 0xff, false),
    ] {
        let mut driver = Driver::new(features & driver_features());
        let mut header = [0; HEADER];
        (header[0], header[1], header[10]) = (flags, gso, 9);
        driver.send(header, &[0; 60]).unwrap();
        assert_eq!(driver.tx.used().len(), 1);
        let mut frame = [0; 100];
        assert_eq!(
            driver.wire.recv(&mut frame).is_ok(),
            passes,
            "{features:x} {gso}"
        );
        assert_eq!(driver.net.counters().tx_dropped, u64::from(!passes));
        assert_eq!(frame[10], 0);
    }
}

fn driver_features() -> u64 {
    let (card, _wire) = UnixDatagram::pair().unwrap();
    Net::over_datagrams(file(card), MAC, 1500)
        .unwrap()
        .features()
}

#[test]
fn malformed_buffers_are_refused() {
    Driver::refused(0, TX, &[readable(OUT, 11)]);
    Driver::refused(0, TX, &[readable(OUT, 0)]);
    Driver::refused(0, TX, &[readable(OUT, 64), writable(OUT, 1)]);
    Driver::refused(0, TX, &[writable(OUT, 64)]);
    Driver::refused(0, TX, &[readable(OUT, u32::MAX)]);
    Driver::refused(0, TX, &[readable(4 << 20, 64)]);
    for features in [0, MRG] {
        Driver::refused(features, RX, &[readable(OUT, 2048)]);
        Driver::refused(features, RX, &[writable(OUT, 0)]);
        Driver::refused(features, RX, &[readable(OUT, 12), writable(OUT, 2048)]);
        Driver::refused(features, RX, &[writable(4 << 20, 2048)]);
    }
}

#[test]
fn a_tap_that_refuses_is_counted_and_the_device_lives_on() {
    let mut driver = Driver::new(0);
    let (other, wire) = UnixDatagram::pair().unwrap();
    drop(std::mem::replace(&mut driver.wire, wire));
    drop(other);
    driver.send([0; HEADER], &[0; 60]).unwrap();
    driver.settle();
    let counters = driver.net.counters();
    assert_eq!(counters.tx_dropped, 1);
    assert!(counters.tap_errors >= 1);
}

#[test]
fn the_configuration_names_address_and_mtu() {
    let driver = Driver::new(0);
    let mut config = [0xff; 14];
    driver.net.read_config(0, &mut config);
    assert_eq!(config[..6], MAC);
    assert_eq!(config[6..12], [0, 0, 0, 0, 0xdc, 5]);
    assert_eq!(config[12..], [0xff; 2]);
    driver.net.read_config(u64::MAX, &mut config);
    let (card, _wire) = UnixDatagram::pair().unwrap();
    assert!(matches!(
        Net::over_datagrams(file(card), MAC, 67),
        Err(NetError::Mtu(67))
    ));
}

#[test]
fn a_descriptor_that_is_no_tap_is_refused() {
    let (card, _wire) = UnixDatagram::pair().unwrap();
    assert!(matches!(
        Net::new(file(card), MAC, 1500),
        Err(NetError::Tap(_))
    ));
}

#[test]
fn it_serves_again_after_a_reset_and_the_wire_is_watched_only_while_active() {
    let mut driver = Driver::new(MRG);
    driver.arrive(1000);
    driver.settle();
    driver.net.reset();
    driver.arrive(70);
    assert_eq!(driver.settle(), 0);
    for index in 0..3 {
        driver.net.queue_event(index).unwrap();
    }
    driver.net.host_event(TAP, EpollFlags::EPOLLIN).unwrap();
    driver.rx = Ring::new(&driver.around.memory, 0x1000, 16);
    driver.tx = Ring::new(&driver.around.memory, 0x4000, 16);
    driver.activate(0);
    driver.offer(0, 2048);
    driver.settle();
    assert_eq!(driver.rx.used().len(), 1);
    driver.send([0; HEADER], &[0; 60]).unwrap();
    assert_eq!(driver.wire.recv(&mut [0; 100]).unwrap(), 72);
}
