//! Guests and servers that try to exhaust the proxy.

use crate::lab::{HOST, Lab, OWNER, ServerKind};
use crate::{ONE, TWO, raw, status};
use bytes::Bytes;
use http_body_util::Empty;
use hyper::Request;
use hyper_util::rt::{TokioExecutor, TokioIo};
use jiffy_engine_api::RefusalReason;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Maximum number of bytes that the kernel and the proxy may hold for one connection.
const MAX_HELD: usize = 24 << 20;

/// Waits until the server cannot write more.
async fn stalled(lab: &Lab) {
    let mut before = 0;
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = lab.written.load(Ordering::Relaxed);
        assert!(now < MAX_HELD, "{now} bytes are held for the guest");
        if now == before && now > 0 {
            return;
        }
        before = now;
    }
}

#[tokio::test]
async fn an_endless_response_to_a_guest_that_does_not_read_is_bounded() {
    let lab = Lab::new(ServerKind::default()).await;
    let mut stream = lab.tls(Lab::rule(), ONE, OWNER).await;
    let request = format!("GET /endless HTTP/1.1\r\nHost: {HOST}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    stalled(&lab).await;
    // The response continues when the guest reads.
    let mut part = vec![0; 4 << 20];
    stream.read_exact(&mut part).await.unwrap();
    assert!(part.starts_with(b"HTTP/1.1 200"));
}

#[tokio::test]
async fn concurrent_endless_responses_of_http_2_are_bounded() {
    let lab = Lab::new(ServerKind::default()).await;
    let stream = lab.tls(Lab::rule(), TWO, OWNER).await;
    let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    // The guest accepts 1 MiB before its program reads.
    let builder = builder.initial_stream_window_size(1 << 20);
    let builder = builder.initial_connection_window_size(1 << 20);
    let handshake = builder.handshake(TokioIo::new(stream));
    let (sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let mut responses = tokio::task::JoinSet::new();
    for _ in 0..64 {
        let mut sender = sender.clone();
        responses.spawn(async move {
            let request = Request::get(format!("https://{HOST}/endless"));
            let request = request.body(Empty::<Bytes>::new()).unwrap();
            sender.send_request(request).await
        });
    }
    // No response is read.
    let first = responses.join_next().await;
    assert_eq!(first.unwrap().unwrap().unwrap().status(), 200);
    stalled(&lab).await;
}

#[tokio::test]
async fn the_connections_of_a_key_are_limited_and_other_keys_are_not_affected() {
    let lab = Lab::new(ServerKind {
        is_tls: false,
        ..ServerKind::default()
    })
    .await;
    // 1024 is `MAX_CONNECTIONS` of the proxy. The guests send nothing.
    let mut held: Vec<_> = (0..1024)
        .map(|_| lab.open(Lab::rule(), true, OWNER))
        .collect();
    let mut beyond = lab.open(Lab::rule(), true, OWNER);
    assert_eq!(beyond.read(&mut [0]).await.unwrap(), 0);
    assert_eq!(lab.refusals(), [RefusalReason::Limit]);
    // The proxy answers a request over plain HTTP with 403, because the rule adds a secret.
    let request = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n");
    let other = raw(lab.open(Lab::rule(), false, "bob"), &request).await;
    assert_eq!(status(&other), "403", "{other}");
    // A closed connection frees its permit.
    drop(held.pop());
    let again = async {
        loop {
            let answer = raw(lab.open(Lab::rule(), false, OWNER), &request).await;
            if !answer.is_empty() {
                return answer;
            }
        }
    };
    let again = tokio::time::timeout(Duration::from_secs(10), again).await;
    assert_eq!(status(&again.unwrap()), "403");
}

#[tokio::test]
async fn an_authority_of_another_host_is_recorded_and_nothing_is_sent() {
    let mut lab = Lab::new(ServerKind::default()).await;
    let other = Lab::new(ServerKind::default()).await;
    // The key of this authority is encrypted for the other host. This host cannot decrypt it.
    lab.authority = other.authority;
    let result = lab.try_tls(Lab::rule(), ONE, OWNER).await;
    assert!(result.is_err());
    assert_eq!(lab.refusals(), [RefusalReason::Authority]);
    assert!(lab.seen().is_empty() && lab.uses().is_empty());
}
