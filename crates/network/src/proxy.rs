//! Proxy for connections that are permitted by name.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.
//!
//! If rules contain host names, the slot's table redirects connections to ports 80 and 443 to this
//! proxy unless an address rule permits them. The proxy sniffs the host name from the first bytes,
//! resolves it and connects to the result from the slot. It ignores the address that the guest
//! chose and the guest's own name resolution.
//!
//! If rules add headers, all connections to these ports are redirected. Connections to hosts that
//! the rules for headers name are passed to another proxy. Connections that an address rule permits
//! are forwarded unchanged to the address that the guest chose.
//!
//! If rules contain names with other ports, connections to these ports are redirected as well
//! (`resolved_route.rs`).
//!
//! If rules name an egress proxy, all TCP connections are redirected, and permitted ones lead to
//! that proxy (`outbound.rs`).

mod address_route;
pub(crate) mod header_route;
mod outbound;
mod resolved_route;

use crate::NetError;
use crate::connections::ConnectionRecorder;
use crate::counted_stream::CountedStream;
use crate::egress_connector::{EgressConnector, EgressTarget};
use crate::guest::{GATEWAY, GATEWAY6};
use crate::happy_eyeballs;
use crate::header_connection::{GuestStream, HeaderInjector};
use crate::host_names;
use crate::namespace;
use crate::network_state::blocking;
use crate::policy::EgressPolicy;
use crate::resolved_addresses::ResolvedAddresses;
use crate::slot_layout::PROXY_PORTS;
use crate::sniff::{self, SniffProtocol, SniffResult};
use crate::upstream::{self, Upstreams};
use jiffy_engine_api::{EgressProxy, RefusalReason};
use jiffy_proto::internal::{ControlPlaneConnector, InternalOrigin, is_api_host};
use nix::sys::socket::{getsockopt, sockopt};
use outbound::Outbound;
use std::io;
use std::net::{self, IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;

/// Maximum number of concurrent proxied connections of one sandbox. Further ones are reset. Each
/// connection costs the daemon two descriptors and 16 KiB.
const MAX_CONNECTIONS: usize = 1024;
/// Timeout for receiving the host name from the client.
const SNIFF_TIMEOUT: Duration = Duration::from_secs(10);

/// Listening sockets, before the proxy starts.
pub(crate) struct ProxyListeners(Vec<(net::TcpListener, SniffProtocol)>);

impl ProxyListeners {
    /// Opens the sockets in the network namespace of this thread.
    pub fn open() -> Result<Self, NetError> {
        let open = |address: IpAddr| {
            let both = PROXY_PORTS
                .into_iter()
                .zip([SniffProtocol::Http, SniffProtocol::Tls])
                .map(move |(port, protocol)| {
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
            // The kernel has no IPv6, or the slot is of an older daemon without IPv6 support.
            Err(e)
                if e.kind() == io::ErrorKind::AddrNotAvailable
                    || e.raw_os_error() == Some(libc::EAFNOSUPPORT) => {}
            Err(e) => return Err(failed(IpAddr::from(GATEWAY6))(e)),
        }
        Ok(Self(listeners))
    }
}

/// Context of the proxied connections of one slot.
pub(crate) struct ProxyRoute {
    /// Namespace of the slot.
    pub slot: String,
    /// Rules of the guest.
    pub policy: watch::Receiver<Option<EgressPolicy>>,
    /// Name servers of the host.
    pub host: Arc<Upstreams>,
    /// Addresses that the DNS server returned to the guest.
    pub resolved: Arc<ResolvedAddresses>,
    /// Record of the guest's connections.
    pub record: Arc<ConnectionRecorder>,
    /// Connector to the control plane. `None` if it is unreachable.
    pub control_plane: Option<Arc<dyn ControlPlaneConnector>>,
    /// Proxy that adds headers to requests.
    pub header_injector: Option<Arc<dyn HeaderInjector>>,
    /// Permits for connections whose requests receive headers.
    pub header_permits: Arc<Semaphore>,
    /// Client of egress proxies.
    pub egress_connector: Option<Arc<dyn EgressConnector>>,
}

/// Reason for closing a connection.
enum ProxyRefusal {
    /// The rules do not permit the connection.
    Forbidden,
    /// The server does not respond.
    Unreachable,
    /// The egress proxy does not connect to the server.
    Proxy,
}

/// Server connection with the server's address.
type ConnectResult = Result<(Box<dyn GuestStream>, Option<SocketAddr>), ProxyRefusal>;

/// Proxy of one slot. Dropping this value stops it. Its connections are closed when the rules no
/// longer permit them.
#[derive(Debug)]
pub(crate) struct NameProxy(Vec<AbortHandle>);

impl Drop for NameProxy {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

impl NameProxy {
    /// Starts accepting connections. Must be called inside a tokio runtime.
    pub fn start(listeners: ProxyListeners, route: ProxyRoute) -> io::Result<Self> {
        Self::start_with(listeners, route, MAX_CONNECTIONS)
    }

    /// Starts to accept connections on these listeners, at most `max_connections` at the same time.
    fn start_with(
        listeners: ProxyListeners,
        route: ProxyRoute,
        max_connections: usize,
    ) -> io::Result<Self> {
        let route = Arc::new(route);
        let permits = Arc::new(Semaphore::new(max_connections));
        let tasks = listeners.0.into_iter().map(|(listener, protocol)| {
            let listener = TcpListener::from_std(listener)?;
            let (route, permits) = (route.clone(), permits.clone());
            Ok(tokio::spawn(accept(listener, protocol, route, permits)).abort_handle())
        });
        tasks.collect::<io::Result<_>>().map(Self)
    }
}

/// Accepts the connections that the rules of the slot redirect to the proxy.
async fn accept(
    listener: TcpListener,
    protocol: SniffProtocol,
    route: Arc<ProxyRoute>,
    permits: Arc<Semaphore>,
) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let route = route.clone();
                // Subscribe before the connection is served, so that no rollback is missed.
                let mut epoch = route.resolved.epoch();
                let Ok(permit) = permits.clone().try_acquire_owned() else {
                    route.reset(&stream);
                    continue;
                };
                tokio::spawn(async move {
                    tokio::select! {
                        // Ignore the error: both peers see a closed connection.
                        _ = route.carry(stream, protocol) => {}
                        // The guest was rolled back: its side of the connection no longer exists.
                        _ = epoch.changed() => {}
                    }
                    drop(permit);
                });
            }
            // For example, the process has no free descriptors.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

impl ProxyRoute {
    /// Records the refusal of a connection beyond the limit. Dropping the connection then resets
    /// it, so that programs get an error immediately.
    fn reset(&self, client: &TcpStream) {
        let dialled = original_destination(client);
        self.record
            .refused_by_name(dialled, None, RefusalReason::Limit);
        // If the option fails, the connection is closed normally, which programs detect as well.
        let _ = client.set_zero_linger();
    }

    /// Handles a redirected connection: reads the host name from its first bytes, checks the name
    /// against the rules, resolves it, connects to the server, and copies data in both directions.
    async fn carry(&self, mut client: TcpStream, protocol: SniffProtocol) -> io::Result<()> {
        let dialled = original_destination(&client);
        if let Some(address) = dialled.filter(|address| self.is_without_name(address.port())) {
            return self.carry_resolved(client, address).await;
        }
        let refused = |name: Option<&str>| {
            (self.record).refused_by_name(dialled, name, RefusalReason::Rules);
        };
        // If new rules name another egress proxy, this connection is closed (`allowed` below).
        let proxy = self.egress_proxy();
        let mut head = Vec::new();
        let sniffing = sniff_host(&mut client, protocol, &mut head);
        let sniffing = tokio::time::timeout(SNIFF_TIMEOUT, sniffing);
        let sniffed = sniffing.await.map_err(io::Error::from).flatten();
        let permitted = self.permitted(dialled);
        let name = match (sniffed, permitted) {
            (Ok(Some(name)), _) => name,
            // The protocol has no name, or the server sends first.
            (_, Some(address)) => return self.carry_allowed(client, head, None, address).await,
            (Err(e), None) => {
                refused(None);
                return Err(e);
            }
            (Ok(None), None) => {
                refused(None);
                return refuse(client, protocol).await;
            }
        };
        if let Some(found) = self.header_rules(&name) {
            self.add_headers(client, head, &name, protocol, found).await;
            return Ok(());
        }
        if let Some(address) = permitted {
            return self.carry_allowed(client, head, Some(&name), address).await;
        }
        let reached = if is_api_host(&name) {
            self.connect_control_plane(protocol, dialled)
        } else {
            self.connect(&name, protocol).await
        };
        let (mut server, address) = match reached {
            Ok(reached) => reached,
            Err(ProxyRefusal::Forbidden) => {
                refused(Some(&name));
                return refuse(client, protocol).await;
            }
            Err(ProxyRefusal::Unreachable) => {
                // Record the failed connection as one without bytes.
                drop(self.record.carry(dialled, Some(&name)));
                return refuse(client, protocol).await;
            }
            Err(ProxyRefusal::Proxy) => {
                (self.record).refused_by_name(dialled, Some(&name), RefusalReason::Proxy);
                return refuse(client, protocol).await;
            }
        };
        let mut policy = self.policy.clone();
        let port = protocol.port();
        let allowed = |policy: &Option<EgressPolicy>| {
            let policy = policy.as_ref();
            policy.is_some_and(|p| p.allows_name(&name, port) && p.egress_proxy() == proxy.as_ref())
        };
        // This also applies to connections to the control plane. Its API key never changes, so only
        // the name is checked again.
        if !allowed(&policy.borrow()) {
            // The policy changed while the server was connected.
            refused(Some(&name));
            return refuse(client, protocol).await;
        }
        let carrying = self.record.carry(address, Some(&name));
        let mut client = CountedStream::new(client, carrying.bytes.clone());
        let carry = async {
            // Forward the bytes that were read while sniffing. They bypass the counting stream.
            server.write_all(&head).await?;
            carrying.bytes.out.fetch_add(head.len() as u64, Relaxed);
            tokio::io::copy_bidirectional(&mut client, &mut server).await
        };
        tokio::select! {
            // Ignore how the copy ended: both peers see a closed connection.
            _ = carry => {}
            // The policy changed, or the slot was removed.
            _ = policy.wait_for(|policy| !allowed(policy)) => {}
        }
        Ok(())
    }

    /// Returns an opener of connections from the slot.
    fn outbound(&self) -> Outbound {
        Outbound {
            slot: self.slot.clone(),
            host: self.host.clone(),
            connector: self.egress_connector.clone(),
        }
    }

    /// Returns the proxy of the current rules.
    fn egress_proxy(&self) -> Option<Arc<EgressProxy>> {
        let policy = self.policy.borrow();
        policy
            .as_ref()
            .and_then(|policy| policy.egress_proxy().cloned())
    }

    /// Connects to the control plane if the rules name it.
    fn connect_control_plane(
        &self,
        protocol: SniffProtocol,
        dialled: Option<SocketAddr>,
    ) -> ConnectResult {
        let policy = self.policy.borrow().clone();
        let key = policy
            .and_then(|policy| policy.control_plane().map(str::to_owned))
            .filter(|_| protocol == SniffProtocol::Http)
            .ok_or(ProxyRefusal::Forbidden)?;
        let connector = self
            .control_plane
            .as_ref()
            .ok_or(ProxyRefusal::Unreachable)?;
        // The control plane serves its end of the pair like an accepted connection.
        let pair = || -> io::Result<(UnixStream, StdUnixStream)> {
            let (ours, theirs) = StdUnixStream::pair()?;
            ours.set_nonblocking(true)?;
            theirs.set_nonblocking(true)?;
            Ok((UnixStream::from_std(ours)?, theirs))
        };
        let (ours, theirs) = pair().map_err(|_| ProxyRefusal::Unreachable)?;
        // `accept` holds a permit for the proxied connection, so the control plane's end needs
        // none.
        if connector.connect(InternalOrigin::Sandbox { key }, theirs, Box::new(())) {
            Ok((Box::new(ours), dialled))
        } else {
            Err(ProxyRefusal::Unreachable)
        }
    }

    /// Connects to `name` if the name and one of its addresses are permitted.
    async fn connect(&self, name: &str, protocol: SniffProtocol) -> ConnectResult {
        let policy = self.policy.borrow().clone();
        let port = protocol.port();
        let allows = |policy: &EgressPolicy| policy.allows_name(name, port);
        let policy = policy.filter(allows).ok_or(ProxyRefusal::Forbidden)?;
        if let Some(proxy) = policy.egress_proxy() {
            let name = host_names::normalize(name);
            if !host_names::is_unambiguous(&name) {
                return Err(ProxyRefusal::Forbidden);
            }
            let target = EgressTarget::Name(&name, port);
            let stream = self
                .outbound()
                .connect_through(&policy, proxy, target)
                .await;
            return stream
                .map(|stream| (stream, None))
                .ok_or(ProxyRefusal::Proxy);
        }
        let servers = policy.upstreams(&self.host);
        let resolved = upstream::addresses(name, &servers, policy.ipv6()).await;
        // A permitted name must not lead to a private address (DNS rebinding).
        let permitted = |ip: &IpAddr| policy.permits_by_name(*ip);
        let reachable: Vec<IpAddr> = resolved.iter().copied().filter(permitted).collect();
        if reachable.is_empty() && !resolved.is_empty() {
            return Err(ProxyRefusal::Forbidden);
        }
        let connect = |address: SocketAddr| connect_from(self.slot.clone(), address);
        let addresses = happy_eyeballs::alternate_versions(&reachable, port);
        match happy_eyeballs::connect_first(addresses, connect).await {
            Some(stream) => {
                let address = stream.peer_addr().ok();
                Ok((Box::new(stream), address))
            }
            None => Err(ProxyRefusal::Unreachable),
        }
    }
}

/// Connects from a slot, so that the host's table applies to the connection.
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
    let stream = socket.connect(address).await.ok()?;
    // Without this option, small messages wait for confirmations. A failure only costs time.
    let _ = stream.set_nodelay(true);
    Some(stream)
}

/// Returns the address that the guest chose before the slot's table redirected its connection.
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

/// Sniffs the host name. Appends all bytes that were read to `head`. `None` if the client sent no
/// name.
async fn sniff_host(
    client: &mut TcpStream,
    protocol: SniffProtocol,
    head: &mut Vec<u8>,
) -> io::Result<Option<String>> {
    loop {
        match sniff::sniff(protocol, head) {
            SniffResult::Name(name) => return Ok(Some(name)),
            SniffResult::NoName => return Ok(None),
            SniffResult::Incomplete => {}
        }
        if client.read_buf(head).await? == 0 {
            return Ok(None);
        }
    }
}

/// Closes a rejected connection. Over HTTP, sends the reason for the user first.
async fn refuse(mut client: TcpStream, protocol: SniffProtocol) -> io::Result<()> {
    if protocol == SniffProtocol::Http {
        let text = "this host is not allowed by the rules of this sandbox, or unreachable\n";
        let answer = format!(
            "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
            text.len()
        );
        client.write_all(answer.as_bytes()).await?;
    }
    client.shutdown().await
}

#[cfg(test)]
#[path = "proxy_tests.rs"]
mod tests;
