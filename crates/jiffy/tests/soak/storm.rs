//! The whole run: a daemon that is killed and started anew, VMMs that are killed, clients
//! meanwhile.

use super::api::Api;
use super::client::client;
use super::dice::Dice;
use super::end;
use super::lives::Turn;
use super::model::{World, locked};
use super::spawn::from_template;
use crate::support::lab::with_lab;
use crate::support::place::Place;
use crate::support::{engine, jiffy, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

const CLIENTS: u64 = 5;
/// Time of one engine's part, unless `JIFFY_SOAK_SECONDS` says otherwise.
const USUAL_SECONDS: u64 = 60;
const VMM_KILL_INTERVAL: Duration = Duration::from_secs(4);
const DAEMON_KILL_INTERVAL: Duration = Duration::from_secs(40);
/// The first daemon dies soon, so that a short run sees two deaths.
const FIRST_DAEMON_KILL: Duration = Duration::from_secs(12);
/// One in so many kills hits what no sandbox owns, if there is such a process.
const STRAY_SHARE: usize = 4;

/// Daemons of one place, one after the other.
struct Daemon<'a> {
    place: &'a Place,
    process: Child,
}

fn log_of(place: &Place) -> PathBuf {
    place.dir.path().join("daemon.log")
}

fn start(place: &Place) -> Child {
    let log: File = OpenOptions::new()
        .create(true)
        .append(true)
        .open(log_of(place))
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
        .env("JIFFY_HOME", place.dir.path())
        .stdout(Stdio::null())
        .stderr(log);
    let mut daemon = command.spawn().unwrap();
    let socket = place.dir.path().join("run/jiffy.sock");
    wait_for("the daemon", || {
        assert_eq!(daemon.try_wait().unwrap(), None, "the daemon ended");
        UnixStream::connect(&socket).ok()
    });
    daemon
}

impl Daemon<'_> {
    fn kill(&mut self, world: &World) {
        // Odd from before the death until the next one listens.
        world.daemon_kills.fetch_add(1, SeqCst);
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.place.daemon_went();
        self.process = start(self.place);
        world.daemon_kills.fetch_add(1, SeqCst);
    }
}

/// Process of a sandbox's VMM or sentry.
fn process_of(world: &World, id: &str) -> Option<u32> {
    let path = format!("/sandboxes/{id}/process");
    let reply = world.api.call("GET", &path, &Value::Null);
    reply.body()["pid"].as_u64()?.try_into().ok()
}

/// Kills the VMM or sentry of a sandbox, now and then one that no sandbox owns yet.
fn kill_guest(world: &World, daemon: &Daemon, dice: &mut Dice) {
    let all = locked(&world.sandboxes).clone();
    let owned = all
        .iter()
        .filter_map(|s| Some((s, process_of(world, &s.id)?)));
    let owned: Vec<_> = owned.collect();
    let vmms = daemon.place.vmms();
    locked(&world.groups).extend(vmms.iter().flat_map(|vmm| groups_of(*vmm)));
    if dice.throw(STRAY_SHARE) == 0 {
        let mut strays = vmms.clone();
        strays.retain(|vmm| !owned.iter().any(|(_, pid)| pid == vmm));
        if let Some(stray) = strays.first().copied() {
            locked(&world.strays).push(Instant::now());
            return end_process(world, stray);
        }
    }
    if owned.is_empty() {
        return;
    }
    let (victim, pid) = owned[dice.throw(owned.len())];
    // One that ended meanwhile may have left its number to another.
    if daemon.place.vmms().contains(&pid) {
        victim.hits.fetch_add(1, SeqCst);
        end_process(world, pid);
    }
}

fn end_process(world: &World, pid: u32) {
    let _ = kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL);
    world.vmm_kills.fetch_add(1, SeqCst);
}

/// Names of the control groups that a process is in.
fn groups_of(pid: u32) -> BTreeSet<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let paths = text.lines().filter(|line| line.contains("/jiffy"));
    paths
        .filter_map(|line| Some(line.rsplit_once('/')?.1.to_owned()))
        .collect()
}

fn storm(world: &World, daemon: &mut Daemon, mut dice: Dice, time: Duration) {
    let began = Instant::now();
    let mut next_vmm = began + VMM_KILL_INTERVAL;
    let mut next_daemon = began + FIRST_DAEMON_KILL;
    while began.elapsed() < time && !world.over.load(SeqCst) {
        if Instant::now() > next_daemon {
            daemon.kill(world);
            next_daemon = Instant::now() + DAEMON_KILL_INTERVAL;
        }
        if Instant::now() > next_vmm {
            kill_guest(world, daemon, &mut dice);
            next_vmm = Instant::now() + VMM_KILL_INTERVAL;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    world.over.store(true, SeqCst);
}

fn setting(name: &str) -> Option<u64> {
    Some(std::env::var(name).ok()?.parse().unwrap())
}

pub fn soak(test: &str) {
    let time = Duration::from_secs(setting("JIFFY_SOAK_SECONDS").unwrap_or(USUAL_SECONDS));
    let seed = setting("JIFFY_SOAK_SEED").unwrap_or_else(|| {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
        now.as_secs()
    });
    eprintln!("soak: JIFFY_SOAK_SEED={seed}, {} s", time.as_secs());
    with_lab(test, |_| {
        let Some(place) = Place::new(test) else {
            return;
        };
        run(&place, seed, time);
        drop(place);
        crate::support::networked::clean();
    });
}

fn run(place: &Place, seed: u64, time: Duration) {
    let engine = engine::wanted();
    let mut daemon = Daemon {
        place,
        process: start(place),
    };
    // A sentry's own memory counts for its guest's.
    let memory_mib = if engine::is_gvisor() { 256 } else { 128 };
    let api = Api {
        socket: place.dir.path().join("run/jiffy.sock"),
    };
    let world = World::new(api, memory_mib);
    let first = from_template(&world, place).unwrap().unwrap();
    let mut life = first.lock();
    let mut turn = Turn {
        world: &world,
        sandbox: &first,
        life: &mut life,
    };
    turn.snapshot().unwrap();
    drop(life);
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (world, engine) = (&world, engine.clone());
            scope.spawn(move || {
                engine::want(engine);
                client(world, place, Dice::new(seed, number));
            });
        }
        storm(&world, &mut daemon, Dice::new(seed, CLIENTS), time);
    });
    let done = end::verify_all(&world);
    if let Err(found) = done {
        locked(&world.found).push(found);
    }
    let tally = format!("{:?}", locked(&world.tally));
    let daemons = world.daemon_kills.load(SeqCst) / 2;
    let vmms = world.vmm_kills.load(SeqCst);
    eprintln!("soak: {daemons} daemons and {vmms} guests killed; done and not done: {tally}");
    let found = locked(&world.found);
    if !found.is_empty() {
        told(&world, place, seed, &found);
    }
    drop(found);
    end::remove_all(&world);
    end::nothing_is_left(&world, place);
    place.ok(&["daemon", "stop", "--kill-sandboxes"]);
    daemon.process.wait().unwrap();
    end::no_process_is_left(&world, place);
}

/// Fails with all that is known.
fn told(world: &World, place: &Place, seed: u64, found: &[String]) -> ! {
    let log = std::fs::read_to_string(log_of(place)).unwrap_or_default();
    // Lines without a moment are not the daemon's own.
    let alarming = |line: &&str| {
        line.contains(" WARN ") || line.contains(" ERROR ") || !line.starts_with("20")
    };
    let lines: Vec<&str> = log.lines().filter(alarming).collect();
    let last = lines[lines.len().saturating_sub(40)..].join("\n");
    for sandbox in locked(&world.sandboxes).iter() {
        eprintln!("{}", sandbox.lock().told(&sandbox.id));
    }
    eprintln!("the daemon's warnings:\n{last}");
    panic!(
        "seed {seed}: {} found:\n{}",
        found.len(),
        found.join("\n\n")
    );
}
