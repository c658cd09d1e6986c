//! Reuse of connections into guests.

use crate::support;

use axum::Router;
use axum::routing::any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use support::client::{self, ask, body, to};
use support::guest::Guests;
use support::{ID, Setup, within};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

fn hello() -> Router {
    Router::new().fallback(any(|| async { "hello" }))
}

async fn until_waiting(setup: &Setup, count: usize) {
    within(async {
        while setup.pool.idle_count() != count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn the_next_request_takes_the_same_connection() {
    let guests = Guests::one(ID, 3000, hello());
    let setup = Setup::new(&guests).await;
    for _ in 0..5 {
        assert_eq!(ask(setup.address, client::get(3000, "/")).await.1, "hello");
        until_waiting(&setup, 1).await;
    }
    assert_eq!(guests.opened(), 1);
    assert_eq!(setup.counters.totals().reused, 4);
}

#[tokio::test]
async fn an_idle_connection_is_closed_after_seconds() {
    let guests = Guests::one(ID, 3000, hello());
    let setup = Setup::new(&guests).await;
    ask(setup.address, client::get(3000, "/")).await;
    until_waiting(&setup, 1).await;
    until_waiting(&setup, 0).await;
    within(async {
        while guests.open_now() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    // The next connection is closed after its idle timeout, too.
    ask(setup.address, client::get(3000, "/")).await;
    until_waiting(&setup, 1).await;
    until_waiting(&setup, 0).await;
}

#[tokio::test]
async fn a_sandbox_that_was_rolled_back_is_connected_to_anew() {
    let guests = Guests::one(ID, 3000, hello());
    let setup = Setup::new(&guests).await;
    ask(setup.address, client::get(3000, "/")).await;
    until_waiting(&setup, 1).await;
    setup.pool.invalidate("another");
    assert_eq!(setup.pool.idle_count(), 1);
    setup.pool.invalidate(ID);
    assert_eq!(setup.pool.idle_count(), 0);
    ask(setup.address, client::get(3000, "/")).await;
    assert_eq!(guests.opened(), 2);
}

#[tokio::test]
async fn a_connection_in_use_during_a_rollback_does_not_come_back() {
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
    let asking = tokio::spawn(async move { ask(address, client::get(3000, "/")).await });
    setup.counted(|t| t.guest_connections == 1).await;
    setup.pool.invalidate(ID);
    answer.send(()).unwrap();
    assert_eq!(within(asking).await.unwrap().1, "hello");
    within(async {
        while guests.open_now() > 0 {
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
    ask(setup.address, client::get(3000, "/")).await;
    until_waiting(&setup, 1).await;
    assert_eq!(
        ask(setup.address, client::get(3000, "/")).await,
        (200, "ok".to_owned())
    );
    assert_eq!(requests.load(Ordering::SeqCst), 3);
    assert_eq!(setup.counters.totals().retried, 1);
}

#[tokio::test]
async fn a_request_that_cannot_be_repeated_is_sent_once() {
    for (method, text) in [("POST", "once"), ("POST", ""), ("PUT", "once")] {
        let requests = Arc::new(AtomicUsize::new(0));
        let guests = once_each(Arc::clone(&requests));
        let setup = Setup::new(&guests).await;
        ask(setup.address, client::get(3000, "/")).await;
        until_waiting(&setup, 1).await;
        let request = to(3000, "/").method(method).body(body(text)).unwrap();
        assert_eq!(ask(setup.address, request).await.0, 502);
        assert_eq!(requests.load(Ordering::SeqCst), 2, "{method} {text}");
    }
}

#[tokio::test]
async fn an_answer_that_ends_the_connection_is_the_last_on_it() {
    let router = Router::new().fallback(any(|| async { ([("connection", "close")], "bye") }));
    let guests = Guests::one(ID, 3000, router);
    let setup = Setup::new(&guests).await;
    for _ in 0..3 {
        assert_eq!(ask(setup.address, client::get(3000, "/")).await.1, "bye");
    }
    assert_eq!(guests.opened(), 3);
}
