//! What reaches a guest, and what comes back.

use crate::support;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use jiffy_gateway::{Access, Config};
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use support::client::{self, Http1, Http2, Raw, ask, body, to};
use support::guest::Guests;
use support::{ID, Setup, collected, config, within};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

/// A body that is what the test sends.
struct Fed(mpsc::Receiver<Frame<Bytes>>);

impl hyper::body::Body for Fed {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|frame| frame.map(Ok))
    }
}

fn fed() -> (mpsc::Sender<Frame<Bytes>>, Fed) {
    let (sender, receiver) = mpsc::channel(1);
    (sender, Fed(receiver))
}

/// A guest that answers what the test says, once.
fn answering(answer: impl Fn() -> Response + Clone + Send + Sync + 'static) -> Router {
    Router::new().fallback(any(move || {
        let answer = answer();
        async move { answer }
    }))
}

/// A guest that tells the head it was sent.
fn telling() -> Router {
    Router::new().fallback(any(|request: Request| async move {
        let mut lines = vec![format!("{} {}", request.method(), request.uri())];
        for (name, value) in request.headers() {
            lines.push(format!("{name}: {}", value.to_str().unwrap()));
        }
        lines.join("\n")
    }))
}

async fn data(body: &mut hyper::body::Incoming) -> Bytes {
    within(body.frame())
        .await
        .unwrap()
        .unwrap()
        .into_data()
        .unwrap()
}

#[tokio::test]
async fn what_names_no_sandbox_is_the_control_planes() {
    let setup = Setup::new(&Guests::default()).await;
    let request = |uri: &str| {
        hyper::Request::builder()
            .uri(uri)
            .header("host", "localhost")
            .body(body(""))
            .unwrap()
    };
    assert_eq!(
        ask(setup.address, request("/health")).await,
        (200, "control plane".to_owned())
    );
    assert_eq!(
        ask(setup.address, request("/v2/sandboxes?x")).await.1,
        "GET /v2/sandboxes?x for 127.0.0.1"
    );
    assert_eq!(setup.counters.totals().control_plane, 2);
}

#[tokio::test]
async fn a_guest_sees_its_own_path_and_who_asks() {
    let setup = Setup::new(&Guests::one(ID, 3000, telling())).await;
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
    let guests = Guests::one(ID, 3000, telling());
    guests.add(
        ID,
        Access {
            mask_request_host: Some("localhost:${PORT}".to_owned()),
            ..Access::default()
        },
    );
    let config = Config {
        trusted_proxies: vec!["127.0.0.1".parse().unwrap()],
        ..config()
    };
    let setup = Setup::with(config, &guests, None).await;
    let request = to(3000, "/").header("x-forwarded-for", "192.0.2.7");
    let (_, text) = ask(setup.address, request.body(body("")).unwrap()).await;
    assert!(text.contains("\nhost: localhost:3000"), "{text}");
    assert!(
        text.contains("\nx-forwarded-for: 192.0.2.7, 127.0.0.1"),
        "{text}"
    );
}

#[tokio::test]
async fn what_a_guest_answers_concerns_only_itself() {
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
async fn a_path_without_slash_leads_to_the_one_with() {
    let setup = Setup::new(&Guests::one(ID, 3000, telling())).await;
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
async fn events_arrive_one_by_one_as_they_are_sent() {
    let (sender, fed) = fed();
    let slot = Arc::new(Mutex::new(Some(fed)));
    let router = answering(move || {
        let body = Body::new(slot.lock().unwrap().take().unwrap());
        ([("content-type", "text/event-stream")], body).into_response()
    });
    let setup = Setup::new(&Guests::one(ID, 3000, router)).await;
    let mut http = Http1::new(setup.address).await;
    let answer = http.send(client::get(3000, "/")).await;
    assert!(answer.headers().get("content-encoding").is_none());
    let mut body = answer.into_body();
    for event in ["data: 1\n\n", "data: 2\n\n", "data: 3\n\n"] {
        // The next is sent only when this one has arrived: nothing may wait for more.
        sender.send(Frame::data(event.into())).await.unwrap();
        assert_eq!(data(&mut body).await, event);
    }
    drop(sender);
    assert!(within(body.frame()).await.is_none());
    setup.counted(|t| t.exchanges_open == 0).await;
    assert_eq!(setup.counters.totals().bytes_to_clients, 27);
}

#[tokio::test]
async fn both_directions_stream_at_once() {
    let router = Router::new().fallback(any(|request: Request| async move {
        Body::from_stream(request.into_body().into_data_stream())
    }));
    let setup = Setup::new(&Guests::one(ID, 3000, router)).await;
    let mut http = Http1::new(setup.address).await;
    let (sender, fed) = fed();
    let request = to(3000, "/")
        .method("POST")
        .body(fed.boxed_unsync())
        .unwrap();
    let mut body = http.send(request).await.into_body();
    for line in ["{\"a\":1}\n", "{\"b\":2}\n"] {
        sender.send(Frame::data(line.into())).await.unwrap();
        assert_eq!(data(&mut body).await, line);
    }
    drop(sender);
    assert!(within(body.frame()).await.is_none());
}

#[tokio::test]
async fn trailers_pass_both_ways() {
    let router = Router::new().fallback(any(|request: Request| async move {
        let body = request.into_body().collect().await.unwrap();
        let trailers = body.trailers().cloned().unwrap();
        let frames = vec![
            Ok::<_, Infallible>(Frame::data(Bytes::from("x"))),
            Ok(Frame::trailers(trailers)),
        ];
        let body = Body::new(StreamBody::new(futures(frames)));
        ([("trailer", "x-sum")], body)
    }));
    let setup = Setup::new(&Guests::one(ID, 3000, router)).await;
    let mut raw = Raw::new(setup.address).await;
    raw.say(&format!(
        "POST / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 3000\r\nTE: trailers\r\nTrailer: x-sum\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-sum: 42\r\n\r\n"
    ))
    .await;
    let answer = raw.until("42\r\n\r\n").await;
    assert!(answer.contains("0\r\nx-sum: 42"), "{answer}");
}

/// A stream of what is there.
fn futures<T>(items: Vec<T>) -> impl futures_core::Stream<Item = T> {
    Ready(items.into_iter())
}

struct Ready<T>(std::vec::IntoIter<T>);

impl<T> Unpin for Ready<T> {}

impl<T> futures_core::Stream for Ready<T> {
    type Item = T;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<T>> {
        Poll::Ready(self.0.next())
    }
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_connection_to_the_guest_along() {
    // A guest that never answers, and one that never finishes.
    let (_sender, fed) = fed();
    let slot = Arc::new(Mutex::new(Some(fed)));
    let router = Router::new()
        .route(
            "/silent",
            any(|| async {
                std::future::pending::<()>().await;
            }),
        )
        .route(
            "/endless",
            any(move || {
                let body = Body::new(slot.lock().unwrap().take().unwrap());
                async move { body }
            }),
        );
    let guests = Guests::one(ID, 3000, router);
    let setup = Setup::new(&guests).await;
    let left = || async {
        while guests.open_now() > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    let mut raw = Raw::new(setup.address).await;
    raw.say(&format!("GET /silent HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 3000\r\n\r\n")).await;
    setup.counted(|t| t.guest_connections == 1).await;
    assert_eq!(guests.open_now(), 1);
    drop(raw);
    within(left()).await;

    let mut http = Http1::new(setup.address).await;
    let answer = http.send(client::get(3000, "/endless")).await;
    assert_eq!(guests.open_now(), 1);
    http.hang_up();
    within(left()).await;
    drop(answer);
    setup
        .counted(|t| t.exchanges_open == 0 && t.connections_open == 0)
        .await;
}

#[tokio::test]
async fn a_guest_that_breaks_off_ends_the_answer() {
    let guests = Guests::raw(ID, 3000, |mut stream| async move {
        let mut buffer = [0; 4096];
        let _ = stream.read(&mut buffer).await;
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n";
        stream.write_all(chunked.as_bytes()).await.unwrap();
    });
    let setup = Setup::new(&guests).await;
    let mut http = Http1::new(setup.address).await;
    let mut body = http.send(client::get(3000, "/")).await.into_body();
    assert_eq!(data(&mut body).await, "abc");
    assert!(
        within(body.frame()).await.unwrap().is_err(),
        "it must not look complete"
    );
}

#[tokio::test]
async fn a_websocket_passes_bytes_both_ways_and_keeps_half_close() {
    let (seen, heard) = oneshot::channel();
    let seen = Arc::new(Mutex::new(Some(seen)));
    let guests = Guests::raw(ID, 3000, move |mut stream| {
        let seen = seen.lock().unwrap().take().unwrap();
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
            // The client is done; the guest still has something to say.
            stream.write_all(b" and last").await.unwrap();
            let _ = seen.send((String::from_utf8(head).unwrap(), all));
        }
    });
    let setup = Setup::new(&guests).await;
    let mut raw = Raw::new(setup.address).await;
    raw.say(&format!(
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
    raw.say(" late").await;
    raw.0.shutdown().await.unwrap();
    assert_eq!(raw.rest().await, " and last");
    let (head, all) = within(heard).await.unwrap();
    assert!(head.starts_with("GET /chat HTTP/1.1"), "{head}");
    // As the client wrote the names.
    assert!(
        head.contains("Upgrade: websocket") && head.contains("Connection: upgrade"),
        "{head}"
    );
    assert_eq!(all, b"early late");
    setup
        .counted(|t| t.exchanges_open == 0 && t.connections_open == 0)
        .await;
    let totals = setup.counters.totals();
    assert_eq!((totals.bytes_to_guests, totals.bytes_to_clients), (10, 14));
}

#[tokio::test]
async fn an_upgrade_that_the_guest_declines_is_an_ordinary_answer() {
    let setup = Setup::new(&Guests::one(ID, 3000, telling())).await;
    let request = to(3000, "/")
        .header("connection", "upgrade")
        .header("upgrade", "websocket")
        .body(body(""))
        .unwrap();
    let (status, text) = ask(setup.address, request).await;
    assert_eq!(status, 200);
    assert!(text.contains("upgrade: websocket"), "{text}");
}

#[tokio::test]
async fn a_body_is_asked_for_only_when_somebody_wants_it() {
    let router = Router::new().fallback(any(|body: String| async move { body }));
    let setup = Setup::new(&Guests::one(ID, 3000, router)).await;
    let head = |port: u16| {
        format!(
            "POST / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: {port}\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
        )
    };
    let mut raw = Raw::new(setup.address).await;
    raw.say(&head(3000)).await;
    assert_eq!(raw.until("\r\n\r\n").await, "HTTP/1.1 100 Continue\r\n\r\n");
    raw.say("hello").await;
    let answer = raw.until("hello").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let mut raw = Raw::new(setup.address).await;
    raw.say(&head(3001)).await;
    let answer = raw.until("\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
}

#[tokio::test]
async fn a_head_request_has_the_length_and_no_body() {
    let router = Router::new().fallback(any(|| async { "hello" }));
    let setup = Setup::new(&Guests::one(ID, 3000, router)).await;
    let mut raw = Raw::new(setup.address).await;
    for _ in 0..2 {
        raw.say(&format!("HEAD / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 3000\r\n\r\n")).await;
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
    let setup = Setup::new(&Guests::one(ID, 3000, telling())).await;
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
async fn a_cancelled_http2_stream_takes_its_connection_to_the_guest_along() {
    let (_sender, fed) = fed();
    let slot = Arc::new(Mutex::new(Some(fed)));
    let router = answering(move || Body::new(slot.lock().unwrap().take().unwrap()).into_response());
    let guests = Guests::one(ID, 3000, router);
    let setup = Setup::new(&guests).await;
    let stream = TcpStream::connect(setup.address).await.unwrap();
    let mut http = Http2::over(stream).await;
    let request = hyper::Request::builder()
        .uri(format!("http://3000-{ID}.localhost/"))
        .body(body(""))
        .unwrap();
    let answer = http.send(request).await;
    assert_eq!(guests.open_now(), 1);
    drop(answer);
    within(async {
        while guests.open_now() > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    })
    .await;
    setup.counted(|t| t.exchanges_open == 0).await;
    poll_fn(|cx| http.sender.poll_ready(cx)).await.unwrap();
}

#[tokio::test]
async fn names_of_headers_arrive_as_they_were_written_in_both_directions() {
    let (told, mut heard) = mpsc::channel(1);
    let guests = Guests::raw(ID, 3000, move |mut stream| {
        let told = told.clone();
        async move {
            let mut head = vec![0; 16 * 1024];
            let mut length = 0;
            while !head[..length].ends_with(b"\r\n\r\n") {
                length += stream.read(&mut head[length..]).await.unwrap();
            }
            head.truncate(length);
            told.send(String::from_utf8(head).unwrap()).await.unwrap();
            let answer = "HTTP/1.1 200 OK\r\nX-Ratelimit-LEFT: 1\r\nContent-Length: 0\r\n\r\n";
            stream.write_all(answer.as_bytes()).await.unwrap();
            // Until the gateway has read it.
            let _ = stream.read(&mut [0]).await;
        }
    });
    let setup = Setup::new(&guests).await;
    let mut raw = Raw::new(setup.address).await;
    raw.say(&format!(
        "GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 3000\r\n\
         X-API-Token: a\r\nSOAPAction: b\r\nx-lower: c\r\nX-FORWARDED-FOR: 9.9.9.9\r\n\r\n"
    ))
    .await;
    let head = within(heard.recv()).await.unwrap();
    for line in [
        "\r\nHost: localhost",
        "\r\nX-API-Token: a",
        "\r\nSOAPAction: b",
        "\r\nx-lower: c",
    ] {
        assert!(head.contains(line), "{line:?} in {head}");
    }
    // The gateway's word stays the gateway's, however it is written.
    assert!(!head.contains("9.9.9.9"), "{head}");
    let answer = raw.until("\r\n\r\n").await;
    assert!(answer.contains("\r\nX-Ratelimit-LEFT: 1\r\n"), "{answer}");
}
