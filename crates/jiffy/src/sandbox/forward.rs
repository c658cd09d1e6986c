//! `jiffy port-forward`, and forwarding for `jiffy run --publish`: connections to ports of this
//! host are forwarded to ports of a sandbox.
//!
//! A *permit* counts towards a limit until it is dropped.

use crate::cli::{Forwarding, PortForwardArgs};
use anyhow::{Context, bail};
use jiffy_api_types::SandboxState;
use jiffy_client::{Client, has_error_code};
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

/// Maximum number of concurrent connections per port. Further connections wait.
const MAX_CONNECTIONS: usize = 256;
/// Delay before the next accept after an error, for example if no file descriptor is free.
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// Time for which open connections may transfer remaining data after forwarding is stopped.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
/// Timeout of a request that waits for the end of the sandbox.
const END_POLL_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum interval between two such requests that fail.
const END_POLL_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Stream to a port of a guest.
pub trait PortStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> PortStream for T {}

/// Future of a stream that is being opened.
pub type OpeningPort = Pin<Box<dyn Future<Output = anyhow::Result<Box<dyn PortStream>>> + Send>>;

/// Opens streams to TCP ports of a guest.
pub type PortOpener = Arc<dyn Fn(u16) -> OpeningPort + Send + Sync>;

/// Returns the opener for a sandbox of a daemon.
pub fn opener(client: Client, id: String) -> PortOpener {
    Arc::new(move |port| {
        let (client, id) = (client.clone(), id.clone());
        Box::pin(async move {
            let stream = client.stream(&id, port).await?;
            Ok(Box::new(stream) as Box<dyn PortStream>)
        })
    })
}

/// Forwards all ports until Ctrl-C, or until the sandbox terminates.
pub async fn run(args: &PortForwardArgs) -> anyhow::Result<ExitCode> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let id = client.sandbox(&args.id).await?.record.id;
    let opener = opener(client.clone(), id.clone());
    let mut tasks = JoinSet::new();
    for &Forwarding { local, remote } in &args.ports {
        let listener = listen(args.address, local).await?;
        let mut out = std::io::stdout().lock();
        // A reading process may wait for this line.
        writeln!(out, "{} -> {remote}", listener.local_addr()?)?;
        out.flush()?;
        let never = std::future::pending();
        tasks.spawn(forward(listener, opener.clone(), remote, never));
    }
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => interrupted?,
        reason = exit_reason(&client, &id) => bail!("port forwarding stopped: {reason}"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits until a sandbox terminates, and returns the reason. Retries if the daemon is not
/// reachable, because it may be restarting while its sandboxes continue to run.
async fn exit_reason(client: &Client, id: &str) -> String {
    loop {
        let start = Instant::now();
        match client
            .wait(id, "ended", END_POLL_TIMEOUT)
            .await
            .map(|record| record.state)
        {
            Ok(SandboxState::Killed) => return format!("sandbox {id} was killed"),
            Ok(SandboxState::Broken { cause, .. }) => {
                return format!("sandbox {id} is broken: {cause}");
            }
            Ok(_) => {}
            Err(e) if has_error_code(&e, "sandbox_not_found") => {
                return format!("sandbox {id} was removed");
            }
            Err(_) => {}
        }
        // Prevents a busy loop if the request failed at once.
        if start.elapsed() < END_POLL_RETRY_DELAY {
            tokio::time::sleep(END_POLL_RETRY_DELAY).await;
        }
    }
}

/// Binds to a port of this host.
pub async fn listen(address: IpAddr, port: u16) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind((address, port)).await;
    listener.with_context(|| {
        format!("cannot listen on {address}:{port}: choose another local port or address")
    })
}

/// Forwards connections to `port` of a guest until `stop` completes. Open connections are closed at
/// most [`DRAIN_TIMEOUT`] later.
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
        // The permit precedes the accept: further connections wait in the kernel's queue.
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
        // Reap closed connections, so that the set does not grow.
        while streams.try_join_next().is_some() {}
    }
    drop(listener);
    let drain = async { while streams.join_next().await.is_some() {} };
    // After the timeout, the remaining connections are dropped with the set.
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, drain).await;
}

/// Connects a stream of this host with a port of the guest until both directions are closed.
async fn join(mut stream: TcpStream, opening: OpeningPort) -> anyhow::Result<()> {
    // Disables Nagle's algorithm, which would delay small packets. A failure only costs time.
    let _ = stream.set_nodelay(true);
    let mut guest = opening.await?;
    // An error on either side closes the connection and is not reported.
    let _ = copy_bidirectional(&mut stream, &mut guest).await;
    Ok(())
}
