//! Members that are lost or frozen during a call. A member answers the message `who` with the id of
//! the sender, which is `h2` for the client of these tests.

use super::members::{Fleet, Host, LIMIT, SERVER};
use bytes::Bytes;
use hyper::Request;
use jiffy_fleet::channel::{ChannelError, empty_body};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;

#[tokio::test]
async fn calls_and_streams_end_when_the_peer_is_killed() {
    let fleet = Fleet::new();
    let host = Host::start(fleet.identity(SERVER)).await;
    let client = fleet.client();
    let request = Request::post("/requests/hold").body(()).unwrap();
    let mut stream = client
        .open_stream(SERVER, &host.address, request, LIMIT)
        .await
        .unwrap()
        .into_body();
    let call = tokio::spawn({
        let (client, address) = (client.clone(), host.address.clone());
        async move {
            let request = Request::post("/requests/never").body(empty_body()).unwrap();
            client.request(SERVER, &address, request, LIMIT).await
        }
    });
    host.echo.arrived.notified().await;
    let address = host.address.clone();
    let started = Instant::now();
    drop(host);
    stream.read(&mut [0; 8]).await.unwrap_err();
    let error = call.await.unwrap().unwrap_err();
    assert!(matches!(error, ChannelError::Lost { .. }), "{error:?}");
    // The peer has received the request, and may have executed it.
    assert!(!error.is_unsent());
    assert!(started.elapsed() < Duration::from_secs(5));
    // No server listens at the address any longer.
    let sent = client
        .message(SERVER, &address, "/message", Bytes::new(), LIMIT)
        .await;
    let error = sent.unwrap_err();
    assert!(matches!(error, ChannelError::Connect { .. }), "{error:?}");
}

#[tokio::test]
async fn a_member_that_restarts_is_reached_again() {
    let fleet = Fleet::new();
    let identity = fleet.identity(SERVER);
    let client = fleet.client();
    for _ in 0..3 {
        let host = Host::start(identity.clone()).await;
        assert_eq!(host.message(&client, "who").await.unwrap(), "h2");
        drop(host);
    }
}

#[tokio::test]
async fn a_call_of_a_frozen_peer_ends_at_its_limit() {
    let fleet = Fleet::new();
    let identity = fleet.identity(SERVER);
    let (address_sender, address) = mpsc::channel();
    let (freeze, frozen) = mpsc::channel::<()>();
    let (_thaw, thawed) = mpsc::channel::<()>();
    let peer = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async move {
            let host = Host::start(identity).await;
            address_sender.send(host.address.clone()).unwrap();
            // Serves until the test freezes this thread.
            while frozen.try_recv().is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // The whole runtime is blocked: no response, no answer to pings.
            let _ = thawed.recv();
        });
    });
    let address = address.recv().unwrap();
    let client = fleet.client();
    let send = |limit| {
        let message = Bytes::from("who");
        client.message(SERVER, &address, "/message", message, limit)
    };
    assert_eq!(send(LIMIT).await.unwrap(), "h2");
    freeze.send(()).unwrap();
    let limit = Duration::from_millis(500);
    let started = Instant::now();
    // Calls succeed until the thread of the peer has read `frozen`.
    while let Ok(answer) = send(limit).await {
        assert_eq!(answer, "h2");
        assert!(started.elapsed() < LIMIT);
    }
    // The connection to the frozen peer is still open, so a call ends at its limit.
    let started = Instant::now();
    let error = send(limit).await.unwrap_err();
    assert!(matches!(error, ChannelError::Timeout { .. }), "{error:?}");
    assert!(started.elapsed() < limit + Duration::from_secs(2));
    // A call with a longer limit ends when pings are not answered: 5 s to a ping, 5 s for its
    // answer, and tolerance.
    let error = send(Duration::from_secs(60)).await.unwrap_err();
    assert!(
        matches!(
            error,
            ChannelError::Lost { .. } | ChannelError::Connect { .. }
        ),
        "{error:?}"
    );
    assert!(started.elapsed() < Duration::from_secs(25));
    // This ends the wait of the peer's thread.
    drop(_thaw);
    peer.join().unwrap();
}

#[tokio::test]
async fn concurrent_calls_share_one_connect_to_a_silent_address() {
    let fleet = Fleet::new();
    // The kernel accepts connections, but no handshake follows.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let client = fleet.client();
    let started = Instant::now();
    let calls: Vec<_> = (0..50)
        .map(|_| {
            let (client, address) = (client.clone(), address.clone());
            tokio::spawn(async move {
                client
                    .message(SERVER, &address, "/message", Bytes::new(), LIMIT)
                    .await
            })
        })
        .collect();
    for call in calls {
        let error = call.await.unwrap().unwrap_err();
        assert!(matches!(error, ChannelError::Connect { .. }), "{error:?}");
    }
    // A handshake may take 3 s. 50 connects in succession would take 150 s.
    assert!(
        started.elapsed() < Duration::from_secs(8),
        "{:?}",
        started.elapsed()
    );
    let mut accepted = 0;
    while tokio::time::timeout(Duration::from_millis(50), silent.accept())
        .await
        .is_ok()
    {
        accepted += 1;
    }
    assert_eq!(accepted, 1);
}
