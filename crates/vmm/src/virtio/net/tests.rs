//! Tests of the network device through a virtqueue, as a driver uses it.
//!
//! Each frame starts with a header of 12 bytes (`HEADER_BYTES`). Bytes 10 and 11 of a received
//! header are the number of buffers that the frame uses.

use super::*;
use crate::virtio::testing::{Buffer, DeviceHarness, Ring, memory, readable, writable};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use vm_memory::{Bytes, GuestAddress};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
/// Addresses in guest memory of the receive buffers, and of the frame that the guest sends.
const RX_BUFFERS_ADDRESS: u64 = 0x10_0000;
const TX_FRAME_ADDRESS: u64 = 0x2_0000;
/// Feature by which a received frame may use several buffers.
const MRG_RXBUF: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;

mod kernel;

/// Interface over a socket, its driver, and the other end of the wire.
struct NetDriver {
    net: Net,
    rx: Ring,
    tx: Ring,
    wire: UnixDatagram,
    harness: DeviceHarness,
}

fn file(socket: UnixDatagram) -> File {
    File::from(OwnedFd::from(socket))
}

impl NetDriver {
    /// Returns a driver of a device whose frames are datagrams of a socket.
    fn new(features: u64) -> Self {
        let (card, wire) = UnixDatagram::pair().unwrap();
        wire.set_nonblocking(true).unwrap();
        let net = Net::over_datagrams(file(card), MAC, 1500).unwrap();
        let harness = DeviceHarness::new(memory(4 << 20));
        let mut driver = Self {
            net,
            rx: Ring::new(&harness.memory, 0x1000, 256),
            tx: Ring::new(&harness.memory, 0x4000, 256),
            wire,
            harness,
        };
        driver.activate(features);
        driver
    }

    fn activate(&mut self, features: u64) {
        let queues = vec![self.rx.queue(true), self.tx.queue(true)];
        self.net
            .activate(self.harness.activation(queues, features))
            .unwrap();
    }

    /// Runs the event loop until nothing is ready.
    fn run_until_idle(&mut self) -> usize {
        let mut events = 0;
        loop {
            let ready = self.harness.ready(0);
            if ready.is_empty() {
                return events;
            }
            events += ready.len();
            assert!(events < 1000, "the event loop does not become idle");
            for ready in ready {
                self.net.host_event(ready.token, ready.flags).unwrap();
            }
        }
    }

    /// Sends a frame from the wire: a header and `bytes` bytes that depend on their offset.
    fn receive_from_wire(&self, bytes: usize) -> Vec<u8> {
        let mut frame = vec![0; HEADER_BYTES];
        frame.extend((0..bytes).map(|i| u8::try_from(i * 7 % 251).unwrap()));
        self.wire.send(&frame).unwrap();
        frame
    }

    /// Adds receive buffer number `index`, of `len` bytes. The buffers start 0x1_0000 bytes apart.
    fn add_rx_buffer(&mut self, index: u64, len: u32) {
        self.rx
            .add(&[writable(RX_BUFFERS_ADDRESS + (index << 16), len)]);
    }

    /// Reads bytes of guest memory.
    fn bytes(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.harness
            .memory
            .read_slice(&mut data, GuestAddress(addr))
            .unwrap();
        data
    }

    /// Sends a frame through the device.
    fn send(&mut self, header: [u8; HEADER_BYTES], payload: &[u8]) -> Result<(), DeviceError> {
        let memory = &self.harness.memory;
        memory
            .write_slice(&header, GuestAddress(TX_FRAME_ADDRESS))
            .unwrap();
        memory
            .write_slice(payload, GuestAddress(TX_FRAME_ADDRESS + 12))
            .unwrap();
        let len = u32::try_from(payload.len()).unwrap();
        // The boundary of the descriptors is inside the header.
        self.tx.add(&[
            readable(TX_FRAME_ADDRESS, 7),
            readable(TX_FRAME_ADDRESS + 7, 5 + len),
        ]);
        self.net.queue_event(TX_QUEUE)
    }

    /// Checks that a device with `features` rejects a chain of these buffers in the queue `index`.
    fn assert_rejected(features: u64, index: usize, buffers: &[Buffer]) {
        let mut driver = Self::new(features);
        driver.receive_from_wire(60);
        driver.run_until_idle();
        let ring = if index == RX_QUEUE {
            &mut driver.rx
        } else {
            &mut driver.tx
        };
        ring.add(buffers);
        let outcome = driver.net.queue_event(index);
        assert!(matches!(outcome, Err(DeviceError::Guest(_))), "{outcome:?}");
        // Further events may fail, but must not panic.
        let _ = driver.net.queue_event(index);
        let _ = driver.net.host_event(TAP_TOKEN, EpollFlags::EPOLLIN);
    }
}

#[test]
fn a_frame_arrives_in_the_guest_with_one_interrupt() {
    let mut driver = NetDriver::new(MRG_RXBUF);
    driver.add_rx_buffer(0, 2048);
    driver.add_rx_buffer(1, 2048);
    driver.net.queue_event(RX_QUEUE).unwrap();
    let first = driver.receive_from_wire(1500);
    let second = driver.receive_from_wire(60);
    driver.run_until_idle();
    assert_eq!(driver.rx.used(), [(0, 1512), (1, 72)]);
    assert_eq!(driver.harness.interrupt.queue_count(), 1);
    assert_eq!(driver.bytes(RX_BUFFERS_ADDRESS + 12, 1500), first[12..]);
    let second_buffer = RX_BUFFERS_ADDRESS + 0x1_0000;
    assert_eq!(driver.bytes(second_buffer + 12, 60), second[12..]);
    assert_eq!(driver.bytes(RX_BUFFERS_ADDRESS + 10, 2), [1, 0]);
    assert_eq!(driver.net.counters().rx_frames, 2);
}

#[test]
fn a_long_frame_is_spread_over_several_buffers_and_published_at_once() {
    let mut driver = NetDriver::new(MRG_RXBUF);
    for i in 0..4 {
        driver.add_rx_buffer(i, 1000);
    }
    let frame = driver.receive_from_wire(2500);
    driver.run_until_idle();
    assert_eq!(driver.rx.used(), [(0, 1000), (1, 1000), (2, 512)]);
    assert_eq!(driver.bytes(RX_BUFFERS_ADDRESS + 10, 2), [3, 0]);
    let mut got = driver.bytes(RX_BUFFERS_ADDRESS + 12, 988);
    got.extend(driver.bytes(RX_BUFFERS_ADDRESS + 0x10000, 1000));
    got.extend(driver.bytes(RX_BUFFERS_ADDRESS + 0x20000, 512));
    assert_eq!(got, frame[12..]);
    // The unused buffer receives the next frame.
    driver.receive_from_wire(60);
    driver.run_until_idle();
    assert_eq!(driver.rx.used(), [(3, 72)]);
}

#[test]
fn a_frame_waits_for_buffers_without_a_busy_loop() {
    let mut driver = NetDriver::new(MRG_RXBUF);
    driver.receive_from_wire(100);
    driver.receive_from_wire(200);
    assert_eq!(driver.run_until_idle(), 1);
    assert_eq!(driver.rx.avail_event(), 0);
    driver.add_rx_buffer(0, 2048);
    driver.net.queue_event(RX_QUEUE).unwrap();
    assert_eq!(driver.rx.used(), [(0, 112)]);
    driver.add_rx_buffer(1, 2048);
    driver.net.queue_event(RX_QUEUE).unwrap();
    assert_eq!(driver.rx.used(), [(1, 212)]);
    assert_eq!(driver.run_until_idle(), 0);
}

#[test]
fn a_frame_longer_than_the_available_buffers_waits_for_more() {
    let mut driver = NetDriver::new(MRG_RXBUF);
    driver.add_rx_buffer(0, 1000);
    driver.receive_from_wire(1900);
    driver.run_until_idle();
    assert!(driver.rx.used().is_empty());
    // Kicks are enabled for buffers after the available one.
    assert_eq!(driver.rx.avail_event(), 1);
    driver.add_rx_buffer(1, 1000);
    driver.net.queue_event(RX_QUEUE).unwrap();
    assert_eq!(driver.rx.used(), [(0, 1000), (1, 912)]);
}

#[test]
fn without_mergeable_buffers_a_frame_that_does_not_fit_is_dropped() {
    let mut driver = NetDriver::new(0);
    driver.add_rx_buffer(0, 1000);
    driver.receive_from_wire(1500);
    driver.receive_from_wire(100);
    driver.run_until_idle();
    assert_eq!(driver.rx.used(), [(0, 112)]);
    assert_eq!(driver.bytes(RX_BUFFERS_ADDRESS + 10, 2), [1, 0]);
    assert_eq!(driver.net.counters().rx_dropped, 1);
}

#[test]
fn a_ring_full_of_tiny_buffers_does_not_stop_the_interface() {
    let mut driver = NetDriver::new(MRG_RXBUF);
    for _ in 0..256 {
        driver.add_rx_buffer(0, 1);
    }
    driver.receive_from_wire(1500);
    driver.receive_from_wire(100);
    driver.run_until_idle();
    // The first frame needs more than the 256 buffers of one byte, and the second one 112.
    assert_eq!(driver.net.counters().rx_dropped, 1);
    assert_eq!(driver.rx.used().len(), 112);
}

#[test]
fn a_flood_of_frames_is_handled_in_bounded_steps() {
    let mut driver = NetDriver::new(MRG_RXBUF);
    let mut total = 0;
    for round in 0..30 {
        for _ in 0..8 {
            driver.receive_from_wire(60);
        }
        for i in 0..8 {
            driver.add_rx_buffer((round * 8 + i) % 16, 256);
        }
        driver.net.queue_event(RX_QUEUE).unwrap();
        driver.run_until_idle();
        total += driver.rx.used().len();
    }
    assert_eq!(total, 240);
}

#[test]
fn frames_that_do_not_fit_are_dropped_in_bounded_steps() {
    let mut driver = NetDriver::new(MRG_RXBUF);
    for index in 0..256 {
        driver
            .rx
            .add(&[writable(RX_BUFFERS_ADDRESS + index * 16, 1)]);
    }
    for _ in 0..8 {
        driver.receive_from_wire(300);
    }
    // Each frame is compared with 256 buffers, and 512 frames and buffers are handled at once.
    let mut dropped = vec![0];
    while dropped.last() != Some(&8) {
        for ready in driver.harness.ready(0) {
            driver.net.host_event(ready.token, ready.flags).unwrap();
            dropped.push(driver.net.counters().rx_dropped);
        }
    }
    assert_eq!(dropped, [0, 2, 4, 6, 8]);
    assert!(driver.rx.used().is_empty());
}

#[test]
fn a_sent_frame_reaches_the_tap_unchanged() {
    let mut driver = NetDriver::new(0);
    let payload: Vec<u8> = (0..200).collect();
    driver.send([0; HEADER_BYTES], &payload).unwrap();
    assert_eq!(driver.tx.used(), [(0, 0)]);
    let mut frame = [0; 300];
    assert_eq!(driver.wire.recv(&mut frame).unwrap(), 212);
    assert_eq!(frame[12..212], payload);
    assert_eq!(driver.net.counters().tx_frames, 1);
    assert_eq!(driver.harness.interrupt.queue_count(), 1);
}

#[test]
fn the_largest_frame_is_sent_and_a_larger_frame_is_rejected() {
    let mut driver = NetDriver::new(0);
    driver
        .send([0; HEADER_BYTES], &vec![1; MAX_FRAME_BYTES - HEADER_BYTES])
        .unwrap();
    assert_eq!(
        driver.wire.recv(&mut vec![0; 70_000]).unwrap(),
        MAX_FRAME_BYTES
    );
    let outcome = driver.send(
        [0; HEADER_BYTES],
        &vec![1; MAX_FRAME_BYTES - HEADER_BYTES + 1],
    );
    assert!(matches!(outcome, Err(DeviceError::Guest(_))));
}

#[test]
fn offloads_that_were_not_negotiated_are_dropped() {
    let csum = 1 << VIRTIO_NET_F_CSUM;
    let tso4 = 1 << VIRTIO_NET_F_HOST_TSO4;
    // GSO types: 1 is TCPv4, 3 UDP, 4 TCPv6, and 0x80 the ECN flag. Flag 1 is NEEDS_CSUM.
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
        let mut driver = NetDriver::new(features & driver_features());
        let mut header = [0; HEADER_BYTES];
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

/// Returns the features that the device offers.
fn driver_features() -> u64 {
    let (card, _wire) = UnixDatagram::pair().unwrap();
    Net::over_datagrams(file(card), MAC, 1500)
        .unwrap()
        .features()
}

#[test]
fn malformed_buffers_are_rejected() {
    NetDriver::assert_rejected(0, TX_QUEUE, &[readable(TX_FRAME_ADDRESS, 11)]);
    NetDriver::assert_rejected(0, TX_QUEUE, &[readable(TX_FRAME_ADDRESS, 0)]);
    NetDriver::assert_rejected(
        0,
        TX_QUEUE,
        &[
            readable(TX_FRAME_ADDRESS, 64),
            writable(TX_FRAME_ADDRESS, 1),
        ],
    );
    NetDriver::assert_rejected(0, TX_QUEUE, &[writable(TX_FRAME_ADDRESS, 64)]);
    NetDriver::assert_rejected(0, TX_QUEUE, &[readable(TX_FRAME_ADDRESS, u32::MAX)]);
    NetDriver::assert_rejected(0, TX_QUEUE, &[readable(4 << 20, 64)]);
    for features in [0, MRG_RXBUF] {
        NetDriver::assert_rejected(features, RX_QUEUE, &[readable(TX_FRAME_ADDRESS, 2048)]);
        NetDriver::assert_rejected(features, RX_QUEUE, &[writable(TX_FRAME_ADDRESS, 0)]);
        NetDriver::assert_rejected(
            features,
            RX_QUEUE,
            &[
                readable(TX_FRAME_ADDRESS, 12),
                writable(TX_FRAME_ADDRESS, 2048),
            ],
        );
        NetDriver::assert_rejected(features, RX_QUEUE, &[writable(4 << 20, 2048)]);
    }
}

#[test]
fn errors_of_the_tap_are_counted_and_the_device_continues() {
    let mut driver = NetDriver::new(0);
    // Close the other end of the interface's socket.
    let (other, wire) = UnixDatagram::pair().unwrap();
    drop(std::mem::replace(&mut driver.wire, wire));
    drop(other);
    driver.send([0; HEADER_BYTES], &[0; 60]).unwrap();
    driver.run_until_idle();
    let counters = driver.net.counters();
    assert_eq!(counters.tx_dropped, 1);
    assert!(counters.tap_errors >= 1);
}

#[test]
fn the_configuration_names_address_and_mtu() {
    let driver = NetDriver::new(0);
    let mut config = [0xff; 14];
    driver.net.read_config(0, &mut config);
    assert_eq!(config[..6], MAC);
    // Status, maximum number of queue pairs, and MTU: 0x05dc is 1500.
    assert_eq!(config[6..12], [0, 0, 0, 0, 0xdc, 5]);
    assert_eq!(config[12..], [0xff; 2]);
    driver.net.read_config(u64::MAX, &mut config);
    let (card, _wire) = UnixDatagram::pair().unwrap();
    // The minimum MTU is 68.
    assert!(matches!(
        Net::over_datagrams(file(card), MAC, 67),
        Err(NetError::Mtu(67))
    ));
}

#[test]
fn a_descriptor_that_is_not_a_tap_is_rejected() {
    let (card, _wire) = UnixDatagram::pair().unwrap();
    assert!(matches!(
        Net::new(file(card), MAC, 1500),
        Err(NetError::Tap(_))
    ));
}

#[test]
fn a_reset_interface_works_again_and_watches_the_tap_only_while_active() {
    let mut driver = NetDriver::new(MRG_RXBUF);
    driver.receive_from_wire(1000);
    driver.run_until_idle();
    driver.net.reset();
    driver.receive_from_wire(70);
    assert_eq!(driver.run_until_idle(), 0);
    for index in 0..3 {
        driver.net.queue_event(index).unwrap();
    }
    driver
        .net
        .host_event(TAP_TOKEN, EpollFlags::EPOLLIN)
        .unwrap();
    driver.rx = Ring::new(&driver.harness.memory, 0x1000, 16);
    driver.tx = Ring::new(&driver.harness.memory, 0x4000, 16);
    driver.activate(0);
    driver.add_rx_buffer(0, 2048);
    driver.run_until_idle();
    assert_eq!(driver.rx.used().len(), 1);
    driver.send([0; HEADER_BYTES], &[0; 60]).unwrap();
    assert_eq!(driver.wire.recv(&mut [0; 100]).unwrap(), 72);
}
