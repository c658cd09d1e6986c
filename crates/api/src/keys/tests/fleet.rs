//! Two members (hosts) of a fleet in this process, with records in memory. The *tables* of a fleet
//! are the API keys and template names that each host holds in memory.

use super::{Keys, import_keys};
use crate::fleet::{ImportedObjects, import_owned};
use async_trait::async_trait;
use jiffy_fleet::records::Fault;
use jiffy_fleet::tables::{CHANGE_TIMEOUT, Clock, PeerError, Peers, Tables, TablesConfig};
use jiffy_fleet::{MemoryRecords, SealedRecords};
use jiffy_fleet_core::{FleetId, MemberId, Term};
use jiffy_secrets::HostKey;
use jiffy_store::{BackendSettings, Keyring, SharedStore, StoreUrl};
use jiffy_webhooks::Webhooks;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::{EnterGuard, Runtime};

const MEMBERS: [MemberId; 2] = [MemberId(1), MemberId(2)];

/// Network between the members.
#[derive(Debug, Default)]
struct Net {
    members: Mutex<HashMap<MemberId, Tables>>,
    is_cut: AtomicBool,
}

/// Connections of a member to the others.
#[derive(Debug)]
struct NetPeers {
    own: MemberId,
    net: Arc<Net>,
}

#[async_trait]
impl Peers for NetPeers {
    fn own(&self) -> MemberId {
        self.own
    }

    fn writer(&self) -> Option<(MemberId, Term)> {
        Some((MEMBERS[0], Term(1)))
    }

    fn others(&self) -> Vec<MemberId> {
        let others = MEMBERS.into_iter();
        others.filter(|member| *member != self.own).collect()
    }

    async fn call(
        &self,
        to: MemberId,
        _: &str,
        body: bytes::Bytes,
    ) -> Result<bytes::Bytes, PeerError> {
        let tables = self.net.members.lock().get(&to).cloned();
        match tables.filter(|_| !self.net.is_cut.load(Ordering::SeqCst)) {
            Some(tables) => Ok(tables.handle(self.own, &body).await.unwrap().into()),
            None => Err(PeerError::Unreachable {
                member: to,
                reason: "cut".to_owned(),
            }),
        }
    }
}

/// Fleet of two members. The first one writes the tables.
pub struct Fleet {
    runtime: Runtime,
    net: Arc<Net>,
    /// Milliseconds by which the clock of the members was advanced.
    advanced: Arc<AtomicU64>,
    records: MemoryRecords,
    tables: Vec<Tables>,
    home: tempfile::TempDir,
}

impl Fleet {
    /// Starts the tables of all members.
    pub fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let home = tempfile::tempdir().unwrap();
        let net = Arc::new(Net::default());
        let advanced = Arc::new(AtomicU64::new(0));
        let records = MemoryRecords::default();
        let tables = runtime.block_on(async {
            let url = format!("file://{}", home.path().join("store").display());
            let url: StoreUrl = url.parse().unwrap();
            let secret = "5".repeat(64);
            let keys =
                format!("locator = \"{secret}\"\ncurrent = \"k\"\n[keys]\nk = \"{secret}\"\n");
            std::fs::create_dir(home.path().join("store")).unwrap();
            let keyring = Keyring::parse(&keys).unwrap();
            let backend = url.open(BackendSettings::default()).unwrap();
            let tenant = SharedStore::new(backend, keyring)
                .tenant("fleet")
                .await
                .unwrap();
            let start = |own| {
                let (began, advanced) = (Instant::now(), advanced.clone());
                let clock: Clock = Arc::new(move || {
                    began.elapsed() + Duration::from_millis(advanced.load(Ordering::SeqCst))
                });
                let peers = NetPeers {
                    own,
                    net: net.clone(),
                };
                let tables = Tables::start(TablesConfig {
                    fleet: FleetId::try_from("7kq2".to_owned()).unwrap(),
                    records: Arc::new(SealedRecords::new(
                        Arc::new(records.clone()),
                        tenant.clone(),
                    )),
                    peers: Arc::new(peers),
                    clock,
                    change_timeout: CHANGE_TIMEOUT,
                });
                net.members.lock().insert(own, tables.clone());
                tables
            };
            MEMBERS.map(start).to_vec()
        });
        Self {
            runtime,
            net,
            advanced,
            records,
            tables,
            home,
        }
    }

    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// Returns the keys as the writer sees them.
    pub fn keys(&self) -> Keys {
        let _guard = self.runtime.enter();
        Keys::of_fleet(self.tables[0].clone(), self.home())
    }

    /// Returns the keys as the other member sees them.
    pub fn other_keys(&self) -> Keys {
        let _guard = self.runtime.enter();
        Keys::of_fleet(self.tables[1].clone(), self.home())
    }

    /// Returns the tables of both members.
    pub fn tables(&self) -> [Tables; 2] {
        [self.tables[0].clone(), self.tables[1].clone()]
    }

    /// Makes the runtime of the members the runtime of the caller.
    pub fn enter(&self) -> EnterGuard<'_> {
        self.runtime.enter()
    }

    /// Runs a future in the runtime of the members.
    pub fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// Imports the keys of a host.
    pub fn import(&self, home: &Path) -> usize {
        let imported = import_keys(home, &self.tables[0]);
        self.runtime.block_on(imported).unwrap()
    }

    /// Imports the secrets and webhooks of a host.
    pub fn import_owned(&self, home: &Path, key: &HostKey, webhooks: &Webhooks) -> ImportedObjects {
        let imported = import_owned(home, key, webhooks, &self.tables[0]);
        self.runtime.block_on(imported).unwrap()
    }

    /// Cuts the members off from each other.
    pub fn cut(&self) {
        self.net.is_cut.store(true, Ordering::SeqCst);
    }

    /// Makes the records unavailable.
    pub fn lose_records(&self) {
        self.records.inject(Fault::Unavailable, usize::MAX);
    }

    /// Advances the clock of the members.
    pub fn advance(&self, time: Duration) {
        let ms = time.as_millis() as u64;
        self.advanced.fetch_add(ms, Ordering::SeqCst);
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        // The members refer to the network.
        self.net.members.lock().clear();
    }
}
