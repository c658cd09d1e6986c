//! Tests of the proxy of a guest. The proxy receives the guest's connections, reads the host name
//! from their first bytes, and connects to the host if the rules of the guest allow the name.
//!
//! A *permit* counts towards a limit until it is dropped.

#![allow(clippy::unwrap_used)]
use super::*;
use crate::connections::ConnectionSockets;
use crate::policy::HostReachability;
use jiffy_engine_api::{ConnectionLog, ConnectionRecord, NetworkRules};
use jiffy_proto::internal::API_HOST;
use parking_lot::Mutex;
use std::any::Any;

/// Returns a listener on a free port, and its address.
fn listener() -> (net::TcpListener, SocketAddr) {
    let listener = net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Control plane for which the rules are revoked while a connection to it is set up.
#[derive(Debug)]
struct RevokedWhileConnecting {
    policy: watch::Sender<Option<EgressPolicy>>,
    received: Mutex<Option<StdUnixStream>>,
}

impl ControlPlaneConnector for RevokedWhileConnecting {
    fn connect(
        &self,
        _: InternalOrigin,
        stream: StdUnixStream,
        _: Box<dyn Any + Send + Sync>,
    ) -> bool {
        self.policy.send_replace(None);
        *self.received.lock() = Some(stream);
        true
    }
}

/// Control plane that accepts connections.
#[derive(Debug, Default)]
struct Accepting(Mutex<Option<StdUnixStream>>);

impl ControlPlaneConnector for Accepting {
    fn connect(
        &self,
        _: InternalOrigin,
        stream: StdUnixStream,
        _: Box<dyn Any + Send + Sync>,
    ) -> bool {
        *self.0.lock() = Some(stream);
        true
    }
}

#[tokio::test]
async fn no_byte_is_sent_if_the_rules_change_while_the_server_is_connected() {
    let rules = NetworkRules {
        allow_out: vec![API_HOST.to_owned()],
        owner: Some("key".to_owned()),
        ..NetworkRules::default()
    };
    let allowed = EgressPolicy::new(&rules, &HostReachability::default()).unwrap();
    let (sender, policy) = watch::channel(Some(allowed));
    let control_plane = Arc::new(RevokedWhileConnecting {
        policy: sender,
        received: Mutex::default(),
    });
    let sockets = Arc::new(ConnectionSockets::none());
    let route = ProxyRoute {
        slot: "slot".to_owned(),
        policy,
        host: Arc::new(Upstreams::in_file("/nonexistent")),
        resolved: Arc::default(),
        record: Arc::new(ConnectionRecorder::new("slot".to_owned(), sockets, true)),
        control_plane: Some(control_plane.clone()),
        header_injector: None,
        header_permits: Arc::new(Semaphore::new(1)),
        egress_connector: None,
    };
    let (at, address) = listener();
    let listeners = ProxyListeners(vec![(at, SniffProtocol::Http)]);
    let _proxy = NameProxy::start(listeners, route).unwrap();
    let mut client = TcpStream::connect(address).await.unwrap();
    let request = format!("GET / HTTP/1.1\r\nHost: {API_HOST}\r\n\r\n");
    client.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    let received = control_plane.received.lock().take().unwrap();
    let mut received = UnixStream::from_std(received).unwrap();
    assert_eq!(received.read_to_string(&mut answer).await.unwrap(), 0);
}

#[tokio::test]
async fn connections_beyond_the_limit_are_reset_at_once() {
    let sockets = Arc::new(ConnectionSockets::none());
    let record = Arc::new(ConnectionRecorder::new("slot".to_owned(), sockets, true));
    let (_policy, policy) = watch::channel(None);
    let route = ProxyRoute {
        slot: "slot".to_owned(),
        policy,
        host: Arc::new(Upstreams::in_file("/nonexistent")),
        resolved: Arc::default(),
        record: record.clone(),
        control_plane: None,
        header_injector: None,
        header_permits: Arc::new(Semaphore::new(1)),
        egress_connector: None,
    };
    let [(a, http), (b, tls)] = [listener(), listener()];
    let listeners = ProxyListeners(vec![(a, SniffProtocol::Http), (b, SniffProtocol::Tls)]);
    let _proxy = NameProxy::start_with(listeners, route, 2).unwrap();
    // All listeners share the limit.
    let mut first = TcpStream::connect(http).await.unwrap();
    let mut second = TcpStream::connect(http).await.unwrap();
    for address in [http, tls] {
        let mut beyond = TcpStream::connect(address).await.unwrap();
        let end = tokio::time::timeout(Duration::from_secs(5), beyond.read_u8()).await;
        let error = end.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }
    let lines = record.read().list;
    // The lines differ in their address if the kernel reports the original destination.
    let is_limit = |line: &ConnectionRecord| line.refused == Some(RefusalReason::Limit);
    let times: u64 = lines.iter().map(|line| line.times).sum();
    assert!(lines.iter().all(is_limit) && times == 2, "{lines:?}");
    // A closed connection frees its permit.
    first
        .write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    first.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    second
        .write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        .await
        .unwrap();
    second.read_to_string(&mut answer).await.unwrap();
    let mut next = TcpStream::connect(tls).await.unwrap();
    next.write_all(b"no TLS").await.unwrap();
    assert_eq!(next.read_to_string(&mut answer).await.unwrap(), 0);
}

#[tokio::test]
async fn a_rollback_closes_the_connections_of_the_guest_and_no_later_one() {
    let rules = NetworkRules {
        allow_out: vec![API_HOST.to_owned()],
        owner: Some("key".to_owned()),
        ..NetworkRules::default()
    };
    let allowed = EgressPolicy::new(&rules, &HostReachability::default()).unwrap();
    let (_sender, policy) = watch::channel(Some(allowed));
    let control_plane = Arc::new(Accepting::default());
    let resolved = Arc::<ResolvedAddresses>::default();
    let sockets = Arc::new(ConnectionSockets::none());
    let route = ProxyRoute {
        slot: "slot".to_owned(),
        policy,
        host: Arc::new(Upstreams::in_file("/nonexistent")),
        resolved: resolved.clone(),
        record: Arc::new(ConnectionRecorder::new("slot".to_owned(), sockets, true)),
        control_plane: Some(control_plane.clone()),
        header_injector: None,
        header_permits: Arc::new(Semaphore::new(1)),
        egress_connector: None,
    };
    let (at, address) = listener();
    let _proxy = NameProxy::start(ProxyListeners(vec![(at, SniffProtocol::Http)]), route).unwrap();
    let request = format!("GET / HTTP/1.1\r\nHost: {API_HOST}\r\n\r\n");
    let open = async || {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(request.as_bytes()).await.unwrap();
        let server = loop {
            let server = control_plane.0.lock().take();
            match server {
                Some(server) => break UnixStream::from_std(server).unwrap(),
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        (client, server)
    };
    let mut text = String::new();
    let limit = Duration::from_secs(5);
    // A forwarded connection, and a connection that has sent nothing yet.
    let (mut client, mut server) = open().await;
    let mut silent = TcpStream::connect(address).await.unwrap();
    // The next connection is accepted after the silent one.
    let (_later, _) = open().await;
    // A rollback of the guest clears the resolved addresses, which closes its connections.
    resolved.clear();
    for stream in [&mut client, &mut silent] {
        let end = tokio::time::timeout(limit, stream.read_to_string(&mut text));
        assert_eq!(end.await.unwrap().unwrap_or(0), 0);
    }
    let end = tokio::time::timeout(limit, server.read_to_string(&mut text));
    end.await.unwrap().unwrap();
    let (mut client, mut server) = open().await;
    server.write_all(b"answer").await.unwrap();
    let mut answer = [0; 6];
    client.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"answer");
}
