//! `jiffy bench`: runs a task of the benchmark crate, and prints its report.

use crate::cli::{BenchArgs, BenchTask};
use crate::runtime;
use anyhow::Context;
use jiffy_benchmark::{BenchmarkOptions, Task, measure};
use std::process::ExitCode;

/// Runs a measurement and prints its results as a table or JSON.
pub fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    let options = BenchmarkOptions {
        samples: args.number,
        warm_up: args.warm_up,
        concurrency: args.concurrency,
        server: args.host.server(),
    };
    let report = runtime()?.block_on(measure(task(args)?, &options))?;
    let json = jiffy_client::terminal::json(&report)?;
    if let Some(path) = &args.out {
        std::fs::write(path, &json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if args.json {
        outln!("{json}");
    } else {
        report.print();
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the task in the arguments.
fn task(args: &BenchArgs) -> anyhow::Result<Task> {
    Ok(match args.task {
        BenchTask::Create => Task::Create {
            template: args.template.clone(),
        },
        BenchTask::Exec => Task::Exec,
        BenchTask::Run => Task::Run,
        BenchTask::Stress => Task::Stress,
        BenchTask::Density => Task::Density,
        BenchTask::Functions => {
            let name = args.function.clone().context("--function is required")?;
            // Rejects an invalid name before the measurement starts.
            crate::function::path(&name, "")?;
            Task::Functions {
                name,
                path: args.path.clone(),
            }
        }
    })
}
