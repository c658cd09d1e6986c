//! `jiffy fleet`: creates a fleet of hosts, adds hosts, and shows and changes its members.

mod front;
mod init;
mod join;
mod local;
mod members;
mod token;
mod try_fleet;

pub use front::run as front;

use crate::cli::FleetCommand;
use std::process::ExitCode;

/// Runs a subcommand of `jiffy fleet`.
pub fn run(command: &FleetCommand) -> anyhow::Result<ExitCode> {
    match command {
        FleetCommand::Init(args) => init::run(args)?,
        FleetCommand::Join(args) => join::run(args)?,
        FleetCommand::Token(args) => token::run(args)?,
        FleetCommand::Try(args) => try_fleet::run(args)?,
        command => members::run(command)?,
    }
    Ok(ExitCode::SUCCESS)
}
