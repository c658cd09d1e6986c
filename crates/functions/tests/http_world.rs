//! Components of wasi:http/proxy.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use jiffy_proto::function::FunctionLimits;
use jiffy_proto::function::MetricsSnapshot;
use jiffy_proto::function::{ControlRequest, ControlResponse};
use std::time::{Duration, Instant};
use support::{HTTP, TestTenant};

fn metrics(tenant: &TestTenant) -> MetricsSnapshot {
    let order = ControlRequest::Metrics {
        function: "http".to_owned(),
    };
    match tenant.process.order(&order).unwrap() {
        ControlResponse::Metrics { metrics } => metrics,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_component_answers_and_its_output_is_in_the_log() {
    let tenant = TestTenant::start();
    tenant.deploy("http", HTTP, FunctionLimits::default());
    let mut client = tenant.connect();
    for _ in 0..20 {
        assert_eq!(
            client.get("http", "/hello").text(),
            "hello from a component"
        );
    }
    let order = ControlRequest::Logs {
        function: "http".to_owned(),
        sequence: 19,
    };
    let ControlResponse::Logs { entries } = tenant.process.order(&order).unwrap() else {
        panic!("no logs");
    };
    assert_eq!(
        (entries.len(), entries[0].text.as_str()),
        (1, "a line of output\n")
    );
}

#[test]
fn a_request_to_elsewhere_is_denied() {
    let tenant = TestTenant::start();
    tenant.deploy("http", HTTP, FunctionLimits::default());
    let answer = tenant.connect().get("http", "/elsewhere");
    assert_eq!(answer.text(), "hello from a component");
}

#[test]
fn a_component_that_fails_is_ended_with_its_answer() {
    let tenant = TestTenant::start();
    tenant.deploy("http", HTTP, FunctionLimits::default());
    let mut client = tenant.connect();
    for (path, status, code) in [
        ("/trap", 502, "function_trap"),
        ("/none", 502, "function_trap"),
        ("/spin", 504, "function_cpu"),
    ] {
        assert_eq!(
            client.get("http", path).fault(),
            (status, code.to_owned()),
            "{path}"
        );
        assert_eq!(client.get("http", "/hello").status, 200);
    }
}

#[test]
fn a_response_above_its_limit_is_reset() {
    let tenant = TestTenant::start();
    let limits = FunctionLimits {
        response_bytes: 1 << 20,
        cpu_ms: 5000,
        ..FunctionLimits::default()
    };
    tenant.deploy("http", HTTP, limits);
    let mut client = tenant.connect();
    client.send(b"GET /long HTTP/1.1\r\nhost: f\r\njiffy-function: http\r\n\r\n");
    assert_eq!(
        client.response(),
        None,
        "the response must not look complete"
    );
    assert_eq!(tenant.connect().get("http", "/hello").status, 200);
}

#[test]
fn a_client_that_does_not_read_cannot_keep_a_guest() {
    let tenant = TestTenant::start();
    let limits = FunctionLimits {
        wall_ms: 500,
        cpu_ms: 5000,
        response_bytes: 64 << 20,
        ..FunctionLimits::default()
    };
    tenant.deploy("http", HTTP, limits);
    let mut client = tenant.connect();
    client.send(b"GET /long HTTP/1.1\r\nhost: f\r\njiffy-function: http\r\n\r\n");
    let start = Instant::now();
    let ended = loop {
        let metrics = metrics(&tenant);
        if metrics.faults.contains_key("function_timeout") && metrics.running == 0 {
            break true;
        }
        if start.elapsed() > Duration::from_secs(20) {
            break false;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(ended, "{:?}", metrics(&tenant));
    assert!(
        client.response().is_none(),
        "the response must not look complete"
    );
}
