//! [`SlotLease`]: a slot in use by a guest. An engine opens the slot's device with it, changes its
//! rules, and removes it.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.
//!
//! The *members* of a private network are the sandboxes that it connects.

use crate::NetError;
use crate::connections::{ConnectionRecorder, RecordReader};
use crate::dns::DnsServer;
use crate::guest_connections::GuestConnections;
use crate::namespace;
use crate::network_state::slot_worker::ReleasedSlot;
use crate::network_state::{NetworkState, blocking};
use crate::policy::EgressPolicy;
use crate::private_network::{self, NetworkId};
use crate::proxy::header_route::MAX_HEADER_CONNECTIONS;
use crate::proxy::{NameProxy, ProxyRoute};
use crate::resolved_addresses::ResolvedAddresses;
use crate::slot;
use jiffy_engine_api::{ConnectionLog, GuestStream, NetworkRules};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use parking_lot::Mutex;
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::{Semaphore, watch};

/// Slot in use. Dropping this value removes the slot, unless [`Self::retain`] was called.
pub struct SlotLease {
    pub(crate) state: Arc<NetworkState>,
    /// Number of the slot, from which its names and addresses follow.
    pub(crate) number: u32,
    /// `None` if the guest's interface is a veth pair, or the slot was adopted.
    pub(crate) tap: Option<File>,
    /// True after the tap was passed to the VMM.
    pub(crate) is_tap_taken: bool,
    pub(crate) record: Arc<ConnectionRecorder>,
    /// Addresses that the DNS server returned to the guest.
    pub(crate) resolved: Arc<ResolvedAddresses>,
    /// Tasks that run as long as the lease exists.
    pub(crate) _dns: DnsServer,
    pub(crate) _watch: RecordReader,
    /// Proxy for connections that are permitted by name. `None` until rules contain names.
    pub(crate) proxy: Mutex<Option<NameProxy>>,
    /// Private network to which the slot is linked, and the guest's address in it.
    pub(crate) joined: Mutex<Option<(NetworkId, Ipv4Addr)>>,
    /// Policy that the slot's table enforces. `None` if unknown. Locked while the policy is
    /// replaced, so that replacements are serialised.
    pub(crate) enforced: tokio::sync::Mutex<Option<EgressPolicy>>,
    /// Policy of the DNS server and the proxy. `None` until the first [`Self::replace`] assigns
    /// rules to the guest.
    pub(crate) policy: watch::Sender<Option<EgressPolicy>>,
    /// Open connections of the daemon to the guest.
    pub(crate) to_guest: GuestConnections,
    /// True if the slot must outlive this process.
    pub(crate) is_retained: AtomicBool,
}

impl SlotLease {
    /// Returns the record of its guest's connections, which remains readable after the slot's
    /// removal.
    pub fn connections(&self) -> Arc<dyn ConnectionLog> {
        self.record.clone()
    }

    /// Returns its number, with which a later daemon can adopt the slot.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the numbers of bytes that its guest sent and received, from the counters of the
    /// host's end. `None` if the counters cannot be read.
    pub fn traffic(&self) -> Option<(u64, u64)> {
        Some((self.sent_bytes()?, self.counter("tx_bytes")?))
    }

    /// Returns the number of bytes that its guest sent. `None` if the counter cannot be read.
    pub fn sent_bytes(&self) -> Option<u64> {
        // The host receives the packets that the guest sends.
        self.counter("rx_bytes")
    }

    /// Returns a counter of the host's end.
    fn counter(&self, counter: &str) -> Option<u64> {
        let device = self.state.config.name(self.number);
        let file = format!("/sys/class/net/{device}/statistics/{counter}");
        std::fs::read_to_string(file).ok()?.trim().parse().ok()
    }

    /// Takes the tap for the VMM. `None` on later calls.
    pub fn take_tap(&mut self) -> Option<File> {
        // The lease retains a descriptor: see `ReleasedSlot::tap`.
        let tap = self.tap.as_ref().filter(|_| !self.is_tap_taken)?;
        // If the descriptor cannot be duplicated, hand over the only one.
        let copy = tap.try_clone().ok();
        self.is_tap_taken = copy.is_some();
        copy.or_else(|| self.tap.take())
    }

    /// Returns the path of the network namespace with the guest's `eth0`. `None` if the guest has a
    /// tap.
    pub fn namespace(&self) -> Option<PathBuf> {
        let name = self.state.config.guest_name(self.number);
        Some(namespace::path(&name)).filter(|path| path.exists())
    }

    /// Returns the name of the network namespace with the guest's `eth0`, if the guest has no tap.
    pub(crate) fn guest_name(&self) -> String {
        self.state.config.guest_name(self.number)
    }

    /// Opens the uplink for the guest.
    pub fn open(&self) -> Result<(), NetError> {
        self.state.note_use();
        namespace::outside(|| slot::open(&self.state.config, self.number))
    }

    /// Connects to TCP `port` of the guest. `None` if no server accepts the connection in time.
    pub async fn connect(&self, port: u16) -> Option<GuestStream> {
        let name = self.state.config.name(self.number);
        self.to_guest.connect(name, port).await
    }

    /// Aborts the connections of [`Self::connect`], because the guest was terminated or rolled
    /// back. Addresses that were resolved for the guest are no longer permitted, and connections to
    /// them are closed.
    pub fn end_connections(&self) {
        self.to_guest.abort_all();
        self.resolved.clear();
    }

    /// Removes the entries of the guest's connections from both connection tracking tables, after
    /// the guest was replaced. Peers that still send receive a reset.
    pub async fn forget_connections(&self) -> Result<(), NetError> {
        let (config, number) = (self.state.config.clone(), self.number);
        blocking(move || slot::forget_connections(&config, number)).await
    }

    /// Replaces the active rules, also for open connections.
    pub async fn replace(&self, rules: &NetworkRules) -> Result<(), NetError> {
        let policy = EgressPolicy::new(rules, &self.state.reach)?;
        let mut enforced = self.enforced.lock().await;
        // The proxy must listen before the table redirects connections to it.
        if policy.has_names() {
            self.start_proxy().await?;
        }
        let membership = rules.membership.as_ref().zip(policy.network());
        if let Some((membership, network)) = &membership {
            self.join(network, membership.address).await?;
        }
        // The kernel needs some milliseconds to replace a table. Retain an equal table: the tables
        // of prepared slots suit all sandboxes without rules of their own.
        let is_enforced = enforced
            .as_ref()
            .is_some_and(|former| self.state.config.has_same_table(former, &policy));
        if !is_enforced {
            let (config, number) = (self.state.config.clone(), self.number);
            let new = policy.clone();
            blocking(move || slot::enforce(&config, number, &new)).await?;
        }
        *enforced = Some(policy.clone());
        // Members find the guest by its name once it accepts their packets.
        if let Some((membership, network)) = &membership {
            self.state.networks.set(network, self.number, membership);
        }
        // The DNS server and the proxy follow only after the table enforces the policy.
        self.policy.send_replace(Some(policy));
        Ok(())
    }

    /// Links the slot to a private network, unless it is linked. No packet passes the link until
    /// the slot's table permits it. Must not be called concurrently.
    async fn join(&self, network: &NetworkId, address: Ipv4Addr) -> Result<(), NetError> {
        let new = (network.clone(), address);
        let joined = self.joined.lock().clone();
        match joined {
            Some(joined) if joined == new => return Ok(()),
            Some(_) => {
                let why = "a sandbox cannot change its private network";
                return Err(NetError::Unable(why.to_owned()));
            }
            None => {}
        }
        // Record the network first, so that the slot also leaves it if this call is cancelled.
        *self.joined.lock() = Some(new);
        let (state, number) = (self.state.clone(), self.number);
        let id = network.clone();
        let work = move || {
            let _changes = state.networks.changes.lock();
            private_network::join(&state.config, number, &id, address).inspect_err(|_| {
                let successor = state.networks.slot(&id, address);
                private_network::leave(&state.config, number, (&id, address), successor);
            })
        };
        if let Err(e) = blocking(work).await {
            self.joined.lock().take();
            return Err(e);
        }
        Ok(())
    }

    /// Starts the proxy for connections by name unless it runs. Must not be called concurrently.
    async fn start_proxy(&self) -> Result<(), NetError> {
        if self.proxy.lock().is_some() {
            return Ok(());
        }
        let (config, number) = (self.state.config.clone(), self.number);
        let name = config.name(number);
        let listeners = blocking(move || slot::listen_for_names(&config, number)).await?;
        let route = ProxyRoute {
            slot: name,
            policy: self.policy.subscribe(),
            host: self.state.upstreams.clone(),
            resolved: self.resolved.clone(),
            record: self.record.clone(),
            control_plane: self.state.control_plane.clone(),
            header_injector: self.state.header_injector.clone(),
            egress_connector: self.state.egress_connector.clone(),
            header_permits: Arc::new(Semaphore::new(MAX_HEADER_CONNECTIONS)),
        };
        let proxy = NameProxy::start(listeners, route);
        *self.proxy.lock() = Some(proxy.map_err(NetError::host("starting the proxy"))?);
        Ok(())
    }

    /// Retains the slot when this process exits, like its guest.
    pub fn retain(&self) {
        self.is_retained.store(true, Ordering::Release);
    }

    /// Marks the guest as terminated: dropping the lease removes the slot.
    pub fn release(&self) {
        self.is_retained.store(false, Ordering::Release);
    }

    /// Opens a non-blocking TCP socket in the guest's network namespace. All its packets pass the
    /// tables of slot and host. Fails for a guest with a tap, which has no such namespace.
    pub fn tcp_socket(&self, ipv6: bool) -> Result<OwnedFd, NetError> {
        let family = if ipv6 {
            AddressFamily::Inet6
        } else {
            AddressFamily::Inet
        };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        namespace::enter(&self.guest_name(), || {
            socket(family, SockType::Stream, flags, SockProtocol::Tcp)
                .map_err(|e| NetError::host("opening a socket in a slot")(e.into()))
        })
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        // The connections must not outlive their guest, even if the slot does.
        self.end_connections();
        let joined = self.joined.lock().take();
        if let Some((network, address)) = &joined {
            // Remove the member now: its name must lead nowhere while the slot waits for its
            // removal.
            (self.state.networks).remove(network, self.number, *address);
        }
        if !self.is_retained.load(Ordering::Acquire) {
            let record = self.record.clone();
            self.state.release(ReleasedSlot {
                number: self.number,
                record: Some(record),
                network: joined,
                tap: self.tap.take(),
            });
        }
    }
}
