//! `jiffy port-forward`: connections to ports of this host become connections to ports of a
//! sandbox.

use crate::cli::{Forwarding, PortForwardArgs};
use anyhow::{Context, bail};
use jiffy_api_types::SandboxState;
use jiffy_client::{Client, is_refusal};
use std::future::Future;
use std::io::Write;
use std::net::IpAddr;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Connections of one port at a time; further ones wait.
const MAX_CONNECTIONS: usize = 256;
/// Time until the next attempt where this host had no descriptor left.
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// Time for open connections to hand on what is under way, once no more are accepted.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
/// Time of one question for the end of the sandbox.
const END_POLL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two such questions where the first was not answered.
const END_POLL_RETRY_DELAY: Duration = Duration::from_secs(1);

/// A stream to a port of a guest.
pub trait PortStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> PortStream for T {}

/// A stream that is being opened.
pub type OpeningPort = Pin<Box<dyn Future<Output = anyhow::Result<Box<dyn PortStream>>> + Send>>;

/// Opens streams to TCP ports of one guest.
pub type PortOpener = Arc<dyn Fn(u16) -> OpeningPort + Send + Sync>;

/// The opener of a sandbox of a daemon.
pub fn opener(client: Client, id: String) -> PortOpener {
    Arc::new(move |port| {
        let (client, id) = (client.clone(), id.clone());
        Box::pin(async move {
            let stream = client.stream(&id, port).await?;
            Ok(Box::new(stream) as Box<dyn PortStream>)
        })
    })
}

pub async fn run(args: &PortForwardArgs) -> anyhow::Result<ExitCode> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let id = client.sandbox(&args.id).await?.record.id;
    let opener = opener(client.clone(), id.clone());
    let mut work = JoinSet::new();
    for &Forwarding { local, remote } in &args.ports {
        let listener = listen(args.address, local).await?;
        let mut out = std::io::stdout().lock();
        // A reader may wait for it.
        writeln!(out, "{} -> {remote}", listener.local_addr()?)?;
        out.flush()?;
        let never = std::future::pending();
        work.spawn(forward(listener, opener.clone(), remote, never));
    }
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => interrupted?,
        end = ended(&client, &id) => bail!("nothing is forwarded any more: {end}"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits for the end of a sandbox, and tells it in words. A daemon that is not reached may be just
/// restarted, and its sandboxes run on.
async fn ended(client: &Client, id: &str) -> String {
    loop {
        let began = Instant::now();
        match client
            .wait(id, "ended", END_POLL_TIMEOUT)
            .await
            .map(|now| now.state)
        {
            Ok(SandboxState::Killed) => return format!("sandbox {id} was killed"),
            Ok(SandboxState::Broken { cause, .. }) => {
                return format!("sandbox {id} is broken: {cause}");
            }
            Ok(_) => {}
            Err(e) if is_refusal(&e, "sandbox_not_found") => {
                return format!("sandbox {id} was removed");
            }
            Err(_) => {}
        }
        if began.elapsed() < END_POLL_RETRY_DELAY {
            tokio::time::sleep(END_POLL_RETRY_DELAY).await;
        }
    }
}

/// Listens at a port of this host.
pub async fn listen(address: IpAddr, port: u16) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind((address, port)).await;
    listener.with_context(|| format!("cannot listen at {address}:{port}"))
}

/// Carries connections to `port` of a guest until `stop`. Then no connection is accepted, and those
/// that are open have [`DRAIN_TIMEOUT`] to hand on what is under way.
pub async fn forward(
    listener: TcpListener,
    opener: PortOpener,
    port: u16,
    stop: impl Future<Output = ()>,
) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut streams = JoinSet::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        let accepted = async {
            let permit = permits.clone().acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            accepted = accepted => accepted,
            () = &mut stop => break,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(RETRY_DELAY).await;
            continue;
        };
        let opening = opener(port);
        streams.spawn(async move {
            if let Err(e) = join(stream, opening).await {
                errln!("jiffy: {e:#}");
            }
            drop(permit);
        });
        while streams.try_join_next().is_some() {}
    }
    drop(listener);
    let drained = async { while streams.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, drained).await;
}

async fn join(mut stream: TcpStream, opening: OpeningPort) -> anyhow::Result<()> {
    let _ = stream.set_nodelay(true);
    let mut guest = opening.await?;
    // Either side breaking is an ordinary end.
    let _ = copy_bidirectional(&mut stream, &mut guest).await;
    Ok(())
}
