//! The network of one data directory's sandboxes: slots, some of them made in advance.

use crate::NetError;
use crate::claim::{self, Claims};
use crate::connections::{self, Record, Watch};
use crate::conntrack::{Limits, Watcher};
use crate::dns::Server;
use crate::forwarding;
use crate::host;
use crate::namespace;
use crate::numbers::Numbers;
use crate::own::{Changes, Follower, OwnAddresses};
use crate::policy::{Policy, Reach, RulesError};
use crate::program;
use crate::proxy::Proxy;
use crate::slot::{self, Card, Common, Slot, Sockets};
use crate::upstream::Upstreams;
use ipnet::{IpNet, Ipv4Net};
use jiffy_engine::{ConnectionLog, NetworkRules};
use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use tokio::sync::watch;

/// Most connections of one sandbox at the same time, unless the host's owner says another number.
const CONNECTIONS: u32 = 4096;

/// What a network is made with.
#[derive(Debug, Clone)]
pub struct NetworkConfig {
    /// The data directory whose sandboxes it is for.
    pub home: PathBuf,
    /// Addresses between the host and slots, two for each; none: a range that is free.
    pub range: Option<Ipv4Net>,
    /// Most slots, 1 to 4096.
    pub slots: u32,
    /// How many wait for a guest.
    pub ready: usize,
    /// What these are made for.
    pub card: Card,
    /// What of private ranges sandboxes may reach.
    pub granted: Vec<IpNet>,
    /// Most connections of one sandbox at the same time.
    pub connections: u32,
    /// Entries of the host's table of connections beyond which sandboxes get hardly any; none: three quarters of it.
    pub connections_total: Option<u32>,
}

impl NetworkConfig {
    /// The usual, for `home`.
    pub fn new(home: &Path) -> Self {
        Self {
            home: home.to_owned(),
            range: None,
            slots: 4096,
            ready: 4,
            card: Card::Tap,
            granted: Vec::new(),
            connections: CONNECTIONS,
            connections_total: None,
        }
    }
}

enum Order {
    /// Fill up.
    Fill,
    /// Remove a slot; what its guest reached last is recorded first.
    Destroy(u32, Option<Arc<Record>>),
}

struct Shared {
    common: Common,
    claim: PathBuf,
    reach: Reach,
    wanted: usize,
    card: Card,
    ready: Mutex<VecDeque<Slot>>,
    numbers: Mutex<Numbers>,
    /// To the thread that makes and removes slots; none: the network is closed.
    orders: Mutex<Option<Sender<Order>>>,
    upstreams: Arc<Upstreams>,
    /// Sees to it that sandboxes leave room in the host's table of connections.
    watcher: Mutex<Option<Watcher>>,
    /// Keeps the host's own addresses from sandboxes where the host is beyond a router.
    follower: Mutex<Option<Follower>>,
    worker: Mutex<Option<thread::JoinHandle<()>>>,
}

/// The network of one data directory's sandboxes. Clones are the same network.
#[derive(Clone)]
pub struct Network(Arc<Shared>);

/// A slot in use. Dropping it removes the slot, unless it is kept.
pub struct Lease {
    network: Network,
    number: u32,
    tap: Option<File>,
    record: Arc<Record>,
    /// Answer and listen while there is a lease.
    _dns: Server,
    _watch: Watch,
    /// Carries what is allowed by name; none: there has been nothing of that sort.
    proxy: Mutex<Option<Proxy>>,
    /// What is enforced in its namespace, if that is known.
    enforced: tokio::sync::Mutex<Option<Policy>>,
    /// What DNS and proxy go by; none: nobody has said yet who the guest is.
    policy: watch::Sender<Option<Policy>>,
    kept: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What runs programs or changes namespaces waits for the kernel.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, NetError> + Send + 'static,
) -> Result<T, NetError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(e) => Err(NetError::Unable(e.to_string())),
    }
}

/// Whether this process can make networks with such cards; why not.
fn able(card: Card) -> Result<(), NetError> {
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
        if program::find(name).is_none() {
            return unable(&format!("`{name}` is not installed: run scripts/setup"));
        }
    }
    if card == Card::Tap && !Path::new("/dev/net/tun").exists() {
        return unable("there is no /dev/net/tun: load the kernel module `tun`");
    }
    Ok(())
}

/// Removes networks of data directories that are gone, which have no other process to remove them.
fn remove_unowned(claims: &Claims, except: &str) {
    for (tag, claim) in claims.all() {
        if tag != except && !claim.home.exists() {
            host::tear_down(claims, &tag);
        }
    }
}

impl Network {
    /// Removes all that is left of the networks of data directories that are gone.
    pub fn remove_dead() -> Result<(), NetError> {
        remove_unowned(&Claims::lock()?, "");
        Ok(())
    }

    /// Sets the host up, tries it with a first slot, and begins to make the others. Namespaces of an earlier daemon stay until
    /// [`Network::reclaim`].
    pub fn open(config: &NetworkConfig) -> Result<Self, NetError> {
        able(config.card)?;
        let Some(_) = jiffy_rootless::current() else {
            return Self::open_here(config, None);
        };
        // Here, in the network that has them.
        let (changes, own) = Changes::subscribe()?;
        let network = namespace::outside(|| Self::open_here(config, Some(&own)))?;
        let follower = changes.follow(&network.0.common.tag, own)?;
        *lock(&network.0.follower) = Some(follower);
        Ok(network)
    }

    fn open_here(config: &NetworkConfig, own: Option<&OwnAddresses>) -> Result<Self, NetError> {
        let slots = config.slots.clamp(1, 4096);
        let tag = claim::tag(&config.home);
        let claims = Claims::lock()?;
        remove_unowned(&claims, &tag);
        let bits = (2 * slots).next_power_of_two().trailing_zeros();
        let length = 32 - u8::try_from(bits).unwrap_or(13);
        let range = claims.make(&tag, &config.home, config.range, length)?;
        let uplink6 = forwarding::uplink6();
        let limits = Limits {
            per_sandbox: config.connections.max(1),
            total: config.connections_total,
        };
        host::set_up(&claims, &tag, range, uplink6.as_deref(), limits, own)?;
        let reach = Reach {
            granted: config.granted.clone(),
            version6: uplink6.is_some(),
        };
        let fits = 1_u64 << (31 - u32::from(range.prefix_len().min(31)));
        let usual = Policy::new(&NetworkRules::default(), &reach)?;
        let common = Common {
            tag,
            range,
            mtu: host::mtu_out(),
            connections: limits.per_sandbox,
            usual,
            tells: host::tells_refusals(),
        };
        let mut numbers = Numbers::new(slots.min(u32::try_from(fits).unwrap_or(slots)));
        (common.numbers().into_iter()).for_each(|number| numbers.enter(number));
        drop(claims);
        let (orders, inbox) = mpsc::channel();
        let upstreams = Arc::new(Upstreams::in_file("/etc/resolv.conf"));
        let watcher = Watcher::start(host::table(&common.tag), limits, upstreams.gauge.clone());
        let watcher = watcher.map_err(NetError::host("starting a thread"))?;
        let network = Self(Arc::new(Shared {
            common,
            claim: config.home.clone(),
            reach,
            wanted: config.ready,
            card: config.card,
            ready: Mutex::default(),
            numbers: Mutex::new(numbers),
            orders: Mutex::new(Some(orders)),
            upstreams,
            watcher: Mutex::new(Some(watcher)),
            follower: Mutex::default(),
            worker: Mutex::default(),
        }));
        let first = network
            .0
            .make(config.card)
            .inspect_err(|_| network.0.tear_down_if_unused())?;
        lock(&network.0.ready).push_back(first);
        network.begin(inbox)?;
        Ok(network)
    }

    fn begin(&self, inbox: Receiver<Order>) -> Result<(), NetError> {
        let shared = self.0.clone();
        let worker = thread::Builder::new()
            .name("slots".to_owned())
            .spawn(move || shared.work(&inbox))
            .map_err(NetError::host("starting a thread"))?;
        *lock(&self.0.worker) = Some(worker);
        self.0.order(Order::Fill);
        Ok(())
    }

    /// Addresses between the host and slots.
    pub fn range(&self) -> Ipv4Net {
        self.0.common.range
    }

    /// Where its addresses are and whether sandboxes have a way into the IPv6 internet, for people.
    pub fn description(&self) -> String {
        let six = if self.0.reach.version6 {
            "with"
        } else {
            "without"
        };
        format!("addresses in {}, {six} IPv6", self.range())
    }

    /// How many slots are in use or ready, and how many there can be.
    pub fn slots(&self) -> (usize, u32) {
        let numbers = lock(&self.0.numbers);
        (numbers.in_use(), numbers.most())
    }

    /// What a slot without rules of its own may reach, and the name servers of the host.
    pub(crate) fn usual(&self) -> (&Policy, &Upstreams) {
        (&self.0.common.usual, &self.0.upstreams)
    }

    /// Checks rules against what this host can enforce.
    pub fn check(&self, rules: &NetworkRules) -> Result<Policy, RulesError> {
        Policy::new(rules, &self.0.reach)
    }

    /// A slot for a guest with such a card, closed until [`Lease::open`]. One that was made in advance is handed out at once; without
    /// one, it is made now. Must be called inside a tokio runtime.
    pub async fn take(&self, card: Card) -> Result<Lease, NetError> {
        let ready = {
            let mut ready = lock(&self.0.ready);
            let at = ready.iter().position(|slot| slot.card() == card);
            at.and_then(|at| ready.remove(at))
        };
        self.0.order(Order::Fill);
        let slot = match ready {
            Some(slot) => slot,
            None => {
                let shared = self.0.clone();
                blocking(move || New::make(shared, card)).await?.taken()?
            }
        };
        self.lease(slot.number, slot.tap, slot.sockets)
    }

    /// The slot of a guest that an earlier daemon kept, with the rules that are in force there.
    pub async fn adopt(&self, number: u32, rules: &NetworkRules) -> Result<Lease, NetError> {
        lock(&self.0.numbers).enter(number);
        let common = self.0.common.clone();
        let sockets = blocking(move || slot::listen(&common, number)).await;
        let sockets = sockets.inspect_err(|_| self.0.order(Order::Destroy(number, None)))?;
        let lease = self.lease(number, None, sockets)?;
        lease.keep();
        // Said again, they are enforced again: the owner of the host may have changed what is private since.
        *lease.enforced.lock().await = None;
        lease.replace(rules).await?;
        Ok(lease)
    }

    fn lease(&self, number: u32, tap: Option<File>, sockets: Sockets) -> Result<Lease, NetError> {
        let (policy, told) = watch::channel(None);
        let kernel = Arc::new(sockets.connections);
        let name = self.0.common.name(number);
        let record = Arc::new(Record::new(name, kernel.clone(), self.0.common.tells));
        let upstreams = self.0.upstreams.clone();
        let dns = Server::start(sockets.dns, told, upstreams, record.clone());
        let both = dns.and_then(|dns| Ok((dns, Watch::start(&kernel, &record)?)));
        let (dns, watch) = both
            .map_err(NetError::host("listening in a slot"))
            .inspect_err(|_| self.0.order(Order::Destroy(number, None)))?;
        Ok(Lease {
            network: self.clone(),
            number,
            tap,
            record,
            _dns: dns,
            _watch: watch,
            proxy: Mutex::default(),
            enforced: tokio::sync::Mutex::new(Some(self.0.common.usual.clone())),
            policy,
            kept: AtomicBool::new(false),
        })
    }

    /// Removes every slot of an earlier daemon that is made for such a card and whose number is not among `known`.
    pub fn reclaim(&self, card: Card, known: &[u32]) {
        let known: HashSet<u32> = known.iter().copied().collect();
        let ready: HashSet<u32> = lock(&self.0.ready).iter().map(|s| s.number).collect();
        for number in self.0.common.numbers() {
            if self.0.common.card(number) == card
                && !known.contains(&number)
                && !ready.contains(&number)
                && lock(&self.0.numbers).is_left(number)
            {
                self.0.order(Order::Destroy(number, None));
            }
        }
    }

    /// Removes the slots that nobody uses and, if no guest is left, everything else in the host. Returns when that is done.
    pub fn close(&self) {
        // What was ordered so far is still done; what comes later is done by whoever would order it.
        drop(lock(&self.0.orders).take());
        drop(lock(&self.0.watcher).take());
        drop(lock(&self.0.follower).take());
        if let Some(worker) = lock(&self.0.worker).take() {
            let _ = worker.join();
        }
    }
}

/// A slot that somebody waits for. One whose asker has gone meanwhile is removed.
struct New {
    shared: Arc<Shared>,
    slot: Option<Slot>,
}

impl New {
    fn make(shared: Arc<Shared>, card: Card) -> Result<Self, NetError> {
        let slot = Some(namespace::outside(|| shared.make(card))?);
        Ok(Self { shared, slot })
    }

    fn taken(mut self) -> Result<Slot, NetError> {
        let slot = self.slot.take();
        slot.ok_or_else(|| NetError::Unable("the slot is gone".to_owned()))
    }
}

impl Drop for New {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.shared.order(Order::Destroy(slot.number, None));
        }
    }
}

impl Shared {
    fn order(&self, order: Order) {
        let left = match &*lock(&self.orders) {
            Some(orders) => orders.send(order).err().map(|unsent| unsent.0),
            None => Some(order),
        };
        // A guest may last a moment longer than the network is open.
        if let Some(Order::Destroy(number, record)) = left {
            // Nothing here fails: what cannot be removed is in nobody's way.
            let _ = namespace::outside(|| {
                self.destroy(&[(number, record)], false);
                self.tear_down_if_unused();
                Ok(())
            });
        }
    }

    fn make(&self, card: Card) -> Result<Slot, NetError> {
        let number = self.number()?;
        slot::make(&self.common, number, card)
            .inspect_err(|_| lock(&self.numbers).give_back(number))
    }

    /// A free number that nothing in the host is in the way of: what a crash left is removed, what cannot be is gone around.
    fn number(&self) -> Result<u32, NetError> {
        loop {
            let number = {
                let mut numbers = lock(&self.numbers);
                let most = numbers.most();
                numbers.take().ok_or(NetError::Full(most))?
            };
            match slot::clear(&self.common, number) {
                Ok(()) => return Ok(number),
                Err(what) => {
                    tracing::warn!("network slot {number} is left out: {what} cannot be removed");
                    lock(&self.numbers).block(number);
                }
            }
        }
    }

    fn destroy(&self, gone: &[(u32, Option<Arc<Record>>)], unused: bool) {
        if gone.is_empty() {
            return;
        }
        gone.iter()
            .filter_map(|(_, record)| record.as_ref())
            .for_each(|record| record.close());
        let numbers: Vec<u32> = gone.iter().map(|(number, _)| *number).collect();
        slot::destroy(&self.common, &numbers);
        // Those that nobody had have none; removing costs a walk through the table each.
        let used: Vec<u32> = match unused {
            true => Vec::new(),
            false => numbers.clone(),
        };
        if let Err(e) = connections::forget(&self.common.addresses(&used)) {
            tracing::warn!("connections of sandboxes that are gone stay in the host's table: {e}");
        }
        let mut own = lock(&self.numbers);
        numbers.iter().for_each(|&number| own.give_back(number));
    }

    /// Makes and removes slots, one thing after the other, until the network is closed and everything that was ordered is done.
    fn work(&self, inbox: &Receiver<Order>) {
        while let Ok(first) = inbox.recv() {
            let mut gone = Vec::new();
            for order in std::iter::once(first).chain(inbox.try_iter()) {
                match order {
                    Order::Fill => {}
                    Order::Destroy(number, record) => gone.push((number, record)),
                }
            }
            self.destroy(&gone, false);
            self.fill();
        }
        let unused: Vec<_> = lock(&self.ready).drain(..).collect();
        let unused: Vec<_> = unused.iter().map(|slot| (slot.number, None)).collect();
        self.destroy(&unused, true);
        self.tear_down_if_unused();
    }

    fn fill(&self) {
        while lock(&self.orders).is_some() && lock(&self.ready).len() < self.wanted {
            match self.make(self.card) {
                Ok(slot) => lock(&self.ready).push_back(slot),
                // Whoever needs one hears of it.
                Err(NetError::Full(_)) => return,
                Err(e) => {
                    tracing::warn!("a network slot could not be made in advance: {e}");
                    return;
                }
            }
        }
    }

    fn tear_down_if_unused(&self) {
        if lock(&self.numbers).in_use() > 0 {
            return;
        }
        match Claims::lock() {
            Ok(claims) => host::tear_down(&claims, &self.common.tag),
            Err(e) => tracing::warn!(
                "the network of {} could not be removed: {e}",
                self.claim.display()
            ),
        }
    }
}

impl Lease {
    /// What its guest reaches; it can be read when this is gone.
    pub fn connections(&self) -> Arc<dyn ConnectionLog> {
        self.record.clone()
    }

    /// Its number, by which a later daemon finds it.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Bytes that its guest sent and received, as the host's end of the slot counts them.
    pub fn traffic(&self) -> Option<(u64, u64)> {
        let device = self.network.0.common.name(self.number);
        let count = |what: &str| -> Option<u64> {
            let file = format!("/sys/class/net/{device}/statistics/{what}");
            std::fs::read_to_string(file).ok()?.trim().parse().ok()
        };
        Some((count("rx_bytes")?, count("tx_bytes")?))
    }

    /// The tap, for the VMM; once.
    pub fn take_tap(&mut self) -> Option<File> {
        self.tap.take()
    }

    /// Network namespace with the guest's `eth0`; none: it has a tap.
    pub fn namespace(&self) -> Option<PathBuf> {
        let name = self.network.0.common.guest_name(self.number);
        Some(namespace::path(&name)).filter(|path| path.exists())
    }

    /// Name of the network namespace with the guest's `eth0`, if it has no tap.
    pub(crate) fn guest_name(&self) -> String {
        self.network.0.common.guest_name(self.number)
    }

    /// Lets its guest out.
    pub fn open(&self) -> Result<(), NetError> {
        namespace::outside(|| slot::open(&self.network.0.common, self.number))
    }

    /// Puts other rules in force, also for the connections there are.
    pub async fn replace(&self, rules: &NetworkRules) -> Result<(), NetError> {
        let policy = self.network.check(rules)?;
        let mut enforced = self.enforced.lock().await;
        if policy.has_names() {
            self.start_proxy().await?;
        }
        if enforced.as_ref() != Some(&policy) {
            let (common, number) = (self.network.0.common.clone(), self.number);
            let new = policy.clone();
            blocking(move || slot::enforce(&common, number, &new)).await?;
            *enforced = Some(policy.clone());
        }
        self.policy.send_replace(Some(policy));
        Ok(())
    }

    /// Begins to carry what is allowed by name, if nobody does. Called in turn only.
    async fn start_proxy(&self) -> Result<(), NetError> {
        if lock(&self.proxy).is_some() {
            return Ok(());
        }
        let (common, number) = (self.network.0.common.clone(), self.number);
        let name = common.name(number);
        let listeners = blocking(move || slot::listen_for_names(&common, number)).await?;
        let upstreams = self.network.0.upstreams.clone();
        let (policy, record) = (self.policy.subscribe(), self.record.clone());
        let proxy = Proxy::start(listeners, name, policy, upstreams, record);
        *lock(&self.proxy) = Some(proxy.map_err(NetError::host("carrying connections by name"))?);
        Ok(())
    }

    /// From now on the slot outlives this process, as its guest does.
    pub fn keep(&self) {
        self.kept.store(true, Ordering::Release);
    }

    /// Its guest is gone: dropping it removes the slot.
    pub fn release(&self) {
        self.kept.store(false, Ordering::Release);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.kept.load(Ordering::Acquire) {
            let record = self.record.clone();
            self.network
                .0
                .order(Order::Destroy(self.number, Some(record)));
        }
    }
}

impl std::fmt::Debug for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Network({})", self.0.common.range)
    }
}
