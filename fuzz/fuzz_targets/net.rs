#![no_main]
//! Requests of a hostile driver to the network device, and frames of any length for the guest.

use jiffy_fuzz::{Input, run};
use jiffy_vmm::virtio::net::Net;
use libfuzzer_sys::fuzz_target;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;

/// Content of the frames for the guest, of which a prefix is sent.
static FRAME: [u8; 70_000] = [0x5a; 70_000];

fuzz_target!(|data: &[u8]| {
    let (card, wire) = UnixDatagram::pair().unwrap();
    wire.set_nonblocking(true).unwrap();
    let card = File::from(OwnedFd::from(card));
    // The device has this MAC address, and an MTU of 1500 bytes.
    let mut net = Net::over_datagrams(card, [2, 0, 0, 0, 0, 1], 1500).unwrap();
    let mut taken = [0; 256];
    run(&mut net, &mut Input::new(data), |net, input| {
        let kind = input.u8();
        if kind & 1 == 0 {
            let len = usize::from(input.u16()) + usize::from(kind & 2) * 2000;
            let _ = wire.send(&FRAME[..len]);
        } else {
            while wire.recv(&mut taken).is_ok() {}
        }
        net.counters();
    });
});
