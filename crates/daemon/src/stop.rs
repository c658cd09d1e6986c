//! `jiffy stop`: stops a running daemon from another process.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use crate::confinement::confine;
use crate::local_daemon::{client_over, connect, process_of};
use crate::serve::{SHUTDOWN_TIMEOUT, lock, open_sandboxes};
use crate::{ConfinementOptions, NetworkOptions, engine, functions, network};
use anyhow::bail;
use jiffy_api_types::StopHost;
use jiffy_client::UnknownServer;
use jiffy_engine_api::ProcessInstance;
use jiffy_engines::Host;
use jiffy_function_manager::egress::EgressSettings;
use jiffy_image::Home;
use jiffy_proto::function::SlotReset;
use nix::sys::signal::{Signal, kill};
use std::time::{Duration, Instant};

/// Interval of attempts to acquire the lock of a daemon that is stopping.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Stops the running daemon, if any, and waits until it has exited.
pub async fn stop(request: StopHost) -> anyhow::Result<()> {
    let home = Home::locate()?;
    let Some(stream) = connect(&home).await else {
        if request.kill_sandboxes {
            kill_sandboxes(&home).await?;
        }
        return Ok(());
    };
    // Determine the process before the request, because the stream is moved into the client.
    let process = process_of(&stream);
    let instance = process
        .as_ref()
        .and_then(|(pid, _)| u32::try_from(pid.as_raw()).ok())
        .and_then(|pid| Some((pid, ProcessInstance::of(pid).ok()?)));
    let client = client_over(&home, stream).await?;
    let response: anyhow::Result<()> = client
        .call(hyper::Method::POST, "/host/stop", &request)
        .await;
    let is_other_version = match response {
        Ok(()) => false,
        // A daemon of another version is stopped with a signal.
        Err(e) if e.is::<UnknownServer>() => {
            let (pid, _) = process.ok_or(e)?;
            kill(pid, Signal::SIGTERM)?;
            true
        }
        Err(e) => return Err(e),
    };
    // The daemon holds the lock until it exits. A service manager may start the next daemon at
    // once, which then holds the lock.
    let is_live =
        |pid, before: &ProcessInstance| ProcessInstance::of(pid).is_ok_and(|now| now == *before);
    let has_exited = || (instance.as_ref()).is_some_and(|(pid, before)| !is_live(*pid, before));
    while lock(&home)?.is_none() && !has_exited() {
        tokio::time::sleep(LOCK_POLL_INTERVAL).await;
    }
    // After SIGTERM the sandboxes continue to run.
    if is_other_version && request.kill_sandboxes {
        kill_sandboxes(&home).await?;
    }
    Ok(())
}

/// Kills the sandboxes that continued to run without a daemon.
async fn kill_sandboxes(home: &Home) -> anyhow::Result<()> {
    // A stopping daemon accepts no connections, but holds the lock until it has removed unused
    // parts of the network.
    let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
    // The lock is held until the end, so that no daemon starts while sandboxes are killed.
    let _lock = loop {
        match lock(home)? {
            Some(lock) => break lock,
            None if Instant::now() < deadline => tokio::time::sleep(LOCK_POLL_INTERVAL).await,
            None => bail!("a daemon is starting or stopping: retry the command"),
        }
    };
    // The network and the functions are opened as well, to remove network slots and to stop
    // function processes. Default options suffice, because the sandboxes are only killed.
    let mut host = Host::open()?;
    let engine = engine::choose(None, &host).engine;
    let network = network::open(
        &NetworkOptions::default(),
        home.path(),
        engine::nic_kind(engine),
        None,
        None,
        None,
    )?;
    let cgroups = confine(&mut host, &ConfinementOptions::default())?;
    let (egress, reset) = (EgressSettings::default(), SlotReset::default());
    let functions = functions::open(&host, cgroups, egress, reset).await?;
    functions.stop_all().await;
    let sandboxes = open_sandboxes(host, network.clone(), engine).await?;
    sandboxes.stop_all().await;
    sandboxes.close().await;
    network::close(network).await;
    Ok(())
}
