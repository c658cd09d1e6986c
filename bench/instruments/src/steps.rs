//! Instrument `steps`: cost of recording the steps of an operation, without an export.

use anyhow::ensure;
use jiffy_benchmark::counters::Meter;
use jiffy_benchmark::{Measured, Series};
use jiffy_engine_api::steps::{self, OperationSteps};
use std::time::Instant;

/// Number of steps per operation.
const STEPS: usize = 12;
/// Number of operations per sample.
const OPERATIONS: u32 = 10_000;

/// Measures an operation of empty steps, with and without a recorder.
pub async fn steps(n: usize, warm_up: usize) -> anyhow::Result<Measured> {
    let [mut recorded, mut unrecorded] = [const { Vec::new() }; 2];
    for round in 0..warm_up + n {
        let began = Instant::now();
        for _ in 0..OPERATIONS {
            let recorder = OperationSteps::new();
            recorder.clone().scope(operation()).await;
            // The list is part of the cost: the daemon logs it after each operation.
            ensure!(recorder.list().len() == STEPS, "a step was not recorded");
        }
        let with_recorder = began.elapsed();
        let began = Instant::now();
        for _ in 0..OPERATIONS {
            operation().await;
        }
        let without_recorder = began.elapsed();
        if round >= warm_up {
            let us = |time: std::time::Duration| time.as_secs_f64() * 1e6 / f64::from(OPERATIONS);
            recorded.push(us(with_recorder));
            unrecorded.push(us(without_recorder));
        }
    }
    let series = vec![
        Series::new("operation of 12 recorded steps", "us", None, recorded),
        Series::new("the same without a recorder", "us", None, unrecorded),
    ];
    Ok(Measured {
        method: "12 empty steps, with and without a recorder, and the list of their durations; one \
            sample is the average of 10,000 operations",
        limits: "spans that a log or an export receives; the histogram of the metrics; a cold cache",
        ..Measured::new("steps", series, &Meter::new())
    })
}

/// Performs the steps.
async fn operation() {
    let mut step = steps::begin("step");
    for _ in 1..STEPS {
        step.next("step");
    }
    drop(step);
    tokio::task::consume_budget().await;
}
