//! `jiffy run` without a daemon: the guest is a child of this process.

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

/// Runs the command in a new guest and returns its outcome. The guest is removed before this
/// function returns.
pub fn run(command: PreparedCommand<'_>, runtime: &Runtime) -> anyhow::Result<Outcome> {
    let args = command.args;
    let host = Host::open()?;
    let size = size(&args.size, &args.template)?;
    let site = args.site.read_with_host()?;
    // The template is opened outside the event loop, so that Ctrl-C terminates a long build.
    let (engine, prepared) = prepare(&host, args.engine, &args.template)?;
    let startup = prepared.template().manifest.startup.clone();
    runtime.block_on(async {
        // Captured before the guest boots: a signal must not leave a guest behind.
        let signals = Signals::new()?;
        let mut guests =
            EphemeralGuests::open(&host, engine, &args.template, prepared, args.network).await?;
        guests.site = site;
        let run = LocalRun {
            command,
            startup,
            size,
        };
        let outcome = run.within(&guests, signals).await;
        guests.close().await;
        outcome
    })
}

/// Command with the settings of its guest.
struct LocalRun<'a> {
    command: PreparedCommand<'a>,
    startup: Startup,
    size: SandboxSize,
}

impl LocalRun<'_> {
    /// Boots a guest, runs the command and stops the guest.
    async fn within(
        self,
        guests: &EphemeralGuests,
        mut signals: Signals,
    ) -> anyhow::Result<Outcome> {
        let guest = tokio::select! {
            guest = guests.boot(self.size) => guest.map_err(boot_error)?,
            // No command can handle the signal yet. Dropping the boot terminates the guest.
            number = signals.next() => return Ok(Outcome::interrupted(number)),
        };
        let outcome = self.session(&guest, signals).await;
        // Stop the guest also after a failure of the session.
        guest.stop().await;
        outcome
    }

    /// Runs the start command of the template, and then the command in the guest.
    async fn session(
        self,
        guest: &Arc<dyn Guest>,
        mut signals: Signals,
    ) -> anyhow::Result<Outcome> {
        if !self.startup.is_empty() {
            let connection = guest.clone();
            let start = start_up(&self.startup, None, move |port| {
                let guest = connection.clone();
                async move { guest.connect(port).await }
            });
            let result = tokio::select! {
                result = start => result.map_err(anyhow::Error::from),
                reason = guest.ended() => {
                    let message = outcome::exit_message(&reason, &guest.console_tail());
                    Err(anyhow::Error::msg(message))
                }
                number = signals.next() => return Ok(Outcome::interrupted(number)),
            };
            result.with_context(|| {
                format!("cannot start template `{}`", self.command.args.template)
            })?;
        }
        let target = LocalGuest::new(guest.clone(), self.size.memory_mib);
        let mut outcome = self.command.run_in(&target, &mut signals).await?;
        outcome.boot = Some(guest.report().into());
        Ok(outcome)
    }
}

/// Returns the error of a failed boot with the last console lines.
fn boot_error(error: EngineError) -> anyhow::Error {
    match error {
        EngineError::Boot { reason, console } => {
            anyhow::Error::msg(outcome::with_last_lines(&reason, &console))
        }
        other => other.into(),
    }
}
