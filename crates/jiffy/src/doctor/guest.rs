//! The last check: guests that really boot.

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

const CHECK_NAME: &str = "guest";
const NO_ARGUMENTS: [&str; 0] = [];

/// Boots a guest on each engine that can be used and runs `true` in it.
pub fn boot(tell: &mut dyn FnMut(Finding)) {
    let host = match Host::open() {
        Ok(host) => host,
        Err(e) => {
            return tell(Finding::fail(
                CHECK_NAME,
                e.to_string(),
                "check the programs",
            ));
        }
    };
    let facts = EngineFacts::of(&host);
    let chosen = facts.choose().engine;
    for engine in [EngineName::MicroVm, EngineName::Gvisor] {
        if facts.check(engine).is_err() {
            continue;
        }
        let booted = runtime().and_then(|rt| rt.block_on(boot_on(engine, &host)));
        tell(match booted {
            Ok(found) => Finding::ok(CHECK_NAME, format!("{engine}: {found}")),
            Err(e) if engine == chosen => Finding::fail(
                CHECK_NAME,
                format!("{engine}: {e:#}"),
                "the lines above may tell why; `jiffy run -- true` shows the guest's last words",
            ),
            Err(e) => Finding::note(
                CHECK_NAME,
                format!("{engine}: {e:#}"),
                format!("works; new sandboxes come up on {chosen}"),
            ),
        });
    }
}

async fn boot_on(engine: EngineName, host: &Host) -> anyhow::Result<String> {
    let mut bar = jiffy_daemon::TemplateProgress::new("base");
    let prepared = host.prepare("base", &mut |p| bar.update(p))?;
    drop(bar);
    let guests = EphemeralGuests::open(host, engine, "base", prepared, FeatureSwitch::Off).await?;
    let found = match guests.boot(SandboxSize::default()).await {
        Ok(guest) => run_true(guest).await,
        Err(e) => Err(e.into()),
    };
    guests.close().await;
    found
}

async fn run_true(guest: Arc<dyn Guest>) -> anyhow::Result<String> {
    let began = Instant::now();
    let process = agent(&guest)
        .start(&ProcessSpec::new("true", NO_ARGUMENTS))
        .await?;
    let (status, ..) = process.output(0).await?;
    let exec_us = u64::try_from(began.elapsed().as_micros())?;
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
