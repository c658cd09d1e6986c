//! Listens, and ends in order.

use crate::admission::{Full, Permit};
use crate::connection;
use crate::counters::add;
use crate::gateway::{ControlPlane, Gateway, Peer};
use crate::sandboxes::Sandboxes;
use crate::tls::Tls;
use socket2::{SockRef, TcpKeepalive};
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

/// Clients that are told at once that there are too many; more are closed without a word.
const REFUSALS: usize = 64;
/// How long telling one may take.
const REFUSAL: Duration = Duration::from_secs(2);
/// Pause after a failed accept: it fails when descriptors run out, and then again at once.
const RESPITE: Duration = Duration::from_millis(50);

/// What a listener's connections run in, and how they are ended.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tasks {
    tracker: TaskTracker,
    stopping: CancellationToken,
    cut: CancellationToken,
}

impl Tasks {
    /// Runs until it ends or the time for ending is over.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let cut = self.cut.clone();
        self.tracker.spawn(async move {
            let _ = cut.run_until_cancelled(work).await;
        });
    }

    /// No new requests are wanted.
    pub(crate) async fn stopping(&self) {
        self.stopping.cancelled().await;
    }

    /// The time for ending is over.
    pub(crate) async fn cut(&self) {
        self.cut.cancelled().await;
    }

    /// Lets everything end within `drain` and cuts the rest.
    async fn finish(&self, drain: Duration) {
        self.stopping.cancel();
        self.tracker.close();
        if timeout(drain, self.tracker.wait()).await.is_err() {
            debug!("cutting what is still under way");
            self.cut.cancel();
            self.tracker.wait().await;
        }
    }
}

/// Serves clients on `listener` until `shutdown`; then takes no more requests, lets those under way finish for as long as the limits say,
/// and cuts the rest. Several listeners may share one gateway.
pub async fn serve<S, C>(
    listener: TcpListener,
    tls: Option<Tls>,
    gateway: Gateway<S, C>,
    shutdown: impl Future<Output = ()>,
) where
    S: Sandboxes,
    C: ControlPlane,
{
    let tasks = Tasks::default();
    let refusals = Arc::new(Semaphore::new(REFUSALS));
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => break,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                warn!("cannot accept a connection: {e}");
                sleep(RESPITE).await;
                continue;
            }
        };
        prepare(&stream);
        let ip = from.ip().to_canonical();
        match gateway.shared.admission.enter(ip) {
            Ok(permit) => {
                let work = attend(
                    gateway.clone(),
                    stream,
                    tls.clone(),
                    Peer {
                        ip,
                        tls: tls.is_some(),
                        local: false,
                    },
                    permit,
                    tasks.clone(),
                );
                tasks.tracker.spawn(work);
            }
            Err(full) => {
                add(&gateway.shared.counters.connections_refused, 1);
                if let Ok(refusal) = Arc::clone(&refusals).try_acquire_owned() {
                    let tls = tls.clone();
                    tasks.spawn(async move {
                        let _ = timeout(REFUSAL, turn_away(stream, tls, full)).await;
                        drop(refusal);
                    });
                }
            }
        }
    }
    drop(listener);
    tasks.finish(gateway.shared.config.limits.drain).await;
}

/// The same on a Unix socket, for those whose user id `may`: to the control plane they are local, and they are not counted among an
/// address's connections.
pub async fn serve_local<S, C>(
    listener: UnixListener,
    gateway: Gateway<S, C>,
    may: impl Fn(u32) -> bool,
    shutdown: impl Future<Output = ()>,
) where
    S: Sandboxes,
    C: ControlPlane,
{
    let tasks = Tasks::default();
    let peer = Peer {
        ip: IpAddr::V4(Ipv4Addr::LOCALHOST),
        tls: false,
        local: true,
    };
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(e) => {
                warn!("cannot accept a connection: {e}");
                sleep(RESPITE).await;
                continue;
            }
        };
        // As the kernel has it, of the moment of connecting.
        if !stream.peer_cred().is_ok_and(|peer| may(peer.uid())) {
            warn!("somebody who may not use the socket did");
            continue;
        }
        // One that is too many is closed without a word.
        if let Ok(permit) = gateway.shared.admission.enter(peer.ip) {
            permit.is_known();
            let work = connection::serve(gateway.clone(), stream, peer, permit, tasks.clone());
            tasks.tracker.spawn(work);
        }
    }
    drop(listener);
    tasks.finish(gateway.shared.config.limits.drain).await;
}

/// Small answers go out at once, and a client that vanished without a word is noticed although streams may be silent for hours.
fn prepare(stream: &TcpStream) {
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(15))
        .with_retries(4);
    let set = stream
        .set_nodelay(true)
        .and_then(|()| SockRef::from(stream).set_tcp_keepalive(&keepalive));
    if let Err(e) = set {
        debug!("cannot set options of a connection: {e}");
    }
}

async fn attend<S, C>(
    gateway: Gateway<S, C>,
    stream: TcpStream,
    tls: Option<Tls>,
    peer: Peer,
    permit: Permit,
    tasks: Tasks,
) where
    S: Sandboxes,
    C: ControlPlane,
{
    let Some(tls) = tls else {
        return connection::serve(gateway, stream, peer, permit, tasks).await;
    };
    // Nothing is made for a client before it has sent something.
    let limits = &gateway.shared.config.limits;
    let begun = tokio::select! {
        begun = timeout(limits.handshake, stream.readable()) => matches!(begun, Ok(Ok(()))),
        () = tasks.stopping() => return,
    };
    if begun {
        Box::pin(encrypted(gateway, stream, tls, peer, permit, tasks)).await;
    } else {
        add(&gateway.shared.counters.handshakes_failed, 1);
    }
}

/// Serves a client that has begun to speak TLS.
async fn encrypted<S, C>(
    gateway: Gateway<S, C>,
    stream: TcpStream,
    tls: Tls,
    peer: Peer,
    permit: Permit,
    tasks: Tasks,
) where
    S: Sandboxes,
    C: ControlPlane,
{
    let shared = Arc::clone(&gateway.shared);
    let handshake = timeout(shared.config.limits.handshake, tls.accept(stream));
    let result = tokio::select! {
        result = handshake => result,
        () = tasks.stopping() => return,
    };
    match result {
        Ok(Ok(stream)) => connection::serve(gateway, stream, peer, permit, tasks).await,
        other => {
            let reason = match other {
                Ok(Err(e)) => e.to_string(),
                _ => "it took too long".to_owned(),
            };
            debug!(client = %peer.ip, "TLS handshake failed: {reason}");
            add(&shared.counters.handshakes_failed, 1);
        }
    }
}

async fn turn_away(stream: TcpStream, tls: Option<Tls>, full: Full) {
    match tls {
        None => say(stream, full).await,
        Some(tls) => {
            if let Ok(stream) = tls.accept(stream).await {
                say(stream, full).await;
            }
        }
    }
}

/// Answers without having read: whatever the request is, this is the answer. Clients of HTTP/2 see it broken.
async fn say<T: AsyncRead + AsyncWrite + Unpin>(mut stream: T, full: Full) {
    let json = format!(r#"{{"message":"{full}","code":503}}"#);
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n{json}",
        json.len()
    );
    if stream.write_all(answer.as_bytes()).await.is_err() || stream.shutdown().await.is_err() {
        return;
    }
    // A close with bytes unread would reset the connection and take the answer with it.
    let mut rest = [0; 1024];
    while matches!(stream.read(&mut rest).await, Ok(count) if count > 0) {}
}
