//! The `jiffy` command: parse, call, print.

// Everything that is printed passes `jiffy_client::terminal`.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

#[macro_use]
extern crate jiffy_client;

mod bench;
mod cli;
mod columns;
mod completion;
mod daemon_command;
mod doctor;
mod error_text;
mod function;
mod key;
mod manual;
mod rootless;
mod run;
mod sandbox;
mod serve_command;
mod store;
mod template;
mod units;

use anyhow::Context;
use cli::{Cli, Command};
use run::ephemeral;
use std::path::Path;
use std::process::ExitCode;

/// Exit code when Jiffy itself failed, as `docker run` has it.
const FAILURE_EXIT_CODE: u8 = 125;

fn main() -> ExitCode {
    jiffy_proto::panic::abort_at_panics();
    // Started by ourselves to ask registries: before anything else exists in this process.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|a| a == jiffy_registry_pull::process::PULLER_ARGUMENT)
    {
        return jiffy_registry_pull::process::main();
    }
    // Started by ourselves to unpack a stranger's archive: before anything else exists in this
    // process.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|a| a == jiffy_image::UNPACK_ARGUMENT)
    {
        return jiffy_image::unpacker();
    }
    // Started by ourselves to remove the network of a run that has ended.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|a| a == ephemeral::REMOVER_ARGUMENT)
    {
        return ephemeral::remover();
    }
    // Started by ourselves to keep namespaces of an ordinary user: made before there are threads.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|a| a == jiffy_rootless::holder::HOLDER_ARGUMENT)
    {
        return jiffy_rootless::holder::main();
    }
    // Started by ourselves to fetch memory that guests wait for.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|a| a == jiffy_store::host::FETCHER_ARGUMENT)
    {
        return jiffy_store::host::fetcher_main();
    }
    // Started by the fetcher to run the command that unwraps master keys.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|a| a == jiffy_store::host::KEY_BROKER_ARGUMENT)
    {
        return jiffy_store::host::key_broker_main();
    }
    // This very program, also when its file has been replaced.
    jiffy_image::set_unpacker_program("/proc/self/exe");
    completion::answer_shell();
    let cli = Cli::read();
    rootless::enter_for(&cli.command);
    let (result, failed) = match &cli.command {
        Command::Run(args) => (run::run(args), FAILURE_EXIT_CODE),
        Command::Doctor(args) => (doctor::run(args), 1),
        Command::Template(command) => (template::run(command), 1),
        Command::Store(command) => (store::run(command), 1),
        Command::Function(command) => (function::run(command), 1),
        Command::Key(command) => (key::run(command), 1),
        Command::Bench(args) => (bench::run(args), 1),
        Command::Daemon(command) => (daemon_command::run(command), 1),
        Command::Serve(args) => (serve_command::run(args), 1),
        Command::Completions { shell } => (completion::print_script(*shell), 1),
        Command::AgentImage { directory } => (agent_image(directory), 1),
        Command::Man { directory } => (manual::write(directory), 1),
        Command::Shell(args) => (sandbox::shell::run(args), FAILURE_EXIT_CODE),
        Command::Exec(args) => (sandbox::exec::run(args), FAILURE_EXIT_CODE),
        command => (sandbox::run(command), 1),
    };
    result.unwrap_or_else(|e| {
        errln!("jiffy: {}", error_text::told(&e));
        ExitCode::from(failed)
    })
}

/// `jiffy agent-image`: writes the image of the guest agent that packages contain.
fn agent_image(directory: &Path) -> anyhow::Result<ExitCode> {
    let path = jiffy_engines::Programs::find()?.agent;
    let agent = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    jiffy_image::AgentRoot::new(&agent)?.write(directory)?;
    Ok(ExitCode::SUCCESS)
}

/// The event loop of one command.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?)
}
