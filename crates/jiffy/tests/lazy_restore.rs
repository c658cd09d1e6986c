//! Guests that run before their memory has arrived from the store, at the worst moments.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::path::{Path, PathBuf};
use support::store::TestStore;
use support::test_home::TestHome;
use support::{alive, skip, wait_for};

/// A guest that knows its files and 24 MiB of its memory.
const BEGIN: &str = "cd && head -c 3000000 /dev/urandom > file && sha256sum file > sums \
    && head -c 25165824 /dev/urandom > /dev/shm/memory && sha256sum /dev/shm/memory >> sums";
/// Fails if a byte is wrong.
const CHECK: &str = "cd && sha256sum -c sums > /dev/null && echo sound";

/// Two hosts that share a store, which has a snapshot that one of them made.
struct Hosts {
    store: TestStore,
    here: TestHome,
    snapshot: String,
}

impl Hosts {
    fn new(test: &str, options: &[&str]) -> Option<Self> {
        let (there, here) = TestHome::new(test).zip(TestHome::new(test))?;
        if fs::File::open("/dev/userfaultfd").is_err() {
            skip(test, "/dev/userfaultfd cannot be opened");
            return None;
        }
        let store = TestStore::new();
        store.start(&there);
        let id = there.ok(&["create"]);
        there.sh(&id, BEGIN);
        let snapshot = there.ok(&["snapshot", &id, "--name", "moving"]);
        store.wait_for(None, &snapshot);
        there.ok(&["serve", "--stop", "--kill-sandboxes"]);
        let hosts = Self {
            store,
            here,
            snapshot,
        };
        hosts.start(options);
        Some(hosts)
    }

    fn start(&self, options: &[&str]) {
        let start = ["daemon", "start", "--no-listen"];
        self.here
            .ok(&[&start[..], &self.store.options(), options].concat());
    }

    fn create(&self, options: &[&str]) -> String {
        let create = ["create", "--from", &self.snapshot];
        self.here.ok(&[&create[..], options].concat())
    }

    fn assert_sound(&self, id: &str) {
        assert_eq!(self.here.sh(id, CHECK), "sound");
    }

    fn path(&self, path: &str) -> PathBuf {
        self.here.dir.path().join(path)
    }

    /// Returns true if the snapshot's own memory has not all arrived.
    fn is_incomplete(&self, snapshot: &str) -> bool {
        self.path(&format!("snapshots/{snapshot}/missing.json"))
            .exists()
    }

    fn fetcher(&self) -> Option<u32> {
        let own = self.here.dir.path().display().to_string();
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let mut found = processes.filter_map(|process| {
            let command = fs::read(process.path().join("cmdline")).ok()?;
            let command = String::from_utf8_lossy(&command).into_owned();
            let ours = command.contains("--as-fetcher") && command.contains(&own);
            let pid = process.file_name().to_str()?.parse().ok()?;
            (ours && alive(pid)).then_some(pid)
        });
        found.next()
    }

    fn kill_fetcher(&self) {
        let pid = wait_for("the fetcher", || self.fetcher());
        kill(Pid::from_raw(pid as i32), Signal::SIGKILL).unwrap();
        wait_for("the fetcher to die", || (!alive(pid)).then_some(()));
    }

    fn state(&self, id: &str) -> String {
        self.here.json(&["inspect", id]).to_string()
    }

    /// Ends all guests, and waits until nothing fetches any more.
    fn end(self) {
        self.here.ok(&["serve", "--stop", "--kill-sandboxes"]);
        wait_for("the fetcher to end", || {
            self.fetcher().is_none().then_some(())
        });
        let left = fs::read_dir(self.path("run/fetch")).unwrap().flatten();
        let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
        assert_eq!(left, ["lock"]);
    }
}

/// Bytes on disk.
fn stored(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&fs::metadata(path).unwrap()) * 512
}

#[test]
fn a_guest_runs_before_its_memory_has_arrived_and_gets_all_of_it() {
    let test = "a_guest_runs_before_its_memory_has_arrived_and_gets_all_of_it";
    let Some(hosts) = Hosts::new(test, &[]) else {
        return;
    };
    let here = &hosts.here;
    let first = hosts.create(&[]);
    assert!(hosts.is_incomplete(&hosts.snapshot));
    let layer = hosts.path(&format!("snapshots/{}/memory.layer", hosts.snapshot));
    let before = stored(&layer);
    // Before anything else has touched it: a snapshot, a fork, a pause, a rollback.
    let again = here.ok(&["snapshot", &first, "--name", "again"]);
    let child = here.ok(&["fork", &first]);
    here.ok(&["pause", &first]);
    here.ok(&["resume", &first]);
    assert!(hosts.is_incomplete(&hosts.snapshot));
    hosts.assert_sound(&child);
    assert!(stored(&layer) >= before + (20 << 20), "{before}");
    hosts.assert_sound(&first);
    here.sh(
        &first,
        "rm ~/file; head -c 9000000 /dev/urandom > /dev/shm/memory",
    );
    here.ok(&["rollback", &first, "moving"]);
    hosts.assert_sound(&first);
    let grandchild = here.ok(&["create", "--from", &again]);
    hosts.assert_sound(&grandchild);
    // The balloon takes what is free, and gives it back as zeroes.
    here.sh(&child, "rm /dev/shm/memory");
    here.sh(
        &child,
        "head -c 25165824 /dev/zero > /dev/shm/zero && ! tr -d '\\0' < /dev/shm/zero | grep -q .",
    );
    hosts.end();
}

#[test]
fn clones_share_the_page_cache_and_little_more_than_the_working_set_moves() {
    let test = "clones_share_the_page_cache_and_little_more_than_the_working_set_moves";
    let Some(hosts) = Hosts::new(test, &[]) else {
        return;
    };
    let first = hosts.create(&[]);
    let log = fs::read_to_string(hosts.path("run/jiffy.log")).unwrap();
    let figure = |line: &str, name: &str| -> u64 {
        let value = line.split(&format!("{name}=")).nth(1).unwrap();
        value.split(' ').next().unwrap().parse().unwrap()
    };
    let fetched = || {
        log.lines()
            .filter(|line| line.contains("fetched a snapshot"))
    };
    let total = |name| fetched().map(|line| figure(line, name)).sum::<u64>();
    // Compressed and encrypted; frames between those that are wanted are read as well.
    assert!(
        total("range_bytes") * 10 < total("fetched_bytes") * 13,
        "{log}"
    );
    hosts.assert_sound(&first);
    let layers = || {
        let layers = fs::read_dir(hosts.path("store/layers")).unwrap().flatten();
        let layers = layers.map(|entry| entry.path());
        layers
            .filter(|path| path.extension().is_some_and(|e| e == "data"))
            .map(|path| stored(&path))
            .sum::<u64>()
    };
    let before = layers();
    let clones: Vec<String> = (0..9).map(|_| hosts.create(&[])).collect();
    clones.iter().for_each(|clone| hosts.assert_sound(clone));
    // All of it is there, once, and some chunks that the first did not touch.
    assert!(layers() <= before + (12 << 20), "{before} {}", layers());
    let vmms = hosts.here.vmms();
    assert_eq!(vmms.len(), 10);
    let memory: Vec<_> = vmms.into_iter().map(shared_and_own).collect();
    // The checked 24 MiB are mapped by all but the first, to which they were copied one by one.
    let sharing = memory.iter().filter(|(shared, _)| *shared > 20 << 20);
    assert!(sharing.count() >= 9, "{memory:?}");
    hosts.end();
}

/// Bytes of a process that it shares with others, and its own.
fn shared_and_own(pid: u32) -> (u64, u64) {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let sum = |kind: &str| -> u64 {
        let lines = rollup.lines().filter(|line| line.starts_with(kind));
        let kib = lines.map(|line| {
            line.split_whitespace()
                .nth(1)
                .unwrap()
                .parse::<u64>()
                .unwrap()
        });
        kib.sum::<u64>() << 10
    };
    (sum("Shared_"), sum("Private_"))
}

#[test]
fn all_memory_is_fetched_if_that_is_asked_for() {
    let test = "all_memory_is_fetched_if_that_is_asked_for";
    let Some(hosts) = Hosts::new(test, &[]) else {
        return;
    };
    let id = hosts.create(&["--prefetch", "all"]);
    let grants = || fs::read_dir(hosts.path("run/fetch")).unwrap().count();
    wait_for("all layers to arrive", || (grants() == 1).then_some(()));
    // From here on the store is not needed.
    let away = hosts.store.dir.path().join("away");
    fs::rename(hosts.store.bucket(), away).unwrap();
    hosts.assert_sound(&id);
    hosts.here.ok(&["pause", &id]);
    hosts.here.ok(&["resume", &id]);
    assert!(!hosts.is_incomplete(&hosts.snapshot));
    hosts.assert_sound(&id);
    hosts.end();
}

#[test]
fn a_snapshot_that_its_host_removes_stays_in_the_store_as_long_as_a_guest_needs_it() {
    let test = "a_snapshot_that_its_host_removes_stays_in_the_store_as_long_as_a_guest_needs_it";
    let Some(hosts) = Hosts::new(test, &[]) else {
        return;
    };
    let root = hosts.store.find(None, &hosts.snapshot).unwrap()[0]
        .remote
        .root;
    let readers = || hosts.store.objects(&format!("/readers/{root}/")).len();
    let id = hosts.create(&[]);
    wait_for("the store to be told", || (readers() == 1).then_some(()));
    hosts.store.remove(&hosts.snapshot);
    let collect = || {
        for _ in 0..2 {
            hosts.here.ok(&["store", "gc", "--grace", "0"]);
        }
    };
    collect();
    assert!(hosts.store.find(None, &hosts.snapshot).is_none());
    hosts.assert_sound(&id);
    // Memory that nothing has touched comes now: the snapshot goes to the store anew.
    hosts.here.ok(&["pause", &id, "--durable"]);
    assert!(!hosts.is_incomplete(&hosts.snapshot));
    wait_for("the store to be told", || (readers() == 0).then_some(()));
    collect();
    hosts.here.ok(&["resume", &id]);
    hosts.assert_sound(&id);
    let slept = hosts.here.ok(&["snapshot", &id, "--durable"]);
    assert!(hosts.store.find(None, &slept).unwrap().len() >= 3);
    hosts.end();
}

#[test]
fn processes_that_are_killed_while_memory_arrives_lose_nothing() {
    let test = "processes_that_are_killed_while_memory_arrives_lose_nothing";
    let Some(hosts) = Hosts::new(test, &[]) else {
        return;
    };
    let id = hosts.create(&[]);
    // The guest reads all of its memory meanwhile.
    let mut check = hosts.here.begin(&["exec", &id, "--", "sh", "-c", CHECK]);
    let layer = hosts.path(&format!("snapshots/{}/memory.layer", hosts.snapshot));
    for _ in 0..5 {
        let before = stored(&layer);
        hosts.kill_fetcher();
        wait_for("memory to arrive from the next one", || {
            let ended = check.try_wait().unwrap().is_some();
            (ended || stored(&layer) > before).then_some(())
        });
    }
    let checked = support::finish(check);
    assert_eq!(checked.stdout.trim_end(), "sound", "{checked:?}");
    let other = hosts.create(&[]);
    hosts.here.kill_daemon();
    // Without a daemon the fetcher goes on; the next daemon starts one that died meanwhile.
    assert!(hosts.fetcher().is_some());
    hosts.kill_fetcher();
    hosts.start(&[]);
    hosts.assert_sound(&other);
    hosts.assert_sound(&id);
    // A VMM that dies loses itself and nothing else.
    let third = hosts.create(&[]);
    let vmms = hosts.here.vmms();
    for vmm in &vmms {
        kill(Pid::from_raw(*vmm as i32), Signal::SIGKILL).unwrap();
    }
    wait_for("the guest to be broken", || {
        hosts.state(&third).contains("broken").then_some(())
    });
    hosts.here.ok(&["rollback", &third, "moving"]);
    hosts.assert_sound(&third);
    hosts.end();
}

#[test]
fn a_guest_whose_store_is_gone_too_long_is_broken_and_can_be_resumed() {
    let test = "a_guest_whose_store_is_gone_too_long_is_broken_and_can_be_resumed";
    let Some(hosts) = Hosts::new(test, &["--store-timeout", "4"]) else {
        return;
    };
    let away = hosts.store.dir.path().join("away");
    let id = hosts.create(&[]);
    fs::rename(hosts.store.bucket(), &away).unwrap();
    let checked = hosts.here.call(&["exec", &id, "--", "sh", "-c", CHECK]);
    assert_ne!(checked.code, Some(0), "{checked:?}");
    wait_for("the guest to be broken", || {
        hosts.state(&id).contains("broken").then_some(())
    });
    assert!(
        hosts.state(&id).contains("its store did not answer"),
        "{}",
        hosts.state(&id)
    );
    let refused = hosts.here.call(&["exec", &id, "true"]);
    assert!(refused.stderr.contains("jiffy resume"), "{refused:?}");
    fs::rename(&away, hosts.store.bucket()).unwrap();
    hosts.here.ok(&["resume", &id]);
    // Back in time: the guest only waits.
    fs::rename(hosts.store.bucket(), &away).unwrap();
    let check = hosts.here.begin(&["exec", &id, "--", "sh", "-c", CHECK]);
    std::thread::sleep(std::time::Duration::from_secs(1));
    fs::rename(&away, hosts.store.bucket()).unwrap();
    let checked = support::finish(check);
    assert_eq!(checked.stdout.trim_end(), "sound", "{checked:?}");
    hosts.end();
}
