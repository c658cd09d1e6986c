//! The owner's Unix socket.

use crate::support;

use axum::Router;
use jiffy_gateway::{Gateway, Peer, serve_local};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use support::guest::Guests;
use support::{config, with_timeout};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// Returns the response to a client with this test's user id, from a socket with the check `may`.
async fn answer(may: impl Fn(u32) -> bool + Send + 'static) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let control = Router::new().fallback(|request: axum::extract::Request| async move {
        let peer = request.extensions().get::<Peer>();
        format!("local: {}", peer.unwrap().local)
    });
    let gateway = Gateway::new(config(), Guests::default(), control, None);
    let listener = UnixListener::bind(&path).unwrap();
    let served = tokio::spawn(serve_local(listener, gateway, may, std::future::pending()));
    let text = with_timeout(send_request(&path)).await;
    served.abort();
    text
}

/// Sends a request over a Unix socket. Returns the bytes that are received until its end.
async fn send_request(path: &Path) -> String {
    let mut stream = UnixStream::connect(path).await.unwrap();
    let request = b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n";
    // Ignore the error: writing may fail for a rejected client.
    let _ = stream.write_all(request).await;
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text).await;
    text
}

#[tokio::test]
async fn only_allowed_user_ids_are_served_and_are_local() {
    let us = std::fs::metadata("/proc/self").unwrap().uid();
    let text = answer(move |uid| uid == us).await;
    assert!(text.ends_with("local: true"), "{text}");
    assert_eq!(answer(move |uid| uid != us).await, "");
}
