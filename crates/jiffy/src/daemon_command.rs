//! `jiffy daemon`: starts, stops and inspects the daemon in the background.

use crate::cli::{ConsoleAddress, DaemonCommand, ServeArgs};
use crate::console;
use anyhow::Context;
use clap::Parser;
use hyper::Method;
use jiffy_api_types::{DaemonStatus, Host, StopHost};
use jiffy_daemon::local_daemon::{client_over, connect, process_of, spawn_and_wait};
use jiffy_image::Home;
use std::fmt::Write;
use std::io::{self, IsTerminal};
use std::net::TcpListener;
use std::process::ExitCode;
use tokio::net::UnixStream;

/// Exit code of `status` if no daemon runs, as defined for init scripts (LSB 5.0, 22.2).
const NOT_RUNNING_EXIT_CODE: u8 = 3;
/// Option that the parent process passes to a background daemon.
const LOG_FILE_OPTION: &str = "--log-file";
/// Option that enables the web console.
const CONSOLE_OPTION: &str = "--console";
/// Option that commands pass to a daemon that they start automatically.
const NO_LISTEN_OPTION: &str = "--no-listen";

/// Runs a subcommand of `jiffy daemon`.
pub fn run(command: &DaemonCommand) -> anyhow::Result<ExitCode> {
    crate::runtime()?.block_on(async {
        match command {
            DaemonCommand::Start { options } => start(options).await,
            DaemonCommand::Status { json } => status(*json).await,
            DaemonCommand::Stop { kill_sandboxes } => {
                let kill_sandboxes = *kill_sandboxes;
                jiffy_daemon::stop(StopHost { kill_sandboxes }).await?;
                Ok(ExitCode::SUCCESS)
            }
            DaemonCommand::Restart { options } => restart(options).await,
        }
    })
}

/// Starts the daemon. Replaces a running daemon that has no address, unless `options` contain
/// `--no-listen`.
pub(crate) async fn start(options: &[String]) -> anyhow::Result<ExitCode> {
    let new_options = parse_options(options);
    let home = Home::locate()?;
    if let Some(stream) = connect(&home).await {
        let process = process_of(&stream);
        let status = query_status(&home, stream).await?;
        if status.listen.is_some() || new_options.no_listen {
            outln!(
                "already running: process {}, version {}",
                status.pid,
                status.version
            );
            if !options.is_empty() {
                outln!("options were not changed: use `jiffy daemon restart` to change them");
            }
            return Ok(ExitCode::SUCCESS);
        }
        // A daemon that a command started automatically has no address. This command requests an
        // address.
        let arguments = process.map(|(_, arguments)| arguments).unwrap_or_default();
        // `spawn_and_wait` passes this option to the daemons that it starts. Other daemons run in a
        // terminal or as a service, and must not be replaced by a daemon in the background.
        anyhow::ensure!(
            arguments.iter().any(|word| word == LOG_FILE_OPTION),
            "process {} runs with --no-listen in the foreground or as a service: \
             restart it without --no-listen",
            status.pid
        );
        // Check the new address before the running daemon is stopped, so that a failure leaves that
        // daemon running.
        TcpListener::bind(new_options.listen).with_context(|| {
            let address = new_options.listen;
            format!("cannot listen on {address}: choose another address with --listen")
        })?;
        outln!(
            "replacing process {}, which has no address; its sandboxes continue to run",
            status.pid
        );
        jiffy_daemon::stop(StopHost::default()).await?;
        let options = if options.is_empty() {
            without_no_listen(user_options(arguments))
        } else {
            options.to_vec()
        };
        return start_new(&home, &options).await;
    }
    start_new(&home, options).await
}

/// Starts a daemon in the background, and prints its process id and addresses.
async fn start_new(home: &Home, options: &[String]) -> anyhow::Result<ExitCode> {
    let options = with_console(options);
    let status = query_status(home, spawn_and_wait(home, &options).await?).await?;
    outln!("process {}", status.pid);
    if let Some(url) = &status.listen {
        outln!("listening on {url}");
        outln!("API key in {}", home.path().join("api-key").display());
    }
    // The address is a hint for people. Scripts read the lines above.
    if io::stderr().is_terminal() && parse_options(&options).console != ConsoleAddress::Off {
        let client = client_over(home, connect(home).await.context("the daemon has exited")?);
        match console::address(&client.await?).await? {
            Some(url) => errln!("console on {url}, see `jiffy console`"),
            None => errln!("no console: its address is in use; choose another with --console"),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the options with the console at its default address, unless the options select the
/// console or the daemon serves its socket only.
fn with_console(options: &[String]) -> Vec<String> {
    let mut options = options.to_vec();
    let selects = |option: &String| {
        [CONSOLE_OPTION, NO_LISTEN_OPTION].contains(&option.as_str())
            || option.starts_with("--console=")
    };
    if !options.iter().any(selects) {
        options.extend([CONSOLE_OPTION, "auto"].map(str::to_owned));
    }
    options
}

/// Parses options of `jiffy serve`. Exits with an error message if an option is invalid, so that
/// the error is not only in the log of the daemon.
fn parse_options(options: &[String]) -> ServeArgs {
    #[derive(Parser)]
    #[command(name = "jiffy serve")]
    struct Options {
        #[command(flatten)]
        serve: ServeArgs,
    }
    let line = ["jiffy serve"].into_iter();
    Options::parse_from(line.chain(options.iter().map(String::as_str))).serve
}

/// Returns the options without `--no-listen`.
fn without_no_listen(mut options: Vec<String>) -> Vec<String> {
    // The option has no value.
    options.retain(|option| option != NO_LISTEN_OPTION);
    options
}

/// Stops the daemon, and starts another one with `options`, or with the options of the stopped
/// daemon if `options` is empty.
async fn restart(options: &[String]) -> anyhow::Result<ExitCode> {
    // Invalid options are reported before the daemon is stopped.
    parse_options(options);
    let home = Home::locate()?;
    let mut options = options.to_vec();
    if let Some(stream) = connect(&home).await {
        // `process_of` reads the arguments from /proc, so that this also works with daemons of
        // other versions.
        if let (true, Some((_, arguments))) = (options.is_empty(), process_of(&stream)) {
            options = user_options(arguments);
            // A daemon of another version may have options that this version rejects.
            parse_options(&options);
        }
        jiffy_daemon::stop(StopHost::default()).await?;
    }
    start(&options).await
}

/// Returns the arguments without options that the parent process of the daemon added.
fn user_options(arguments: Vec<String>) -> Vec<String> {
    let mut options = Vec::new();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        // The value of the option follows.
        if argument == LOG_FILE_OPTION {
            arguments.next();
        } else {
            options.push(argument);
        }
    }
    options
}

async fn query_status(home: &Home, stream: UnixStream) -> anyhow::Result<DaemonStatus> {
    let client = client_over(home, stream).await?;
    let answer: Host = client.call(Method::GET, "/host", &()).await?;
    answer
        .jiffy
        .context("the daemon does not report its status")
}

/// Prints the status of the daemon. Does not start a daemon.
async fn status(json: bool) -> anyhow::Result<ExitCode> {
    let home = Home::locate()?;
    let Some(stream) = connect(&home).await else {
        outln!(
            "{}",
            if json {
                r#"{"running":false}"#
            } else {
                "not running"
            }
        );
        return Ok(ExitCode::from(NOT_RUNNING_EXIT_CODE));
    };
    let status = query_status(&home, stream).await?;
    if json {
        let mut value = serde_json::to_value(&status)?;
        // Distinguishes this object from the output without a daemon.
        value["running"] = true.into();
        outln!("{}", jiffy_client::terminal::json(&value)?);
    } else {
        out!("{}", table(&status));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the lines of `jiffy daemon status`.
fn table(status: &DaemonStatus) -> String {
    let list = |pairs: Vec<String>| match pairs.join(", ") {
        none if none.is_empty() => "none".to_owned(),
        some => some,
    };
    let mib = |mib: Option<u64>| mib.map_or("unknown".to_owned(), |m| format!("{m} MiB"));
    let states = status
        .sandboxes
        .iter()
        .map(|(name, n)| format!("{n} {name}"));
    let rejected = status
        .refused
        .iter()
        .map(|(reason, n)| format!("{n} for {reason}"));
    let uptime = status.uptime_s;
    let lines = [
        ("process", status.pid.to_string()),
        ("version", status.version.clone()),
        (
            "uptime",
            format!(
                "{}:{:02}:{:02}",
                uptime / 3600,
                uptime / 60 % 60,
                uptime % 60
            ),
        ),
        (
            "address",
            status
                .listen
                .clone()
                .unwrap_or("socket in the data directory only".to_owned()),
        ),
        ("sandboxes", list(states.collect())),
        ("warm pool", status.warm.to_string()),
        (
            "isolation",
            status
                .rootless
                .clone()
                .unwrap_or("root, see SECURITY.md".to_owned()),
        ),
        ("network", status.network.clone()),
        ("snapshots", status.snapshots.to_string()),
        (
            "memory",
            format!(
                "{} MiB committed of {}; {} available on the host",
                status.memory_committed_mib,
                mib(status.memory_limit_mib),
                mib(status.memory_available_mib)
            ),
        ),
        ("rejected", list(rejected.collect())),
    ];
    let mut text = String::new();
    for (name, value) in lines {
        let _ = writeln!(text, "{name:<10} {value}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_retains_the_options() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let before = words("--log-file /x/jiffy.log --warm-pool 3 --log-format json");
        assert_eq!(
            user_options(before),
            words("--warm-pool 3 --log-format json")
        );
        let before = words("--log-file /x/jiffy.log --no-listen --warm-pool 3");
        assert_eq!(
            without_no_listen(user_options(before)),
            words("--warm-pool 3")
        );
    }
}
