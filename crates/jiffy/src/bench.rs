//! `jiffy bench`.

use crate::cli::BenchArgs;
use crate::runtime;
use anyhow::Context;
use jiffy_benchmark::{BenchmarkOptions, measure};
use std::process::ExitCode;

/// Measures one task and prints its table or JSON.
pub fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    let options = BenchmarkOptions {
        samples: args.number,
        warm_up: args.warm_up,
        concurrency: args.concurrency,
        numbers: args.numbers.clone(),
        template: args.template.clone(),
        server: args.host.server(),
    };
    let report = runtime()?.block_on(measure(args.task.into(), &options))?;
    let json = jiffy_client::terminal::json(&report)?;
    if let Some(path) = &args.out {
        std::fs::write(path, &json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    match args.json {
        true => outln!("{json}"),
        false => report.print(),
    }
    Ok(ExitCode::SUCCESS)
}
