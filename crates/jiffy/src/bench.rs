//! `jiffy bench`: measures this host, keeps every sample, and says what was measured how.

mod counters;
mod create;
mod family;
mod gateway;
mod goal;
mod machine;
mod memory;
mod restore;
mod run;
mod snapshots;
mod stats;
mod target;
mod tasks;

use crate::cli::{BenchArgs, BenchTask};
use anyhow::Context;
use counters::Meter;
use serde::Serialize;
use stats::Series;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

/// One file of results.
#[derive(Debug, Serialize)]
struct Report {
    task: &'static str,
    /// Definition of a sample and its method.
    method: &'static str,
    /// Limits of these figures.
    limits: &'static str,
    host: machine::Machine,
    /// Commit of the working tree that the command ran in.
    commit: String,
    command: Vec<String>,
    /// Seconds since the epoch.
    taken_at: u64,
    /// Rounds that were run first and thrown away.
    warm_up: usize,
    /// Measurements that were not possible here, with the reason.
    not_available: Vec<String>,
    series: Vec<Series>,
}

/// Result of a task.
struct Measured {
    name: &'static str,
    method: &'static str,
    limits: &'static str,
    not_available: Vec<String>,
    series: Vec<Series>,
}

impl Measured {
    /// Figures with what the meter counted beside; method and limits are still to be told.
    fn new(name: &'static str, mut series: Vec<Series>, meter: &Meter) -> Self {
        series.extend(meter.series());
        Self {
            name,
            method: "",
            limits: "",
            not_available: meter.not_available(),
            series,
        }
    }
}

/// Runs one task and prints its table or JSON.
pub fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(args.number > 0, "-n 0: at least one sample is needed");
    let server = args.host.server();
    let runtime = crate::runtime()?;
    let (n, w, c) = (args.number, args.warm_up, args.concurrency);
    anyhow::ensure!(c > 0, "-c 0: at least one at a time");
    let measured = match args.task {
        BenchTask::Boot => runtime.block_on(tasks::boot(n, w))?,
        BenchTask::Exec => runtime.block_on(tasks::exec(n, w))?,
        BenchTask::Run => runtime.block_on(run::run(n, w, &server))?,
        BenchTask::Memory => runtime.block_on(tasks::memory(n))?,
        BenchTask::Create => runtime.block_on(create::create(n, w, c, &server))?,
        BenchTask::Snapshot => runtime.block_on(snapshots::snapshot(n, w, c, &server))?,
        BenchTask::Dirty => runtime.block_on(snapshots::dirty(n, &server))?,
        BenchTask::Restore => runtime.block_on(restore::restore(n, w, c))?,
        BenchTask::Rollback => runtime.block_on(snapshots::rollback(n, w, c, &server))?,
        BenchTask::Clone => runtime.block_on(family::clone(n, w, c, &server))?,
        BenchTask::Pause => runtime.block_on(family::pause(n, w, c, &server))?,
        BenchTask::Gateway => runtime.block_on(gateway::gateway(n, w, &server))?,
        BenchTask::Code => runtime.block_on(gateway::code(n, w, &server))?,
        BenchTask::Density => runtime.block_on(create::density(n, &server))?,
    };
    let report = Report {
        task: measured.name,
        method: measured.method,
        limits: measured.limits,
        host: machine::Machine::look(),
        commit: machine::commit(),
        command: std::env::args().skip(1).collect(),
        taken_at: SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
        warm_up: w,
        not_available: measured.not_available,
        series: measured.series,
    };
    let json = serde_json::to_string_pretty(&report)?;
    if let Some(path) = &args.out {
        std::fs::write(path, &json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if args.json {
        println!("{json}");
    } else {
        println!("{}: {}", report.task, report.method);
        stats::print(&report.series);
        for missing in &report.not_available {
            println!("  {missing}");
        }
        println!("  does not show: {}", report.limits);
    }
    Ok(ExitCode::SUCCESS)
}
