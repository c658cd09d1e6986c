//! Metrics of the daemon, for Prometheus.

use anyhow::Context;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use jiffy_api::{App, Caller};
use jiffy_gateway::{Gateway, GatewayConfig, GatewayCounters, OpenError, SandboxAccess};
use jiffy_sandbox_manager::{Figure, Sandboxes};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::{TcpListener, UnixStream};

/// Text of `Sandboxes::render_metrics`.
const OPEN_METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Connections of scrapers at once.
const MAX_SCRAPER_CONNECTIONS: usize = 64;

/// Adds the gateway's counters to the host's metrics.
pub fn add_gateway_counters(sandboxes: &Sandboxes, counters: Arc<GatewayCounters>) {
    sandboxes.figures().show_also(move || {
        let counts = counters.totals();
        counts
            .each()
            .map(|(name, value)| Figure {
                name,
                help: "Counted by the gateway",
                counter: !name.ends_with("_open"),
                value: value as f64,
            })
            .collect()
    });
}

/// `GET /metrics`, for callers with access to figures of the host. An address says nothing about a
/// caller: behind a proxy of this host all have its.
pub fn routes(app: &App, sandboxes: Sandboxes) -> Router {
    let show = move |Extension(caller): Extension<Caller>| {
        let shown = match caller.sees_host() {
            true => render(&sandboxes),
            false => {
                let why = "figures of the host need a key with the scope `admin` or `read`";
                let body = serde_json::json!({
                    "code": 403, "message": why, "error_code": "forbidden",
                });
                (StatusCode::FORBIDDEN, axum::Json(body)).into_response()
            }
        };
        std::future::ready(shown)
    };
    jiffy_api::guarded(app, Router::new().route("/metrics", get(show)))
}

fn render(sandboxes: &Sandboxes) -> Response {
    let text = sandboxes.figures().render();
    ([(header::CONTENT_TYPE, OPEN_METRICS_TYPE)], text).into_response()
}

/// An address at which figures, and nothing else, are answered to everybody.
pub struct MetricsServer {
    listener: TcpListener,
    gateway: Gateway<NoSandboxes, Router>,
}

impl MetricsServer {
    /// Listens at `address`.
    pub async fn open(
        address: SocketAddr,
        allowed_hosts: &[String],
        sandboxes: Sandboxes,
    ) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("cannot listen on {address}: choose another with `--metrics-listen`")
        })?;
        tracing::info!("figures at http://{}/metrics", listener.local_addr()?);
        let show = move || std::future::ready(render(&sandboxes));
        let control = Router::new().route("/metrics", get(show));
        let mut config = GatewayConfig {
            allowed_hosts: allowed_hosts.to_vec(),
            ..GatewayConfig::default()
        };
        config.limits.connections = MAX_SCRAPER_CONNECTIONS;
        let gateway = Gateway::new(config, NoSandboxes, control, None);
        Ok(Self { listener, gateway })
    }

    /// Serves until `shutdown`.
    pub async fn serve(self, shutdown: impl Future<Output = ()>) {
        jiffy_gateway::serve(self.listener, None, self.gateway, shutdown).await;
    }
}

/// Sandboxes of a listener that leads to none.
#[derive(Debug, Clone, Copy)]
struct NoSandboxes;

impl jiffy_gateway::Sandboxes for NoSandboxes {
    type Stream = UnixStream;

    fn find(&self, _: &str) -> Option<SandboxAccess> {
        None
    }

    async fn open(&self, _: &str, _: u16) -> Result<UnixStream, OpenError> {
        Err(OpenError::NotFound)
    }
}
