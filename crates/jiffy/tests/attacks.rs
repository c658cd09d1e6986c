//! Attacks of root in a guest that take processors, memory, disk or descriptors from everybody
//! else. While it does, a neighbour answers, the daemon answers, and the attacker can be ended.

use crate::support::engine::is_gvisor;
use crate::support::test_home::TestHome;
use crate::support::{alive, wait_for};
use jiffy_test_attributes::jiffy_test;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// Longest time that a neighbour's command, the daemon's answer or the end of the attacker may take
/// meanwhile. Idle hosts need 20 ms.
const SIEGE_TIMEOUT: Duration = Duration::from_secs(15);
/// Commands of the neighbour during an attack.
const COMMANDS: usize = 10;
/// Memory of the attacker's guest in MiB.
const MEMORY_MIB: u64 = 256;
/// Memory of its VMM besides, in MiB.
const OVERHEAD_MIB: u64 = 48;
/// Memory of gVisor's kernel besides, in MiB, as its control group allows.
const GVISOR_OVERHEAD_MIB: u64 = 64;
/// Most that is kept of a console on gVisor, in bytes.
const CONSOLE: u64 = 256 << 10;
/// Its disk in MiB.
const DISK_MIB: u64 = 256;

/// An attacker and a neighbour in one daemon.
struct Siege<'a> {
    test_home: &'a TestHome,
    attacker: String,
    /// The attacker's VMM.
    vmm: u32,
    neighbour: String,
}

/// Runs `work` with an attacker beside a neighbour; then the attacker is ended and nothing of it is
/// left.
fn besieged(work: impl FnOnce(&Siege<'_>)) {
    let test_home = TestHome::new();
    let mut daemon = test_home.serve(&["--network", "off", "--warm-pool", "0"]);
    let neighbour = test_home.ok(&["create"]);
    test_home.sh(&neighbour, "true");
    let before = test_home.vmms();
    let (memory, disk) = (format!("{MEMORY_MIB}MiB"), format!("{DISK_MIB}MiB"));
    let attacker = test_home.ok(&["create", "--memory", &memory, "--disk", &disk]);
    let vmms = test_home.vmms();
    let new: Vec<&u32> = vmms.difference(&before).collect();
    let siege = Siege {
        test_home: &test_home,
        attacker,
        vmm: *new[0],
        neighbour,
    };
    work(&siege);
    siege.hold_out();
    let began = Instant::now();
    test_home.ok(&["kill", &siege.attacker]);
    wait_for("the attacker's VMM to go", || {
        (!alive(siege.vmm)).then_some(())
    });
    within("ending the attacker", began);
    siege.others_hold_out();
    assert_eq!(test_home.vmms(), before);
    test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
}

fn within(what: &str, began: Instant) {
    let took = began.elapsed();
    eprintln!("{what} took {took:?}");
    assert!(took < SIEGE_TIMEOUT, "{what} took {took:?}");
}

impl Siege<'_> {
    /// Starts `script` as root in the attacker's guest, where it goes on alone.
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
            panic!("{done:?}; {}", self.last_words());
        }
    }

    /// The attacker's console, and what the daemon says of its end.
    fn last_words(&self) -> String {
        let [state, console] = ["inspect", "logs"].map(|task| {
            let told = self.test_home.call(&[task, &self.attacker]);
            (told.stdout + &told.stderr).replace('\0', "")
        });
        format!("{state}\n{console}")
    }

    /// Output of a Python program as root in the attacker's guest.
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

    /// The neighbour and the daemon answer in time, and the attacker's sandbox has what it was
    /// given at most, and lives.
    fn hold_out(&self) {
        self.others_hold_out();
        assert!(
            alive(self.vmm),
            "the attack ended its sandbox: {}",
            self.last_words()
        );
    }

    fn others_hold_out(&self) {
        let mut took = Vec::new();
        for _ in 0..COMMANDS {
            let began = Instant::now();
            self.test_home.sh(&self.neighbour, "true");
            took.push(began.elapsed());
            self.look();
        }
        took.sort();
        eprintln!(
            "the neighbour's commands took {:?} in the median, {:?} at most",
            took[COMMANDS / 2],
            took[COMMANDS - 1]
        );
        assert!(took[COMMANDS - 1] < SIEGE_TIMEOUT, "{took:?}");
        let began = Instant::now();
        let all = self.test_home.ok(&["ls"]);
        assert!(all.contains(&self.neighbour[..8]), "{all}");
        within("the daemon's answer", began);
    }

    fn look(&self) {
        let resident = self.resident();
        let overhead = if is_gvisor() {
            GVISOR_OVERHEAD_MIB
        } else {
            OVERHEAD_MIB
        };
        assert!(resident <= MEMORY_MIB + overhead, "{resident} MiB");
    }

    /// Memory of the attacker's VMM in MiB; none when it is gone.
    fn resident(&self) -> u64 {
        if is_gvisor() {
            return self.charged();
        }
        let status = fs::read_to_string(format!("/proc/{}/status", self.vmm)).unwrap_or_default();
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
        let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok());
        kib.unwrap_or(0u64) / 1024
    }

    /// Memory of the attacker's control group in MiB; none when it is gone.
    fn charged(&self) -> u64 {
        let groups = fs::read_to_string(format!("/proc/{}/cgroup", self.vmm)).unwrap_or_default();
        // In version 1 a line for each controller, in version 2 one for all (cgroups(7)).
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

    /// True if it uses most of its memory.
    fn is_full(&self) -> bool {
        self.look();
        self.resident() > MEMORY_MIB * 3 / 4
    }

    /// Processor time that it has used, in clock ticks of 10 ms.
    fn ticks(&self) -> u64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.vmm)).unwrap();
        // proc_pid_stat(5): of what follows the name, the 12th and 13th field are utime and stime.
        let fields: Vec<&str> = stat
            .rsplit(')')
            .next()
            .unwrap()
            .split_whitespace()
            .collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    /// Bytes in MiB on the host's disk of the file that it has open for writing and that has no
    /// name.
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
        blocks.sum::<u64>() / 2048
    }

    /// Waits until the attack has cost a second of processor time.
    fn rages(&self) {
        let before = self.ticks();
        wait_for("the attack to begin", || {
            (self.ticks() > before + 100).then_some(())
        });
    }
}

/// Processes that all make more of themselves, and go on trying when there is no room.
const FORK_BOMB: &str =
    "exec python3 -c \"import os\nwhile True:\n try: os.fork()\n except OSError: pass\"";

#[jiffy_test(engine = "each")]
fn a_fork_bomb_affects_no_other_sandbox() {
    besieged(|siege| {
        siege.start(FORK_BOMB);
        siege.rages();
        siege.hold_out();
    });
}

#[jiffy_test(engine = "each")]
fn a_guest_that_takes_all_memory_takes_only_its_own() {
    besieged(|siege| {
        siege.start(
            "while :; do python3 -c \"b = []\nwhile True: b.append(b\\\"x\\\" * (1 << 22))\"; done",
        );
        wait_for("the guest's memory to be used", || {
            siege.is_full().then_some(())
        });
        siege.hold_out();
    });
}

#[jiffy_test(engine = "each")]
fn a_guest_that_fills_its_disk_fills_no_more_than_that() {
    besieged(|siege| {
        // Again and again, so that it goes on while it is looked at; also what is left of
        // inodes.
        siege.start(
                "while :; do dd if=/dev/urandom of=/fill bs=1M; for i in $(seq 2000); do : >/f$i; done; rm -f /fill /f*; done",
            );
        if is_gvisor() {
            // Its files are its memory.
            wait_for("the disk to be full", || siege.is_full().then_some(()));
            return siege.hold_out();
        }
        let most = DISK_MIB + DISK_MIB / 8;
        wait_for("the disk to be full", || {
            let written = siege.written();
            assert!(written < most, "{written} MiB");
            (written > DISK_MIB * 3 / 4).then_some(())
        });
        siege.hold_out();
        let written = siege.written();
        assert!(written < most, "{written} MiB");
    });
}

#[jiffy_test(engine = "each")]
fn a_console_flood_stays_in_its_ring_buffer() {
    besieged(|siege| {
        if is_gvisor() {
            siege.start("exec cat /dev/urandom >/proc/1/fd/1");
            siege.rages();
            siege.hold_out();
            let sandboxes = siege.test_home.dir.path().join("run/gvisor");
            let logs = fs::read_dir(sandboxes).unwrap().flatten();
            let logs = logs.filter_map(|d| fs::metadata(d.path().join("console.log")).ok());
            let largest = logs.map(|log| log.len()).max().unwrap();
            assert!((1..CONSOLE).contains(&largest), "{largest} bytes");
            return;
        }
        // As much as it can in the time; 100 MB would take an hour at an exit for each byte.
        siege.start("dd if=/dev/zero of=/dev/ttyS0 bs=64k count=1600 & exec dd if=/dev/urandom of=/dev/console bs=64k count=1600");
        siege.rages();
        let before = siege.resident();
        siege.hold_out();
        let grown = siege.resident().saturating_sub(before);
        assert!(grown < 32, "{grown} MiB more");
    });
}

/// For programs in guests that call by virtual sockets.
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
    besieged(|siege| {
        // 1024 of the host is where agents greet; what listens at 49983 and 49984 is the
        // guest's own.
        let program = format!(
            r#"{VSOCK}
ports = [0, 1, 22, 53, 80, 443, 1022, 1023, 1024, 1025, 2375, 3000, 9999, 49982, 49983, 49984, 49985, 65535, 65536, 0x7fffffff, 0xfffffffe]
# Hypervisor, host, the guest itself, its neighbours, anybody.
cids = (0, 2, 3, 4, 5, 100, 0x7fffffff, 0xfffffffe)
calls = {{(cid, port): begin(cid, port) for cid in cids for port in ports}}
time.sleep(1.5)
print(sorted(call for call, s in calls.items() if connected(s)))
"#
        );
        assert_eq!(
            siege.python(&program),
            "[(2, 1024), (3, 49983), (3, 49984)]"
        );
    });
}

#[jiffy_test(not_on_gvisor = "gVisor has no virtual sockets")]
fn thousands_of_half_open_virtual_connections_cost_host_and_neighbours_nothing() {
    besieged(|siege| {
        let daemon = siege.test_home.daemon();
        let open = |pid: u32| fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        let before = (open(daemon), open(siege.vmm));
        let program = format!(
            r#"{VSOCK}
import threading
def storm():
    kept = []
    for n in range(1500):
        kept.append(begin(2, 1024 if n % 3 else 1023 + n))
    # Some say half a greeting and no more.
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
        fs::write(siege.test_home.dir.path().join("storm.py"), program).unwrap();
        let file = siege.test_home.dir.path().join("storm.py");
        let to = format!("{}:/tmp/storm.py", siege.attacker);
        siege.test_home.ok(&["cp", file.to_str().unwrap(), &to]);
        siege.start("python3 /tmp/storm.py");
        siege.rages();
        siege.hold_out();
        let after = (open(daemon), open(siege.vmm));
        eprintln!("descriptors of daemon and VMM: {before:?}, then {after:?}");
        assert!(after.0 < before.0 + 64, "{before:?} {after:?}");
        assert!(after.1 < before.1 + 1100, "{before:?} {after:?}");
    });
}

#[jiffy_test(engine = "each")]
fn all_attacks_at_once_leave_the_neighbour_alone() {
    besieged(|siege| {
        siege.start("while :; do dd if=/dev/urandom of=/fill bs=1M; rm /fill; done");
        siege.start(if is_gvisor() {
            "exec cat /dev/zero >/proc/1/fd/1"
        } else {
            "dd if=/dev/zero of=/dev/ttyS0 bs=64k"
        });
        siege.start(
            "while :; do python3 -c \"b = [b\\\"x\\\" * (1 << 20) for _ in range(10000)]\"; done",
        );
        siege.start(FORK_BOMB);
        siege.rages();
        siege.hold_out();
        // Its state is still its own.
        let others: BTreeSet<u32> = siege.test_home.vmms();
        assert!(others.contains(&siege.vmm) || !alive(siege.vmm));
    });
}
