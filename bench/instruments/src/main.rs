//! Developer instruments: benchmarks that are not part of `jiffy bench`.
//!
//! The program must be in the directory of the programs that it measures.

mod boot;
mod calibration;
mod cli;
mod data;
mod data_directory;
mod fork_pause;
mod gateway;
mod goals;
mod memory;
mod own_daemon;
mod processor_time;
mod restore;
mod scale;
mod snapshots;
mod steps;

use anyhow::Context;
use clap::Parser;
use cli::{Cli, Instrument};
use jiffy_benchmark::{BenchmarkOptions, Measured, Report};
use std::process::ExitCode;
use std::time::Duration;

/// Time between pause and resume after which the pause is complete: the guest has exited, and its
/// snapshot is merged.
const PAUSE_TIME: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("jiffy-instruments: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Measures one instrument and prints its table or JSON.
fn run(cli: &Cli) -> anyhow::Result<()> {
    // One thread suffices: the instruments wait for daemons and guests.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let options = cli.options();
    options.validate()?;
    let warm_up = options.warm_up;
    let report = runtime.block_on(Report::of(warm_up, measure(cli, &options)))?;
    let json = jiffy_client::terminal::json(&report)?;
    if let Some(path) = &cli.out {
        std::fs::write(path, &json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if cli.json {
        println!("{json}")
    } else {
        report.print()
    }
    Ok(())
}

/// Runs the selected instrument.
async fn measure(cli: &Cli, options: &BenchmarkOptions) -> anyhow::Result<Measured> {
    let (n, w, c) = (options.samples, options.warm_up, options.concurrency);
    let (server, template) = (&options.server, cli.template.as_str());
    match cli.instrument {
        Instrument::Calibration => calibration::calibration(n).await,
        Instrument::Boot => boot::boot(n, w).await,
        Instrument::Memory => boot::memory(n).await,
        Instrument::Snapshot => snapshots::snapshot(n, w, c, server).await,
        Instrument::Dirty => snapshots::dirty(n, server).await,
        Instrument::Restore => restore::restore(n, w, c).await,
        Instrument::Rollback => snapshots::rollback(n, w, c, server).await,
        Instrument::Clone => fork_pause::fork(template, n, w, c, server).await,
        Instrument::Pause => fork_pause::pause("pause", Duration::ZERO, n, w, c, server).await,
        Instrument::Sleep => fork_pause::pause("sleep", PAUSE_TIME, n, w, c, server).await,
        Instrument::Gateway => gateway::gateway(n, w, server).await,
        Instrument::Code => gateway::code(n, w, server).await,
        // The concurrency is the number of rounds, because the operations are sequential.
        Instrument::ProcessorTime => processor_time::processor_time(template, n, c, server).await,
        Instrument::Scale => scale::scale(n, &cli.numbers).await,
        Instrument::Data => data::data(n, w, server).await,
        Instrument::Steps => steps::steps(n, w).await,
    }
}
