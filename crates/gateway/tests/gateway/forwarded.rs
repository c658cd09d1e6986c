//! Requests to sandboxes of other hosts: two or three gateways in one process.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use crate::support;

use axum::Router;
use axum::extract::Request;
use axum::routing::any;
use jiffy_gateway::{
    ForwardedConnection, HostStream, LinkSigner, Location, OpenError, OtherHosts, Peer, Pending,
    SandboxAccess,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use support::client::{Http1, Http2, Raw, body, get, send_request, to};
use support::guest::{Guests, answering};
use support::{DOMAIN, ID, KEY, Setup, collected, with_timeout};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};

/// Expiry of links that are valid during the whole test, in seconds since 1970. The shift makes it
/// short enough for the label of a host name.
const FAR_FUTURE: u64 = u64::MAX >> 20;

/// Directory of a fleet, shared by its gateways.
#[derive(Debug, Default)]
pub struct Fleet {
    /// Host of each sandbox. The host `?` stands for a place that cannot be looked up.
    places: Mutex<HashMap<String, String>>,
    /// Places that hosts remember, which may be outdated.
    remembered: Mutex<HashMap<String, String>>,
    /// Queues of streams to each host.
    streams: Mutex<HashMap<String, mpsc::Sender<ForwardedConnection>>>,
    /// Notified when a host is lost.
    lost: Mutex<HashMap<String, Arc<Notify>>>,
    /// Number of streams between hosts that were opened.
    opened: AtomicUsize,
}

impl Fleet {
    pub fn place(&self, sandbox: &str, host: &str) {
        let place = (sandbox.to_owned(), host.to_owned());
        self.places.lock().unwrap().extend([place]);
    }

    fn remember(&self, sandbox: &str, host: &str) {
        let place = (sandbox.to_owned(), host.to_owned());
        self.remembered.lock().unwrap().extend([place]);
    }

    fn lost_of(&self, host: &str) -> Arc<Notify> {
        let mut lost = self.lost.lock().unwrap();
        lost.entry(host.to_owned()).or_default().clone()
    }

    /// Returns the queue of streams to a host.
    pub fn stream(&self, name: &str) -> mpsc::Sender<ForwardedConnection> {
        self.streams.lock().unwrap()[name].clone()
    }

    pub fn opened(&self) -> usize {
        self.opened.load(Ordering::SeqCst)
    }

    /// Starts the gateway of a host with the given sandboxes.
    pub async fn host(self: &Arc<Self>, name: &str, guests: &Guests) -> Setup {
        let (setup, streams) = Setup::in_fleet(guests, self.clone()).await;
        let host = (name.to_owned(), streams);
        self.streams.lock().unwrap().extend([host]);
        setup
    }
}

impl OtherHosts for Fleet {
    fn locate<'a>(&'a self, sandbox: &'a str) -> Pending<'a, Location> {
        let remembered = self.remembered.lock().unwrap().get(sandbox).cloned();
        let place = remembered.or_else(|| self.places.lock().unwrap().get(sandbox).cloned());
        let location = match place {
            Some(host) if host == "?" => Location::Unavailable("no coordinator".to_owned()),
            Some(host) => Location::Host(host.into()),
            None => Location::Unknown,
        };
        Box::pin(async move { location })
    }

    fn forget(&self, sandbox: &str) {
        self.remembered.lock().unwrap().remove(sandbox);
    }

    fn open<'a>(&'a self, host: &'a str, peer: Peer) -> Pending<'a, Result<HostStream, OpenError>> {
        let streams = self.streams.lock().unwrap().get(host).cloned();
        Box::pin(async move {
            let unreachable = || OpenError::Unavailable("h9 is not reachable".to_owned());
            let streams = streams.ok_or_else(unreachable)?;
            self.opened.fetch_add(1, Ordering::SeqCst);
            let (ours, theirs) = tokio::io::duplex(64 << 10);
            let stream: HostStream = Box::new(theirs);
            let forwarded = ForwardedConnection {
                stream,
                peer,
                is_from_front: false,
            };
            streams.send(forwarded).await.map_err(|_| unreachable())?;
            let ours: HostStream = Box::new(ours);
            Ok(ours)
        })
    }

    fn lost(&self, host: Arc<str>) -> Pending<'static, ()> {
        let lost = self.lost_of(&host);
        Box::pin(async move { lost.notified().await })
    }
}

/// Guest that returns the head of each request, and the length of its body.
pub fn echo() -> Router {
    Router::new().fallback(any(|request: Request| async move {
        let (parts, body) = request.into_parts();
        let length = axum::body::to_bytes(body, usize::MAX).await.unwrap().len();
        let headers: Vec<String> = parts
            .headers
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect();
        let head = headers.join("\n");
        format!("{} {}\n{head}\nlength {length}", parts.method, parts.uri)
    }))
}

/// Returns a fleet in which `b` has the sandbox, and clients use `a`.
async fn pair(guests: &Guests) -> (Arc<Fleet>, Setup, Setup) {
    let fleet = Arc::new(Fleet::default());
    let a = fleet.host("a", &Guests::default()).await;
    let b = fleet.host("b", guests).await;
    fleet.place(ID, "b");
    (fleet, a, b)
}

#[tokio::test]
async fn any_host_serves_all_sandboxes_over_http_1_and_http_2() {
    let guests = Guests::one(ID, 80, echo());
    let (fleet, a, b) = pair(&guests).await;
    let mut client = Http1::new(a.address).await;
    for length in [0, 1, 300_000] {
        let request = to(80, "/path?q=1")
            .method("POST")
            .body(body("x".repeat(length)));
        let answer = client.send(request.unwrap()).await;
        assert_eq!(answer.status(), 200);
        let text = collected(answer.into_body()).await;
        assert!(text.starts_with("POST /path?q=1\n"), "{text}");
        assert!(text.contains(&format!("length {length}")), "{text}");
        // The guest receives the same headers as without a fleet: the address of the client, and no
        // header that hosts add for each other.
        assert!(text.contains("x-forwarded-for: 127.0.0.1\n"), "{text}");
        assert!(!text.contains("jiffy-"), "{text}");
    }
    assert_eq!(fleet.opened(), 1, "a client's requests share a connection");
    let mut client = Http2::over(TcpStream::connect(a.address).await.unwrap()).await;
    let requests = (0..3).map(|i| {
        let request = hyper::Request::get(format!("http://80-{ID}.{DOMAIN}/{i}"));
        request.body(body("")).unwrap()
    });
    for request in requests {
        let answer = client.send(request).await;
        assert_eq!(answer.status(), 200);
        let text = collected(answer.into_body()).await;
        assert!(text.contains(&format!("host: 80-{ID}.{DOMAIN}")), "{text}");
    }
    // Each of the two clients has sent three requests.
    assert_eq!(b.counters.totals().answered, 6);
    assert_eq!(a.counters.totals().forwarded, 6);
}

#[tokio::test]
async fn websockets_and_raw_streams_pass_in_both_directions() {
    let guests = Guests::raw(ID, 80, |mut stream| async move {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap().to_lowercase();
        assert!(head.contains("upgrade: websocket"), "{head}");
        let answer = "HTTP/1.1 101 x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
        stream.write_all(answer.as_bytes()).await.unwrap();
        let (mut read, mut write) = stream.split();
        let _ = tokio::io::copy(&mut read, &mut write).await;
    });
    let (fleet, a, _b) = pair(&guests).await;
    let mut client = Raw::new(a.address).await;
    let request = format!(
        "GET / HTTP/1.1\r\nHost: 80-{ID}.{DOMAIN}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    );
    client.write_text(&request).await;
    let head = client.until("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    for text in ["one;", "two;"] {
        client.write_text(text).await;
        assert_eq!(client.until(";").await, text);
    }
    // The stream ends with the host.
    fleet.lost_of("b").notify_waiters();
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn tokens_and_links_are_checked_by_the_host_of_the_sandbox() {
    let guests = Guests::default();
    let access = SandboxAccess {
        traffic_token: Some("token".to_owned()),
        ..SandboxAccess::default()
    };
    guests.add(ID, access);
    guests.web(ID, 80, echo());
    let (_fleet, a, _b) = pair(&guests).await;
    assert_eq!(send_request(a.address, get(80, "/")).await.0, 403);
    let request = to(80, "/").header("e2b-traffic-access-token", "token");
    let (status, text) = send_request(a.address, request.body(body("")).unwrap()).await;
    assert_eq!(status, 200);
    assert!(!text.contains("access-token"), "{text}");
    // A link may be signed on any host, with the key of the fleet.
    let label = LinkSigner::new(&KEY).label(ID, 80, FAR_FUTURE).unwrap();
    let request = hyper::Request::get("/").header("host", format!("{label}.{DOMAIN}"));
    let (status, _) = send_request(a.address, request.body(body("")).unwrap()).await;
    assert_eq!(status, 200);
    // A link that was signed with another key is rejected. The fleet has the key `KEY`.
    let label = LinkSigner::new(&[8; 32]).label(ID, 80, FAR_FUTURE).unwrap();
    let request = hyper::Request::get("/").header("host", format!("{label}.{DOMAIN}"));
    let (status, _) = send_request(a.address, request.body(body("")).unwrap()).await;
    assert_eq!(status, 403);
}

#[tokio::test]
async fn a_request_without_a_body_is_repeated_once_if_the_sandbox_has_moved() {
    let guests = Guests::one(ID, 80, echo());
    let (fleet, a, _b) = pair(&guests).await;
    let c = fleet.host("c", &Guests::default()).await;
    // Host `a` remembers an outdated place: host `c` does not have the sandbox.
    fleet.remember(ID, "c");
    let (status, text) = send_request(a.address, get(80, "/")).await;
    assert_eq!(status, 200, "{text}");
    assert_eq!(a.counters.totals().repeated, 1);
    assert_eq!(c.counters.totals().answered, 0);
    // A request with a body is not repeated, because the body may have been sent already. The host
    // forgets the outdated place, so the next request succeeds.
    fleet.remember(ID, "c");
    let request = to(80, "/").method("POST").body(body("x")).unwrap();
    let (status, text) = send_request(a.address, request).await;
    assert_eq!(status, 503, "{text}");
    let request = to(80, "/").method("POST").body(body("x")).unwrap();
    assert_eq!(send_request(a.address, request).await.0, 200);
    // A host never forwards a request of another host. The directory now names host `c`, which does
    // not have the sandbox and would otherwise pass the request on.
    fleet.place(ID, "c");
    let (status, text) = send_request(a.address, get(80, "/")).await;
    assert_eq!(status, 502, "{text}");
    assert_eq!(c.counters.totals().forwarded, 0);
}

#[tokio::test]
async fn a_guest_cannot_claim_that_its_sandbox_has_moved() {
    let guests = Guests::one(
        ID,
        80,
        answering(|| {
            let head = axum::http::Response::builder()
                .status(421)
                .header("jiffy-moved", "1");
            head.body("guest".into()).unwrap()
        }),
    );
    let (_fleet, a, b) = pair(&guests).await;
    let (status, text) = send_request(a.address, get(80, "/")).await;
    assert_eq!((status, text.as_str()), (421, "guest"));
    assert_eq!(a.counters.totals().repeated, 0);
    assert_eq!(b.counters.totals().answered, 1);
}

#[tokio::test]
async fn a_request_to_a_lost_or_frozen_host_ends_with_503() {
    let guests = Guests::one(ID, 80, echo());
    let (fleet, a, _b) = pair(&guests).await;
    guests.stall();
    let address = a.address;
    let request = tokio::spawn(async move { send_request(address, get(80, "/")).await });
    a.wait_for_counters(|totals| totals.exchanges_open == 1)
        .await;
    let lost = fleet.lost_of("b");
    // Repeat the notification: it has no effect before the gateway waits for it.
    let ended = async {
        while !request.is_finished() {
            lost.notify_waiters();
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        request.await.unwrap()
    };
    let (status, text) = with_timeout(ended).await;
    assert_eq!(status, 503, "{text}");
    assert!(text.contains("was lost"), "{text}");
    // The first host does not exist. The second one stands for an unknown place.
    for (host, reason) in [("h9", "not reachable"), ("?", "no coordinator")] {
        fleet.place(ID, host);
        let (status, text) = send_request(a.address, get(80, "/")).await;
        assert_eq!(status, 503, "{text}");
        assert!(text.contains(reason), "{text}");
    }
    // A sandbox that is not in the directory does not exist.
    fleet.places.lock().unwrap().clear();
    assert_eq!(send_request(a.address, get(80, "/")).await.0, 502);
}

#[tokio::test]
async fn a_forwarded_connection_reaches_sandboxes_only() {
    let guests = Guests::one(ID, 80, echo());
    let (fleet, _a, _b) = pair(&guests).await;
    let peer = Peer {
        ip: [192, 0, 2, 7].into(),
        tls: true,
        local: true,
    };
    let stream = fleet.open("b", peer).await.unwrap();
    let mut client = Http1::over(stream).await;
    let text = collected(client.send(get(80, "/")).await.into_body()).await;
    assert!(text.contains("x-forwarded-for: 192.0.2.7\n"), "{text}");
    assert!(text.contains("x-forwarded-proto: https"), "{text}");
    for path in ["/health", "/sandboxes"] {
        let request = hyper::Request::get(path).header("host", "127.0.0.1");
        let answer = client.send(request.body(body("")).unwrap()).await;
        assert_eq!(answer.status(), 421, "{path}");
        // The gateway closes the connection after a rejected head.
        client = Http1::over(fleet.open("b", peer).await.unwrap()).await;
    }
}

#[tokio::test]
async fn links_to_files_name_their_sandbox_in_a_fleet() {
    // 49983 is the port of the agent's API.
    let guests = Guests::one(ID, 49_983, echo());
    let (_fleet, a, b) = pair(&guests).await;
    let link = "/files?path=/etc/hosts&signature=v1_x";
    let request = |host: String| {
        let request = hyper::Request::get(link).header("host", host);
        request.body(body("")).unwrap()
    };
    for setup in [&a, &b] {
        let named = request(format!("49983-{ID}.{DOMAIN}"));
        let (status, text) = send_request(setup.address, named).await;
        assert_eq!(status, 200, "{text}");
        let (status, text) = send_request(setup.address, request("127.0.0.1".to_owned())).await;
        assert_eq!(status, 401);
        assert!(text.contains("must name its sandbox"), "{text}");
    }
}
