//! Benchmarks of a host: the tasks of `jiffy bench`. The developer instruments
//! (`bench/instruments`) use the same samples, statistics, calibration and client of the measured
//! daemon.

pub mod calibration;
pub mod counters;
mod create;
pub mod daemon;
mod exec;
mod functions;
pub mod goals;
mod host_description;
mod jiffy_run;
mod leftovers;
mod report;
mod stats;
mod stress;

pub use exec::{prepare_guests, run_true};
pub use report::{Measured, Report, calibrate};
pub use stats::Series;

use jiffy_client::ServerOptions;

/// Tasks of `jiffy bench`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Task {
    /// Create from a template.
    Create {
        /// Template of the sandboxes.
        template: String,
    },
    /// `true` in a running guest.
    Exec,
    /// `jiffy run -- echo hello` end to end.
    Run,
    /// Complete lifetimes of sandboxes, and the resources that remain on the host.
    Stress,
    /// Memory of idle sandboxes.
    Density,
    /// Requests to a deployed function.
    Functions {
        /// Name of the function.
        name: String,
        /// Path and query of the requests.
        path: String,
    },
}

/// Options of a task.
#[derive(Debug, Clone)]
pub struct BenchmarkOptions {
    /// Number of samples.
    pub samples: usize,
    /// Number of rounds that run first and are discarded.
    pub warm_up: usize,
    /// Number of concurrent operations.
    pub concurrency: usize,
    /// Control plane that is measured.
    pub server: ServerOptions,
}

impl BenchmarkOptions {
    /// Fails if the number of samples or of concurrent operations is zero.
    pub fn validate(&self) -> anyhow::Result<()> {
        anyhow::ensure!(self.samples > 0, "-n 0: at least one sample is required");
        anyhow::ensure!(
            self.concurrency > 0,
            "-c 0: at least one concurrent operation is required"
        );
        Ok(())
    }
}

/// Measures one task.
///
/// # Errors
/// Fails if an option is out of range, if an operation fails, or if `make run` built the program.
pub async fn measure(task: Task, options: &BenchmarkOptions) -> anyhow::Result<Report> {
    options.validate()?;
    // `build.rs` sets the variable.
    anyhow::ensure!(
        env!("JIFFY_PROFILE") != "quick",
        "this jiffy was built by `make run` with few optimisations, so its times are not valid: run `make build` and use target/release/jiffy"
    );
    let (n, w, c) = (options.samples, options.warm_up, options.concurrency);
    let server = &options.server;
    // Not started yet: the report calibrates the host first.
    let measuring = async {
        match task {
            Task::Create { template } => create::create(&template, n, w, c, server).await,
            Task::Exec => exec::exec(n, w).await,
            Task::Run => jiffy_run::run(n, w, server).await,
            Task::Stress => stress::stress(n, w, c, server).await,
            Task::Density => create::density(n, server).await,
            Task::Functions { name, path } => {
                functions::functions(&name, &path, n, w, c, server).await
            }
        }
    };
    Report::of(w, measuring).await
}
