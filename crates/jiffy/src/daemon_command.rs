//! `jiffy daemon`: the daemon in the background, from outside.

use crate::cli::{Cli, DaemonCommand};
use crate::client::Client;
use crate::daemon::{process, reach, spawn_and_wait};
use crate::serve::status::Status;
use clap::Parser;
use hyper::Method;
use jiffy_api::Ending;
use jiffy_image::Home;
use serde::Deserialize;
use std::fmt::Write;
use std::process::ExitCode;
use tokio::net::UnixStream;

/// Exit code of `status` when none runs, as init scripts have it (LSB 5.0, 22.2).
const NOT_RUNNING: u8 = 3;
/// Option that the daemon is given by whoever starts it in the background.
const LOG_FILE: &str = "--log-file";

/// Runs one command.
pub fn run(command: &DaemonCommand) -> anyhow::Result<ExitCode> {
    crate::runtime()?.block_on(async {
        match command {
            DaemonCommand::Start { options } => start(options).await,
            DaemonCommand::Status { json } => status(*json).await,
            DaemonCommand::Stop { kill_sandboxes } => {
                let kill_sandboxes = *kill_sandboxes;
                crate::serve::stop(Ending { kill_sandboxes }).await?;
                Ok(ExitCode::SUCCESS)
            }
            DaemonCommand::Restart { options } => restart(options).await,
        }
    })
}

async fn start(options: &[String]) -> anyhow::Result<ExitCode> {
    check(options);
    let home = Home::locate()?;
    if let Some(stream) = reach(&home).await {
        let status = ask(&home, stream).await?;
        println!(
            "runs already: process {}, version {}",
            status.pid, status.version
        );
        return Ok(ExitCode::SUCCESS);
    }
    let status = ask(&home, spawn_and_wait(&home, options).await?).await?;
    println!("process {}", status.pid);
    if let Some(url) = &status.listen {
        println!("listening on {url}");
        println!("API key in {}", home.path().join("api-key").display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Options that `jiffy serve` does not take end this program here, with its words, rather than in the log.
fn check(options: &[String]) {
    let line = ["jiffy", "serve"]
        .into_iter()
        .chain(options.iter().map(String::as_str));
    drop(Cli::parse_from(line));
}

async fn restart(options: &[String]) -> anyhow::Result<ExitCode> {
    check(options);
    let home = Home::locate()?;
    let mut options = options.to_vec();
    if let Some(stream) = reach(&home).await {
        // As the kernel has them: one of another version may not be understood.
        if let (true, Some((_, arguments))) = (options.is_empty(), process(&stream)) {
            options = as_typed(arguments);
        }
        crate::serve::stop(Ending::default()).await?;
    }
    start(&options).await
}

/// Arguments without those that only concern how the last daemon was started.
fn as_typed(arguments: Vec<String>) -> Vec<String> {
    let mut typed = Vec::new();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        if argument == LOG_FILE {
            arguments.next();
        } else {
            typed.push(argument);
        }
    }
    typed
}

/// Answer to its owner's question for the daemon.
#[derive(Deserialize)]
struct Told {
    jiffy: Status,
}

async fn ask(home: &Home, stream: UnixStream) -> anyhow::Result<Status> {
    let client = Client::over(home, stream).await?;
    let told: Told = client.call(Method::GET, "/host", &()).await?;
    Ok(told.jiffy)
}

async fn status(json: bool) -> anyhow::Result<ExitCode> {
    let home = Home::locate()?;
    let Some(stream) = reach(&home).await else {
        println!(
            "{}",
            if json {
                r#"{"running":false}"#
            } else {
                "not running"
            }
        );
        return Ok(ExitCode::from(NOT_RUNNING));
    };
    let status = ask(&home, stream).await?;
    if json {
        let mut value = serde_json::to_value(&status)?;
        value["running"] = true.into();
        println!("{value:#}");
    } else {
        print!("{}", table(&status));
    }
    Ok(ExitCode::SUCCESS)
}

fn table(status: &Status) -> String {
    let list = |pairs: Vec<String>| match pairs.join(", ") {
        none if none.is_empty() => "none".to_owned(),
        some => some,
    };
    let mib = |mib: Option<u64>| mib.map_or("unknown".to_owned(), |m| format!("{m} MiB"));
    let states = status
        .sandboxes
        .iter()
        .map(|(name, n)| format!("{n} {name}"));
    let refused = status
        .refused
        .iter()
        .map(|(why, n)| format!("{n} for {why}"));
    let uptime = status.uptime_s;
    let lines = [
        ("process", status.pid.to_string()),
        ("version", status.version.clone()),
        (
            "up",
            format!(
                "{}:{:02}:{:02}",
                uptime / 3600,
                uptime / 60 % 60,
                uptime % 60
            ),
        ),
        (
            "listens",
            status
                .listen
                .clone()
                .unwrap_or("at its socket only".to_owned()),
        ),
        ("sandboxes", list(states.collect())),
        ("warm pool", status.warm.to_string()),
        ("network", status.network.clone()),
        ("snapshots", status.snapshots.to_string()),
        (
            "memory",
            format!(
                "{} MiB promised of {}; the host has {} left",
                status.memory_committed_mib,
                mib(status.memory_limit_mib),
                mib(status.memory_available_mib)
            ),
        ),
        ("refused", list(refused.collect())),
    ];
    let mut text = String::new();
    for (name, value) in lines {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name:<10} {value}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_keeps_what_was_typed() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let before = words("--log-file /x/jiffy.log --warm-pool 3 --log-format json");
        assert_eq!(as_typed(before), words("--warm-pool 3 --log-format json"));
    }
}
