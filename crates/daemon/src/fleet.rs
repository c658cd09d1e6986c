//! This daemon as a member of a fleet: starts the node (`jiffy_fleet::node`) and the channel to
//! other members. Also opens the tables of API keys, template names, secrets and volumes, and
//! handles calls of other members.
//!
//! The *head* of a sandbox is the record in the store that decides which member may run the
//! sandbox. A *roster* is the list of the sandboxes of a member, for the time after its loss. A
//! *front* is a machine without sandboxes that passes requests of clients to the members.
//!
//! These parts exist only if the data directory contains `fleet.toml`. A *member* is a host of the
//! fleet. The *coordinator* is the member that selects the hosts of new sandboxes. A *shard* is a
//! part of the fleet's sandboxes: a new fleet has only shard 0.

mod calls;
mod host;
mod pools;
mod template_rows;
mod templates;

use crate::ServeOptions;
use crate::fleet_gateway::{FleetHosts, FleetParts, GATEWAY_PATH, GatewayStreams};
use crate::host_facts::host_facts;
use anyhow::Context;
use calls::{CALL_PREFIX, ChannelForwarder, ForwardedPortStreams, STREAM_PREFIX};
use host::{DaemonHost, cpu_milli, mib};
use jiffy_api::{
    FleetIdentityKeys, FleetProbe, FleetSecrets, FleetWebhooks, Keys, TableNames, import_keys,
    import_owned,
};
use jiffy_fleet::channel::{Client, Identity, Server, ServerHandle};
use jiffy_fleet::front::{FRONT_PATH, FrontHost, FrontService, LiveHosts};
use jiffy_fleet::join::JoinService;
use jiffy_fleet::node::{
    BootClock, ChannelMessenger, Clock, MESSAGE_PATH, MessageReceiver, Node, NodeConfig,
    QUERY_PATH, QueryReceiver, current_instance,
};
use jiffy_fleet::roster::Rosters;
use jiffy_fleet::settings::{Settings, clear_import};
use jiffy_fleet::tables::{
    CHANGE_TIMEOUT, ChannelPeers, TABLES_PATH, Tables, TablesConfig, preview_key, secrets_key,
};
use jiffy_fleet::{CONTROL_TENANT, FleetAccess, Heads, HostFacts, SealedRecords, StoreRecords};
use jiffy_fleet_core::record::{Capacity, MemberRow};
use jiffy_fleet_core::{MemberConfig, MemberId, ShardId, Timing};
use jiffy_identity::{IssuerUrl, TokenIssuer};
use jiffy_image::Home;
use jiffy_sandbox_manager::{HostReader, KernelReader, Sandboxes};
use jiffy_secrets::{HostKey, Secrets};
use jiffy_store::host::RemoteStore;
use jiffy_webhooks::Webhooks;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use templates::StoredTemplates;
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use zeroize::Zeroizing;

pub use calls::ForwardedCalls;

/// Pause before the records of the fleet are read again.
const ACCESS_PAUSE: Duration = Duration::from_secs(2);
/// Maximum time that the start waits for the keys of the fleet.
const KEYS_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which the certificate is checked.
const CERTIFICATE_INTERVAL: Duration = Duration::from_secs(3600);
/// Interval at which the keys of identity tokens are checked. They are replaced after 30 days.
const IDENTITY_KEYS_INTERVAL: Duration = Duration::from_secs(600);
/// Pause before a failed import of keys is repeated.
const IMPORT_PAUSE: Duration = Duration::from_secs(5);

/// Member of a fleet, before its sandboxes are open.
pub struct Member {
    settings: Settings,
    facts: HostFacts,
    remote: Arc<RemoteStore>,
    access: FleetAccess,
    identity: Identity,
    client: Client,
    node: Node,
    host: Arc<DaemonHost>,
    tables: Tables,
    listener: TcpListener,
}

/// Running parts of a member. Dropping the value closes the channel.
pub struct RunningMember {
    _channel: ServerHandle,
    node: Node,
}

impl RunningMember {
    /// Stops the node. Other members notice the end of this daemon when its heartbeats stop.
    pub async fn stop(&self) {
        self.node.stop().await;
    }
}

impl Member {
    /// Starts the node of this host. Returns `None` if the data directory has no `fleet.toml`.
    /// Waits until the records of the fleet can be read.
    pub async fn start(home: &Home, remote: &Arc<RemoteStore>) -> anyhow::Result<Option<Self>> {
        let Some(settings) = Settings::load(home.path())? else {
            return Ok(None);
        };
        let identity = settings.identity(home.path())?;
        let listener = TcpListener::bind(settings.listen).await.with_context(|| {
            let listen = settings.listen;
            format!("cannot listen on {listen}: choose another address in fleet.toml")
        })?;
        let access = loop {
            match FleetAccess::open(&settings, home.path(), remote).await {
                Ok(access) => break access,
                Err(error) if error.is_temporary() => {
                    tracing::warn!(%error, "cannot open the records of the fleet, retrying");
                    sleep(ACCESS_PAUSE).await;
                }
                Err(error) => return Err(error).context("cannot open the records of the fleet"),
            }
        };
        let client = Client::new(identity.clone());
        let host = Arc::new(DaemonHost::new(access.records.clone()));
        let facts = host_facts(home);
        let config = MemberConfig {
            fleet: settings.fleet.clone(),
            id: settings.member,
            instance: current_instance().context("cannot identify this process")?,
            address: settings.address.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            capacity: Capacity {
                labels: settings.host_labels().map_err(anyhow::Error::msg)?,
                ..capacity(home, &facts, access.root.cpu_level)
            },
            timing: Timing::PRODUCTION,
        };
        let node = Node::start(NodeConfig {
            member: config,
            shard: ShardId(0),
            records: access.records.clone(),
            messenger: Arc::new(ChannelMessenger::new(client.clone())),
            host: host.clone(),
            clock: Arc::new(BootClock),
        })?;
        let tables = Tables::start(TablesConfig {
            fleet: settings.fleet.clone(),
            records: access.records.clone(),
            peers: Arc::new(ChannelPeers::new(node.clone(), client.clone())),
            clock: Arc::new(|| Duration::from_millis(BootClock.now().0)),
            change_timeout: CHANGE_TIMEOUT,
        });
        tracing::info!(fleet = %settings.fleet, member = %settings.member, "member of a fleet");
        Ok(Some(Self {
            settings,
            facts,
            remote: remote.clone(),
            access,
            identity,
            client,
            node,
            host,
            tables,
            listener,
        }))
    }

    /// Returns the id of this member.
    pub fn id(&self) -> MemberId {
        self.settings.member
    }

    /// Returns the records by which members decide who runs a stored sandbox.
    pub fn heads(&self) -> Heads {
        Heads::new(self.remote.clone(), self.node.clone())
    }

    /// Returns the secrets of API keys, which the members share.
    ///
    /// # Errors
    /// If the former key of this host cannot be read.
    pub fn secrets(&self, home: &Home) -> anyhow::Result<Secrets> {
        let key = HostKey::of_fleet(&secrets_key(&self.access.secret), home.path())?;
        let shared = FleetSecrets::new(self.tables.clone());
        Ok(Secrets::shared(key, Arc::new(shared)))
    }

    /// Returns the webhooks of API keys, which the members share. `key` is the key of the secrets.
    ///
    /// # Errors
    /// If the database of this host cannot be opened.
    pub fn webhooks(&self, home: &Home, key: HostKey) -> anyhow::Result<Webhooks> {
        let shared = Arc::new(FleetWebhooks::new(self.tables.clone()));
        let number = self.settings.member.0;
        let webhooks = Webhooks::shared(home.path(), key, number, shared)?;
        if self.settings.import_keys {
            webhooks.begin_import();
        }
        Ok(webhooks)
    }

    /// Returns the issuer of identity tokens, whose keys the members share. `key` is the key of the
    /// secrets. All members must have the same `url`.
    pub fn issuer(&self, home: &Home, key: HostKey, url: IssuerUrl) -> Arc<TokenIssuer> {
        let shared = Arc::new(FleetIdentityKeys::new(self.tables.clone()));
        let issuer = Arc::new(TokenIssuer::of_fleet(home.path(), key, url, shared));
        tokio::spawn(replace_identity_keys(issuer.clone()));
        issuer
    }

    /// Connects the member with its sandboxes, and opens the channel. Returns the parts of the API
    /// server.
    pub async fn serve(
        self,
        options: &ServeOptions,
        home: &Home,
        sandboxes: &Sandboxes,
        webhooks: &Webhooks,
    ) -> anyhow::Result<(RunningMember, FleetParts)> {
        // From here on, requests to sandboxes wait until the sandboxes were compared with their
        // heads.
        self.host.set_tables(self.tables.clone());
        sandboxes.expect_comparison();
        self.host.set_sandboxes(sandboxes.clone());
        // The coordinator identifies sandboxes by keyed hashes of their ids. This is the key.
        let secret = Zeroizing::new(blake3::derive_key(
            "jiffy fleet 2026 hashes of the directory",
            &*self.access.secret,
        ));
        let calls = Arc::new(ForwardedCalls::default());
        let (streams, forwarded) = GatewayStreams::new();
        let keys_file = options.store.as_ref().and_then(|store| store.keys.clone());
        let join = JoinService::new(
            self.settings.clone(),
            home.path().to_owned(),
            keys_file,
            self.access.clone(),
            self.facts,
            Box::new(StoredTemplates(self.remote.clone())),
        );
        let known = self.node.clone();
        let check = move |member: MemberId| {
            if known.members().is_removed(member) {
                return Err(format!("{member} was removed from the fleet"));
            }
            Ok(())
        };
        let fronts = FrontService::new(self.access.clone(), live_hosts(&self.node));
        let channel = Server::new(self.identity.clone(), Arc::new(check))
            .messages(MESSAGE_PATH, Arc::new(MessageReceiver(self.node.clone())))
            .messages(QUERY_PATH, Arc::new(QueryReceiver(self.node.clone())))
            .messages(TABLES_PATH, Arc::new(self.tables.clone()))
            .requests(CALL_PREFIX, calls.clone())
            .requests(STREAM_PREFIX, Arc::new(ForwardedPortStreams(calls.clone())))
            .requests(GATEWAY_PATH, Arc::new(streams))
            .for_fronts(GATEWAY_PATH)
            .messages(FRONT_PATH, Arc::new(fronts))
            .for_fronts(FRONT_PATH)
            .join(Arc::new(join))
            .start(self.listener)?;
        tokio::spawn(keep_certificate(
            self.access.clone(),
            self.identity.clone(),
            home.path().to_owned(),
        ));
        if self.settings.import_keys {
            let key = HostKey::of_fleet(&secrets_key(&self.access.secret), home.path())?;
            let import = Import {
                home: home.path().to_owned(),
                key,
                webhooks: webhooks.clone(),
                tables: self.tables.clone(),
            };
            tokio::spawn(import.run());
        }
        let mut number = self.tables.subscribe();
        // The number of the tables is 0 until they are loaded. Ignore a timeout: the API rejects
        // calls that use keys until then.
        let _ = timeout(KEYS_TIMEOUT, number.wait_for(|number| *number > 0)).await;
        let forwarder = Arc::new(ChannelForwarder::new(self.client.clone()));
        let store = store_records(&self.remote).await?;
        let rosters = Rosters::new(store.clone());
        let api = jiffy_api::Fleet::with_rosters(self.node.clone(), *secret, forwarder, rosters);
        let mut api = api.with_probe(FleetProbe {
            records: self.access.records.clone(),
            store,
            is_etcd: self.settings.records.is_some(),
        });
        api.set_template_names(Arc::new(TableNames::new(self.tables.clone())));
        api.set_volumes(Arc::new(self.tables.clone()));
        tokio::spawn(template_rows::publish(
            home.clone(),
            self.tables.clone(),
            self.node.clone(),
        ));
        self.host.set_fleet(api.clone());
        let demand = self.host.pools();
        tokio::spawn(pools::follow(demand, sandboxes.clone(), api.clone()));
        let parts = FleetParts {
            keys: Arc::new(Keys::of_fleet(self.tables, home.path())),
            hosts: Arc::new(FleetHosts::new(api.clone(), self.client)),
            forwarded,
            signing_key: preview_key(&self.access.secret),
            api,
            calls,
        };
        let running = RunningMember {
            _channel: channel,
            node: self.node,
        };
        Ok((running, parts))
    }
}

/// Returns the live members, for fronts.
fn live_hosts(node: &Node) -> LiveHosts {
    let node = node.clone();
    Box::new(move || {
        let members = node.members();
        let live = members.rows.iter().filter(|row| row.state.is_live());
        let host = |row: &MemberRow| FrontHost {
            member: row.id,
            address: row.address.clone(),
        };
        live.map(host).collect()
    })
}

/// Returns records of the fleet that are in the store also if other records are in etcd.
async fn store_records(remote: &RemoteStore) -> anyhow::Result<Arc<SealedRecords>> {
    let tenant = remote.shared.tenant(CONTROL_TENANT).await?;
    let records = Arc::new(StoreRecords::new(remote.shared.backend()));
    Ok(Arc::new(SealedRecords::new(records, tenant)))
}

/// Returns the resources of this host.
fn capacity(home: &Home, facts: &HostFacts, cpu_level: u8) -> Capacity {
    let figures = KernelReader::new(home.path()).read();
    Capacity {
        cpu_milli: cpu_milli(),
        memory_mib: mib(figures.memory_total_mib),
        disk_mib: mib(figures.disk_total_mib),
        microvm: jiffy_microvm_engine::host_kvm::open().is_ok(),
        gvisor: facts.gvisor.is_some(),
        cpu_level,
        ..Capacity::default()
    }
}

/// Renews the certificate of this member before it expires.
async fn keep_certificate(access: FleetAccess, identity: Identity, home: PathBuf) {
    loop {
        match access.renew(&home, &identity) {
            Ok(true) => tracing::info!("renewed the certificate of this host"),
            Ok(false) => {}
            Err(error) => tracing::error!(%error, "cannot renew the certificate of this host"),
        }
        sleep(CERTIFICATE_INTERVAL).await;
    }
}

/// Replaces the keys of identity tokens when they are due. If several members do so at the same
/// time, the coordinator accepts the keys of one of them.
async fn replace_identity_keys(issuer: Arc<TokenIssuer>) {
    loop {
        sleep(IDENTITY_KEYS_INTERVAL).await;
        let issuer = issuer.clone();
        let replaced = tokio::task::spawn_blocking(move || issuer.replace_due_keys()).await;
        if let Ok(Err(error)) = replaced {
            tracing::warn!(%error, "cannot replace the keys of identity tokens");
        }
    }
}

/// Import of the content of this host into its fleet.
struct Import {
    home: PathBuf,
    /// Key of the secrets of the fleet.
    key: HostKey,
    webhooks: Webhooks,
    tables: Tables,
}

impl Import {
    /// Imports the API keys, secrets and webhooks of this host, once.
    async fn run(self) {
        while let Err(error) = self.attempt().await {
            tracing::warn!(%error, "cannot import the keys of this host into the fleet, retrying");
            sleep(IMPORT_PAUSE).await;
        }
    }

    async fn attempt(&self) -> anyhow::Result<()> {
        let keys = import_keys(&self.home, &self.tables).await?;
        let imported = import_owned(&self.home, &self.key, &self.webhooks, &self.tables).await?;
        for object in imported.skipped {
            tracing::warn!(object, "not imported into the fleet");
        }
        let (secrets, webhooks) = (imported.secrets, imported.webhooks);
        tracing::info!(keys, secrets, webhooks, "imported keys into the fleet");
        // From here on, the import is not repeated.
        clear_import(&self.home)?;
        self.webhooks.finish_import();
        Ok(())
    }
}
