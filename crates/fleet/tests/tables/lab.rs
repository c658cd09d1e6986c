//! Members of a fleet with their tables (API keys, template names), and the network between them.
//! One member, the writer, commits the changes of all members.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor.

use async_trait::async_trait;
use bytes::Bytes;
use jiffy_fleet::records::Page;
use jiffy_fleet::tables::{Action, CHANGE_TIMEOUT, PeerError, Peers, Tables, TablesConfig};
use jiffy_fleet::{RecordError, RecordKey, Records, SealedRecords, Version, Versioned, Written};
use jiffy_fleet_core::record::{KeyHash, KeyLimits, KeyRow, KeyScope, Row, RowKey};
use jiffy_fleet_core::{FleetId, MemberId, Term};
use jiffy_store::{BackendSettings, Keyring, SharedStore, StoreUrl, Tenant};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};
use tokio::time::Instant;

/// Rules of the network, and its members.
#[derive(Debug, Default)]
struct Rules {
    writer: Option<(MemberId, Term)>,
    /// Members that no request reaches and that reach no other member.
    cut: HashSet<MemberId>,
    /// Number of answers that are lost after the request was executed.
    lost_answers: usize,
    /// Members that still believe to be the writer, with the term that has ended.
    deposed: HashMap<MemberId, Term>,
    members: HashMap<MemberId, Tables>,
}

/// Network of all members.
#[derive(Debug, Default, Clone)]
pub struct Net(Arc<Mutex<Rules>>);

#[derive(Debug)]
struct NetPeers {
    own: MemberId,
    net: Net,
}

#[async_trait]
impl Peers for NetPeers {
    fn own(&self) -> MemberId {
        self.own
    }

    fn writer(&self) -> Option<(MemberId, Term)> {
        let rules = self.net.0.lock();
        let deposed = rules.deposed.get(&self.own);
        deposed.map(|term| (self.own, *term)).or(rules.writer)
    }

    fn others(&self) -> Vec<MemberId> {
        let rules = self.net.0.lock();
        let others = rules.members.keys().copied();
        others.filter(|member| *member != self.own).collect()
    }

    async fn call(&self, to: MemberId, _: &str, body: Bytes) -> Result<Bytes, PeerError> {
        let unreachable = || PeerError::Unreachable {
            member: to,
            reason: "cut".to_owned(),
        };
        let tables = {
            let rules = self.net.0.lock();
            if rules.cut.contains(&to) || rules.cut.contains(&self.own) {
                return Err(unreachable());
            }
            rules.members.get(&to).cloned().ok_or_else(unreachable)?
        };
        let answer = tables.handle(self.own, &body).await;
        let mut rules = self.net.0.lock();
        if rules.lost_answers > 0 {
            rules.lost_answers -= 1;
            return Err(PeerError::NoAnswer {
                member: to,
                reason: "lost".to_owned(),
            });
        }
        answer.map(Bytes::from).map_err(|e| PeerError::NoAnswer {
            member: to,
            reason: e.to_string(),
        })
    }
}

pub fn fleet() -> FleetId {
    FleetId::try_from("7kq2".to_owned()).unwrap()
}

/// Returns keys for records, in a store in `dir`.
pub async fn tenant(dir: &std::path::Path) -> Arc<Tenant> {
    let url: StoreUrl = format!("file://{}", dir.display()).parse().unwrap();
    let secret = "5".repeat(64);
    let keys = format!("locator = \"{secret}\"\ncurrent = \"k\"\n[keys]\nk = \"{secret}\"\n");
    let keyring = Keyring::parse(&keys).unwrap();
    let store = SharedStore::new(url.open(BackendSettings::default()).unwrap(), keyring);
    store.tenant("fleet").await.unwrap()
}

/// Fleet with members `h1`, `h2`, ...; `h1` writes the tables in term 1.
pub struct Lab {
    pub net: Net,
    pub records: Arc<dyn Records>,
    pub tenant: Arc<Tenant>,
    pub change_timeout: Duration,
    _dir: tempfile::TempDir,
}

impl Lab {
    pub async fn new(records: Arc<dyn Records>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let lab = Self {
            net: Net::default(),
            records,
            tenant: tenant(dir.path()).await,
            change_timeout: CHANGE_TIMEOUT,
            _dir: dir,
        };
        lab.set_writer(1, 1);
        lab
    }

    pub fn sealed(&self) -> Arc<SealedRecords> {
        let records = SealedRecords::new(self.records.clone(), self.tenant.clone());
        Arc::new(records)
    }

    /// Starts a member with its own view of the records.
    pub fn member(&self, number: u32) -> Tables {
        self.member_with(number, self.sealed())
    }

    /// Starts the tables of a member whose records are `records`, and connects them to the others.
    pub fn member_with(&self, number: u32, records: Arc<SealedRecords>) -> Tables {
        let start = Instant::now();
        let tables = Tables::start(TablesConfig {
            fleet: fleet(),
            records,
            peers: Arc::new(NetPeers {
                own: MemberId(number),
                net: self.net.clone(),
            }),
            clock: Arc::new(move || start.elapsed()),
            change_timeout: self.change_timeout,
        });
        let members = &mut self.net.0.lock().members;
        members.insert(MemberId(number), tables.clone());
        tables
    }

    /// Makes a member the writer in this term, as after a takeover.
    pub fn set_writer(&self, member: u32, term: u64) {
        self.net.0.lock().writer = Some((MemberId(member), Term(term)));
    }

    /// Makes no member the writer, until another one is set.
    pub fn no_writer(&self) {
        self.net.0.lock().writer = None;
    }

    /// Makes a member believe that it is still the writer in this term, which has ended.
    pub fn deceive(&self, member: u32, term: u64) {
        let deposed = &mut self.net.0.lock().deposed;
        deposed.insert(MemberId(member), Term(term));
    }

    /// Cuts a member off from all other members. It still reaches the records.
    pub fn cut(&self, member: u32) {
        self.net.0.lock().cut.insert(MemberId(member));
    }

    /// Connects all members again.
    pub fn heal(&self) {
        self.net.0.lock().cut.clear();
    }

    /// Drops the next answers, after their requests were executed.
    pub fn lose_answers(&self, count: usize) {
        self.net.0.lock().lost_answers = count;
    }

    /// Removes a member, as if its host was lost.
    pub fn remove(&self, member: u32) {
        drop(self.net.0.lock().members.remove(&MemberId(member)));
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // The members refer to the network.
        let members = std::mem::take(&mut self.net.0.lock().members);
        drop(members);
    }
}

pub fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.unwrap().as_millis() as u64
}

/// Returns the hash of the secret of a key. It depends on the id.
pub fn hash(id: &str) -> KeyHash {
    let mut hash = [0; 32];
    let bytes = id.as_bytes();
    hash[..bytes.len().min(32)].copy_from_slice(&bytes[..bytes.len().min(32)]);
    KeyHash(hash)
}

/// Returns the row of a new API key.
pub fn key_row(id: &str) -> KeyRow {
    KeyRow {
        id: id.to_owned(),
        hash: hash(id),
        name: format!("key {id}"),
        scope: KeyScope::Create,
        limits: KeyLimits::default(),
        created_ms: now_ms(),
        used_ms: None,
        revoked_ms: None,
        expires_ms: None,
        end_ms: None,
        addresses: Vec::new(),
        previous_hash: None,
        previous_until_ms: None,
        unknown: Default::default(),
    }
}

/// Returns the creation of an API key.
pub fn create(id: &str) -> Action {
    Action::CreateKey(key_row(id))
}

/// Returns the revocation of an API key, whose sandboxes continue to run.
pub fn revoke(id: &str) -> Action {
    Action::RevokeKey {
        id: id.to_owned(),
        end: false,
    }
}

/// Returns the row of an API key in the tables of a member.
pub fn row(tables: &Tables, id: &str) -> Option<Arc<Row>> {
    tables.row(&RowKey::Key(id.to_owned()))
}

pub fn is_revoked(tables: &Tables, id: &str) -> bool {
    let row = row(tables, id).unwrap();
    row.as_key().unwrap().revoked_ms.is_some()
}

/// Waits until the member has all commits up to `number`.
pub async fn reached(tables: &Tables, number: u64) {
    let mut seen = tables.subscribe();
    let reached = seen.wait_for(|seen| *seen >= number);
    let limit = Duration::from_secs(120);
    tokio::time::timeout(limit, reached).await.unwrap().unwrap();
}

/// Connection of one member to the records.
#[derive(Debug)]
pub struct Gate {
    records: Arc<dyn Records>,
    is_cut: AtomicBool,
}

impl Gate {
    pub fn new(records: Arc<dyn Records>) -> Self {
        Self {
            records,
            is_cut: AtomicBool::new(false),
        }
    }

    /// Makes all later reads and writes of the records fail.
    pub fn disconnect(&self) {
        self.is_cut.store(true, Ordering::SeqCst);
    }

    /// Connects the records again.
    pub fn connect(&self) {
        self.is_cut.store(false, Ordering::SeqCst);
    }

    /// Fails after 6 s while the connection is cut.
    async fn pass(&self, key: &RecordKey) -> Result<(), RecordError> {
        if !self.is_cut.load(Ordering::SeqCst) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_secs(6)).await;
        Err(RecordError::Unavailable {
            record: key.clone(),
            reason: "cut".to_owned(),
        })
    }
}

#[async_trait]
impl Records for Gate {
    async fn get(&self, key: &RecordKey) -> Result<Option<Versioned>, RecordError> {
        self.pass(key).await?;
        self.records.get(key).await
    }

    async fn create(&self, key: &RecordKey, value: Bytes) -> Result<Written, RecordError> {
        self.pass(key).await?;
        self.records.create(key, value).await
    }

    async fn replace(
        &self,
        key: &RecordKey,
        value: Bytes,
        version: &Version,
    ) -> Result<Written, RecordError> {
        self.pass(key).await?;
        self.records.replace(key, value, version).await
    }

    async fn list(
        &self,
        prefix: &RecordKey,
        after: Option<&RecordKey>,
        limit: usize,
    ) -> Result<Page, RecordError> {
        self.pass(prefix).await?;
        self.records.list(prefix, after, limit).await
    }

    async fn purge(&self, key: &RecordKey) -> Result<(), RecordError> {
        self.pass(key).await?;
        self.records.purge(key).await
    }
}
