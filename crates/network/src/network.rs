//! Network of one data directory's sandboxes: slots, some of them made in advance.

use crate::NetError;
use crate::claim::{self, RangeClaims};
use crate::connections::{ConnectionRecorder, RecordReader};
use crate::conntrack::{ConntrackLimits, ConntrackWatcher};
use crate::dns::DnsServer;
use crate::forwarding;
use crate::guest_connections::GuestConnections;
use crate::host;
use crate::host_addresses::{AddressChanges, HostAddresses};
use crate::namespace;
use crate::network_state::{NetworkState, blocking};
use crate::policy::{EgressPolicy, HostReachability, RulesError};
use crate::program;
use crate::slot::{self, NicKind, Slot, SlotConfig, SlotSockets};
use crate::slot_layout;
use crate::slot_lease::SlotLease;
use crate::slot_numbers::SlotNumbers;
use crate::slot_rules::SlotRules;
use crate::slot_worker::ReleasedSlot;
use crate::upstream::Upstreams;
use ipnet::{IpNet, Ipv4Net};
use jiffy_engine_api::{BurstMemory, NetworkRules};
use jiffy_proto::internal::ControlPlaneConnector;
use parking_lot::Mutex;
use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Instant;
use tokio::sync::watch;

/// Default limit of the connections of one sandbox at the same time.
const DEFAULT_CONNECTIONS: u32 = 4096;
/// Most slots made in advance after a burst: each takes 0.4 MiB of the kernel's memory.
const MAX_AFTER_BURST: usize = 32;

/// Configuration of a network.
#[derive(Debug, Clone)]
pub struct NetworkConfig {
    /// The data directory whose sandboxes it serves.
    pub home: PathBuf,
    /// Addresses between the host and slots, two for each; none: a range that is free.
    pub range: Option<Ipv4Net>,
    /// Most slots, 1 to 4096.
    pub slots: u32,
    /// Number of slots made in advance.
    pub ready: usize,
    /// Kind of network interface of these.
    pub nic: NicKind,
    /// Private ranges that sandboxes may reach.
    pub granted: Vec<IpNet>,
    /// Most connections of one sandbox at the same time.
    pub connections: u32,
    /// Entries of the host's table of connections beyond which sandboxes get hardly any; none:
    /// three quarters of it.
    pub connections_total: Option<u32>,
    /// Way to the control plane, for sandboxes whose rules name it; none: it is not reached.
    pub control_plane: Option<Arc<dyn ControlPlaneConnector>>,
}

impl NetworkConfig {
    /// Default configuration for `home`.
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
        }
    }
}

/// Network of one data directory's sandboxes. Clones share it.
#[derive(Clone)]
pub struct Network(Arc<NetworkState>);

/// Checks that this process can make networks with such interfaces.
fn check_requirements(nic: NicKind) -> Result<(), NetError> {
    let unable = |why: &str| Err(NetError::Unable(why.to_owned()));
    match jiffy_rootless::current().map(|own| own.uplink()) {
        Some(Err(why)) => return unable(why),
        None if !nix::unistd::Uid::effective().is_root() => {
            return unable(
                "only root can make network namespaces and rules, here not even of its own: see `jiffy doctor`",
            );
        }
        _ => {}
    }
    for name in ["ip", "nft"] {
        program::require(name)?;
    }
    if nic == NicKind::Tap && !Path::new("/dev/net/tun").exists() {
        return unable("there is no /dev/net/tun: load the kernel module `tun`");
    }
    Ok(())
}

/// Removes networks of data directories that are gone, and so have no process of their own to do
/// it.
fn remove_unowned(claims: &RangeClaims, except: &str) {
    for (tag, claim) in claims.all() {
        if tag != except && claim.is_gone() {
            host::tear_down(claims, &tag);
        }
    }
}

impl Network {
    /// Removes the remains of networks whose data directories are gone.
    pub fn remove_dead() -> Result<(), NetError> {
        remove_unowned(&RangeClaims::lock()?, "");
        Ok(())
    }

    /// Sets the host up, checks it with a first slot, and starts to make the others. Namespaces of
    /// an earlier daemon stay until [`Network::reclaim`].
    pub fn open(config: &NetworkConfig) -> Result<Self, NetError> {
        check_requirements(config.nic)?;
        let Some(_) = jiffy_rootless::current() else {
            return Self::open_here(config, None);
        };
        // Here, in the network that has the host's addresses.
        let (changes, own) = AddressChanges::subscribe()?;
        let network = namespace::outside(|| Self::open_here(config, Some(&own)))?;
        let follower = changes.follow(&network.0.config.tag, own)?;
        *network.0.follower.lock() = Some(follower);
        Ok(network)
    }

    fn open_here(config: &NetworkConfig, own: Option<&HostAddresses>) -> Result<Self, NetError> {
        let slots = config.slots.clamp(1, 4096);
        let tag = claim::tag(&config.home);
        let claims = RangeClaims::lock()?;
        remove_unowned(&claims, &tag);
        let bits = (2 * slots).next_power_of_two().trailing_zeros();
        let length = 32 - u8::try_from(bits).unwrap_or(13);
        let range = claims.make(&tag, &config.home, config.range, length)?;
        let uplink6 = forwarding::uplink6();
        let limits = ConntrackLimits {
            per_sandbox: config.connections.max(1),
            total: config.connections_total,
        };
        host::set_up(&claims, &tag, range, uplink6.as_deref(), limits, own)?;
        let reach = HostReachability {
            granted: config.granted.clone(),
            ipv6: uplink6.is_some(),
        };
        let fits = 1_u64 << (31 - u32::from(range.prefix_len().min(31)));
        let usual = EgressPolicy::new(&NetworkRules::default(), &reach)?;
        let (connections, logs_refusals) = (limits.per_sandbox, host::logs_refusals());
        let slot_config = SlotConfig {
            tag,
            range,
            mtu: host::mtu_out(),
            connections,
            rules: Arc::new(SlotRules::new(&usual, connections, logs_refusals)),
            policies: Arc::default(),
            usual,
            logs_refusals,
        };
        let mut numbers = SlotNumbers::new(slots.min(u32::try_from(fits).unwrap_or(slots)));
        (slot_config.numbers().into_iter()).for_each(|number| numbers.enter(number));
        drop(claims);
        let (wake, inbox) = mpsc::channel();
        let upstreams = Arc::new(Upstreams::in_file("/etc/resolv.conf"));
        let watcher = ConntrackWatcher::start(
            slot_layout::table(&slot_config.tag),
            limits,
            upstreams.gauge.clone(),
        );
        let watcher = watcher.map_err(NetError::host("starting a thread"))?;
        let network = Self(Arc::new(NetworkState {
            config: slot_config,
            claim: config.home.clone(),
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
            control_plane: config.control_plane.clone(),
            watcher: Mutex::new(Some(watcher)),
            follower: Mutex::default(),
            worker: Mutex::default(),
        }));
        let first = network
            .0
            .make(config.nic)
            .inspect_err(|_| network.0.tear_down_if_unused())?;
        network.0.ready.lock().push_back(first);
        network.begin(inbox)?;
        Ok(network)
    }

    fn begin(&self, inbox: Receiver<()>) -> Result<(), NetError> {
        let state = self.0.clone();
        let worker = thread::Builder::new()
            .name("slots".to_owned())
            .spawn(move || state.work(&inbox))
            .map_err(NetError::host("starting a thread"))?;
        *self.0.worker.lock() = Some(worker);
        self.0.wake();
        Ok(())
    }

    /// Addresses between the host and slots.
    pub fn range(&self) -> Ipv4Net {
        self.0.config.range
    }

    /// Description of its addresses and of sandboxes' IPv6 route, for people.
    pub fn description(&self) -> String {
        let six = if self.0.reach.ipv6 { "with" } else { "without" };
        format!("addresses in {}, {six} IPv6", self.range())
    }

    /// Number of slots in use or ready, and its limit.
    pub fn slots(&self) -> (usize, u32) {
        let numbers = self.0.numbers.lock();
        (numbers.in_use(), numbers.most())
    }

    /// Policy of a slot without rules of its own, and the name servers of the host.
    pub(crate) fn usual(&self) -> (&EgressPolicy, &Upstreams) {
        (&self.0.config.usual, &self.0.upstreams)
    }

    /// Checks that this host can enforce the rules.
    pub fn check(&self, rules: &NetworkRules) -> Result<EgressPolicy, RulesError> {
        EgressPolicy::new(rules, &self.0.reach)
    }

    /// Takes a slot for a guest with such an interface, closed until [`SlotLease::open`]. One that
    /// was made in advance is handed out at once; without one, it is made now. Must be called
    /// inside a tokio runtime.
    pub async fn take(&self, nic: NicKind) -> Result<SlotLease, NetError> {
        let (ready, left) = self.0.take_ready(nic);
        self.0.bursts.lock().note_use(Instant::now(), left);
        self.0.note_use();
        self.0.wake();
        let slot = match ready {
            Some(slot) => slot,
            None => {
                let state = self.0.clone();
                blocking(move || PendingSlot::make(state, nic))
                    .await?
                    .taken()?
            }
        };
        self.lease(slot.number, slot.tap, slot.sockets)
    }

    /// Adopts the slot of a guest that an earlier daemon kept, with the rules in force there.
    pub async fn adopt(&self, number: u32, rules: &NetworkRules) -> Result<SlotLease, NetError> {
        self.0.numbers.lock().enter(number);
        let config = self.0.config.clone();
        let sockets = blocking(move || slot::listen(&config, number)).await;
        let sockets = sockets.inspect_err(|_| self.0.release(ReleasedSlot::new(number)))?;
        let lease = self.lease(number, None, sockets)?;
        lease.keep();
        // The rules are enforced again: the owner of the host may have changed the private ranges
        // since.
        *lease.enforced.lock().await = None;
        lease.replace(rules).await?;
        Ok(lease)
    }

    fn lease(
        &self,
        number: u32,
        tap: Option<File>,
        sockets: SlotSockets,
    ) -> Result<SlotLease, NetError> {
        let (policy, told) = watch::channel(None);
        let kernel = Arc::new(sockets.connections);
        let name = self.0.config.name(number);
        let record = Arc::new(ConnectionRecorder::new(
            name,
            kernel.clone(),
            self.0.config.logs_refusals,
        ));
        let upstreams = self.0.upstreams.clone();
        let dns = DnsServer::start(sockets.dns, told, upstreams, record.clone());
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
            _dns: dns,
            _watch: watch,
            proxy: Mutex::default(),
            enforced: tokio::sync::Mutex::new(Some(self.0.config.usual.clone())),
            policy,
            to_guest: GuestConnections::default(),
            kept: AtomicBool::new(false),
        })
    }

    /// Removes every slot of an earlier daemon with such an interface whose number is not among
    /// `known`.
    pub fn reclaim(&self, nic: NicKind, known: &[u32]) {
        let known: HashSet<u32> = known.iter().copied().collect();
        let ready: HashSet<u32> = self.0.ready.lock().iter().map(|s| s.number).collect();
        for number in self.0.config.numbers() {
            if self.0.config.nic(number) == nic
                && !known.contains(&number)
                && !ready.contains(&number)
                && self.0.numbers.lock().is_unclaimed(number)
            {
                self.0.release(ReleasedSlot::new(number));
            }
        }
    }

    /// Removes unused slots and, if no guest is left, all rules in the host. Returns when that is
    /// done.
    pub fn close(&self) {
        // Queued requests are still done; later ones are done by their callers.
        drop(self.0.wake.lock().take());
        drop(self.0.watcher.lock().take());
        drop(self.0.follower.lock().take());
        if let Some(worker) = self.0.worker.lock().take() {
            let _ = worker.join();
        }
    }
}

/// A slot for a waiting caller. If the caller is gone meanwhile the slot is removed.
struct PendingSlot {
    state: Arc<NetworkState>,
    slot: Option<Slot>,
}

impl PendingSlot {
    fn make(state: Arc<NetworkState>, nic: NicKind) -> Result<Self, NetError> {
        let slot = Some(namespace::outside(|| state.make(nic))?);
        Ok(Self { state, slot })
    }

    fn taken(mut self) -> Result<Slot, NetError> {
        let slot = self.slot.take();
        slot.ok_or_else(|| NetError::Unable("the slot is gone".to_owned()))
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
