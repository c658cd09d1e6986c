//! `jiffy front`: runs the front of a fleet.
//!
//! A *front* is a process that passes connections of clients to the hosts of a fleet. The process
//! has no sandboxes, no keys and no store.

use crate::fleet_gateway::stream_request;
use crate::log;
use crate::options::{LogOptions, TlsOptions};
use crate::serve::{lock, protect_memory, raise_descriptor_limit};
use crate::tls::tls;
use anyhow::{Context, bail};
use jiffy_fleet::channel::{Client, Identity};
use jiffy_fleet::front::{FrontHost, KnownHosts, follow_hosts};
use jiffy_fleet::settings::{Role, Settings};
use jiffy_fleet_core::MemberId;
use jiffy_gateway::{FrontHosts, GatewayLimits, HostStream, Peer, Pending, serve_front};
use jiffy_image::Home;
use parking_lot::Mutex;
use sd_notify::NotifyState;
use std::collections::HashMap;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// Maximum number of hosts that are tried for a connection.
const MAX_ATTEMPTS: usize = 3;
/// Maximum time until a host accepts a stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(3);
/// Time for which a host that did not answer is tried last.
const AVOIDED: Duration = Duration::from_secs(5);
/// Timeout for tasks of the runtime that still run at the end of the front.
const RUNTIME_TIMEOUT: Duration = Duration::from_secs(1);

/// Options of a front.
#[derive(Debug, Clone)]
pub struct FrontOptions {
    /// Address for clients.
    pub listen: SocketAddr,
    /// TLS of that address.
    pub tls: TlsOptions,
    /// Log on standard error.
    pub log: LogOptions,
}

/// Runs the front of this data directory until it is stopped.
///
/// # Errors
/// An error if the data directory does not belong to a front, or another process uses it.
pub fn run_front(options: &FrontOptions) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let served = runtime.block_on(serve(options));
    runtime.shutdown_timeout(RUNTIME_TIMEOUT);
    served
}

/// Runs a front until a signal arrives.
async fn serve(options: &FrontOptions) -> anyhow::Result<()> {
    let home = Home::locate()?;
    let Some(_lock) = lock(&home)? else {
        bail!(
            "another process of Jiffy uses the data directory {}",
            home.path().display()
        );
    };
    log::init(&options.log, None)?;
    raise_descriptor_limit();
    protect_memory();
    let settings = Settings::load(home.path())?.filter(|settings| settings.role == Role::Front);
    let settings = settings.context(
        "this data directory does not belong to a front: join a fleet with `jiffy front --join URL \
         TOKEN`",
    )?;
    let identity = settings.identity(home.path())?;
    let hosts = ChannelHosts::new(&home, &identity)?;
    let tls = tls(&options.tls, &settings.domains, &home)?;
    let listen = options.listen;
    let listener = TcpListener::bind(listen).await.with_context(|| {
        format!("cannot listen on {listen}: choose another address with --listen")
    })?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    println!("listening on {scheme}://{}", listener.local_addr()?);
    if let Some(trust) = tls.as_ref().and_then(jiffy_gateway::Tls::trust) {
        println!("certificate authority for clients in {}", trust.display());
    }
    // The parent process may wait for these lines.
    std::io::stdout().flush()?;
    tracing::info!(fleet = %settings.fleet, front = %settings.member, "front started");
    // systemd waits for this notification. Without systemd, the call has no effect.
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let stop = async {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        // Without systemd, the call has no effect.
        let _ = sd_notify::notify(&[NotifyState::Stopping]);
        tracing::info!("shutting down, waiting for open connections");
    };
    let follow = follow_hosts(hosts.client.clone(), identity, hosts.known.clone());
    let limits = GatewayLimits::default();
    tokio::select! {
        () = serve_front(listener, tls, limits, Arc::new(hosts), stop) => {}
        // The task never completes; it only runs as long as the listener.
        () = follow => {}
    }
    tracing::info!("front stopped");
    Ok(())
}

/// Hosts of the fleet, over the channel.
#[derive(Debug)]
struct ChannelHosts {
    client: Client,
    known: KnownHosts,
    /// Hosts that did not accept a stream, with the time of the attempt.
    avoided: Mutex<HashMap<MemberId, Instant>>,
}

impl ChannelHosts {
    fn new(home: &Home, identity: &Identity) -> anyhow::Result<Self> {
        Ok(Self {
            client: Client::new(identity.clone()),
            known: KnownHosts::load(home.path())?,
            avoided: Mutex::default(),
        })
    }

    /// Returns the hosts in the order in which they are tried.
    fn candidates(&self) -> Vec<FrontHost> {
        let mut hosts = self.known.in_turn();
        let mut avoided = self.avoided.lock();
        avoided.retain(|_, since| since.elapsed() < AVOIDED);
        hosts.sort_by_key(|host| avoided.contains_key(&host.member));
        hosts.truncate(MAX_ATTEMPTS);
        hosts
    }
}

impl FrontHosts for ChannelHosts {
    fn open(&self, peer: Peer) -> Pending<'_, Result<HostStream, String>> {
        Box::pin(async move {
            let mut reasons = Vec::new();
            for FrontHost { member, address } in self.candidates() {
                let request = stream_request(peer).map_err(|e| e.to_string())?;
                let opening = (self.client).open_stream(member, &address, request, OPEN_TIMEOUT);
                match opening.await {
                    Ok(response) if response.status().is_success() => {
                        let stream: HostStream = Box::new(response.into_body());
                        return Ok(stream);
                    }
                    Ok(response) => reasons.push(format!("{member}: {}", response.status())),
                    Err(error) => reasons.push(format!("{member}: {error}")),
                }
                self.avoided.lock().insert(member, Instant::now());
            }
            Err(reasons.join("; "))
        })
    }
}
