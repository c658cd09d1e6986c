//! `jiffy bench`: measures this host, keeps every sample, and says what was measured how.

mod machine;
mod memory;
mod operations;
mod stats;
mod tasks;

use crate::cli::{BenchArgs, BenchTask};
use anyhow::Context;
use serde::Serialize;
use stats::Series;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

/// One file of results.
#[derive(Debug, Serialize)]
struct Report {
    task: &'static str,
    /// What a sample is and how it was taken.
    method: &'static str,
    /// What these figures do not show.
    limits: &'static str,
    host: machine::Machine,
    /// Commit of the working tree that the command ran in.
    commit: String,
    command: Vec<String>,
    /// Seconds since the epoch.
    taken_at: u64,
    /// Rounds that were run first and thrown away.
    warm_up: usize,
    series: Vec<Series>,
}

/// What a task brings home.
struct Measured {
    name: &'static str,
    method: &'static str,
    limits: &'static str,
    series: Vec<Series>,
}

/// Runs one task and prints its table or JSON.
pub fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(args.number > 0, "-n 0: at least one sample is needed");
    let runtime = crate::runtime()?;
    let (n, w, c) = (args.number, args.warm_up, args.concurrency);
    anyhow::ensure!(c > 0, "-c 0: at least one at a time");
    let measured = match args.task {
        BenchTask::Boot => runtime.block_on(tasks::boot(n, w))?,
        BenchTask::Exec => runtime.block_on(tasks::exec(n, w))?,
        BenchTask::Run => tasks::run(n, w)?,
        BenchTask::Memory => runtime.block_on(tasks::memory(n))?,
        BenchTask::Create => runtime.block_on(operations::create(n, w, c))?,
        BenchTask::Snapshot => runtime.block_on(operations::snapshot(n, w))?,
        BenchTask::Dirty => runtime.block_on(operations::dirty(n))?,
        BenchTask::Rollback => runtime.block_on(operations::rollback(n, w, c))?,
        BenchTask::Clone => runtime.block_on(operations::clone(n, w))?,
        BenchTask::Pause => runtime.block_on(operations::pause(n, w))?,
        BenchTask::Density => runtime.block_on(operations::density(n))?,
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
        println!("  does not show: {}", report.limits);
    }
    Ok(ExitCode::SUCCESS)
}
