//! The `jiffy` program: parses arguments, calls the API of a daemon, and prints results. The daemon
//! (`jiffy serve`) and its helper processes are the same program.

// All output is printed through `jiffy_client::terminal`.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

#[macro_use]
extern crate jiffy_client;

mod agent_shell;
mod audit;
mod bench;
mod cli;
mod columns;
mod completion;
mod console;
mod daemon_command;
mod doctor;
mod error_text;
mod events;
mod fleet;
mod function;
mod integrate;
mod key;
mod log_pages;
mod manual;
mod mcp;
mod rootless;
mod run;
mod sandbox;
mod secret;
mod secret_input;
mod serve_command;
mod skill;
mod store;
mod template;
mod top;
mod units;
mod usage;
mod volume;
mod webhook;

use anyhow::Context;
use cli::{Cli, Command};
use jiffy_registry_pull::process::PULLER_ARGUMENT;
use jiffy_rootless::holder::HOLDER_ARGUMENT;
use jiffy_store::host::{FETCHER_ARGUMENT, KEY_BROKER_ARGUMENT};
use run::ephemeral;
use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

/// Exit code for failures of Jiffy itself, as in `docker run`.
const FAILURE_EXIT_CODE: u8 = 125;

/// Executes the command of the user, or the role of a helper process that the daemon has started
/// with this program.
fn main() -> ExitCode {
    // A panic of one thread must not leave a process with the other threads.
    jiffy_proto::panic::abort_at_panics();
    // Roles are dispatched before the process creates threads or opens files, because most of them
    // confine the process first.
    if let Some(main) = std::env::args_os().nth(1).and_then(|word| role(&word)) {
        return main();
    }
    // The running program, even if its file was replaced.
    jiffy_image::set_unpacker_program("/proc/self/exe");
    completion::answer_shell();
    let cli = Cli::read();
    // Before any thread is created: only a single-threaded process can enter a user namespace.
    rootless::enter_for(&cli.command);
    // Commands that return the exit code of a program in a sandbox report failures of Jiffy with
    // a code that programs rarely use.
    let (result, failure_code) = match &cli.command {
        Command::Run(args) => (run::run(args), FAILURE_EXIT_CODE),
        Command::Doctor(args) => (doctor::run(args), 1),
        Command::Template(command) => (template::run(command), 1),
        Command::Store(command) => (store::run(command), 1),
        Command::Fleet(command) => (fleet::run(command), 1),
        Command::Function(command) => (function::run(command), 1),
        Command::Key(command) => (key::run(command), 1),
        Command::Secret(command) => (secret::run(command), 1),
        Command::Volume(command) => (volume::run(command), 1),
        Command::Webhook(command) => (webhook::run(command), 1),
        Command::Events(args) => (events::run(args), 1),
        Command::Top(args) => (top::run(args), 1),
        Command::Audit(args) => (audit::run(args), 1),
        Command::Usage(args) => (usage::run(args), 1),
        Command::Bench(args) => (bench::run(args), 1),
        Command::Daemon(command) => (daemon_command::run(command), 1),
        Command::Console { no_open } => (console::run(*no_open), 1),
        Command::Mcp(args) => (mcp::run(args), 1),
        Command::Serve(args) => (serve_command::run(args), 1),
        Command::Front(args) => (fleet::front(args), 1),
        Command::Completions { shell } => (completion::print_script(*shell), 1),
        Command::AgentImage { directory } => (agent_image(directory), 1),
        Command::Man { directory } => (manual::write(directory), 1),
        Command::AgentShell(command) => (agent_shell::run(command), FAILURE_EXIT_CODE),
        Command::Integrate(args) => (integrate::run(args), 1),
        Command::Skill(command) => (skill::run(command), 1),
        Command::History(args) => (agent_shell::history(args), 1),
        Command::Undo(args) => (agent_shell::undo(args), 1),
        Command::Shell(args) => (sandbox::shell::run(args), FAILURE_EXIT_CODE),
        Command::Exec(args) => (sandbox::exec::run(args), FAILURE_EXIT_CODE),
        command => (sandbox::run(command), 1),
    };
    // `Ok` has the exit code of this process, for example the exit code of a command in a sandbox.
    // After an error, this process exits with `failure_code`.
    result.unwrap_or_else(|e| {
        errln!("jiffy: {}", error_text::describe(&e));
        ExitCode::from(failure_code)
    })
}

/// Main function of a helper process, which is this program with a special first argument.
type Role = fn() -> ExitCode;

/// Returns the main function of the role that `argument` selects.
fn role(argument: &OsStr) -> Option<fn() -> ExitCode> {
    let roles: [(&str, Role); 7] = [
        // Sends requests to registries.
        (PULLER_ARGUMENT, jiffy_registry_pull::process::main),
        // Serves the files of a volume.
        (
            jiffy_volume_server::process::VOLUME_SERVER_ARGUMENT,
            jiffy_volume_server::process::main,
        ),
        // Unpacks untrusted archives.
        (jiffy_image::UNPACK_ARGUMENT, jiffy_image::unpacker),
        // Removes the network of a finished `jiffy run`.
        (ephemeral::REMOVER_ARGUMENT, ephemeral::remover),
        // Keeps the namespaces of an unprivileged user open.
        (HOLDER_ARGUMENT, jiffy_rootless::holder::main),
        // Fetches memory of guests from the store.
        (FETCHER_ARGUMENT, jiffy_store::host::fetcher_main),
        // Runs the command that unwraps master keys, for the fetcher.
        (KEY_BROKER_ARGUMENT, jiffy_store::host::key_broker_main),
    ];
    let mut roles = roles.into_iter();
    roles.find_map(|(word, main)| (argument == word).then_some(main))
}

/// `jiffy agent-image`: writes the image of the guest agent that packages contain.
fn agent_image(directory: &Path) -> anyhow::Result<ExitCode> {
    let path = jiffy_engines::Programs::find()?.agent;
    let agent = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    jiffy_image::AgentRoot::new(&agent)?.write(directory)?;
    Ok(ExitCode::SUCCESS)
}

/// Creates the event loop of a command. One thread suffices: the work is done by the daemon.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?)
}
