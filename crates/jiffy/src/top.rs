//! `jiffy top`: live table of sandboxes on the terminal.
//!
//! - Without input and output: `model.rs` (rows, filter, order, selection), `control.rs` and
//!   `text_control.rs` (keys), `text_view.rs` and `text_search.rs` (texts), `view.rs` and
//!   `columns.rs` (drawing), `schedule.rs` (times of reads), `keys.rs` (decoder).
//! - With input and output: `app.rs` (event loop), `requests.rs` (API), `screen.rs` and `input.rs`
//!   (terminal), `shell.rs`.

mod app;
mod columns;
mod command_text;
mod control;
mod header;
mod input;
mod keys;
mod model;
mod requests;
mod row;
mod schedule;
mod screen;
mod shell;
#[cfg(test)]
mod tests;
mod text_control;
mod text_search;
mod text_view;
mod view;

use crate::cli::{Cli, TopArgs};
use crate::run::{Signals, terminal_size};
use crate::sandbox::table::now_ms;
use anyhow::ensure;
use app::App;
use clap::CommandFactory;
use jiffy_client::Client;
use model::Model;
use std::io::{IsTerminal, stdin, stdout};
use std::process::ExitCode;
use std::time::Duration;

/// Minimum refresh interval.
const MIN_INTERVAL: Duration = Duration::from_millis(500);
/// Width of the table on an output that is not a terminal.
const DEFAULT_WIDTH: u16 = 160;

/// Shows the table until the user quits, or prints it once.
pub fn run(args: &TopArgs) -> anyhow::Result<ExitCode> {
    ensure!(
        args.interval >= MIN_INTERVAL,
        "--interval must be at least {} ms",
        MIN_INTERVAL.as_millis()
    );
    ensure!(
        args.once || (stdin().is_terminal() && stdout().is_terminal()),
        "standard input and output are not a terminal: print the table with --once"
    );
    let runtime = crate::runtime()?;
    let result = runtime.block_on(async {
        let client = jiffy_daemon::open_client(&args.host.server()).await?;
        let client = client.on_host(args.only_host.as_ref());
        let mut model = Model::new(&args.filter, args.sort, args.reverse);
        model.header.server = server(&client);
        if args.once {
            print_once(&client, model).await?;
            return Ok(ExitCode::SUCCESS);
        }
        // Signals are handled before the mode of the terminal is changed.
        let signals = Signals::new()?;
        let app = App::start(client.without_progress(), model, &args.host, args.interval)?;
        app.run(signals).await
    });
    // Requests that are in flight must not delay the exit.
    runtime.shutdown_background();
    result
}

/// Returns the name of this host, or the URL of the daemon on another host.
fn server(client: &Client) -> String {
    if client.is_remote() {
        return client.server_name().to_owned();
    }
    let system = rustix::system::uname();
    system.nodename().to_string_lossy().into_owned()
}

async fn print_once(client: &Client, mut model: Model) -> anyhow::Result<()> {
    let source = requests::resource_source(client).await?;
    model.header.resources = requests::resources(client, source).await?;
    model.replace(requests::list(client).await?);
    model.set_usage(&requests::usage(client, &model.running(), &[]).await?);
    let width = if stdout().is_terminal() {
        terminal_size().cols
    } else {
        DEFAULT_WIDTH
    };
    out!("{}", view::text(&mut model, width, now_ms()));
    Ok(())
}

/// Returns the description of the keys, which is part of the help text of the command.
fn help() -> Vec<String> {
    let command = Cli::command();
    let top = command.find_subcommand("top");
    let help = top.and_then(|top| top.get_after_help());
    let help = help.map(ToString::to_string).unwrap_or_default();
    let keys = help.split("\n\nExamples:").next().unwrap_or_default();
    keys.lines().map(str::to_owned).collect()
}
