//! Memory usage of bodies and idle connections. A separate program, because the tests measure the
//! memory of the process.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "gateway/support/mod.rs"]
mod support;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::routing::any;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Frame;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::pin::Pin;
use std::task::{Context, Poll};
use support::client::{Http1, Raw, to};
use support::guest::Guests;
use support::{ID, Setup, config};
use tokio::sync::Mutex;
use tokio::time::{Duration, timeout};

const MIB: u64 = 1024 * 1024;
/// Serialises the tests, because each measures the memory of the process.
static MEMORY_LOCK: Mutex<()> = Mutex::const_new(());

/// Body with this number of zeros, in chunks of 64 KiB.
struct Zeros(u64);

impl hyper::body::Body for Zeros {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        static PIECE: [u8; 65536] = [0; 65536];
        if self.0 == 0 {
            return Poll::Ready(None);
        }
        let size = self.0.min(65536);
        self.0 -= size;
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(
            &PIECE[..size as usize],
        )))))
    }
}

/// Returns the number of bytes of a body, until its end or an error.
async fn size(mut body: impl hyper::body::Body<Data = Bytes> + Unpin) -> u64 {
    let mut total = 0;
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { break };
        total += frame.data_ref().map_or(0, |data| data.len() as u64);
    }
    total
}

/// Returns a value of `/proc/self/status` in bytes.
fn memory(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    let number = line.split_whitespace().nth(1).unwrap();
    number.parse::<u64>().unwrap() * 1024
}

#[tokio::test]
async fn a_hundred_mebibytes_pass_each_way_in_bounded_memory() {
    let _lock = MEMORY_LOCK.lock().await;
    let router = Router::new()
        .route(
            "/up",
            any(|request: Request| async move { size(request.into_body()).await.to_string() }),
        )
        .route("/down", any(|| async { Body::new(Zeros(100 * MIB)) }));
    let setup = Setup::new(&Guests::one(ID, 3000, router)).await;
    let mut http = Http1::new(setup.address).await;
    let before = memory("VmRSS");
    let passing = async {
        let up = to(3000, "/up").method("POST");
        let up = http
            .send(up.body(Zeros(100 * MIB).boxed_unsync()).unwrap())
            .await;
        let answer = up.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(answer, (100 * MIB).to_string());
        let down = to(3000, "/down").body(support::client::body("")).unwrap();
        let down = http.send(down).await;
        assert_eq!(size(down.into_body()).await, 100 * MIB);
    };
    timeout(Duration::from_secs(120), passing).await.unwrap();
    // The largest memory use since the start is below a quarter of a body.
    let grown = memory("VmHWM").saturating_sub(before);
    assert!(grown < 24 * MIB, "grown by {grown} bytes");
    let totals = setup.counters.totals();
    assert_eq!(totals.bytes_to_guests, 100 * MIB);
    assert!(totals.bytes_to_clients > 100 * MIB);
}

#[tokio::test]
async fn a_guest_that_does_not_read_blocks_the_client() {
    let _lock = MEMORY_LOCK.lock().await;
    let (read, reading) = tokio::sync::oneshot::channel::<()>();
    let reading = std::sync::Arc::new(Mutex::new(Some(reading)));
    let router = Router::new().fallback(any(move |request: Request| async move {
        let reading = reading.lock().await.take().unwrap();
        let _ = reading.await;
        size(request.into_body()).await.to_string()
    }));
    let setup = Setup::new(&Guests::one(ID, 3000, router)).await;
    let mut http = Http1::new(setup.address).await;
    let before = memory("VmRSS");
    let request = to(3000, "/").method("POST");
    let request = request.body(Zeros(100 * MIB).boxed_unsync()).unwrap();
    let sending = tokio::spawn(async move { http.send(request).await });
    // The transfer has stalled when the count has not changed for a while.
    let mut passed = u64::MAX;
    let still = async {
        while setup.counters.totals().bytes_to_guests != passed {
            passed = setup.counters.totals().bytes_to_guests;
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        passed
    };
    let passed = timeout(Duration::from_secs(30), still).await.unwrap();
    // Only the buffers of the sockets and of the gateway are full.
    assert!(
        passed < 8 * MIB,
        "{passed} bytes were taken for a guest that reads none"
    );
    let grown = memory("VmRSS").saturating_sub(before);
    assert!(grown < 24 * MIB, "grown by {grown} bytes");
    read.send(()).unwrap();
    let answer = timeout(Duration::from_secs(60), sending)
        .await
        .unwrap()
        .unwrap();
    let text = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(text, (100 * MIB).to_string());
}

/// Raises the limit of open descriptors. On failure, logs that the test is skipped.
fn descriptors(test: &str, needed: u64) -> bool {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    // A privileged process may raise the hard limit.
    if setrlimit(Resource::RLIMIT_NOFILE, needed, hard.max(needed)).is_err() {
        let reason = format!("needs {needed} descriptors, the limit is {hard}");
        eprintln!("skipped: {reason}");
        if let Ok(log) = std::env::var("JIFFY_SKIP_LOG") {
            use std::io::Write;
            let mut log = std::fs::OpenOptions::new()
                .append(true)
                .create(true)
                .open(log)
                .unwrap();
            writeln!(log, "{test}: {reason}").unwrap();
        }
        return false;
    }
    true
}

async fn idle_connections(count: usize) {
    let _lock = MEMORY_LOCK.lock().await;
    // Both ends of each connection are in this process. 200 more descriptors are enough for all
    // other files.
    let test = "ten_thousand_idle_connections_cost_little";
    if !descriptors(test, count as u64 * 2 + 200) {
        return;
    }
    let router = Router::new().fallback(any(|| async { "hello" }));
    let setup = Setup::with(config(), &Guests::one(ID, 3000, router), None).await;
    let request = format!(
        "GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 3000\r\n\r\n"
    );
    let before = memory("VmRSS");
    let mut open = Vec::with_capacity(count);
    for _ in 0..count {
        let mut raw = Raw::new(setup.address).await;
        raw.write_text(&request).await;
        raw.until("hello").await;
        open.push(raw);
    }
    let each = memory("VmRSS").saturating_sub(before) / count as u64;
    assert!(each < 40 * 1024, "{each} bytes per connection");
    println!("{count} idle connections: {each} bytes each, the client's end included");
    assert_eq!(setup.counters.totals().connections_open, count as u64);
    // All connections still work.
    for raw in open.iter_mut().step_by(100) {
        raw.write_text(&request).await;
        raw.until("hello").await;
    }
    drop(open);
    setup.wait_for_counters(|t| t.connections_open == 0).await;
}

#[tokio::test]
async fn a_silent_connection_costs_little_more_than_its_socket() {
    const COUNT: usize = 4_000;
    let _lock = MEMORY_LOCK.lock().await;
    let test = "a_silent_connection_costs_little_more_than_its_socket";
    if !descriptors(test, COUNT as u64 * 2 + 200) {
        return;
    }
    let setup = Setup::new(&Guests::default()).await;
    let before = memory("VmRSS");
    let mut open = Vec::with_capacity(COUNT);
    for _ in 0..COUNT {
        open.push(Raw::new(setup.address).await);
    }
    setup
        .wait_for_counters(|t| t.connections_open == COUNT as u64)
        .await;
    let each = memory("VmRSS").saturating_sub(before) / COUNT as u64;
    println!("{COUNT} silent connections: {each} bytes each, the client's end included");
    assert!(each < 8 * 1024, "{each} bytes per connection");
    // All connections can still send a request.
    for raw in open.iter_mut().step_by(100) {
        raw.write_text("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            .await;
        raw.until("control plane").await;
    }
}

#[tokio::test]
async fn ten_thousand_idle_connections_cost_little() {
    idle_connections(10_000).await;
}
