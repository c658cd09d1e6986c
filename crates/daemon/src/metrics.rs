//! Prometheus metrics of the daemon: the route `/metrics`, and a listener for metrics only.

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

/// Content type of the metrics.
const OPEN_METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Maximum number of concurrent connections for scrapes.
const MAX_SCRAPER_CONNECTIONS: usize = 64;

/// Adds the gateway's counters to the host's metrics.
pub fn add_gateway_counters(sandboxes: &Sandboxes, counters: Arc<GatewayCounters>) {
    sandboxes.figures().add_figures(move || {
        let counts = counters.totals().each();
        counts
            .into_iter()
            .map(|(name, help, value)| Figure {
                name,
                // The help is a doc comment, which begins with a space and ends with a full stop.
                help: help.trim().trim_end_matches('.'),
                // Only the number of open connections can decrease.
                counter: !name.ends_with("_open"),
                value: value as f64,
            })
            .collect()
    });
}

/// Returns the route `GET /metrics` for callers with access to the metrics of the host. The client
/// address grants no access: behind a proxy on this host, all clients have the address of the
/// proxy.
pub fn routes(app: &App, sandboxes: Sandboxes) -> Router {
    let handler = move |Extension(caller): Extension<Caller>| {
        let response = if caller.sees_host() {
            render(&sandboxes)
        } else {
            let message = "metrics need a key with the scope `admin` or `read`";
            let body = serde_json::json!({
                "code": 403, "message": message, "error_code": "forbidden",
            });
            (StatusCode::FORBIDDEN, axum::Json(body)).into_response()
        };
        std::future::ready(response)
    };
    jiffy_api::guarded(app, Router::new().route("/metrics", get(handler)))
}

fn render(sandboxes: &Sandboxes) -> Response {
    let text = sandboxes.figures().render();
    ([(header::CONTENT_TYPE, OPEN_METRICS_TYPE)], text).into_response()
}

/// Listener that serves only metrics, to all clients without a key.
pub struct MetricsServer {
    listener: TcpListener,
    gateway: Gateway<NoSandboxes, Router>,
}

impl MetricsServer {
    /// Binds to `address`.
    pub async fn open(
        address: SocketAddr,
        allowed_hosts: &[String],
        sandboxes: Sandboxes,
    ) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("cannot listen on {address}: choose another address with --metrics-listen")
        })?;
        let local_address = listener.local_addr()?;
        tracing::info!(address = %local_address, "serving metrics");
        let handler = move || std::future::ready(render(&sandboxes));
        let control = Router::new().route("/metrics", get(handler));
        let mut config = GatewayConfig {
            allowed_hosts: allowed_hosts.to_vec(),
            ..GatewayConfig::default()
        };
        config.limits.connections = MAX_SCRAPER_CONNECTIONS;
        // The gateway provides timeouts and limits, but serves no sandbox here.
        let gateway = Gateway::new(config, NoSandboxes, control, None);
        Ok(Self { listener, gateway })
    }

    /// Serves requests until `shutdown` completes.
    pub async fn serve(self, shutdown: impl Future<Output = ()>) {
        jiffy_gateway::serve(self.listener, None, self.gateway, shutdown).await;
    }
}

/// Empty set of sandboxes, for a gateway without a data plane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NoSandboxes;

impl jiffy_gateway::Sandboxes for NoSandboxes {
    type Stream = UnixStream;

    fn find(&self, _: &str) -> Option<SandboxAccess> {
        None
    }

    async fn open(&self, _: &str, _: u16) -> Result<UnixStream, OpenError> {
        Err(OpenError::NotFound)
    }
}

#[cfg(test)]
mod reference;
