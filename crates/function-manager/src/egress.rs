//! Broker of a tenant's outgoing connections.
//!
//! A tenant's process has no network. It asks the broker, which is in the daemon, for a connection
//! to a host; the broker looks at the function's list of hosts, which the process cannot change,
//! resolves the name, checks the addresses, connects, speaks TLS, and hands out one end of a pair
//! of Unix sockets, between which and the host it copies within limits. A function that was
//! deployed with a key for sandboxes reaches the control plane as well, by its one reserved name:
//! the other end of the pair is then the control plane's, which asks for the key.

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
use relay::{Connector, pair};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use tokio::io::unix::AsyncFd;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Connections of one tenant at once, those that are being made included.
const MAX_CONNECTIONS: usize = 64;
/// Threads that look up names for one tenant.
const LOOKUP_THREADS: usize = 4;

/// Settings by the host's owner.
#[derive(Debug, Clone, Default)]
pub struct EgressSettings {
    /// True if functions reach nothing, whatever they list.
    pub is_off: bool,
    /// Ranges outside of the public internet that functions may reach if they list the host.
    pub granted: Vec<IpNet>,
    /// Names that are not looked up; none: all are.
    pub names: Option<Arc<dyn KnownNames>>,
    /// Way to the control plane; none: it is not reached.
    pub control_plane: Option<Arc<dyn ControlPlaneConnector>>,
}

/// Names whose addresses are known without a lookup.
pub trait KnownNames: fmt::Debug + Send + Sync {
    /// Addresses of a name, asked for anew for each connection; none: it is looked up.
    fn addresses(&self, name: &str) -> Option<Vec<IpAddr>>;
}

impl KnownNames for BTreeMap<String, Vec<IpAddr>> {
    fn addresses(&self, name: &str) -> Option<Vec<IpAddr>> {
        self.get(name).cloned()
    }
}

/// Broker of one tenant. It ends with this value, and its connections with it.
#[derive(Debug)]
pub struct EgressBroker {
    lists: Arc<RwLock<HashMap<String, AllowList>>>,
    /// Its runtime stops when this is dropped.
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl EgressBroker {
    /// Starts a broker, and returns it with the end of its socket that is the process's.
    pub fn start(settings: EgressSettings) -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = Channel::pair().map_err(io::Error::other)?;
        let control_plane = settings.control_plane.clone();
        let destinations = Destinations::new(settings).map_err(io::Error::other)?;
        let connector = Connector::new(destinations).map_err(io::Error::other)?;
        let lists: Arc<RwLock<HashMap<String, AllowList>>> = Arc::default();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(LOOKUP_THREADS)
            .enable_all()
            .build()?;
        set_nonblocking(&ours)?;
        let socket = {
            let _inside = runtime.enter();
            // SAFETY: a channel owns its descriptor, and keeps it open as long as it lives.
            Arc::new(unsafe { AsyncFd::register(ours) }?)
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
            // Lookups that hang end by themselves.
            runtime.shutdown_background();
        })?;
        Ok((Self { lists, _stop: stop }, theirs))
    }

    /// Sets the hosts that `function` may reach.
    pub fn allow(&self, function: &str, list: AllowList) {
        self.lists.write().insert(function.to_owned(), list);
    }

    /// Hosts that `function` may reach.
    #[must_use]
    pub fn allowed(&self, function: &str) -> AllowList {
        self.lists.read().get(function).cloned().unwrap_or_default()
    }

    /// Forgets a function.
    pub fn forget(&self, function: &str) {
        self.lists.write().remove(function);
    }
}

/// Sets a descriptor to return at once.
fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(())
}

/// Broker on its thread.
struct Broker {
    socket: Arc<AsyncFd<Channel>>,
    lists: Arc<RwLock<HashMap<String, AllowList>>>,
    connector: Arc<Connector>,
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
    /// Serves until the process closes its end, or says what is no request.
    async fn serve(self) {
        while let Ok(request) = self.receive().await {
            let permit = self.permits.clone().try_acquire_owned();
            let failure = match (self.route(&request), permit) {
                (None, _) => EgressFailure::Denied,
                (_, Err(_)) => EgressFailure::TooMany,
                (Some(EgressRoute::ControlPlane(origin)), Ok(permit)) => {
                    let made = self.enter(origin, permit);
                    answer(&self.socket, request.id, made).await;
                    continue;
                }
                (Some(EgressRoute::Host), Ok(permit)) => {
                    let (connector, socket) = (self.connector.clone(), self.socket.clone());
                    tokio::spawn(async move {
                        let (relay, made) = match connector.relay(&request).await {
                            Ok((relay, theirs)) => (Some(relay), Ok(theirs)),
                            Err(failure) => (None, Err(failure)),
                        };
                        if answer(&socket, request.id, made).await
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

    fn route(&self, request: &EgressRequest) -> Option<EgressRoute> {
        let lists = self.lists.read();
        let list = lists.get(&request.function)?;
        if is_api_host(&request.host) {
            let is_served = request.port == API_PORT && !request.tls;
            let origin = list.origin().filter(|_| is_served);
            return origin.cloned().map(EgressRoute::ControlPlane);
        }
        list.contains(&request.host, request.port)
            .then_some(EgressRoute::Host)
    }

    /// Hands the control plane one end of a pair, and returns the process's.
    fn enter(
        &self,
        origin: InternalOrigin,
        permit: OwnedSemaphorePermit,
    ) -> Result<OwnedFd, EgressFailure> {
        let connector = self.control_plane.as_ref().ok_or(EgressFailure::Denied)?;
        let (ours, theirs) = pair().map_err(|_| EgressFailure::TooMany)?;
        match connector.connect(origin, ours, Box::new(permit)) {
            true => Ok(theirs),
            false => Err(EgressFailure::Refused),
        }
    }

    async fn receive(&self) -> Result<EgressRequest, ChannelError> {
        loop {
            let mut ready = self
                .socket
                .readable()
                .await
                .map_err(|_| ChannelError::Closed)?;
            match self.socket.get_ref().recv() {
                Err(ChannelError::Io(Errno::EAGAIN)) => ready.clear_ready(),
                // Descriptors that come with it are closed.
                received => return received.map(|(request, _)| request),
            }
        }
    }
}

/// Answers a request. Returns true if the process has the answer.
async fn answer(socket: &AsyncFd<Channel>, id: u64, made: Result<OwnedFd, EgressFailure>) -> bool {
    let (theirs, failure) = match made {
        Ok(theirs) => (Some(theirs), None),
        Err(failure) => (None, Some(failure)),
    };
    let files: Vec<_> = theirs.iter().map(|file| file.as_fd()).collect();
    let response = EgressResponse { id, failure };
    loop {
        let Ok(mut ready) = socket.writable().await else {
            return false;
        };
        match socket.get_ref().send(&response, &files) {
            Err(ChannelError::Io(Errno::EAGAIN)) => ready.clear_ready(),
            sent => return sent.is_ok(),
        }
    }
}
