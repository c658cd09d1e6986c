//! Start of a `jiffy-vmm` process, and the parts of the configuration shared by all tests.

use jiffy_proto::agent::HELLO_PORT;
use jiffy_proto::channel::Channel;
use jiffy_proto::vm::VsockConfig;
use std::fs::File;
use std::process::{Child, Command, Stdio};

pub fn kvm() -> File {
    let device = File::options().read(true).write(true).open("/dev/kvm");
    device.unwrap()
}

pub fn spawn() -> (Channel, Child) {
    let (channel, theirs) = Channel::pair().unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_jiffy-vmm"))
        .stdin(Stdio::from(theirs))
        .spawn()
        .unwrap();
    (channel, child)
}

pub fn vsock() -> VsockConfig {
    VsockConfig {
        guest_cid: 3,
        host_ports: vec![HELLO_PORT],
    }
}
