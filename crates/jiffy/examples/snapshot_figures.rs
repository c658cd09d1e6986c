//! Measures snapshots and restores of a real sandbox; prints one line per figure. Requires
//! `JIFFY_VMM` and `JIFFY_AGENT`. Snapshots are written to a directory in `SNAPSHOT_DIR`, by
//! default in the data directory of the host.
//!
//! `snapshot_figures restore|live|pause [ROUNDS]`
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use jiffy_agent_client::ProcessSpec;
use jiffy_engine_api::SandboxSize;
use jiffy_engines::{Host, PreparedTemplate, SandboxSpec};
use jiffy_microvm_engine::{MemoryPolicy, MicroVm, SnapshotSpec};
use jiffy_proto::snapshot::AfterSnapshot;
use jiffy_snapshot::{Durability, Store};
use std::time::Instant;

fn spec(memory_mib: u32) -> SandboxSpec {
    SandboxSpec {
        size: SandboxSize {
            vcpus: 2,
            memory_mib,
            disk_mib: 1024,
        },
        ..SandboxSpec::default()
    }
}

/// Returns the settings of a snapshot with memory and disk.
fn saved(id: &str, then: AfterSnapshot) -> SnapshotSpec {
    SnapshotSpec {
        id: id.to_owned(),
        template: "base".to_owned(),
        then,
        durability: Durability::PageCache,
        max_bytes: None,
        working_set: false,
        disk_only: false,
    }
}

/// Runs a command in the guest. Panics if the command fails.
async fn run(vm: &MicroVm, cmd: &str, args: &[&str]) {
    let agent = jiffy_engines::agent(vm);
    let process = agent
        .start(&ProcessSpec::new(cmd, args.iter().copied()))
        .await;
    let (status, ..) = process.unwrap().output(1 << 20).await.unwrap();
    assert_eq!(status.exit_code, 0, "{cmd}");
}

/// Prints the minimum, median and maximum of times in microseconds.
fn show(name: &str, mut values: Vec<u64>) {
    values.sort_unstable();
    let (min, median) = (values[0], values[values.len() / 2]);
    let max = values[values.len() - 1];
    println!(
        "{name}: min {min} median {median} max {max} us, n={}",
        values.len()
    );
}

/// Measures restores of a booted guest with each policy for its memory.
async fn restores(prepared: &PreparedTemplate, store: &Store, rounds: usize) {
    let spec = spec(512);
    let vm = prepared.boot(&spec).await.unwrap();
    run(&vm, "true", &[]).await;
    let (_, report) = vm
        .snapshot(store, &saved("base", AfterSnapshot::Stop))
        .await
        .unwrap();
    println!("snapshot of a booted guest: {report:?}");
    vm.ended().await;
    let vm = prepared
        .restore(&spec, store, "base", MemoryPolicy::Map)
        .await
        .unwrap();
    run(&vm, "true", &[]).await;
    let recorded = vm.working_set(store).await.unwrap();
    let (set, chunks) = (recorded.touched, recorded.chunks);
    println!("working set: {chunks} chunks");
    drop(vm);
    for policy in ["map", "working set", "all"] {
        let (mut ready, mut exec, mut second) = (Vec::new(), Vec::new(), Vec::new());
        let mut phases = [const { Vec::new() }; 3];
        for round in 0..rounds + 2 {
            let memory = match policy {
                "map" => MemoryPolicy::Map,
                "all" => MemoryPolicy::CopyAll,
                _ => MemoryPolicy::CopyWorkingSet(set.try_clone().unwrap()),
            };
            let began = Instant::now();
            let vm = prepared
                .restore(&spec, store, "base", memory)
                .await
                .unwrap();
            let up = began.elapsed().as_micros() as u64;
            run(&vm, "true", &[]).await;
            let done = began.elapsed().as_micros() as u64;
            run(&vm, "true", &[]).await;
            // The first two rounds warm up.
            if round > 1 {
                ready.push(up);
                exec.push(done);
                second.push(began.elapsed().as_micros() as u64 - done);
                let report = vm.report();
                let parts = [report.vmm_us, report.kernel_us, report.agent_us];
                phases
                    .iter_mut()
                    .zip(parts)
                    .for_each(|(to, us)| to.push(us));
            }
            vm.stop().await;
        }
        show(&format!("restore ({policy}) to ready"), ready);
        // The agent first greets the VMM, and then takes the name and address of the sandbox.
        let [vmm, greeting, identity] = phases;
        show("   of which until the first instruction", vmm);
        show("   of which until the greeting", greeting);
        show("   of which until the identity is in force", identity);
        show(
            &format!("restore ({policy}) to the first `true` done"),
            exec,
        );
        show("   a second `true`", second);
    }
}

/// Measures snapshots of a guest that continues to run, by the memory that it wrote since the last
/// snapshot.
async fn live(prepared: &PreparedTemplate, store: &Store, rounds: usize) {
    let spec = spec(3072);
    let vm = prepared.boot(&spec).await.unwrap();
    vm.snapshot(store, &saved("big", AfterSnapshot::Stop))
        .await
        .unwrap();
    vm.ended().await;
    for mib in [8u32, 100, 1024] {
        let (mut stopped, mut total, mut stored) = (Vec::new(), Vec::new(), Vec::new());
        let mut phases = [const { Vec::new() }; 4];
        for round in 0..rounds {
            let vm = prepared
                .restore(&spec, store, "big", MemoryPolicy::Map)
                .await
                .unwrap();
            let dd = format!("dd if=/dev/urandom of=/dev/shm/x bs=1M count={mib} 2>/dev/null");
            run(&vm, "/bin/sh", &["-c", &dd]).await;
            let id = format!("live{mib}r{round}");
            let (_, report) = vm
                .snapshot(store, &saved(&id, AfterSnapshot::Resume))
                .await
                .unwrap();
            run(&vm, "true", &[]).await;
            vm.stop().await;
            store.remove(&id).unwrap();
            stopped.push(report.stopped_us);
            total.push(report.total_us);
            stored.push(report.stored);
            let p = report.phases;
            // `copy_us` is the time of the fork: the guest continues while the forked process
            // writes the memory.
            let parts = [p.pause_us, p.state_us, p.scan_us, p.copy_us];
            phases
                .iter_mut()
                .zip(parts)
                .for_each(|(to, us)| to.push(us));
        }
        println!("live snapshot, {mib} MiB written: {stored:?} chunks");
        show("   stopped", stopped);
        let names = ["   - pausing", "   - state", "   - scan", "   - fork"];
        names
            .into_iter()
            .zip(phases)
            .for_each(|(name, list)| show(name, list));
        show("   total", total);
    }
}

/// Measures pauses and resumes of the vCPUs of an idle guest, and pauses to disk.
async fn pauses(prepared: &PreparedTemplate, store: &Store, rounds: usize) {
    let vm = prepared.boot(&spec(2048)).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    let (mut all, mut resumes) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let began = Instant::now();
        vm.pause().await.unwrap();
        all.push(began.elapsed().as_micros() as u64);
        let began = Instant::now();
        vm.resume().await.unwrap();
        resumes.push(began.elapsed().as_micros() as u64);
    }
    show("vCPU pause call, idle 2 GiB guest", all);
    show("vCPU resume call", resumes);
    vm.snapshot(store, &saved("idle", AfterSnapshot::Stop))
        .await
        .unwrap();
    vm.ended().await;
    let (mut sleeps, mut stored) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let spec = spec(2048);
        let vm = prepared
            .restore(&spec, store, "idle", MemoryPolicy::Map)
            .await
            .unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        let id = format!("idle{round}");
        let began = Instant::now();
        let (_, report) = vm
            .snapshot(store, &saved(&id, AfterSnapshot::Stop))
            .await
            .unwrap();
        sleeps.push(began.elapsed().as_micros() as u64);
        stored.push(report.stored);
        vm.ended().await;
        drop(vm);
        store.remove(&id).unwrap();
    }
    show(
        "pause to disk (snapshot and stop), idle 2 GiB guest",
        sleeps,
    );
    println!("   chunks {stored:?}");
}

#[tokio::main]
async fn main() {
    let what = std::env::args().nth(1).unwrap_or_default();
    let rounds = std::env::args().nth(2).map_or(10, |n| n.parse().unwrap());
    let host = Host::open().unwrap();
    let run = std::env::var_os("SNAPSHOT_DIR").map_or_else(|| host.home().run(), Into::into);
    let prepared = host.prepare("base", &mut |_| ()).unwrap();
    let dir = tempfile::tempdir_in(run).unwrap();
    let store = Store::open(dir.path()).unwrap();
    match what.as_str() {
        "restore" => restores(&prepared, &store, rounds).await,
        "live" => live(&prepared, &store, rounds).await,
        "pause" => pauses(&prepared, &store, rounds).await,
        other => panic!("{other:?}: restore, live or pause"),
    }
}
