//! Uses of sandboxes by requests, from which idle timeouts are derived.

use crate::support;

use axum::http::StatusCode;
use axum::response::IntoResponse;
use jiffy_gateway::SandboxAccess;
use support::client::{self, Http1, Raw};
use support::guest::{Guests, answering};
use support::{ID, Setup, with_timeout};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

#[tokio::test]
async fn a_request_uses_its_sandbox_until_its_response_ends() {
    let guests = Guests::raw(ID, 3000, |mut stream| async move {
        let mut request = [0; 1024];
        let _ = stream.read(&mut request).await;
        let head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na";
        stream.write_all(head).await.unwrap();
        // The second byte is never sent: this waits until the gateway disconnects.
        let _ = stream.read(&mut request).await;
    });
    let setup = Setup::new(&guests).await;
    let mut http = Http1::new(setup.address).await;
    let answer = http.send(client::get(3000, "/")).await;
    assert_eq!((answer.status(), guests.use_count()), (StatusCode::OK, 1));
    // The client disconnects before the end of the response.
    drop(answer);
    http.hang_up();
    setup.wait_for_counters(|t| t.exchanges_open == 0).await;
    assert_eq!(guests.use_count(), 0);
}

#[tokio::test]
async fn an_upgraded_stream_is_no_request_in_progress() {
    static ENDED: Semaphore = Semaphore::const_new(0);
    let guests = Guests::raw(ID, 3000, |mut stream| async move {
        let mut request = [0; 1024];
        let _ = stream.read(&mut request).await;
        let head = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
            Upgrade: websocket\r\n\r\nfirst";
        stream.write_all(head).await.unwrap();
        let _ = ENDED.acquire().await;
    });
    let setup = Setup::new(&guests).await;
    let mut raw = Raw::new(setup.address).await;
    raw.write_text(&format!(
        "GET / HTTP/1.1\r\nHost: 3000-{ID}.localhost\r\nConnection: Upgrade\r\n\
         Upgrade: websocket\r\n\r\n"
    ))
    .await;
    raw.until("first").await;
    // The stream is open, and only its traffic counts.
    assert_eq!(setup.counters.totals().exchanges_open, 1);
    assert_eq!(guests.use_count(), 0);
    ENDED.close();
    with_timeout(raw.rest()).await;
}

#[tokio::test]
async fn a_request_without_access_uses_no_sandbox() {
    let answer = || StatusCode::OK.into_response();
    let guests = Guests::one(ID, 3000, answering(answer));
    let access = SandboxAccess {
        traffic_token: Some("secret".to_owned()),
        ..SandboxAccess::default()
    };
    guests.add(ID, access);
    let setup = Setup::new(&guests).await;
    let (status, _) = client::send_request(setup.address, client::get(3000, "/")).await;
    assert_eq!((status, guests.all_uses()), (403, 0));
    let request = client::to(3000, "/").header("e2b-traffic-access-token", "secret");
    let request = request.body(client::body("")).unwrap();
    let (status, _) = client::send_request(setup.address, request).await;
    assert_eq!((status, guests.all_uses()), (200, 1));
}
