//! Forwarded requests over the channel between the members (hosts) of a fleet, which uses mutual
//! TLS.

use crate::support;

use async_trait::async_trait;
use axum::Router;
use axum::routing::any;
use hyper::body::Incoming;
use hyper::{Request, Response};
use jiffy_fleet::certificates::{Authority, MEMBER_LIFETIME, MemberKey};
use jiffy_fleet::channel::{
    Body as ChannelBody, Client, Handler, Identity, Server, ServerHandle, accept_stream,
};
use jiffy_fleet_core::{FleetId, MemberId};
use jiffy_gateway::{
    ForwardedConnection, HostStream, Location, OpenError, OtherHosts, Peer, Pending,
};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};
use support::client::{Http1, body, get, send_request, to};
use support::guest::Guests;
use support::{ID, Setup, collected, with_timeout};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

/// Member that runs the sandbox.
const OWNER: MemberId = MemberId(2);

/// Returns the id of the fleet.
fn fleet() -> FleetId {
    FleetId::try_from("7kq2".to_owned()).unwrap()
}

/// Returns the identity of a fleet member, with a certificate of `authority`.
fn identity(authority: &Authority, member: MemberId) -> Identity {
    let key = MemberKey::generate().unwrap();
    let now = SystemTime::now();
    let certificate = authority
        .issue(&fleet(), member, &key.request, now, MEMBER_LIFETIME)
        .unwrap();
    Identity::new(fleet(), authority.certificate(), &certificate, &key.key).unwrap()
}

/// The owner of the sandbox, over the channel.
#[derive(Debug)]
struct Channel {
    client: Client,
    /// Address of the server of the owner.
    address: Mutex<String>,
}

impl OtherHosts for Channel {
    fn locate<'a>(&'a self, _: &'a str) -> Pending<'a, Location> {
        Box::pin(async { Location::Host("h2".into()) })
    }

    fn forget(&self, _: &str) {}

    fn open<'a>(&'a self, _: &'a str, peer: Peer) -> Pending<'a, Result<HostStream, OpenError>> {
        let address = self.address.lock().unwrap().clone();
        Box::pin(async move {
            let request = Request::get("/gateway").header("client", peer.ip.to_string());
            let request = request.body(()).unwrap();
            let limit = Duration::from_secs(5);
            let opened = self.client.open_stream(OWNER, &address, request, limit);
            let opened = opened.await;
            let response = opened.map_err(|e| OpenError::Unavailable(e.to_string()))?;
            let stream: HostStream = Box::new(response.into_body());
            Ok(stream)
        })
    }

    fn lost(&self, _: Arc<str>) -> Pending<'static, ()> {
        Box::pin(std::future::pending())
    }
}

/// Receiver of connections that other members forward.
struct Streams(mpsc::Sender<ForwardedConnection>);

#[async_trait]
impl Handler for Streams {
    async fn handle(&self, peer: MemberId, request: Request<Incoming>) -> Response<ChannelBody> {
        assert_eq!(peer, MemberId(1));
        let ip = request.headers()["client"].to_str().unwrap().parse();
        let (stream, response) = accept_stream(request);
        let stream: HostStream = Box::new(stream);
        let peer = Peer {
            ip: ip.unwrap(),
            tls: false,
            local: false,
        };
        self.0
            .send(ForwardedConnection {
                stream,
                peer,
                is_from_front: false,
            })
            .await
            .unwrap();
        response
    }
}

/// Returns gateways of two members. The second one has the sandbox.
async fn members(guests: &Guests) -> (Setup, Setup, ServerHandle) {
    let authority = Authority::generate(&fleet()).unwrap();
    let hosts = Arc::new(Channel {
        client: Client::new(identity(&authority, MemberId(1))),
        address: Mutex::default(),
    });
    let (entry, _) = Setup::in_fleet(&Guests::default(), hosts.clone()).await;
    let (owner, streams) = Setup::in_fleet(guests, hosts.clone()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = Server::new(identity(&authority, OWNER), Arc::new(|_| Ok(())))
        .requests("/gateway", Arc::new(Streams(streams)))
        .start(listener)
        .unwrap();
    *hosts.address.lock().unwrap() = server.local_address().to_string();
    (entry, owner, server)
}

/// Guest that responds with the length of the body, and with as many characters.
fn sized() -> Router {
    Router::new().fallback(any(|body: axum::body::Bytes| async move {
        format!("{} {}", body.len(), "x".repeat(body.len()))
    }))
}

#[tokio::test]
async fn bodies_of_any_length_pass_over_the_channel_until_the_host_is_gone() {
    let guests = Guests::one(ID, 80, sized());
    let (entry, _owner, server) = members(&guests).await;
    let mut client = Http1::new(entry.address).await;
    for length in [0, 100, 1_500_000] {
        let request = to(80, "/").method("POST").body(body("y".repeat(length)));
        let answer = client.send(request.unwrap()).await;
        assert_eq!(answer.status(), 200);
        let text = collected(answer.into_body()).await;
        assert_eq!(text.len(), format!("{length} ").len() + length);
    }
    drop(server);
    let ended = async {
        while send_request(entry.address, get(80, "/")).await.0 == 200 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        send_request(entry.address, get(80, "/")).await
    };
    let (status, text) = with_timeout(ended).await;
    assert_eq!(status, 503, "{text}");
}

/// Sends requests from `clients` connections for a while. Returns sorted durations and the rate.
async fn load(address: SocketAddr, clients: usize, time: Duration) -> (Vec<Duration>, f64) {
    let began = Instant::now();
    let tasks = (0..clients).map(|_| {
        tokio::spawn(async move {
            let mut client = Http1::new(address).await;
            let mut times = Vec::new();
            while began.elapsed() < time {
                let sent = Instant::now();
                let answer = client.send(get(80, "/")).await;
                assert_eq!(answer.status(), 200);
                collected(answer.into_body()).await;
                times.push(sent.elapsed());
            }
            times
        })
    });
    let mut times = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        times.extend(task.await.unwrap());
    }
    times.sort_unstable();
    let rate = times.len() as f64 / began.elapsed().as_secs_f64();
    (times, rate)
}

/// Compares requests through the owner and through another member: run it alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measurement"]
async fn forwarding_compared_with_one_host() {
    let guests = Guests::one(ID, 80, sized());
    let (entry, owner, _server) = members(&guests).await;
    for clients in [1, 32] {
        for round in 0..3 {
            for (name, setup) in [("owner", &owner), ("other", &entry)] {
                let (times, rate) = load(setup.address, clients, Duration::from_secs(3)).await;
                let p50 = times[times.len() / 2];
                let p99 = times[times.len() * 99 / 100];
                println!(
                    "{clients} clients, round {round}, {name}: {rate:.0}/s, P50 {p50:?}, P99 {p99:?}"
                );
            }
        }
    }
}
