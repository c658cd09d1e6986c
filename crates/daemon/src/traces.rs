//! Export of traces to an OpenTelemetry collector: operations, their steps, and the API requests
//! that cause them.
//!
//! The export never delays an operation. Finished spans are put into a bounded queue, and are
//! dropped and counted if the queue is full.

mod collector;
#[cfg(test)]
mod tests;

use anyhow::Context;
use collector::CollectorClient;
use hyper::{Method, Request};
use jiffy_gateway::RequestId;
use jiffy_sandbox_manager::{Figure, Sandboxes};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Status, TracerProvider};
use opentelemetry::{InstrumentationScope, Key, KeyValue};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_otlp::{Protocol, RetryPolicy, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracerProvider, Span, SpanData, SpanExporter, SpanProcessor};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::filter::FilterFn;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, filter};

/// Maximum number of finished spans in the queue.
const MAX_QUEUED_SPANS: usize = 8192;
/// Maximum number of spans in one request to the collector.
const MAX_BATCH_SPANS: usize = 512;
/// Time for which spans are collected before they are sent.
const BATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of a request to the collector.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for the export of the last spans at shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Names of the spans that are exported.
const EXPORTED_SPANS: [&str; 4] = [API_SPAN, "operation", "child", "step"];
/// Name of the span of a request to the API.
const API_SPAN: &str = "api";
/// Fields of spans that are exported. Other fields may contain data of clients.
const EXPORTED_FIELDS: [&str; 6] = [
    "operation",
    "sandbox",
    "step",
    "error",
    "method",
    "request_id",
];

/// Returns the span of a request to the API. Its parent is the client's span in the header
/// `traceparent`. The span is disabled without an export of traces, and for read-only requests.
pub fn api_span<B>(request: &Request<B>) -> tracing::Span {
    // Reads are frequent and start no operation.
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return tracing::Span::none();
    }
    let span = tracing::trace_span!(
        API_SPAN,
        method = request.method().as_str(),
        request_id = tracing::field::Empty,
    );
    if !span.is_disabled() {
        if let Some(id) = request.extensions().get::<RequestId>() {
            span.record("request_id", id.as_str());
        }
        let parent = TraceContextPropagator::new().extract(&HeaderExtractor(request.headers()));
        // The error is ignored: a span that only the log enables has no trace context.
        let _ = span.set_parent(parent);
    }
    span
}

/// Running export of traces.
#[derive(Debug)]
pub struct TraceExport {
    counters: Arc<ExportCounters>,
    stop: CancellationToken,
    task: JoinHandle<()>,
    provider: SdkTracerProvider,
}

/// Numbers of spans since the start. They are read for metrics only, so relaxed access suffices.
#[derive(Debug, Default)]
struct ExportCounters {
    exported: AtomicU64,
    dropped: AtomicU64,
}

impl TraceExport {
    /// Starts the export to the collector at `url`. Must be called inside a runtime.
    ///
    /// # Errors
    /// Fails if `url` is not an address of the form `http://HOST[:PORT][/PATH]`.
    pub fn start(url: &str) -> anyhow::Result<Self> {
        let client = CollectorClient::new(url)?;
        let mut exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(format!("{}/v1/traces", url.trim_end_matches('/')))
            .with_timeout(EXPORT_TIMEOUT)
            // Spans of a failed request are dropped: a retry would delay later ones.
            .with_retry_policy(RetryPolicy::disabled())
            .build()
            .context("cannot export traces")?;
        let resource = Resource::builder_empty()
            .with_attribute(KeyValue::new("service.name", "jiffy"))
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .build();
        exporter.set_resource(&resource);
        let (sender, queue) = mpsc::channel(MAX_QUEUED_SPANS);
        let (counters, stop) = (
            Arc::new(ExportCounters::default()),
            CancellationToken::new(),
        );
        let processor = QueueProcessor {
            sender,
            counters: counters.clone(),
        };
        let provider = SdkTracerProvider::builder()
            .with_span_processor(processor)
            .with_resource(resource)
            .build();
        let task = tokio::spawn(export(queue, exporter, counters.clone(), stop.clone()));
        Ok(Self {
            counters,
            stop,
            task,
            provider,
        })
    }

    /// Returns the layer that forwards spans to the export.
    pub fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: tracing::Subscriber + for<'a> LookupSpan<'a>,
    {
        let scope = InstrumentationScope::builder("jiffy").build();
        let exported: FilterFn = filter::filter_fn(|metadata| {
            metadata.is_span()
                && metadata.target().starts_with("jiffy")
                && EXPORTED_SPANS.contains(&metadata.name())
        });
        tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer_with_scope(scope))
            // The location is not recorded, because the function `exported` would remove its
            // fields.
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_level(false)
            .with_tracked_inactivity(false)
            // No code of the daemon uses the current OpenTelemetry context.
            .with_context_activation(false)
            .with_filter(exported)
    }

    /// Adds the counts of exported and dropped spans to the metrics of the host.
    pub fn add_metrics(&self, sandboxes: &Sandboxes) {
        let counters = self.counters.clone();
        sandboxes.figures().add_figures(move || {
            let figure = |name, help, count: &AtomicU64| Figure {
                name,
                help,
                counter: true,
                value: count.load(Ordering::Relaxed) as f64,
            };
            vec![
                figure(
                    "trace_spans_exported",
                    "Spans received by the collector",
                    &counters.exported,
                ),
                figure(
                    "trace_spans_dropped",
                    "Spans dropped because the queue was full or the collector failed",
                    &counters.dropped,
                ),
            ]
        });
    }

    /// Exports the spans in the queue and stops the export.
    pub async fn finish(self) {
        self.stop.cancel();
        if tokio::time::timeout(FLUSH_TIMEOUT, self.task)
            .await
            .is_err()
        {
            tracing::warn!("timed out exporting the last traces");
        }
    }
}

/// Puts finished spans into the queue.
#[derive(Debug)]
struct QueueProcessor {
    sender: mpsc::Sender<SpanData>,
    counters: Arc<ExportCounters>,
}

impl SpanProcessor for QueueProcessor {
    fn on_start(&self, _: &mut Span, _: &opentelemetry::Context) {}

    fn on_end(&self, span: SpanData) {
        if span.span_context.is_sampled() && self.sender.try_send(exported(span)).is_err() {
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// Returns the span as the collector receives it: named after its operation or step, without fields
/// that are not exported, and with its error as its status.
fn exported(mut span: SpanData) -> SpanData {
    let is_exported = |key: &Key| EXPORTED_FIELDS.contains(&key.as_str());
    span.attributes.retain(|field| is_exported(&field.key));
    let value = |name: &str| {
        let field = span.attributes.iter().find(|f| f.key.as_str() == name);
        field.map(|field| field.value.as_str().into_owned())
    };
    if let Some(error) = value("error") {
        span.status = Status::error(error);
    }
    if let Some(name) = value("step").or_else(|| value("operation")) {
        span.name = name.into();
    }
    span
}

/// Exports spans in batches until `stop` is cancelled, and then the remaining spans of the queue.
async fn export(
    mut queue: mpsc::Receiver<SpanData>,
    exporter: opentelemetry_otlp::SpanExporter,
    counters: Arc<ExportCounters>,
    stop: CancellationToken,
) {
    loop {
        let mut batch = Vec::new();
        let received = tokio::select! {
            // Cancel-safe: no span is lost if `stop` is cancelled at the same time.
            received = queue.recv_many(&mut batch, MAX_BATCH_SPANS) => received,
            () = stop.cancelled() => 0,
        };
        // Collect further spans for the same request.
        if received > 0 {
            tokio::select! {
                () = tokio::time::sleep(BATCH_INTERVAL) => {}
                () = stop.cancelled() => {}
            }
        }
        while batch.len() < MAX_BATCH_SPANS
            && let Ok(span) = queue.try_recv()
        {
            batch.push(span);
        }
        // The batch is empty only if `stop` is cancelled and the queue is empty.
        if batch.is_empty() {
            return;
        }
        let count = u64::try_from(batch.len()).unwrap_or(u64::MAX);
        let result = tokio::time::timeout(EXPORT_TIMEOUT, exporter.export(batch)).await;
        let counter = match result {
            Ok(Ok(())) => &counters.exported,
            Ok(Err(error)) => {
                tracing::debug!(%error, count, "cannot export spans");
                &counters.dropped
            }
            Err(_) => {
                tracing::debug!(count, "timed out exporting spans");
                &counters.dropped
            }
        };
        counter.fetch_add(count, Ordering::Relaxed);
    }
}
