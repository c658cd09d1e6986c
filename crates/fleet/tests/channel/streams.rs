//! Streams of bytes between two members. The server answers the message `who` with the id of the
//! sender, which is `h2` for the client of these tests.

use super::members::{CLIENT, Fleet, Host, LIMIT, SERVER};
use hyper::Request;
use jiffy_fleet::channel::{Client, Stream};
use std::sync::atomic::Ordering;
use std::time::Instant;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

async fn open(client: &Client, host: &Host, path: &str) -> Stream {
    let request = Request::post(path).body(()).unwrap();
    let response = client
        .open_stream(SERVER, &host.address, request, LIMIT)
        .await
        .unwrap();
    assert_eq!(response.status(), 200);
    response.into_body()
}

#[tokio::test]
async fn the_directions_of_a_stream_end_on_their_own() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let mut stream = open(&fleet.client(), &host, "/requests/stream").await;
    let sent: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    stream.write_all(&sent).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut received = Vec::new();
    stream.read_to_end(&mut received).await.unwrap();
    assert!(received == sent);
}

#[tokio::test]
async fn a_dropped_stream_is_an_error_for_the_peer() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let client = fleet.client();
    let (mut completed, mut dropped) = (
        open(&client, &host, "/requests/stream").await,
        open(&client, &host, "/requests/stream").await,
    );
    // The host echoes only if the stream ended properly.
    completed.write_all(b"hello").await.unwrap();
    completed.shutdown().await.unwrap();
    let mut echo = String::new();
    completed.read_to_string(&mut echo).await.unwrap();
    assert_eq!(echo, "hello");
    dropped.write_all(b"hello").await.unwrap();
    // The read of the host fails, so the host does not echo. The connection remains usable.
    drop(dropped);
    assert_eq!(host.message(&client, "who").await.unwrap(), "h2");
}

#[tokio::test]
async fn open_streams_of_a_removed_member_end_and_its_requests_are_rejected_at_once() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let client = fleet.client();
    let mut stream = open(&client, &host, "/requests/hold").await;
    host.removed.store(CLIENT.0, Ordering::SeqCst);
    let error = host.message(&client, "who").await.unwrap_err();
    assert!(error.contains("h2 was removed from the fleet"), "{error}");
    let ended = timeout(LIMIT, stream.read(&mut [0; 8])).await;
    ended.unwrap().unwrap_err();
    // A request on a new connection is rejected as well.
    let error = host.message(&client, "who").await.unwrap_err();
    assert!(error.contains("h2 was removed from the fleet"), "{error}");
}

#[tokio::test]
async fn closing_a_member_ends_its_streams_at_once() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let client = fleet.client();
    let mut stream = open(&client, &host, "/requests/hold").await;
    let started = Instant::now();
    client.close(SERVER);
    stream.read(&mut [0; 8]).await.unwrap_err();
    assert!(started.elapsed().as_secs() < 2);
    // The next call connects again.
    assert_eq!(host.message(&client, "who").await.unwrap(), "h2");
}
