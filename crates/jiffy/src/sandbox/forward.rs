//! `jiffy port-forward`: connections to ports of this host become connections to ports of a sandbox.

use crate::cli::{Forwarding, PortForwardArgs};
use crate::client::Client;
use anyhow::Context;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Most connections of one port at a time; further ones wait.
const MOST: usize = 256;
/// Time until the next attempt where this host had no descriptor left.
const BREATH: Duration = Duration::from_millis(100);

/// A sandbox, and who is asked for its ports.
struct Target {
    client: Client,
    id: String,
}

pub async fn run(args: &PortForwardArgs) -> anyhow::Result<ExitCode> {
    let client = Client::open(&args.host).await?;
    let id = client.sandbox(&args.id).await?.record.id;
    let target = Arc::new(Target { client, id });
    let mut work = JoinSet::new();
    for &Forwarding { local, remote } in &args.ports {
        let listener = TcpListener::bind((args.address, local)).await;
        let listener =
            listener.with_context(|| format!("cannot listen at {}:{local}", args.address))?;
        let mut out = std::io::stdout().lock();
        // Whoever reads may wait for it.
        writeln!(out, "{} -> {remote}", listener.local_addr()?)?;
        out.flush()?;
        work.spawn(forward(listener, target.clone(), remote));
    }
    tokio::signal::ctrl_c().await?;
    Ok(ExitCode::SUCCESS)
}

async fn forward(listener: TcpListener, target: Arc<Target>, port: u16) {
    let places = Arc::new(Semaphore::new(MOST));
    let mut streams = JoinSet::new();
    loop {
        let Ok(place) = places.clone().acquire_owned().await else {
            return;
        };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(BREATH).await;
            continue;
        };
        let target = target.clone();
        streams.spawn(async move {
            if let Err(e) = join(stream, &target, port).await {
                eprintln!("jiffy: {e:#}");
            }
            drop(place);
        });
        while streams.try_join_next().is_some() {}
    }
}

async fn join(mut stream: TcpStream, target: &Target, port: u16) -> anyhow::Result<()> {
    let _ = stream.set_nodelay(true);
    let mut guest = target.client.stream(&target.id, port).await?;
    // Either side breaking is an ordinary end.
    let _ = copy_bidirectional(&mut stream, &mut guest).await;
    Ok(())
}
