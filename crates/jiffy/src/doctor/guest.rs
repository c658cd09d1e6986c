//! The last check: a guest that really boots.

use super::Finding;
use crate::runtime;
use crate::units::millis;
use jiffy_agent_client::ProcessSpec;
use jiffy_host::{Host, SandboxSpec};
use std::time::Instant;

const WHAT: &str = "guest";
const NONE: [&str; 0] = [];

/// Boots a guest and runs `true` in it.
pub fn boot() -> Finding {
    match runtime().and_then(|rt| rt.block_on(run_true())) {
        Ok(found) => Finding::ok(WHAT, found),
        Err(e) => Finding::fail(
            WHAT,
            format!("{e:#}"),
            "the lines above may tell why; `jiffy run -- true` shows the guest's last words",
        ),
    }
}

async fn run_true() -> anyhow::Result<String> {
    let host = Host::open()?;
    let mut bar = crate::progress::Bar::new("base");
    let prepared = host.prepare("base", &mut |p| bar.update(p))?;
    drop(bar);
    let vm = prepared.boot(&SandboxSpec::default()).await?;
    let began = Instant::now();
    let process = jiffy_host::agent(&vm)
        .start(&ProcessSpec::new("true", NONE))
        .await?;
    let (status, ..) = process.output(0).await?;
    let exec_us = u64::try_from(began.elapsed().as_micros())?;
    let report = vm.report();
    vm.stop().await;
    anyhow::ensure!(
        status.exit_code == 0,
        "`true` exited with {}",
        status.exit_code
    );
    Ok(format!(
        "booted in {} ms, `true` took {} ms",
        millis(report.total_us),
        millis(exec_us)
    ))
}
