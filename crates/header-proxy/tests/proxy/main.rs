//! Tests of the proxy: requests and headers that servers receive, and rejected requests.
#![allow(clippy::unwrap_used, clippy::panic)]

mod exhaustion;
mod lab;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Full};
use hyper::header::{AUTHORIZATION, HOST as HOST_HEADER, HeaderMap, HeaderValue};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use jiffy_api_types::HeaderRule;
use lab::{HOST, Lab, OWNER, SECRET, Seen, ServerKind};
use std::collections::BTreeMap;
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Protocols (ALPN) of a client with HTTP/1.1 only.
const ONE: &[&[u8]] = &[b"http/1.1"];
/// Protocols (ALPN) of a client with HTTP/2 and HTTP/1.1.
const TWO: &[&[u8]] = &[b"h2", b"http/1.1"];
/// Value of the header that the rule of [`Lab::rule`] adds.
const BEARER: &str = "Bearer value-of-the-secret";

/// Sends bytes and returns everything that is received until the end of the connection.
async fn raw(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &str) -> String {
    // The proxy may close the connection before it has read everything.
    let _ = stream.write_all(request.as_bytes()).await;
    let _ = stream.flush().await;
    let mut answer = Vec::new();
    // A connection that the proxy closes without a TLS alert is an error of `read`.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// Returns the status of a response.
fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or_default()
}

/// Sends a request over HTTP/2. Returns head, body and trailers of the response.
async fn two(lab: &Lab, request: Request<Full<Bytes>>) -> (Response<()>, Bytes, Option<HeaderMap>) {
    let stream = lab.tls(Lab::rule(), TWO, OWNER).await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let handshake =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let (head, body) = sender.send_request(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap();
    let trailers = body.trailers().cloned();
    (Response::from_parts(head, ()), body.to_bytes(), trailers)
}

#[tokio::test]
async fn the_server_receives_the_secret_and_the_guest_does_not() {
    let lab = Lab::new(ServerKind::default()).await;
    let stream = lab.tls(Lab::rule(), ONE, OWNER).await;
    let request = format!(
        "POST /x?y HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: guest\r\nAUTHORIZATION: other\r\n\
         X-Kept: yes\r\nConnection: close, x-hop\r\nX-Hop: 1\r\nContent-Length: 4\r\n\r\nbody"
    );
    let answer = raw(stream, &request).await;
    assert_eq!(status(&answer), "200");
    assert!(
        answer.ends_with("answer") && !answer.contains(SECRET),
        "{answer}"
    );
    assert!(!answer.to_lowercase().contains("alt-svc"), "{answer}");
    let [seen] = &lab.seen()[..] else {
        panic!("{:?}", lab.seen())
    };
    let values: Vec<_> = seen.headers.get_all(AUTHORIZATION).iter().collect();
    assert_eq!(values, [BEARER]);
    assert_eq!((seen.method.as_str(), seen.path.as_str()), ("POST", "/x"));
    assert_eq!(seen.headers["x-kept"], "yes");
    assert!(!seen.headers.contains_key("x-hop"));
    assert_eq!(&seen.body[..], b"body");
    let [used] = &lab.uses()[..] else {
        panic!("{:?}", lab.uses())
    };
    assert_eq!(
        (used.status, &used.secrets[..]),
        (200, &["token".to_owned()][..])
    );
    assert!(!format!("{:?}", lab.uses()).contains(SECRET));
}

#[tokio::test]
async fn each_request_receives_a_new_identity_token() {
    let lab = Lab::new(ServerKind::default()).await;
    let rule = Lab::rule_with("Bearer ${e2b.identity.tokens.aws}");
    let request = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n");
    for _ in 0..2 {
        let answer = raw(lab.tls(rule.clone(), ONE, OWNER).await, &request).await;
        assert_eq!(status(&answer), "200");
    }
    let token = |seen: &Seen| {
        let value = seen.headers[AUTHORIZATION].to_str().unwrap();
        value.strip_prefix("Bearer ").unwrap().to_owned()
    };
    let [first, second] = &lab.seen()[..] else {
        panic!("{:?}", lab.seen())
    };
    let (first, second) = (token(first), token(second));
    assert_ne!(first, second);
    let payload = first.split('.').nth(1).unwrap();
    let claims = data_encoding::BASE64URL_NOPAD
        .decode(payload.as_bytes())
        .unwrap();
    let claims = String::from_utf8(claims).unwrap();
    for part in ["sts.example", "issuer.example", "/sandbox/sandbox1", OWNER] {
        assert!(claims.contains(part), "{claims}");
    }
    assert_eq!(lab.uses()[0].tokens, ["aws"]);
    assert!(!format!("{:?}", lab.uses()).contains(&first));
    // A token of another name is not sent in another form, and no token is sent without TLS.
    let unknown = Lab::rule_with("${e2b.identity.tokens.gcp}");
    let answer = raw(lab.tls(unknown, ONE, OWNER).await, &request).await;
    assert_eq!(status(&answer), "502", "{answer}");
    let answer = raw(lab.open(rule, false, OWNER), &request).await;
    assert_eq!(status(&answer), "403", "{answer}");
    assert_eq!(lab.seen().len(), 2);
}

#[tokio::test]
async fn requests_for_another_host_receive_no_secret() {
    let lab = Lab::new(ServerKind::default()).await;
    let close = "Connection: close\r\n\r\n";
    for (request, expected) in [
        (
            format!("GET / HTTP/1.1\r\nHost: other.example\r\n{close}"),
            "421",
        ),
        (
            format!("GET / HTTP/1.1\r\nHost: {HOST}:8443\r\n{close}"),
            "421",
        ),
        (
            format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nHost: other.example\r\n{close}"),
            "400",
        ),
        (
            format!("GET https://other.example/ HTTP/1.1\r\nHost: {HOST}\r\n{close}"),
            "400",
        ),
        (format!("GET / HTTP/1.1\r\n{close}"), "400"),
        (
            format!("CONNECT {HOST}:443 HTTP/1.1\r\nHost: {HOST}\r\n{close}"),
            "400",
        ),
    ] {
        let stream = lab.tls(Lab::rule(), ONE, OWNER).await;
        let answer = raw(stream, &request).await;
        assert_eq!(status(&answer), expected, "{request}");
    }
    let other = Request::get("https://other.example/").body(Full::default());
    let (response, _, _) = two(&lab, other.unwrap()).await;
    assert_eq!(response.status(), 421);
    let differs = Request::get(format!("https://{HOST}/")).header(HOST_HEADER, "other.example");
    let (response, _, _) = two(&lab, differs.body(Full::default()).unwrap()).await;
    assert_eq!(response.status(), 421);
    // In HTTP/2, too, the proxy is not a tunnel.
    let tunnel = Request::connect(format!("{HOST}:443")).body(Full::default());
    let (response, _, _) = two(&lab, tunnel.unwrap()).await;
    assert_eq!(response.status(), 400);
    assert!(lab.seen().is_empty(), "{:?}", lab.seen());
}

#[tokio::test]
async fn line_breaks_in_targets_and_headers_split_no_request() {
    let lab = Lab::new(ServerKind::default()).await;
    let end = format!("Host: {HOST}\r\nConnection: close\r\n\r\n");
    for request in [
        format!("GET /a\rX-Split:1 HTTP/1.1\r\n{end}"),
        format!("GET /a b HTTP/1.1\r\n{end}"),
        format!("GET / HTTP/1.1\r\nX: a\rX-Split: 1\r\n{end}"),
        format!("GET / HTTP/1.1\r\nX: a\0b\r\n{end}"),
        format!("GET / HTTP/1.1\r\nX\rX-Split: 1\r\n{end}"),
        format!("GET / HTTP/1.1\r\n X-Folded: 1\r\n{end}"),
    ] {
        let stream = lab.tls(Lab::rule(), ONE, OWNER).await;
        let answer = raw(stream, &request).await;
        assert_eq!(status(&answer), "400", "{request:?}: {answer}");
    }
    assert!(lab.seen().is_empty(), "{:?}", lab.seen());
}

#[tokio::test]
async fn a_request_with_ambiguous_framing_smuggles_no_second_request() {
    let lab = Lab::new(ServerKind::default()).await;
    let smuggled = format!("GET /smuggled HTTP/1.1\r\nHost: {HOST}\r\n\r\n");
    let length = smuggled.len() + 5;
    for framing in [
        format!("Content-Length: {length}\r\nTransfer-Encoding: chunked\r\n"),
        format!("Transfer-Encoding: chunked\r\nContent-Length: {length}\r\n"),
        "Transfer-Encoding: chunked, identity\r\n".to_owned(),
        "Transfer-Encoding : chunked\r\nContent-Length: 0\r\n".to_owned(),
        "Content-Length: 0\r\nContent-Length: 5\r\n".to_owned(),
        "Content-Length: +5\r\n".to_owned(),
        "X: a\rContent-Length: 5\r\n".to_owned(),
    ] {
        let stream = lab.tls(Lab::rule(), ONE, OWNER).await;
        let request = format!(
            "POST /first HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n{framing}\r\n0\r\n\r\n{smuggled}"
        );
        let answer = raw(stream, &request).await;
        // The proxy decides where the body ends, and writes the request with that framing.
        let is_first = |seen: &Seen| seen.path == "/first" && seen.body.is_empty();
        assert!(lab.seen().iter().all(is_first), "{framing}: {answer}");
        // hyper ignores the length of a request with both headers (RFC 9112, 6.3). The length of 50
        // bytes begins with `5`, too.
        let has_both = framing.contains("Encoding: chunked\r\n") && framing.contains("Length: 5");
        let expected = if has_both { "200" } else { "400" };
        assert_eq!(status(&answer), expected, "{framing}: {answer}");
    }
}

#[tokio::test]
async fn a_server_without_a_valid_certificate_receives_nothing() {
    let kinds = [
        ServerKind {
            is_trusted: false,
            ..ServerKind::default()
        },
        ServerKind {
            name: "other.example",
            ..ServerKind::default()
        },
        ServerKind {
            is_tls: false,
            ..ServerKind::default()
        },
    ];
    for kind in kinds {
        let lab = Lab::new(kind).await;
        for protocols in [ONE, TWO] {
            let stream = lab.tls(Lab::rule(), protocols, OWNER).await;
            let request = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n");
            let answer = raw(stream, &request).await;
            assert_eq!(status(&answer), "502", "{answer}");
            assert!(!answer.contains(SECRET), "{answer}");
        }
        assert!(lab.seen().is_empty());
        assert!(
            lab.uses()
                .iter()
                .all(|used| used.status == 502 && used.secrets.is_empty())
        );
    }
}

#[tokio::test]
async fn secrets_of_another_key_and_missing_secrets_are_not_added() {
    let lab = Lab::new(ServerKind::default()).await;
    let request = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n");
    let stream = lab.tls(Lab::rule(), ONE, "mallory").await;
    let foreign = raw(stream, &request).await;
    lab.secrets.remove(OWNER, "token").unwrap();
    let stream = lab.tls(Lab::rule(), ONE, OWNER).await;
    let missing = raw(stream, &request).await;
    let body = |answer: &str| answer.rsplit("\r\n").next().unwrap_or_default().to_owned();
    assert_eq!(status(&foreign), "502");
    // The answers do not reveal that another key has the secret.
    assert_eq!(body(&foreign), body(&missing));
    assert!(lab.seen().is_empty());
}

#[tokio::test]
async fn secrets_are_not_sent_without_tls() {
    let lab = Lab::new(ServerKind {
        is_tls: false,
        ..ServerKind::default()
    })
    .await;
    let request = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n");
    let answer = raw(lab.open(Lab::rule(), false, OWNER), &request).await;
    assert_eq!(status(&answer), "403", "{answer}");
    assert!(lab.seen().is_empty());
    let literal = HeaderRule {
        headers: BTreeMap::from([("x-plain".to_owned(), "yes".to_owned())]),
        ..Lab::rule()
    };
    let answer = raw(lab.open(literal, false, OWNER), &request).await;
    assert_eq!(status(&answer), "200", "{answer}");
    assert_eq!(lab.seen()[0].headers["x-plain"], "yes");
}

#[tokio::test]
async fn http_2_with_trailers_passes_end_to_end() {
    let lab = Lab::new(ServerKind::default()).await;
    let request = Request::get(format!("https://{HOST}/events"))
        .header("te", "trailers")
        .body(Full::default());
    let (response, body, trailers) = two(&lab, request.unwrap()).await;
    assert_eq!(response.status(), 200);
    assert_eq!(&body[..], b"data: 1\n\ndata: 2\n\n");
    assert_eq!(trailers.unwrap()["x-end"], "yes");
    let large = Full::new(Bytes::from(vec![b'u'; 4 << 20]));
    let request = Request::post(format!("https://{HOST}/large")).body(large);
    let (_, body, _) = two(&lab, request.unwrap()).await;
    assert_eq!(body.len(), 8 << 20);
    let seen = lab.seen();
    assert!(
        seen.iter()
            .all(|seen| seen.headers[AUTHORIZATION] == BEARER)
    );
    assert_eq!(seen[0].headers["te"], "trailers");
    assert_eq!(seen[1].body.len(), 4 << 20);
}

#[tokio::test]
async fn an_upgraded_connection_passes_in_both_directions() {
    let lab = Lab::new(ServerKind {
        protocols: ONE,
        ..ServerKind::default()
    })
    .await;
    let mut stream = lab.tls(Lab::rule(), ONE, OWNER).await;
    let request = format!(
        "GET /socket HTTP/1.1\r\nHost: {HOST}\r\nConnection: keep-alive, Upgrade\r\n\
         Upgrade: websocket\r\nSec-WebSocket-Key: a\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    assert_eq!(status(&head), "101", "{head}");
    for text in [&b"one"[..], b"two"] {
        stream.write_all(text).await.unwrap();
        let mut echo = vec![0; text.len()];
        stream.read_exact(&mut echo).await.unwrap();
        assert_eq!(echo, text);
    }
    assert_eq!(lab.seen()[0].headers[AUTHORIZATION], BEARER);
    assert_eq!(lab.uses()[0].status, 101);
}

#[tokio::test]
async fn chunked_and_later_requests_of_a_connection_pass() {
    let lab = Lab::new(ServerKind::default()).await;
    let stream = lab.tls(Lab::rule(), ONE, OWNER).await;
    let request = format!(
        "POST /a HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n\
         3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n\
         GET /large HTTP/1.1\r\nHost: {HOST}\r\n\r\n\
         GET /events HTTP/1.1\r\nHost: {HOST}\r\nTE: trailers\r\nConnection: close, TE\r\n\r\n"
    );
    let answer = raw(stream, &request).await;
    assert!(
        answer.len() > 8 << 20 && answer.contains("data: 2"),
        "{}",
        answer.len()
    );
    let seen = lab.seen();
    let paths: Vec<&str> = seen.iter().map(|seen| seen.path.as_str()).collect();
    assert_eq!(paths, ["/a", "/large", "/events"]);
    assert_eq!(&seen[0].body[..], b"abcde");
    assert!(
        seen.iter()
            .all(|seen| seen.headers[AUTHORIZATION] == BEARER)
    );
}

#[tokio::test]
async fn oversized_heads_are_rejected_in_both_directions() {
    let lab = Lab::new(ServerKind::default()).await;
    let stream = lab.tls(Lab::rule(), ONE, OWNER).await;
    let request = format!("GET /headers HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n");
    let answer = raw(stream, &request).await;
    assert_eq!(status(&answer), "502", "{answer}");
    let stream = lab.tls(Lab::rule(), ONE, OWNER).await;
    let long = "a".repeat(300_000);
    let request = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nX: {long}\r\n\r\n");
    let answer = raw(stream, &request).await;
    assert_eq!(status(&answer), "431", "{answer}");
    assert_eq!(lab.seen().len(), 1);
}

#[tokio::test]
async fn a_changed_secret_is_used_at_once_and_control_characters_are_impossible() {
    let lab = Lab::new(ServerKind::default()).await;
    let mut stream = lab.tls(Lab::rule(), ONE, OWNER).await;
    let request = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n");
    for value in [None, Some("second")] {
        if let Some(value) = value {
            lab.secrets.update(OWNER, "token", value, None).unwrap();
        }
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"answer") {
            answer.push(stream.read_u8().await.unwrap());
        }
    }
    assert!(
        lab.secrets
            .update(OWNER, "token", "a\r\nx: y", None)
            .is_err()
    );
    let seen = lab.seen();
    assert_eq!(seen[0].headers[AUTHORIZATION], BEARER);
    assert_eq!(seen[1].headers[AUTHORIZATION], "Bearer second");
}

/// Prints the time that the proxy adds to a request on an open connection.
#[tokio::test]
#[ignore = "measurement"]
async fn measure_the_added_latency() {
    const REQUESTS: u32 = 2000;
    let lab = Lab::new(ServerKind {
        is_tls: false,
        ..ServerKind::default()
    })
    .await;
    let literal = HeaderRule {
        headers: BTreeMap::from([("x-plain".to_owned(), "yes".to_owned())]),
        ..Lab::rule()
    };
    async fn time(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> f64 {
        let io = TokioIo::new(stream);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
        tokio::spawn(connection);
        let start = Instant::now();
        for _ in 0..REQUESTS {
            let request = Request::get("/").header(HOST_HEADER, HeaderValue::from_static(HOST));
            let request = request.body(Empty::<Bytes>::new()).unwrap();
            let response = sender.send_request(request).await.unwrap();
            response.into_body().collect().await.unwrap();
        }
        start.elapsed().as_secs_f64() * 1e6 / f64::from(REQUESTS)
    }
    let direct = time(tokio::net::TcpStream::connect(lab.server).await.unwrap()).await;
    let proxied = time(lab.open(literal, false, OWNER)).await;
    let tls = Lab::new(ServerKind::default()).await;
    let with_secret = time(tls.tls(Lab::rule(), ONE, OWNER).await).await;
    println!("direct {direct:.0} us, proxied {proxied:.0} us, TLS with secret {with_secret:.0} us");
}
