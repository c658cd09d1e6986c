//! Responses to clients when a request does not reach a guest.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use crate::support;

use axum::Router;
use axum::routing::get;
use hyper::Request;
use jiffy_gateway::{LinkSigner, OpenError, SandboxAccess};
use std::time::{SystemTime, UNIX_EPOCH};
use support::client::{self, Http1, Raw, body, send_request, to};
use support::guest::Guests;
use support::{ID, KEY, Setup, collected};
use tokio::io::AsyncWriteExt;

/// Guest that responds with the path and query that it received.
fn hello() -> Router {
    Router::new().fallback(get(|request: axum::extract::Request| async move {
        format!("guest saw {}", request.uri())
    }))
}

/// Starts a request to the given host name and path.
fn by_host(host: &str, path: &str) -> hyper::http::request::Builder {
    Request::builder().uri(path).header("host", host)
}

#[tokio::test]
async fn a_missing_sandbox_was_not_found() {
    let setup = Setup::new(&Guests::default()).await;
    let (status, text) = send_request(setup.address, client::get(49983, "/health")).await;
    assert_eq!(status, 502);
    assert_eq!(
        text,
        format!(r#"{{"sandboxId":"{ID}","message":"The sandbox was not found","code":502}}"#)
    );
    assert_eq!(setup.counters.totals().not_found, 1);
}

#[tokio::test]
async fn errors_for_paused_sandboxes_and_closed_ports_have_the_phrases_of_e2b() {
    let guests = Guests::one(ID, 3000, hello());
    let setup = Setup::new(&guests).await;
    let (status, text) = send_request(setup.address, client::get(3001, "/")).await;
    assert_eq!(status, 502);
    assert_eq!(
        text,
        format!(
            r#"{{"sandboxId":"{ID}","message":"The sandbox is running but port is not open","port":3001,"code":502}}"#
        )
    );
    guests.set_open_error(OpenError::NotRunning);
    let (status, text) = send_request(setup.address, client::get(3000, "/")).await;
    assert_eq!(status, 502);
    assert!(text.contains("was not found"), "{text}");
    guests.set_open_error(OpenError::Limit("its key has 1 sandbox".to_owned()));
    let (status, text) = send_request(setup.address, client::get(3000, "/")).await;
    assert_eq!(status, 429);
    assert!(text.contains("its key has 1 sandbox"), "{text}");
    guests.set_open_error(OpenError::Unavailable("the resume failed".to_owned()));
    let (status, text) = send_request(setup.address, client::get(3000, "/")).await;
    assert_eq!(status, 502);
    assert!(
        text.contains("the resume failed") && !text.contains("was not found"),
        "{text}"
    );
}

#[tokio::test]
async fn an_unresponsive_invalid_or_missing_guest_is_reported() {
    for (sent, expected) in [
        (&b""[..], "closed the connection before answering"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is not HTTP"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
            "was not requested",
        ),
    ] {
        let guests = Guests::raw(ID, 3000, move |mut stream| async move {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            let mut buffer = [0; 4096];
            let _ = stream.read(&mut buffer).await;
            let _ = stream.write_all(sent).await;
        });
        let setup = Setup::new(&guests).await;
        let (status, text) = send_request(setup.address, client::get(3000, "/")).await;
        assert_eq!(status, 502, "{text}");
        assert!(text.contains(expected), "{text}");
    }
}

#[tokio::test]
async fn a_browser_is_shown_a_page() {
    let setup = Setup::new(&Guests::default()).await;
    let request = by_host("80-abc.localhost", "/")
        .header("accept", "text/html,*/*")
        .body(body(""))
        .unwrap();
    let answer = Http1::new(setup.address).await.send(request).await;
    assert_eq!(answer.status(), 502);
    assert_eq!(
        answer.headers().get("content-type").unwrap(),
        "text/html; charset=utf-8"
    );
    assert!(
        collected(answer.into_body())
            .await
            .contains("was not found")
    );
}

#[tokio::test]
async fn host_only_paths_are_forbidden() {
    let guests = Guests::one(ID, 49983, hello());
    guests.web(ID, 3000, hello());
    let setup = Setup::new(&guests).await;
    // Paths of the agent's API that only the host may call, in spellings that reach the same call.
    for path in [
        "/init",
        "/%69nit",
        "//init",
        "/x/../init",
        "/INIT",
        "/fsfreeze?x",
        "/collapse/",
    ] {
        let (status, text) = send_request(setup.address, client::get(49983, path)).await;
        assert_eq!(status, 403, "{path} {text}");
        let prefixed = format!("/sandboxes/{ID}/proxy/49983{path}");
        let request = by_host("localhost", &prefixed).body(body("")).unwrap();
        assert_eq!(send_request(setup.address, request).await.0, 403, "{path}");
        let host = format!("49983-{ID}.jiffy.example");
        let request = by_host(&host, path).body(body("")).unwrap();
        assert_eq!(send_request(setup.address, request).await.0, 403, "{path}");
    }
    assert_eq!(guests.opened_count(), 0);
    assert_eq!(
        send_request(setup.address, client::get(49983, "/health"))
            .await
            .0,
        200
    );
    assert_eq!(
        send_request(setup.address, client::get(3000, "/init"))
            .await
            .0,
        200
    );
}

#[tokio::test]
async fn a_restricted_sandbox_requires_its_token() {
    let guests = Guests::one(ID, 3000, hello());
    guests.web(ID, 49983, hello());
    guests.web(ID, 49999, hello());
    guests.add(
        ID,
        SandboxAccess {
            traffic_token: Some("secret".to_owned()),
            ..SandboxAccess::default()
        },
    );
    let setup = Setup::new(&guests).await;
    for port in [3000, 49999] {
        let (status, text) = send_request(setup.address, client::get(port, "/")).await;
        assert_eq!(status, 403, "{text}");
        assert!(
            text.contains(r#""code":403"#) && text.contains(ID),
            "{text}"
        );
        for (token, status) in [
            ("secret", 200),
            ("secreT", 403),
            ("", 403),
            ("secret1", 403),
        ] {
            let request = to(port, "/").header("E2B-Traffic-Access-Token", token);
            let answer = send_request(setup.address, request.body(body("")).unwrap()).await;
            assert_eq!(answer.0, status, "{token}");
        }
        let twice = to(port, "/")
            .header("E2B-Traffic-Access-Token", "secret")
            .header("E2B-Traffic-Access-Token", "secret");
        assert_eq!(
            send_request(setup.address, twice.body(body("")).unwrap())
                .await
                .0,
            403
        );
    }
    // Port 49983 is the agent's, which checks a token of its own.
    assert_eq!(
        send_request(setup.address, client::get(49983, "/health"))
            .await
            .0,
        200
    );
}

#[tokio::test]
async fn a_signed_link_stands_for_the_token() {
    let guests = Guests::one(ID, 3000, hello());
    guests.web(ID, 3001, hello());
    guests.add(
        ID,
        SandboxAccess {
            traffic_token: Some("secret".to_owned()),
            ..SandboxAccess::default()
        },
    );
    let setup = Setup::new(&guests).await;
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let signer = LinkSigner::new(&KEY);

    let link = signer.path(ID, 3000, "/a?b=c", now + 100).unwrap();
    let request = by_host("localhost", &link).body(body("")).unwrap();
    let answer = Http1::new(setup.address).await.send(request).await;
    assert_eq!(answer.status(), 200);
    let cookie = answer
        .headers()
        .get("set-cookie")
        .unwrap()
        .to_str()
        .unwrap();
    assert!(
        cookie.contains(&format!("; Path=/sandboxes/{ID}/proxy/3000;"))
            && cookie.contains("HttpOnly"),
        "{cookie}"
    );
    let cookie = cookie.split(';').next().unwrap().to_owned();
    assert_eq!(
        collected(answer.into_body()).await,
        "guest saw /a?b=c",
        "the guest does not learn the signature"
    );
    let with_cookie = |port: u16, cookie: String| {
        let path = format!("/sandboxes/{ID}/proxy/{port}/next");
        let request = by_host("localhost", &path).header("cookie", cookie);
        send_request(setup.address, request.body(body("")).unwrap())
    };
    assert_eq!(with_cookie(3000, format!("x=y; {cookie}")).await.0, 200);
    assert_eq!(with_cookie(3000, format!("{cookie}x")).await.0, 403);
    let moved = cookie.replace("3000", "3001");
    assert_eq!(with_cookie(3001, moved).await.0, 403);

    // Links that are not valid: expired, with another time, for another port, and with two times.
    let expired = signer.path(ID, 3000, "/", now - 1).unwrap();
    let tampered = link.replace("jiffy_expires=1", "jiffy_expires=2");
    let other = link.replace("/3000/", "/3001/");
    let twice = format!("{link}&jiffy_expires=1");
    for link in [expired, tampered, other, twice] {
        let request = by_host("localhost", &link).body(body("")).unwrap();
        let (status, text) = send_request(setup.address, request).await;
        assert_eq!(status, 403, "{link} {text}");
    }

    let host = |label: String| {
        let request = by_host(&format!("{label}.jiffy.example"), "/x");
        send_request(setup.address, request.body(body("")).unwrap())
    };
    // Links by host name: valid, for another port, expired, and without a signature.
    let label = signer.label(ID, 3000, now + 100).unwrap();
    assert_eq!(host(label.clone()).await, (200, "guest saw /x".to_owned()));
    assert_eq!(host(label.replace("3000-", "3001-")).await.0, 403);
    assert_eq!(host(signer.label(ID, 3000, now - 1).unwrap()).await.0, 403);
    assert_eq!(host(format!("3000-{ID}")).await.0, 403);
}

#[tokio::test]
async fn an_invalid_link_is_rejected_even_if_no_link_is_required() {
    let guests = Guests::one(ID, 3000, hello());
    let setup = Setup::new(&guests).await;
    // The label ends with an expiry and a signature, which is wrong.
    let host = format!("3000-{ID}-zzzzzz-aaaa.jiffy.example");
    let request = by_host(&host, "/").body(body("")).unwrap();
    assert_eq!(send_request(setup.address, request).await.0, 403);
}

#[tokio::test]
async fn routing_errors_are_explained() {
    let setup = Setup::new(&Guests::default()).await;
    // The header with the port of the sandbox is missing.
    let request = by_host("127.0.0.1", "/").header("e2b-sandbox-id", "abc");
    let (status, text) = send_request(setup.address, request.body(body("")).unwrap()).await;
    assert_eq!(status, 400);
    assert!(text.contains("used together"), "{text}");
    // A host name that is not the gateway's, as after DNS rebinding.
    let request = by_host("rebound.evil.test", "/v2/sandboxes");
    let (status, text) = send_request(setup.address, request.body(body("")).unwrap()).await;
    assert_eq!(status, 421);
    assert!(text.contains(r#""code":421"#), "{text}");
}

#[tokio::test]
async fn an_isolated_page_cannot_call_the_control_plane() {
    let setup = Setup::new(&Guests::one(ID, 3000, hello())).await;
    // Browsers send the origin `null` for pages in a sandboxed frame.
    for method in ["GET", "POST", "DELETE"] {
        let request = by_host("localhost", "/v2/sandboxes").method(method);
        let request = request.header("origin", "null").body(body("")).unwrap();
        assert_eq!(
            send_request(setup.address, request).await.0,
            403,
            "{method}"
        );
    }
    let request = by_host("localhost", "/v2/sandboxes").header("origin", "http://localhost");
    let (status, _) = send_request(setup.address, request.body(body("")).unwrap()).await;
    assert_eq!(status, 200);
    let request = to(3000, "/").header("origin", "null");
    let (status, _) = send_request(setup.address, request.body(body("")).unwrap()).await;
    assert_eq!(status, 200, "any page may call a guest");
}

#[tokio::test]
async fn a_smuggled_request_is_never_seen() {
    let echo = Router::new().fallback(|body: String| async move { body });
    let guests = Guests::one(ID, 3000, echo);
    let setup = Setup::new(&guests).await;
    let head = format!("Host: localhost\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 3000\r\n");
    let smuggled = "GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n";
    for request in [
        format!(
            "POST / HTTP/1.1\r\n{head}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}"
        ),
        format!(
            "POST / HTTP/1.1\r\n{head}Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{smuggled}"
        ),
        format!("POST / HTTP/1.1\r\n{head}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n{smuggled}"),
        format!(
            "POST / HTTP/1.1\r\n{head}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n{smuggled}"
        ),
        format!(
            "POST / HTTP/1.1\r\n{head}Content-Length: 0\r\nContent-Length: 44\r\n\r\n{smuggled}"
        ),
        format!("POST / HTTP/1.1\r\n{head}Content-Length: +5\r\n\r\nhello{smuggled}"),
        format!("GET / HTTP/1.1\r\n{head}Host: 127.0.0.1\r\n\r\n"),
        format!("GET / HTTP/1.1\r\n{head}E2b-Sandbox-Id: other\r\n\r\n"),
        format!("GET / HTTP/1.1\r\n{head}X: a\r\n b\r\n\r\n"),
        format!("GET / HTTP/1.1\r\n{head}X : a\r\n\r\n"),
        format!("GET http://evil.test/ HTTP/1.1\r\n{head}\r\n"),
        format!("POST / HTTP/1.0\r\n{head}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}"),
    ] {
        let mut raw = Raw::new(setup.address).await;
        raw.write_text(&request).await;
        use tokio::io::AsyncWriteExt;
        raw.0.shutdown().await.unwrap();
        let answer = raw.rest().await;
        assert!(!answer.contains("smuggled"), "{request}\n{answer}");
        assert_eq!(answer.matches("HTTP/1.").count(), 1, "{request}\n{answer}");
        let refused = answer.starts_with("HTTP/1.1 400") || answer.starts_with("HTTP/1.0 400");
        // If a request has both lengths, only the chunks are passed to the guest, and the
        // connection is closed (RFC 9112, 6.3).
        let both = request.contains("Content-Length: 5\r\n") && request.contains("chunked");
        let one = both && answer.contains("connection: close") && guests.opened_count() > 0;
        assert!(refused || one, "{request}\n{answer}");
    }
}

#[tokio::test]
async fn a_sandbox_killed_during_a_request_is_reported_as_not_found() {
    let guests = Guests::raw(ID, 3000, |mut stream| async move {
        use tokio::io::AsyncReadExt;
        let _ = stream.read(&mut [0; 4096]).await;
    });
    let setup = Setup::new(&guests).await;
    let (status, text) = send_request(setup.address, client::get(3000, "/")).await;
    assert_eq!(status, 502);
    assert!(
        !text.contains("was not found"),
        "the sandbox exists: {text}"
    );
    let killed = guests.clone();
    guests.program(ID, 3000, move |mut stream| {
        let killed = killed.clone();
        async move {
            use tokio::io::AsyncReadExt;
            let _ = stream.read(&mut [0; 4096]).await;
            killed.remove_sandbox(ID);
        }
    });
    let (status, text) = send_request(setup.address, client::get(3000, "/")).await;
    assert_eq!(status, 502);
    assert!(text.contains("was not found"), "{text}");
}

#[tokio::test]
async fn an_error_reaches_a_client_that_is_still_sending() {
    let setup = Setup::new(&Guests::default()).await;
    for head in [
        // Rejected because the sandbox does not exist.
        format!(
            "POST /upload HTTP/1.1\r\nHost: 127.0.0.1\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 80\r\n"
        ),
        // Rejected because it cannot be parsed.
        "POST /upload HTTP/1.1\r\nHost : 127.0.0.1\r\n".to_owned(),
    ] {
        let mut client = Raw::new(setup.address).await;
        let body = "x".repeat(8 << 20);
        client
            .write_text(&format!("{head}Content-Length: {}\r\n\r\n", body.len()))
            .await;
        // The body exceeds the socket buffers, so sending completes only if the gateway reads it.
        client.write_text(&body).await;
        let answer = client.rest().await;
        let status = answer.split(' ').nth(1).unwrap_or_default();
        assert!(matches!(status, "502" | "400"), "{answer}");
    }
}

/// The head of a request for a sandbox that does not exist, with a body to come.
fn request_to_missing_sandbox(more: &str) -> String {
    format!(
        "POST /upload HTTP/1.1\r\nHost: 127.0.0.1\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 80\r\n{more}\r\n"
    )
}

#[tokio::test]
async fn a_connection_is_reused_after_a_request_was_rejected_before_its_body() {
    let setup = Setup::new(&Guests::default()).await;
    let bodies = [
        ("Content-Length: 2\r\n", "{}"),
        ("Transfer-Encoding: chunked\r\n", "2\r\n{}\r\n0\r\n\r\n"),
    ];
    for (number, (length, body)) in bodies.into_iter().enumerate() {
        let mut client = Raw::new(setup.address).await;
        client.write_text(&request_to_missing_sandbox(length)).await;
        setup
            .wait_for_counters(|t| t.not_found == number as u64 + 1)
            .await;
        let next = "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n";
        client.write_text(&format!("{body}{next}")).await;
        let answers = client.rest().await;
        assert!(answers.starts_with("HTTP/1.1 502 "), "{answers}");
        assert!(answers.ends_with("control plane"), "{answers}");
        // Only the second answer closes the connection, because its request has
        // `Connection: close`.
        assert_eq!(answers.matches("connection: close").count(), 1, "{answers}");
    }
}

#[tokio::test]
async fn a_rejected_client_that_withholds_its_body_gets_connection_close() {
    let setup = Setup::new(&Guests::default()).await;
    for more in [
        "Content-Length: 2\r\n",
        "Content-Length: 100000000\r\n",
        // The client waits for `100 Continue`, which does not come.
        "Content-Length: 2\r\nExpect: 100-continue\r\n",
    ] {
        let mut client = Raw::new(setup.address).await;
        client.write_text(&request_to_missing_sandbox(more)).await;
        let answer = client.until("}").await;
        assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");
        assert!(answer.contains("connection: close"), "{answer}");
    }
}

#[tokio::test]
async fn a_client_that_stops_sending_gets_the_control_planes_answer() {
    let setup = Setup::new(&Guests::default()).await;
    // A client that closes its sending side may have disconnected. The control plane then completes
    // only requests that change nothing (GET and HEAD).
    for (method, answered) in [("GET", true), ("POST", false)] {
        let mut client = Raw::new(setup.address).await;
        let request = format!("{method} /slow HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
        client.write_text(&request).await;
        client.0.shutdown().await.unwrap();
        let answer = client.rest().await;
        assert_eq!(answer.ends_with("control plane"), answered, "{answer}");
    }
}
