//! API keys: removed before requests reach guests; a revoked key ends its streams and links.

use crate::support;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::routing::any;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http_body_util::BodyExt;
use jiffy_gateway::{GatewayConfig, KnownCaller, LinkSigner};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use support::client::{Http1, Http2, Raw, body, get, send_request, to};
use support::guest::Guests;
use support::{ID, KEY, Setup, collected, config, with_timeout};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// API key of E2B's form.
const API_KEY: &str = "e2b_0123456789abcdef0123456789abcdef01234567";

/// Guest that responds with the headers that it received.
fn echo_request() -> Router {
    Router::new().fallback(any(|request: Request| async move {
        let format_header = |(name, value): (&axum::http::HeaderName, &axum::http::HeaderValue)| {
            format!("{name}: {}", value.to_str().unwrap())
        };
        let lines: Vec<String> = request.headers().iter().map(format_header).collect();
        lines.join("\n")
    }))
}

/// Returns headers in which clients send a key, and headers of the application.
fn shown() -> Vec<(&'static str, String)> {
    let basic = |text: String| format!("Basic {}", STANDARD.encode(text));
    vec![
        ("x-api-key", API_KEY.to_owned()),
        ("authorization", format!("Bearer {API_KEY}")),
        ("authorization", basic(format!("{API_KEY}:"))),
        ("authorization", basic(format!("user:{API_KEY}"))),
        ("authorization", "Bearer of-the-application".to_owned()),
        ("authorization", basic("user:".to_owned())),
        ("x-key-of-mine", API_KEY.to_owned()),
    ]
}

/// Asserts that a guest received no API key, but received all other credentials.
fn assert_stripped(text: &str) {
    assert!(!text.contains("e2b_"), "{text}");
    // All Base64 texts of this user and an API key start with these 12 characters.
    assert!(
        !text.contains(&STANDARD.encode("user:e2b_")[..12]),
        "{text}"
    );
    let basic = format!("Basic {}", STANDARD.encode("user:"));
    for credentials in ["Bearer of-the-application", &basic] {
        assert!(text.contains(credentials), "{credentials} in {text}");
    }
}

#[tokio::test]
async fn a_key_never_reaches_a_guest_in_any_protocol() {
    let guests = Guests::one(ID, 3000, echo_request());
    guests.web(ID, 49983, echo_request());
    let setup = Setup::new(&guests).await;
    for port in [3000, 49983] {
        let request = || {
            let mut request = to(port, "/");
            for (name, value) in shown() {
                request = request.header(name, value);
            }
            request.body(body("")).unwrap()
        };
        assert_stripped(&send_request(setup.address, request()).await.1);
        let stream = TcpStream::connect(setup.address).await.unwrap();
        let answer = Http2::over(stream).await.send(request()).await;
        assert_stripped(&collected(answer.into_body()).await);
    }
}

#[tokio::test]
async fn a_key_does_not_reach_a_guest_with_an_upgrade_or_behind_a_body() {
    let guests = Guests::raw(ID, 3000, |mut stream| async move {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let begin = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
        stream.write_all(begin).await.unwrap();
        stream.write_all(&head).await.unwrap();
    });
    guests.program(ID, 3001, |mut stream| async move {
        let mut all = Vec::new();
        // The request ends with a chunk of length 0 and the trailers.
        while !all.ends_with(b"\r\n\r\n") || !all.windows(5).any(|w| w == b"\r\n0\r\n") {
            all.push(stream.read_u8().await.unwrap());
        }
        let begin = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", all.len());
        stream.write_all(begin.as_bytes()).await.unwrap();
        stream.write_all(&all).await.unwrap();
    });
    let setup = Setup::new(&guests).await;
    let lines: String = shown()
        .iter()
        .map(|(n, v)| format!("{n}: {v}\r\n"))
        .collect();
    let to = |method: &str, port: u16| {
        format!(
            "{method} / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: {port}\r\n"
        )
    };
    let mut raw = Raw::new(setup.address).await;
    raw.write_text(&format!(
        "{}Connection: Upgrade\r\nUpgrade: websocket\r\n{lines}\r\n",
        to("GET", 3000)
    ))
    .await;
    raw.until("\r\n\r\n").await;
    assert_stripped(&raw.until("\r\n\r\n").await);
    drop(raw);
    let mut raw = Raw::new(setup.address).await;
    raw.write_text(&format!(
        "{}Connection: close\r\nTransfer-Encoding: chunked\r\nTrailer: x-api-key, x-other\r\n\r\n2\r\nhi\r\n0\r\n{}X-Other: 1\r\n\r\n",
        to("POST", 3001),
        format_args!("X-API-KEY: {API_KEY}\r\n"),
    ))
    .await;
    let received = raw.rest().await;
    assert!(
        received.contains("hi") && received.contains("X-Other: 1"),
        "{received}"
    );
    assert!(!received.contains("e2b_"), "{received}");
}

/// Returns the time in ten minutes, in seconds since 1970.
fn soon() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    now.as_secs() + 600
}

#[tokio::test]
async fn links_and_their_streams_end_with_the_key() {
    // Sends one line immediately, and no more.
    let router = Router::new().fallback(any(|| async {
        let (sender, receiver) = tokio::sync::mpsc::channel::<Result<_, std::io::Error>>(1);
        let line = hyper::body::Frame::data(bytes::Bytes::from("line\n"));
        sender.send(Ok(line)).await.unwrap();
        tokio::spawn(async move {
            sender.closed().await;
        });
        Body::new(http_body_util::StreamBody::new(Receiving(receiver)))
    }));
    let guests = Guests::one(ID, 3000, router);
    guests.program(ID, 3001, |mut stream| async move {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let begin = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nfirst";
        stream.write_all(begin).await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    });
    let setup = Setup::new(&guests).await;
    let signer = LinkSigner::new(&KEY);
    let link = |port| signer.path(ID, port, "/x", soon()).unwrap();
    let by_path = |port| {
        let request = hyper::Request::builder().uri(link(port));
        request.header("host", "localhost").body(body("")).unwrap()
    };
    let by_name = || {
        let label = signer.label(ID, 3000, soon()).unwrap();
        let request = hyper::Request::builder().uri("/");
        request
            .header("host", format!("{label}.localhost"))
            .body(body(""))
            .unwrap()
    };
    let (mut first, mut second) = (
        Http1::new(setup.address).await,
        Http1::new(setup.address).await,
    );
    let mut streams = vec![
        first.send(by_path(3000)).await.into_body(),
        second.send(by_name()).await.into_body(),
    ];
    for stream in &mut streams {
        let frame = with_timeout(stream.frame()).await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), "line\n");
    }
    let mut upgraded = Raw::new(setup.address).await;
    upgraded
        .write_text(&format!(
            "GET {} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
            link(3001)
        ))
        .await;
    upgraded.until("first").await;
    let mut public = Http1::new(setup.address).await;
    let mut public_stream = public.send(get(3000, "/")).await.into_body();
    with_timeout(public_stream.frame()).await.unwrap().unwrap();
    guests.revoke_links(ID);
    for stream in &mut streams {
        assert!(with_timeout(stream.frame()).await.unwrap().is_err());
    }
    assert_eq!(upgraded.rest().await, "");
    for request in [by_path(3000), by_name()] {
        let (status, text) = send_request(setup.address, request).await;
        assert!(status == 403 && text.contains("link"), "{status} {text}");
    }
    // Traffic that does not use a link continues.
    assert_eq!(setup.counters.totals().exchanges_open, 1);
    drop(public_stream);
}

/// Body of a response whose frames the test sends.
struct Receiving(
    tokio::sync::mpsc::Receiver<Result<hyper::body::Frame<bytes::Bytes>, std::io::Error>>,
);

impl futures_core::Stream for Receiving {
    type Item = Result<hyper::body::Frame<bytes::Bytes>, std::io::Error>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.0.poll_recv(cx)
    }
}

/// Control plane that marks callers of `/known` as known.
fn marking_control_plane() -> Router {
    Router::new()
        .route(
            "/known",
            any(|| async { ([("x-is", "known")], axum::Extension(KnownCaller), "hello") }),
        )
        .fallback(any(|| async { "hello" }))
}

#[tokio::test]
async fn connections_of_unknown_clients_are_limited_in_number_and_time() {
    let mut config: GatewayConfig = config();
    config.limits.unknown_connections = 2;
    config.limits.idle_unknown = Duration::from_millis(200);
    let guests = Guests::one(ID, 3000, Router::new().fallback(any(|| async { "hello" })));
    let setup = Setup::before(config, &guests, marking_control_plane()).await;
    let head = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let guest = format!(
        "GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 3000\r\n\r\n"
    );
    // Clients that presented a key or reached a sandbox are not counted as unknown.
    let mut known = Raw::new(setup.address).await;
    known.write_text(&head("/known")).await;
    known.until("hello").await;
    let mut visitor = Raw::new(setup.address).await;
    visitor.write_text(&guest).await;
    visitor.until("hello").await;
    let mut silent = Raw::new(setup.address).await;
    let mut unknown = Raw::new(setup.address).await;
    unknown.write_text(&head("/")).await;
    unknown.until("hello").await;
    // The limit is two: `silent` and `unknown`.
    let refused = Raw::new(setup.address).await.rest().await;
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    assert_eq!(unknown.rest().await, "", "the idle connection is closed");
    setup
        .wait_for_counters(|t| t.connections_timed_out == 1)
        .await;
    for (raw, request) in [(&mut known, head("/known")), (&mut visitor, guest)] {
        raw.write_text(&request).await;
        raw.until("hello").await;
    }
    // The idle timeout starts after a request, so the silent connection is still open.
    silent.write_text(&head("/")).await;
    silent.until("hello").await;
}
