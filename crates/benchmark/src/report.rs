//! Report of a task: its samples, and the conditions under which they were measured.

use crate::calibration::Calibration;
use crate::counters::Meter;
use crate::host_description::{self, HostDescription};
use crate::stats::{self, Series};
use anyhow::Context;
use jiffy_image::Home;
use serde::Serialize;
use std::time::{SystemTime, UNIX_EPOCH};

/// Samples of a task with the conditions under which they were taken.
#[derive(Debug, Serialize)]
pub struct Report {
    task: &'static str,
    /// Definition of a sample and its method.
    method: &'static str,
    /// Cases that the task does not measure. The printed report names them as `not covered`.
    limits: &'static str,
    host: HostDescription,
    /// Costs of the host's own operations, measured right before the task.
    calibration: Calibration,
    /// Commit of the working tree that the command ran in.
    commit: String,
    command: Vec<String>,
    /// Time of the measurement in seconds since the epoch.
    taken_at: u64,
    /// Number of rounds that ran first and were discarded.
    warm_up: usize,
    /// Measurements that were not possible on this host, with the reason.
    not_available: Vec<String>,
    series: Vec<Series>,
}

/// Samples of a task.
pub struct Measured {
    /// Name of the task.
    pub name: &'static str,
    /// Definition of a sample and its method.
    pub method: &'static str,
    /// Cases that the task does not measure.
    pub limits: &'static str,
    /// Measurements that were not possible on this host, with the reason.
    pub not_available: Vec<String>,
    /// Samples of each quantity.
    pub series: Vec<Series>,
}

impl Measured {
    /// Creates the result of task `name` with the counters of `meter`. The caller sets method and
    /// limits.
    pub fn new(name: &'static str, mut series: Vec<Series>, meter: &Meter) -> Self {
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

impl Report {
    /// Calibrates the host, runs the task, and describes its result.
    pub async fn of(
        warm_up: usize,
        measuring: impl Future<Output = anyhow::Result<Measured>>,
    ) -> anyhow::Result<Self> {
        // Calibrate before the task, whose guests would disturb the calibration.
        let calibration = calibrate().await?;
        let measured = measuring.await?;
        let missing = calibration.not_available.clone();
        Ok(Self {
            task: measured.name,
            method: measured.method,
            limits: measured.limits,
            host: HostDescription::read(),
            calibration,
            commit: host_description::commit(),
            command: std::env::args().skip(1).collect(),
            taken_at: SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
            warm_up,
            not_available: [measured.not_available, missing].concat(),
            series: measured.series,
        })
    }

    /// Prints the report as a table.
    pub fn print(&self) {
        println!("{}: {}", self.task, self.method);
        stats::print(&self.series);
        for missing in &self.not_available {
            println!("  {missing}");
        }
        println!("  not covered: {}", self.limits);
        println!("  host calibration, us: {}", self.calibration.line());
    }
}

/// Measures the costs of the host. Files are created in the data directory, or in the temporary
/// directory if no data directory exists.
pub async fn calibrate() -> anyhow::Result<Calibration> {
    let home = Home::locate().ok().map(|home| home.path().to_owned());
    let directory = home.unwrap_or_else(std::env::temp_dir);
    let measuring = tokio::task::spawn_blocking(move || Calibration::measure(&directory));
    measuring.await.context("the calibration task failed")
}
