//! `jiffy console`: opens the web console of the daemon of this host.

use crate::daemon_command;
use anyhow::Context;
use hyper::Method;
use jiffy_client::{Client, UnknownServer};
use jiffy_daemon::local_daemon::{client_over, connect};
use jiffy_image::Home;
use serde::Deserialize;
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
