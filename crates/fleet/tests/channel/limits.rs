//! Messages and peers that exceed a limit.
//!
//! [`Host`] is the listener of a member, which echoes messages and bodies. It answers the message
//! `who` with the id of the sender, which is `h2` for the client of these tests.

use super::members::{Fleet, Host, LIMIT, SERVER};
use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::Request;
use hyper::body::Frame;
use jiffy_fleet::channel::{
    Body, ChannelError, Interrupted, Limits, MAX_MESSAGE_BYTES, empty_body,
};
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

/// Returns a body of `count` chunks of 64 KiB, and then of silence.
fn endless(count: usize) -> Body {
    struct Chunks(usize);
    impl hyper::body::Body for Chunks {
        type Data = Bytes;
        type Error = Interrupted;
        fn poll_frame(
            mut self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<Frame<Bytes>, Interrupted>>> {
            if self.0 == 0 {
                return std::task::Poll::Pending;
            }
            self.0 -= 1;
            let chunk = Bytes::from_static(&[7; 64 << 10]);
            std::task::Poll::Ready(Some(Ok(Frame::data(chunk))))
        }
    }
    Chunks(count).boxed_unsync()
}

/// Sends a body as a message, with an announced length if `length` is given. Returns the status and
/// the text of the response, and the duration of the call.
async fn post(
    fleet: &Fleet,
    host: &Host,
    body: Body,
    length: Option<u64>,
) -> (u16, String, Duration) {
    let mut request = Request::post("/message");
    if let Some(length) = length {
        request = request.header("content-length", length);
    }
    let request = request.body(body).unwrap();
    let started = Instant::now();
    let response = fleet
        .client()
        .request(SERVER, &host.address, request, LIMIT)
        .await
        .unwrap();
    let status = response.status().as_u16();
    let text = response.into_body().collect().await.unwrap().to_bytes();
    (
        status,
        String::from_utf8(text.to_vec()).unwrap(),
        started.elapsed(),
    )
}

#[tokio::test]
async fn messages_of_the_maximum_size_pass_and_larger_ones_do_not() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let client = fleet.client();
    let send = |size: usize| {
        let message = Bytes::from(vec![b'x'; size]);
        client.message(SERVER, &host.address, "/message", message, LIMIT)
    };
    assert_eq!(
        send(MAX_MESSAGE_BYTES).await.unwrap().len(),
        MAX_MESSAGE_BYTES
    );
    let error = send(MAX_MESSAGE_BYTES + 1).await.unwrap_err();
    assert!(matches!(error, ChannelError::TooLarge { .. }), "{error}");
    // The larger message did not reach the handler.
    assert_eq!(host.calls(), 1);
}

#[tokio::test]
async fn a_message_that_announces_or_sends_a_gibibyte_is_rejected() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let (status, text, _) = post(&fleet, &host, endless(0), Some(1 << 30)).await;
    assert_eq!((status, &*text), (413, "the body exceeds 2097152 bytes"));
    // Without an announcement, the body is read up to the limit.
    // 2^14 chunks of 64 KiB are 1 GiB.
    let (status, text, _) = post(&fleet, &host, endless(1 << 14), None).await;
    assert_eq!((status, &*text), (413, "the body exceeds 2097152 bytes"));
    assert_eq!(host.calls(), 0);
}

#[tokio::test]
async fn a_slow_sender_is_rejected_at_the_limit() {
    let fleet = Fleet::new();
    let limits = Limits {
        message: Duration::from_millis(300),
        ..Limits::default()
    };
    let host = Host::limited(fleet.identity(SERVER), limits).await;
    let (status, text, took) = post(&fleet, &host, endless(1), None).await;
    assert_eq!(status, 408, "{text}");
    assert!(took >= Duration::from_millis(300), "{took:?}");
    assert_eq!(host.calls(), 0);
}

#[tokio::test]
async fn connections_without_certificate_are_bounded_and_time_out() {
    let fleet = Fleet::new();
    let limits = Limits {
        connections_per_address: 20,
        handshake: Duration::from_secs(2),
        ..Limits::default()
    };
    let host = Host::limited(fleet.identity(SERVER), limits).await;
    // Peers that connect and never start the handshake.
    let mut open = Vec::new();
    let mut closed = 0;
    for _ in 0..100 {
        open.push(TcpStream::connect(&host.address).await.unwrap());
    }
    let started = Instant::now();
    // The connections beyond the limit are closed before the timeout of the handshake.
    for stream in &mut open[20..] {
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
        closed += 1;
    }
    assert_eq!(closed, 80);
    assert!(started.elapsed() < Duration::from_secs(2));
    // The other 20 connections end with the timeout of the handshake. After this, connections from
    // this address are accepted again.
    for stream in &mut open[..20] {
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
    }
    assert_eq!(host.message(&fleet.client(), "who").await.unwrap(), "h2");
}

#[tokio::test]
async fn unread_responses_do_not_block_messages_and_requests() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let client = fleet.client();
    let mut unread = Vec::new();
    for _ in 0..100 {
        // The host echoes 4 MiB, which this test does not read.
        let request = Request::post("/requests/body").body(endless(64)).unwrap();
        let sent = client.request(SERVER, &host.address, request, LIMIT).await;
        unread.push(sent.unwrap());
    }
    assert_eq!(host.message(&client, "who").await.unwrap(), "h2");
    let request = Request::post("/requests/empty").body(empty_body()).unwrap();
    let sent = client.request(SERVER, &host.address, request, LIMIT).await;
    assert_eq!(sent.unwrap().status(), 200);
    drop(unread);
}

#[tokio::test]
async fn bodies_of_any_length_are_streamed_in_both_directions() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let (sender, receiver) = tokio::sync::mpsc::channel::<Bytes>(1);
    let receiver = std::sync::Mutex::new(receiver);
    let stream = StreamBody::new(Receiver(receiver));
    let request = Request::post("/requests/body")
        .body(stream.boxed_unsync())
        .unwrap();
    let response = fleet
        .client()
        .request(SERVER, &host.address, request, LIMIT)
        .await
        .unwrap();
    // The response arrives before the request ends: each chunk returns before the next is sent.
    let mut body = response.into_body();
    for number in 0..200_u8 {
        sender
            .send(Bytes::from(vec![number; 64 << 10]))
            .await
            .unwrap();
        let mut arrived = 0;
        while arrived < 64 << 10 {
            let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
            assert!(frame.iter().all(|&byte| byte == number));
            arrived += frame.len();
        }
    }
    drop(sender);
    assert!(body.collect().await.unwrap().to_bytes().is_empty());
}

/// Stream of frames from a queue.
struct Receiver(std::sync::Mutex<tokio::sync::mpsc::Receiver<Bytes>>);

impl futures_core::Stream for Receiver {
    type Item = Result<Frame<Bytes>, Interrupted>;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        let mut receiver = self.0.lock().unwrap();
        receiver
            .poll_recv(cx)
            .map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}
