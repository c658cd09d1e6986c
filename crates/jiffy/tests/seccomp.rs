//! Tests that the seccomp filter of a VMM allows exactly the calls and requests that a VMM makes.

use crate::support::lab::{PUBLIC, with_lab};
use crate::support::network_probe::{assert_clean, reach};
use crate::support::test_home::TestHome;
use crate::support::{children, finish, jiffy, programs, skip, wait_for};
use jiffy_test_attributes::jiffy_test;
use jiffy_vmm::seccomp::ioctl::IoctlRequest;
use jiffy_vmm::seccomp::{AllowedSyscall, DISK_SYSCALLS, MAIN_SYSCALLS, VCPU_SYSCALLS, ioctl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

const STRACE: &str = "/usr/bin/strace";
/// A low limit, so that requests have to wait.
const LIMITS: [&str; 2] = ["--disk-mbps", "50"];

/// Last action of a guest: unbinds its devices and restarts (`RB_AUTOBOOT`), which ends the VMM.
const LEAVE: &str = r#"
import ctypes, glob
for name in "virtio_net", "virtio_balloon", "virtio_rng", "vmw_vsock_virtio_transport":
    for device in glob.glob(f"/sys/bus/virtio/drivers/{name}/virtio*"):
        with open(f"/sys/bus/virtio/drivers/{name}/unbind", "w") as file:
            file.write(device.rsplit("/", 1)[1])
ctypes.CDLL(None).reboot(0x1234567)
"#;

/// Returns a replacement of `jiffy-vmm` that writes its system calls to a file in `traces`.
fn traced(directory: &Path, traces: &Path) -> PathBuf {
    let (vmm, traces) = (programs().join("jiffy-vmm"), traces.display());
    let script = format!(
        "#!/bin/sh\n\
         # The process that creates the namespaces of VMMs has no filter.\n\
         case \"$1\" in --make-namespaces) exec {vmm} \"$@\" ;; esac\n\
         exec {STRACE} -D -f -qq -s 0 -X raw -o \"$(/usr/bin/mktemp {traces}/XXXXXXXX)\" {vmm} \"$@\"\n",
        vmm = vmm.display()
    );
    let path = directory.join("jiffy-vmm-traced");
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    path
}

/// System calls made with an active filter, and numbers of `ioctl` requests.
#[derive(Debug, Default)]
struct Made {
    main: BTreeSet<String>,
    vcpu: BTreeSet<String>,
    disks: BTreeSet<String>,
    main_requests: BTreeSet<u32>,
    vcpu_requests: BTreeSet<u32>,
}

/// Returns the request of an `ioctl` from a trace without names.
fn request(arguments: &str) -> u32 {
    let second = arguments.split(", ").nth(1).unwrap();
    let digits = second.trim_start_matches("0x");
    let end = digits.find(|c: char| !c.is_ascii_hexdigit());
    u32::from_str_radix(&digits[..end.unwrap_or(digits.len())], 16).unwrap()
}

impl Made {
    /// Adds the calls of one VMM. Its first task is the event loop. Its threads have separate
    /// filters; the processes that it forks have the event loop's filter from their first call on.
    fn add(&mut self, trace: &str) {
        let mut calls: BTreeMap<&str, Vec<(&str, &str)>> = BTreeMap::new();
        let mut main = None;
        for line in trace.lines() {
            let Some((task, event)) = line.split_once(' ') else {
                continue;
            };
            main.get_or_insert(task);
            // Skips continuations of interrupted calls, signals and exits.
            let call = event.trim_start().split_once('(');
            let is_name = |n: &str| n.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            if let Some(call) = call.filter(|(name, _)| is_name(name)) {
                calls.entry(task).or_default().push(call);
            }
        }
        for (task, calls) in calls {
            let confined = calls.iter().rposition(|(name, _)| *name == "seccomp");
            let (is_thread, first) = match confined {
                Some(at) => (Some(task) != main, at + 1),
                // A VMM that did not install its filter.
                None if Some(task) == main => continue,
                None => (false, 0),
            };
            let calls = calls.get(first..).unwrap_or_default();
            // The thread of the disks waits by this call, and vCPU threads never do.
            let is_disks = is_thread && calls.iter().any(|(name, _)| *name == "epoll_wait");
            let (names, requests) = if is_disks {
                (&mut self.disks, &mut BTreeSet::new())
            } else if is_thread {
                (&mut self.vcpu, &mut self.vcpu_requests)
            } else {
                (&mut self.main, &mut self.main_requests)
            };
            for &(name, arguments) in calls {
                names.insert(name.to_owned());
                assert!(!is_disks || name != "ioctl", "{arguments}");
                if name == "ioctl" {
                    requests.insert(request(arguments));
                }
            }
        }
    }
}

/// Returns the calls in `allowed` that were not made, and for which no reason is given.
fn unobserved_calls(allowed: &[AllowedSyscall], made: &BTreeSet<String>) -> Vec<&'static str> {
    let idle = allowed
        .iter()
        .filter(|call| call.unobserved_reason.is_none());
    idle.map(AllowedSyscall::name)
        .filter(|name| !made.contains(*name))
        .collect()
}

/// Returns the names of the requests in `allowed` that were not made.
fn unobserved_requests(allowed: &[IoctlRequest], made: &BTreeSet<u32>) -> Vec<&'static str> {
    let unmade = allowed.iter().filter(|r| !made.contains(&r.number));
    unmade.map(|r| r.name).collect()
}

fn serve(test_home: &TestHome) -> Child {
    test_home.serve(&[&["--network", "on", "--warm-pool", "0"], &LIMITS[..]].concat())
}

/// Performs all operations of a VMM.
fn perform_all_operations(test_home: &TestHome) {
    let mut daemon = serve(test_home);
    let id = test_home.ok(&["create", "--memory", "1GiB"]);
    assert_eq!(reach(test_home, &id, PUBLIC[0]), "internet");
    let data = test_home.dir.path().join("data");
    fs::write(&data, vec![7; 20_000_000]).unwrap();
    let data = data.to_str().unwrap();
    test_home.ok(&["cp", data, &format!("{id}:/var/tmp/data")]);
    test_home.ok(&["cp", &format!("{id}:/var/tmp/data"), data]);
    // Write more than the limit allows at once.
    let root = |script: &str| {
        // Only the calls of the VMM matter, not the results in the guest.
        test_home.call(&["exec", "--user", "root", &id, "--", "sh", "-c", script]);
    };
    root(
        "dd if=/dev/zero of=/var/tmp/zeroes bs=1M count=100 oflag=direct; cat /var/tmp/data | sha256sum",
    );
    root("rm /var/tmp/zeroes; sync; seq 1000 >/dev/console; head -c 1000 /dev/hwrng | wc -c");
    let retained = test_home.ok(&["snapshot", &id]);
    test_home.ok(&["fork", &id]);
    test_home.ok(&["pause", &id]);
    test_home.ok(&["resume", &id]);
    test_home.ok(&["rollback", &id, &retained]);

    // A daemon that exits leaves its snapshot unfinished, and the next daemon finds the guest
    // unchanged.
    test_home.sh(&id, "head -c 400000000 /dev/urandom >/dev/shm/bulk");
    let before = children_of_vmms(test_home);
    let snapshot = jiffy(&["snapshot", &id])
        .env("JIFFY_HOME", test_home.dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let send = |pid: u32, signal| kill(Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
    let writer = wait_for("the process that writes memory", || {
        children_of_vmms(test_home)
            .difference(&before)
            .copied()
            .next()
    });
    // The writer must not exit before the daemon has exited.
    send(writer, Signal::SIGSTOP);
    send(daemon.id(), Signal::SIGKILL);
    daemon.wait().unwrap();
    finish(snapshot);
    test_home.wait_for_daemon_exit();
    let mut daemon = serve(test_home);
    test_home.sh(&id, "true");

    // Unbinds the drivers of all devices that a guest does not require; then the guest exits by
    // itself.
    let clone = test_home.ok(&["create", "--from", &retained]);
    test_home.call(&[
        "exec", "--user", "root", &clone, "--", "python3", "-c", LEAVE,
    ]);
    test_home.ok(&["kill", &id]);
    test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}

/// Returns the processes that VMMs of the data directory have forked, and their tracers.
fn children_of_vmms(test_home: &TestHome) -> BTreeSet<u32> {
    test_home.vmms().into_iter().flat_map(children).collect()
}

#[jiffy_test(lab)]
fn every_call_that_the_filter_allows_is_made_or_has_a_reason() {
    if !Path::new(STRACE).exists() {
        assert!(std::env::var_os("CI").is_none(), "strace is not installed");
        return skip("strace is not installed");
    }
    let directory = tempfile::tempdir().unwrap();
    let traces = directory.path().join("traces");
    fs::create_dir(&traces).unwrap();
    with_lab(|_| {
        let mut test_home = TestHome::new();
        test_home.vmm = Some(traced(directory.path(), &traces));
        perform_all_operations(&test_home);
        drop(test_home);
        assert_clean();
        let mut made = Made::default();
        for trace in fs::read_dir(&traces).unwrap() {
            let trace = fs::read(trace.unwrap().path()).unwrap();
            made.add(&String::from_utf8_lossy(&trace));
        }
        assert!(!made.vcpu.is_empty() && !made.main.is_empty(), "{made:?}");
        let disks = unobserved_calls(DISK_SYSCALLS, &made.disks);
        assert!(
            disks.is_empty(),
            "allowed and never made, by the disks' thread: {disks:?}"
        );
        let (main, vcpu) = (
            unobserved_calls(MAIN_SYSCALLS, &made.main),
            unobserved_calls(VCPU_SYSCALLS, &made.vcpu),
        );
        assert!(
            main.is_empty() && vcpu.is_empty(),
            "allowed and never made, by the event loop: {main:?}; by vCPUs: {vcpu:?}"
        );
        let requests = [ioctl::MAIN_IOCTLS, ioctl::TRACKING_IOCTLS].concat();
        let main = unobserved_requests(&requests, &made.main_requests);
        let vcpu = unobserved_requests(ioctl::VCPU_IOCTLS, &made.vcpu_requests);
        assert!(
            main.is_empty() && vcpu.is_empty(),
            "requests allowed and never made, by the event loop: {main:?}; by vCPUs: {vcpu:?}"
        );
    });
}

#[test]
fn a_trace_is_read_from_the_filter_on() {
    let mut made = Made::default();
    made.add(
        "1     execve(\"\", [], 0x1 /* 0 vars */) = 0\n\
         1     ioctl(3, 0xae01, 0) = 4\n\
         1     seccomp(SECCOMP_SET_MODE_FILTER, 0, {len=3}) = 0\n\
         7     set_robust_list(0x1, 24) = 0\n\
         7     seccomp(SECCOMP_SET_MODE_FILTER, 0, {len=3}) = 0\n\
         7     ioctl(3, 0xae80 <unfinished ...>\n\
         1     ioctl(5, 0xc0606610, 0x7ffc) = 0\n\
         1     clone(child_stack=NULL, flags=0x1011) = 9\n\
         7     <... ioctl resumed>) = 0\n\
         7     --- SIGUSR1 {si_signo=SIGUSR1} ---\n\
         9     pwrite64(4, \"\"..., 8, 0) = 8\n\
         9     +++ exited with 0 +++\n",
    );
    assert_eq!(made.vcpu, BTreeSet::from(["ioctl".to_owned()]));
    let main = ["clone", "ioctl", "pwrite64"].map(str::to_owned);
    assert_eq!(made.main, BTreeSet::from(main));
    assert_eq!(made.vcpu_requests, BTreeSet::from([0xae80]));
    assert_eq!(made.main_requests, BTreeSet::from([0xc060_6610]));
}
