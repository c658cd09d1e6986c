#![no_main]
//! Requests of a hostile driver to the balloon device.

use jiffy_fuzz::{Input, run};
use jiffy_vmm::virtio::balloon::Balloon;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut balloon = Balloon::new().unwrap();
    run(&mut balloon, &mut Input::new(data), |balloon, input| {
        balloon.set_target(input.u32());
        balloon.actual_mib();
    });
});
