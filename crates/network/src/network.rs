//! [`Network`]: the network of one data directory's sandboxes. It sets up the host, creates slots
//! in advance, and leases them to guests. A *slot* is a network namespace with devices for one
//! guest.
//!
//! Several daemons of a host share its private address space. Each has a data directory of its own,
//! *claims* a range of addresses, and tags its namespaces and rules. In rootless mode (without
//! root), all rules and slots are in one network namespace of the user, the *router*. A process,
//! the uplink, connects the router to the network of the host.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

use crate::NetError;
use crate::claim::{self, RangeClaims};
use crate::connections::{ConnectionRecorder, RecordReader};
use crate::conntrack::{ConntrackLimits, ConntrackWatcher};
use crate::dns::{DnsServer, MemberNames};
use crate::egress_connector::EgressConnector;
use crate::forwarding;
use crate::guest_connections::GuestConnections;
use crate::header_connection::HeaderInjector;
use crate::host;
use crate::host_addresses::{AddressChanges, HostAddresses};
use crate::namespace;
use crate::network_state::slot_worker::ReleasedSlot;
use crate::network_state::{NetworkState, blocking};
use crate::policy::{EgressPolicy, HostReachability, RulesError};
use crate::private_network::NetworkId;
use crate::private_networks::PrivateNetworks;
use crate::program;
use crate::resolved_addresses::ResolvedAddresses;
use crate::slot::{self, NicKind, Slot, SlotConfig, SlotSockets};
use crate::slot_layout;
use crate::slot_lease::SlotLease;
use crate::slot_numbers::SlotNumbers;
use crate::slot_rules::SlotRules;
use crate::upstream::{self, Upstreams};
use ipnet::{IpNet, Ipv4Net};
use jiffy_engine_api::{BurstMemory, NetworkRules};
use jiffy_proto::internal::ControlPlaneConnector;
use parking_lot::Mutex;
use std::collections::HashSet;
use std::fs::File;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Instant;
use tokio::sync::watch;

/// Default maximum number of concurrent connections of one sandbox.
const DEFAULT_CONNECTIONS: u32 = 4096;
/// Maximum number of slots created in advance after a burst. Each uses 0.4 MiB of kernel memory.
const MAX_AFTER_BURST: usize = 32;

/// Configuration of a network.
#[derive(Debug, Clone)]
pub struct NetworkConfig {
    /// Data directory whose sandboxes use the network.
    pub home: PathBuf,
    /// Addresses between the host and slots, two per slot. Defaults to a free range.
    pub range: Option<Ipv4Net>,
    /// Maximum number of slots, 1 to 4096.
    pub slots: u32,
    /// Number of slots created in advance.
    pub ready: usize,
    /// Kind of network interface of the slots created in advance.
    pub nic: NicKind,
    /// Private ranges that sandboxes may reach.
    pub granted: Vec<IpNet>,
    /// Maximum number of concurrent connections of one sandbox.
    pub connections: u32,
    /// Number of entries of the host's connection tracking table that sandboxes may use. The limit
    /// per sandbox decreases when the table reaches a half of this number, and again at three
    /// quarters. Defaults to three quarters of the table.
    pub connections_total: Option<u32>,
    /// Connector to the control plane, for sandboxes whose rules name it. `None` if no sandbox can
    /// reach the control plane.
    pub control_plane: Option<Arc<dyn ControlPlaneConnector>>,
    /// Proxy that adds headers to requests. `None` if the host cannot add headers.
    pub header_injector: Option<Arc<dyn HeaderInjector>>,
    /// Client of egress proxies. `None` if the host cannot connect through proxies.
    pub egress_connector: Option<Arc<dyn EgressConnector>>,
}

impl NetworkConfig {
    /// Returns the default configuration for `home`.
    pub fn new(home: &Path) -> Self {
        Self {
            home: home.to_owned(),
            range: None,
            slots: 4096,
            ready: 4,
            nic: NicKind::Tap,
            granted: Vec::new(),
            connections: DEFAULT_CONNECTIONS,
            connections_total: None,
            control_plane: None,
            header_injector: None,
            egress_connector: None,
        }
    }
}

/// Network of one data directory's sandboxes. Clones share the state.
#[derive(Clone)]
pub struct Network(Arc<NetworkState>);

/// Checks that this process can create networks with this kind of interface.
fn check_requirements(nic: NicKind) -> Result<(), NetError> {
    let unable = |why: &str| Err(NetError::Unable(why.to_owned()));
    match jiffy_rootless::current().map(|own| own.uplink()) {
        // Rootless mode without a connection to the host's network.
        Some(Err(why)) => return unable(why),
        None if !nix::unistd::Uid::effective().is_root() => {
            return unable(
                "cannot create network namespaces and rules: root or user namespaces are required, see `jiffy doctor`",
            );
        }
        _ => {}
    }
    for name in ["ip", "nft"] {
        program::require(name)?;
    }
    if nic == NicKind::Tap && !Path::new("/dev/net/tun").exists() {
        return unable("/dev/net/tun does not exist: load the kernel module `tun`");
    }
    Ok(())
}

/// Removes the networks of removed data directories, which no daemon will remove otherwise. Skips
/// the data directory with the tag `except`.
fn remove_unowned(claims: &RangeClaims, except: &str) {
    for (tag, claim) in claims.all() {
        if tag != except && claim.is_orphaned() {
            host::tear_down(claims, &tag);
        }
    }
}

impl Network {
    /// Removes networks whose data directories no longer exist.
    pub fn remove_dead() -> Result<(), NetError> {
        // Rootless mode: rules and devices are in the router's namespace.
        namespace::outside(|| {
            // No tag is empty, so no data directory is skipped.
            remove_unowned(&RangeClaims::lock()?, "");
            Ok(())
        })
    }

    /// Sets up the host, tests the setup by creating the first slot, and starts creating the
    /// others. Namespaces of an earlier daemon remain until [`Network::reclaim`].
    pub fn open(config: &NetworkConfig) -> Result<Self, NetError> {
        check_requirements(config.nic)?;
        let Some(_) = jiffy_rootless::current() else {
            return Self::open_here(config, None);
        };
        // Rootless mode: read the host's addresses in the network namespace of this thread. The
        // network itself is opened in the router's namespace.
        let (changes, own) = AddressChanges::subscribe()?;
        let network = namespace::outside(|| Self::open_here(config, Some(&own)))?;
        let follower = changes.follow(&network.0.config.tag, own)?;
        *network.0.follower.lock() = Some(follower);
        Ok(network)
    }

    /// Opens the network in the network namespace of this thread. Claims a range of addresses, sets
    /// up the rules of the host, registers the slots of an earlier daemon, and creates the first
    /// slot.
    fn open_here(config: &NetworkConfig, own: Option<&HostAddresses>) -> Result<Self, NetError> {
        let slots = config.slots.clamp(1, 4096);
        let tag = claim::tag(&config.home);
        let claims = RangeClaims::lock()?;
        remove_unowned(&claims, &tag);
        // Two addresses per slot. The number of bits is at most 13, so the conversions cannot fail.
        let bits = (2 * slots).next_power_of_two().trailing_zeros();
        let length = 32 - u8::try_from(bits).unwrap_or(13);
        let range = claims.claim(&tag, &config.home, config.range, length)?;
        let uplink6 = forwarding::uplink6();
        let limits = ConntrackLimits {
            per_sandbox: config.connections.max(1),
            total: config.connections_total,
        };
        host::set_up(&claims, &tag, range, uplink6.as_deref(), limits, own)?;
        let reach = HostReachability {
            granted: config.granted.clone(),
            ipv6: uplink6.is_some(),
            adds_headers: config.header_injector.is_some(),
            uses_proxies: config.egress_connector.is_some(),
        };
        // The claimed range may be larger or smaller than requested. Each slot uses two addresses.
        let range_slots = 1_u64 << (31 - u32::from(range.prefix_len().min(31)));
        let default_policy = EgressPolicy::new(&NetworkRules::default(), &reach)?;
        let (connections, logs_refusals) = (limits.per_sandbox, host::logs_refusals());
        let slot_config = SlotConfig {
            tag,
            range,
            mtu: host::uplink_mtu(),
            connections,
            rules: Arc::new(SlotRules::new(&default_policy, connections, logs_refusals)),
            policies: Arc::default(),
            default_policy,
            logs_refusals,
        };
        let mut numbers = SlotNumbers::new(slots.min(u32::try_from(range_slots).unwrap_or(slots)));
        // Register the slots of an earlier daemon, so that their numbers are not allocated again.
        (slot_config.numbers().into_iter()).for_each(|number| numbers.register(number));
        let networks = PrivateNetworks::default();
        networks.add_existing(NetworkId::existing(&slot_config.tag));
        // Other daemons may claim ranges only after the host is set up with this one.
        drop(claims);
        let (wake, inbox) = mpsc::channel();
        let upstreams = Arc::new(Upstreams::in_file("/etc/resolv.conf"));
        let watcher = ConntrackWatcher::start(
            slot_layout::table(&slot_config.tag),
            limits,
            upstreams.gauge.clone(),
        )
        .map_err(NetError::host("starting a thread"))?;
        let network = Self(Arc::new(NetworkState {
            config: slot_config,
            home: config.home.clone(),
            reach,
            bursts: Mutex::new(BurstMemory::new(config.ready, MAX_AFTER_BURST)),
            nic: config.nic,
            ready: Mutex::default(),
            numbers: Mutex::new(numbers),
            released: Mutex::default(),
            removal: Mutex::default(),
            last_use: Mutex::default(),
            wake: Mutex::new(Some(wake)),
            upstreams,
            networks: Arc::new(networks),
            control_plane: config.control_plane.clone(),
            header_injector: config.header_injector.clone(),
            egress_connector: config.egress_connector.clone(),
            watcher: Mutex::new(Some(watcher)),
            follower: Mutex::default(),
            worker: Mutex::default(),
        }));
        // The first slot shows whether this host can create slots at all.
        let first = network
            .0
            .create_slot(config.nic)
            .inspect_err(|_| network.0.tear_down_if_unused())?;
        network.0.ready.lock().push_back(first);
        network.start_worker(inbox)?;
        Ok(network)
    }

    /// Starts the thread that creates and removes slots.
    fn start_worker(&self, inbox: Receiver<()>) -> Result<(), NetError> {
        let state = self.0.clone();
        let worker = thread::Builder::new()
            .name("slots".to_owned())
            .spawn(move || state.work(&inbox))
            .map_err(NetError::host("starting a thread"))?;
        *self.0.worker.lock() = Some(worker);
        self.0.wake();
        Ok(())
    }

    /// Returns the range of addresses between the host and slots.
    pub fn range(&self) -> Ipv4Net {
        self.0.config.range
    }

    /// Returns a description for users: the range of addresses, and whether sandboxes have IPv6.
    pub fn description(&self) -> String {
        let six = if self.0.reach.ipv6 { "with" } else { "without" };
        format!("addresses in {}, {six} IPv6", self.range())
    }

    /// Returns the number of slots in use or ready, and their maximum.
    pub fn slots(&self) -> (usize, u32) {
        let numbers = self.0.numbers.lock();
        (numbers.in_use(), numbers.limit())
    }

    /// Returns the policy of a slot without rules of its own, and the name servers of the host.
    pub(crate) fn defaults(&self) -> (&EgressPolicy, &Upstreams) {
        (&self.0.config.default_policy, &self.0.upstreams)
    }

    /// Checks that this host can enforce the rules.
    pub fn check(&self, rules: &NetworkRules) -> Result<EgressPolicy, RulesError> {
        EgressPolicy::new(rules, &self.0.reach)
    }

    /// Leases a slot with this kind of interface for a guest. The slot is blocked until
    /// [`SlotLease::open`]. Prefers a slot that was created in advance, otherwise creates one. Must
    /// be called inside a tokio runtime.
    pub async fn take(&self, nic: NicKind) -> Result<SlotLease, NetError> {
        let (ready, left) = self.0.take_ready(nic);
        self.0.bursts.lock().note_use(Instant::now(), left);
        // Record the use first: it defers the background work until after this request.
        self.0.note_use();
        self.0.wake();
        let slot = match ready {
            Some(slot) => slot,
            None => {
                let state = self.0.clone();
                blocking(move || PendingSlot::create(state, nic))
                    .await?
                    .into_slot()?
            }
        };
        self.lease(slot.number, slot.tap, slot.sockets)
    }

    /// Adopts the slot of a guest that an earlier daemon left running, and enforces `rules`.
    pub async fn adopt(&self, number: u32, rules: &NetworkRules) -> Result<SlotLease, NetError> {
        // `open` registered the numbers of existing slots. Registering a number again marks it as
        // in use, so that `reclaim` does not remove the slot.
        self.0.numbers.lock().register(number);
        let config = self.0.config.clone();
        let sockets = blocking(move || slot::open_sockets(&config, number))
            .await
            .inspect_err(|_| self.0.release(ReleasedSlot::new(number)))?;
        let lease = self.lease(number, None, sockets)?;
        // The guest must survive this daemon, too, even if the steps below fail.
        lease.retain();
        // Enforce the rules in any case: the table of an adopted slot is not the default one that
        // `lease` assumes. The operator may also have changed the permitted private ranges.
        *lease.enforced.lock().await = None;
        lease.replace(rules).await?;
        Ok(lease)
    }

    /// Starts the tasks for the guest in slot `number`. Releases the slot on failure.
    fn lease(
        &self,
        number: u32,
        tap: Option<File>,
        sockets: SlotSockets,
    ) -> Result<SlotLease, NetError> {
        let (policy, policy_receiver) = watch::channel(None);
        let kernel = Arc::new(sockets.connections);
        let name = self.0.config.name(number);
        let record = Arc::new(ConnectionRecorder::new(
            name,
            kernel.clone(),
            self.0.config.logs_refusals,
        ));
        let resolved = Arc::<ResolvedAddresses>::default();
        let dns = DnsServer::start(
            sockets.dns,
            policy_receiver,
            self.0.upstreams.clone(),
            resolved.clone(),
            MemberNames {
                networks: self.0.networks.clone(),
                slot: number,
            },
            record.clone(),
        );
        let both = dns.and_then(|dns| Ok((dns, RecordReader::start(&kernel, &record)?)));
        let (dns, watch) = both
            .map_err(NetError::host("listening in a slot"))
            .inspect_err(|_| self.0.release(ReleasedSlot::new(number)))?;
        Ok(SlotLease {
            state: self.0.clone(),
            number,
            tap,
            is_tap_taken: false,
            record,
            resolved,
            _dns: dns,
            _watch: watch,
            proxy: Mutex::default(),
            joined: Mutex::default(),
            enforced: tokio::sync::Mutex::new(Some(self.0.config.default_policy.clone())),
            policy,
            to_guest: GuestConnections::default(),
            is_retained: AtomicBool::new(false),
        })
    }

    /// Removes all slots of an earlier daemon with this kind of interface whose numbers are not in
    /// `retained`.
    pub fn reclaim(&self, nic: NicKind, retained: &[u32]) {
        let retained: HashSet<u32> = retained.iter().copied().collect();
        let ready: HashSet<u32> = self.0.ready.lock().iter().map(|s| s.number).collect();
        for number in self.0.config.numbers() {
            if self.0.config.nic(number) == nic
                && !retained.contains(&number)
                && !ready.contains(&number)
                && self.0.numbers.lock().is_unclaimed(number)
            {
                self.0.release(ReleasedSlot::new(number));
            }
        }
    }

    /// Removes unused slots and, if no guest remains, all rules in the host. Returns after the
    /// removal.
    pub fn close(&self) {
        // Without the sender, the worker removes the queued slots and exits. Slots that are
        // released later are removed by the callers of `release`.
        drop(self.0.wake.lock().take());
        drop(self.0.watcher.lock().take());
        drop(self.0.follower.lock().take());
        if let Some(worker) = self.0.worker.lock().take() {
            // The panic hook has already reported a panic of the worker.
            let _ = worker.join();
        }
    }

    /// Resolves a name with the host's name servers.
    pub async fn lookup(&self, name: &str) -> Vec<IpAddr> {
        let (policy, upstreams) = self.defaults();
        upstream::addresses(name, &policy.upstreams(upstreams), policy.ipv6()).await
    }

    /// Returns true if a slot without rules of its own can reach `address`.
    pub fn permits(&self, address: IpAddr) -> bool {
        self.defaults().0.allows(address)
    }
}

/// Slot for a waiting caller. Dropping this value removes the slot if the caller did not take it.
struct PendingSlot {
    state: Arc<NetworkState>,
    slot: Option<Slot>,
}

impl PendingSlot {
    /// Creates a slot with this kind of interface.
    fn create(state: Arc<NetworkState>, nic: NicKind) -> Result<Self, NetError> {
        let slot = Some(namespace::outside(|| state.create_slot(nic))?);
        Ok(Self { state, slot })
    }

    /// Passes the slot to the caller, so that dropping this value does not remove it.
    fn into_slot(mut self) -> Result<Slot, NetError> {
        let slot = self.slot.take();
        slot.ok_or_else(|| NetError::Unable("the slot was removed".to_owned()))
    }
}

impl Drop for PendingSlot {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.state.release(ReleasedSlot::new(slot.number));
        }
    }
}

impl std::fmt::Debug for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Network({})", self.0.config.range)
    }
}
