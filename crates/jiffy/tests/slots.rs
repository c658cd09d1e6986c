//! Tests with large numbers of networks: the maximum number of slots of a host, and their removal.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use crate::support::lab::{mount_separate_run, output, with_lab};
use crate::support::network_probe::assert_clean;
use crate::support::{skip, wait_for};
use jiffy_network::{Network, NetworkConfig, NicKind};
use jiffy_test_attributes::jiffy_test;
use nix::mount::MsFlags;
use std::time::{Duration, Instant};

/// Default number of slots; a host's limit is 4,096 (`JIFFY_SLOTS=4096` creates all).
const USUAL: u32 = 128;
/// Maximum host memory per slot in KiB.
const MAX_MEMORY_KIB: u64 = 1024;

/// Returns the memory of the kernel itself in KiB.
fn kernel_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let of = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace()
            .nth(1)
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    [
        "Slab:",
        "KernelStack:",
        "PageTables:",
        "Percpu:",
        "VmallocUsed:",
    ]
    .into_iter()
    .map(of)
    .sum()
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns the number of named namespaces, and of their mounts.
fn namespaces() -> (usize, usize) {
    let names = std::fs::read_dir("/run/jiffy-net/netns").map_or(0, Iterator::count);
    let mounts = std::fs::read_to_string("/proc/thread-self/mounts").unwrap();
    (names, mounts.matches(" /run/jiffy-net/netns/").count())
}

/// Returns the number of devices of slots.
fn devices() -> usize {
    let links = output("ip", &["-br", "link"]);
    links.lines().filter(|line| line.starts_with("jf")).count()
}

/// Closes the network when the test ends, also after a failure.
struct Closing(Network);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[jiffy_test(engine = "none", lab)]
fn the_maximum_number_of_slots_is_created_and_removed_completely() {
    let slot_count = std::env::var("JIFFY_SLOTS").map_or(USUAL, |text| text.parse().unwrap());
    // Each slot needs five open files: a tap and four sockets.
    let files = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    if files.1 < u64::from(slot_count) * 5 + 256 {
        return skip("the limit of open files is too low");
    }
    nix::sys::resource::setrlimit(
        nix::sys::resource::Resource::RLIMIT_NOFILE,
        files.1,
        files.1,
    )
    .unwrap();
    with_lab(|_| {
        mount_separate_run(MsFlags::MS_PRIVATE);
        let before = (open_files(), namespaces());
        let memory = kernel_memory();
        // Use each kind twice: remains of the first round would block the second.
        let rounds = [NicKind::Tap, NicKind::Tap, NicKind::Veth, NicKind::Veth];
        for (round, card) in rounds.into_iter().enumerate() {
            let home = tempfile::tempdir().unwrap();
            let config = NetworkConfig {
                ready: slot_count as usize,
                slots: slot_count,
                nic: card,
                ..NetworkConfig::new(home.path())
            };
            let began = Instant::now();
            let network = Network::open(&config).unwrap();
            let closing = Closing(network);
            // Number of namespaces of a slot. A slot with a veth device, for a guest without a VM,
            // has a second namespace for the guest.
            let each = if card == NicKind::Tap { 1 } else { 2 };
            let all = (before.1.0 + each * slot_count as usize, slot_count as usize);
            wait_for("the slots", || {
                ((namespaces().0, devices()) == all).then_some(())
            });
            let created = began.elapsed();
            // From here on, the kernel memory of a slot in KiB.
            let each = kernel_memory().saturating_sub(memory) / u64::from(slot_count);
            eprintln!(
                "{slot_count} slots with a {card:?}: created in {created:?} ({:?} each), {each} KiB of kernel memory each, so {} MiB for 4,096",
                created / slot_count,
                each * 4096 / 1024
            );
            // Later rounds start with memory that the kernel has not freed yet.
            if round == 0 {
                assert!(each < MAX_MEMORY_KIB, "{each} KiB for each slot");
            }
            let began = Instant::now();
            drop(closing);
            eprintln!("removed in {:?}", began.elapsed());
            assert_clean();
        }
        wait_for("namespaces and files to be removed", || {
            ((open_files(), namespaces()) == before).then_some(())
        });
    });
}

#[jiffy_test(engine = "none", lab)]
fn slots_released_while_their_network_closes_are_removed() {
    with_lab(|_| {
        mount_separate_run(MsFlags::MS_PRIVATE);
        let before = namespaces();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .unwrap();
        for card in [NicKind::Tap, NicKind::Veth] {
            let home = tempfile::tempdir().unwrap();
            let config = NetworkConfig {
                ready: 4,
                slots: 64,
                nic: card,
                ..NetworkConfig::new(home.path())
            };
            let network = Network::open(&config).unwrap();
            let mut leases = Vec::new();
            for _ in 0..16 {
                leases.push(runtime.block_on(network.take(card)).unwrap());
            }
            // Other requests for slots are in progress, and are cancelled.
            let pending: Vec<_> = (0..4)
                .map(|_| {
                    let network = network.clone();
                    runtime.spawn(async move { network.take(card).await.map(drop) })
                })
                .collect();
            std::thread::scope(|scope| {
                scope.spawn(|| network.close());
                pending.iter().for_each(tokio::task::JoinHandle::abort);
                let _runtime = runtime.enter();
                for lease in leases {
                    drop(lease);
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
            wait_for("namespaces to be removed", || {
                (namespaces() == before).then_some(())
            });
            assert_clean();
        }
    });
}

#[jiffy_test(engine = "none", lab)]
fn a_second_burst_of_guests_finds_prepared_slots() {
    with_lab(|_| {
        let home = tempfile::tempdir().unwrap();
        let config = NetworkConfig {
            ready: 2,
            ..NetworkConfig::new(home.path())
        };
        let network = Network::open(&config).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let burst = |count: usize| {
            let takes = async {
                let mut leases = Vec::new();
                for _ in 0..count {
                    leases.push(network.take(NicKind::Tap).await.unwrap());
                }
                leases
            };
            runtime.block_on(takes)
        };
        // After a burst, the network prepares `ready` slots, and one more for each lease of the
        // burst that found no prepared slot. Two slots are prepared at the start, and up to two
        // more during the burst, so that two to four of the six leases find none. The network then
        // prepares 2 slots and 2 to 4 more. The six slots of the burst are removed.
        drop(burst(6));
        let prepared = wait_for("slots of the burst to be replaced", || {
            // The number of leased and prepared slots. It is constant when all slots of the burst
            // are removed and their successors are prepared.
            let seen = network.slots().0;
            let settled = (0..10).all(|_| {
                std::thread::sleep(Duration::from_millis(50));
                network.slots().0 == seen
            });
            settled.then_some(seen)
        });
        assert!(
            (4..=6).contains(&prepared),
            "{prepared} slots after a burst of six"
        );
        // One prepared slot remains: without any, the network would create others at once.
        let leases = burst(prepared - 1);
        assert_eq!(
            network.slots().0,
            prepared,
            "slots were created for the second request"
        );
        drop(leases);
        network.close();
        assert_clean();
    });
}
