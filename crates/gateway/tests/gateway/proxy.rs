//! Requests to guests and their responses.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use crate::support;

use axum::Router;
use axum::extract::Request;
use axum::response::IntoResponse;
use axum::routing::any;
use jiffy_gateway::{GatewayConfig, SandboxAccess};
use std::sync::{Arc, Mutex};
use support::client::{self, Http1, Http2, Raw, body, send_request, to};
use support::guest::{Guests, answering};
use support::{ID, Setup, collected, config, with_timeout};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

/// Guest that responds with the head that it received.
fn echo_request() -> Router {
    Router::new().fallback(any(|request: Request| async move {
        let mut lines = vec![format!("{} {}", request.method(), request.uri())];
        for (name, value) in request.headers() {
            lines.push(format!("{name}: {}", value.to_str().unwrap()));
        }
        lines.join("\n")
    }))
}

#[tokio::test]
async fn a_request_without_a_sandbox_goes_to_the_control_plane() {
    let setup = Setup::new(&Guests::default()).await;
    let request = |uri: &str| {
        hyper::Request::builder()
            .uri(uri)
            .header("host", "localhost")
            .body(body(""))
            .unwrap()
    };
    assert_eq!(
        send_request(setup.address, request("/health")).await,
        (200, "control plane".to_owned())
    );
    assert_eq!(
        send_request(setup.address, request("/v2/sandboxes?x"))
            .await
            .1,
        "GET /v2/sandboxes?x for 127.0.0.1"
    );
    assert_eq!(setup.counters.totals().control_plane, 2);
}

#[tokio::test]
async fn a_guest_sees_its_own_path_and_the_client() {
    let setup = Setup::new(&Guests::one(ID, 3000, echo_request())).await;
    let request = hyper::Request::builder()
        .uri(format!("/sandboxes/{ID}/proxy/3000/a/b?c=d"))
        .header("host", "localhost:99")
        .header("x-forwarded-for", "6.6.6.6")
        .header("x-forwarded-prefix", "/forged")
        .header("forwarded", "for=6.6.6.6")
        .header("connection", "keep-alive, x-secret")
        .header("x-secret", "1")
        .header("keep-alive", "timeout=5")
        .header("te", "gzip")
        .header("proxy-authorization", "x")
        .header("e2b-traffic-access-token", "x")
        .header("x-request-id", "mine-1")
        .header("cookie", "a=b; jiffy_link_3000=x")
        .header("accept-encoding", "gzip")
        .body(body(""))
        .unwrap();
    let answer = Http1::new(setup.address).await.send(request).await;
    assert_eq!(answer.headers().get("x-request-id").unwrap(), "mine-1");
    let text = collected(answer.into_body()).await;
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    let id = format!("e2b-sandbox-id: {ID}");
    let prefix = format!("x-forwarded-prefix: /sandboxes/{ID}/proxy/3000");
    assert_eq!(
        lines,
        [
            "GET /a/b?c=d",
            "accept-encoding: gzip",
            "cookie: a=b",
            &id,
            "e2b-sandbox-port: 3000",
            "host: localhost:99",
            "x-forwarded-for: 127.0.0.1",
            "x-forwarded-host: localhost:99",
            &prefix,
            "x-forwarded-proto: http",
            "x-request-id: mine-1",
        ]
    );
}

#[tokio::test]
async fn the_host_can_be_masked_and_a_trusted_proxy_is_believed() {
    let guests = Guests::one(ID, 3000, echo_request());
    guests.add(
        ID,
        SandboxAccess {
            mask_request_host: Some("localhost:${PORT}".to_owned()),
            ..SandboxAccess::default()
        },
    );
    let config = GatewayConfig {
        trusted_proxies: vec!["127.0.0.1".parse().unwrap()],
        ..config()
    };
    let setup = Setup::with(config, &guests, None).await;
    let request = to(3000, "/").header("x-forwarded-for", "192.0.2.7");
    let (_, text) = send_request(setup.address, request.body(body("")).unwrap()).await;
    assert!(text.contains("\nhost: localhost:3000"), "{text}");
    assert!(
        text.contains("\nx-forwarded-for: 192.0.2.7, 127.0.0.1"),
        "{text}"
    );
}

#[tokio::test]
async fn a_guests_response_does_not_affect_other_guests() {
    let answer = || {
        (
            [
                ("location", "/login"),
                ("set-cookie", "a=b; Path=/; Domain=jiffy.example"),
                ("strict-transport-security", "max-age=1; includeSubDomains"),
                ("alt-svc", "h3=\":1\""),
                ("connection", "x-hop"),
                ("x-hop", "1"),
                ("x-stays", "1"),
            ],
            "hi",
        )
            .into_response()
    };
    let setup = Setup::new(&Guests::one(ID, 3000, answering(answer))).await;
    let prefix = format!("/sandboxes/{ID}/proxy/3000");
    let request = hyper::Request::builder()
        .uri(format!("{prefix}/"))
        .header("host", "localhost")
        .body(body(""))
        .unwrap();
    let answer = Http1::new(setup.address).await.send(request).await;
    let header = |name: &str| answer.headers().get(name).map(|v| v.to_str().unwrap());
    assert_eq!(header("location"), Some(&format!("{prefix}/login")[..]));
    assert_eq!(
        header("set-cookie"),
        Some(&format!("a=b; Path={prefix}/")[..])
    );
    assert!(
        header("content-security-policy")
            .unwrap()
            .starts_with("sandbox")
    );
    for gone in [
        "strict-transport-security",
        "alt-svc",
        "x-hop",
        "connection",
    ] {
        assert_eq!(header(gone), None, "{gone}");
    }
    assert_eq!(header("x-stays"), Some("1"));
    let request = client::get(3000, "/");
    let answer = Http1::new(setup.address).await.send(request).await;
    let header = |name: &str| answer.headers().get(name).map(|v| v.to_str().unwrap());
    assert_eq!(header("location"), Some("/login"));
    assert_eq!(header("set-cookie"), Some("a=b; Path=/"));
    assert_eq!(header("content-security-policy"), None);
}

#[tokio::test]
async fn a_path_without_trailing_slash_is_redirected() {
    let setup = Setup::new(&Guests::one(ID, 3000, echo_request())).await;
    let path = format!("/sandboxes/{ID}/proxy/3000");
    let request = hyper::Request::builder()
        .uri(format!("{path}?a=b"))
        .header("host", "localhost")
        .body(body(""))
        .unwrap();
    let answer = Http1::new(setup.address).await.send(request).await;
    assert_eq!(answer.status(), 308);
    assert_eq!(
        answer.headers().get("location").unwrap().to_str().unwrap(),
        format!("{path}/?a=b")
    );
}

#[tokio::test]
async fn a_websocket_passes_bytes_both_ways_and_preserves_half_close() {
    let (request_sender, request_receiver) = oneshot::channel();
    let request_sender = Arc::new(Mutex::new(Some(request_sender)));
    let guests = Guests::raw(ID, 3000, move |mut stream| {
        let request_sender = request_sender.lock().unwrap().take().unwrap();
        async move {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            stream
                .write_all(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: x\r\n\r\nfirst")
                .await
                .unwrap();
            let mut all = Vec::new();
            stream.read_to_end(&mut all).await.unwrap();
            // The client has finished sending, but the guest still sends.
            stream.write_all(b" and last").await.unwrap();
            let _ = request_sender.send((String::from_utf8(head).unwrap(), all));
        }
    });
    let setup = Setup::new(&guests).await;
    let mut raw = Raw::new(setup.address).await;
    raw.write_text(&format!(
        "GET /chat HTTP/1.1\r\nHost: 3000-{ID}.localhost\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\n\r\nearly"
    ))
    .await;
    let answer = raw.until("\r\n\r\nfirst").await;
    assert!(answer.starts_with("HTTP/1.1 101"), "{answer}");
    assert!(
        answer.to_lowercase().contains("upgrade: websocket"),
        "{answer}"
    );
    assert!(
        answer.to_lowercase().contains("sec-websocket-accept: x"),
        "{answer}"
    );
    raw.write_text(" late").await;
    raw.0.shutdown().await.unwrap();
    assert_eq!(raw.rest().await, " and last");
    let (head, all) = with_timeout(request_receiver).await.unwrap();
    assert!(head.starts_with("GET /chat HTTP/1.1"), "{head}");
    // Header names have the client's spelling.
    assert!(
        head.contains("Upgrade: websocket") && head.contains("Connection: upgrade"),
        "{head}"
    );
    assert_eq!(all, b"early late");
    setup
        .wait_for_counters(|t| t.exchanges_open == 0 && t.connections_open == 0)
        .await;
    let totals = setup.counters.totals();
    // The guest has received `early late`, and the client has received `first and last`.
    assert_eq!((totals.bytes_to_guests, totals.bytes_to_clients), (10, 14));
}

#[tokio::test]
async fn an_upgrade_that_the_guest_declines_is_an_ordinary_response() {
    let setup = Setup::new(&Guests::one(ID, 3000, echo_request())).await;
    let request = to(3000, "/")
        .header("connection", "upgrade")
        .header("upgrade", "websocket")
        .body(body(""))
        .unwrap();
    let (status, text) = send_request(setup.address, request).await;
    assert_eq!(status, 200);
    assert!(text.contains("upgrade: websocket"), "{text}");
}

#[tokio::test]
async fn a_body_is_requested_only_when_the_guest_reads_it() {
    let router = Router::new().fallback(any(|body: String| async move { body }));
    let setup = Setup::new(&Guests::one(ID, 3000, router)).await;
    let head = |port: u16| {
        format!(
            "POST / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: {port}\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
        )
    };
    let mut raw = Raw::new(setup.address).await;
    raw.write_text(&head(3000)).await;
    assert_eq!(raw.until("\r\n\r\n").await, "HTTP/1.1 100 Continue\r\n\r\n");
    raw.write_text("hello").await;
    let answer = raw.until("hello").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // No server listens on this port, so the body is not requested.
    let mut raw = Raw::new(setup.address).await;
    raw.write_text(&head(3001)).await;
    let answer = raw.until("\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
}

#[tokio::test]
async fn a_head_request_has_the_length_and_no_body() {
    let router = Router::new().fallback(any(|| async { "hello" }));
    let setup = Setup::new(&Guests::one(ID, 3000, router)).await;
    let mut raw = Raw::new(setup.address).await;
    for _ in 0..2 {
        let request = format!(
            "HEAD / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {ID}\r\n\
             E2b-Sandbox-Port: 3000\r\n\r\n"
        );
        raw.write_text(&request).await;
        let answer = raw.until("\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(
            answer.to_lowercase().contains("content-length: 5"),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn http2_without_tls_is_served_too() {
    let setup = Setup::new(&Guests::one(ID, 3000, echo_request())).await;
    let stream = TcpStream::connect(setup.address).await.unwrap();
    let mut http = Http2::over(stream).await;
    let request = |path: &str| {
        hyper::Request::builder()
            .uri(format!("http://3000-{ID}.jiffy.example{path}"))
            .header("cookie", "a=1")
            .header("cookie", "b=2")
            .body(body(""))
            .unwrap()
    };
    let mut other = Http2 {
        sender: http.sender.clone(),
    };
    let (one, two) = tokio::join!(http.send(request("/1")), other.send(request("/2")));
    assert_eq!(one.version(), hyper::Version::HTTP_2);
    let one = collected(one.into_body()).await;
    assert!(one.starts_with("GET /1"), "{one}");
    assert!(
        one.contains(&format!("host: 3000-{ID}.jiffy.example")),
        "{one}"
    );
    assert!(one.contains("cookie: a=1; b=2"), "{one}");
    assert!(collected(two.into_body()).await.starts_with("GET /2"));
}

#[tokio::test]
async fn header_names_retain_their_spelling_in_both_directions() {
    let (head_sender, mut head_receiver) = mpsc::channel(1);
    let guests = Guests::raw(ID, 3000, move |mut stream| {
        let head_sender = head_sender.clone();
        async move {
            let mut head = vec![0; 16 * 1024];
            let mut length = 0;
            while !head[..length].ends_with(b"\r\n\r\n") {
                length += stream.read(&mut head[length..]).await.unwrap();
            }
            head.truncate(length);
            head_sender
                .send(String::from_utf8(head).unwrap())
                .await
                .unwrap();
            let answer = "HTTP/1.1 200 OK\r\nX-Ratelimit-LEFT: 1\r\nContent-Length: 0\r\n\r\n";
            stream.write_all(answer.as_bytes()).await.unwrap();
            // Wait until the gateway has read the response.
            let _ = stream.read(&mut [0]).await;
        }
    });
    let setup = Setup::new(&guests).await;
    let mut raw = Raw::new(setup.address).await;
    raw.write_text(&format!(
        "GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 3000\r\n\
         X-API-Token: a\r\nSOAPAction: b\r\nx-lower: c\r\nX-FORWARDED-FOR: 9.9.9.9\r\n\r\n"
    ))
    .await;
    let head = with_timeout(head_receiver.recv()).await.unwrap();
    for line in [
        "\r\nHost: localhost",
        "\r\nX-API-Token: a",
        "\r\nSOAPAction: b",
        "\r\nx-lower: c",
    ] {
        assert!(head.contains(line), "{line:?} in {head}");
    }
    // The gateway's own headers take precedence, in any spelling.
    assert!(!head.contains("9.9.9.9"), "{head}");
    let answer = raw.until("\r\n\r\n").await;
    assert!(answer.contains("\r\nX-Ratelimit-LEFT: 1\r\n"), "{answer}");
    // A masked host is spelled as by E2B's proxy, even if the client uses lower case.
    let masked = SandboxAccess {
        mask_request_host: Some("localhost:${PORT}".to_owned()),
        ..SandboxAccess::default()
    };
    guests.add(ID, masked);
    let mut raw = Raw::new(setup.address).await;
    raw.write_text(&format!(
        "GET / HTTP/1.1\r\nhost: localhost\r\ne2b-sandbox-id: {ID}\r\n\
         e2b-sandbox-port: 3000\r\n\r\n"
    ))
    .await;
    let head = with_timeout(head_receiver.recv()).await.unwrap();
    assert!(head.contains("\r\nHost: localhost:3000\r\n"), "{head}");
    raw.until("\r\n\r\n").await;
}
