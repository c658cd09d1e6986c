//! Connections that are allowed by name.
//!
//! If rules name hosts, the slot's table redirects connections to ports 80 and 443 that no address
//! allows to here. The host name is sniffed from their first bytes; the daemon resolves it and
//! connects to the result, from the slot. So neither an address that the guest chose nor its own
//! name resolution counts.

use crate::NetError;
use crate::connections::ConnectionRecorder;
use crate::counted_stream::CountedStream;
use crate::guest::{GATEWAY, GATEWAY6};
use crate::happy_eyeballs;
use crate::namespace;
use crate::network_state::blocking;
use crate::policy::EgressPolicy;
use crate::slot_layout::PROXY_PORTS;
use crate::sniff::{self, SniffProtocol, SniffResult};
use crate::upstream::{self, Upstreams};
use jiffy_engine_api::RefusalReason;
use jiffy_proto::internal::{ControlPlaneConnector, InternalOrigin, is_api_host};
use nix::sys::socket::{getsockopt, sockopt};
use std::io;
use std::net::{self, IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;

/// Maximum number of connections by name of one sandbox at the same time. Further ones are reset.
/// Each costs the daemon two descriptors and 16 KiB.
const MAX_CONNECTIONS: usize = 1024;
/// Time for a client to send its host name.
const SNIFF_TIMEOUT: Duration = Duration::from_secs(10);

/// Listening sockets, before the proxy runs.
pub(crate) struct ProxyListeners(Vec<(net::TcpListener, SniffProtocol)>);

impl ProxyListeners {
    /// Opens them in the network namespace of this thread.
    pub fn open() -> Result<Self, NetError> {
        let open = |address: IpAddr| {
            let both = PROXY_PORTS
                .into_iter()
                .zip([SniffProtocol::Http, SniffProtocol::Tls]);
            let both = both.map(move |(port, protocol)| {
                let listener = net::TcpListener::bind((address, port))?;
                listener.set_nonblocking(true)?;
                Ok::<_, io::Error>((listener, protocol))
            });
            both.collect::<io::Result<Vec<_>>>()
        };
        let failed = |address| NetError::host(format!("listening at {address}:{PROXY_PORTS:?}"));
        let mut listeners = open(GATEWAY.into()).map_err(failed(IpAddr::from(GATEWAY)))?;
        match open(GATEWAY6.into()) {
            Ok(more) => listeners.extend(more),
            // A kernel without IPv6, or a slot of a daemon that did not support it.
            Err(e)
                if e.kind() == io::ErrorKind::AddrNotAvailable
                    || e.raw_os_error() == Some(libc::EAFNOSUPPORT) => {}
            Err(e) => return Err(failed(IpAddr::from(GATEWAY6))(e)),
        }
        Ok(Self(listeners))
    }
}

/// Route of a connection: slot, policy and record.
pub(crate) struct ProxyRoute {
    /// Namespace of the slot.
    pub slot: String,
    pub policy: watch::Receiver<Option<EgressPolicy>>,
    pub host: Arc<Upstreams>,
    pub record: Arc<ConnectionRecorder>,
    /// Way to the control plane; none: there is no daemon.
    pub control_plane: Option<Arc<dyn ControlPlaneConnector>>,
}

/// Connection to a server, or to the control plane.
trait ServerStream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> ServerStream for T {}

/// Reason for not carrying a connection on.
enum ProxyRefusal {
    /// The rules.
    Forbidden,
    /// The server does not answer.
    Silent,
}

/// Server that is reached, with its address.
type Reached = Result<(Box<dyn ServerStream>, Option<SocketAddr>), ProxyRefusal>;

/// The proxy of one slot; it ends with this, and its connections with the rules that allowed them.
#[derive(Debug)]
pub(crate) struct NameProxy(Vec<AbortHandle>);

impl Drop for NameProxy {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

impl NameProxy {
    /// Starts accepting. Must be called inside a tokio runtime.
    pub fn start(listeners: ProxyListeners, route: ProxyRoute) -> io::Result<Self> {
        Self::start_with(listeners, route, MAX_CONNECTIONS)
    }

    fn start_with(listeners: ProxyListeners, route: ProxyRoute, most: usize) -> io::Result<Self> {
        let route = Arc::new(route);
        let places = Arc::new(Semaphore::new(most));
        let tasks = listeners.0.into_iter().map(|(listener, protocol)| {
            let listener = TcpListener::from_std(listener)?;
            let (route, places) = (route.clone(), places.clone());
            Ok(tokio::spawn(accept(listener, protocol, route, places)).abort_handle())
        });
        tasks.collect::<io::Result<_>>().map(Self)
    }
}

async fn accept(
    listener: TcpListener,
    protocol: SniffProtocol,
    route: Arc<ProxyRoute>,
    places: Arc<Semaphore>,
) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let route = route.clone();
                let Ok(place) = places.clone().try_acquire_owned() else {
                    route.reset(&stream);
                    continue;
                };
                tokio::spawn(async move {
                    // Both sides see any end as a close.
                    let _ = route.carry(stream, protocol).await;
                    drop(place);
                });
            }
            // For example, no descriptor is left.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

impl ProxyRoute {
    /// Resets a connection beyond the limit when it is dropped: programs get an error at once.
    fn reset(&self, client: &TcpStream) {
        let dialled = original_destination(client);
        self.record
            .refused_by_name(dialled, None, RefusalReason::Limit);
        // Without the option the connection is closed, which programs notice as well.
        let _ = client.set_zero_linger();
    }

    async fn carry(&self, mut client: TcpStream, protocol: SniffProtocol) -> io::Result<()> {
        let dialled = original_destination(&client);
        let refused = |name: Option<&str>| {
            (self.record).refused_by_name(dialled, name, RefusalReason::Rules);
        };
        let greeting = tokio::time::timeout(SNIFF_TIMEOUT, sniff_host(&mut client, protocol));
        let heard = greeting.await.map_err(io::Error::from).flatten();
        let Some((name, head)) = heard.inspect_err(|_| refused(None))? else {
            refused(None);
            return refuse(client, protocol).await;
        };
        let reached = match is_api_host(&name) {
            true => self.enter(protocol, dialled),
            false => self.connect(&name, protocol).await,
        };
        let (mut server, address) = match reached {
            Ok(reached) => reached,
            Err(ProxyRefusal::Forbidden) => {
                refused(Some(&name));
                return refuse(client, protocol).await;
            }
            Err(ProxyRefusal::Silent) => {
                drop(self.record.carry(dialled, &name));
                return refuse(client, protocol).await;
            }
        };
        let carrying = self.record.carry(address, &name);
        let mut client = CountedStream::new(client, carrying.bytes.clone());
        server.write_all(&head).await?;
        carrying.bytes.out.fetch_add(head.len() as u64, Relaxed);
        let mut policy = self.policy.clone();
        let allowed =
            |policy: &Option<EgressPolicy>| policy.as_ref().is_some_and(|p| p.allows_name(&name));
        // The key as whose sandbox it is does not change.
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
            // The policy changed, or the slot is gone.
            _ = policy.wait_for(|policy| !allowed(policy)) => {}
        }
        Ok(())
    }

    /// Connects to the control plane, if the rules name it.
    fn enter(&self, protocol: SniffProtocol, dialled: Option<SocketAddr>) -> Reached {
        let policy = self.policy.borrow().clone();
        let key = policy.and_then(|policy| policy.control_plane().map(str::to_owned));
        let key = key.filter(|_| protocol == SniffProtocol::Http);
        let key = key.ok_or(ProxyRefusal::Forbidden)?;
        let connector = self.control_plane.as_ref().ok_or(ProxyRefusal::Silent)?;
        let pair = || -> io::Result<(UnixStream, StdUnixStream)> {
            let (ours, theirs) = StdUnixStream::pair()?;
            ours.set_nonblocking(true)?;
            theirs.set_nonblocking(true)?;
            Ok((UnixStream::from_std(ours)?, theirs))
        };
        let (ours, theirs) = pair().map_err(|_| ProxyRefusal::Silent)?;
        // The place among the proxy's connections is held by its own end.
        match connector.connect(InternalOrigin::Sandbox { key }, theirs, Box::new(())) {
            true => Ok((Box::new(ours), dialled)),
            false => Err(ProxyRefusal::Silent),
        }
    }

    /// Connects to `name`, if it is allowed and has an address that is.
    async fn connect(&self, name: &str, protocol: SniffProtocol) -> Reached {
        let policy = self.policy.borrow().clone();
        let allows = |policy: &EgressPolicy| policy.allows_name(name);
        let policy = policy.filter(allows).ok_or(ProxyRefusal::Forbidden)?;
        let servers = policy.upstreams(&self.host);
        let found = upstream::addresses(name, &servers, policy.ipv6()).await;
        let port = match protocol {
            SniffProtocol::Http => 80,
            SniffProtocol::Tls => 443,
        };
        let permitted = |ip: &IpAddr| policy.permits_by_name(*ip);
        let reachable: Vec<IpAddr> = found.iter().copied().filter(permitted).collect();
        if reachable.is_empty() && !found.is_empty() {
            return Err(ProxyRefusal::Forbidden);
        }
        let connect = |address: SocketAddr| connect_from(self.slot.clone(), address);
        let addresses = happy_eyeballs::in_turns(&reachable, port);
        match happy_eyeballs::first(addresses, connect).await {
            Some(stream) => {
                let address = stream.peer_addr().ok();
                Ok((Box::new(stream), address))
            }
            None => Err(ProxyRefusal::Silent),
        }
    }
}

/// Connects from a slot: so the host's own table judges the connection like others from there.
async fn connect_from(slot: String, address: SocketAddr) -> Option<TcpStream> {
    let open = move || {
        namespace::enter(&slot, || {
            let socket = match address {
                SocketAddr::V4(_) => TcpSocket::new_v4(),
                SocketAddr::V6(_) => TcpSocket::new_v6(),
            };
            socket.map_err(NetError::host("opening a socket in a slot"))
        })
    };
    let socket = blocking(open).await.ok()?;
    socket.connect(address).await.ok()
}

/// The address that the guest chose, before the slot's table redirected its connection.
fn original_destination(client: &TcpStream) -> Option<SocketAddr> {
    if client.local_addr().ok()?.is_ipv4() {
        let address = getsockopt(client, sockopt::OriginalDst).ok()?;
        let ip = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
        return Some((ip, u16::from_be(address.sin_port)).into());
    }
    let address = getsockopt(client, sockopt::Ip6tOriginalDst).ok()?;
    let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
    Some((ip, u16::from_be(address.sin6_port)).into())
}

/// Sniffs the host name, and returns it with the bytes read so far; none: there is none.
async fn sniff_host(
    client: &mut TcpStream,
    protocol: SniffProtocol,
) -> io::Result<Option<(String, Vec<u8>)>> {
    let mut head = Vec::new();
    loop {
        match sniff::sniff(protocol, &head) {
            SniffResult::Name(name) => return Ok(Some((name, head))),
            SniffResult::NoName => return Ok(None),
            SniffResult::Incomplete => {}
        }
        if client.read_buf(&mut head).await? == 0 {
            return Ok(None);
        }
    }
}

/// Answers with the reason, for people who read a program's output.
async fn refuse(mut client: TcpStream, protocol: SniffProtocol) -> io::Result<()> {
    if protocol == SniffProtocol::Http {
        let text = "this host is not allowed by the rules of this sandbox, or not there\n";
        let answer = format!(
            "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
            text.len()
        );
        client.write_all(answer.as_bytes()).await?;
    }
    client.shutdown().await
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::connections::ConnectionSockets;
    use jiffy_engine_api::{ConnectionLog, ConnectionRecord};

    fn listener() -> (net::TcpListener, SocketAddr) {
        let listener = net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    #[tokio::test]
    async fn connections_beyond_the_limit_are_reset_at_once() {
        let sockets = Arc::new(ConnectionSockets::none());
        let record = Arc::new(ConnectionRecorder::new("nobody".to_owned(), sockets, true));
        let (_policy, policy) = watch::channel(None);
        let route = ProxyRoute {
            slot: "nobody".to_owned(),
            policy,
            host: Arc::new(Upstreams::in_file("/nonexistent")),
            record: record.clone(),
            control_plane: None,
        };
        let [(a, http), (b, tls)] = [listener(), listener()];
        let listeners = ProxyListeners(vec![(a, SniffProtocol::Http), (b, SniffProtocol::Tls)]);
        let _proxy = NameProxy::start_with(listeners, route, 2).unwrap();
        // All of the limit can be used, whichever listeners the connections are of.
        let mut first = TcpStream::connect(http).await.unwrap();
        let mut second = TcpStream::connect(http).await.unwrap();
        for address in [http, tls] {
            let mut beyond = TcpStream::connect(address).await.unwrap();
            let end = tokio::time::timeout(Duration::from_secs(5), beyond.read_u8()).await;
            let error = end.unwrap().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        }
        let lines = record.read().list;
        // They differ in their address, if the kernel knows it.
        let is_limit = |line: &ConnectionRecord| line.refused == Some(RefusalReason::Limit);
        let times: u64 = lines.iter().map(|line| line.times).sum();
        assert!(lines.iter().all(is_limit) && times == 2, "{lines:?}");
        // A connection that ends makes room for another.
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
}
