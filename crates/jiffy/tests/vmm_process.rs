//! Tests for the process `jiffy-vmm`, controlled through its own protocol.

use crate::support::{programs, wait_for};
use jiffy_image::{Home, Initrd, Kernel};
use jiffy_proto::channel::{Channel, ChannelError};
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::vm::{DiskLimits, Event, FdIndex, Request, StopCause, VmConfig};
use jiffy_test_attributes::jiffy_test;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket,
};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};

/// Running `jiffy-vmm`, and the channel that controls the process.
struct Vmm {
    child: Child,
    control: Channel,
}

impl Vmm {
    fn start() -> Self {
        let (control, theirs) = Channel::pair().unwrap();
        let child = Command::new(programs().join("jiffy-vmm"))
            .env_clear()
            .stdin(Stdio::from(theirs))
            .spawn()
            .unwrap();
        Self { child, control }
    }

    fn event(&self) -> Event {
        self.control.recv().unwrap().0
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Open files for a guest whose process 1 only waits.
struct Parts {
    kvm: File,
    kernel: File,
    initrd: File,
    console: ConsoleRing,
}

impl Parts {
    fn open() -> Self {
        let home = Home::locate().unwrap();
        let agent = std::fs::read(programs().join("jiffy-agent")).unwrap();
        Self {
            kvm: File::options()
                .read(true)
                .write(true)
                .open("/dev/kvm")
                .unwrap(),
            kernel: Kernel::choose().unwrap().open(&home).unwrap().file,
            initrd: Initrd::new(&agent).unwrap().file(&home).unwrap().file,
            console: ConsoleRing::create().unwrap(),
        }
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![
            self.kvm.as_fd(),
            self.kernel.as_fd(),
            self.initrd.as_fd(),
            self.console.fd(),
        ]
    }
}

/// Returns a guest with the files of [`Parts`], by their indices.
fn config() -> VmConfig {
    VmConfig {
        vcpus: 1,
        memory_mib: 128,
        kvm: FdIndex(0),
        kernel: FdIndex(1),
        initrd: Some(FdIndex(2)),
        cmdline: "console=ttyS0 quiet panic=-1 reboot=k rdinit=/init -- --listen-unix /waits"
            .to_owned(),
        disks: Vec::new(),
        disk_limits: DiskLimits::default(),
        vsock: None,
        net: None,
        rng: false,
        balloon: false,
        cpu_level: jiffy_proto::cpu_level::CpuLevel::default(),
        console: FdIndex(3),
    }
}

#[jiffy_test]
fn a_vmm_exits_with_its_controller_unless_it_is_detached() {
    let parts = Parts::open();
    let mut vmm = Vmm::start();
    vmm.control
        .send(&Request::Start(Box::new(config())), &parts.fds())
        .unwrap();
    assert!(matches!(vmm.event(), Event::Started(_)));
    let (ours, _theirs) = Channel::pair().unwrap();
    vmm.control = ours; // closes the old one
    let status = wait_for("the VMM to exit", || vmm.child.try_wait().unwrap());
    assert!(status.success(), "{status:?}");
}

#[jiffy_test]
fn a_detached_vmm_obeys_the_next_controller() {
    let parts = Parts::open();
    let directory = tempfile::tempdir().unwrap();
    let address = UnixAddr::new(&directory.path().join("control")).unwrap();
    let make = || {
        socket(
            AddressFamily::Unix,
            SockType::SeqPacket,
            SockFlag::SOCK_CLOEXEC,
            None,
        )
        .unwrap()
    };
    let listener: OwnedFd = make();
    bind(listener.as_raw_fd(), &address).unwrap();
    listen(&listener, Backlog::new(4).unwrap()).unwrap();

    let mut vmm = Vmm::start();
    vmm.control
        .send(&Request::Start(Box::new(config())), &parts.fds())
        .unwrap();
    assert!(matches!(vmm.event(), Event::Started(_)));
    let log = tempfile::tempfile().unwrap();
    let keep = Request::Detach {
        listener: FdIndex(0),
        log: Some(FdIndex(1)),
        greeting: None,
        request_id: Some("r1".to_owned()),
    };
    vmm.control
        .send(&keep, &[listener.as_fd(), log.as_fd()])
        .unwrap();
    assert_eq!(vmm.event(), Event::Detached);

    for _ in 0..2 {
        // A new controller connects after the previous connection was closed.
        let next = make();
        connect(next.as_raw_fd(), &address).unwrap();
        vmm.control = Channel::new(next);
        wait_for("the guest to be counted", || {
            vmm.control.send(&Request::Stats, &[]).unwrap();
            match vmm.event() {
                Event::Stats(stats) => (stats.pio_exits + stats.mmio_exits > 0).then_some(()),
                other => panic!("{other:?}"),
            }
        });
        assert!(vmm.child.try_wait().unwrap().is_none());
    }
    vmm.control.send(&Request::Stop, &[]).unwrap();
    assert_eq!(vmm.event(), Event::Stopped(StopCause::Requested));
    assert!(vmm.child.wait().unwrap().success());
}

#[jiffy_test]
fn an_invalid_configuration_is_rejected_with_the_reason() {
    let parts = Parts::open();
    let cases: [(VmConfig, &str); 6] = [
        (
            VmConfig {
                vcpus: 9,
                ..config()
            },
            "9 vCPUs",
        ),
        (
            VmConfig {
                memory_mib: 1,
                ..config()
            },
            "1 MiB of memory",
        ),
        (
            VmConfig {
                kernel: FdIndex(77),
                ..config()
            },
            "descriptor 77 for the kernel",
        ),
        (
            VmConfig {
                initrd: Some(FdIndex(1)),
                ..config()
            },
            "named twice",
        ),
        (
            VmConfig {
                kernel: FdIndex(2),
                initrd: None,
                ..config()
            },
            "not a bootable ELF",
        ),
        (
            VmConfig {
                cmdline: "x".repeat(4096),
                ..config()
            },
            "command line",
        ),
    ];
    for (config, words) in cases {
        let vmm = Vmm::start();
        vmm.control
            .send(&Request::Start(Box::new(config)), &parts.fds())
            .unwrap();
        match vmm.event() {
            Event::Stopped(StopCause::BadConfig { reason }) => {
                assert!(reason.contains(words), "{words}: {reason}")
            }
            other => panic!("{words}: {other:?}"),
        }
    }
}

#[test]
fn invalid_control_messages_start_no_vm() {
    let mut vmm = Vmm::start();
    vmm.control.send(&"hello", &[]).unwrap();
    assert!(matches!(
        vmm.event(),
        Event::Stopped(StopCause::BadConfig { .. })
    ));
    assert!(matches!(
        vmm.control.recv::<Event>(),
        Err(ChannelError::Closed)
    ));
    assert!(!vmm.child.wait().unwrap().success());
}

#[test]
fn a_vmm_started_by_hand_explains_itself() {
    let output = Command::new(programs().join("jiffy-vmm")).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("not by hand"));
}
