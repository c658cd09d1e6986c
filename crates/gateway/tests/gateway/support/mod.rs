//! Fixture of the tests: [`Setup`], a gateway on a port of the loopback interface, in front of
//! guests and a control plane that are tasks of the test.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod client;
pub mod guest;

use axum::Router;
use axum::routing::{any, get};
use guest::Guests;
use hyper::body::Incoming;
use jiffy_gateway::ControlPlane;
use jiffy_gateway::{
    ForwardedConnection, Gateway, GatewayConfig, GatewayCounters, GuestConnectionPool, LinkSigner,
    OtherHosts, Tls, serve, serve_forwarded,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Timeout of each step of a test.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(30);
/// Sandbox of most tests.
pub const ID: &str = "i0123456789abcdefghi";
/// Key that signs preview links.
pub const KEY: [u8; 32] = [7; 32];
/// Domain below which sandboxes have host names.
pub const DOMAIN: &str = "jiffy.example";

/// Running gateway.
pub struct Setup {
    pub address: SocketAddr,
    pub counters: Arc<GatewayCounters>,
    pub pool: Arc<GuestConnectionPool>,
    stop: Option<oneshot::Sender<()>>,
    served: JoinHandle<()>,
}

/// Control plane that responds with the request's method and path.
pub fn control_plane() -> Router {
    Router::new()
        .route("/health", get(|| async { "control plane" }))
        .route("/slow", any(slow))
        .fallback(|request: axum::extract::Request| async move {
            let ip = request
                .extensions()
                .get::<jiffy_gateway::Peer>()
                .unwrap()
                .ip;
            format!("{} {} for {ip}", request.method(), request.uri())
        })
}

/// Responds after enough time for the gateway to notice the client's next step.
async fn slow() -> &'static str {
    tokio::time::sleep(Duration::from_millis(100)).await;
    "control plane"
}

/// Returns the settings of most tests.
pub fn config() -> GatewayConfig {
    GatewayConfig {
        domains: vec![DOMAIN.to_owned()],
        ..GatewayConfig::default()
    }
}

impl Setup {
    /// Starts a gateway with the settings of most tests, without TLS.
    pub async fn new(guests: &Guests) -> Self {
        Self::with(config(), guests, None).await
    }

    /// Starts a gateway with other settings.
    pub async fn with(config: GatewayConfig, guests: &Guests, tls: Option<Tls>) -> Self {
        let control = control_plane();
        let gateway = Gateway::new(config, guests.clone(), control, Some(LinkSigner::new(&KEY)));
        Self::of(gateway, tls).await
    }

    /// Starts a gateway with another control plane.
    pub async fn before(config: GatewayConfig, guests: &Guests, control: Router) -> Self {
        Self::of(Gateway::new(config, guests.clone(), control, None), None).await
    }

    /// Starts a gateway with other hosts. Returns the sender for their streams.
    pub async fn in_fleet(
        guests: &Guests,
        hosts: Arc<dyn OtherHosts>,
    ) -> (Self, mpsc::Sender<ForwardedConnection>) {
        let signer = Some(LinkSigner::new(&KEY));
        let gateway = Gateway::in_fleet(
            config(),
            guests.clone(),
            control_plane(),
            signer,
            Some(hosts),
            None,
        );
        let (sender, streams) = mpsc::channel(8);
        let end = std::future::pending();
        tokio::spawn(serve_forwarded(streams, gateway.clone(), end));
        (Self::of(gateway, None).await, sender)
    }

    /// Serves a gateway on a free port.
    pub async fn of<C>(gateway: Gateway<Guests, C>, tls: Option<Tls>) -> Self
    where
        C: ControlPlane + Sync,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let (counters, pool) = (gateway.counters(), gateway.pool());
        let served = tokio::spawn(serve(listener, tls, gateway, async {
            let _ = stopped.await;
        }));
        Self {
            address,
            counters,
            pool,
            stop: Some(stop),
            served,
        }
    }

    /// Shuts the gateway down.
    pub fn stop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
    }

    /// Waits for the end of the shutdown.
    pub async fn ended(self) {
        with_timeout(self.served).await.unwrap();
    }

    /// Waits until the counters satisfy `right`.
    pub async fn wait_for_counters(&self, right: impl Fn(jiffy_gateway::GatewayTotals) -> bool) {
        let waiting = async {
            while !right(self.counters.totals()) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        if timeout(STEP_TIMEOUT, waiting).await.is_err() {
            panic!("{:?}", self.counters.totals());
        }
    }
}

/// Waits for a future with the timeout [`STEP_TIMEOUT`].
pub async fn with_timeout<F: Future>(future: F) -> F::Output {
    timeout(STEP_TIMEOUT, future)
        .await
        .expect("the step timed out")
}

/// Reads a whole body as text.
pub async fn collected(body: Incoming) -> String {
    use http_body_util::BodyExt;
    let bytes = with_timeout(body.collect()).await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}
