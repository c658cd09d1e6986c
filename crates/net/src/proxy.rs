//! Connections that are allowed by name.
//!
//! Where rules name hosts, connections to ports 80 and 443 that no address allows are led here by the slot's table. Whom they want is read
//! from their first bytes; the name is looked up by us and the connection is made to what we found, from the slot. So neither an address
//! that the guest chose nor what it was told about a name counts.

use crate::NetError;
use crate::connections::Record;
use crate::counted::Counted;
use crate::greeting::{self, Greeting, Protocol};
use crate::guest::{GATEWAY, GATEWAY6};
use crate::namespace;
use crate::policy::Policy;
use crate::upstream::{self, Upstreams};
use nix::sys::socket::{getsockopt, sockopt};
use std::io;
use std::net::{self, IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;

/// Where the slot's table leads connections to ports 80 and 443.
pub(crate) const PORTS: [u16; 2] = [3180, 3443];
/// Connections of one sandbox at the same time; more wait.
const CONNECTIONS: usize = 256;
/// Time a client has to say whom it wants.
const GREETING_LIMIT: Duration = Duration::from_secs(10);
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Listening sockets, before anybody accepts.
pub(crate) struct Listeners(Vec<(net::TcpListener, Protocol)>);

impl Listeners {
    /// In the network namespace of this thread.
    pub fn open() -> Result<Self, NetError> {
        let open = |address: IpAddr| {
            let both = PORTS.into_iter().zip([Protocol::Http, Protocol::Tls]);
            let both = both.map(move |(port, protocol)| {
                let listener = net::TcpListener::bind((address, port))?;
                listener.set_nonblocking(true)?;
                Ok::<_, io::Error>((listener, protocol))
            });
            both.collect::<io::Result<Vec<_>>>()
        };
        let failed = |address| NetError::host(format!("listening at {address}:{PORTS:?}"));
        let mut listeners = open(GATEWAY.into()).map_err(failed(IpAddr::from(GATEWAY)))?;
        match open(GATEWAY6.into()) {
            Ok(more) => listeners.extend(more),
            // A kernel without IPv6, or a slot of a daemon that did not know it.
            Err(e)
                if e.kind() == io::ErrorKind::AddrNotAvailable
                    || e.raw_os_error() == Some(libc::EAFNOSUPPORT) => {}
            Err(e) => return Err(failed(IpAddr::from(GATEWAY6))(e)),
        }
        Ok(Self(listeners))
    }
}

/// What a connection goes by.
struct Way {
    /// Namespace of the slot.
    slot: String,
    policy: watch::Receiver<Option<Policy>>,
    host: Arc<Upstreams>,
    record: Arc<Record>,
}

/// Why a connection is not carried on.
enum Closed {
    /// The rules.
    Forbidden,
    /// Nobody answers there.
    Silent,
}

/// The proxy of one slot; it ends with this, and its connections with the rules that allowed them.
#[derive(Debug)]
pub(crate) struct Proxy(Vec<AbortHandle>);

impl Drop for Proxy {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

impl Proxy {
    /// Begins to accept. Must be called inside a tokio runtime.
    pub fn start(
        listeners: Listeners,
        slot: String,
        policy: watch::Receiver<Option<Policy>>,
        host: Arc<Upstreams>,
        record: Arc<Record>,
    ) -> io::Result<Self> {
        let way = Arc::new(Way {
            slot,
            policy,
            host,
            record,
        });
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        let tasks = listeners.0.into_iter().map(|(listener, protocol)| {
            let listener = TcpListener::from_std(listener)?;
            let (way, places) = (way.clone(), places.clone());
            Ok(tokio::spawn(accept(listener, protocol, way, places)).abort_handle())
        });
        tasks.collect::<io::Result<_>>().map(Self)
    }
}

async fn accept(listener: TcpListener, protocol: Protocol, way: Arc<Way>, places: Arc<Semaphore>) {
    loop {
        let Ok(place) = places.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let way = way.clone();
                tokio::spawn(async move {
                    // However it ends, both sides see that it is closed.
                    let _ = way.carry(stream, protocol).await;
                    drop(place);
                });
            }
            // No descriptor is left, say.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

impl Way {
    async fn carry(&self, mut client: TcpStream, protocol: Protocol) -> io::Result<()> {
        let dialled = dialled(&client);
        let greeting = tokio::time::timeout(GREETING_LIMIT, hear(&mut client, protocol));
        let heard = greeting.await.map_err(io::Error::from).flatten();
        let Some((name, head)) =
            heard.inspect_err(|_| self.record.refused_by_name(dialled, None))?
        else {
            self.record.refused_by_name(dialled, None);
            return refuse(client, protocol).await;
        };
        let mut server = match self.connect(&name, protocol).await {
            Ok(server) => server,
            Err(Closed::Forbidden) => {
                self.record.refused_by_name(dialled, Some(&name));
                return refuse(client, protocol).await;
            }
            Err(Closed::Silent) => {
                drop(self.record.carry(dialled, &name));
                return refuse(client, protocol).await;
            }
        };
        let carrying = self.record.carry(Some(server.peer_addr()?), &name);
        let mut client = Counted::new(client, carrying.bytes.clone());
        server.write_all(&head).await?;
        carrying.bytes.out.fetch_add(head.len() as u64, Relaxed);
        let mut policy = self.policy.clone();
        let allowed =
            |policy: &Option<Policy>| policy.as_ref().is_some_and(|p| p.allows_name(&name));
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
            // Or the slot is gone.
            _ = policy.wait_for(|policy| !allowed(policy)) => {}
        }
        Ok(())
    }

    /// A connection to `name`, if it is allowed and leads somewhere that is.
    async fn connect(&self, name: &str, protocol: Protocol) -> Result<TcpStream, Closed> {
        let policy = self.policy.borrow().clone();
        let allows = |policy: &Policy| policy.allows_name(name);
        let policy = policy.filter(allows).ok_or(Closed::Forbidden)?;
        let servers = policy.upstreams(&self.host);
        let found = upstream::addresses(name, &servers, policy.version6()).await;
        let port = match protocol {
            Protocol::Http => 80,
            Protocol::Tls => 443,
        };
        let permitted = |ip: &&IpAddr| policy.permits_by_name(**ip);
        let reachable: Vec<&IpAddr> = found.iter().filter(permitted).take(4).collect();
        if reachable.is_empty() && !found.is_empty() {
            return Err(Closed::Forbidden);
        }
        for address in reachable {
            if let Some(stream) = self.connect_from_slot((*address, port).into()).await {
                return Ok(stream);
            }
        }
        Err(Closed::Silent)
    }

    /// From the slot: so the host's own table judges it like all that comes from there.
    async fn connect_from_slot(&self, address: SocketAddr) -> Option<TcpStream> {
        let slot = self.slot.clone();
        let connect = move || {
            namespace::enter(&slot, || {
                net::TcpStream::connect_timeout(&address, CONNECT_LIMIT)
                    .map_err(NetError::host(format!("connecting to {address}")))
            })
        };
        let stream = tokio::task::spawn_blocking(connect).await.ok()?.ok()?;
        stream.set_nonblocking(true).ok()?;
        TcpStream::from_std(stream).ok()
    }
}

/// The address that the guest chose, before the slot's table led its connection here.
fn dialled(client: &TcpStream) -> Option<SocketAddr> {
    if client.local_addr().ok()?.is_ipv4() {
        let address = getsockopt(client, sockopt::OriginalDst).ok()?;
        let ip = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
        return Some((ip, u16::from_be(address.sin_port)).into());
    }
    let address = getsockopt(client, sockopt::Ip6tOriginalDst).ok()?;
    let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
    Some((ip, u16::from_be(address.sin6_port)).into())
}

/// Whom the client wants, and what it said so far; none: nobody.
async fn hear(client: &mut TcpStream, protocol: Protocol) -> io::Result<Option<(String, Vec<u8>)>> {
    let mut head = Vec::new();
    loop {
        match greeting::read(protocol, &head) {
            Greeting::To(name) => return Ok(Some((name, head))),
            Greeting::Nobody => return Ok(None),
            Greeting::Unfinished => {}
        }
        if client.read_buf(&mut head).await? == 0 {
            return Ok(None);
        }
    }
}

/// People who look at what a program was told should find the reason.
async fn refuse(mut client: TcpStream, protocol: Protocol) -> io::Result<()> {
    if protocol == Protocol::Http {
        let text = "this host is not allowed by the rules of this sandbox, or not there\n";
        let answer = format!(
            "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
            text.len()
        );
        client.write_all(answer.as_bytes()).await?;
    }
    client.shutdown().await
}
