//! Broker of a tenant's outgoing connections, one thread per tenant.
//!
//! A *tenant* is an API key, or the *operator*: the owner of the host.
//!
//! A tenant's process has no network. It requests a connection by host and port from the broker, a
//! thread of the daemon. The broker checks the function's list of hosts, which the process cannot
//! change. It resolves the name, checks the addresses, connects and performs the TLS handshake. It
//! then passes one end of a pair of Unix sockets to the process, and copies data between the other
//! end and the host within limits.
//!
//! A function deployed with a *sandbox key* (a credential for sandboxes) also reaches the control
//! plane under a reserved name. For such a connection, the broker passes the other end of the pair
//! to the control plane, which verifies the key.
mod allow_list;
mod destination;
mod relay;

pub use allow_list::{AllowList, AllowListError, MAX_ALLOWED_HOSTS};

use destination::Destinations;
use ipnet::IpNet;
use jiffy_proto::channel::{Channel, ChannelError};
use jiffy_proto::function::{EgressFailure, EgressRequest, EgressResponse};
use jiffy_proto::internal::{ControlPlaneConnector, InternalOrigin, is_api_host};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use parking_lot::RwLock;
use relay::pair;
pub use relay::{Connection, HostConnector};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use tokio::io::unix::AsyncFd;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of connections of a tenant, including connections that are being established.
const MAX_CONNECTIONS: usize = 64;
/// Number of threads that resolve names for a tenant.
const LOOKUP_THREADS: usize = 4;

/// Egress settings of the operator.
#[derive(Debug, Clone, Default)]
pub struct EgressSettings {
    /// True if functions have no egress, regardless of their lists. The control plane remains
    /// reachable with a sandbox key.
    pub is_off: bool,
    /// Ranges outside the public internet that functions may reach if they list the host.
    pub granted: Vec<IpNet>,
    /// Names that are not resolved by lookups. `None` if all names are resolved by lookups.
    pub names: Option<Arc<dyn NameOverrides>>,
    /// Connector to the control plane. `None` if functions cannot reach the control plane.
    pub control_plane: Option<Arc<dyn ControlPlaneConnector>>,
}

/// Addresses of names that override lookups.
pub trait NameOverrides: fmt::Debug + Send + Sync {
    /// Returns the addresses of a name. Called for each connection. `None` if a lookup is required.
    fn addresses(&self, name: &str) -> Option<Vec<IpAddr>>;
}

impl NameOverrides for BTreeMap<String, Vec<IpAddr>> {
    fn addresses(&self, name: &str) -> Option<Vec<IpAddr>> {
        self.get(name).cloned()
    }
}

/// Broker of one tenant. Dropping this value stops the broker and closes its connections.
#[derive(Debug)]
pub struct EgressBroker {
    /// Allowed hosts by function.
    lists: Arc<RwLock<HashMap<String, AllowList>>>,
    /// Dropping this sender stops the broker's runtime.
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl EgressBroker {
    /// Starts a broker, and returns the broker and the process's end of its socket.
    pub fn start(settings: EgressSettings) -> io::Result<(Self, OwnedFd)> {
        let (broker_end, process_end) = Channel::pair().map_err(io::Error::other)?;
        let control_plane = settings.control_plane.clone();
        let destinations = Destinations::new(settings).map_err(io::Error::other)?;
        let connector = HostConnector::new(destinations).map_err(io::Error::other)?;
        let lists: Arc<RwLock<HashMap<String, AllowList>>> = Arc::default();
        // Lookups block a thread each. The limit also bounds the lookups that hang.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(LOOKUP_THREADS)
            .enable_all()
            .build()?;
        set_nonblocking(&broker_end)?;
        let socket = {
            let _context = runtime.enter();
            // SAFETY: a channel owns its descriptor, and keeps the descriptor open until it is
            // dropped.
            Arc::new(unsafe { AsyncFd::register(broker_end) }?)
        };
        let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
        let broker = Broker {
            socket,
            lists: lists.clone(),
            connector: Arc::new(connector),
            control_plane,
            permits: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        };
        let thread = std::thread::Builder::new().name("function-egress".to_owned());
        thread.spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = broker.serve() => {}
                    _ = &mut stopped => {}
                }
            });
            // A pending lookup cannot be cancelled. Its thread exits when the lookup completes.
            runtime.shutdown_background();
        })?;
        Ok((Self { lists, _stop: stop }, process_end))
    }

    /// Sets the hosts that `function` may reach.
    pub fn allow(&self, function: &str, list: AllowList) {
        self.lists.write().insert(function.to_owned(), list);
    }

    /// Returns the hosts that `function` may reach.
    #[must_use]
    pub fn allowed(&self, function: &str) -> AllowList {
        self.lists.read().get(function).cloned().unwrap_or_default()
    }

    /// Removes a function.
    pub fn remove(&self, function: &str) {
        self.lists.write().remove(function);
    }
}

/// Makes a descriptor non-blocking.
fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(())
}

/// State of a broker on its thread.
struct Broker {
    socket: Arc<AsyncFd<Channel>>,
    /// Destinations that each function may access, by function.
    lists: Arc<RwLock<HashMap<String, AllowList>>>,
    connector: Arc<HostConnector>,
    control_plane: Option<Arc<dyn ControlPlaneConnector>>,
    permits: Arc<Semaphore>,
}

/// Port of the control plane under its reserved name.
const API_PORT: u16 = 80;

/// Route of a request that the function's list allows.
enum EgressRoute {
    Host,
    ControlPlane(InternalOrigin),
}

impl Broker {
    /// Serves until the process closes its end or sends an invalid request.
    async fn serve(self) {
        while let Ok(request) = self.receive().await {
            // A rejected request releases its permit at the end of this `match`.
            let permit = self.permits.clone().try_acquire_owned();
            let failure = match (self.route(&request), permit) {
                (None, _) => EgressFailure::Denied,
                (_, Err(_)) => EgressFailure::TooMany,
                (Some(EgressRoute::ControlPlane(origin)), Ok(permit)) => {
                    let connection = self.connect_control_plane(origin, permit);
                    answer(&self.socket, request.id, connection).await;
                    continue;
                }
                (Some(EgressRoute::Host), Ok(permit)) => {
                    let (connector, socket) = (self.connector.clone(), self.socket.clone());
                    // A task of its own: a slow host must not delay the next requests.
                    tokio::spawn(async move {
                        let (relay, connection) = match connector.relay(&request).await {
                            Ok((relay, process_end)) => (Some(relay), Ok(process_end)),
                            Err(failure) => (None, Err(failure)),
                        };
                        if answer(&socket, request.id, connection).await
                            && let Some(relay) = relay
                        {
                            relay.run().await;
                        }
                        drop(permit);
                    });
                    continue;
                }
            };
            answer(&self.socket, request.id, Err(failure)).await;
        }
    }

    /// Returns the route of a request. `None` if the function's list does not allow the request.
    fn route(&self, request: &EgressRequest) -> Option<EgressRoute> {
        let lists = self.lists.read();
        let list = lists.get(&request.function)?;
        if is_api_host(&request.host) {
            // The gateway serves the reserved name by plain HTTP only.
            let is_served = request.port == API_PORT && !request.tls;
            let origin = list.origin().filter(|_| is_served);
            return origin.cloned().map(EgressRoute::ControlPlane);
        }
        list.contains(&request.host, request.port)
            .then_some(EgressRoute::Host)
    }

    /// Passes one end of a socket pair to the control plane, and returns the process's end.
    fn connect_control_plane(
        &self,
        origin: InternalOrigin,
        permit: OwnedSemaphorePermit,
    ) -> Result<OwnedFd, EgressFailure> {
        let connector = self.control_plane.as_ref().ok_or(EgressFailure::Denied)?;
        let (broker_end, process_end) = pair().map_err(|_| EgressFailure::TooMany)?;
        // The permit is released when the control plane closes the connection.
        if connector.connect(origin, broker_end, Box::new(permit)) {
            Ok(process_end)
        } else {
            Err(EgressFailure::Refused)
        }
    }

    /// Waits for the next request of the process.
    async fn receive(&self) -> Result<EgressRequest, ChannelError> {
        loop {
            let mut ready = self
                .socket
                .readable()
                .await
                .map_err(|_| ChannelError::Closed)?;
            match self.socket.get_ref().recv() {
                Err(ChannelError::Io(Errno::EAGAIN)) => ready.clear_ready(),
                // Received descriptors are closed.
                received => return received.map(|(request, _)| request),
            }
        }
    }
}

/// Answers a request. Returns whether the process received the answer.
async fn answer(
    socket: &AsyncFd<Channel>,
    id: u64,
    connection: Result<OwnedFd, EgressFailure>,
) -> bool {
    let (process_end, failure) = match connection {
        Ok(process_end) => (Some(process_end), None),
        Err(failure) => (None, Some(failure)),
    };
    let files: Vec<_> = process_end.iter().map(|file| file.as_fd()).collect();
    let response = EgressResponse { id, failure };
    loop {
        let Ok(mut ready) = socket.writable().await else {
            return false;
        };
        // The process receives its own descriptor; the broker's copy is closed when this returns.
        match socket.get_ref().send(&response, &files) {
            Err(ChannelError::Io(Errno::EAGAIN)) => ready.clear_ready(),
            sent => return sent.is_ok(),
        }
    }
}
