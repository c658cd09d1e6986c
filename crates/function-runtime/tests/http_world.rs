//! Tests for components of wasi:http/proxy.
#![allow(clippy::unwrap_used)]

use crate::support::{HTTP, TestTenant};
use jiffy_proto::function::FunctionLimits;

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
    // Each of the 20 requests writes a line. The last line has the number 19.
    let entries = tenant.logs("http", 19);
    assert_eq!(
        (entries.len(), entries[0].text.as_str()),
        (1, "a line of output\n")
    );
}

#[test]
fn an_outgoing_request_is_denied_without_allowed_hosts() {
    let tenant = TestTenant::start();
    tenant.deploy("http", HTTP, FunctionLimits::default());
    // A path that starts with `e` selects an outgoing request. The component traps unless the
    // request is denied.
    let answer = tenant.connect().get("http", "/elsewhere");
    assert_eq!(answer.text(), "hello from a component");
}

#[test]
fn a_failing_component_is_terminated_with_an_error_response() {
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
    // The response is endless, so it exceeds `response_bytes`.
    client.send(b"GET /long HTTP/1.1\r\nhost: f\r\njiffy-function: http\r\n\r\n");
    assert_eq!(
        client.response(),
        None,
        "the response must not look complete"
    );
    assert_eq!(tenant.connect().get("http", "/hello").status, 200);
}

#[test]
fn a_client_that_does_not_read_cannot_keep_a_guest_running() {
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
    // The client reads nothing, so the guest waits until `wall_ms` has passed.
    tenant.wait_for("http", |metrics| {
        metrics.faults.contains_key("function_timeout") && metrics.running == 0
    });
    assert!(
        client.response().is_none(),
        "the response must not look complete"
    );
}

#[test]
fn a_client_that_disconnects_during_a_response_terminates_its_guest() {
    let tenant = TestTenant::start();
    let limits = FunctionLimits {
        cpu_ms: 10_000,
        response_bytes: 64 << 20,
        ..FunctionLimits::default()
    };
    tenant.deploy("http", HTTP, limits);
    let mut client = tenant.connect();
    client.send(b"GET /long HTTP/1.1\r\nhost: f\r\njiffy-function: http\r\n\r\n");
    assert!(client.read_some() > 0);
    assert_eq!(tenant.metrics("http").running, 1);
    drop(client);
    tenant.wait_for("http", |metrics| metrics.running == 0);
    // The guest did not exit by itself.
    assert_eq!(tenant.metrics("http").faults.len(), 0);
    assert_eq!(tenant.connect().get("http", "/hello").status, 200);
}
