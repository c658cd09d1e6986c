//! Tests for guests that run before their memory has been fetched from the store.
//!
//! The *fetcher* is the process of a host that downloads missing memory of guests from the store. A
//! *grant* is a file that permits one VMM to read the layers of its snapshot. A *layer* is the part
//! of a memory or disk that one snapshot stores, and a *chunk* is 64 KiB of it.

use crate::support::store::TestStore;
use crate::support::test_home::TestHome;
use crate::support::{alive, skip, wait_for};
use jiffy_proto::vm::jail::FIRST_UID;
use jiffy_test_attributes::jiffy_test;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

/// Creates files and 24 MiB of memory with checksums in a guest.
const BEGIN: &str = "cd && head -c 3000000 /dev/urandom > file && sha256sum file > sums \
    && head -c 25165824 /dev/urandom > /dev/shm/memory && sha256sum /dev/shm/memory >> sums";
/// Fails if a byte differs.
const CHECK: &str = "cd && sha256sum -c sums > /dev/null && echo sound";

/// Two hosts that share a store with a snapshot of one of them.
struct Hosts {
    store: TestStore,
    here: TestHome,
    snapshot: String,
}

impl Hosts {
    /// Creates a snapshot on a host that is then stopped, and starts another host with the same
    /// store.
    fn new(options: &[&str]) -> Option<Self> {
        let (there, here) = (TestHome::new(), TestHome::new());
        if fs::File::open("/dev/userfaultfd").is_err() {
            skip("/dev/userfaultfd cannot be opened");
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

    /// Creates a sandbox from the snapshot.
    fn create(&self, options: &[&str]) -> String {
        let create = ["create", "--from", &self.snapshot];
        self.here.ok(&[&create[..], options].concat())
    }

    /// Asserts that all data of the guest is correct. Reads all of it.
    fn assert_sound(&self, id: &str) {
        assert_eq!(self.here.sh(id, CHECK), "sound");
    }

    fn path(&self, path: &str) -> PathBuf {
        self.here.dir.path().join(path)
    }

    /// Returns whether parts of the snapshot's own memory are missing.
    fn is_incomplete(&self, snapshot: &str) -> bool {
        self.path(&format!("snapshots/{snapshot}/missing.json"))
            .exists()
    }

    /// Returns the running process that fetches memory.
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
        wait_for("the fetcher to exit", || (!alive(pid)).then_some(()));
    }

    /// Checks that the fetcher can access the store, the cache and its grants, but not keys,
    /// journal or socket of the host.
    fn assert_confined(&self, pid: u32) {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap().split_whitespace().next().unwrap().to_owned()
        };
        assert_eq!(
            (field("NoNewPrivs:"), field("Seccomp:")),
            ("1".into(), "2".into())
        );
        let root = PathBuf::from(format!("/proc/{pid}/root"));
        let below = |path: &Path| root.join(path.strip_prefix("/").unwrap());
        if !nix::unistd::Uid::effective().is_root() {
            return;
        }
        for set in ["CapPrm:", "CapEff:", "CapInh:", "CapBnd:", "CapAmb:"] {
            assert_eq!(field(set), "0".repeat(16));
        }
        assert_eq!(field("Uid:"), (FIRST_UID + pid).to_string());
        assert_eq!(field("Gid:"), (FIRST_UID + pid).to_string());
        for namespace in ["user", "mnt", "ipc", "uts", "pid", "cgroup"] {
            let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{namespace}")).unwrap();
            assert_ne!(of(&pid.to_string()), of("self"), "{namespace}");
        }
        for needed in [
            self.path("store/layers"),
            self.path("run/fetch"),
            self.store.bucket(),
        ] {
            assert!(below(&needed).is_dir(), "{}", needed.display());
        }
        let secrets = [
            "api-key",
            "state.db",
            "keys.db",
            "run/jiffy.sock",
            "snapshots",
        ];
        let here = secrets.iter().map(|name| self.path(name));
        let host =
            ["/etc/shadow", "/proc/self", "/usr/bin", "/dev/kvm", "/root"].map(PathBuf::from);
        let here: Vec<PathBuf> = here.filter(|path| path.exists()).collect();
        assert!(here.len() >= 3, "{here:?}");
        for secret in here.iter().chain(&host).chain([&self.store.keys]) {
            assert!(!below(secret).exists(), "{}", secret.display());
        }
    }

    /// Checks that processes of the daemon write no core files and cannot change the daemon's log.
    fn assert_log_is_out_of_reach(&self) {
        let processes = self.here.vmms().into_iter().map(|pid| (pid, true));
        for (pid, is_guest) in processes.chain([(self.here.daemon(), false)]) {
            let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
            let limit = |name: &str| {
                let line = limits.lines().find_map(|line| line.strip_prefix(name));
                let words: Vec<&str> = line.unwrap().split_whitespace().take(2).collect();
                words.join(" ")
            };
            assert_eq!(limit("Max core file size"), "0 0");
            assert!(!limit("Max file size").contains("unlimited"), "{limits}");
            if is_guest {
                let error = fs::read_link(format!("/proc/{pid}/fd/2")).unwrap();
                assert!(!error.ends_with("jiffy.log"), "{error:?}");
            }
        }
    }

    /// Checks that root without capabilities cannot use the daemon's socket.
    fn assert_capabilities_count(&self) {
        if !nix::unistd::Uid::effective().is_root() {
            return;
        }
        let list = || {
            let mut command = crate::support::jiffy(&["ls"]);
            command.env("JIFFY_HOME", self.here.dir.path());
            command
        };
        assert!(list().output().unwrap().status.success());
        let mut confined = list();
        // SAFETY: the closure makes only system calls between fork and exec.
        unsafe {
            confined.pre_exec(|| {
                for capability in 0..64 {
                    libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
                }
                Ok(())
            })
        };
        let refused = confined.output().unwrap();
        assert!(!refused.status.success(), "{refused:?}");
    }

    fn state(&self, id: &str) -> String {
        self.here.json(&["inspect", id]).to_string()
    }

    /// Removes all guests, and waits until no fetcher is running.
    fn end(self) {
        self.here.ok(&["serve", "--stop", "--kill-sandboxes"]);
        wait_for("the fetcher to exit", || {
            self.fetcher().is_none().then_some(())
        });
        let left = fs::read_dir(self.path("run/fetch")).unwrap().flatten();
        let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
        assert_eq!(left, ["lock"]);
    }
}

/// Returns the bytes on disk.
fn disk_bytes(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&fs::metadata(path).unwrap()) * 512
}

#[jiffy_test]
fn a_guest_runs_before_its_memory_is_fetched_and_receives_all_of_it() {
    let Some(hosts) = Hosts::new(&[]) else {
        return;
    };
    let here = &hosts.here;
    let first = hosts.create(&[]);
    assert!(hosts.is_incomplete(&hosts.snapshot));
    let layer = hosts.path(&format!("snapshots/{}/memory.layer", hosts.snapshot));
    let before = disk_bytes(&layer);
    // Take a snapshot, fork, pause and roll back before any other access to the memory.
    let again = here.ok(&["snapshot", &first, "--name", "again"]);
    let child = here.ok(&["fork", &first]);
    here.ok(&["pause", &first]);
    here.ok(&["resume", &first]);
    assert!(hosts.is_incomplete(&hosts.snapshot));
    hosts.assert_sound(&child);
    // The check has read the 24 MiB, most of which were missing before.
    assert!(disk_bytes(&layer) >= before + (20 << 20), "{before}");
    hosts.assert_sound(&first);
    here.sh(
        &first,
        "rm ~/file; head -c 9000000 /dev/urandom > /dev/shm/memory",
    );
    here.ok(&["rollback", &first, "moving"]);
    hosts.assert_sound(&first);
    let grandchild = here.ok(&["create", "--from", &again]);
    hosts.assert_sound(&grandchild);
    // The balloon returns free memory to the host, which later reads as zeros.
    here.sh(&child, "rm /dev/shm/memory");
    here.sh(
        &child,
        "head -c 25165824 /dev/zero > /dev/shm/zero && ! tr -d '\\0' < /dev/shm/zero | grep -q .",
    );
    hosts.end();
}

#[jiffy_test]
fn clones_share_the_page_cache_and_little_more_than_the_working_set_moves() {
    let Some(hosts) = Hosts::new(&[]) else {
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
    // A frame is a compressed and encrypted chunk. The ranges contain frames between the required
    // frames. They may have at most 30 % more bytes than the required chunks.
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
            .map(|path| disk_bytes(&path))
            .sum::<u64>()
    };
    let before = layers();
    let clones: Vec<String> = (0..9).map(|_| hosts.create(&[])).collect();
    clones.iter().for_each(|clone| hosts.assert_sound(clone));
    // The clones share one copy of each chunk. Chunks that the first guest did not read may add up
    // to 12 MiB.
    assert!(layers() <= before + (12 << 20), "{before} {}", layers());
    let vmms = hosts.here.vmms();
    assert_eq!(vmms.len(), 10);
    let memory: Vec<_> = vmms.into_iter().map(shared_and_own).collect();
    // All guests but the first map the verified 24 MiB; the first received copies of single chunks.
    let sharing = memory.iter().filter(|(shared, _)| *shared > 20 << 20);
    assert!(sharing.count() >= 9, "{memory:?}");
    hosts.end();
}

/// Returns the bytes of a process that are shared with others, and its own.
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

#[jiffy_test]
fn all_memory_is_fetched_on_request() {
    let Some(hosts) = Hosts::new(&[]) else {
        return;
    };
    let id = hosts.create(&["--prefetch", "all"]);
    let grants = || fs::read_dir(hosts.path("run/fetch")).unwrap().count();
    // The directory then contains the lock file only, and no grant.
    wait_for("all layers to be fetched", || (grants() == 1).then_some(()));
    // The store is not required from here on.
    let away = hosts.store.dir.path().join("away");
    fs::rename(hosts.store.bucket(), away).unwrap();
    hosts.assert_sound(&id);
    hosts.here.ok(&["pause", &id]);
    hosts.here.ok(&["resume", &id]);
    assert!(!hosts.is_incomplete(&hosts.snapshot));
    hosts.assert_sound(&id);
    hosts.end();
}

#[jiffy_test]
fn a_snapshot_that_its_host_removes_stays_in_the_store_as_long_as_a_guest_needs_it() {
    let Some(hosts) = Hosts::new(&[]) else {
        return;
    };
    let root = hosts.store.find(None, &hosts.snapshot).unwrap()[0]
        .remote
        .root;
    // A host that has not fetched all memory of a snapshot is recorded there as its reader.
    let readers = || hosts.store.objects(&format!("/readers/{root}/")).len();
    let id = hosts.create(&[]);
    wait_for("the store to be notified", || {
        (readers() == 1).then_some(())
    });
    hosts.store.remove(&hosts.snapshot);
    let collect = || {
        // The first collection condemns unreferenced objects, and the second one removes them.
        for _ in 0..2 {
            hosts.here.ok(&["store", "gc", "--grace", "0"]);
        }
    };
    collect();
    assert!(hosts.store.find(None, &hosts.snapshot).is_none());
    hosts.assert_sound(&id);
    // Fetches memory that was never accessed: the snapshot is uploaded again.
    hosts.here.ok(&["pause", &id, "--durable"]);
    assert!(!hosts.is_incomplete(&hosts.snapshot));
    wait_for("the store to be notified", || {
        (readers() == 0).then_some(())
    });
    collect();
    hosts.here.ok(&["resume", &id]);
    hosts.assert_sound(&id);
    let slept = hosts.here.ok(&["snapshot", &id, "--durable"]);
    // The snapshot and its ancestors: at least `moving` and the snapshot of the template.
    assert!(hosts.store.find(None, &slept).unwrap().len() >= 3);
    hosts.end();
}

#[jiffy_test]
fn processes_that_are_killed_while_memory_arrives_lose_nothing() {
    let Some(hosts) = Hosts::new(&[]) else {
        return;
    };
    let id = hosts.create(&[]);
    let fetcher = wait_for("the fetcher", || hosts.fetcher());
    // The fetcher installs its filter of system calls when it has connected to the store.
    wait_for("the fetcher to connect", || {
        let status = fs::read_to_string(format!("/proc/{fetcher}/status")).ok()?;
        status.contains("Seccomp:\t2").then_some(())
    });
    hosts.assert_confined(fetcher);
    hosts.assert_capabilities_count();
    hosts.assert_log_is_out_of_reach();
    // The guest reads all of its memory in the meantime.
    let mut check = hosts.here.begin(&["exec", &id, "--", "sh", "-c", CHECK]);
    let layer = hosts.path(&format!("snapshots/{}/memory.layer", hosts.snapshot));
    for _ in 0..5 {
        let before = disk_bytes(&layer);
        hosts.kill_fetcher();
        wait_for("memory to be fetched by the next fetcher", || {
            let ended = check.try_wait().unwrap().is_some();
            (ended || disk_bytes(&layer) > before).then_some(())
        });
    }
    let checked = crate::support::finish(check);
    assert_eq!(checked.stdout.trim_end(), "sound", "{checked:?}");
    let other = hosts.create(&[]);
    hosts.here.kill_daemon();
    // The fetcher continues without a daemon; the next daemon replaces a fetcher that was killed.
    assert!(hosts.fetcher().is_some());
    hosts.kill_fetcher();
    hosts.start(&[]);
    hosts.assert_sound(&other);
    hosts.assert_sound(&id);
    // Killed VMMs break their sandboxes, which can be rolled back.
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

#[jiffy_test]
fn a_guest_whose_store_is_unavailable_too_long_is_broken_and_can_be_resumed() {
    let Some(hosts) = Hosts::new(&["--store-timeout", "4"]) else {
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
        hosts.state(&id).contains("the store did not answer"),
        "{}",
        hosts.state(&id)
    );
    let refused = hosts.here.call(&["exec", &id, "true"]);
    assert!(refused.stderr.contains("jiffy resume"), "{refused:?}");
    fs::rename(&away, hosts.store.bucket()).unwrap();
    hosts.here.ok(&["resume", &id]);
    // The store returns in time: the guest only waits.
    fs::rename(hosts.store.bucket(), &away).unwrap();
    let check = hosts.here.begin(&["exec", &id, "--", "sh", "-c", CHECK]);
    std::thread::sleep(std::time::Duration::from_secs(1));
    fs::rename(&away, hosts.store.bucket()).unwrap();
    let checked = crate::support::finish(check);
    assert_eq!(checked.stdout.trim_end(), "sound", "{checked:?}");
    hosts.end();
}
