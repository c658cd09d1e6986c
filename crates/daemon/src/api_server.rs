//! Listeners of the daemon: control plane and gateway, on the owner's socket and on an address.

use crate::direct_connections::DirectConnections;
use crate::direct_listener::{self, DirectListener};
use crate::functions::{self, FunctionGateway};
use crate::gateway_sandboxes::GatewaySandboxes;
use crate::metrics::{self, MetricsServer};
use crate::status::daemon_status;
use crate::traces::api_span;
use crate::{ServeOptions, TlsOptions};
use anyhow::{Context, bail};
use hyper::Request;
use hyper::header::HeaderValue;
use jiffy_api::{
    App, AutoResume, Caller, ClientAddress, FunctionHost, Keys, end_revoked, local_key,
};
use jiffy_api_types::StopHost;
use jiffy_client::{VERSION, VERSION_HEADER};
use jiffy_function_manager::Functions;
use jiffy_gateway::body::Body;
use jiffy_gateway::{
    ClientRequestBody, ControlPlane, FunctionLabel, Gateway, GatewayConfig, InternalConnection,
    KnownCaller, LinkSigner, Peer, RequestId, Tls,
};
use jiffy_image::{Home, Templates};
use jiffy_network::Network;
use jiffy_proto::internal::InternalOrigin;
use jiffy_registry_pull::Registries;
use jiffy_sandbox_manager::Sandboxes;
use jiffy_template_builder::Builder;
use nix::unistd::geteuid;
use std::fs::File;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

/// File with the key that signs preview links.
const SIGNING_KEY_FILE: &str = "preview-key";

/// Control plane and gateway, ready to serve the owner's socket and, if that was asked for, an
/// address.
pub struct ApiServer {
    app: App,
    gateway: Gateway<GatewaySandboxes, ControlPlaneRouter>,
    address: Option<ApiListener>,
    direct: Option<DirectListener>,
    metrics: Option<MetricsServer>,
}

/// An address that is listened at.
struct ApiListener {
    listener: TcpListener,
    tls: Option<Tls>,
    public: PublicAddress,
}

/// The control plane, and functions by host name. Clients of the owner's socket are the owner; of
/// others it gets the address, unless they come from inside.
#[derive(Clone)]
pub struct ControlPlaneRouter {
    control: axum::Router,
    functions: axum::Router,
}

impl ControlPlane for ControlPlaneRouter {
    async fn answer(&mut self, mut request: Request<ClientRequestBody>) -> hyper::Response<Body> {
        match request.extensions().get::<Peer>().copied() {
            Some(Peer { local: true, .. }) => {
                request.extensions_mut().insert(Caller::Owner);
            }
            // Its origin is among the extensions; the address that stands for it is no client's.
            Some(_) if request.extensions().get::<InternalOrigin>().is_some() => {}
            Some(peer) => {
                request.extensions_mut().insert(ClientAddress(peer.ip));
            }
            None => {}
        }
        let label = request.extensions_mut().remove::<FunctionLabel>();
        let mut answer = match label {
            Some(FunctionLabel(label)) => {
                request.extensions_mut().insert(FunctionHost(label));
                return known_if_answered(self.functions.answer(request).await);
            }
            None => {
                let span = api_span(&request);
                self.control.answer(request).instrument(span).await
            }
        };
        if answer.extensions().get::<Caller>().is_some() {
            answer.extensions_mut().insert(KnownCaller);
        }
        let version = HeaderValue::from_static(VERSION);
        answer.headers_mut().insert(VERSION_HEADER, version);
        answer
    }
}

/// A client that reaches a function is known, as is one that reaches a sandbox.
fn known_if_answered(mut answer: hyper::Response<Body>) -> hyper::Response<Body> {
    if answer.extensions().get::<RequestId>().is_some() {
        answer.extensions_mut().insert(KnownCaller);
    }
    answer
}

impl ApiServer {
    /// Listens as `options` say, and prints where. The daemon began at `began`; whoever may end it
    /// calls `stop`.
    pub async fn open(
        options: &ServeOptions,
        home: &Home,
        sandboxes: Sandboxes,
        functions: Functions,
        network: Option<Network>,
        began: Instant,
        stop: impl Fn(StopHost) + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        let keys = Arc::new(Keys::open(home.path())?);
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
        let public = address.as_ref().map(|address| address.public.clone());
        let url = public.as_ref().map(|public| public.url.clone());
        let signer = LinkSigner::new(&signing_key(home)?);
        let config = jiffy_api::Config {
            domain: public.as_ref().and_then(|public| public.domain.clone()),
            scheme: public.as_ref().map_or("http", |public| public.scheme),
            direct_port: direct_port.map(|address| address.port()),
            default_key_disk_mib: options.default_key_disk.mebibytes(home),
            ..jiffy_api::Config::default()
        };
        let templates = Arc::new(Templates::new(home));
        let builds = jiffy_template_builder::BuilderSettings {
            registries: Registries {
                plain_http: options.plain_http.clone(),
                allowed: options.registry_allow.clone(),
                network: network.map(|network| (network, Handle::current())),
                ..Registries::default()
            },
            at_once: options.max_builds,
            cache_for: cache_for(options.build_cache_days),
            host_keys: keys.admin_ids()?,
            ..jiffy_template_builder::BuilderSettings::default()
        };
        let builder = Builder::open(home, sandboxes.clone(), builds).await?;
        let gateway_config = GatewayConfig {
            domains: options.domains.clone(),
            allowed_hosts: options.allowed_hosts.clone(),
            ..GatewayConfig::default()
        };
        // No key has more than half of the exchanges of all.
        let share = gateway_config.limits.exchanges / 2;
        let mut app = App::new(sandboxes.clone(), keys.clone(), templates, config)
            .with_stop(stop)
            .with_builder(builder)
            .with_functions(
                functions.clone(),
                Arc::new(FunctionGateway(functions.clone())),
            )
            .with_exchange_share(u64::try_from(share).unwrap_or(u64::MAX));
        if let Some(public) = public {
            let signer = signer.clone();
            let link = move |id: &str, port, expires| public.link(&signer, id, port, expires);
            app = app.with_preview(Arc::new(link));
        }
        let about = sandboxes.clone();
        let app = app.with_about(move || daemon_status(&about, began, url.clone()));
        let (budgets, served) = (app.clone(), functions.clone());
        sandboxes.figures().show_families(move || {
            let mut families = budgets.figures();
            families.extend(functions::figures(&functions));
            families
        });
        let exchanges = AutoResume::new(app.clone());
        let guests = GatewaySandboxes::new(sandboxes.clone(), exchanges.clone(), keys.clone());
        let app = app.with_ports(Arc::new(guests.clone()));
        let shown = metrics::routes(&app, sandboxes.clone());
        let control = ControlPlaneRouter {
            control: jiffy_api::router(app.clone()).merge(shown),
            functions: jiffy_api::function_router(app.clone()),
        };
        let gateway = Gateway::new(gateway_config.clone(), guests, control, Some(signer));
        let direct = direct.map(|listener| DirectListener {
            listener,
            functions: served,
            keys,
            exchanges,
            admission: gateway.admission(),
            // The others are for the gateway's clients.
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
        })
    }

    /// Serves `local`, connections from `inside` and the address until `stopping`, then lets
    /// requests under way finish.
    pub async fn serve(
        self,
        local: UnixListener,
        inside: mpsc::Receiver<InternalConnection>,
        stopping: CancellationToken,
    ) {
        let Self {
            app,
            gateway,
            address,
            direct,
            metrics,
        } = self;
        let ending = end_revoked(app);
        let us = geteuid();
        // The socket's permissions say the same; this also holds where they were loosened.
        let may = move |uid| uid == us.as_raw() || uid == 0;
        let end = stopping.clone().cancelled_owned();
        let local = jiffy_gateway::serve_local(local, gateway.clone(), may, end);
        let end = stopping.clone().cancelled_owned();
        let inside = jiffy_gateway::serve_internal(inside, gateway.clone(), end);
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
        tokio::select! {
            _ = async { tokio::join!(local, inside, address, direct, metrics) } => {}
            () = ending => {}
        }
    }
}

fn cache_for(days: u16) -> Option<Duration> {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    (days > 0).then(|| DAY * u32::from(days))
}

impl ApiListener {
    async fn open(
        address: SocketAddr,
        options: &ServeOptions,
        home: &Home,
        keys: &Keys,
    ) -> anyhow::Result<Self> {
        let key_file = check_keys(address, home, keys)?;
        let tls = tls(options, home)?;
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("cannot listen on {address}: choose another with `--listen`")
        })?;
        let public = PublicAddress::new(&options.domains, listener.local_addr()?, tls.is_some());
        println!("listening on {}", public.url);
        if let Some(trust) = tls.as_ref().and_then(Tls::trust) {
            println!("clients trust it by the certificate in {}", trust.display());
        }
        if let Some(file) = key_file {
            println!("API key in {}", file.display());
        }
        // The starting process may wait for these lines.
        std::io::stdout().flush()?;
        Ok(Self {
            listener,
            tls,
            public,
        })
    }
}

/// Checks that clients of the address have a key to show. On loopback the owner has one: returns
/// the path of its file, never the key, since standard output may end up in a journal that others
/// read. For other addresses a key must have been created on purpose.
fn check_keys(address: SocketAddr, home: &Home, keys: &Keys) -> anyhow::Result<Option<PathBuf>> {
    if address.ip().is_loopback() {
        return Ok(Some(local_key(home.path(), keys)?));
    }
    if !keys.any_is_unrevoked()? {
        bail!(
            "there is no API key, and {address} can be reached from other machines: make one with \
             `jiffy key create` first"
        );
    }
    Ok(None)
}

fn tls(options: &ServeOptions, home: &Home) -> anyhow::Result<Option<Tls>> {
    Ok(match &options.tls {
        TlsOptions::Files { certificate, key } => Some(Tls::from_files(certificate, key)?),
        TlsOptions::Generated => {
            let directory = home.path().join("tls");
            Some(Tls::generated(&directory, &options.domains)?)
        }
        TlsOptions::Off => None,
    })
}

/// The key is made once: links hold across restarts.
fn signing_key(home: &Home) -> anyhow::Result<[u8; 32]> {
    let path = home.path().join(SIGNING_KEY_FILE);
    let failed = || format!("cannot use {}", path.display());
    let mut key = [0; 32];
    if let Ok(mut file) = File::open(&path) {
        file.read_exact(&mut key).with_context(failed)?;
        return Ok(key);
    }
    getrandom::fill(&mut key).context("the host gives no random bytes")?;
    let new = path.with_extension("new");
    let mut options = File::options();
    let mut file = options
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&new)
        .with_context(failed)?;
    file.write_all(&key).with_context(failed)?;
    file.sync_all().with_context(failed)?;
    std::fs::rename(&new, &path).with_context(failed)?;
    Ok(key)
}

/// Addresses and names under which clients reach the daemon.
#[derive(Debug, Clone)]
struct PublicAddress {
    scheme: &'static str,
    url: String,
    /// The first domain, with the port where clients must know it.
    domain: Option<String>,
}

impl PublicAddress {
    fn new(domains: &[String], address: SocketAddr, tls: bool) -> Self {
        let (scheme, usual) = if tls { ("https", 443) } else { ("http", 80) };
        let port = address.port();
        let domain = domains.first().map(|domain| {
            if port == usual {
                domain.clone()
            } else {
                format!("{domain}:{port}")
            }
        });
        Self {
            scheme,
            url: format!("{scheme}://{address}"),
            domain,
        }
    }

    /// A link that opens `port` of a sandbox until `expires`.
    fn link(&self, signer: &LinkSigner, id: &str, port: u16, expires: u64) -> String {
        if let Some(domain) = &self.domain
            && let Ok(label) = signer.label(id, port, expires)
        {
            return format!("{}://{label}.{domain}/", self.scheme);
        }
        let path = signer.path(id, port, "/", expires);
        // Ports and ids that the control plane found can be signed.
        format!("{}{}", self.url, path.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

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
        let refused = check_keys(everywhere, &home, &keys)
            .unwrap_err()
            .to_string();
        assert!(refused.contains("jiffy key create"), "{refused}");
        let local = "127.0.0.1:3000".parse().unwrap();
        let file = check_keys(local, &home, &keys).unwrap().unwrap();
        let key = std::fs::read_to_string(&file).unwrap();
        assert!(key.starts_with("e2b_"));
        // The path of the same key at each start, and never the key.
        assert_eq!(check_keys(local, &home, &keys).unwrap(), Some(file.clone()));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), key);
        assert!(check_keys(everywhere, &home, &keys).is_ok());
    }

    #[test]
    fn the_signing_key_persists_and_is_private() {
        let (_dir, home) = home();
        let key = signing_key(&home).unwrap();
        assert_ne!(key, [0; 32]);
        assert_eq!(signing_key(&home).unwrap(), key);
        let metadata = std::fs::metadata(home.path().join(SIGNING_KEY_FILE)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    }
}
