//! Several control planes in one process, whose nodes and calls are connected in memory.
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox. The record of the *shard* (all sandboxes of the fleet) lists the members and names
//! the coordinator.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until it is declared
//! dead.

mod faults;
mod host;
mod network;
mod placement;
mod ports;
mod shard;
mod volumes;

use crate::function_keys::{NoInvoker, open_functions};
use crate::names::put_at;
use crate::support::fake::Bench;
use crate::support::{Answer, TestCaller, base_templates};
use crate::volumes::FakeMounter;
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use host::{TestFigures, TestHost};
use jiffy_api::{
    App, Config, Fleet, FunctionHost, Keys, Limits, NewKey, Scope, TemplateNames, TemplateSource,
    function_router, receive_forwarded, router,
};
use jiffy_fleet::node::{BootClock, Clock, Node, NodeConfig};
use jiffy_fleet::roster::Rosters;
use jiffy_fleet::{Heads, MemoryRecords, SealedRecords};
use jiffy_fleet_core::record::{Capacity, HostLabel};
use jiffy_fleet_core::{FleetId, Instance, MemberConfig, MemberId, ShardId, Timing};
use jiffy_function_manager::FunctionRecord;
use jiffy_image::{Home, Templates};
use jiffy_sandbox_manager::{HostOptions, Sandboxes};
use jiffy_store::Tenant;
use jiffy_store::host::{RemoteSettings, RemoteStore, STORE_TIMEOUT};
use jiffy_template_builder::{Builder, BuilderSettings};
use network::{Link, Network};
use ports::EchoPorts;
use serde_json::Value;
use shard::create_shard;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use tower::ServiceExt;

pub use host::with_free;

/// Secret of the fleet.
const SECRET: [u8; 32] = [9; 32];
/// Timeout for an expected state or a response.
const LIMIT: Duration = Duration::from_secs(60);

/// Times of the protocol, shortened to a fifth.
fn timing() -> Timing {
    let Timing {
        heartbeat,
        deadline,
        renew,
        repeat,
        acknowledge,
        silence,
        grace,
        observe,
        unacknowledged,
        poll,
        unchanged,
        rank,
        ..
    } = Timing::PRODUCTION;
    Timing {
        heartbeat: heartbeat / 5,
        deadline: deadline / 5,
        renew: renew / 5,
        repeat: repeat / 5,
        acknowledge: acknowledge / 5,
        silence: silence / 5,
        grace: grace / 5,
        observe: observe / 5,
        unacknowledged: unacknowledged / 5,
        poll: poll / 5,
        unchanged: unchanged / 5,
        rank: rank / 5,
        ..Timing::PRODUCTION
    }
}

/// Member of the fleet: its sandboxes, its node and its connections.
struct Member {
    bench: Bench,
    figures: Arc<TestFigures>,
    host: Arc<TestHost>,
    sandboxes: Sandboxes,
    node: Node,
    link: Arc<Link>,
    store: Option<Arc<RemoteStore>>,
}

/// Members of a fleet, with the same keys.
pub struct Lab {
    members: BTreeMap<u32, Member>,
    network: Arc<Network>,
    keys: Arc<Keys>,
    admin: TestCaller,
    records: MemoryRecords,
    tenant: Arc<Tenant>,
    names: Option<Arc<dyn TemplateNames>>,
    fleets: Mutex<BTreeMap<u32, Fleet>>,
    _dir: tempfile::TempDir,
}

fn fleet_id() -> FleetId {
    "7kq2".to_owned().try_into().unwrap()
}

/// Opens the store as the host `name`. All hosts use the keys of the first.
fn remote(dir: &Path, name: &str) -> Arc<RemoteStore> {
    let keys = dir.join("h1/store/keys.toml");
    let settings = RemoteSettings {
        url: format!("file://{}/bucket", dir.display()).parse().unwrap(),
        keyring: keys.exists().then_some(keys),
        home: dir.join(name),
        cache_bytes: 1 << 20,
        upload_bytes_per_second: None,
        timeout: STORE_TIMEOUT,
    };
    RemoteStore::open(&settings).unwrap()
}

/// Returns the settings of a member with the label `number=<id>`.
fn member_config(id: u32) -> MemberConfig {
    MemberConfig {
        fleet: fleet_id(),
        id: MemberId(id),
        instance: Instance {
            boot: [id as u8; 16],
            started_ms: BootClock.now().0,
        },
        address: format!("h{id}:7946"),
        version: "0.1.0".to_owned(),
        capacity: Capacity {
            labels: vec![HostLabel::new("number", &id.to_string()).unwrap()],
            ..Capacity::default()
        },
        timing: timing(),
    }
}

impl Lab {
    pub async fn start(members: u32) -> Self {
        Self::open(members, false).await
    }

    /// Starts members that share sandboxes in a store.
    pub async fn with_store(members: u32) -> Self {
        Self::open(members, true).await
    }

    /// Starts a fleet in this process and waits until all members are ready.
    async fn open(members: u32, has_store: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = remote(dir.path(), "h1");
        let tenant: Arc<Tenant> = store.tenant(Some("fleet")).await.unwrap();
        let records = MemoryRecords::default();
        let sealed = || SealedRecords::new(Arc::new(records.clone()), tenant.clone());
        create_shard(&sealed()).await;
        let keys = Arc::new(Keys::open(dir.path()).unwrap());
        let admin = keys
            .create("admin", Scope::Admin, Limits::default())
            .unwrap();
        let mut lab = Self {
            members: BTreeMap::new(),
            network: Arc::default(),
            keys,
            admin: TestCaller::Key(admin.secret),
            records: records.clone(),
            tenant: tenant.clone(),
            names: None,
            fleets: Mutex::default(),
            _dir: dir,
        };
        for id in 1..=members {
            let remote = has_store.then(|| remote(lab._dir.path(), &format!("h{id}")));
            lab.add(id, Arc::new(sealed()), remote).await;
        }
        lab.until_ready(members).await;
        lab
    }

    async fn add(&mut self, id: u32, records: Arc<SealedRecords>, store: Option<Arc<RemoteStore>>) {
        let host = Arc::new(TestHost::default());
        let link = Arc::new(Link {
            from: MemberId(id),
            network: self.network.clone(),
            reported: Mutex::default(),
        });
        let node = Node::start(NodeConfig {
            member: member_config(id),
            shard: ShardId(0),
            records,
            messenger: link.clone(),
            host: host.clone(),
            clock: Arc::new(BootClock),
        });
        let node = node.unwrap();
        let bench = Bench::new();
        let figures = Arc::new(TestFigures::default());
        let options = HostOptions {
            reader: Some(figures.clone()),
            heads: store.clone().map(|store| Heads::new(store, node.clone())),
            remote: store.clone(),
            volumes: Some(Arc::new(FakeMounter)),
            ..HostOptions::default()
        };
        let sandboxes = bench.open_with(options).await;
        *host.sandboxes.lock().unwrap() = Some(sandboxes.clone());
        self.network
            .nodes
            .lock()
            .unwrap()
            .insert(MemberId(id), node.clone());
        let member = Member {
            bench,
            figures,
            host,
            sandboxes,
            node,
            link,
            store,
        };
        self.serve(&member);
        self.members.insert(id, member);
    }

    /// Sets the names of templates for members that are given objects later.
    pub fn set_names(&mut self, names: Arc<dyn TemplateNames>) {
        self.names = Some(names);
    }

    /// Gives a member templates of its own, a builder and functions.
    pub async fn add_objects(&self, host: u32, templates: &[&str], functions: Vec<FunctionRecord>) {
        let member = &self.members[&host];
        let dir = member.bench.dir.path();
        let home = Home::at(dir.join("home")).unwrap();
        for name in templates {
            let is_private = name.contains('/');
            put_at(
                &home,
                name,
                Some(if is_private { "private" } else { "public" }),
            );
        }
        let builder = Builder::open(&home, member.sandboxes.clone(), BuilderSettings::default());
        let builder = builder.await.unwrap();
        let functions = open_functions(&dir.join("functions"), functions);
        let app = self.app(member, Arc::new(Templates::new(&home)));
        let app = app
            .with_builder(builder)
            .with_functions(functions, Arc::new(NoInvoker));
        let id = member.node.id();
        let routes = function_router(app.clone());
        self.network.functions.lock().unwrap().insert(id, routes);
        let routes = router(app);
        self.network.routers.lock().unwrap().insert(id, routes);
    }

    /// Returns the control plane of a member.
    fn app(&self, member: &Member, templates: Arc<dyn TemplateSource>) -> App {
        self.app_with(member, templates, |app, _| app)
    }

    /// Returns the control plane of a member. `change` adds parts to it, and to its fleet.
    fn app_with(
        &self,
        member: &Member,
        templates: Arc<dyn TemplateSource>,
        change: impl FnOnce(App, &mut Fleet) -> App,
    ) -> App {
        let (node, link) = (member.node.clone(), member.link.clone());
        let mut fleet = Fleet::with_rosters(node, SECRET, link, self.rosters());
        let mut app = App::new(
            member.sandboxes.clone(),
            self.keys.clone(),
            templates,
            Config::default(),
        );
        if let Some(names) = &self.names {
            fleet.set_template_names(names.clone());
        }
        app = change(app, &mut fleet);
        let mut fleets = self.fleets.lock().unwrap();
        fleets.insert(member.node.id().0, fleet.clone());
        drop(fleets);
        app.set_fleet(fleet);
        app.with_ports(Arc::new(EchoPorts))
    }

    /// Returns the address of a server with the API of a member, which ends with the test.
    pub async fn listen(&self, host: u32) -> SocketAddr {
        let router = self.network.routers.lock().unwrap()[&MemberId(host)].clone();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        address
    }

    /// Starts a new control plane of a member, and connects it to the others.
    fn serve(&self, member: &Member) {
        let router = router(self.app(member, Arc::new(base_templates())));
        let mut routers = self.network.routers.lock().unwrap();
        routers.insert(member.node.id(), router);
    }

    fn rosters(&self) -> Rosters {
        let records = Arc::new(self.records.clone());
        Rosters::new(Arc::new(SealedRecords::new(records, self.tenant.clone())))
    }

    /// Waits until all members know each other, and until one of them knows all objects.
    async fn until_ready(&self, members: u32) {
        let ready = async {
            for member in self.members.values() {
                member.node.wait_for(|view| view.is_ready()).await.unwrap();
                let mut known = member.node.members();
                while known.rows.len() < members as usize {
                    known = member.node.members_changed(&known).await;
                }
            }
            let complete = self.members.values().map(|member| {
                let node = member.node.clone();
                Box::pin(async move { node.wait_for(|view| view.is_directory_complete).await })
            });
            futures_util::future::select_all(complete).await.0.unwrap();
        };
        tokio::time::timeout(LIMIT, ready).await.unwrap();
    }

    pub fn admin(&self) -> TestCaller {
        self.admin.clone()
    }

    pub fn key(&self, scope: Scope) -> (TestCaller, NewKey) {
        self.limited_key(scope, Limits::default())
    }

    pub fn limited_key(&self, scope: Scope, limits: Limits) -> (TestCaller, NewKey) {
        let key = self.keys.create("test", scope, limits).unwrap();
        (TestCaller::Key(key.secret.clone()), key)
    }

    pub fn revoke(&self, key: &NewKey) {
        self.keys.revoke(&key.key.id).unwrap();
    }

    /// Waits until another member than the host of a sandbox can locate the sandbox.
    pub async fn located(&self, id: &str) {
        let node = &self.members[&1].node;
        let fleet = Fleet::new(node.clone(), SECRET, self.members[&1].link.clone());
        let located = async {
            loop {
                for member in self.members.values() {
                    let hash = fleet.sandbox_hash(id);
                    let place = member.node.locate(hash).await;
                    let is_known = matches!(&place, Ok(Some(place)) if place.is_live);
                    if is_known && member.node.id() != place.unwrap().unwrap().member {
                        return;
                    }
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(LIMIT, located).await.unwrap();
    }

    /// Sends a call to the member `host`.
    pub async fn call(
        &self,
        host: u32,
        caller: &TestCaller,
        method: &str,
        path: &str,
        body: Value,
    ) -> Answer {
        self.send(host, request(caller, method, path, body)).await
    }

    /// Sends a request to a member's functions by host name.
    pub async fn call_function(&self, host: u32, caller: &TestCaller, label: &str) -> Answer {
        let mut request = request(caller, "GET", "/path", Value::Null);
        let extension = FunctionHost(label.to_owned());
        request.extensions_mut().insert(extension);
        let router = self.network.functions.lock().unwrap()[&MemberId(host)].clone();
        answer(router, request).await
    }

    /// Creates a sandbox with an idempotency key.
    pub async fn create_with(
        &self,
        key: &str,
        host: u32,
        caller: &TestCaller,
        body: Value,
    ) -> Answer {
        let mut request = request(caller, "POST", "/sandboxes", body);
        let value = key.parse().unwrap();
        request.headers_mut().insert("idempotency-key", value);
        self.send(host, request).await
    }

    /// Sends a call to a member as another member forwards it.
    pub async fn forwarded(&self, host: u32, caller: &TestCaller, path: &str) -> Answer {
        let mut request = request(caller, "GET", path, Value::Null);
        receive_forwarded(&mut request);
        self.send(host, request).await
    }

    /// Sends a call with a further header.
    pub async fn call_with(
        &self,
        host: u32,
        caller: &TestCaller,
        path: &str,
        header: &'static str,
    ) -> Answer {
        let mut request = request(caller, "GET", path, Value::Null);
        let value = "true".parse().unwrap();
        request.headers_mut().insert(header, value);
        self.send(host, request).await
    }

    pub async fn send(&self, host: u32, request: Request<Body>) -> Answer {
        let router = self.network.routers.lock().unwrap()[&MemberId(host)].clone();
        answer(router, request).await
    }

    pub fn is_coordinator(&self, host: u32) -> bool {
        self.members[&host].node.view().is_coordinator
    }

    /// Restarts the daemon of a member without a store.
    pub async fn restart(&mut self, host: u32) {
        let mut member = self.members.remove(&host).unwrap();
        let id = member.node.id();
        self.network.routers.lock().unwrap().remove(&id);
        member.host.sandboxes.lock().unwrap().take();
        member.sandboxes.close().await;
        member.sandboxes = member.bench.open().await;
        *member.host.sandboxes.lock().unwrap() = Some(member.sandboxes.clone());
        self.serve(&member);
        self.members.insert(host, member);
    }

    /// Pauses a sandbox, and waits until its head is in the store.
    pub async fn pause_durably(&self, host: u32, id: &str) {
        let sandboxes = &self.members[&host].sandboxes;
        let paused = sandboxes.pause(id).await.unwrap();
        let snapshot = paused.snapshot().unwrap().to_owned();
        let stored = async { sandboxes.snapshots().wait_stored(&snapshot).await.unwrap() };
        tokio::time::timeout(LIMIT, stored).await.unwrap();
    }
}

async fn answer(router: Router, request: Request<Body>) -> Answer {
    let response = tokio::time::timeout(LIMIT, router.oneshot(request)).await;
    let (parts, body) = response.unwrap().unwrap().into_parts();
    let bytes = to_bytes(body, 16 << 20).await.unwrap();
    Answer {
        status: parts.status.as_u16(),
        headers: parts.headers,
        body: serde_json::from_slice(&bytes).unwrap_or_default(),
    }
}

fn request(caller: &TestCaller, method: &str, path: &str, body: Value) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    if let TestCaller::Key(key) = caller {
        request = request.header("x-api-key", key);
    }
    let body = match body {
        Value::Null => Body::empty(),
        body => {
            request = request.header("content-type", "application/json");
            Body::from(body.to_string())
        }
    };
    request.body(body).unwrap()
}
