//! Fleet of nodes whose messages are transmitted in memory. Time is simulated.
//!
//! A *shard* is a part of the fleet's sandboxes. Its record lists the members and names the
//! coordinator.
//!
//! [`TestHost`] stands for the sandbox manager of a host. [`MemoryRecords`] are the shared records.

use async_trait::async_trait;
use jiffy_fleet::node::{
    Answer, Clock, Host, HostSummary, Members, Messenger, MessengerError, Node, NodeConfig, Query,
    ReconcileError, View, row_hash,
};
use jiffy_fleet::records::{Outcome, SealedRecords};
use jiffy_fleet::{MemoryRecords, RecordKey};
use jiffy_fleet_core::record::{Capacity, MemberRow, MemberState, ShardRecord};
use jiffy_fleet_core::{
    Epoch, FleetId, HostStatus, Instance, MemberConfig, MemberId, Message, Millis, Owner,
    PoolDemand, Row, RowState, SandboxHash, ShardId, Timing,
};
use jiffy_store::{BackendSettings, Keyring, SharedStore, StoreUrl, Tenant};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

pub const SECRET: [u8; 32] = [5; 32];

pub fn fleet_id() -> FleetId {
    "7kq2".to_owned().try_into().unwrap()
}

/// Time of the nodes at the start of a test.
pub const START_MS: u64 = 1_000_000;

#[derive(Debug)]
/// Clock of the nodes, which follows the simulated time of the runtime.
pub struct TokioClock(pub Instant);

impl Clock for TokioClock {
    fn now(&self) -> Millis {
        Millis(START_MS + self.0.elapsed().as_millis() as u64)
    }
}

/// Events that a node has reported to its host.
#[derive(Debug, Default)]
pub struct TestHost {
    pub verdicts: Mutex<Vec<Owner>>,
    pub ended: Mutex<Vec<Epoch>>,
    pub reconciled: Mutex<Vec<Owner>>,
    /// Number of reconciliations that fail.
    pub failures: Mutex<u32>,
    /// State of the host. `None` for the default of the tests.
    pub state: Mutex<Option<HostStatus>>,
    /// Latest demand for warm pools.
    pub pools: Mutex<Vec<PoolDemand>>,
}

#[async_trait]
impl Host for TestHost {
    fn status(&self) -> HostStatus {
        let state = self.state.lock().clone();
        state.unwrap_or_else(|| HostStatus {
            free_memory_mib: 1024,
            ..HostStatus::default()
        })
    }

    fn summary(&self) -> HostSummary {
        HostSummary {
            running: 3,
            ..HostSummary::default()
        }
    }

    async fn reconcile(&self, owner: Owner) -> Result<(), ReconcileError> {
        self.reconciled.lock().push(owner);
        let mut failures = self.failures.lock();
        if *failures == 0 {
            return Ok(());
        }
        *failures -= 1;
        Err(ReconcileError {
            sandbox: "s".to_owned(),
            reason: "the store is away".to_owned(),
        })
    }

    fn set_pools(&self, pools: Vec<PoolDemand>) {
        *self.pools.lock() = pools;
    }

    fn epoch_ended(&self, epoch: Epoch) {
        self.ended.lock().push(epoch);
    }

    fn verdict(&self, owner: Owner) {
        self.verdicts.lock().push(owner);
    }
}

/// Network between the nodes.
#[derive(Debug, Default)]
pub struct Network {
    nodes: Mutex<BTreeMap<MemberId, Node>>,
    /// Members whose traffic is dropped: their requests hang.
    pub cut: Mutex<BTreeSet<MemberId>>,
    /// Members whose messages are lost. They still answer queries.
    pub mute: Mutex<BTreeSet<MemberId>>,
}

/// Sends messages and queries of one member to the nodes of the others.
#[derive(Debug)]
struct Link {
    from: MemberId,
    network: Arc<Network>,
}

impl Link {
    /// Returns the node of a member. A message over a cut link fails after 5 s, as a timeout does.
    async fn target(&self, to: MemberId) -> Result<Node, MessengerError> {
        let is_cut = {
            let cut = self.network.cut.lock();
            cut.contains(&to) || cut.contains(&self.from)
        };
        if is_cut {
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        let node = self.network.nodes.lock().get(&to).cloned();
        node.filter(|_| !is_cut)
            .ok_or_else(|| self.error(to, "no connection"))
    }

    fn error(&self, member: MemberId, reason: impl ToString) -> MessengerError {
        MessengerError::Unreachable {
            member,
            address: String::new(),
            reason: reason.to_string(),
        }
    }
}

#[async_trait]
impl Messenger for Link {
    async fn send(
        &self,
        to: MemberId,
        _address: &str,
        message: &Message,
    ) -> Result<Vec<Message>, MessengerError> {
        if self.network.mute.lock().contains(&self.from) {
            return Err(self.error(to, "the message was lost"));
        }
        let message = Message::decode(&message.encode().unwrap()).unwrap();
        let replies = self.target(to).await?.deliver(self.from, message).await;
        replies.map_err(|e| self.error(to, e))
    }

    async fn query(
        &self,
        to: MemberId,
        _address: &str,
        query: &Query,
    ) -> Result<Answer, MessengerError> {
        let answer = self
            .target(to)
            .await?
            .answer(self.from, query.clone())
            .await;
        answer.map_err(|e| self.error(to, e))
    }
}

/// Nodes of one fleet.
pub struct Fleet {
    pub records: MemoryRecords,
    pub network: Arc<Network>,
    pub hosts: BTreeMap<MemberId, Arc<TestHost>>,
    keys: Arc<Tenant>,
    start: Instant,
    _dir: tempfile::TempDir,
}

/// Returns the keys with which all members encrypt records.
async fn tenant(dir: &std::path::Path) -> Arc<Tenant> {
    let url: StoreUrl = format!("file://{}", dir.display()).parse().unwrap();
    let secret = "5".repeat(64);
    let keys = format!("locator = \"{secret}\"\ncurrent = \"k\"\n[keys]\nk = \"{secret}\"\n");
    let keyring = Keyring::parse(&keys).unwrap();
    let store = SharedStore::new(url.open(BackendSettings::default()).unwrap(), keyring);
    store.tenant("fleet").await.unwrap()
}

/// Returns the configuration of the node of a member.
pub fn member_config(id: u32, started_ms: u64) -> MemberConfig {
    MemberConfig {
        fleet: fleet_id(),
        id: MemberId(id),
        instance: Instance {
            boot: [id as u8; 16],
            started_ms,
        },
        address: format!("10.0.0.{id}:7946"),
        version: "0.9.0".to_owned(),
        capacity: Capacity {
            cpu_milli: 64_000,
            memory_mib: 262_144,
            disk_mib: 4_000_000,
            microvm: true,
            ..Capacity::default()
        },
        timing: Timing::PRODUCTION,
    }
}

impl Fleet {
    /// Creates the record of a shard whose first member is 1, and starts the members 1 to
    /// `members`. With `simulated`, time advances when all tasks wait.
    pub async fn start(members: u32, simulated: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let keys = tenant(dir.path()).await;
        if simulated {
            tokio::time::pause();
        }
        let mut fleet = Self {
            records: MemoryRecords::default(),
            network: Arc::default(),
            hosts: BTreeMap::new(),
            keys,
            start: Instant::now(),
            _dir: dir,
        };
        if members > 0 {
            fleet.create_shard(&member_config(1, 0).address).await;
        }
        for id in 1..=members {
            fleet.start_node(id);
        }
        fleet
    }

    /// Creates the record of a shard whose first member is 1, at `address`.
    pub async fn create_shard(&self, address: &str) {
        let config = member_config(1, 0);
        let row = MemberRow {
            id: config.id,
            epoch: Epoch(1),
            instance: config.instance,
            address: address.to_owned(),
            state: MemberState::Up,
            version: config.version,
            capacity: config.capacity,
            dead_since_ms: None,
            unknown: Default::default(),
        };
        let record = ShardRecord::new(fleet_id(), ShardId(0), row);
        let sealed = self.sealed();
        let key: RecordKey = "fleet/shards/0".parse().unwrap();
        let write = sealed.create(&key, record.encode().unwrap()).unwrap();
        assert!(matches!(sealed.send(&write).await, Ok(Outcome::Done(_))));
    }

    /// Starts the members 1 to `members` and waits until all of them are ready.
    pub async fn ready(members: u32) -> Self {
        let fleet = Self::start(members, true).await;
        for id in 1..=members {
            fleet.wait(id, 60, |view| view.is_ready()).await;
        }
        let coordinator = fleet.coordinator();
        fleet
            .wait(coordinator.0, 60, |view| view.is_directory_complete)
            .await;
        for id in 1..=members {
            let all = |known: &Members| known.rows.len() == members as usize;
            fleet.wait_members(id, 10, all).await;
        }
        fleet
    }

    /// Returns the encrypted records.
    pub fn sealed(&self) -> SealedRecords {
        SealedRecords::new(Arc::new(self.records.clone()), self.keys.clone())
    }

    /// Starts the node of a member and connects it to the network.
    pub fn start_node(&mut self, id: u32) {
        let host = Arc::new(TestHost::default());
        let started_ms = self.start.elapsed().as_millis() as u64;
        let node = Node::start(NodeConfig {
            member: member_config(id, started_ms),
            shard: ShardId(0),
            records: Arc::new(self.sealed()),
            messenger: Arc::new(Link {
                from: MemberId(id),
                network: self.network.clone(),
            }),
            host: host.clone(),
            clock: Arc::new(TokioClock(self.start)),
        });
        self.hosts.insert(MemberId(id), host);
        self.network
            .nodes
            .lock()
            .insert(MemberId(id), node.unwrap());
    }

    pub fn node(&self, id: u32) -> Node {
        self.network.nodes.lock()[&MemberId(id)].clone()
    }

    /// Stops the node of a member, and removes it from the network.
    pub async fn stop(&self, id: u32) {
        let node = self.network.nodes.lock().remove(&MemberId(id)).unwrap();
        node.stop().await;
    }

    /// Waits for at most `seconds` until the state of a member fulfils the condition. Returns the
    /// duration.
    pub async fn wait(
        &self,
        id: u32,
        seconds: u64,
        condition: impl FnMut(&View) -> bool,
    ) -> Duration {
        let start = Instant::now();
        let node = self.node(id);
        let reached = node.wait_for(condition);
        let reached = tokio::time::timeout(Duration::from_secs(seconds), reached).await;
        let view = node.view();
        assert!(
            reached.is_ok(),
            "h{id} did not get there in {seconds} s: {view:?}"
        );
        start.elapsed()
    }

    /// Waits for at most `seconds` until a member knows members that fulfil the condition.
    pub async fn wait_members(
        &self,
        id: u32,
        seconds: u64,
        condition: impl Fn(&Members) -> bool,
    ) -> Duration {
        let (start, node) = (Instant::now(), self.node(id));
        let reached = async {
            let mut members = node.members();
            while !condition(&members) {
                members = node.members_changed(&members).await;
            }
        };
        let reached = tokio::time::timeout(Duration::from_secs(seconds), reached).await;
        let members = node.members();
        assert!(
            reached.is_ok(),
            "h{id} did not learn this in {seconds} s: {members:?}"
        );
        start.elapsed()
    }

    pub fn elapsed_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// Returns the member that is the coordinator.
    pub fn coordinator(&self) -> MemberId {
        let nodes = self.network.nodes.lock();
        let mut coordinators = nodes.values().filter(|node| node.view().is_coordinator);
        coordinators.next().unwrap().id()
    }

    /// Returns the members that are not the coordinator.
    pub fn others(&self) -> Vec<u32> {
        let coordinator = self.coordinator();
        let nodes = self.network.nodes.lock();
        let others = nodes.keys().filter(|&&id| id != coordinator);
        others.map(|id| id.0).collect()
    }
}

/// Returns the hash of a sandbox id or name in the directory.
pub fn hash(id: &str) -> SandboxHash {
    row_hash(&SECRET, "id", &[id])
}

/// Returns the row of a sandbox or name.
pub fn row(id: &str, state: RowState) -> Row {
    Row {
        hash: hash(id),
        revision: Default::default(),
        state,
    }
}
