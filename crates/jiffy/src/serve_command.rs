//! `jiffy serve`: runs the daemon in the foreground, or stops the running daemon.
//!
//! A *front* is a process without sandboxes that passes connections of clients to the hosts of a
//! fleet.

use crate::cli::ServeArgs;
use crate::run::ephemeral;
use crate::runtime;
use anyhow::bail;
use jiffy_api_types::StopHost;
use jiffy_fleet::settings::{Role, Settings};
use jiffy_image::Home;
use std::process::ExitCode;

/// Runs the daemon in the foreground until it is stopped, or stops the running daemon.
pub fn run(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    if args.stop {
        let kill_sandboxes = args.kill_sandboxes;
        runtime()?.block_on(jiffy_daemon::stop(StopHost { kill_sandboxes }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let home = Home::locate()?;
    let fleet = Settings::load(home.path())?;
    if let Some(front) = fleet.as_ref().filter(|fleet| fleet.role == Role::Front) {
        bail!(
            "this data directory is front {} of fleet {}: run `jiffy front`",
            front.member,
            front.fleet
        );
    }
    let options = args.options(fleet.as_ref())?;
    // Remove the directories of `jiffy run` processes that were killed. No call is needed for the
    // networks of these processes: the daemon removes them when it opens its own network.
    ephemeral::remove_dead_directories(&home);
    jiffy_daemon::run(options)?;
    Ok(ExitCode::SUCCESS)
}
