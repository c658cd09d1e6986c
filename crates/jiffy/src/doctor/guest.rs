//! Last check of `jiffy doctor`: boots a guest on each usable engine.

use super::Finding;
use crate::cli::FeatureSwitch;
use crate::run::agent;
use crate::run::ephemeral::EphemeralGuests;
use crate::runtime;
use crate::units::millis;
use jiffy_agent_client::ProcessSpec;
use jiffy_engine_api::{EngineName, Guest, SandboxSize};
use jiffy_engines::{EngineFacts, Host};
use std::sync::Arc;
use std::time::Instant;

/// Name of this check in the report.
const CHECK_NAME: &str = "guest";
const NO_ARGUMENTS: [&str; 0] = [];

/// Boots a guest on each usable engine and runs `true` in the guest.
pub fn boot(report: &mut dyn FnMut(Finding)) {
    let host = match Host::open() {
        Ok(host) => host,
        Err(e) => {
            return report(Finding::fail(
                CHECK_NAME,
                e.to_string(),
                "fix `programs` above",
            ));
        }
    };
    let facts = EngineFacts::of(&host);
    let default = facts.choose().engine;
    for engine in [EngineName::MicroVm, EngineName::Gvisor] {
        if facts.check(engine).is_err() {
            continue;
        }
        let result = runtime().and_then(|rt| rt.block_on(boot_on(engine, &host)));
        report(match result {
            Ok(description) => Finding::ok(CHECK_NAME, format!("{engine}: {description}")),
            // Only the default engine is necessary for sandboxes.
            Err(e) if engine == default => Finding::fail(
                CHECK_NAME,
                format!("{engine}: {e:#}"),
                "see the findings above; `jiffy run -- true` shows the guest's last console output",
            ),
            Err(e) => Finding::note(
                CHECK_NAME,
                format!("{engine}: {e:#}"),
                format!("optional: new sandboxes use {default}"),
            ),
        });
    }
}

/// Boots a guest on an engine and runs `true` in the guest. Returns the description of the times.
async fn boot_on(engine: EngineName, host: &Host) -> anyhow::Result<String> {
    let mut bar = jiffy_daemon::TemplateProgress::new("base");
    let prepared = host.prepare("base", &mut |p| bar.update(p))?;
    drop(bar);
    let guests = EphemeralGuests::open(host, engine, "base", prepared, FeatureSwitch::Off).await?;
    let result = match guests.boot(SandboxSize::default()).await {
        Ok(guest) => run_true(guest).await,
        Err(e) => Err(e.into()),
    };
    // Close also after a failure: the guest and its directory must not remain.
    guests.close().await;
    result
}

/// Runs `true` in a guest, stops the guest, and returns the durations.
async fn run_true(guest: Arc<dyn Guest>) -> anyhow::Result<String> {
    let start = Instant::now();
    let process = agent(&guest)
        .start(&ProcessSpec::new("true", NO_ARGUMENTS))
        .await?;
    // `true` prints nothing: a single byte of output is an error.
    let (status, ..) = process.output(0).await?;
    let exec_us = u64::try_from(start.elapsed().as_micros())?;
    let report = guest.report();
    guest.stop().await;
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
