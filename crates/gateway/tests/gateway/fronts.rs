//! Fronts. A *front* is a process without sandboxes that passes each connection of a client to any
//! host of a fleet. That host forwards requests to the host of their sandbox.

use crate::forwarded::{Fleet, echo};
use crate::support;
use jiffy_gateway::{
    ForwardedConnection, FrontHosts, GatewayLimits, HostStream, Peer, Pending, serve_front,
};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use support::client::{Http1, Http2, body, to};
use support::guest::Guests;
use support::{DOMAIN, ID, Setup, collected, with_timeout};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// Hosts that a front uses in turn.
#[derive(Debug, Default)]
struct Hosts {
    streams: Mutex<Vec<mpsc::Sender<ForwardedConnection>>>,
    next: AtomicUsize,
}

impl FrontHosts for Hosts {
    fn open(&self, peer: Peer) -> Pending<'_, Result<HostStream, String>> {
        let hosts = self.streams.lock().unwrap().clone();
        let next = self.next.fetch_add(1, Ordering::SeqCst);
        Box::pin(async move {
            let host = hosts.get(next % hosts.len().max(1)).ok_or("no host")?;
            let (ours, theirs) = tokio::io::duplex(64 << 10);
            let connection = ForwardedConnection {
                stream: Box::new(theirs),
                peer,
                is_from_front: true,
            };
            host.send(connection).await.map_err(|e| e.to_string())?;
            let ours: HostStream = Box::new(ours);
            Ok(ours)
        })
    }
}

/// Running front.
struct Front {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    served: JoinHandle<()>,
}

impl Front {
    /// Starts a front for these hosts, without TLS.
    async fn start(hosts: &Arc<Hosts>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let limits = GatewayLimits {
            drain: std::time::Duration::from_millis(200),
            ..GatewayLimits::default()
        };
        let serving = serve_front(listener, None, limits, hosts.clone(), async {
            let _ = stopped.await;
        });
        Self {
            address,
            stop,
            served: tokio::spawn(serving),
        }
    }
}

/// Request of the control plane.
fn get(path: &str) -> hyper::Request<support::client::Body> {
    let request = hyper::Request::get(path).header("host", "127.0.0.1");
    request.body(body("")).unwrap()
}

/// Starts two hosts, of which `b` has the sandbox.
async fn hosts() -> (Arc<Fleet>, [Setup; 2], Arc<Hosts>) {
    let fleet = Arc::new(Fleet::default());
    let a = fleet.host("a", &Guests::default()).await;
    let b = fleet.host("b", &Guests::one(ID, 80, echo())).await;
    fleet.place(ID, "b");
    let hosts = Arc::new(Hosts::default());
    let streams = ["a", "b"].map(|name| fleet.stream(name));
    *hosts.streams.lock().unwrap() = streams.into();
    (fleet, [a, b], hosts)
}

#[tokio::test]
async fn a_front_without_sandboxes_serves_calls_and_sandboxes_of_all_hosts() {
    let (fleet, [_a, _b], hosts) = hosts().await;
    let front = Front::start(&hosts).await;
    // Connections are passed to both hosts in turn: one of them forwards to the other.
    for _ in 0..4 {
        let mut client = Http1::new(front.address).await;
        for length in [0, 300_000] {
            let request = to(80, "/path").method("POST");
            let request = request.body(body("x".repeat(length))).unwrap();
            let answer = client.send(request).await;
            assert_eq!(answer.status(), 200);
            let text = collected(answer.into_body()).await;
            assert!(text.contains(&format!("length {length}")), "{text}");
            // The host knows the address of the client.
            assert!(text.contains("x-forwarded-for: 127.0.0.1\n"), "{text}");
        }
        let answer = client.send(get("/any/call")).await;
        let text = collected(answer.into_body()).await;
        assert_eq!(text, "GET /any/call for 127.0.0.1");
    }
    assert!(fleet.opened() > 0);
    for _ in 0..2 {
        let mut client = Http2::over(TcpStream::connect(front.address).await.unwrap()).await;
        let request = hyper::Request::get(format!("http://80-{ID}.{DOMAIN}/"));
        let answer = client.send(request.body(body("")).unwrap()).await;
        assert_eq!(answer.status(), 200);
    }
    // A stopped front ends its connections, and another one serves the clients.
    let mut client = Http1::new(front.address).await;
    client.send(get("/health")).await;
    front.stop.send(()).unwrap();
    with_timeout(front.served).await.unwrap();
    let again = Front::start(&hosts).await;
    let answer = Http1::new(again.address).await.send(get("/health")).await;
    assert_eq!(answer.status(), 200);
}

#[tokio::test]
async fn a_front_without_hosts_answers_503_and_silent_clients_need_no_host() {
    let hosts = Arc::new(Hosts::default());
    let front = Front::start(&hosts).await;
    let silent = TcpStream::connect(front.address).await.unwrap();
    let mut stream = TcpStream::connect(front.address).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let mut text = String::new();
    with_timeout(stream.read_to_string(&mut text))
        .await
        .unwrap();
    assert!(text.starts_with("HTTP/1.1 503 "), "{text}");
    assert!(text.contains("Retry-After: 1\r\n"), "{text}");
    assert!(
        text.contains("No host of the fleet can be reached"),
        "{text}"
    );
    // HTTP/2 clients see the end of the connection.
    let mut stream = TcpStream::connect(front.address).await.unwrap();
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .await
        .unwrap();
    let mut rest = Vec::new();
    let read = with_timeout(stream.read_to_end(&mut rest)).await;
    assert!(read.is_err() || rest.is_empty(), "{rest:?}");
    // The silent client needed no host, but the other two did.
    assert_eq!(hosts.next.load(Ordering::SeqCst), 2);
    drop(silent);
}
