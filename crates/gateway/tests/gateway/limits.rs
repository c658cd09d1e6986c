//! Limits of the number, size and time of connections and requests.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use crate::support;

use axum::Router;
use axum::routing::any;
use jiffy_gateway::{GatewayConfig, GatewayLimits};
use std::time::Duration;
use support::client::{self, Http1, Raw, send_request};
use support::guest::Guests;
use support::{ID, Setup, collected, config, with_timeout};

/// Returns the settings of the other tests with changed limits.
fn limited(change: impl FnOnce(&mut GatewayLimits)) -> GatewayConfig {
    let mut config = config();
    change(&mut config.limits);
    config
}

/// Returns a sandbox whose server responds at once.
fn hello() -> Guests {
    Guests::one(ID, 3000, Router::new().fallback(any(|| async { "hello" })))
}

/// Returns a sandbox that never answers a request.
fn silent() -> Guests {
    let router = Router::new().fallback(any(|| async {
        std::future::pending::<()>().await;
    }));
    Guests::one(ID, 3000, router)
}

/// Returns the text of a request to the sandbox.
fn request(path: &str) -> String {
    format!(
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 3000\r\n\r\n"
    )
}

#[tokio::test]
async fn a_client_that_sends_its_request_too_slowly_is_disconnected() {
    let setup = Setup::with(
        limited(|limits| limits.head = Duration::from_millis(300)),
        &hello(),
        None,
    )
    .await;
    // The client sends nothing, half of the HTTP/2 preface, or half of a head.
    for sent in ["", "PRI * HTTP/2.0\r\n", "GET / HTTP/1.1\r\nHost: local"] {
        let mut raw = Raw::new(setup.address).await;
        raw.write_text(sent).await;
        let rest = raw.rest().await;
        assert!(!rest.contains(" 200 "), "{sent} {rest}");
    }
    // Sending byte by byte does not extend the timeout.
    let mut raw = Raw::new(setup.address).await;
    let slow_sender = async {
        use tokio::io::AsyncWriteExt;
        for byte in "GET / HTTP/1.1\r\nX: "
            .bytes()
            .chain(std::iter::repeat(b'x'))
        {
            if raw.0.write_all(&[byte]).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    with_timeout(slow_sender).await;
    // An earlier request does not extend the timeout either.
    let mut raw = Raw::new(setup.address).await;
    raw.write_text(&request("/")).await;
    raw.until("hello").await;
    raw.write_text("GET / HT").await;
    assert_eq!(raw.rest().await, "");
    // Three clients sent at most a part of a head. One sent it byte by byte, and one sent a part of
    // its second head.
    assert_eq!(setup.counters.totals().connections_timed_out, 5);
}

#[tokio::test]
async fn an_idle_connection_does_not_count_as_slow() {
    let config = limited(|limits| {
        limits.head = Duration::from_millis(200);
        limits.idle = Duration::from_millis(1500);
    });
    let setup = Setup::with(config, &hello(), None).await;
    let mut raw = Raw::new(setup.address).await;
    raw.write_text(&request("/")).await;
    raw.until("hello").await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    raw.write_text(&request("/")).await;
    raw.until("hello").await;
    let idle_since = std::time::Instant::now();
    assert_eq!(raw.rest().await, "", "the idle connection is closed");
    assert!(idle_since.elapsed() >= Duration::from_millis(1400));
}

#[tokio::test]
async fn a_silent_response_has_no_timeout() {
    let config = limited(|limits| {
        limits.head = Duration::from_millis(100);
        limits.idle = Duration::from_millis(100);
    });
    let (answer, answered) = tokio::sync::oneshot::channel::<()>();
    let answered = std::sync::Arc::new(tokio::sync::Mutex::new(Some(answered)));
    let router = Router::new().fallback(any(move || async move {
        let answered = answered.lock().await.take().unwrap();
        let _ = answered.await;
        "at last"
    }));
    let setup = Setup::with(config, &Guests::one(ID, 3000, router), None).await;
    let mut raw = Raw::new(setup.address).await;
    raw.write_text(&request("/")).await;
    // Wait for ten times the timeout of an idle connection.
    let early = tokio::time::timeout(Duration::from_secs(1), raw.until("at last")).await;
    assert!(early.is_err());
    answer.send(()).unwrap();
    raw.until("at last").await;
}

#[tokio::test]
async fn heads_are_bounded_in_lines_and_bytes() {
    let setup = Setup::new(&hello()).await;
    // The first request has too many lines, and the second one has too many bytes.
    let lines: String = (0..200).map(|i| format!("X-{i}: 1\r\n")).collect();
    let many = request("/").replace("\r\n\r\n", &format!("\r\n{lines}\r\n"));
    let long = request(&format!("/{}", "x".repeat(100_000)));
    for request in [many, long] {
        let mut raw = Raw::new(setup.address).await;
        raw.write_text(&request).await;
        let answer = raw.until("\r\n").await;
        assert!(
            answer.contains(" 431 ") || answer.contains(" 414 "),
            "{answer}"
        );
    }
    let fits = request("/").replace(
        "\r\n\r\n",
        &format!("\r\nX: {}\r\n\r\n", "x".repeat(30_000)),
    );
    let mut raw = Raw::new(setup.address).await;
    raw.write_text(&fits).await;
    assert!(raw.until("hello").await.contains(" 200 "));
}

#[tokio::test]
async fn the_head_of_a_response_is_bounded() {
    let guests = Guests::raw(ID, 3000, |mut stream| async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut buffer = [0; 4096];
        let _ = stream.read(&mut buffer).await;
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nX: ").await;
        while stream.write_all(&[b'x'; 4096]).await.is_ok() {}
    });
    let setup = Setup::new(&guests).await;
    let (status, text) = send_request(setup.address, client::get(3000, "/")).await;
    assert_eq!(status, 502, "{text}");
}

#[tokio::test]
async fn too_many_connections_are_rejected_with_503() {
    let setup = Setup::with(limited(|limits| limits.connections = 2), &silent(), None).await;
    let one = Raw::new(setup.address).await;
    let two = Raw::new(setup.address).await;
    setup.wait_for_counters(|t| t.connections_open == 2).await;
    let mut three = Raw::new(setup.address).await;
    three.write_text(&request("/")).await;
    let answer = three.rest().await;
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    assert!(
        answer.contains("\"code\":503") && answer.contains("Retry-After"),
        "{answer}"
    );
    drop(one);
    setup.wait_for_counters(|t| t.connections_open == 1).await;
    let mut four = Http1::new(setup.address).await;
    // No server listens on port 3001. The error shows that the connection was accepted.
    let answer = four.send(client::get(3001, "/")).await;
    assert_eq!(answer.status(), 502);
    drop(two);
}

#[tokio::test]
async fn too_many_requests_are_rejected_with_503() {
    let config = limited(|limits| {
        limits.exchanges = 2;
        limits.exchanges_per_sandbox = 1;
    });
    let guests = silent();
    guests.add("other", jiffy_gateway::SandboxAccess::default());
    let setup = Setup::with(config, &guests, None).await;
    let mut one = Raw::new(setup.address).await;
    one.write_text(&request("/")).await;
    setup.wait_for_counters(|t| t.guest_connections == 1).await;
    let (status, text) = send_request(setup.address, client::get(3000, "/")).await;
    assert_eq!(status, 503);
    assert!(
        text.contains("to this sandbox") && text.contains(ID),
        "{text}"
    );
    guests.program("other", 3000, |stream| async move {
        std::future::pending::<()>().await;
        drop(stream);
    });
    let mut two = Raw::new(setup.address).await;
    two.write_text(&request("/").replace(ID, "other")).await;
    setup.wait_for_counters(|t| t.exchanges_open == 2).await;
    let (status, text) = send_request(setup.address, client::get(3000, "/")).await;
    assert_eq!(status, 503);
    assert!(text.contains("Too many requests are in flight"), "{text}");
    drop((one, two));
    setup.wait_for_counters(|t| t.exchanges_open == 0).await;
    assert_eq!(setup.counters.totals().limited, 2);
}

#[tokio::test]
async fn a_sandbox_that_does_not_open_in_time_is_reported() {
    let config = limited(|limits| limits.open = Duration::from_millis(100));
    let guests = hello();
    guests.stall();
    let setup = Setup::with(config, &guests, None).await;
    let (status, text) = send_request(setup.address, client::get(3000, "/")).await;
    assert_eq!(status, 502);
    assert!(text.contains("timed out"), "{text}");
}

#[tokio::test]
async fn at_shutdown_requests_in_flight_finish() {
    let (answer, answered) = tokio::sync::oneshot::channel::<()>();
    let answered = std::sync::Arc::new(tokio::sync::Mutex::new(Some(answered)));
    let router = Router::new().fallback(any(move || async move {
        let answered = answered.lock().await.take().unwrap();
        let _ = answered.await;
        "finished"
    }));
    let mut setup = Setup::new(&Guests::one(ID, 3000, router)).await;
    let mut http = Http1::new(setup.address).await;
    let idle = Raw::new(setup.address).await;
    let pending_response = tokio::spawn(async move { http.send(client::get(3000, "/")).await });
    setup.wait_for_counters(|t| t.guest_connections == 1).await;
    setup.stop();
    let mut idle = idle;
    idle.rest().await;
    answer.send(()).unwrap();
    let answer = with_timeout(pending_response).await.unwrap();
    assert_eq!(collected(answer.into_body()).await, "finished");
    setup.ended().await;
}

#[tokio::test]
async fn at_shutdown_unfinished_requests_are_aborted() {
    let guests = silent();
    let program = |mut stream: tokio::net::UnixStream| async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut buffer = [0; 4096];
        let _ = stream.read(&mut buffer).await;
        let _ = stream
            .write_all(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
            )
            .await;
        let _ = stream.read(&mut buffer).await;
    };
    guests.program(ID, 3001, program);
    let config = limited(|limits| limits.drain = Duration::from_millis(100));
    let mut setup = Setup::with(config, &guests, None).await;
    let mut waiting = Raw::new(setup.address).await;
    waiting.write_text(&request("/")).await;
    let mut upgraded = Raw::new(setup.address).await;
    let upgrade = request("/").replace("3000", "3001");
    let upgrade = upgrade.replace("\r\n\r\n", "\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n");
    upgraded.write_text(&upgrade).await;
    setup
        .wait_for_counters(|t| t.guest_connections == 2 && t.upgraded == 1)
        .await;
    setup.stop();
    setup.ended().await;
    waiting.rest().await;
    upgraded.rest().await;
    with_timeout(async {
        while guests.open_count() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}
