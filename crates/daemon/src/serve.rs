//! Life of a daemon, from its lock to its end.

use crate::api_server::ApiServer;
use crate::confinement::confine;
use crate::local_daemon;
use crate::traces::TraceExport;
use crate::{ServeOptions, engine, functions, internal, log, network, site, store};
use anyhow::{Context, bail};
use jiffy_api_types::StopHost;
use jiffy_engine_api::EngineName;
use jiffy_engines::{EngineChoice, Host, open_engines};
use jiffy_image::{Home, Reference};
use jiffy_network::Network;
use jiffy_sandbox_manager::{DirectoryLock, HostOptions, OpenedJournal, OperationError, Sandboxes};
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

/// Maximum length in bytes of a file that the daemon and its processes write: four times that of
/// the largest disk.
const MAX_FILE_BYTES: u64 = 4 << 40;
/// Time between two looks at whether the data directory is still ours.
const LOCK_LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// Time that operations under way have to finish when the daemon ends.
pub(crate) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the daemon until it is told to stop.
pub fn run(options: ServeOptions) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let lock = runtime.block_on(serve(options));
    runtime.shutdown_timeout(Duration::from_secs(1));
    // Only now is nothing of us left that could get in the next daemon's way.
    lock.map(drop)
}

/// Returns the lock of the data directory, if it was ours.
async fn serve(options: ServeOptions) -> anyhow::Result<Option<Flock<File>>> {
    let began = Instant::now();
    let mut host = Host::open()?;
    let home = host.home().clone();
    let Some(lock) = lock(&home)? else {
        // The starting command finds the other daemon.
        eprintln!("jiffy: a daemon already runs on {}", home.path().display());
        return Ok(None);
    };
    let traces = options.otlp.as_deref().map(TraceExport::start);
    let traces = traces.transpose()?;
    log::init(&options.log, traces.as_ref())?;
    let held = Arc::new(DirectoryLock::of(&lock_path(&home), &lock)?);
    raise_descriptor_limit();
    protect_memory();
    limit_file_size();
    // Beside everything else: it takes long where there is much.
    let journal = home.path().join("state.db");
    let journal = tokio::task::spawn_blocking(move || OpenedJournal::read(&journal));
    let remote = options.store.as_ref();
    let remote = remote
        .map(|shared| store::open(shared, &home))
        .transpose()?;
    let modules = remote.clone();
    let lazy = options.store.as_ref().zip(remote.as_ref());
    let lazy = lazy.map(|(shared, remote)| store::lazy(shared, remote, &home));
    let lazy = lazy.transpose()?;
    let host_options = HostOptions {
        warm: options.warm_pool,
        limits: options.limits,
        site: options.site.clone(),
        remote,
        lock: Some(held.clone()),
        is_stock: |template| Reference::parse(template).is_ok_and(|parsed| parsed.is_stock()),
        ..HostOptions::default()
    };
    site::log_settings(&options.site, &options.network.allow_private);
    let cgroups = confine(&mut host, &options.confinement)?;
    host.set_cpu_level(options.cpu_level)
        .map_err(anyhow::Error::msg)?;
    if !options.cpu_level.is_host() {
        tracing::info!("processor level of new microVMs: {}", options.cpu_level);
    }
    let (connector, inside) = internal::connector();
    let connector = Arc::new(connector);
    let egress = functions::egress(&options.network, connector.clone());
    let functions = functions::open(&host, cgroups, egress, options.functions_reset).await?;
    if let Some(remote) = modules {
        functions::share(&functions, remote).await?;
    }
    let EngineChoice { engine, why } = engine::choose(options.engine, &host);
    tracing::info!("engine: {engine}; {why}");
    let nic = engine::nic_kind(engine);
    let network = network::open(&options.network, home.path(), nic, Some(connector))?;
    if jiffy_microvm_engine::host_kvm::open().is_ok() {
        host.keep_spare_vmms(options.spare_vmms);
    }
    let engines = open_engines(host, network.clone(), engine, lazy).await?;
    let journal = async {
        let read = journal.await;
        Ok(read.map_err(|e| OperationError::Lost(e.to_string()))??)
    };
    let sandboxes = Sandboxes::open_read(engines, journal, host_options).await?;
    if let Some(traces) = &traces {
        traces.show(&sandboxes);
    }
    let stopping = CancellationToken::new();
    let (tell_stop, mut stopped) = mpsc::channel(1);
    let stop = move |how| {
        // A second one finds the first still waiting.
        let _ = tell_stop.try_send(how);
    };
    let server = ApiServer::open(
        &options,
        &home,
        sandboxes.clone(),
        functions.clone(),
        network.clone(),
        began,
        stop,
    );
    let server = server.await?;
    let path = local_daemon::socket(&home);
    let serving = tokio::spawn(server.serve(listen(&path)?, inside, stopping.clone()));
    let version = env!("CARGO_PKG_VERSION");
    tracing::info!(
        version,
        pid = std::process::id(),
        "listening at {}",
        path.display()
    );
    // systemd waits for this notification; without it there is no receiver.
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    // A terminal that closes is nothing to a daemon.
    let mut hang_up = signal(SignalKind::hangup())?;
    let mut looks = tokio::time::interval(LOCK_LOOK_INTERVAL);
    let asked = loop {
        tokio::select! {
            _ = looks.tick() => if !held.is_in_place() {
                stopping.cancel();
                // Out of everybody's reach they would run on. Files at the paths of this daemon
                // may be another's.
                sandboxes.stop_all().await;
                let home = home.path().display();
                tracing::error!("{home} was removed or replaced: ended, and all sandboxes with it");
                bail!("{home} was removed or replaced while the daemon ran");
            },
            _ = interrupt.recv() => break StopHost::default(),
            _ = terminate.recv() => break StopHost::default(),
            asked = stopped.recv() => break asked.unwrap_or_default(),
            _ = hang_up.recv() => {}
        }
    };
    // New clients do not find it any more; connected ones are still answered.
    let _ = fs::remove_file(&path);
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    tracing::info!("ending: what is under way may finish");
    stopping.cancel();
    if asked.kill_sandboxes {
        sandboxes.finish(SHUTDOWN_TIMEOUT).await;
        // Streams into them end with them.
        sandboxes.stop_all().await;
        functions.stop_all().await;
    }
    // It has ended, in whatever way.
    let _ = serving.await;
    sandboxes.finish(SHUTDOWN_TIMEOUT).await;
    if !asked.kill_sandboxes {
        functions.leave().await;
        let running = sandboxes.figures().kept();
        tracing::info!(
            running,
            "sandboxes run on without a daemon; the next one takes them over"
        );
    }
    let gone = tokio::time::timeout(SHUTDOWN_TIMEOUT, sandboxes.close()).await;
    if gone.is_err() {
        tracing::warn!("what waited in warm pools takes too long to end, and is left to itself");
    }
    network::close(network).await;
    if let Some(traces) = traces {
        traces.finish().await;
    }
    tracing::info!("ended");
    Ok(Some(lock))
}

/// The sandboxes of `host`, those that ran on without a daemon among them. Needs its lock.
pub(crate) async fn open(
    host: Host,
    network: Option<Network>,
    engine: EngineName,
) -> anyhow::Result<Sandboxes> {
    let journal = host.home().path().join("state.db");
    let engines = open_engines(host, network, engine, None).await?;
    Ok(Sandboxes::open(engines, &journal, HostOptions::default()).await?)
}

/// Each sandbox takes a few descriptors, and the usual limit of 1,024 is for programs that call
/// select(2), which we do not.
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(e) = raised {
        tracing::warn!("cannot raise the limit of descriptors: {e}");
    }
}

/// Keeps master keys and API keys out of core files, here and in all processes that this one
/// starts, and out of reach of debuggers. Root only: processes of an ordinary user find each other
/// by `/proc`, which this would hide from them.
fn protect_memory() {
    if let Err(e) = setrlimit(Resource::RLIMIT_CORE, 0, 0) {
        tracing::warn!(error = %e, "cannot turn core files off");
    }
    if jiffy_rootless::is_host_root()
        && let Err(e) = prctl::set_dumpable(false)
    {
        tracing::warn!(error = %e, "cannot turn debugging off");
    }
}

/// Limits the length of files that this process and its children write. Confined processes have
/// lower limits of their own.
fn limit_file_size() {
    // A longer write then fails, like one to a full disk.
    // SAFETY: no handler is installed that could run.
    let ignored = unsafe { nix::sys::signal::signal(Signal::SIGXFSZ, SigHandler::SigIgn) };
    let limited = ignored.and_then(|_| {
        let (_, hard) = getrlimit(Resource::RLIMIT_FSIZE)?;
        let limit = MAX_FILE_BYTES.min(hard);
        setrlimit(Resource::RLIMIT_FSIZE, limit, limit)
    });
    if let Err(e) = limited {
        tracing::warn!(error = %e, "cannot limit the length of files");
    }
}

fn lock_path(home: &Home) -> PathBuf {
    home.path().join("locks").join("daemon")
}

/// One daemon for one data directory: the lock goes with the process that holds it.
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

/// Listens at `path`, which appears complete and with its permissions.
fn listen(path: &Path) -> anyhow::Result<UnixListener> {
    let new = path.with_extension("new");
    let failed = || format!("cannot listen on {}", path.display());
    let _ = fs::remove_file(&new);
    let listener = UnixListener::bind(&new).with_context(failed)?;
    fs::set_permissions(&new, Permissions::from_mode(0o600)).with_context(failed)?;
    fs::rename(&new, path).with_context(failed)?;
    Ok(listener)
}
