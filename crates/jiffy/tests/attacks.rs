//! Attacks by root in a guest that exhaust processors, memory, disk or descriptors. During each
//! attack, another sandbox and the daemon must respond, and the attacker must be removable.

use crate::support::engine::is_gvisor;
use crate::support::test_home::TestHome;
use crate::support::{alive, wait_for};
use jiffy_test_attributes::jiffy_test;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// Timeout of another sandbox's command, the daemon's response and the removal of the attacker. An
/// idle host requires 20 ms.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);
/// Number of commands in the neighbour during an attack.
const COMMANDS: usize = 10;
/// Memory of the attacker's guest in MiB.
const MEMORY_MIB: u64 = 256;
/// Additional memory of its VMM in MiB.
const OVERHEAD_MIB: u64 = 48;
/// Additional memory of gVisor's kernel in MiB, as permitted by its control group.
const GVISOR_OVERHEAD_MIB: u64 = 64;
/// Maximum size of a retained console on gVisor, in bytes.
const CONSOLE: u64 = 256 << 10;
/// Disk of the attacker in MiB.
const DISK_MIB: u64 = 256;

/// Attacker and neighbour in one daemon.
struct Attack<'a> {
    test_home: &'a TestHome,
    attacker: String,
    /// The attacker's VMM.
    vmm: u32,
    neighbour: String,
}

/// Runs `work` with an attacker and a neighbour. Then removes the attacker, and checks that nothing
/// remains.
fn with_attack(work: impl FnOnce(&Attack<'_>)) {
    let test_home = TestHome::new();
    let mut daemon = test_home.serve(&["--network", "off", "--warm-pool", "0"]);
    let neighbour = test_home.ok(&["create"]);
    test_home.sh(&neighbour, "true");
    let before = test_home.vmms();
    let (memory, disk) = (format!("{MEMORY_MIB}MiB"), format!("{DISK_MIB}MiB"));
    let attacker = test_home.ok(&["create", "--memory", &memory, "--disk", &disk]);
    let vmms = test_home.vmms();
    let new: Vec<&u32> = vmms.difference(&before).collect();
    let attack = Attack {
        test_home: &test_home,
        attacker,
        vmm: *new[0],
        neighbour,
    };
    work(&attack);
    attack.assert_responsive();
    let began = Instant::now();
    test_home.ok(&["kill", &attack.attacker]);
    wait_for("the attacker's VMM to exit", || {
        (!alive(attack.vmm)).then_some(())
    });
    within("ending the attacker", began);
    attack.assert_others_responsive();
    assert_eq!(test_home.vmms(), before);
    test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}

/// Asserts that the daemon has answered in time.
fn within(what: &str, began: Instant) {
    let took = began.elapsed();
    eprintln!("{what} took {took:?}");
    assert!(took < RESPONSE_TIMEOUT, "{what} took {took:?}");
}

impl Attack<'_> {
    /// Starts `script` as root in the attacker's guest, in the background.
    fn start(&self, script: &str) {
        let script = format!("setsid nohup sh -c '{script}' >/dev/null 2>&1 </dev/null &");
        let command = [
            "exec",
            "--user",
            "root",
            &self.attacker,
            "--",
            "sh",
            "-c",
            &script,
        ];
        let done = self.test_home.call(&command);
        if done.code != Some(0) {
            panic!("{done:?}; {}", self.diagnostics());
        }
    }

    /// Returns the attacker's console, and the cause of its termination according to the daemon.
    fn diagnostics(&self) -> String {
        let [state, console] = ["inspect", "logs"].map(|task| {
            let report = self.test_home.call(&[task, &self.attacker]);
            (report.stdout + &report.stderr).replace('\0', "")
        });
        format!("{state}\n{console}")
    }

    /// Returns the output of a Python program run as root in the attacker's guest.
    fn python(&self, program: &str) -> String {
        self.test_home.ok(&[
            "exec",
            "--user",
            "root",
            &self.attacker,
            "--",
            "python3",
            "-c",
            program,
        ])
    }

    /// Checks that the neighbour and the daemon respond in time, and that the attacker's sandbox is
    /// running within its limits.
    fn assert_responsive(&self) {
        self.assert_others_responsive();
        assert!(
            alive(self.vmm),
            "the attack ended its sandbox: {}",
            self.diagnostics()
        );
    }

    /// Checks that the neighbour and the daemon respond in time.
    fn assert_others_responsive(&self) {
        let mut took = Vec::new();
        for _ in 0..COMMANDS {
            let began = Instant::now();
            self.test_home.sh(&self.neighbour, "true");
            took.push(began.elapsed());
            self.assert_memory_bounded();
        }
        took.sort();
        eprintln!(
            "the neighbour's commands took {:?} in the median, {:?} at most",
            took[COMMANDS / 2],
            took[COMMANDS - 1]
        );
        assert!(took[COMMANDS - 1] < RESPONSE_TIMEOUT, "{took:?}");
        let began = Instant::now();
        let all = self.test_home.ok(&["ls"]);
        assert!(all.contains(&self.neighbour[..8]), "{all}");
        within("the daemon's answer", began);
    }

    /// Asserts that the process of the guest uses at most the guest's memory and a fixed overhead.
    fn assert_memory_bounded(&self) {
        let resident = self.resident();
        let overhead = if is_gvisor() {
            GVISOR_OVERHEAD_MIB
        } else {
            OVERHEAD_MIB
        };
        assert!(resident <= MEMORY_MIB + overhead, "{resident} MiB");
    }

    /// Returns the memory of the attacker's VMM in MiB. 0 if the VMM has exited.
    fn resident(&self) -> u64 {
        if is_gvisor() {
            return self.cgroup_memory();
        }
        let status = fs::read_to_string(format!("/proc/{}/status", self.vmm)).unwrap_or_default();
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
        let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok());
        kib.unwrap_or(0u64) / 1024
    }

    /// Returns the memory of the attacker's control group in MiB. 0 if the group was removed.
    fn cgroup_memory(&self) -> u64 {
        let groups = fs::read_to_string(format!("/proc/{}/cgroup", self.vmm)).unwrap_or_default();
        // In version 1 of control groups, the file has one line for each controller. In version 2,
        // it has one line for all controllers (cgroups(7)).
        let files = groups.lines().filter_map(|line| {
            let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
            match controllers {
                "memory" => Some(format!(
                    "/sys/fs/cgroup/memory{group}/memory.usage_in_bytes"
                )),
                "" => Some(format!("/sys/fs/cgroup{group}/memory.current")),
                _ => None,
            }
        });
        let bytes = files.filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok());
        bytes.max().unwrap_or(0_u64) >> 20
    }

    /// Returns whether the attacker uses most of its memory.
    fn is_full(&self) -> bool {
        self.assert_memory_bounded();
        self.resident() > MEMORY_MIB * 3 / 4
    }

    /// Returns the processor time used by the attacker, in clock ticks of 10 ms.
    fn ticks(&self) -> u64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.vmm)).unwrap();
        // proc_pid_stat(5): utime and stime are the 12th and 13th field after the name.
        let fields: Vec<&str> = stat
            .rsplit(')')
            .next()
            .unwrap()
            .split_whitespace()
            .collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    /// Returns the allocated MiB of the unnamed file that the VMM has open for writing.
    fn written(&self) -> u64 {
        let files = fs::read_dir(format!("/proc/{}/fd", self.vmm)).unwrap();
        let store = self.test_home.dir.path().join("snapshots");
        let nameless = files.flatten().map(|f| f.path()).filter(|f| {
            fs::read_link(f).is_ok_and(|to| {
                to.starts_with(&store) && to.to_string_lossy().ends_with("(deleted)")
            })
        });
        let blocks = nameless
            .filter_map(|f| fs::metadata(f).ok())
            .map(|m| m.blocks());
        // `st_blocks` counts blocks of 512 bytes.
        blocks.sum::<u64>() / 2048
    }

    /// Waits until the attack has used a second of processor time.
    fn wait_for_load(&self) {
        let before = self.ticks();
        wait_for("the attack to start", || {
            (self.ticks() > before + 100).then_some(())
        });
    }
}

/// Processes that all fork, and retry when the limit is reached.
const FORK_BOMB: &str =
    "exec python3 -c \"import os\nwhile True:\n try: os.fork()\n except OSError: pass\"";

#[jiffy_test(engine = "each")]
fn a_fork_bomb_affects_no_other_sandbox() {
    with_attack(|attack| {
        attack.start(FORK_BOMB);
        attack.wait_for_load();
        attack.assert_responsive();
    });
}

#[jiffy_test(engine = "each")]
fn a_guest_that_takes_all_memory_takes_only_its_own() {
    with_attack(|attack| {
        attack.start(
            "while :; do python3 -c \"b = []\nwhile True: b.append(b\\\"x\\\" * (1 << 22))\"; done",
        );
        wait_for("the guest's memory to be used", || {
            attack.is_full().then_some(())
        });
        attack.assert_responsive();
    });
}

#[jiffy_test(engine = "each")]
fn a_guest_that_fills_its_disk_fills_no_more_than_that() {
    with_attack(|attack| {
        // Repeat, so that the disk stays full during the checks. Also exhaust the remaining inodes.
        attack.start(
                "while :; do dd if=/dev/urandom of=/fill bs=1M; for i in $(seq 2000); do : >/f$i; done; rm -f /fill /f*; done",
            );
        if is_gvisor() {
            // On gVisor, the files are in memory.
            wait_for("the disk to be full", || attack.is_full().then_some(()));
            return attack.assert_responsive();
        }
        // An eighth of the size is permitted for metadata.
        let most = DISK_MIB + DISK_MIB / 8;
        wait_for("the disk to be full", || {
            let written = attack.written();
            assert!(written < most, "{written} MiB");
            (written > DISK_MIB * 3 / 4).then_some(())
        });
        attack.assert_responsive();
        let written = attack.written();
        assert!(written < most, "{written} MiB");
    });
}

#[jiffy_test(engine = "each")]
fn a_console_flood_stays_in_its_ring_buffer() {
    with_attack(|attack| {
        if is_gvisor() {
            attack.start("exec cat /dev/urandom >/proc/1/fd/1");
            attack.wait_for_load();
            attack.assert_responsive();
            let sandboxes = attack.test_home.dir.path().join("run/gvisor");
            let logs = fs::read_dir(sandboxes).unwrap().flatten();
            let logs = logs.filter_map(|d| fs::metadata(d.path().join("console.log")).ok());
            let largest = logs.map(|log| log.len()).max().unwrap();
            assert!((1..CONSOLE).contains(&largest), "{largest} bytes");
            return;
        }
        // The guest writes as much as possible in the available time. 100 MB with an exit per byte
        // would take an hour.
        attack.start("dd if=/dev/zero of=/dev/ttyS0 bs=64k count=1600 & exec dd if=/dev/urandom of=/dev/console bs=64k count=1600");
        attack.wait_for_load();
        let before = attack.resident();
        attack.assert_responsive();
        // The VMM retains 64 KiB of the console. A VMM that retained all of it would grow further.
        let grown = attack.resident().saturating_sub(before);
        assert!(grown < 32, "{grown} MiB more");
    });
}

/// Definitions for programs in guests that use virtual sockets.
const VSOCK: &str = r#"
import resource, socket, time
resource.setrlimit(resource.RLIMIT_NOFILE, (10000, 10000))
def begin(cid, port):
    s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    s.setblocking(False)
    try: s.connect((cid, port))
    except OSError: pass
    return s
def connected(s):
    try: s.getpeername(); return True
    except OSError: return False
"#;

#[jiffy_test(not_on_gvisor = "gVisor has no virtual sockets")]
fn vsock_reaches_one_port_of_the_host_and_no_other_guest() {
    with_attack(|attack| {
        // Agents connect to port 1024 of the host. The listeners at 49983 to 49985 belong to the
        // guest itself, and close each connection that is not from the host.
        let program = format!(
            r#"{VSOCK}
ports = [0, 1, 22, 53, 80, 443, 1022, 1023, 1024, 1025, 2375, 3000, 9999, 49982, 49983, 49984, 49985, 65535, 65536, 0x7fffffff, 0xfffffffe]
# Hypervisor, host, the guest itself, its neighbours, any address.
cids = (0, 2, 3, 4, 5, 100, 0x7fffffff, 0xfffffffe)
calls = {{(cid, port): begin(cid, port) for cid in cids for port in ports}}
time.sleep(1.5)
print(sorted(call for call, s in calls.items() if connected(s)))
"#
        );
        assert_eq!(
            attack.python(&program),
            "[(2, 1024), (3, 49983), (3, 49984), (3, 49985)]"
        );
    });
}

#[jiffy_test(not_on_gvisor = "gVisor has no virtual sockets")]
fn thousands_of_half_open_virtual_connections_cost_host_and_neighbours_nothing() {
    with_attack(|attack| {
        let daemon = attack.test_home.daemon();
        let open = |pid: u32| fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        let before = (open(daemon), open(attack.vmm));
        let program = format!(
            r#"{VSOCK}
import threading
def storm():
    kept = []
    for n in range(1500):
        kept.append(begin(2, 1024 if n % 3 else 1023 + n))
    # Some send half a greeting and stop.
    for s in kept:
        try: s.send(b"{{\"version\":")
        except OSError: pass
    time.sleep(1)
while True:
    threads = [threading.Thread(target=storm) for _ in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
"#
        );
        fs::write(attack.test_home.dir.path().join("storm.py"), program).unwrap();
        let file = attack.test_home.dir.path().join("storm.py");
        let to = format!("{}:/tmp/storm.py", attack.attacker);
        attack.test_home.ok(&["cp", file.to_str().unwrap(), &to]);
        attack.start("python3 /tmp/storm.py");
        attack.wait_for_load();
        attack.assert_responsive();
        let after = (open(daemon), open(attack.vmm));
        eprintln!("descriptors of daemon and VMM: {before:?}, then {after:?}");
        // The attack opens thousands of connections. The daemon must hold only a few of them.
        assert!(after.0 < before.0 + 64, "{before:?} {after:?}");
        // A VMM has at most 1,024 connections, and a few descriptors for other purposes.
        assert!(after.1 < before.1 + 1100, "{before:?} {after:?}");
    });
}

#[jiffy_test(engine = "each")]
fn concurrent_attacks_do_not_affect_the_neighbour() {
    with_attack(|attack| {
        attack.start("while :; do dd if=/dev/urandom of=/fill bs=1M; rm /fill; done");
        attack.start(if is_gvisor() {
            "exec cat /dev/zero >/proc/1/fd/1"
        } else {
            "dd if=/dev/zero of=/dev/ttyS0 bs=64k"
        });
        attack.start(
            "while :; do python3 -c \"b = [b\\\"x\\\" * (1 << 20) for _ in range(10000)]\"; done",
        );
        attack.start(FORK_BOMB);
        attack.wait_for_load();
        attack.assert_responsive();
        // `vmms` finds VMMs by the files of this data directory that they have open. The attacker's
        // VMM is in the list unless it has exited.
        let vmms: BTreeSet<u32> = attack.test_home.vmms();
        assert!(vmms.contains(&attack.vmm) || !alive(attack.vmm));
    });
}
