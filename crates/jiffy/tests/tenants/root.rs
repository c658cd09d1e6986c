//! Tests that root in a gVisor sandbox, and the process that isolates it, are confined to the
//! sandbox.
//!
//! The *sentry* is gVisor's kernel in user space, one process per sandbox. The *helper* is the
//! process `jiffy-gvisor` that starts the sandboxes of a daemon.

use crate::support::children;
use crate::support::test_home::TestHome;
use jiffy_test_attributes::jiffy_test;
use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::process::{Command, Stdio};

/// User ids of processes that isolate sandboxes on gVisor.
const USERS: Range<u32> = 1_910_000_000..2_110_000_000;

/// Returns the real user id of a process.
fn user(pid: u32) -> u32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("Uid:"));
    let first = line.and_then(|ids| ids.split_whitespace().next());
    first.unwrap().parse().unwrap()
}

/// Returns a field of a process's status.
fn status(pid: u32, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix(field));
    line.unwrap().trim().to_owned()
}

/// Capabilities required to create sandboxes: CHOWN, DAC_OVERRIDE, KILL, SETGID, SETUID, SETPCAP,
/// NET_ADMIN, NET_RAW, SYS_CHROOT, SYS_PTRACE, SYS_ADMIN, SYS_RESOURCE.
const OF_HELPER: u64 = 0x012c_31e3;

/// Returns whether `script` succeeds as a user of the host.
fn can(user: u32, script: &str) -> bool {
    let id = user.to_string();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &id, "--regid", &id, "--clear-groups"]);
    command.args(["--", "sh", "-c", script]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.status().unwrap().success()
}

#[jiffy_test(engine = "gvisor")]
fn the_user_of_one_gvisor_sandbox_can_neither_signal_nor_read_another() {
    let test_home = TestHome::new();
    let ids = [test_home.ok(&["create"]), test_home.ok(&["create"])];
    let helpers = children(test_home.daemon());
    let helpers = helpers.iter().filter(|&&child| {
        fs::read(format!("/proc/{child}/cmdline"))
            .is_ok_and(|line| String::from_utf8_lossy(&line).contains("jiffy-gvisor\0serve\0"))
    });
    let helpers: Vec<&u32> = helpers.collect();
    assert_eq!(helpers.len(), 1);
    for set in ["CapPrm:", "CapEff:", "CapBnd:"] {
        let of = |pid| u64::from_str_radix(&status(pid, set), 16).unwrap();
        assert_eq!(of(*helpers[0]), of(test_home.daemon()) & OF_HELPER, "{set}");
    }
    assert_eq!(status(*helpers[0], "NoNewPrivs:"), "1");
    let sentries = test_home.vmms();
    let users: BTreeSet<u32> = sentries.iter().map(|&pid| user(pid)).collect();
    assert!(sentries.len() >= ids.len(), "{sentries:?}");
    assert_eq!(users.len(), sentries.len(), "{users:?}");
    assert!(users.iter().all(|u| USERS.contains(u)), "{users:?}");
    for &own in &sentries {
        assert!(can(user(own), &format!("kill -0 {own}")));
        for &other in sentries.iter().filter(|&&other| other != own) {
            for attempt in [
                format!("kill -0 {other}"),
                format!("head -c 1 /proc/{other}/environ"),
                format!("ls /proc/{other}/fd/"),
                format!("ls /proc/{other}/root/"),
            ] {
                assert!(!can(user(own), &attempt), "{attempt}");
            }
        }
    }
}

/// Attempts of root to reach the channel between agent and host. Prints the successful attempts.
/// System calls have their numbers on x86-64: 101 = `ptrace`, 310 = `process_vm_readv`, 434 =
/// `pidfd_open`, 438 = `pidfd_getfd`.
const IMPERSONATE_HOST: &str = r#"
import ctypes, glob, os, socket
libc = ctypes.CDLL(None, use_errno=True)
ports = (1024, 49983, 49984)
found = []

def attempt(name, work):
    try:
        if work(): found.append(name)
    except OSError: pass

def call(*arguments):
    return libc.syscall(*arguments) >= 0

def vm_read():
    first = next(l for l in open("/proc/1/maps") if " r" in l)
    into = ctypes.create_string_buffer(8)
    local = (ctypes.c_size_t * 2)(ctypes.addressof(into), 8)
    remote = (ctypes.c_size_t * 2)(int(first.split("-")[0], 16), 8)
    return call(310, 1, local, 1, remote, 1, 0)

def take_descriptor():
    process = libc.syscall(434, 1, 0)
    return process >= 0 and any(call(438, process, number, 0) for number in range(64))

def reopen():
    def socket_of(path):
        try: return os.readlink(path).startswith("socket:") and os.open(path, os.O_RDWR) >= 0
        except OSError: return False
    return any([socket_of(path) for path in glob.glob("/proc/1/fd/*")])

def connect_and_send(address, family):
    with socket.socket(family) as s:
        s.settimeout(5)
        s.connect(address)
        s.sendall(b"GET /envs HTTP/1.1\r\nHost: a\r\n\r\n")
        return s.recv(1) != b""

attempt("environment", lambda: b"KEY" in open("/proc/1/environ", "rb").read())
attempt("memory", lambda: os.open("/proc/1/mem", os.O_RDONLY) >= 0)
attempt("memory to write", lambda: os.open("/proc/1/mem", os.O_RDWR) >= 0)
attempt("process_vm_readv", vm_read)
attempt("PTRACE_SEIZE", lambda: call(101, 0x4206, 1, 0, 0))
attempt("PTRACE_ATTACH", lambda: call(101, 16, 1, 0, 0))
attempt("pidfd_getfd", take_descriptor)
attempt("open descriptor", reopen)
for port in ports:
    attempt(f"socket {port}", lambda: connect_and_send(f"\0jiffy-agent-{port}", socket.AF_UNIX))
    attempt(f"port {port}", lambda: connect_and_send(("127.0.0.1", port), socket.AF_INET))
print(os.getuid(), found)
"#;

#[jiffy_test(engine = "gvisor")]
fn root_on_gvisor_cannot_speak_to_the_agent_as_the_host_does() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create"]);
    let command = ["exec", "--user", "root"];
    let program = ["--", "python3", "-c", IMPERSONATE_HOST];
    let all = |id: &str| test_home.ok(&[&command[..], &[id], &program].concat());
    assert_eq!(all(&id), "0 []");
    // No attempt succeeds in a fork either. It was restored while the host was connected to the
    // agent, and the original still runs.
    let clone = test_home.ok(&["fork", &id]);
    let clone = clone.split_whitespace().next().unwrap();
    assert_eq!(all(clone), "0 []");
    assert_eq!(all(&id), "0 []");
}
