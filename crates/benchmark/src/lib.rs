//! Benchmarks of a host: tasks that keep every sample, with what was measured how.

mod calibration;
mod counters;
mod create;
mod daemon;
mod data;
mod fork_pause;
mod gateway;
mod goals;
mod guest;
mod host_description;
mod jiffy_run;
mod leftovers;
mod memory;
mod processor_time;
mod restore;
mod scale;
mod snapshots;
mod stats;
mod stress;

use anyhow::Context;
use calibration::Calibration;
use counters::Meter;
use host_description::HostDescription;
use jiffy_client::ServerOptions;
use jiffy_image::Home;
use serde::Serialize;
use stats::Series;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time after which the pause of a sandbox is over: its guest is gone, its snapshot merged.
const ASLEEP: Duration = Duration::from_secs(2);

/// Tasks that can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// The host's own operations.
    Calibration,
    /// Cold boot to the agent's answer, split by phase.
    Boot,
    /// `true` in a running guest.
    Exec,
    /// `jiffy run -- echo hello` end to end.
    Run,
    /// Memory of a VMM and of a fresh guest.
    Memory,
    /// Create from a template.
    Create,
    /// Snapshots of running sandboxes, and creates from them.
    Snapshot,
    /// Snapshots against the amount written since the last.
    Dirty,
    /// Restore without a daemon.
    Restore,
    /// Rollback.
    Rollback,
    /// Fork.
    Fork,
    /// Pause and resume.
    Pause,
    /// The same of sandboxes that sleep for a moment.
    Sleep,
    /// Memory of idle sandboxes.
    Density,
    /// Exec, files and silent streams through the gateway.
    Gateway,
    /// The first piece of code in a code interpreter.
    Code,
    /// Whole lives of sandboxes, and what they left on the host.
    Stress,
    /// Processor time of each operation.
    ProcessorTime,
    /// Costs against how much the host has.
    Scale,
    /// Requests, streams, files and work in a sandbox beside the same on the host.
    Data,
}

/// Options of a benchmark.
#[derive(Debug, Clone)]
pub struct BenchmarkOptions {
    /// Samples.
    pub samples: usize,
    /// Rounds that are run first and thrown away.
    pub warm_up: usize,
    /// Operations at a time.
    pub concurrency: usize,
    /// Numbers of snapshots, sandboxes, templates and keys at which costs are compared.
    pub numbers: Vec<usize>,
    /// Template of sandboxes that are created and forked.
    pub template: String,
    /// Control plane that is measured.
    pub server: ServerOptions,
}

/// Results of a task.
#[derive(Debug, Serialize)]
pub struct Report {
    task: &'static str,
    /// Definition of a sample and its method.
    method: &'static str,
    /// Limits of these figures.
    limits: &'static str,
    host: HostDescription,
    /// Costs of the host's own operations, measured right before the task.
    calibration: Calibration,
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

/// Samples of a task.
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

/// Measures one task. Fails if there is nothing to measure or an operation fails.
pub async fn measure(task: Task, options: &BenchmarkOptions) -> anyhow::Result<Report> {
    let (n, w, c) = (options.samples, options.warm_up, options.concurrency);
    anyhow::ensure!(n > 0, "-n 0: at least one sample is needed");
    anyhow::ensure!(c > 0, "-c 0: at least one at a time");
    let (server, template) = (&options.server, options.template.as_str());
    let calibration = calibrate().await?;
    let measured = match task {
        Task::Calibration => calibration::repeat(n, &calibration, calibrate).await?,
        Task::Boot => guest::boot(n, w).await?,
        Task::Exec => guest::exec(n, w).await?,
        Task::Run => jiffy_run::run(n, w, server).await?,
        Task::Memory => guest::memory(n).await?,
        Task::Create => create::create(template, n, w, c, server).await?,
        Task::Snapshot => snapshots::snapshot(n, w, c, server).await?,
        Task::Dirty => snapshots::dirty(n, server).await?,
        Task::Restore => restore::restore(n, w, c).await?,
        Task::Rollback => snapshots::rollback(n, w, c, server).await?,
        Task::Fork => fork_pause::fork(template, n, w, c, server).await?,
        Task::Pause => fork_pause::pause("pause", Duration::ZERO, n, w, c, server).await?,
        Task::Sleep => fork_pause::pause("sleep", ASLEEP, n, w, c, server).await?,
        Task::Gateway => gateway::gateway(n, w, server).await?,
        Task::Code => gateway::code(n, w, server).await?,
        Task::Density => create::density(n, server).await?,
        Task::Stress => stress::stress(n, w, c, server).await?,
        Task::Data => data::data(n, w, server).await?,
        Task::ProcessorTime => processor_time::processor_time(template, n, c, server).await?,
        Task::Scale => scale::scale(n, &options.numbers).await?,
    };
    let missing = calibration.not_available.clone();
    Ok(Report {
        task: measured.name,
        method: measured.method,
        limits: measured.limits,
        host: HostDescription::read(),
        calibration,
        commit: host_description::commit(),
        command: std::env::args().skip(1).collect(),
        taken_at: SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
        warm_up: w,
        not_available: [measured.not_available, missing].concat(),
        series: measured.series,
    })
}

/// Measures the host where its data directory is, or would be.
async fn calibrate() -> anyhow::Result<Calibration> {
    let home = Home::locate().ok().map(|home| home.path().to_owned());
    let directory = home.unwrap_or_else(std::env::temp_dir);
    let measuring = tokio::task::spawn_blocking(move || Calibration::measure(&directory));
    measuring.await.context("the calibration was lost")
}

impl Report {
    /// Prints the report as a table.
    pub fn print(&self) {
        println!("{}: {}", self.task, self.method);
        stats::print(&self.series);
        for missing in &self.not_available {
            println!("  {missing}");
        }
        println!("  does not show: {}", self.limits);
        println!("  host in this run, us: {}", self.calibration.line());
    }
}
