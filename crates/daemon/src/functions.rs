//! Functions in the daemon: opens the function manager, forwards requests of clients to it, and
//! reports its metrics.
//!
//! The *head* of a request or response is its first line and its headers, without the body. A
//! *slot* is address space for the memory of one instance, which requests use one after the other.
//! The *reset* cleans a slot after a request.

use crate::{FeatureMode, NetworkOptions};
use anyhow::Context;
use axum::body::Body;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use hyper::header::{HeaderName, HeaderValue};
use hyper::{Request, Version};
use jiffy_api::{ApiError, FunctionCall, FunctionInvoker, Invoking};
use jiffy_engines::Host;
use jiffy_function_manager::egress::EgressSettings;
use jiffy_function_manager::{
    BoxError, FunctionError, FunctionHostSettings, Functions, owner, page_scan,
};
use jiffy_gateway::headers::{confine_answer, confine_function_request, requested_host};
use jiffy_gateway::request_id::X_REQUEST_ID;
use jiffy_gateway::{Peer, RequestId};
use jiffy_http::GuardedBody;
use jiffy_microvm_engine::Cgroups;
use jiffy_proto::function::{CompileLimits, MetricsSnapshot, SlotReset, TenantLimits};
use jiffy_proto::internal::ControlPlaneConnector;
use jiffy_sandbox_manager::FigureFamily;
use jiffy_store::host::RemoteStore;
use std::sync::Arc;
use std::time::Duration;

/// Directory of functions in the data directory.
const DIRECTORY: &str = "functions";
/// Idle time after which a function process exits.
const IDLE: Duration = Duration::from_secs(300);
/// Time without a daemon after which a function process exits.
const GRACE: Duration = Duration::from_secs(600);
/// Maximum number of functions with metrics.
const MAX_SHOWN_FUNCTIONS: usize = 1000;

/// Returns the egress settings of functions: the private addresses of `options`, and the API
/// through `connector`.
pub fn egress(
    options: &NetworkOptions,
    connector: Arc<dyn ControlPlaneConnector>,
) -> EgressSettings {
    EgressSettings {
        is_off: options.mode == FeatureMode::Off,
        granted: options.allow_private.clone(),
        control_plane: Some(connector),
        ..EgressSettings::default()
    }
}

/// Opens the functions of a host. Fails if the kernel does not support the reset mode.
pub async fn open(
    host: &Host,
    cgroups: Option<Cgroups>,
    egress: EgressSettings,
    reset: SlotReset,
) -> anyhow::Result<Functions> {
    page_scan::check_reset(reset)?;
    let programs = host.programs();
    // Functions are optional, so the daemon starts without their program.
    let program = programs.functions.clone();
    if let Err(e) = &program {
        tracing::info!(reason = %e, "functions disabled");
    }
    let settings = FunctionHostSettings {
        directory: host.home().path().join(DIRECTORY),
        program: program.ok(),
        jailed: true,
        cgroups,
        limits: TenantLimits {
            reset,
            ..TenantLimits::default()
        },
        compile: CompileLimits::default(),
        idle: IDLE,
        grace: GRACE,
        egress,
    };
    // The call blocks while it waits for function processes that do not respond.
    Ok(tokio::task::spawn_blocking(|| Functions::open(settings)).await?)
}

/// Shares the modules of functions with other hosts through the store.
pub async fn share(functions: &Functions, remote: Arc<RemoteStore>) -> anyhow::Result<()> {
    let functions = functions.clone();
    // The call blocks while it reads a file for each module.
    let result = tokio::task::spawn_blocking(move || functions.share_modules(remote)).await?;
    result.context("cannot share the modules of functions")
}

/// Forwards requests to functions. Request and response heads are rewritten as for sandboxes.
#[derive(Debug)]
pub struct FunctionGateway(pub Functions);

impl FunctionInvoker for FunctionGateway {
    fn invoke(&self, call: FunctionCall) -> Invoking<'_> {
        Box::pin(async move {
            let id = RequestId::new();
            let result = self.forward(call, &id).await;
            let mut response = result.unwrap_or_else(|e| ApiError::from(e).into_response());
            // The listener reports this request id instead of the client's.
            response.extensions_mut().insert(id);
            response
        })
    }
}

impl FunctionGateway {
    /// Passes a request to the process of a function, and rewrites the headers of request and
    /// response.
    async fn forward(&self, call: FunctionCall, id: &RequestId) -> Result<Response, FunctionError> {
        let prefix = call.prefix.as_deref();
        let (mut parts, body) = call.request.into_parts();
        let host = requested_host(&parts);
        rewrite(&mut parts, &host, prefix, id);
        let body = body.map_err(BoxError::from).boxed_unsync();
        let request = Request::from_parts(parts, body);
        let response = self.0.send(&call.record, request).await?;
        let (mut head, body) = response.into_parts();
        head.version = Version::HTTP_11;
        confine_answer(&mut head.headers, prefix, &host, true);
        head.headers.insert(X_REQUEST_ID.clone(), id.value());
        // The permit is held until the body was sent: a streaming response is in flight until then.
        let body = GuardedBody::new(body, call.permit);
        Ok(Response::from_parts(head, Body::new(body)))
    }
}

/// Converts the head of a client's request to the head of the request to the function.
fn rewrite(parts: &mut Parts, host: &str, prefix: Option<&str>, id: &RequestId) {
    let peer = parts.extensions.get::<Peer>().copied();
    let headers = &mut parts.headers;
    confine_function_request(headers);
    let mut set = |name: &'static str, value: &str| match HeaderValue::from_str(value) {
        // The client's own value must not pass, even if the new value is invalid.
        Ok(value) => drop(headers.insert(HeaderName::from_static(name), value)),
        Err(_) => drop(headers.remove(name)),
    };
    set("host", host);
    set("x-forwarded-host", host);
    set("x-request-id", id.as_str());
    let address = peer.map(|peer| peer.ip.to_string());
    set("x-forwarded-for", address.as_deref().unwrap_or("unknown"));
    let scheme = if peer.is_some_and(|peer| peer.tls) {
        "https"
    } else {
        "http"
    };
    set("x-forwarded-proto", scheme);
    if let Some(prefix) = prefix {
        set("x-forwarded-prefix", prefix);
    }
}

/// Returns the metrics of functions by public name.
pub fn figures(functions: &Functions) -> Vec<FigureFamily> {
    let mut all = functions.all_metrics();
    // Each function adds four series, so their number is bounded.
    all.truncate(MAX_SHOWN_FUNCTIONS);
    type Read = fn(&MetricsSnapshot) -> f64;
    let families: [(&'static str, &'static str, Read); 4] = [
        ("function_requests", "Requests to a function", |counts| {
            counts.requests as f64
        }),
        (
            "function_running",
            "Requests in flight to a function",
            |c| c.running as f64,
        ),
        (
            "function_failures",
            "Failed requests to a function",
            |counts| counts.faults.values().sum::<u64>() as f64,
        ),
        (
            "function_cpu_seconds",
            "Processor time of a function",
            |counts| counts.cpu_us as f64 / 1e6,
        ),
    ];
    let family = |(name, help, read): &(&'static str, &'static str, Read)| FigureFamily {
        name,
        help,
        label: "function",
        values: all
            .iter()
            .map(|(record, counts)| {
                let label = owner::label(record.owner.as_deref(), &record.name);
                (label, read(counts))
            })
            .collect(),
    };
    families.iter().map(family).collect()
}
