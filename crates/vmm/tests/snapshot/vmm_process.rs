//! Start of a `jiffy-vmm` process, and the parts of the configuration shared by all tests.

use jiffy_proto::agent::HELLO_PORT;
use jiffy_proto::channel::Channel;
use jiffy_proto::vm::VsockConfig;
use std::fs::File;
use std::process::{Child, Command, Stdio};

/// Opens KVM.
pub fn kvm() -> File {
    let device = File::options().read(true).write(true).open("/dev/kvm");
    device.unwrap()
}

/// Starts a VMM. Returns the control channel and the process.
pub fn spawn() -> (Channel, Child) {
    let (channel, theirs) = Channel::pair().unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_jiffy-vmm"))
        .stdin(Stdio::from(theirs))
        .spawn()
        .unwrap();
    (channel, child)
}

/// Returns the sockets of the test guest. The guest connects to `HELLO_PORT` to greet.
pub fn vsock() -> VsockConfig {
    VsockConfig {
        guest_cid: 3,
        host_ports: vec![HELLO_PORT],
    }
}
