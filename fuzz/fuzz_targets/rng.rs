#![no_main]
//! Requests of a hostile driver to the entropy device.

use jiffy_fuzz::{Input, run};
use jiffy_vmm::virtio::rng::Rng;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut rng = Rng::new().unwrap();
    run(&mut rng, &mut Input::new(data), |_, _| {});
});
