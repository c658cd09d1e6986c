//! Instrument `restore`: restores without a daemon, a journal or HTTP. The *working set* of a
//! snapshot consists of the memory that a restored guest touches first.

use crate::goals;
use anyhow::Context;
use jiffy_agent_client::ProcessSpec;
use jiffy_benchmark::counters::{Counters, Meter};
use jiffy_benchmark::daemon::{ms, run_concurrently, timed};
use jiffy_benchmark::{Measured, Series, prepare_guests, run_true};
use jiffy_engine_api::BootReport;
use jiffy_engines::{Host, HostFingerprint, PolicyInForce, RestorePolicy, SandboxSpec};
use jiffy_microvm_engine::{MemoryPolicy, SnapshotSpec};
use jiffy_proto::snapshot::AfterSnapshot;
use jiffy_snapshot::{Durability, Store};
use std::sync::Arc;
use std::time::Instant;

const SNAPSHOT_ID: &str = "restored";

/// Measures `c` concurrent restores of a snapshot, each from the call until the agent in the guest
/// has confirmed its new identity (such as its id and host name).
pub async fn restore(n: usize, warm_up: usize, c: usize) -> anyhow::Result<Measured> {
    let prepared = Arc::new(prepare_guests().await?);
    let host = Host::open()?;
    let policy = PolicyInForce::find(host.home().path(), &HostFingerprint::here()).policy;
    // The snapshot must be on the same file system as the daemon's snapshots.
    let dir = tempfile::tempdir_in(host.home().path().join("run"))
        .context("cannot create a directory for the snapshot")?;
    let store = Store::open(dir.path())?;
    let spec = SandboxSpec::default();
    let vm = prepared.boot(&spec).await?;
    let write = ProcessSpec::new(
        "/bin/sh",
        ["-c", "head -c 8000000 /dev/urandom > /dev/shm/x"],
    );
    jiffy_engines::agent(&vm)
        .start(&write)
        .await?
        .output(0)
        .await?;
    let saved = SnapshotSpec {
        id: SNAPSHOT_ID.to_owned(),
        template: "base".to_owned(),
        // The guest is not needed after its snapshot.
        then: AfterSnapshot::Stop,
        durability: Durability::PageCache,
        max_bytes: None,
        working_set: false,
        disk_only: false,
    };
    let (snapshot, _) = vm.snapshot(&store, &saved).await?;
    vm.ended().await;
    // A first restore records the pages that a restored guest accesses, as the daemon does.
    let vm = prepared
        .restore(&spec, &store, SNAPSHOT_ID, MemoryPolicy::Map)
        .await?;
    // The command is part of the working set, since it follows each measured restore.
    run_true(&jiffy_engines::agent(&vm)).await?;
    let set = vm.working_set(&store).await?;
    snapshot.put_working_set(&set.touched)?;
    snapshot.put_written_pages(&set.written)?;
    vm.stop().await;

    let meter = Meter::new();
    let (mut ready, mut exec, mut walls) = (Vec::new(), Vec::new(), Vec::new());
    let mut reports: Vec<BootReport> = Vec::new();
    for round in 0..warm_up + n {
        let (vms, wall) = run_concurrently(&vec![(); c], |()| {
            let (prepared, store, spec) = (prepared.clone(), store.clone(), spec.clone());
            async move {
                let memory = match policy {
                    RestorePolicy::Map => MemoryPolicy::Map,
                    RestorePolicy::CopyAll => MemoryPolicy::CopyAll,
                    RestorePolicy::CopyWorkingSet => {
                        let set = store.get(SNAPSHOT_ID)?.working_set()?;
                        MemoryPolicy::CopyWorkingSet(set.context("no working set")?.1)
                    }
                };
                let restored =
                    async { Ok(prepared.restore(&spec, &store, SNAPSHOT_ID, memory).await?) };
                timed(restored).await
            }
        })
        .await?;
        for (vm, took) in vms {
            // The counters are read first, because the command below causes further exits of the
            // guest to the VMM.
            let cost = Counters::of_vm(&vm).await?;
            let began = Instant::now();
            run_true(&jiffy_engines::agent(&vm)).await?;
            if round >= warm_up {
                ready.push(took);
                exec.push(ms(began.elapsed()));
                reports.push(vm.report());
                meter.add("restore", cost);
            }
            vm.stop().await;
        }
        if round >= warm_up {
            walls.push(wall);
        }
    }
    let phase = |name: &str, of: fn(&BootReport) -> u64| {
        let samples = reports.iter().map(|r| of(r) as f64 / 1000.0).collect();
        Series::new(format!("of which {name}"), "ms", None, samples)
    };
    let series = vec![
        Series::new(
            format!("restore ({policy}), c={c}"),
            "ms",
            goals::if_sequential(goals::CREATE, c),
            ready,
        ),
        Series::new(format!("wall of {c} restores"), "ms", None, walls)
            .against(goals::restore_reference(c)),
        phase("VMM to the first instruction", |r| r.vmm_us),
        phase("guest to its greeting", |r| r.kernel_us),
        phase("identity taken", |r| r.agent_us),
        Series::new("`true` after it", "ms", None, exec),
    ];
    Ok(Measured {
        method: "no daemon: restores of a snapshot of a booted guest (2 vCPUs, 512 MiB, 8 MB \
            written), C at once, from the call until the agent has confirmed its new identity; \
            with the memory policy of this host; then `true` in one guest after the other; \
            counters of the VMM from its start to this confirmation",
        // Not measured.
        limits: "cold page cache; long lineages; guests that have written much",
        ..Measured::new("restore", series, &meter)
    })
}
