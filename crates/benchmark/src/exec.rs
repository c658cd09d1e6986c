//! Benchmark `exec`: runs `true` in a guest of this process.

use crate::counters::{Counters, Meter};
use crate::daemon::{ms, prepare_base, timed};
use crate::{Measured, Series, goals};
use anyhow::ensure;
use jiffy_agent_client::{AgentClient, ProcessSpec};
use jiffy_engines::{Host, PreparedTemplate, SandboxSpec};
use std::time::Instant;

/// Opens template `base` for guests of this process. Builds the template if it is missing.
pub async fn prepare_guests() -> anyhow::Result<PreparedTemplate> {
    prepare_base().await?;
    Ok(Host::open()?.prepare("base", &mut |_| {})?)
}

/// Runs `true` in a guest until it has exited.
pub async fn run_true(client: &AgentClient) -> anyhow::Result<()> {
    let spec = ProcessSpec::new("true", [""; 0]);
    let (status, ..) = client.start(&spec).await?.output(0).await?;
    ensure!(
        status.exit_code == 0,
        "`true` exited with {}",
        status.exit_code
    );
    Ok(())
}

/// Measures `true` in a running guest.
pub async fn exec(n: usize, warm_up: usize) -> anyhow::Result<Measured> {
    let prepared = prepare_guests().await?;
    let vm = prepared.boot(&SandboxSpec::default()).await?;
    let client = jiffy_engines::agent(&vm);
    let meter = Meter::new();
    let mut samples = Vec::new();
    for round in 0..warm_up + n {
        // Reading counters is a request to the VMM, not to the guest.
        let before = Counters::of_vm(&vm).await?;
        let ((), took) = timed(run_true(&client)).await?;
        if round >= warm_up {
            samples.push(took);
            meter.add("exec", Counters::of_vm(&vm).await?.since(before));
        }
    }
    // The request without a process shows the share of connection and HTTP.
    let mut health = Vec::new();
    for _ in 0..n {
        let began = Instant::now();
        client.health().await?;
        health.push(ms(began.elapsed()));
    }
    vm.stop().await;
    let series = vec![
        Series::new("exec of `true`", "ms", Some(goals::EXEC), samples),
        Series::new("request without a process", "ms", None, health),
    ];
    Ok(Measured {
        method: "one running guest, sequential requests over one persistent connection: from \
            sending process.Start to reading the exit code; GET /health for comparison",
        limits: "a process with output or input; concurrent requests; a guest under load",
        ..Measured::new("exec", series, &meter)
    })
}
