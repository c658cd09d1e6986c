//! Main function of the daemon: opens all components, serves requests, and shuts down in order.
//!
//! A *member* is a host of the fleet. The *head* of a sandbox is the record in the store that
//! decides which host of a fleet may run the sandbox. The *journal* is the database of the daemon
//! with the records of sandboxes and snapshots. A *slot* is a network namespace with its devices
//! and rules. Slots are prepared in advance, and each is assigned to one guest. A daemon *adopts*
//! the guests that continued to run while no daemon ran. A *spare* is a VMM process that the daemon
//! starts in advance for the next guest.

use crate::api_server::{ApiServer, HostParts};
use crate::confinement::confine;
use crate::local_daemon;
use crate::traces::TraceExport;
use crate::volume_mounter::HostVolumeMounter;
use crate::webhook_connector::WebhookConnector;
use crate::{ServeOptions, engine, fleet, functions, internal, log, network, site, store};
use anyhow::{Context, bail};
use jiffy_api_types::StopHost;
use jiffy_egress_proxy::SocksConnector;
use jiffy_engine_api::EngineName;
use jiffy_engines::{EngineChoice, Host, open_engines};
use jiffy_event_log::{AuditLog, EventFeed};
use jiffy_header_proxy::HeaderProxy;
use jiffy_identity::TokenIssuer;
use jiffy_image::{Home, Reference};
use jiffy_network::{HeaderInjector, Network};
use jiffy_sandbox_manager::VolumeMounter;
use jiffy_sandbox_manager::{
    DirectoryLock, HostOptions, OpenedJournal, OperationError, Sandboxes, UsageLedger,
};
use jiffy_secrets::Secrets;
use jiffy_volumes::{HostVolumes, ServerProgram, StoredVolumes};
use jiffy_webhooks::Webhooks;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigHandler, Signal};
use sd_notify::NotifyState;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Maximum size of a file that the daemon and its child processes write, in bytes. This is four
/// times the maximum disk size.
const MAX_FILE_BYTES: u64 = 4 << 40;
/// Interval of checks that the data directory was not removed or replaced.
const LOCK_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Stack of a worker thread in bytes. A resume nests many futures, and programs that are compiled
/// without optimisation copy each of them several times. Only used pages occupy memory.
const WORKER_STACK_BYTES: usize = 8 << 20;
/// Timeout for in-flight operations at shutdown.
pub(crate) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for tasks of the runtime that still run at the end of the daemon.
const RUNTIME_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs the daemon until it is stopped.
pub fn run(options: ServeOptions) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .thread_stack_size(WORKER_STACK_BYTES)
        .enable_all()
        .build()?;
    let lock = runtime.block_on(serve(options));
    runtime.shutdown_timeout(RUNTIME_TIMEOUT);
    // The lock is released after the runtime is shut down, so that no task interferes with the next
    // daemon.
    lock.map(drop)
}

/// Runs the daemon and returns the lock of the data directory. `None` if another daemon holds the
/// lock.
async fn serve(options: ServeOptions) -> anyhow::Result<Option<Flock<File>>> {
    let start = Instant::now();
    let mut host = Host::open()?;
    let home = host.home().clone();
    // The lock comes first: no other file of the directory may be changed without it.
    let Some(lock) = lock(&home)? else {
        // The parent process connects to the other daemon.
        eprintln!(
            "jiffy: a daemon already runs for the data directory {}; stop it with `jiffy daemon stop`",
            home.path().display()
        );
        return Ok(None);
    };
    // The log needs the export, so the export is started first.
    let traces = options
        .otlp
        .as_deref()
        .map(TraceExport::start)
        .transpose()?;
    log::init(&options.log, traces.as_ref())?;
    let directory_lock = Arc::new(DirectoryLock::of(&lock_path(&home), &lock)?);
    // Set these limits before any child process is started, because children inherit them.
    raise_descriptor_limit();
    protect_memory();
    limit_file_size();
    // The journal is read in the background, because a large journal takes long.
    let journal = home.path().join("state.db");
    let journal = tokio::task::spawn_blocking(move || OpenedJournal::read(&journal));
    let remote = options
        .store
        .as_ref()
        .map(|shared| store::open(shared, &home))
        .transpose()?;
    // The store for the modules of functions. `remote` itself is moved into the host options below.
    let modules = remote.clone();
    // Source of memory for guests that are restored before their memory is on this host.
    let lazy = options.store.as_ref().zip(remote.as_ref());
    let lazy = lazy
        .map(|(shared, remote)| store::lazy(shared, remote, &home))
        .transpose()?;
    let member = match &remote {
        Some(remote) => fleet::Member::start(&home, remote).await?,
        None => None,
    };
    // Members of a fleet always share their sandboxes. Other hosts of a store share them by option.
    let heads = match (&options.store, &remote) {
        (Some(_), Some(_)) if let Some(member) = &member => Some(member.heads()),
        (Some(shared), Some(remote)) => store::heads(shared, remote, &home)?,
        _ => None,
    };
    // The ids of events contain a name of this host. A host without a fleet chooses the name
    // itself.
    let name = member.as_ref().map(|member| member.id().to_string());
    let events = home.path().join("events");
    let events = EventFeed::open(&events, name.as_deref(), options.events)?;
    let audit = AuditLog::open(&home.path().join("audit"), name.as_deref(), options.audit)?;
    let usage = UsageLedger::open(&home.path().join("usage.db"))?;
    let volumes = HostVolumes::open(home.path(), &home.run(), ServerProgram::Own)?;
    let volumes = Arc::new(volumes);
    let stored_volumes = match &remote {
        Some(remote) => {
            let opened = StoredVolumes::open(home.path(), volumes.clone(), remote.clone())?;
            let cleaned = opened.clone();
            // Clean up in the background: the store may not respond.
            tokio::spawn(async move {
                if let Err(e) = cleaned.clean().await {
                    tracing::warn!(error = %e, "cannot remove incomplete snapshots of volumes");
                }
            });
            Some(opened)
        }
        None => None,
    };
    let host_options = HostOptions {
        events,
        usage,
        heads,
        has_shared: store::has_shared(&home),
        warm: options.warm_pool,
        limits: options.limits,
        site: options.site.clone(),
        remote,
        lock: Some(directory_lock.clone()),
        volumes: {
            let mounter: Arc<dyn VolumeMounter> = Arc::new(HostVolumeMounter::new(volumes.clone()));
            Some(mounter)
        },
        is_stock: |template| Reference::parse(template).is_ok_and(|parsed| parsed.is_stock()),
        ..HostOptions::default()
    };
    let secrets = match &member {
        None => Secrets::open(home.path())?,
        Some(member) => member.secrets(&home)?,
    };
    let issuer = options.identity_issuer.as_ref().map(|url| {
        let (key, url) = (secrets.host_key().clone(), url.clone());
        match &member {
            None => Arc::new(TokenIssuer::new(home.path(), key, url)),
            Some(member) => member.issuer(&home, key, url),
        }
    });
    site::log_settings(&options.site, &options.network.allow_private);
    // VMMs and function processes receive these limits, so no process may start earlier.
    let cgroups = confine(&mut host, &options.confinement)?;
    host.set_cpu_level(options.cpu_level)
        .map_err(anyhow::Error::msg)?;
    if !options.cpu_level.is_host() {
        tracing::info!(level = %options.cpu_level, "set the CPU model of new microVMs");
    }
    let (connector, internal_connections) = internal::connector();
    let connector = Arc::new(connector);
    let egress = functions::egress(&options.network, connector.clone());
    let webhooks = match &member {
        None => Webhooks::open(home.path())?,
        Some(member) => member.webhooks(&home, secrets.host_key().clone())?,
    };
    let webhook_connector = Arc::new(WebhookConnector::new(egress.clone())?);
    let functions = functions::open(&host, cgroups, egress, options.functions_reset).await?;
    if let Some(remote) = modules {
        functions::share(&functions, remote).await?;
    }
    let EngineChoice {
        engine,
        why: reason,
    } = engine::choose(options.engine, &host);
    tracing::info!(%engine, reason, "selected the engine of new sandboxes");
    let nic = engine::nic_kind(engine);
    let authorities = options.site.authorities.iter();
    let authorities: Vec<String> = authorities.map(|authority| authority.pem.clone()).collect();
    let egress_connector = SocksConnector::new(Some(secrets.host_key().clone()), &authorities);
    let header_proxy = HeaderProxy::new(secrets.clone(), &authorities)?;
    let injector: Arc<dyn HeaderInjector> = Arc::new(header_proxy.with_issuer(issuer.clone()));
    let network = network::open(
        &options.network,
        home.path(),
        nic,
        Some(connector),
        Some(injector),
        Some(Arc::new(egress_connector)),
    )?;
    // Without KVM a VMM cannot start.
    if jiffy_microvm_engine::host_kvm::open().is_ok() {
        host.keep_spare_vmms(options.spare_vmms);
    }
    let engines = open_engines(host, network.clone(), engine, lazy).await?;
    let journal = async {
        let result = journal.await;
        Ok(result.map_err(|e| OperationError::Lost(e.to_string()))??)
    };
    let sandboxes = Sandboxes::open_read(engines, journal, host_options).await?;
    if let Some(traces) = &traces {
        traces.add_metrics(&sandboxes);
    }
    let stopping = CancellationToken::new();
    let (stop_sender, mut stop_receiver) = mpsc::channel(1);
    let stop = move |request| {
        // The queue holds one request. Further requests are ignored.
        let _ = stop_sender.try_send(request);
    };
    let (member, parts) = match member {
        None => (None, None),
        Some(member) => {
            let (member, parts) = member.serve(&options, &home, &sandboxes, &webhooks).await?;
            (Some(member), Some(parts))
        }
    };
    let server = ApiServer::open(
        &options,
        &home,
        HostParts {
            sandboxes: sandboxes.clone(),
            functions: functions.clone(),
            network: network.clone(),
            fleet: parts,
            audit: audit.clone(),
            secrets,
            issuer,
            volumes,
            stored_volumes,
            webhooks: webhooks.clone(),
        },
        start,
        stop,
    )
    .await?;
    // Capture signals before clients can find the daemon: a signal must not end it without a
    // shutdown.
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    // The daemon ignores SIGHUP, so that it survives a closed terminal.
    let mut hang_up = signal(SignalKind::hangup())?;
    // The socket appears last, when all requests can be served.
    let path = local_daemon::socket(&home);
    let server_task =
        tokio::spawn(server.serve(listen(&path)?, internal_connections, stopping.clone()));
    let events = sandboxes.events().clone();
    let deliveries = webhooks.run(events, jiffy_api::webhook_event, webhook_connector);
    let deliveries = tokio::spawn(deliveries);
    let version = env!("CARGO_PKG_VERSION");
    tracing::info!(
        version,
        pid = std::process::id(),
        socket = %path.display(),
        "daemon started"
    );
    // systemd waits for this notification. Without systemd, the call has no effect.
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    let mut lock_checks = tokio::time::interval(LOCK_CHECK_INTERVAL);
    let request = loop {
        tokio::select! {
            _ = lock_checks.tick() => if !directory_lock.is_in_place() {
                stopping.cancel();
                // Sandboxes cannot be reached without their data directory, and must not continue
                // to run. The files are not removed, because they may belong to another daemon.
                sandboxes.stop_all().await;
                let home = home.path().display();
                tracing::error!(%home, "data directory was removed or replaced: stopped all sandboxes");
                bail!("{home} was removed or replaced while the daemon ran");
            },
            _ = interrupt.recv() => break StopHost::default(),
            _ = terminate.recv() => break StopHost::default(),
            request = stop_receiver.recv() => break request.unwrap_or_default(),
            _ = hang_up.recv() => {}
        }
    };
    // New clients cannot connect any longer. Requests of connected clients are still served.
    let _ = fs::remove_file(&path);
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    tracing::info!("shutting down, waiting for in-flight operations");
    stopping.cancel();
    // A client requested to kill the sandboxes, which then do not outlive the daemon.
    if request.kill_sandboxes {
        sandboxes.finish(SHUTDOWN_TIMEOUT).await;
        // Streams of clients to sandboxes end with the sandboxes.
        sandboxes.stop_all().await;
        functions.stop_all().await;
    }
    // Ignore an error of the task: the daemon exits anyway.
    let _ = server_task.await;
    // Deliveries in flight are sent again by the next daemon.
    deliveries.abort();
    // Rejected calls are counted per period. Write all counts, also of periods that are not over.
    audit.write_counted(true);
    if let Some(member) = member {
        member.stop().await;
    }
    sandboxes.finish(SHUTDOWN_TIMEOUT).await;
    sandboxes.write_usage().await;
    // Unless the request kills the sandboxes, they continue to run, and the next daemon adopts
    // them.
    if !request.kill_sandboxes {
        functions.detach_all().await;
        let running = sandboxes.figures().running_guests();
        tracing::info!(
            running,
            "sandboxes continue to run and will be adopted by the next daemon"
        );
    }
    let result = tokio::time::timeout(SHUTDOWN_TIMEOUT, sandboxes.close()).await;
    if result.is_err() {
        tracing::warn!("timed out stopping warm-pool guests");
    }
    // The guests of the warm pool, which were started in advance, use network slots. The network is
    // therefore closed after them.
    network::close(network).await;
    if let Some(traces) = traces {
        // Finish the export last, so that the spans of the shutdown are exported too.
        traces.finish().await;
    }
    tracing::info!("daemon stopped");
    Ok(Some(lock))
}

/// Opens the sandboxes of `host`, including sandboxes that continued to run without a daemon. The
/// caller must hold the lock of the data directory.
pub(crate) async fn open_sandboxes(
    host: Host,
    network: Option<Network>,
    engine: EngineName,
) -> anyhow::Result<Sandboxes> {
    let journal = host.home().path().join("state.db");
    let engines = open_engines(host, network, engine, None).await?;
    Ok(Sandboxes::open(engines, &journal, HostOptions::default()).await?)
}

/// Raises the limit of file descriptors, because each sandbox uses several. The default soft limit
/// of 1,024 protects programs that use select(2), which this program does not.
pub(crate) fn raise_descriptor_limit() {
    let result = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(e) = result {
        tracing::warn!(error = %e, "cannot raise the file descriptor limit");
    }
}

/// Keeps master keys and API keys out of core files of this process and its children, and denies
/// access by debuggers. The latter applies to root only: processes of an unprivileged user identify
/// each other through `/proc`, which non-dumpable processes do not permit.
pub(crate) fn protect_memory() {
    if let Err(e) = setrlimit(Resource::RLIMIT_CORE, 0, 0) {
        tracing::warn!(error = %e, "cannot disable core files");
    }
    if jiffy_rootless::is_host_root()
        && let Err(e) = prctl::set_dumpable(false)
    {
        tracing::warn!(error = %e, "cannot disable access by debuggers");
    }
}

/// Limits the size of files that this process and its children write. Confined processes have lower
/// limits.
fn limit_file_size() {
    // With the signal ignored, writes beyond the limit fail with an error.
    // SAFETY: the signal is ignored, so that no handler runs.
    let ignored = unsafe { nix::sys::signal::signal(Signal::SIGXFSZ, SigHandler::SigIgn) };
    let result = ignored.and_then(|_| {
        let (_, hard) = getrlimit(Resource::RLIMIT_FSIZE)?;
        let limit = MAX_FILE_BYTES.min(hard);
        setrlimit(Resource::RLIMIT_FSIZE, limit, limit)
    });
    if let Err(e) = result {
        tracing::warn!(error = %e, "cannot limit the file size");
    }
}

fn lock_path(home: &Home) -> PathBuf {
    home.path().join("locks").join("daemon")
}

/// Acquires the lock of the data directory, which ensures that at most one daemon uses the
/// directory. The kernel releases the lock when the process exits. `None` if another process holds
/// the lock.
pub(crate) fn lock(home: &Home) -> anyhow::Result<Option<Flock<File>>> {
    let path = lock_path(home);
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, e)) => Err(e).with_context(|| format!("cannot lock {}", path.display())),
    }
}

/// Listens on the socket `path`, which appears atomically with its permissions.
fn listen(path: &Path) -> anyhow::Result<UnixListener> {
    let new = path.with_extension("new");
    let context = || format!("cannot listen on {}", path.display());
    // A daemon that crashed here has left the file.
    let _ = fs::remove_file(&new);
    // Bind the socket under another name and rename it after the change of its permissions: clients
    // must not find a socket with the default permissions.
    let listener = UnixListener::bind(&new).with_context(context)?;
    fs::set_permissions(&new, Permissions::from_mode(0o600)).with_context(context)?;
    fs::rename(&new, path).with_context(context)?;
    Ok(listener)
}
