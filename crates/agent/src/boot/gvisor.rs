//! Process 1 of a gVisor sandbox. It communicates with the host over
//! [`link_socket`](crate::link_socket).
//!
//! The *greeting* is the first message of the agent to the host, which answers with the identity of
//! the sandbox (id, host name, entropy, clock and settings).

use super::{greeting, ipv4, root, until_reset};
use crate::guest_sockets::GuestSockets;
use crate::link_socket::LinkListener;
use crate::process::{oom_log, reaper};
use crate::settings::AgentSettings;
use crate::state::Agent;
use crate::{port_forward, runtime, server, sys};
use jiffy_proto::agent::{ENVD_PORT, GVISOR_DNS, HELLO_PORT, LISTENING, TCP_PORT};
use std::io::{self, Write};
use std::rc::Rc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

/// Runs process 1. Returns only on failure, with the exit code.
pub fn run(began_us: u64) -> i32 {
    let outcome = root::gvisor::enter().and_then(|()| {
        ipv4::set_host_name_servers(&std::env::var(GVISOR_DNS).unwrap_or_default());
        runtime::block_on(serve(began_us)).map_err(|e| format!("cannot run: {e}"))
    });
    if let Err(reason) = outcome {
        eprintln!("jiffy-agent: {reason}");
    }
    1
}

/// Serves the agent's three ports until the sandbox ends: greeting, API (envd) and TCP streams.
async fn serve(began_us: u64) -> io::Result<()> {
    sys::raise_open_files();
    let signals = reaper::signals()?;
    let agent = Agent::new(AgentSettings::default(), None)?;
    // gVisor has no kernel log, so kills are detected by a counter.
    let kills = oom_log::CountedKills::default();
    agent.processes.counted_kills.replace(Some(kills));
    let [hello, envd, tcp] = [HELLO_PORT, ENVD_PORT, TCP_PORT].map(LinkListener::bind);
    let (hello, envd, tcp) = (hello?, envd?, tcp?);
    // The host waits for this line. Standard output is line-buffered, so the line is sent
    // immediately.
    writeln!(io::stdout(), "{LISTENING}")?;

    // A restore invalidates every connection, so all of them are closed together.
    let (broken, resets) = watch::channel(());
    let (greetings, host) = mpsc::channel(1);
    tokio::task::spawn_local(greeting::receive(Rc::clone(&agent), began_us, host, broken));
    tokio::task::spawn_local(accept(hello, move |stream| {
        let greetings = greetings.clone();
        async move {
            // Ignore the error: the receiver exists as long as this task.
            let _ = greetings.send(stream).await;
        }
    }));
    let (serving, reset) = (Rc::clone(&agent), resets.clone());
    tokio::task::spawn_local(accept(envd, move |stream| {
        until_reset(reset.clone(), server::serve(Rc::clone(&serving), stream))
    }));
    let sockets = Rc::new(GuestSockets::default());
    tokio::task::spawn_local(accept(tcp, move |stream| {
        let work = port_forward::serve(stream, Rc::clone(&sockets));
        until_reset(resets.clone(), work)
    }));
    reaper::run(agent, signals).await
}

/// Accepts and serves connections forever, each in a separate task.
async fn accept<F: Future<Output = ()> + 'static>(
    listener: LinkListener,
    serve: impl Fn(UnixStream) -> F,
) {
    loop {
        match listener.accept().await {
            Ok(stream) => drop(tokio::task::spawn_local(serve(stream))),
            // For example, no descriptor is free: try again later.
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
}
