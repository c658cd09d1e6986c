//! Tests of the export of traces, with a collector in this process.

use super::{TraceExport, api_span};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use hyper::Request;
use jiffy_engine_api::steps::{self, OperationSteps};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use std::sync::atomic::Ordering;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tracing::Instrument;
use tracing::field::Empty;
use tracing_subscriber::layer::SubscriberExt;

type BodySender = mpsc::UnboundedSender<Bytes>;

/// Collector that stores the bodies of requests.
async fn collector() -> (String, mpsc::UnboundedReceiver<Bytes>) {
    let (sender, received) = mpsc::unbounded_channel();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let receive = |State(sender): State<BodySender>, body: Bytes| async move {
        sender.send(body).unwrap();
    };
    let routes = Router::new().route("/v1/traces", post(receive));
    tokio::spawn(async move { axum::serve(listener, routes.with_state(sender)).await });
    (url, received)
}

fn text(value: Option<Value>) -> String {
    match value {
        Some(Value::StringValue(text)) => text,
        other => panic!("{other:?} is no text"),
    }
}

/// Returns the sorted attributes of a span as texts.
fn attributes(span: &Span) -> Vec<(String, String)> {
    let fields = span.attributes.iter().cloned();
    let mut fields: Vec<_> = fields
        .map(|field| (field.key, text(field.value.and_then(|v| v.value))))
        .collect();
    fields.sort();
    fields
}

#[tokio::test]
async fn the_collector_receives_operations_and_steps_below_the_clients_span() {
    let (url, mut received) = collector().await;
    let export = TraceExport::start(&url).unwrap();
    let subscriber = tracing_subscriber::registry().with(export.layer());
    let _default = tracing::subscriber::set_default(subscriber);
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let request = Request::post("/sandboxes")
        .header("traceparent", format!("00-{trace}-b7ad6b7169203331-01"))
        .body(())
        .unwrap();
    let operation = async {
        let _step = steps::begin("restore");
        tracing::info!("an event is not exported");
        tracing::Span::current().record("error", "failed");
    };
    let operation = async {
        let span = tracing::info_span!(
            "operation",
            operation = "create",
            sandbox = "s1",
            secret = "hunter2",
            error = Empty,
        );
        let work = OperationSteps::new().scope(operation);
        work.instrument(span).await;
        // Spans of other names are not exported.
        tracing::info_span!("request", client = "192.0.2.1").in_scope(|| {});
    };
    operation.instrument(api_span(&request)).await;
    let counters = export.counters.clone();
    export.finish().await;
    assert_eq!(counters.exported.load(Ordering::Relaxed), 3);
    assert_eq!(counters.dropped.load(Ordering::Relaxed), 0);

    let body = received.recv().await.unwrap();
    let message = ExportTraceServiceRequest::decode(body).unwrap();
    let resource = message.resource_spans.into_iter().next().unwrap();
    let service = resource.resource.unwrap().attributes;
    let service = service.into_iter().find(|f| f.key == "service.name");
    let service = service.unwrap().value.and_then(|v| v.value);
    assert_eq!(text(service), "jiffy");
    let spans = &resource.scope_spans[0].spans;
    let named = |name: &str| spans.iter().find(|span| span.name == name).unwrap();
    let (api, create, restore) = (named("api"), named("create"), named("restore"));
    assert_eq!(spans.len(), 3);
    for span in spans {
        let id: String = span.trace_id.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(id, trace);
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano && span.events.is_empty());
    }
    assert_eq!(api.parent_span_id, 0xb7ad_6b71_6920_3331_u64.to_be_bytes());
    assert_eq!(create.parent_span_id, api.span_id);
    assert_eq!(restore.parent_span_id, create.span_id);
    let pairs = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
        let pairs = pairs.iter();
        pairs
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    };
    assert_eq!(attributes(api), pairs(&[("method", "POST")]));
    assert_eq!(attributes(restore), pairs(&[("step", "restore")]));
    let expected = [
        ("error", "failed"),
        ("operation", "create"),
        ("sandbox", "s1"),
    ];
    assert_eq!(attributes(create), pairs(&expected));
    assert_eq!(create.status.as_ref().unwrap().message, "failed");
}

#[tokio::test]
async fn spans_are_dropped_and_counted_without_a_collector() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let export = TraceExport::start(&url).unwrap();
    let subscriber = tracing_subscriber::registry().with(export.layer());
    let _default = tracing::subscriber::set_default(subscriber);
    let count = super::MAX_QUEUED_SPANS + 100;
    // The export task does not run during the loop, so that the queue becomes full.
    for _ in 0..count {
        tracing::info_span!("operation", operation = "create").in_scope(|| {});
    }
    let counters = export.counters.clone();
    assert_eq!(counters.dropped.load(Ordering::Relaxed), 100);
    export.finish().await;
    let dropped = counters.dropped.load(Ordering::Relaxed);
    assert_eq!(dropped, u64::try_from(count).unwrap());
}
