//! Reuse of connections into guests.

use crate::support;

use axum::Router;
use axum::routing::any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use support::client::{self, body, send_request, to};
use support::guest::Guests;
use support::{ID, Setup, with_timeout};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Returns the routes of a server that responds at once.
fn hello() -> Router {
    Router::new().fallback(any(|| async { "hello" }))
}

/// Waits until the pool has `count` idle connections.
async fn until_waiting(setup: &Setup, count: usize) {
    with_timeout(async {
        while setup.pool.idle_count() != count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn the_next_request_reuses_the_connection() {
    let guests = Guests::one(ID, 3000, hello());
    let setup = Setup::new(&guests).await;
    for _ in 0..5 {
        assert_eq!(
            send_request(setup.address, client::get(3000, "/")).await.1,
            "hello"
        );
        until_waiting(&setup, 1).await;
    }
    assert_eq!(guests.opened_count(), 1);
    assert_eq!(setup.counters.totals().reused, 4);
}

#[tokio::test]
async fn an_idle_connection_is_closed_after_seconds() {
    let guests = Guests::one(ID, 3000, hello());
    let setup = Setup::new(&guests).await;
    send_request(setup.address, client::get(3000, "/")).await;
    until_waiting(&setup, 1).await;
    until_waiting(&setup, 0).await;
    with_timeout(async {
        while guests.open_count() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    // The next connection is closed after its idle timeout, too.
    send_request(setup.address, client::get(3000, "/")).await;
    until_waiting(&setup, 1).await;
    until_waiting(&setup, 0).await;
}

#[tokio::test]
async fn a_rolled_back_sandbox_gets_new_connections() {
    let guests = Guests::one(ID, 3000, hello());
    let setup = Setup::new(&guests).await;
    send_request(setup.address, client::get(3000, "/")).await;
    until_waiting(&setup, 1).await;
    setup.pool.invalidate("another");
    assert_eq!(setup.pool.idle_count(), 1);
    setup.pool.invalidate(ID);
    assert_eq!(setup.pool.idle_count(), 0);
    send_request(setup.address, client::get(3000, "/")).await;
    assert_eq!(guests.opened_count(), 2);
}

#[tokio::test]
async fn a_connection_in_use_during_a_rollback_is_not_reused() {
    let (answer, answered) = tokio::sync::oneshot::channel::<()>();
    let answered = Arc::new(tokio::sync::Mutex::new(Some(answered)));
    let router = Router::new().fallback(any(move || async move {
        if let Some(answered) = answered.lock().await.take() {
            let _ = answered.await;
        }
        "hello"
    }));
    let guests = Guests::one(ID, 3000, router);
    let setup = Setup::new(&guests).await;
    let address = setup.address;
    let pending_response =
        tokio::spawn(async move { send_request(address, client::get(3000, "/")).await });
    setup.wait_for_counters(|t| t.guest_connections == 1).await;
    setup.pool.invalidate(ID);
    answer.send(()).unwrap();
    assert_eq!(with_timeout(pending_response).await.unwrap().1, "hello");
    with_timeout(async {
        while guests.open_count() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    assert_eq!(setup.pool.idle_count(), 0);
}

/// Guest that responds once per connection and closes it at the second request without a response.
fn once_each(requests: Arc<AtomicUsize>) -> Guests {
    Guests::raw(ID, 3000, move |mut stream: UnixStream| {
        let requests = Arc::clone(&requests);
        async move {
            let mut buffer = [0; 4096];
            if stream.read(&mut buffer).await.is_ok_and(|n| n > 0) {
                requests.fetch_add(1, Ordering::SeqCst);
                let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
                let _ = stream.write_all(answer).await;
                if stream.read(&mut buffer).await.is_ok_and(|n| n > 0) {
                    requests.fetch_add(1, Ordering::SeqCst);
                }
            }
        }
    })
}

#[tokio::test]
async fn a_dead_connection_is_replaced_once() {
    let requests = Arc::new(AtomicUsize::new(0));
    let guests = once_each(Arc::clone(&requests));
    let setup = Setup::new(&guests).await;
    send_request(setup.address, client::get(3000, "/")).await;
    until_waiting(&setup, 1).await;
    assert_eq!(
        send_request(setup.address, client::get(3000, "/")).await,
        (200, "ok".to_owned())
    );
    // The second request is sent twice: on the old connection, and on a new one.
    assert_eq!(requests.load(Ordering::SeqCst), 3);
    assert_eq!(setup.counters.totals().retried, 1);
}

#[tokio::test]
async fn a_request_that_cannot_be_repeated_is_sent_once() {
    for (method, text) in [("POST", "once"), ("POST", ""), ("PUT", "once")] {
        let requests = Arc::new(AtomicUsize::new(0));
        let guests = once_each(Arc::clone(&requests));
        let setup = Setup::new(&guests).await;
        send_request(setup.address, client::get(3000, "/")).await;
        until_waiting(&setup, 1).await;
        let request = to(3000, "/").method(method).body(body(text)).unwrap();
        assert_eq!(send_request(setup.address, request).await.0, 502);
        // The first GET, and this request on its connection, which the guest closed. It is not sent
        // again on a new connection.
        assert_eq!(requests.load(Ordering::SeqCst), 2, "{method} {text}");
    }
}

#[tokio::test]
async fn a_response_that_closes_the_connection_is_its_last() {
    let router = Router::new().fallback(any(|| async { ([("connection", "close")], "bye") }));
    let guests = Guests::one(ID, 3000, router);
    let setup = Setup::new(&guests).await;
    for _ in 0..3 {
        assert_eq!(
            send_request(setup.address, client::get(3000, "/")).await.1,
            "bye"
        );
    }
    assert_eq!(guests.opened_count(), 3);
}
