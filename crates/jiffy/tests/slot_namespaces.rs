//! Tests for slots in the presence of other programs' namespaces, crashes and earlier versions: no
//! slot number is permanently blocked. A mount of a namespace *pins* it: the namespace exists until
//! its last mount is removed.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use crate::support::lab::{ip, mount_separate_run, with_lab};
use crate::support::network_probe::{assert_clean, reach};
use crate::support::test_home::TestHome;
use crate::support::wait_for;
use jiffy_engine_api::NetworkRules;
use jiffy_network::{Network, NetworkConfig, NicKind, SlotLease};
use jiffy_test_attributes::jiffy_test;
use nix::mount::MsFlags;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Directory with the names of the slots' namespaces.
const DIRECTORY: &str = "/run/jiffy-net/netns";
/// Directory of `ip netns`, and of earlier versions.
const FORMER: &str = "/run/netns";

fn run(program: &str, args: &[&str]) {
    let done = Command::new(program).args(args).output().unwrap();
    assert!(done.status.success(), "{program} {args:?}: {done:?}");
}

/// Creates and removes a namespace like another program.
fn another_programs_namespace() {
    run("ip", &["netns", "add", "theirs"]);
    run("ip", &["netns", "del", "theirs"]);
}

/// Process with a copy of all mounts, like many services.
struct Copy(Child);

impl Copy {
    fn begin() -> Self {
        let mut child = Command::new("unshare")
            .args([
                "-m",
                "--propagation",
                "private",
                "sh",
                "-c",
                "echo up; exec cat",
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut up = [0; 3];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut up).unwrap();
        Self(child)
    }

    /// Returns the number of namespaces that its copies of mounts pin.
    fn pinned_count(&self) -> usize {
        let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", self.0.id())).unwrap();
        mounts.matches(" nsfs ").count()
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn names(directory: &str) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
    names.collect()
}

/// Asserts that no names or mounts remain.
fn assert_nothing_left() {
    wait_for("the last name to be removed", || {
        (names(DIRECTORY).is_empty() && names(FORMER).is_empty()).then_some(())
    });
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    assert!(!mounts.contains(" nsfs "), "{mounts}");
    assert!(!mounts.contains(DIRECTORY), "{mounts}");
    assert_clean();
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

fn config(home: &Path, card: NicKind) -> NetworkConfig {
    NetworkConfig {
        ready: 1,
        slots: 8,
        nic: card,
        ..NetworkConfig::new(home)
    }
}

#[jiffy_test(engine = "none", lab)]
fn another_programs_namespaces_pin_no_slot() {
    let of_run = |propagation: MsFlags| {
        mount_separate_run(propagation);
        let runtime = runtime();
        for card in [NicKind::Tap, NicKind::Veth] {
            let home = tempfile::tempdir().unwrap();
            // The network retains one ready slot, and creates no further slots in advance.
            let config = NetworkConfig {
                ready: 0,
                ..config(home.path(), card)
            };
            let network = Network::open(&config).unwrap();
            let take = || runtime.block_on(network.take(card)).unwrap();
            let before = [take(), take()];
            another_programs_namespace();
            let copy = Copy::begin();
            // At this moment, the copy pins the namespaces of both slots.
            assert!(copy.pinned_count() >= 2);
            // Every number is used several times: a pinned namespace would block its number.
            for _ in 0..3 {
                let more: Vec<SlotLease> = (0..4).map(|_| take()).collect();
                another_programs_namespace();
                drop(more);
                // The two leased slots, and one ready slot: the network always retains one.
                wait_for("the slots to be released", || {
                    (network.slots().0 <= 3).then_some(())
                });
            }
            drop(before);
            network.close();
            assert_eq!(copy.pinned_count(), 0);
            // `ip netns` has mounted a directory over the directory of other programs. The
            // directory underneath must be empty as well.
            let _ = nix::mount::umount(FORMER);
            assert_nothing_left();
        }
    };
    // Mounts are private by default, and shared under systemd.
    with_lab(|_| of_run(MsFlags::MS_PRIVATE));
    with_lab(|_| of_run(MsFlags::MS_SHARED));
}

#[jiffy_test(engine = "none", lab)]
fn remains_of_a_crash_are_removed_or_avoided() {
    with_lab(|_| {
        mount_separate_run(MsFlags::MS_PRIVATE);
        let runtime = runtime();
        let home = tempfile::tempdir().unwrap();
        // A claim reserves a range of addresses by a file and a route. This claim has no file.
        ip("route add blackhole 198.18.0.0/19 metric 4294967");
        let network = Network::open(&config(home.path(), NicKind::Tap)).unwrap();
        assert_eq!(network.range().to_string(), "198.18.0.0/28");
        let lease = runtime.block_on(network.take(NicKind::Tap)).unwrap();
        wait_for("a second slot", || {
            // The slot of `lease`, and a slot that is created in advance.
            (names(DIRECTORY).len() == 2).then_some(())
        });
        let name = |number: u32| {
            let own = names(DIRECTORY).remove(0);
            format!("{}-{number}", own.split_once('-').unwrap().0)
        };
        let path = |number: u32| Path::new(DIRECTORY).join(name(number));
        // States after a crash of a daemon between any two steps, and a name that is not a file.
        fs::write(path(2), "").unwrap();
        fs::write(path(3), "").unwrap();
        let third = path(3).display().to_string();
        run("mount", &["--bind", "/proc/self/ns/net", &third]);
        run("mount", &["--bind", "/proc/self/ns/net", &third]);
        ip(&format!("link add {} type veth peer name other", name(4)));
        // The namespace of a guest's interface has the suffix `g`.
        fs::write(format!("{}g", path(5).display()), "").unwrap();
        fs::create_dir(path(6)).unwrap();
        fs::write(path(6).join("theirs"), "").unwrap();
        let leases: Vec<SlotLease> = (0..6)
            // The last slot may still be under construction.
            .map(|_| {
                wait_for("a slot", || {
                    runtime.block_on(network.take(NicKind::Tap)).ok()
                })
            })
            .collect();
        let mut numbers: Vec<u32> = leases.iter().map(SlotLease::number).collect();
        numbers.sort_unstable();
        // `lease` has number 0. The directory that is not empty blocks number 6.
        assert_eq!(numbers, [1, 2, 3, 4, 5, 7]);
        let full = runtime.block_on(network.take(NicKind::Tap)).err().unwrap();
        assert!(full.to_string().contains("in use"), "{full}");
        fs::remove_dir_all(path(6)).unwrap();
        drop((lease, leases));
        network.close();
        assert_nothing_left();
    });
}

/// Daemon on a thread with its own mounts.
struct ElsewhereDaemon {
    start: std::sync::mpsc::Sender<()>,
    thread: std::thread::JoinHandle<()>,
}

impl ElsewhereDaemon {
    /// Copies the mounts of this thread, and calls `mounts` to change the copy.
    fn begin(home: &Path, mounts: impl FnOnce() + Send + 'static) -> Self {
        let (start, started) = std::sync::mpsc::channel();
        let (up, is_up) = std::sync::mpsc::channel();
        let config = config(home, NicKind::Tap);
        let thread = std::thread::spawn(move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
            mounts();
            up.send(()).unwrap();
            started.recv().unwrap();
            Network::open(&config).unwrap().close();
        });
        is_up.recv().unwrap();
        Self { start, thread }
    }

    /// Opens and closes the network for `home`.
    fn run(self) {
        self.start.send(()).unwrap();
        self.thread.join().unwrap();
    }
}

#[jiffy_test(engine = "none", lab)]
fn daemons_with_other_mounts_do_not_remove_slots_of_this_daemon() {
    with_lab(|_| {
        mount_separate_run(MsFlags::MS_PRIVATE);
        let runtime = runtime();
        let [home, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        // One daemon does not see the mounts of names, another does not see the data directory.
        let without_names = ElsewhereDaemon::begin(other.path(), || {});
        let network = Network::open(&config(home.path(), NicKind::Tap)).unwrap();
        let lease = runtime.block_on(network.take(NicKind::Tap)).unwrap();
        wait_for("a slot in advance", || {
            (names(DIRECTORY).len() == 2).then_some(())
        });
        let before = names(DIRECTORY);
        let hidden = home.path().to_owned();
        let without_home = ElsewhereDaemon::begin(other.path(), move || {
            let (above, empty) = (hidden.parent().unwrap(), tempfile::tempdir().unwrap());
            let kept = empty.path().join("kept");
            fs::create_dir(&kept).unwrap();
            let (above, kept) = (above.display().to_string(), kept.display().to_string());
            run("mount", &["--bind", &kept, &above]);
        });
        let again = other.path().to_owned();
        for elsewhere in [without_names, without_home] {
            elsewhere.run();
            assert_eq!(names(DIRECTORY), before);
            assert!(again.exists());
            // The rules of the slot can still be changed.
            let rules = NetworkRules {
                internet: false,
                ..NetworkRules::default()
            };
            runtime.block_on(lease.replace(&rules)).unwrap();
            runtime
                .block_on(lease.replace(&NetworkRules::default()))
                .unwrap();
        }
        drop(lease);
        network.close();
        assert_nothing_left();
    });
}

#[jiffy_test(engine = "none", lab)]
fn slots_whose_namespaces_were_removed_are_replaced() {
    with_lab(|_| {
        mount_separate_run(MsFlags::MS_PRIVATE);
        let runtime = runtime();
        for card in [NicKind::Tap, NicKind::Veth] {
            let home = tempfile::tempdir().unwrap();
            let config = NetworkConfig {
                ready: 3,
                ..config(home.path(), card)
            };
            let network = Network::open(&config).unwrap();
            // Three slots. With `Veth`, the guest's interface has a second namespace.
            let all = if card == NicKind::Veth { 6 } else { 3 };
            wait_for("slots", || (names(DIRECTORY).len() == all).then_some(()));
            // The first name remains without a mount, and the other names are removed.
            let mut removed = names(DIRECTORY);
            removed.sort();
            for (at, name) in removed.iter().enumerate() {
                let path = Path::new(DIRECTORY).join(name);
                nix::mount::umount2(&path, nix::mount::MntFlags::MNT_DETACH).unwrap();
                if at > 0 {
                    fs::remove_file(&path).unwrap();
                }
            }
            let rules = NetworkRules {
                internet: false,
                ..NetworkRules::default()
            };
            for _ in 0..4 {
                let lease = runtime.block_on(network.take(card)).unwrap();
                runtime.block_on(lease.replace(&rules)).unwrap();
                lease.open().unwrap();
            }
            network.close();
            assert_nothing_left();
        }
    });
}

#[jiffy_test(engine = "none", lab)]
fn slots_of_earlier_versions_are_adopted_where_they_are_and_reclaimed() {
    with_lab(|_| {
        mount_separate_run(MsFlags::MS_PRIVATE);
        let runtime = runtime();
        let home = tempfile::tempdir().unwrap();
        let network = Network::open(&config(home.path(), NicKind::Tap)).unwrap();
        let mut leases = [0; 2].map(|_| runtime.block_on(network.take(NicKind::Tap)).unwrap());
        let taps = [0, 1].map(|at| leases[at].take_tap());
        let [kept, lost] = leases;
        kept.retain();
        lost.retain();
        let numbers = [kept.number(), lost.number()];
        drop((kept, lost));
        network.close();
        // Move both namespaces to the location of earlier versions. Below, another program mounts
        // over this location, which hides the second namespace.
        fs::create_dir(FORMER).unwrap();
        let own = names(DIRECTORY);
        assert_eq!(own.len(), 2, "{own:?}");
        let mut moved = own.clone();
        moved.sort();
        for name in &moved {
            let (from, to) = (format!("{DIRECTORY}/{name}"), format!("{FORMER}/{name}"));
            fs::write(&to, "").unwrap();
            run("mount", &["--bind", &from, &to]);
            run("umount", &[&from]);
            fs::remove_file(from).unwrap();
        }
        let network = Network::open(&config(home.path(), NicKind::Tap)).unwrap();
        let rules = NetworkRules::default();
        let adopted = runtime.block_on(network.adopt(numbers[0], &rules)).unwrap();
        another_programs_namespace();
        network.reclaim(NicKind::Tap, &numbers[..1]);
        wait_for("the other slot to be released", || {
            (network.slots().0 <= 2).then_some(())
        });
        // Each of the eight slot numbers is available, except for the adopted one.
        for _ in 0..8 {
            drop(runtime.block_on(network.take(NicKind::Tap)).unwrap());
        }
        adopted.release();
        drop((adopted, taps));
        network.close();
        // A namespace below another mount is not accessible, and does not block anything.
        let _ = nix::mount::umount(FORMER);
        for name in names(FORMER) {
            let path = Path::new(FORMER).join(name);
            let _ = nix::mount::umount(&path);
            fs::remove_file(path).unwrap();
        }
        assert_nothing_left();
    });
}

#[jiffy_test(engine = "each", lab)]
fn sandboxes_start_and_end_while_another_program_makes_namespaces() {
    with_lab(|_| {
        mount_separate_run(MsFlags::MS_PRIVATE);
        let test_home = TestHome::new();
        let options = [
            "--network",
            "on",
            "--warm-pool",
            "0",
            "--network-slots",
            "6",
        ];
        let mut daemon = test_home.serve(&options);
        let first = test_home.ok(&["create"]);
        another_programs_namespace();
        for _ in 0..4 {
            let ids = [test_home.ok(&["create"]), test_home.ok(&["create"])];
            another_programs_namespace();
            assert_eq!(reach(&test_home, &ids[0], "9.9.9.9"), "internet");
            test_home.ok(&["kill", &ids[0], &ids[1]]);
        }
        assert_eq!(reach(&test_home, &first, "9.9.9.9"), "internet");
        test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
        daemon.wait().unwrap();
        drop(test_home);
        let _ = nix::mount::umount(FORMER);
        assert_nothing_left();
    });
}
