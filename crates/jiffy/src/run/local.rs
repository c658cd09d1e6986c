//! A run in a guest of this process.

use super::command_target::LocalGuest;
use super::ephemeral::EphemeralGuests;
use super::outcome::{self, Outcome};
use super::{PreparedCommand, Signals, prepare, size};
use anyhow::Context;
use jiffy_engine_api::{EngineError, Guest, SandboxSize, Startup};
use jiffy_engines::Host;
use jiffy_sandbox_manager::start_up;
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Runs the command and says what came of it; nothing of the guest is left then.
pub fn run(work: PreparedCommand<'_>, runtime: &Runtime) -> anyhow::Result<Outcome> {
    let args = work.args;
    let host = Host::open()?;
    let size = size(&args.size, &args.template)?;
    let site = args.site.read_with_host()?;
    // Outside of the event loop: a template that is built for minutes ends with Ctrl-C.
    let (engine, prepared) = prepare(&host, args.engine, &args.template)?;
    let startup = prepared.template().manifest.startup.clone();
    runtime.block_on(async {
        let signals = Signals::new()?;
        let opened = EphemeralGuests::open(&host, engine, &args.template, prepared, args.network);
        let mut guests = opened.await?;
        guests.site = site;
        let run = LocalRun {
            work,
            startup,
            size,
        };
        let outcome = run.within(&guests, signals).await;
        guests.close().await;
        outcome
    })
}

/// A command and the guest that it is to have.
struct LocalRun<'a> {
    work: PreparedCommand<'a>,
    startup: Startup,
    size: SandboxSize,
}

impl LocalRun<'_> {
    /// Boots a guest, runs the command in it, and ends it.
    async fn within(
        self,
        guests: &EphemeralGuests,
        mut signals: Signals,
    ) -> anyhow::Result<Outcome> {
        let guest = tokio::select! {
            booted = guests.boot(self.size) => booted.map_err(boot_error)?,
            // Nothing runs yet that could handle it: dropping the boot ends the guest.
            number = signals.next() => return Ok(Outcome::interrupted(number)),
        };
        let outcome = self.session(&guest, signals).await;
        guest.stop().await;
        outcome
    }

    async fn session(
        self,
        guest: &Arc<dyn Guest>,
        mut signals: Signals,
    ) -> anyhow::Result<Outcome> {
        if !self.startup.is_empty() {
            let starting = guest.clone();
            let starting = start_up(&self.startup, move |port| {
                let guest = starting.clone();
                async move { guest.connect(port).await }
            });
            let started = tokio::select! {
                started = starting => started.map_err(anyhow::Error::from),
                end = guest.ended() => Err(anyhow::anyhow!(outcome::end(&end, &guest.console_tail()))),
                number = signals.next() => return Ok(Outcome::interrupted(number)),
            };
            started
                .with_context(|| format!("cannot start template `{}`", self.work.args.template))?;
        }
        let place = LocalGuest::new(guest.clone(), self.size.memory_mib);
        let mut outcome = self.work.run_in(&place, &mut signals).await?;
        outcome.boot = Some(guest.report().into());
        Ok(outcome)
    }
}

/// A guest that did not come up, with its last words.
fn boot_error(error: EngineError) -> anyhow::Error {
    match error {
        EngineError::Boot { reason, console } => {
            anyhow::Error::msg(outcome::with_last_lines(&reason, &console))
        }
        other => other.into(),
    }
}
