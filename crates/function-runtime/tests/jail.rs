//! Tests for the confinement of a tenant's process and of compilers, inspected from outside and
//! attacked from inside. Without root, no namespaces exist.
#![allow(clippy::unwrap_used, clippy::panic)]

mod attempts;
mod taken_process;

use crate::skip::skip;
use crate::support::{OWNER, TestTenant, constant, program};
use attempts::{Host, is_killed_for_a_32_bit_call};
use jiffy_function_runtime::engine::RESETS;
use jiffy_proto::function::{FunctionLimits, LISTENER_FD, TenantLimits};
use std::fs;
use std::io::ErrorKind;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use taken_process::{CallEnd, TakenThread};

/// Timeout for a compiler to confine itself.
const CONFINE_TIMEOUT: Duration = Duration::from_secs(20);
const STANDARD_INPUT: i32 = 0;

#[test]
fn a_tenants_process_has_no_files_network_privileges_or_core() {
    let tenant = TestTenant::start();
    tenant.deploy("one", &constant("one"), FunctionLimits::default());
    assert_eq!(tenant.connect().get("one", "/").status, 200);
    let process = format!("/proc/{}", tenant.process.id());
    let threads = fs::read_dir(format!("{process}/task")).unwrap();
    for thread in threads {
        let path = thread.unwrap().path();
        let status = fs::read_to_string(path.join("status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap().trim_start_matches(':').trim().to_owned()
        };
        // Mode 2 of seccomp is a filter.
        assert_eq!(
            (field("Seccomp"), field("NoNewPrivs")),
            ("2".to_owned(), "1".to_owned())
        );
        assert_eq!(field("CapEff"), "0".repeat(16));
        if nix::unistd::Uid::effective().is_root() {
            assert!(!field("Uid").starts_with('0'), "{}", field("Uid"));
        }
    }
    let limits = fs::read_to_string(format!("{process}/limits")).unwrap();
    let core = limits
        .lines()
        .find(|line| line.starts_with("Max core file size"))
        .unwrap();
    // The name of the limit has four words. The soft limit follows.
    assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
    if !nix::unistd::Uid::effective().is_root() {
        return;
    }
    assert_eq!(fs::read_dir(format!("{process}/root")).unwrap().count(), 0);
    for kind in ["net", "mnt", "ipc", "uts", "cgroup"] {
        let theirs = fs::read_link(format!("{process}/ns/{kind}")).unwrap();
        assert_ne!(
            theirs,
            fs::read_link(format!("/proc/self/ns/{kind}")).unwrap()
        );
    }
    // The only network interface is the loopback. The file starts with two lines of headings.
    let network = fs::read_to_string(format!("{process}/net/dev")).unwrap();
    assert!(
        network
            .lines()
            .skip(2)
            .all(|line| line.trim_start().starts_with("lo:")),
        "{network}"
    );
}

/// Takes over a thread, or skips the test if the host denies tracing.
fn take_or_skip(thread: u32, test: &str) -> Option<TakenThread> {
    match TakenThread::take(thread.try_into().unwrap()) {
        Ok(taken) => Some(taken),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            skip(test, "tracing of threads is not permitted on this host");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn threads(process: u32) -> Vec<u32> {
    let all = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let names = all.map(|entry| entry.unwrap().file_name());
    names
        .map(|name| name.to_str().unwrap().parse().unwrap())
        .collect()
}

/// A permitted system call shows that the attempts reach the kernel.
fn assert_calls_as(process: u32, thread: &mut TakenThread) {
    let own = thread.call(libc::SYS_getpid, [0; 6]).unwrap();
    assert_eq!(own, CallEnd::Returned(process.into()));
}

#[test]
fn code_in_a_serving_process_reaches_nothing() {
    for &reset in RESETS {
        let tenant = TestTenant::with_limits(&TenantLimits {
            reset,
            ..TenantLimits::default()
        });
        tenant.deploy("one", &constant("one"), FunctionLimits::default());
        let process = tenant.process.id();
        let mut host = Host::new("serve");
        for thread in threads(process) {
            let Some(mut taken) = take_or_skip(thread, "code_in_a_serving_process_reaches_nothing")
            else {
                return;
            };
            assert_calls_as(process, &mut taken);
            assert_eq!(host.attack(&mut taken, LISTENER_FD), Vec::<String>::new());
        }
        host.assert_untouched();
        // The process continues to work.
        assert_eq!(tenant.connect().get("one", "/").text(), "one");
        // This attempt kills the process, so it is the last one.
        let mut taken = TakenThread::take(process.try_into().unwrap()).unwrap();
        assert!(is_killed_for_a_32_bit_call(&mut taken));
    }
}

struct Compiler(Child);

impl Compiler {
    /// Starts a confined compiler that waits for its module.
    fn start() -> Self {
        let mut command = Command::new(program());
        command.env_clear().args(["compile", "--owner", OWNER]);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let compiler = Self(command.spawn().unwrap());
        let status = format!("/proc/{}/status", compiler.0.id());
        let start = Instant::now();
        // The compiler installs two filters. The second filter is its last step.
        while !fs::read_to_string(&status)
            .unwrap()
            .contains("Seccomp_filters:\t2")
        {
            assert!(
                start.elapsed() < CONFINE_TIMEOUT,
                "the compiler is not confined"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        compiler
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn code_in_a_compiler_reaches_nothing() {
    let compiler = Compiler::start();
    let process = compiler.0.id();
    let Some(mut taken) = take_or_skip(process, "code_in_a_compiler_reaches_nothing") else {
        return;
    };
    assert_calls_as(process, &mut taken);
    let mut host = Host::new("compile");
    assert_eq!(
        host.attack(&mut taken, STANDARD_INPUT),
        Vec::<String>::new()
    );
    host.assert_untouched();
    assert!(is_killed_for_a_32_bit_call(&mut taken));
}

/// Simulates a hole in the seccomp filter.
#[test]
fn code_that_the_filter_lets_through_finds_no_files_processes_or_network() {
    let test = "code_that_the_filter_lets_through_finds_no_files_processes_or_network";
    let tenant = TestTenant::start();
    let compiler = Compiler::start();
    for process in [tenant.process.id(), compiler.0.id()] {
        let Some(mut taken) = take_or_skip(process, test) else {
            return;
        };
        match taken.suspend_filter().map_err(|error| error.kind()) {
            // The kernel has no checkpoint support, or the test itself has a filter.
            Err(ErrorKind::InvalidInput | ErrorKind::PermissionDenied) => {
                return skip(test, "suspending filters is not permitted on this host");
            }
            suspended => suspended.unwrap(),
        }
        let mut host = Host::new("jail");
        assert_eq!(host.attack_jail(&mut taken), Vec::<String>::new());
        host.assert_untouched();
    }
}
