//! Streams through the gateway: bodies that are sent piece by piece, and disconnections of either
//! side.

use crate::support;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::IntoResponse;
use axum::routing::any;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use support::client::{self, Http1, Http2, Raw, body, to};
use support::guest::{Guests, answering};
use support::{ID, Setup, with_timeout};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

/// Body with frames from the test.
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

/// Returns a body and the sender of its frames.
fn fed() -> (mpsc::Sender<Frame<Bytes>>, Fed) {
    let (sender, receiver) = mpsc::channel(1);
    (sender, Fed(receiver))
}

/// Returns the data of the next frame.
async fn data(body: &mut hyper::body::Incoming) -> Bytes {
    with_timeout(body.frame())
        .await
        .unwrap()
        .unwrap()
        .into_data()
        .unwrap()
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
        // The next event is sent only after this one has arrived: the gateway must not buffer.
        sender.send(Frame::data(event.into())).await.unwrap();
        assert_eq!(data(&mut body).await, event);
    }
    drop(sender);
    assert!(with_timeout(body.frame()).await.is_none());
    setup.wait_for_counters(|t| t.exchanges_open == 0).await;
    // Each of the three events has 9 bytes.
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
    assert!(with_timeout(body.frame()).await.is_none());
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
    raw.write_text(&format!(
        "POST / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 3000\r\nTE: trailers\r\nTrailer: x-sum\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-sum: 42\r\n\r\n"
    ))
    .await;
    let answer = raw.until("42\r\n\r\n").await;
    assert!(answer.contains("0\r\nx-sum: 42"), "{answer}");
}

/// Returns a stream of the given items.
fn futures<T>(items: Vec<T>) -> impl futures_core::Stream<Item = T> {
    Ready(items.into_iter())
}

/// Stream whose items are available at once.
struct Ready<T>(std::vec::IntoIter<T>);

impl<T> Unpin for Ready<T> {}

impl<T> futures_core::Stream for Ready<T> {
    type Item = T;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<T>> {
        Poll::Ready(self.0.next())
    }
}

#[tokio::test]
async fn a_disconnect_of_the_client_closes_the_connection_to_the_guest() {
    // A guest that never responds, and a guest that never completes its response.
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
    let all_closed = || async {
        while guests.open_count() > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    let mut raw = Raw::new(setup.address).await;
    let request = format!(
        "GET /silent HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {ID}\r\n\
         E2b-Sandbox-Port: 3000\r\n\r\n"
    );
    raw.write_text(&request).await;
    setup.wait_for_counters(|t| t.guest_connections == 1).await;
    assert_eq!(guests.open_count(), 1);
    drop(raw);
    with_timeout(all_closed()).await;

    let mut http = Http1::new(setup.address).await;
    let answer = http.send(client::get(3000, "/endless")).await;
    assert_eq!(guests.open_count(), 1);
    http.hang_up();
    with_timeout(all_closed()).await;
    drop(answer);
    setup
        .wait_for_counters(|t| t.exchanges_open == 0 && t.connections_open == 0)
        .await;
}

#[tokio::test]
async fn a_guest_that_disconnects_interrupts_the_response() {
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
        with_timeout(body.frame()).await.unwrap().is_err(),
        "the response must not look complete"
    );
}

#[tokio::test]
async fn a_cancelled_http2_stream_closes_its_connection_to_the_guest() {
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
    assert_eq!(guests.open_count(), 1);
    drop(answer);
    with_timeout(async {
        while guests.open_count() > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    })
    .await;
    setup.wait_for_counters(|t| t.exchanges_open == 0).await;
    // The connection of the client remains usable for further streams.
    poll_fn(|cx| http.sender.poll_ready(cx)).await.unwrap();
}
