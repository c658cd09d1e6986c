//! The complete run: a daemon that is repeatedly killed and restarted, killed VMMs and sentries,
//! and concurrent clients. A *sentry* is the process that runs a sandbox on gVisor.

use super::api::Api;
use super::client::client;
use super::final_checks;
use super::model::{SoakModel, locked};
use super::operations::LockedSandbox;
use super::random::TestRandom;
use super::spawn::from_template;
use crate::support::lab::with_lab;
use crate::support::test_home::TestHome;
use crate::support::{SetOnDrop, engine, jiffy, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// Number of concurrent clients.
const CLIENTS: u64 = 5;
/// Default duration per engine, in seconds. `JIFFY_SOAK_SECONDS` overrides it.
const DEFAULT_SECONDS: u64 = 12;
/// Intervals between kills.
const VMM_KILL_INTERVAL: Duration = Duration::from_secs(4);
const DAEMON_KILL_INTERVAL: Duration = Duration::from_secs(40);
/// Delay before the first daemon is killed. It is short, so that a short run includes it.
const FIRST_DAEMON_KILL: Duration = Duration::from_secs(8);
/// One in this number of kills selects a process without a sandbox, if one exists.
const VMM_KILL_SHARE: usize = 4;

/// Consecutive daemons of one data directory.
struct Daemon<'a> {
    test_home: &'a TestHome,
    process: Child,
}

fn log_of(test_home: &TestHome) -> PathBuf {
    test_home.dir.path().join("daemon.log")
}

/// Starts a daemon, and waits until it answers.
fn start(test_home: &TestHome) -> Child {
    let log: File = OpenOptions::new()
        .create(true)
        .append(true)
        .open(log_of(test_home))
        .unwrap();
    let mut command = jiffy(&[
        "serve",
        "--no-listen",
        "--network",
        "on",
        "--warm-pool",
        "1",
    ]);
    command
        .env("JIFFY_HOME", test_home.dir.path())
        .stdout(Stdio::null())
        .stderr(log);
    let mut daemon = command.spawn().unwrap();
    let socket = test_home.dir.path().join("run/jiffy.sock");
    wait_for("the daemon", || {
        assert_eq!(daemon.try_wait().unwrap(), None, "the daemon exited");
        UnixStream::connect(&socket).ok()
    });
    daemon
}

impl Daemon<'_> {
    /// Kills the daemon, and starts the next one.
    fn kill(&mut self, soak: &SoakModel) {
        // The number is odd from the kill until the next daemon listens.
        soak.daemon_kills.fetch_add(1, SeqCst);
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.test_home.wait_for_daemon_exit();
        self.process = start(self.test_home);
        soak.daemon_kills.fetch_add(1, SeqCst);
    }
}

/// Returns the process of a sandbox's VMM or sentry.
fn process_of(soak: &SoakModel, id: &str) -> Option<u32> {
    let path = format!("/sandboxes/{id}/process");
    let reply = soak.api.call("GET", &path, &Value::Null);
    reply.body()["pid"].as_u64()?.try_into().ok()
}

/// Kills a random VMM or sentry: usually the process of a sandbox, and sometimes a process that
/// belongs to no sandbox, for example in the warm pool.
fn kill_guest(soak: &SoakModel, daemon: &Daemon, random: &mut TestRandom) {
    let all = locked(&soak.sandboxes).clone();
    let owned = all
        .iter()
        .filter_map(|s| Some((s, process_of(soak, &s.id)?)));
    let owned: Vec<_> = owned.collect();
    let vmms = daemon.test_home.vmms();
    locked(&soak.groups).extend(vmms.iter().flat_map(|vmm| groups_of(*vmm)));
    if random.below(VMM_KILL_SHARE) == 0 {
        // Processes without a sandbox, of which one is killed.
        let mut strays = vmms.clone();
        strays.retain(|vmm| !owned.iter().any(|(_, pid)| pid == vmm));
        if let Some(stray) = strays.first().copied() {
            locked(&soak.orphan_kills).push(Instant::now());
            return end_process(soak, stray);
        }
    }
    if owned.is_empty() {
        return;
    }
    let (victim, pid) = owned[random.below(owned.len())];
    // The process id of an exited process may have been reused.
    if daemon.test_home.vmms().contains(&pid) {
        victim.hits.fetch_add(1, SeqCst);
        end_process(soak, pid);
    }
}

/// Kills a VMM or sentry, and counts the kill.
fn end_process(soak: &SoakModel, pid: u32) {
    let _ = kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL);
    soak.vmm_kills.fetch_add(1, SeqCst);
}

/// Returns the names of the control groups of a process.
fn groups_of(pid: u32) -> BTreeSet<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let paths = text.lines().filter(|line| line.contains("/jiffy"));
    paths
        .filter_map(|line| Some(line.rsplit_once('/')?.1.to_owned()))
        .collect()
}

/// Kills guests and daemons until the time is up or a client has found an error.
fn kill_repeatedly(soak: &SoakModel, daemon: &mut Daemon, mut random: TestRandom, time: Duration) {
    let began = Instant::now();
    let mut next_vmm = began + VMM_KILL_INTERVAL;
    let mut next_daemon = began + FIRST_DAEMON_KILL;
    while began.elapsed() < time && !soak.over.load(SeqCst) {
        if Instant::now() > next_daemon {
            daemon.kill(soak);
            next_daemon = Instant::now() + DAEMON_KILL_INTERVAL;
        }
        if Instant::now() > next_vmm {
            kill_guest(soak, daemon, &mut random);
            next_vmm = Instant::now() + VMM_KILL_INTERVAL;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    soak.over.store(true, SeqCst);
}

fn setting(name: &str) -> Option<u64> {
    Some(std::env::var(name).ok()?.parse().unwrap())
}

/// Runs the test with the duration and the seed of the environment.
pub fn soak() {
    let time = Duration::from_secs(setting("JIFFY_SOAK_SECONDS").unwrap_or(DEFAULT_SECONDS));
    let seed = setting("JIFFY_SOAK_SEED").unwrap_or_else(|| {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
        now.as_secs()
    });
    eprintln!("soak: JIFFY_SOAK_SEED={seed}, {} s", time.as_secs());
    with_lab(|_| {
        let test_home = TestHome::new();
        run(&test_home, seed, time);
        drop(test_home);
        crate::support::network_probe::assert_clean();
    });
}

/// Creates a first snapshot, runs clients while guests and daemons are killed, and checks the final
/// state.
fn run(test_home: &TestHome, seed: u64, time: Duration) {
    let engine = engine::wanted();
    let mut daemon = Daemon {
        test_home,
        process: start(test_home),
    };
    // A sentry's own memory counts towards its guest's memory.
    let memory_mib = if engine::is_gvisor() { 256 } else { 128 };
    let api = Api {
        socket: test_home.dir.path().join("run/jiffy.sock"),
        unanswered: Mutex::default(),
    };
    let soak = SoakModel::new(api, memory_mib);
    // Clients create most sandboxes from snapshots, so a first snapshot must exist. Clients never
    // remove it.
    let first = from_template(&soak, test_home).unwrap().unwrap();
    let mut model = first.lock();
    let mut held = LockedSandbox {
        soak: &soak,
        sandbox: &first,
        model: &mut model,
    };
    // The request is acknowledged after the snapshot is stored.
    held.snapshot("stored").unwrap();
    drop(model);
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (soak, engine) = (&soak, engine.clone());
            scope.spawn(move || {
                engine::want(engine);
                client(soak, test_home, TestRandom::new(seed, number));
            });
        }
        let _over = SetOnDrop(&soak.over);
        kill_repeatedly(&soak, &mut daemon, TestRandom::new(seed, CLIENTS), time);
    });
    let done = final_checks::verify_all(&soak);
    if let Err(found) = done {
        locked(&soak.found).push(found);
    }
    locked(&soak.found).append(&mut locked(&soak.api.unanswered));
    let tally = format!("{:?}", locked(&soak.tally));
    let daemons = soak.daemon_kills.load(SeqCst) / 2;
    let vmms = soak.vmm_kills.load(SeqCst);
    eprintln!("soak: {daemons} daemons and {vmms} guests killed; done and not done: {tally}");
    let found = locked(&soak.found);
    if !found.is_empty() {
        fail_with_report(&soak, test_home, seed, &found);
    }
    drop(found);
    final_checks::remove_all(&soak);
    final_checks::assert_nothing_left(&soak, test_home);
    test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
    daemon.process.wait().unwrap();
    final_checks::no_process_is_left(&soak, test_home);
}

/// Fails with all available information.
fn fail_with_report(soak: &SoakModel, test_home: &TestHome, seed: u64, found: &[String]) -> ! {
    let log = std::fs::read_to_string(log_of(test_home)).unwrap_or_default();
    // Lines without a timestamp are not from the daemon itself.
    let alarming = |line: &&str| {
        line.contains(" WARN ") || line.contains(" ERROR ") || !line.starts_with("20")
    };
    let lines: Vec<&str> = log.lines().filter(alarming).collect();
    let last = lines[lines.len().saturating_sub(40)..].join("\n");
    for sandbox in locked(&soak.sandboxes).iter() {
        eprintln!("{}", sandbox.lock().describe(&sandbox.id));
    }
    eprintln!("the daemon's warnings:\n{last}");
    panic!(
        "seed {seed}: {} found:\n{}",
        found.len(),
        found.join("\n\n")
    );
}
