//! End of a daemon, from outside.

use crate::confinement::confine;
use crate::local_daemon::{client_over, connect, process_of};
use crate::serve::{SHUTDOWN_TIMEOUT, lock, open};
use crate::{ConfinementOptions, NetworkOptions, engine, functions, network};
use anyhow::bail;
use jiffy_api_types::StopHost;
use jiffy_client::UnknownServer;
use jiffy_engines::Host;
use jiffy_function_manager::egress::EgressSettings;
use jiffy_image::Home;
use jiffy_proto::function::SlotReset;
use nix::sys::signal::{Signal, kill};
use std::time::{Duration, Instant};

/// Time between two tries to take the lock of a daemon that ends.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Ends the daemon that runs, if one does, and returns when it is gone.
pub async fn stop(how: StopHost) -> anyhow::Result<()> {
    let home = Home::locate()?;
    let Some(stream) = connect(&home).await else {
        return match how.kill_sandboxes {
            true => kill_sandboxes(&home).await,
            false => Ok(()),
        };
    };
    let process = process_of(&stream);
    let client = client_over(&home, stream).await?;
    let answer: anyhow::Result<()> = client.call(hyper::Method::POST, "/host/stop", &how).await;
    let another_version = match answer {
        Ok(()) => false,
        // One of another version still understands a signal.
        Err(e) if e.is::<UnknownServer>() => {
            let (pid, _) = process.ok_or(e)?;
            kill(pid, Signal::SIGTERM)?;
            true
        }
        Err(e) => return Err(e),
    };
    while lock(&home)?.is_none() {
        tokio::time::sleep(LOCK_POLL_INTERVAL).await;
    }
    match another_version && how.kill_sandboxes {
        true => kill_sandboxes(&home).await,
        false => Ok(()),
    }
}

/// Ends the sandboxes that ran on without a daemon.
async fn kill_sandboxes(home: &Home) -> anyhow::Result<()> {
    // One that is going cannot be reached any more, and removes what nobody uses of the network
    // before it lets go of the lock.
    let limit = Instant::now() + SHUTDOWN_TIMEOUT;
    let _lock = loop {
        match lock(home)? {
            Some(lock) => break lock,
            None if Instant::now() < limit => tokio::time::sleep(LOCK_POLL_INTERVAL).await,
            None => bail!("a daemon is just coming up or going: try again"),
        }
    };
    // Their network slots are removed with them.
    let mut host = Host::open()?;
    let engine = engine::choose(None, &host).engine;
    let network = network::open(
        &NetworkOptions::default(),
        home.path(),
        engine::nic_kind(engine),
        None,
    )?;
    let cgroups = confine(&mut host, &ConfinementOptions::default())?;
    let (egress, reset) = (EgressSettings::default(), SlotReset::default());
    let functions = functions::open(&host, cgroups, egress, reset).await?;
    functions.stop_all().await;
    let sandboxes = open(host, network.clone(), engine).await?;
    sandboxes.stop_all().await;
    sandboxes.close().await;
    network::close(network).await;
    Ok(())
}
