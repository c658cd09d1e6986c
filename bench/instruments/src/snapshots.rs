//! Instruments `snapshot`, `dirty` and `rollback`.

use crate::goals;
use jiffy_api_types::SnapshotInfo;
use jiffy_benchmark::counters::Meter;
use jiffy_benchmark::daemon::{BenchmarkDaemon, run_concurrently, timed};
use jiffy_benchmark::{Measured, Series};
use jiffy_client::ServerOptions;
use jiffy_engine_api::SandboxSize;
use std::process::Command;
use std::time::Instant;

/// Reference value of the pause of a guest during a snapshot, in ms.
const STOPPED_REFERENCE_MS: f64 = 56.0;
/// Reference value of the creation of one sandbox from a snapshot, in ms.
const CREATE_REFERENCE_MS: f64 = 66.7;
/// Writes about 8 MB to memory, like CubeSandbox's benchmark, whose values are the references.
const WRITE_SCRIPT: &str = "head -c 8000000 /dev/urandom > /dev/shm/x";

/// Measures snapshots of `c` running sandboxes that have written little, and creates from them.
pub async fn snapshot(
    n: usize,
    warm_up: usize,
    c: usize,
    server: &ServerOptions,
) -> anyhow::Result<Measured> {
    let daemon = BenchmarkDaemon::open(server).await?;
    let meter = Meter::new();
    let [
        mut call,
        mut stopped,
        mut wall,
        mut restored,
        mut restored_wall,
    ] = [const { Vec::new() }; 5];
    for round in 0..warm_up + n {
        let ids = daemon.create_several(c, SandboxSize::default()).await?;
        let mut before = Vec::new();
        for id in &ids {
            // CubeSandbox's benchmark also measures a guest that has written 8 MB.
            daemon.exec(id, WRITE_SCRIPT).await?;
            before.push(daemon.counters(id).await?);
        }
        let (taken, taken_wall) = run_concurrently(&ids, |id| {
            let daemon = daemon.clone();
            async move { timed(daemon.snapshot(&id)).await }
        })
        .await?;
        // Counters are read before the creates, which use the same snapshots.
        let mut cost = Vec::new();
        for (id, before) in ids.iter().zip(before) {
            cost.push(daemon.counters(id).await?.since(before));
        }
        let (children, children_wall) = run_concurrently(&taken, |(snapshot, _)| {
            let daemon = daemon.clone();
            async move { timed(daemon.create_from_snapshot(&snapshot.id)).await }
        })
        .await?;
        for (child, _) in &children {
            if round >= warm_up {
                meter.add("create from it", daemon.counters(&child.id).await?);
            }
            daemon.remove(&child.id).await?;
        }
        clear(&daemon, &ids, taken.iter().map(|(snapshot, _)| snapshot)).await?;
        if round >= warm_up {
            call.extend(taken.iter().map(|(_, took)| took));
            stopped.extend(taken.iter().map(|(snapshot, _)| snapshot.stopped_ms));
            wall.push(taken_wall);
            restored.extend(children.iter().map(|(_, took)| took));
            restored_wall.push(children_wall);
            cost.into_iter()
                .for_each(|cost| meter.add("snapshot", cost));
        }
    }
    let goal = |goal| goals::if_sequential(goal, c);
    let series = vec![
        Series::new("snapshot, 8 MB written", "ms", goal(goals::SNAPSHOT), call),
        Series::new("guest stood still", "ms", goal(goals::STOPPED), stopped)
            .against(Some(STOPPED_REFERENCE_MS)),
        Series::new(format!("wall of {c} snapshots"), "ms", None, wall)
            .against(goals::snapshot_reference(c)),
        Series::new("create from it", "ms", goal(goals::CREATE), restored),
        Series::new(format!("wall of {c} creates"), "ms", None, restored_wall)
            .against(goals::restore_reference(c)),
    ];
    Ok(Measured {
        method: "POST snapshot of C running sandboxes at once (2 vCPUs, 512 MiB, 8 MB written \
            before) until the answer, which follows when the snapshot is complete in the page \
            cache (not synced); duration of the guest's pause; POST /v2/sandboxes from these \
            snapshots, C at once; counters of the VMM during the snapshot, and of a new VMM from \
            its start to the answer",
        limits: "synced storage; long lineages",
        ..Measured::new("snapshot", series, &meter)
    })
}

/// Removes sandboxes, and then their snapshots.
async fn clear<'a>(
    daemon: &BenchmarkDaemon,
    ids: &[String],
    snapshots: impl Iterator<Item = &'a SnapshotInfo>,
) -> anyhow::Result<()> {
    for id in ids {
        daemon.remove(id).await?;
    }
    for snapshot in snapshots {
        daemon.remove_snapshot(&snapshot.id).await?;
    }
    Ok(())
}

/// Measures snapshots by the amount written since the previous snapshot.
pub async fn dirty(n: usize, server: &ServerOptions) -> anyhow::Result<Measured> {
    let daemon = BenchmarkDaemon::open(server).await?;
    let meter = Meter::new();
    let size = SandboxSize {
        memory_mib: 3072,
        ..SandboxSize::default()
    };
    let mut series = Vec::new();
    for mb in [0u64, 10, 50, 100, 200, 500, 800, 1024] {
        let [mut call, mut stopped, mut restored, mut captured, mut disk] =
            [const { Vec::new() }; 5];
        // The default size of `/dev/shm` is half of the memory, which is too small for 1 GiB.
        let write = format!(
            "mount -o remount,size=2G /dev/shm 2>/dev/null; head -c {mb}M /dev/urandom > /dev/shm/x"
        );
        let write = format!("sudo sh -c '{write}'");
        for _ in 0..n {
            let sandbox = daemon.create_base(size).await?;
            daemon.exec(&sandbox.id, &write).await?;
            let before = daemon.counters(&sandbox.id).await?;
            let (taken, took) = timed(daemon.snapshot(&sandbox.id)).await?;
            let after = daemon.counters(&sandbox.id).await?;
            meter.add(&format!("{mb} MB: snapshot"), after.since(before));
            call.push(took);
            stopped.push(taken.stopped_ms);
            let (child, took) = timed(daemon.create_from_snapshot(&taken.id)).await?;
            restored.push(took);
            daemon.remove(&child.id).await?;
            // Write the same amount again, over pages of the first snapshot.
            daemon.exec(&sandbox.id, &write).await?;
            let (second, took) = timed(daemon.capture(&sandbox.id)).await?;
            captured.push(took);
            // This create completes only when the second snapshot is stored, so nothing still
            // writes it.
            let child = daemon.create_from_snapshot(&second.id).await?;
            daemon.remove(&child.id).await?;
            clear(&daemon, &[sandbox.id], [&second, &taken].into_iter()).await?;
            // `dd` of no bytes would only measure its start.
            if mb > 0 {
                disk.push(direct_write_ms(mb)?);
            }
        }
        let (goal, reference) = goals::dirty(mb);
        series.extend([
            Series::new(format!("{mb} MB: snapshot"), "ms", goal, call).against(reference),
            Series::new(
                format!("{mb} MB: captured"),
                "ms",
                Some(goals::CAPTURED),
                captured,
            ),
            Series::new(format!("{mb} MB: dd with O_DIRECT"), "ms", None, disk),
            Series::new(
                format!("{mb} MB: stood still"),
                "ms",
                Some(goals::STOPPED),
                stopped,
            ),
            Series::new(
                format!("{mb} MB: create from it"),
                "ms",
                Some(goals::CREATE),
                restored,
            )
            .against(Some(CREATE_REFERENCE_MS)),
        ]);
    }
    Ok(Measured {
        method: "a new sandbox of 3 GiB writes the given number of MB of random bytes to memory; \
            then as in `snapshot`; then it writes the same number again, and a snapshot with `ack: \
            captured` until its answer; dd with O_DIRECT of the same number of bytes to a new file \
            in the working directory",
        limits: "synced storage; concurrent operations",
        ..Measured::new("dirty", series, &meter)
    })
}

/// Writes `mb` MB of zeros to a new file with direct I/O. Returns the milliseconds.
fn direct_write_ms(mb: u64) -> anyhow::Result<f64> {
    let directory = tempfile::tempdir_in(".")?;
    let file = directory.path().join("zeros");
    let began = Instant::now();
    let status = Command::new("dd")
        .args(["if=/dev/zero", "bs=1M", "oflag=direct", "status=none"])
        .arg(format!("count={mb}"))
        .arg(format!("of={}", file.display()))
        .status()?;
    anyhow::ensure!(status.success(), "dd to {} failed", file.display());
    Ok(began.elapsed().as_secs_f64() * 1000.0)
}

/// Measures a rollback alone, and with the snapshot before it, of `c` sandboxes at once.
pub async fn rollback(
    n: usize,
    warm_up: usize,
    c: usize,
    server: &ServerOptions,
) -> anyhow::Result<Measured> {
    let daemon = BenchmarkDaemon::open(server).await?;
    let meter = Meter::new();
    let (mut alone, mut both, mut wall) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..warm_up + n {
        let ids = daemon.create_several(c, SandboxSize::default()).await?;
        let (done, batch) = run_concurrently(&ids, |id| {
            let daemon = daemon.clone();
            async move {
                let (taken, snapshot) = timed(daemon.snapshot(&id)).await?;
                let before = daemon.counters(&id).await?;
                let (_, rollback) = timed(daemon.rollback(&id, &taken.id)).await?;
                let cost = daemon.counters(&id).await?.since(before);
                Ok((taken, rollback, snapshot + rollback, cost))
            }
        })
        .await?;
        for id in &ids {
            // Fails if a guest does not work after its rollback.
            daemon.exec(id, "true").await?;
        }
        clear(&daemon, &ids, done.iter().map(|(taken, ..)| taken)).await?;
        if round >= warm_up {
            alone.extend(done.iter().map(|(_, rollback, ..)| rollback));
            both.extend(done.iter().map(|(_, _, both, _)| both));
            done.iter()
                .for_each(|(.., cost)| meter.add("rollback", *cost));
            wall.push(batch);
        }
    }
    let series = vec![
        Series::new(
            format!("rollback, c={c}"),
            "ms",
            goals::if_sequential(goals::ROLLBACK, c),
            alone,
        ),
        Series::new(format!("snapshot + rollback, c={c}"), "ms", None, both),
        Series::new(format!("wall of {c} of both"), "ms", None, wall)
            .against(goals::rollback_reference(c)),
    ];
    Ok(Measured {
        method: "C running sandboxes at once: POST snapshot, then POST rollback to it until the \
            agent has answered; the rollback alone, both together, and the total time of all C \
            (including the reading of counters); counters of the VMM during the rollback",
        limits: "old snapshots in a long lineage",
        ..Measured::new("rollback", series, &meter)
    })
}
