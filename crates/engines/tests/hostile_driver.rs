//! A jailed VMM withstands a guest whose kernel writes garbage to every device.
//!
//! A *script* is a list of accesses to devices, generated from a seed (`support/script.rs`). The
//! kernel of the guest executes it.
#![allow(clippy::unwrap_used, clippy::panic)]

use crate::support::script::{END, MEMORY_MIB, ramdisk};
use crate::support::{programs, skip, wire};
use jiffy_proto::channel::{Channel, ChannelError};
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::vm::jail::ENTER_ARGUMENT;
use jiffy_proto::vm::{
    DiskConfig, DiskLimits, Event, FdIndex, NetConfig, Request, StopCause, VmConfig, VsockConfig,
};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::socket::{setsockopt, sockopt::ReceiveTimeout};
use nix::sys::time::{TimeVal, TimeValLike};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Number of scripts to run. Each takes less than a second.
const SEEDS: u64 = 8;
/// Maximum memory of a VMM in addition to its guest's memory, in MiB.
const OVERHEAD_MIB: u64 = 48;
/// Maximum time between two messages of the VMM. Slow hosts need a fraction of it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Result of an attack on a VMM.
struct Outcome {
    cause: StopCause,
    status: ExitStatus,
    /// Devices that were taken out of service, with the number of times.
    failed: BTreeMap<String, u32>,
    /// Number of connections that the guest opened to the host.
    connects: usize,
    console: Vec<u8>,
    /// Maximum resident memory, in MiB.
    peak_mib: u64,
}

/// Builds and opens the hostile kernel.
fn kernel(directory: &Path) -> File {
    let status = Command::new("make")
        .args(["-s", "-C"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/guest"))
        .arg(format!("OUT={}", directory.display()))
        .arg("driver")
        .status()
        .unwrap();
    assert!(status.success());
    File::open(directory.join("hostile_driver")).unwrap()
}

/// Returns a temporary file with this content.
fn file_with(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// Starts a VMM as process 1 of a PID namespace, in its jail.
fn start() -> (Child, Channel) {
    let vmm = programs().vmm;
    let namespaces = vmm.namespaces().unwrap().unwrap();
    let (control, theirs) = Channel::pair().unwrap();
    let namespaces: Vec<_> = namespaces.iter().map(AsFd::as_fd).collect();
    // The VMM becomes process 1 of the new PID namespace. This process returns to its own namespace
    // afterwards.
    control.send(&(), &namespaces).unwrap();
    let own = File::open("/proc/self/ns/pid").unwrap();
    unshare(CloneFlags::CLONE_NEWPID).unwrap();
    let child = Command::new(vmm.path())
        .arg(ENTER_ARGUMENT)
        .env_clear()
        .stdin(Stdio::from(theirs))
        .spawn();
    setns(&own, CloneFlags::CLONE_NEWPID).unwrap();
    (child.unwrap(), control)
}

/// Returns the configuration of a machine with all devices. An `FdIndex` is the position of a
/// descriptor in the message to the VMM (see [`attack`]).
fn config(mac: [u8; 6]) -> VmConfig {
    VmConfig {
        vcpus: 1,
        memory_mib: MEMORY_MIB,
        kvm: FdIndex(0),
        kernel: FdIndex(1),
        initrd: Some(FdIndex(2)),
        cmdline: String::new(),
        disks: vec![
            DiskConfig::ReadOnly { image: FdIndex(3) },
            DiskConfig::Overlay {
                base: FdIndex(4),
                overlay: FdIndex(5),
            },
        ],
        disk_limits: DiskLimits::default(),
        vsock: Some(VsockConfig {
            guest_cid: 3,
            host_ports: vec![1024],
        }),
        net: Some(NetConfig {
            tap: FdIndex(6),
            mac,
            mtu: 1500,
        }),
        rng: true,
        balloon: true,
        cpu_level: jiffy_proto::cpu_level::CpuLevel::default(),
        console: FdIndex(7),
    }
}

/// Runs the script of `seed` against a VMM until the VMM exits.
fn attack(kernel: &File, seed: u64, tap: &File) -> Outcome {
    let (disk, _) = ramdisk(seed);
    let console = ConsoleRing::create().unwrap();
    let kvm = jiffy_microvm_engine::host_kvm::open().unwrap();
    // A disk whose base has data and a hole.
    let (image, base) = (file_with(&[0x5a; 1 << 20]), file_with(&[0xa5; 1 << 20]));
    base.set_len(4 << 20).unwrap();
    let files = [kernel, &file_with(&disk), &image, &base, &file_with(&[])];
    let mut fds: Vec<BorrowedFd<'_>> = vec![kvm.as_fd()];
    fds.extend(files.iter().map(|file| file.as_fd()));
    fds.extend([tap.as_fd(), console.fd()]);
    let (mut child, control) = start();
    control
        .send(&Request::Start(Box::new(config(wire::MAC))), &fds)
        .unwrap();
    let patience = TimeVal::seconds(PATIENCE.as_secs().try_into().unwrap());
    setsockopt(&control, ReceiveTimeout, &patience).unwrap();
    let mut failed = BTreeMap::new();
    let mut streams = Vec::new();
    let cause = loop {
        match control.recv::<Event>() {
            Ok((Event::Started(_), _)) => {}
            Ok((Event::DeviceFailed { device, .. }, _)) => {
                *failed.entry(device).or_default() += 1;
            }
            // The guest sends to a peer that does not read.
            Ok((Event::GuestConnect { .. }, stream)) => streams.extend(stream),
            Ok((Event::Stopped(cause), _)) => break cause,
            Ok((other, _)) => panic!("seed {seed}: {other:?}"),
            Err(ChannelError::Closed) => panic!("seed {seed}: {:?}", wait(child).0),
            Err(e) => {
                let _ = child.kill();
                panic!(
                    "seed {seed}: the VMM sent no message: {e}; {:?}",
                    wait(child).0
                )
            }
        }
    };
    let (status, peak_mib) = wait(child);
    Outcome {
        cause,
        status,
        failed,
        connects: streams.len(),
        console: console.tail(),
        peak_mib,
    }
}

/// Waits for a process. Returns its exit status and its maximum resident memory, in MiB.
fn wait(child: Child) -> (ExitStatus, u64) {
    let mut status = 0;
    // SAFETY: an all-zero `rusage` is valid because it contains only integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    let pid = child.id().try_into().unwrap();
    // SAFETY: both pointers refer to local variables; no other code waits for this child.
    let waited = unsafe { libc::wait4(pid, &raw mut status, 0, &raw mut usage) };
    assert_eq!(waited, pid, "{}", io::Error::last_os_error());
    let peak = u64::try_from(usage.ru_maxrss).unwrap() / 1024;
    (ExitStatus::from_raw(status), peak)
}

#[test]
fn a_hostile_driver_only_ends_its_own_guest() {
    let test = "a_hostile_driver_only_ends_its_own_guest";
    if let Err(e) = jiffy_microvm_engine::host_kvm::open() {
        return skip(test, &e.to_string());
    }
    if !nix::unistd::Uid::effective().is_root() {
        return skip(test, "only root can create the jail");
    }
    let directory = tempfile::tempdir().unwrap();
    let kernel = kernel(directory.path());
    let mut failed: BTreeMap<String, u32> = BTreeMap::new();
    let (mut finished, mut connects) = (0, 0);
    for seed in 1..=seeds() {
        let (net, ()) = match wire::create_tap(1500, || ()) {
            Ok(created) => created,
            Err(e) => return skip(test, &format!("no tap in a network namespace: {e}")),
        };
        let started_at = Instant::now();
        let outcome = attack(&kernel, seed, &net.tap);
        eprintln!(
            "seed {seed}: {:?} after {:?}, {} MiB at most, {} connections, out of service {:?}, {}",
            outcome.cause,
            started_at.elapsed(),
            outcome.peak_mib,
            outcome.connects,
            outcome.failed,
            String::from_utf8_lossy(&outcome.console).escape_debug(),
        );
        // The attack may have made a device overwrite the kernel itself.
        let orderly = matches!(
            outcome.cause,
            StopCause::GuestReset | StopCause::GuestFault { .. }
        );
        assert!(orderly, "seed {seed}: {:?}", outcome.cause);
        assert!(
            outcome.status.success(),
            "seed {seed}: {:?}",
            outcome.status
        );
        let most = u64::from(MEMORY_MIB) + OVERHEAD_MIB;
        assert!(
            outcome.peak_mib < most,
            "seed {seed}: {} MiB",
            outcome.peak_mib
        );
        for (device, count) in outcome.failed {
            *failed.entry(device).or_default() += count;
        }
        finished += u64::from(outcome.console.last() == Some(&END));
        connects += outcome.connects;
    }
    // Check that the attack was effective: every device failed, and most scripts ran to completion.
    assert!(finished * 2 > seeds(), "{finished} scripts were finished");
    assert!(connects > 0);
    let devices: Vec<&str> = failed.keys().map(String::as_str).collect();
    assert_eq!(devices, ["balloon", "blk0", "blk1", "net", "rng", "vsock"]);
}

/// Returns the number of seeds to run. The variable JIFFY_SEEDS overrides the default.
fn seeds() -> u64 {
    let count = std::env::var("JIFFY_SEEDS").ok();
    count.and_then(|n| n.parse().ok()).unwrap_or(SEEDS)
}
