//! Hosts with a common store, without daemons.

use jiffy_fleet::channel::{Server, ServerHandle};
use jiffy_fleet::init::{InitOptions, create_fleet};
use jiffy_fleet::join::{JoinOptions, JoinService, Joined, StockTemplates, join_fleet};
use jiffy_fleet::settings::{Role, Settings};
use jiffy_fleet::tokens::{DEFAULT_VALIDITY, Token};
use jiffy_fleet::{FleetAccess, HostFacts, SetupError};
use jiffy_fleet_core::record::ShardRecord;
use jiffy_fleet_core::{MemberId, ShardId};
use jiffy_store::StoreUrl;
use jiffy_store::host::{RemoteSettings, RemoteStore};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::TcpListener;

pub const TEMPLATES: [&str; 2] = ["base", "code-interpreter-v1"];

/// Directory with a store and the data directories of hosts.
pub struct Lab {
    pub dir: TempDir,
}

impl Lab {
    pub fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// Creates the data directory of a host.
    pub fn home(&self, name: &str) -> PathBuf {
        let home = self.dir.path().join(name);
        std::fs::create_dir_all(&home).unwrap();
        home
    }

    pub fn store(&self) -> StoreUrl {
        StoreUrl::Directory(self.dir.path().join("store"))
    }

    /// Opens the store with the keys of a data directory.
    pub fn remote(&self, home: &Path) -> Arc<RemoteStore> {
        RemoteStore::open(&RemoteSettings {
            url: self.store(),
            keyring: None,
            home: home.to_owned(),
            cache_bytes: 1 << 20,
            upload_bytes_per_second: None,
            timeout: Duration::from_secs(10),
        })
        .unwrap()
    }

    /// Returns the options with which the first host creates a fleet.
    pub fn init_options(&self) -> InitOptions {
        InitOptions {
            store: self.store(),
            etcd: None,
            name: "host1".to_owned(),
            domains: vec!["sbx.example.com".to_owned()],
            listen: "127.0.0.1:7946".parse().unwrap(),
            address: "127.0.0.1:7946".to_owned(),
            cpu_level: 3,
            guest_level: None,
            import: false,
        }
    }

    /// Creates a fleet. The store is a directory: it is correct within one file system.
    pub async fn init(&self, home: &Path) -> Result<(Settings, FleetAccess), SetupError> {
        let remote = self.remote(home);
        create_fleet(home, &self.init_options(), &facts(), &remote).await
    }

    /// Adds a front to the removed ones, as the coordinator does.
    pub async fn remove_front(&self, member: &Member, front: MemberId) {
        let (records, fleet) = (&member.access.records, &member.access.root.fleet);
        let key = "fleet/shards/0".parse().unwrap();
        let current = records.get(&key).await.unwrap().unwrap();
        let mut shard = ShardRecord::decode(&current.content, fleet, ShardId(0)).unwrap();
        shard.removed_fronts.push(front);
        let write = records.replace(&key, shard.encode().unwrap(), &current);
        records.send(&write.unwrap()).await.unwrap();
    }

    /// Creates a fleet and starts the listener of its first member.
    pub async fn member(&self) -> Member {
        let home = self.home("one");
        let (settings, access) = self.init(&home).await.unwrap();
        Member::start(&home, settings, access).await
    }
}

/// Returns the properties of all hosts.
pub fn facts() -> HostFacts {
    HostFacts {
        version: "0.1.0".to_owned(),
        format: jiffy_fleet_core::MESSAGE_FORMAT,
        cpu_level: 3,
        kernel: Some("k1".to_owned()),
        gvisor: Some("g1".to_owned()),
    }
}

/// Stock templates that are all in the store.
#[derive(Debug)]
struct Stored;

#[async_trait::async_trait]
impl StockTemplates for Stored {
    async fn stored(&self) -> Vec<String> {
        TEMPLATES.map(str::to_owned).to_vec()
    }
}

/// Member that admits hosts.
pub struct Member {
    pub access: FleetAccess,
    pub address: String,
    _server: ServerHandle,
}

impl Member {
    pub async fn start(home: &Path, settings: Settings, access: FleetAccess) -> Self {
        let service = JoinService::new(
            settings.clone(),
            home.to_owned(),
            None,
            access.clone(),
            facts(),
            Box::new(Stored),
        );
        let identity = settings.identity(home).unwrap();
        let server = Server::new(identity, Arc::new(|_| Ok(())))
            .join(Arc::new(service))
            .start(TcpListener::bind("127.0.0.1:0").await.unwrap())
            .unwrap();
        Self {
            access,
            address: server.local_address().to_string(),
            _server: server,
        }
    }

    /// Creates a token with which `uses` hosts can join.
    pub async fn token(&self, uses: u32) -> Token {
        let token = self.access.create_token(uses, DEFAULT_VALIDITY).await;
        token.unwrap()
    }

    /// Returns the options of a host that joins through this member with a new token.
    pub async fn options(&self, name: &str) -> JoinOptions {
        let listen = free_address().await;
        JoinOptions {
            member: self.address.clone(),
            token: self.token(1).await,
            name: name.to_owned(),
            listen,
            address: listen.to_string(),
            role: Role::Host,
            import: false,
        }
    }

    /// Joins with a new token.
    pub async fn join(&self, home: &Path, name: &str) -> Result<Joined, SetupError> {
        join_fleet(home, &self.options(name).await, facts()).await
    }
}

/// Returns an address at which no program listens.
pub async fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap()
}

/// Returns the message of a rejected join, and checks that the host is not a member.
pub fn rejected(home: &Path, joined: Result<Joined, SetupError>) -> String {
    let error = joined.unwrap_err().to_string();
    assert!(Settings::load(home).unwrap().is_none(), "{error}");
    assert!(!home.join("store/keys.toml").exists(), "{error}");
    error
}
