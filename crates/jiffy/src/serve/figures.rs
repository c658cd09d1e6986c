//! All figures of the daemon, for Prometheus.

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use jiffy_engine::Engine;
use jiffy_gateway::{Counters, Peer};
use jiffy_host::{Figure, Sandboxes};
use std::sync::Arc;

/// What `Sandboxes::render_metrics` writes.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Lets the gateway's counts be shown with the host's.
pub fn show_gateway<E: Engine>(sandboxes: &Sandboxes<E>, counters: Arc<Counters>) {
    sandboxes.show_also(move || {
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

/// `GET /metrics`, for programs on this machine.
pub fn route<E: Engine>(sandboxes: Sandboxes<E>) -> Router {
    let render = move |peer: Option<axum::Extension<Peer>>| {
        let sandboxes = sandboxes.clone();
        async move { render(&sandboxes, peer.map(|peer| peer.0)) }
    };
    Router::new().route("/metrics", get(render))
}

fn render<E: Engine>(sandboxes: &Sandboxes<E>, peer: Option<Peer>) -> Response {
    if !peer.is_some_and(|peer| peer.ip.is_loopback()) {
        let why = "figures are for programs on this machine: scrape 127.0.0.1";
        let body = serde_json::json!({ "code": 403, "message": why });
        return (StatusCode::FORBIDDEN, axum::Json(body)).into_response();
    }
    let text = sandboxes.render_metrics();
    ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response()
}
