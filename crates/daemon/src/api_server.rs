//! [`ApiServer`]: the listeners of the daemon, which serve the API and the gateway to the owner's
//! socket and to addresses.
//!
//! An *exchange* is a request, with its response or stream, that the gateway passes to a sandbox or
//! function. A *direct* connection is a client's connection to a public function that bypasses the
//! gateway. A *member* is a host of a fleet.

use crate::ServeOptions;
use crate::console_server::ConsoleServer;
use crate::control_plane_router::ControlPlaneRouter;
use crate::direct_connections::DirectConnections;
use crate::direct_listener::{self, DirectListener};
use crate::documentation;
use crate::fleet_gateway::FleetParts;
use crate::functions::{self, FunctionGateway};
use crate::gateway_sandboxes::GatewaySandboxes;
use crate::guest_call_audit::GuestCallAudit;
use crate::mcp_server::{self, McpConnections};
use crate::metrics::{self, MetricsServer};
use crate::public_address::PublicAddress;
use crate::signing_key::signing_key;
use crate::status::daemon_status;
use crate::tls::tls;
use anyhow::{Context, bail};
use jiffy_api::{
    App, AutoResume, Keys, PreviewLinks, count_rejections, count_usage, end_revoked, local_key,
    report_keys,
};
use jiffy_api_types::StopHost;
use jiffy_event_log::AuditLog;
use jiffy_function_manager::Functions;
use jiffy_gateway::{
    ForwardedConnection, Gateway, GatewayConfig, GuestCallLog, InternalConnection, LinkSigner, Tls,
};
use jiffy_identity::TokenIssuer;
use jiffy_image::{Home, Templates};
use jiffy_network::Network;
use jiffy_registry_pull::Registries;
use jiffy_sandbox_manager::Sandboxes;
use jiffy_secrets::Secrets;
use jiffy_template_builder::Builder;
use jiffy_volumes::{HostVolumes, StoredVolumes};
use jiffy_webhooks::Webhooks;
use nix::unistd::geteuid;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// API and gateway on the owner's socket and on an optional address.
pub struct ApiServer {
    app: App,
    gateway: Gateway<GatewaySandboxes, ControlPlaneRouter>,
    address: Option<ApiListener>,
    /// Listener of direct connections. `None` without `--functions-listen`.
    direct: Option<DirectListener>,
    metrics: Option<MetricsServer>,
    /// Streams on which other members of the fleet forward requests of their clients.
    forwarded: Option<mpsc::Receiver<ForwardedConnection>>,
    mcp: McpConnections,
    /// Ends the sessions of MCP clients.
    mcp_end: CancellationToken,
    console: Option<ConsoleServer>,
}

/// Listening socket of the API address.
struct ApiListener {
    listener: TcpListener,
    tls: Option<Tls>,
    public: PublicAddress,
}

/// Parts of the host that the server makes available.
pub struct HostParts {
    pub sandboxes: Sandboxes,
    pub functions: Functions,
    /// `None` without a network.
    pub network: Option<Network>,
    /// `None` for a host without a fleet.
    pub fleet: Option<FleetParts>,
    /// Record of calls.
    pub audit: AuditLog,
    /// Secrets of API keys.
    pub secrets: Secrets,
    /// Issuer of identity tokens. `None` if the host issues none.
    pub issuer: Option<Arc<TokenIssuer>>,
    /// Volumes of API keys whose files are on this host.
    pub volumes: Arc<HostVolumes>,
    /// Snapshots of volumes. `None` without a store.
    pub stored_volumes: Option<Arc<StoredVolumes>>,
    /// Webhooks of API keys.
    pub webhooks: Webhooks,
}

impl ApiServer {
    /// Binds to the addresses in `options` and prints them. `start` is the start time of the
    /// daemon. `stop` is called when a client requests to stop the daemon.
    pub async fn open(
        options: &ServeOptions,
        home: &Home,
        parts: HostParts,
        start: Instant,
        stop: impl Fn(StopHost) + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        let HostParts {
            sandboxes,
            functions,
            network,
            fleet,
            audit,
            secrets,
            issuer,
            volumes,
            stored_volumes,
            webhooks,
        } = parts;
        let (keys, hosts, forwarded, signing_key, members) = match fleet {
            None => {
                let keys = Arc::new(Keys::open(home.path())?);
                (keys, None, None, signing_key(home)?, None)
            }
            Some(fleet) => {
                let (hosts, forwarded) = (Some(fleet.hosts), Some(fleet.forwarded));
                let members = Some((fleet.api, fleet.calls));
                (fleet.keys, hosts, forwarded, fleet.signing_key, members)
            }
        };
        let address = match options.listen {
            Some(address) => Some(ApiListener::open(address, options, home, &keys).await?),
            None => None,
        };
        let direct = match options.functions_listen {
            Some(address) => Some(direct_listener::listen(address).await?),
            None => None,
        };
        let direct_port = direct.as_ref().map(TcpListener::local_addr).transpose()?;
        let metrics = match options.metrics_listen {
            Some(address) => {
                let hosts = &options.allowed_hosts;
                Some(MetricsServer::open(address, hosts, sandboxes.clone()).await?)
            }
            None => None,
        };
        let tls = address.as_ref().and_then(|address| address.tls.clone());
        let console = match options.console {
            Some(console) => ConsoleServer::bind(console, options, home, tls).await?,
            None => None,
        };
        let public = address.as_ref().map(|address| address.public.clone());
        let url = public.as_ref().map(|public| public.url.clone());
        let signer = LinkSigner::new(&signing_key);
        let config = jiffy_api::Config {
            domain: public.as_ref().and_then(|public| public.domain.clone()),
            scheme: public.as_ref().map_or("http", |public| public.scheme),
            direct_port: direct_port.map(|address| address.port()),
            default_key_disk_mib: options.default_key_disk.mebibytes(home),
            snapshot_ack: options.snapshot_ack,
            ..jiffy_api::Config::default()
        };
        let templates = Arc::new(Templates::new(home));
        let builds = jiffy_template_builder::BuilderSettings {
            registries: Registries {
                plain_http: options.plain_http.clone(),
                allowed: options.registry_allow.clone(),
                mirrors: Arc::new(options.registry_mirror.clone()),
                network: network.map(|network| (network, Handle::current())),
                ..Registries::default()
            },
            at_once: options.max_builds,
            cache_for: cache_for(options.build_cache_days),
            host_keys: keys.admin_ids()?,
            ..jiffy_template_builder::BuilderSettings::default()
        };
        let builder = Builder::open(home, sandboxes.clone(), builds).await?;
        // Clients that verify identity tokens fetch the issuer's keys from this daemon. Their
        // requests have the name of the issuer in the header `Host`.
        let issuer_host = options
            .identity_issuer
            .as_ref()
            .map(|url| url.host().to_owned());
        let mut allowed_hosts = options.allowed_hosts.clone();
        allowed_hosts.extend(issuer_host);
        let gateway_config = GatewayConfig {
            domains: options.domains.clone(),
            allowed_hosts,
            ..GatewayConfig::default()
        };
        // A key without a limit of its own may use at most half of all exchanges in flight.
        let share = gateway_config.limits.exchanges / 2;
        let mut app = App::new(sandboxes.clone(), keys.clone(), templates, config)
            .with_stop(stop)
            .with_builder(builder)
            .with_audit(audit.clone())
            .with_issuer(issuer)
            .with_secrets(secrets)
            .with_webhooks(webhooks)
            .with_volumes(volumes)
            .with_stored_volumes(stored_volumes)
            .with_functions(
                functions.clone(),
                Arc::new(FunctionGateway(functions.clone())),
            )
            .with_exchange_share(u64::try_from(share).unwrap_or(u64::MAX));
        let page_links = public.clone().map(|public| {
            let signer = signer.clone();
            let link = move |id: &str, port, expires| public.page_link(&signer, id, port, expires);
            Arc::new(link) as Arc<dyn PreviewLinks>
        });
        if let Some(public) = public {
            let signer = signer.clone();
            let link = move |id: &str, port, expires| public.link(&signer, id, port, expires);
            app = app.with_preview(Arc::new(link));
        }
        let status = sandboxes.clone();
        let mut app = app.with_about(move || daemon_status(&status, start, url.clone()));
        let calls = match members {
            Some((fleet, calls)) => {
                app.set_fleet(fleet);
                Some(calls)
            }
            None => None,
        };
        let (measured_app, direct_functions) = (app.clone(), functions.clone());
        // Metrics that a scrape computes. A family is a metric with one value per label.
        sandboxes.figures().add_families(move || {
            let mut families = measured_app.figures();
            families.extend(functions::figures(&functions));
            families
        });
        let guest_calls = options.audit_commands.then(|| {
            app = app.clone().with_audited_commands();
            Arc::new(GuestCallAudit(audit)) as Arc<dyn GuestCallLog>
        });
        // Resumes paused sandboxes at a request, and counts exchanges against the limits of keys.
        let auto_resume = AutoResume::new(app.clone());
        let guests = GatewaySandboxes::new(sandboxes.clone(), auto_resume.clone(), keys.clone());
        let app = app.with_ports(Arc::new(guests.clone()));
        let metrics_routes = metrics::routes(&app, sandboxes.clone());
        let mut routes = jiffy_api::router(app.clone());
        let function_routes = jiffy_api::function_router(app.clone());
        // Other members may call the API, but not the routes that are merged below.
        if let Some(calls) = calls {
            calls.set_routers(routes.clone(), function_routes.clone());
        }
        let mcp_end = CancellationToken::new();
        let (mcp_routes, mcp) = mcp_server::routes(&app, mcp_end.clone());
        routes = routes.merge(metrics_routes.clone()).merge(mcp_routes);
        routes = routes.merge(documentation::routes());
        let console = match console {
            Some(console) => {
                // Links that the console creates must have another origin than the console, so that
                // pages of a sandbox cannot use the session of the console.
                let page_app = match page_links {
                    Some(links) => app.clone().with_preview(links),
                    None => app.clone(),
                };
                let api = jiffy_api::router(page_app).merge(metrics_routes);
                let (server, owner_routes) = console.open(&app, api, home, options)?;
                routes = routes.merge(owner_routes);
                Some(server)
            }
            None => None,
        };
        let control = ControlPlaneRouter {
            control: routes,
            functions: function_routes,
        };
        let config = gateway_config.clone();
        let signer = Some(signer);
        let gateway = Gateway::in_fleet(config, guests, control, signer, hosts, guest_calls);
        let direct = direct.map(|listener| DirectListener {
            listener,
            functions: direct_functions,
            keys,
            exchanges: auto_resume,
            admission: gateway.admission(),
            // The other half of the connections is reserved for clients of the gateway.
            connections: DirectConnections::new(gateway_config.limits.connections / 2),
            config: gateway_config,
        });
        metrics::add_gateway_counters(&sandboxes, gateway.counters());
        Ok(Self {
            app,
            gateway,
            address,
            direct,
            metrics,
            forwarded,
            mcp,
            mcp_end,
            console,
        })
    }

    /// Serves the owner's socket `local`, the connections from `internal` and the address until
    /// `stopping` is cancelled. Then waits for in-flight requests.
    pub async fn serve(
        self,
        local: UnixListener,
        internal: mpsc::Receiver<InternalConnection>,
        stopping: CancellationToken,
    ) {
        let Self {
            app,
            gateway,
            address,
            direct,
            metrics,
            forwarded,
            mcp,
            mcp_end,
            console,
        } = self;
        let keys = report_keys(app.clone());
        let rejections = count_rejections(app.clone());
        let usage = count_usage(app.clone());
        let last_usage = app.clone();
        let (streams, end) = (app.clone(), stopping.clone());
        let streams = async move {
            end.cancelled().await;
            // These streams have no end of their own: the listeners would wait for them.
            streams.end_event_streams();
            mcp_end.cancel();
        };
        let revocations = end_revoked(app);
        let own_uid = geteuid();
        // The check also holds if the permissions of the socket were changed.
        let is_permitted = move |uid| uid == own_uid.as_raw() || uid == 0;
        let end = stopping.clone().cancelled_owned();
        let local = jiffy_gateway::serve_local(local, gateway.clone(), is_permitted, end);
        let end = stopping.clone().cancelled_owned();
        let internal = jiffy_gateway::serve_internal(internal, gateway.clone(), end);
        let forwarded = {
            let (gateway, end) = (gateway.clone(), stopping.clone().cancelled_owned());
            async move {
                if let Some(streams) = forwarded {
                    jiffy_gateway::serve_forwarded(streams, gateway, end).await;
                }
            }
        };
        let end = stopping.clone().cancelled_owned();
        let mcp = jiffy_gateway::serve_forwarded(mcp, gateway.clone(), end);
        let address = async {
            let end = stopping.clone().cancelled_owned();
            if let Some(ApiListener { listener, tls, .. }) = address {
                jiffy_gateway::serve(listener, tls, gateway, end).await;
            }
        };
        let direct = async {
            if let Some(direct) = direct {
                direct.serve(stopping.clone()).await;
            }
        };
        let metrics = async {
            if let Some(metrics) = metrics {
                metrics.serve(stopping.clone().cancelled_owned()).await;
            }
        };
        let console = async {
            if let Some(console) = console {
                console.serve(stopping.clone().cancelled_owned()).await;
            }
        };
        tokio::select! {
            _ = async {
                tokio::join!(
                    local, internal, address, direct, metrics, forwarded, mcp, console, streams
                )
            } => {}
            // These tasks never complete; they only run as long as the listeners.
            () = revocations => {}
            () = keys => {}
            () = rejections => {}
            () = usage => {}
        }
        // Count the requests since the last count. The result is ignored, because the task does not
        // panic.
        let _ = tokio::task::spawn_blocking(move || last_usage.count_usage()).await;
    }
}

/// Returns the retention time of the build cache. `None` if it is not limited.
fn cache_for(days: u16) -> Option<Duration> {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    (days > 0).then(|| DAY * u32::from(days))
}

impl ApiListener {
    /// Binds the listener for clients, and prints its address. Rejects an address that other hosts
    /// can reach if no API key exists.
    async fn open(
        address: SocketAddr,
        options: &ServeOptions,
        home: &Home,
        keys: &Keys,
    ) -> anyhow::Result<Self> {
        // Check the keys before the address is bound, so that no client connects without a key.
        let key_file = check_keys(address, home, keys)?;
        let tls = tls(&options.tls, &options.domains, home)?;
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("cannot listen on {address}: choose another address with --listen")
        })?;
        let public = PublicAddress::new(&options.domains, listener.local_addr()?, tls.is_some());
        println!("listening on {}", public.url);
        if let Some(trust) = tls.as_ref().and_then(Tls::trust) {
            println!("certificate authority for clients in {}", trust.display());
        }
        if let Some(file) = key_file {
            println!("API key in {}", file.display());
        }
        // The parent process may wait for these lines.
        std::io::stdout().flush()?;
        Ok(Self {
            listener,
            tls,
            public,
        })
    }
}

/// Checks that a client of the address can have an API key. On loopback, creates a key of the owner
/// if necessary and returns the path of its file. The key itself is not printed, because standard
/// output may be stored in a journal that other users can read. On other addresses, the owner must
/// have created a key.
fn check_keys(address: SocketAddr, home: &Home, keys: &Keys) -> anyhow::Result<Option<PathBuf>> {
    if keys.is_fleet() {
        // The keys of a fleet may not be loaded yet, so they are not checked. No key is created for
        // a single host of a fleet; an existing file is only reported.
        let path = home.path().join("api-key");
        return Ok(path.exists().then_some(path));
    }
    if address.ip().is_loopback() {
        return Ok(Some(local_key(home.path(), keys)?));
    }
    if !keys.any_is_unrevoked()? {
        bail!(
            "cannot listen on {address} without an API key, because other machines can connect: create a \
             key with `jiffy key create`"
        );
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home() -> (tempfile::TempDir, Home) {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::at(dir.path()).unwrap();
        (dir, home)
    }

    #[test]
    fn listening_beyond_loopback_needs_a_key() {
        let (_dir, home) = home();
        let keys = Keys::open(home.path()).unwrap();
        let everywhere = "0.0.0.0:3000".parse().unwrap();
        let error = check_keys(everywhere, &home, &keys)
            .unwrap_err()
            .to_string();
        assert!(error.contains("jiffy key create"), "{error}");
        let local = "127.0.0.1:3000".parse().unwrap();
        let file = check_keys(local, &home, &keys).unwrap().unwrap();
        let key = std::fs::read_to_string(&file).unwrap();
        assert!(key.starts_with("e2b_"));
        // Each start returns the path of the same key.
        assert_eq!(check_keys(local, &home, &keys).unwrap(), Some(file.clone()));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), key);
        assert!(check_keys(everywhere, &home, &keys).is_ok());
    }
}
