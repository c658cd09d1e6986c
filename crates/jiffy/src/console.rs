//! `jiffy console`: opens the web console of the daemon of this host.

use crate::daemon_command;
use anyhow::Context;
use hyper::Method;
use jiffy_client::{Client, UnknownServer};
use jiffy_daemon::local_daemon::{client_over, connect};
use jiffy_image::Home;
use serde::Deserialize;
use std::io::IsTerminal;
use std::process::{Command, ExitCode, Stdio};

/// Address of the console, or of its page for signing in.
#[derive(Deserialize)]
struct Address {
    url: String,
}

/// Prints the address of the console with a code for signing in, and opens it in a browser.
pub fn run(no_open: bool) -> anyhow::Result<ExitCode> {
    let url = crate::runtime()?.block_on(sign_in_url())?;
    outln!("{url}");
    if !no_open && has_display() {
        open_browser(&url);
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a URL that signs a browser in to the console. Starts the daemon if necessary.
async fn sign_in_url() -> anyhow::Result<String> {
    let home = Home::locate()?;
    let stream = match connect(&home).await {
        Some(stream) => stream,
        None => {
            daemon_command::start(&[]).await?;
            connect(&home).await.context("the daemon has exited")?
        }
    };
    let client = client_over(&home, stream).await?;
    anyhow::ensure!(
        address(&client).await?.is_some(),
        "the daemon runs without the console: enable it with `jiffy daemon restart --console`, or with \
         `--console` of `jiffy serve`; sandboxes continue to run"
    );
    let created: Address = client.call(Method::POST, "/console/codes", &()).await?;
    Ok(created.url)
}

/// Returns the address of the console of a daemon. `None` if it has no console.
pub async fn address(client: &Client) -> anyhow::Result<Option<String>> {
    match client.call::<Address>(Method::GET, "/console", &()).await {
        Ok(address) => Ok(Some(address.url)),
        // The daemon has no such call: its console is off, or its address was in use.
        Err(e) if e.is::<UnknownServer>() => Ok(None),
        Err(e) => Err(e),
    }
}

/// Prints the address of the page of a new sandbox in the console, as a hint for people. `json` is
/// true if the command prints JSON.
pub async fn print_page(client: &Client, sandbox: &str, json: bool) {
    if !has_page(std::io::stderr().is_terminal(), json, client.is_remote()) {
        return;
    }
    // The sandbox exists, so an error is not reported.
    if let Ok(Some(url)) = address(client).await {
        errln!("console on {}", page(&url, sandbox));
    }
}

/// Returns whether the page of a new sandbox is printed. A daemon on another host does not report
/// the address of its console.
fn has_page(is_terminal: bool, json: bool, is_remote: bool) -> bool {
    is_terminal && !json && !is_remote
}

/// Returns the address of the page of a sandbox in the console at `url`.
fn page(url: &str, sandbox: &str) -> String {
    format!("{}/sandboxes/{sandbox}", url.trim_end_matches('/'))
}

fn has_display() -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    is_set("DISPLAY") || is_set("WAYLAND_DISPLAY")
}

/// Opens the URL. The address was printed, so a failure is not an error.
fn open_browser(url: &str) {
    let _ = Command::new("xdg-open")
        .arg(url)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_a_sandbox_is_printed_for_people_at_the_host_of_the_daemon_only() {
        for is_terminal in [false, true] {
            for json in [false, true] {
                for is_remote in [false, true] {
                    let expected = (is_terminal, json, is_remote) == (true, false, false);
                    assert_eq!(has_page(is_terminal, json, is_remote), expected);
                }
            }
        }
        for url in ["http://127.0.0.1:3001", "http://127.0.0.1:3001/"] {
            assert_eq!(page(url, "k3x9"), "http://127.0.0.1:3001/sandboxes/k3x9");
        }
    }
}
