//! Process 1 of a gVisor sandbox: the host is reached over [`link`](crate::link).

use super::{greeting, net, root, until_reset};
use crate::link::{self, LinkListener};
use crate::process::reaper;
use crate::settings::Settings;
use crate::state::Agent;
use crate::{forward, runtime, server, sys};
use jiffy_proto::agent::{ENVD_PORT, GVISOR_DNS, HELLO_PORT, LINK_KEY, LISTENING, TCP_PORT};
use std::ffi::{CStr, CString};
use std::io::{self, Write};
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

/// What process 1 does. Returns only if it fails, with the exit code.
pub fn run(began_us: u64) -> i32 {
    let outcome = take_key().and_then(|key| {
        root::gvisor::enter()?;
        net::name_servers_told(&std::env::var(GVISOR_DNS).unwrap_or_default());
        runtime::block_on(serve(began_us, key)).map_err(|e| format!("cannot run: {e}"))
    });
    if let Err(reason) = outcome {
        eprintln!("jiffy-agent: {reason}");
    }
    1
}

/// The key, which is in `/proc/1/environ` no longer.
fn take_key() -> Result<String, String> {
    let name = CString::new(LINK_KEY).map_err(|e| e.to_string())?;
    // SAFETY: no other thread exists, and nobody has changed the environment: what getenv finds lies where the kernel put it.
    let key = unsafe {
        let found = libc::getenv(name.as_ptr());
        if found.is_null() {
            return Err(format!("{LINK_KEY} is not set"));
        }
        let key = CStr::from_ptr(found).to_owned();
        libc::explicit_bzero(found.cast(), key.as_bytes().len());
        libc::unsetenv(name.as_ptr());
        key
    };
    key.into_string()
        .ok()
        .filter(|key| link::is_key(key))
        .ok_or_else(|| format!("{LINK_KEY} holds no key"))
}

async fn serve(began_us: u64, key: String) -> io::Result<()> {
    sys::raise_open_files();
    let signals = reaper::signals()?;
    let agent = Agent::new(Settings {
        link_key: Some(key),
        ..Settings::default()
    })?;
    let listener = LinkListener::bind()?;
    // The host waits for the line. What is written here is not buffered beyond it.
    writeln!(io::stdout(), "{LISTENING}")?;

    let (broken, unbroken) = watch::channel(());
    let (greetings, host) = mpsc::channel(1);
    tokio::task::spawn_local(greeting::receive(Rc::clone(&agent), began_us, host, broken));
    let serving = Rc::clone(&agent);
    tokio::task::spawn_local(async move {
        loop {
            let Ok(stream) = listener.accept().await else {
                sleep(Duration::from_millis(50)).await;
                continue;
            };
            let (agent, greetings, reset) =
                (Rc::clone(&serving), greetings.clone(), unbroken.clone());
            tokio::task::spawn_local(async move {
                let Some((port, stream)) = link::admit(&agent, stream).await else {
                    return;
                };
                match port {
                    // The receiver lives as long as we do.
                    HELLO_PORT => drop(greetings.send(stream).await),
                    ENVD_PORT => until_reset(reset, server::serve(agent, stream)).await,
                    TCP_PORT => until_reset(reset, forward::serve(stream)).await,
                    _ => {}
                }
            });
        }
    });
    reaper::run(agent, signals).await
}
