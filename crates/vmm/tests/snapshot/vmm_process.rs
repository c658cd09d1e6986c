//! Start of a `jiffy-vmm` process, and the parts of its configuration that all tests share.

use jiffy_proto::agent::HELLO_PORT;
use jiffy_proto::channel::Channel;
use jiffy_proto::vm::{CONTROL_FD, VsockConfig};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

pub fn kvm() -> File {
    let device = File::options().read(true).write(true).open("/dev/kvm");
    device.unwrap()
}

pub fn spawn() -> (Channel, Child) {
    let (channel, theirs) = Channel::pair().unwrap();
    let raw = theirs.as_raw_fd();
    let program = env!("CARGO_BIN_EXE_jiffy-vmm");
    let mut command = Command::new(program);
    // SAFETY: only system calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            if raw == CONTROL_FD {
                libc::fcntl(raw, libc::F_SETFD, 0);
            } else {
                libc::dup2(raw, CONTROL_FD);
            }
            Ok(())
        })
    };
    let child = command.spawn().unwrap();
    (channel, child)
}

pub fn vsock() -> VsockConfig {
    VsockConfig {
        guest_cid: 3,
        host_ports: vec![HELLO_PORT],
    }
}
