//! Benchmarks `create` and `density`: creates from a template, and the cost of idle sandboxes.
//!
//! A *spare* is a VMM process that the daemon starts in advance for the next guest. A *warm pool*
//! contains sandboxes that the daemon starts in advance. The *boot mode* of a sandbox states the
//! origin of its guest: a boot, a snapshot, or the warm pool.

use crate::counters::{Counters, Meter};
use crate::daemon::{BenchmarkDaemon, ms, timed};
use crate::{Measured, Series, goals};
use anyhow::Context;
use jiffy_client::ServerOptions;
use jiffy_engine_api::{BootMode, SandboxSize};
use std::fs;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Reference value of the memory of an idle sandbox, in MiB.
const DENSITY_REFERENCE_MIB: f64 = 34.0;

/// Result of one create and its first command.
struct Created {
    mode: Option<BootMode>,
    /// Duration of the create request.
    created_ms: f64,
    /// Duration of the create request and the first command.
    used_ms: f64,
    /// Duration of a command after other commands have run.
    again_ms: f64,
    /// Duration of the removal request.
    removed_ms: f64,
    /// Counters of the VMM from its start to the response.
    cost: Counters,
}

/// Measures creates from the template, the first and the tenth run of `true`, and the removal. Runs
/// `n` measured rounds after `warm_up` others, `c` at a time.
pub async fn create(
    template: &str,
    n: usize,
    warm_up: usize,
    c: usize,
    server: &ServerOptions,
) -> anyhow::Result<Measured> {
    let daemon = BenchmarkDaemon::open(server).await?;
    let meter = Meter::new();
    // The warm-up has the same concurrency, because it fills caches and spare VMMs.
    load(template, warm_up, c, &daemon).await?;
    let (rows, wall) = load(template, n, c, &daemon).await?;
    let goal = |goal| goals::if_sequential(goal, c).and_then(|goal| goals::of_base(goal, template));
    let mut series = Vec::new();
    // A create from the warm pool is not comparable to a create that restores a snapshot. Creates
    // in other boot modes count only in the total time.
    for (mode, name) in [
        (BootMode::Snapshot, "create"),
        (BootMode::WarmPool, "create from the warm pool"),
    ] {
        let of_mode: Vec<&Created> = rows.iter().filter(|r| r.mode == Some(mode)).collect();
        if of_mode.is_empty() {
            continue;
        }
        let column = |of: fn(&Created) -> f64| of_mode.iter().map(|r| of(r)).collect();
        series.extend([
            Series::new(
                format!("{name}, c={c}"),
                "ms",
                goal(goals::CREATE),
                column(|r| r.created_ms),
            )
            .against(goals::create_reference(c)),
            Series::new(
                format!("{name} + exec, c={c}"),
                "ms",
                goal(goals::CREATE_EXEC),
                column(|r| r.used_ms),
            ),
            Series::new(
                format!("{name}: its first exec, c={c}"),
                "ms",
                None,
                column(|r| r.used_ms - r.created_ms),
            ),
            Series::new(
                format!("{name}: its tenth exec, c={c}"),
                "ms",
                goal(goals::EXEC),
                column(|r| r.again_ms),
            ),
            Series::new(
                format!("{name}: its removal, c={c}"),
                "ms",
                goal(goals::REMOVAL),
                column(|r| r.removed_ms),
            ),
        ]);
        of_mode.iter().for_each(|r| meter.add(name, r.cost));
    }
    let each = wall / n as f64;
    series.push(Series::new(
        format!("wall / n, with DELETE, c={c}"),
        "ms",
        None,
        vec![each],
    ));
    Ok(Measured {
        method: "time of POST /v2/sandboxes, on the daemon's socket or at the selected address, \
            until its answer. The daemon answers after the agent of the sandbox. Then `true` runs \
            ten times through the gateway, on the same connection, and DELETE removes the sandbox. \
            C of these run at a time. The counters are the VMM's, from its start to the answer",
        limits: "TLS and a network in between; cold page cache; guests larger than the template's",
        ..Measured::new("create", series, &meter)
    })
}

/// Runs `number` creates, `concurrency` at a time. Returns the results and the total time.
async fn load(
    template: &str,
    number: usize,
    concurrency: usize,
    daemon: &BenchmarkDaemon,
) -> anyhow::Result<(Vec<Created>, f64)> {
    let began = Instant::now();
    let mut in_flight: JoinSet<anyhow::Result<Created>> = JoinSet::new();
    let mut rows = Vec::with_capacity(number);
    for _ in 0..number {
        if in_flight.len() >= concurrency {
            let done = in_flight.join_next().await;
            // The first `?` handles an empty set, the second a panic of the task, and the third an
            // error of the round.
            rows.push(done.context("no round in flight")???);
        }
        in_flight.spawn(life(template.to_owned(), daemon.clone()));
    }
    while let Some(done) = in_flight.join_next().await {
        rows.push(done??);
    }
    Ok((rows, ms(began.elapsed())))
}

/// Creates a sandbox, runs ten commands and removes the sandbox.
async fn life(template: String, daemon: BenchmarkDaemon) -> anyhow::Result<Created> {
    let (sandbox, created_ms) = timed(daemon.create_from(&template)).await?;
    let id = &sandbox.record.id;
    // Read the counters before the first command, so that only the create is counted.
    let cost = daemon.counters(id).await?;
    let ((), exec_ms) = timed(daemon.exec_in(&sandbox, "true")).await?;
    // The first execution and these eight precede the tenth, which is measured next.
    for _ in 0..8 {
        daemon.exec_in(&sandbox, "true").await?;
    }
    let ((), again_ms) = timed(daemon.exec_in(&sandbox, "true")).await?;
    let ((), removed_ms) = timed(daemon.remove(id)).await?;
    Ok(Created {
        mode: sandbox.record.boot_mode,
        created_ms,
        // The sum, because counters are read in between.
        used_ms: created_ms + exec_ms,
        again_ms,
        removed_ms,
        cost,
    })
}

/// Measures the memory of idle sandboxes.
pub async fn density(n: usize, server: &ServerOptions) -> anyhow::Result<Measured> {
    let daemon = BenchmarkDaemon::open(server).await?;
    let meter = Meter::new();
    // The first create reads the template's snapshot into the page cache.
    let first = daemon.create_base(SandboxSize::default()).await?;
    daemon.remove(&first.id).await?;
    let before = available_mib()?;
    // Sandboxes are created sequentially: concurrent creates would need more memory for a moment.
    let ids = daemon.create_several(n, SandboxSize::default()).await?;
    let each = |after: f64| (before - after) / n as f64;
    let at_once = each(available_mib()?);
    let mut counted = Vec::with_capacity(n);
    for id in &ids {
        counted.push(daemon.counters(id).await?);
    }
    // An idle guest touches further memory in its first minute.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let later = each(available_mib()?);
    for (id, before) in ids.iter().zip(counted) {
        let after = daemon.counters(id).await?;
        meter.add("a minute of idling", after.since(before));
    }
    for id in &ids {
        daemon.remove(id).await?;
    }
    let series = vec![
        Series::new(
            format!("memory each at T=0, {n} live"),
            "MiB",
            None,
            vec![at_once],
        )
        .against(Some(DENSITY_REFERENCE_MIB)),
        Series::new(
            format!("memory each at T=60 s, {n} live"),
            "MiB",
            Some(goals::DENSITY_MIB),
            vec![later],
        )
        .against(Some(DENSITY_REFERENCE_MIB)),
    ];
    Ok(Measured {
        method: "decrease of MemAvailable after N idle sandboxes of 2 vCPUs and 512 MiB were \
            created, divided by N: at the answer of the last sandbox, and 60 s later",
        limits: "sandboxes under load; other users of this host's memory",
        ..Measured::new("density", series, &meter)
    })
}

/// Returns the available memory of the host in MiB.
fn available_mib() -> anyhow::Result<f64> {
    let meminfo = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .context("no MemAvailable in /proc/meminfo")?;
    let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib / 1024.0)
}
