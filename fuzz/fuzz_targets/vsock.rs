#![no_main]
//! Packets of a hostile driver for the vsock device, and actions of the host: no packet causes a
//! panic or an endless loop, and a reset closes all connections.

use jiffy_fuzz::{Input, run};
use jiffy_vmm::virtio::VirtioDevice;
use jiffy_vmm::virtio::testing::{DeviceHarness, Ring, memory, readable, writable};
use jiffy_vmm::virtio::vsock::{HOST_CID, MAX_CONNECTIONS, Vsock, VsockConfig, VsockHeader};
use libfuzzer_sys::fuzz_target;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use vm_memory::{Bytes, GuestAddress};

/// Context id of the guest.
const CID: u32 = 3;
/// Ports of the host to which the guest may connect.
const PORTS: [u32; 2] = [1024, 1025];
/// Guest address of the receive buffers.
const RX_AREA: u64 = 0x1_0000;
/// Guest address of the event buffers.
const EVENT_AREA: u64 = 0x9000;
/// Guest address of the packets that the driver sends.
const TX_AREA: u64 = 0x2_0000;
/// Number of entries of each ring.
const RING: u16 = 16;
/// Content of the data that the host sends, of which a prefix is written.
static BYTES: [u8; 70_000] = [0x5a; 70_000];

/// The host's ends of connections, opened by either side.
type Streams = Arc<Mutex<Vec<UnixStream>>>;

/// Returns a device, and the streams of the connections that the guest opens.
fn device() -> (Vsock, Streams) {
    let streams = Streams::default();
    let taken = streams.clone();
    let config = VsockConfig {
        guest_cid: CID,
        host_ports: PORTS.to_vec(),
    };
    let listener = move |_, stream: UnixStream| {
        stream.set_nonblocking(true)?;
        taken.lock().unwrap().push(stream);
        Ok(())
    };
    (Vsock::new(config, Box::new(listener)), streams)
}

/// Performs one action of the host: opens a connection (0), resets the transport (1), or uses one
/// of the streams. It writes (2 and 3), closes one direction (4 and 5), reads (6), or closes the
/// stream.
fn host(vsock: &mut Vsock, streams: &Streams, input: &mut Input<'_>) {
    let kind = input.u8() % 8;
    if kind == 0 {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        if vsock
            .connect(u32::from(input.u8() % 4), theirs.into())
            .is_ok()
        {
            streams.lock().unwrap().push(ours);
        }
        return;
    }
    if kind == 1 {
        let _ = vsock.transport_reset();
        assert!(vsock.connections() == 0);
        return;
    }
    let mut streams = streams.lock().unwrap();
    if streams.is_empty() {
        return;
    }
    let which = usize::from(input.u8()) % streams.len();
    let stream = &mut streams[which];
    match kind {
        2 => _ = stream.write(&BYTES[..usize::from(input.u16())]),
        3 => _ = stream.write(&BYTES[..1]),
        4 => _ = stream.shutdown(Shutdown::Write),
        5 => _ = stream.shutdown(Shutdown::Read),
        6 => _ = stream.read(&mut vec![0; usize::from(input.u16())]),
        _ => _ = streams.swap_remove(which),
    }
}

/// A driver with valid rings and packet layouts, which violates most other rules. It reaches the
/// code after the first checks.
struct Driver {
    harness: DeviceHarness,
    rings: [Ring; 3],
    /// Host ports seen in packets, to which the driver can respond.
    seen: Vec<u32>,
    /// True if the driver has negotiated `VIRTIO_F_EVENT_IDX`.
    event_idx: bool,
    /// Chains added to each queue that the device has not returned yet.
    outstanding: [u16; 3],
    /// Number of the next receive buffer in [`RX_AREA`].
    given: u16,
}

impl Driver {
    fn start(vsock: &mut Vsock, harness: DeviceHarness, event_idx: bool) -> Self {
        let ring = |i: u64| Ring::new(&harness.memory, 0x1000 * i, RING);
        let rings = [ring(1), ring(2), ring(3)];
        let queues = rings.iter().map(|r| r.queue(event_idx)).collect();
        vsock.activate(harness.activation(queues, 0)).unwrap();
        Self {
            harness,
            rings,
            seen: PORTS.to_vec(),
            event_idx,
            outstanding: [0; 3],
            given: 0,
        }
    }

    /// Sends a packet in two buffers. Some packets have an invalid length, source or kind.
    fn packet(&mut self, input: &mut Input<'_>) {
        let kind = input.u8();
        let mut header = VsockHeader {
            src_cid: u64::from(CID),
            dst_cid: HOST_CID,
            src_port: u32::from(kind >> 6),
            dst_port: self.seen[usize::from(input.u8()) % self.seen.len()],
            len: 0,
            kind: 1,
            op: u16::from(kind % 9),
            flags: u32::from(kind >> 4 & 3),
            buf_alloc: 1 << (input.u8() % 32),
            fwd_cnt: u32::from(input.u16()),
        };
        let data = usize::from(input.u16());
        header.len = if kind & 8 == 0 {
            data as u32
        } else {
            input.u32()
        };
        if input.u8() == 0 {
            header.src_cid = input.u64();
            header.kind = input.u16();
        }
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend(&BYTES[..data]);
        let memory = &self.harness.memory;
        memory.write_slice(&bytes, GuestAddress(TX_AREA)).unwrap();
        let cut = u32::from(input.u8()) % 60;
        let len = bytes.len() as u32;
        let (a, b) = (cut.min(len), len - cut.min(len));
        if self.outstanding[1] < RING / 2 {
            self.outstanding[1] += 1;
            self.rings[1].add(&[readable(TX_AREA, a), readable(TX_AREA + u64::from(a), b)]);
        }
    }

    /// Makes a receive buffer available to the device.
    fn give(&mut self, len: u32) {
        if self.outstanding[0] < RING {
            self.outstanding[0] += 1;
            let at = RX_AREA + u64::from(self.given) * 0x800;
            self.rings[0].add(&[writable(at, len)]);
            self.given = (self.given + 1) % RING;
        }
    }

    /// Reads the packets that the device has sent, and checks their headers. An operation of 1 is
    /// the request of a new connection.
    fn collect(&mut self) {
        for (head, len) in self.rings[0].used() {
            self.outstanding[0] -= 1;
            let mut bytes = [0; 44];
            let at = GuestAddress(RX_AREA + u64::from(head) * 0x800);
            self.harness.memory.read_slice(&mut bytes, at).unwrap();
            let header = VsockHeader::from_bytes(&bytes);
            assert_eq!(header.len + 44, len);
            assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, u64::from(CID)));
            if header.op == 1 {
                self.seen.push(header.src_port);
            }
        }
        self.outstanding[1] -= self.rings[1].used().len() as u16;
        self.outstanding[2] -= self.rings[2].used().len() as u16;
        for ring in &self.rings {
            ring.set_used_event(ring.used_idx());
        }
    }

    /// Checks that the event loop becomes idle in every state.
    fn events(&mut self, vsock: &mut Vsock) {
        for _ in 0..1000 {
            let ready = self.harness.ready(0);
            if ready.is_empty() {
                return;
            }
            for ready in ready {
                vsock.host_event(ready.token, ready.flags).unwrap();
            }
        }
        panic!("the event loop does not come to rest");
    }
}

/// Executes steps of the driver and of the host, in the order of the input.
fn converse(vsock: &mut Vsock, streams: &Streams, input: &mut Input<'_>) {
    let harness = DeviceHarness::new(memory(0x4_0000));
    let mut driver = Driver::start(vsock, harness, input.u8() & 1 == 0);
    for _ in 0..input.u8() {
        let kind = input.u8() % 16;
        match kind {
            0..=4 => {
                driver.packet(input);
                if kind > 1 {
                    vsock.queue_event(1).unwrap();
                }
            }
            5..=7 => {
                for _ in 0..1 + input.u8() % 8 {
                    // At least the header of 44 bytes and one byte of data.
                    driver.give(45 + u32::from(input.u16() % 0x700));
                }
                vsock.queue_event(0).unwrap();
                driver.collect();
            }
            8 => driver.events(vsock),
            9 => driver.collect(),
            10 if input.u8() == 0 => {
                vsock.reset();
                assert!(vsock.connections() == 0);
                driver = Driver::start(vsock, driver.harness.clone(), driver.event_idx);
            }
            11 if driver.outstanding[2] < RING => {
                driver.outstanding[2] += 1;
                driver.rings[2].add(&[writable(EVENT_AREA, 4)]);
                vsock.queue_event(2).unwrap();
            }
            _ => host(vsock, streams, input),
        }
        assert!(vsock.connections() <= MAX_CONNECTIONS);
    }
    driver.events(vsock);
}

fuzz_target!(|data: &[u8]| {
    let (mut vsock, streams) = device();
    let mut input = Input::new(data);
    if input.u8() & 1 == 0 {
        run(&mut vsock, &mut input, |vsock, input| {
            host(vsock, &streams, input);
        });
    } else {
        converse(&mut vsock, &streams, &mut input);
    }
    vsock.reset();
    assert!(vsock.connections() == 0);
});
