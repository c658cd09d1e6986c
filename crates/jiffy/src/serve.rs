//! `jiffy serve`: the daemon that owns the sandboxes of a data directory.
//!
//! It answers one and the same API (`front.rs`) to everybody at `--listen`, and to its owner at
//! `<data directory>/run/jiffy.sock`.

pub mod confinement;
pub mod engine;
mod figures;
mod front;
mod guests;
mod log;
pub mod network;
mod site;
pub mod status;

use crate::cli::ServeArgs;
use crate::run::ephemeral;
use anyhow::{Context, bail};
use confinement::{ConfinementArgs, confine};
use engine::EngineArgs;
use front::Front;
use jiffy_api::Ending;
use jiffy_client::local_daemon::{self, connect, process_of};
use jiffy_client::{Client, UnknownServer};
use jiffy_host::{EngineChoice, EngineName, Host, HostEngine, HostOptions, Sandboxes};
use jiffy_image::Home;
use jiffy_net::Network;
use network::NetworkArgs;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use sd_notify::NotifyState;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Time that operations under way have to finish when the daemon ends.
const FINISH_LIMIT: Duration = Duration::from_secs(10);

/// Runs the daemon until it is told to stop.
pub fn run(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let lock = runtime.block_on(async {
        if args.stop {
            let kill_sandboxes = args.kill_sandboxes;
            stop(Ending { kill_sandboxes }).await?;
            Ok(None)
        } else {
            serve(args).await
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    // Only now is nothing of us left that could get in the next daemon's way.
    lock.map(drop)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the lock of the data directory, if it was ours.
async fn serve(args: &ServeArgs) -> anyhow::Result<Option<Flock<File>>> {
    let began = Instant::now();
    let site = args.site.read()?;
    let mut host = Host::open()?;
    let home = host.home().clone();
    let Some(lock) = lock(&home)? else {
        // The starting command finds the other daemon.
        eprintln!("jiffy: a daemon already runs on {}", home.path().display());
        return Ok(None);
    };
    log::begin(args.log_format, args.log_file.as_deref())?;
    raise_descriptor_limit();
    let options = HostOptions {
        warm: args.warm_pool,
        limits: args.limits(),
        site,
        ..HostOptions::default()
    };
    site::tell(&options.site, &args.network.allow_private);
    confine(&mut host, &args.confinement)?;
    let EngineChoice { engine, why } = args.engine.choose(&host);
    tracing::info!("engine: {engine}; {why}");
    // Networks of processes that were killed go when ours is opened.
    ephemeral::sweep(&home);
    let network = network::open(&args.network, home.path(), engine::card(engine))?;
    let sandboxes = open(host, options, network.clone(), engine).await?;
    let stopping = CancellationToken::new();
    let (tell_stop, mut stopped) = mpsc::channel(1);
    let stop = move |how| {
        // A second one finds the first still waiting.
        let _ = tell_stop.try_send(how);
    };
    let front = Front::open(args, &home, sandboxes.clone(), network.clone(), began, stop).await?;
    let path = local_daemon::socket(&home);
    let front = front.serve(listen(&path)?, stopping.clone());
    let front = tokio::spawn(front);
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
    let asked = loop {
        tokio::select! {
            _ = interrupt.recv() => break Ending::default(),
            _ = terminate.recv() => break Ending::default(),
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
        sandboxes.finish(FINISH_LIMIT).await;
        // Streams into them end with them.
        sandboxes.stop_all().await;
    }
    // It has ended, in whatever way.
    let _ = front.await;
    sandboxes.finish(FINISH_LIMIT).await;
    if !asked.kill_sandboxes {
        let running = sandboxes.kept();
        tracing::info!(
            running,
            "sandboxes run on without a daemon; the next one takes them over"
        );
    }
    let gone = tokio::time::timeout(FINISH_LIMIT, sandboxes.close()).await;
    if gone.is_err() {
        tracing::warn!("what waited in warm pools takes too long to end, and is left to itself");
    }
    network::close(network).await;
    tracing::info!("ended");
    Ok(Some(lock))
}

/// The sandboxes of `host`, those that ran on without a daemon among them. Needs its lock.
async fn open(
    host: Host,
    options: HostOptions,
    network: Option<Network>,
    engine: EngineName,
) -> anyhow::Result<Sandboxes<HostEngine>> {
    let journal = host.home().path().join("state.db");
    let engine = HostEngine::open(host, network, engine).await?;
    Ok(Sandboxes::open(engine, &journal, options).await?)
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

/// One daemon for one data directory: the lock goes with the process that holds it.
fn lock(home: &Home) -> anyhow::Result<Option<Flock<File>>> {
    let path = home.path().join("locks").join("daemon");
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

/// Ends the daemon that runs, if one does, and returns when it is gone.
pub async fn stop(how: Ending) -> anyhow::Result<()> {
    let home = Home::locate()?;
    let Some(stream) = connect(&home).await else {
        return match how.kill_sandboxes {
            true => kill_sandboxes(&home).await,
            false => Ok(()),
        };
    };
    let process = process_of(&stream);
    let client = Client::over(&home, stream).await?;
    let told: anyhow::Result<()> = client.call(hyper::Method::POST, "/host/stop", &how).await;
    let another_version = match told {
        Ok(()) => false,
        // One of another version still understands a signal.
        Err(e) if e.is::<UnknownServer>() => {
            let (pid, _) = process.ok_or(e)?;
            kill(pid, Signal::SIGTERM)?;
            true
        }
        Err(e) => return Err(e),
    };
    while lock(&home)?.is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    match another_version && how.kill_sandboxes {
        true => kill_sandboxes(&home).await,
        false => Ok(()),
    }
}

/// Ends the sandboxes that ran on without a daemon.
async fn kill_sandboxes(home: &Home) -> anyhow::Result<()> {
    // One that is going cannot be reached any more, and removes what nobody uses of the network
    // before it lets go of the lock.
    let limit = Instant::now() + FINISH_LIMIT;
    let _lock = loop {
        match lock(home)? {
            Some(lock) => break lock,
            None if Instant::now() < limit => tokio::time::sleep(Duration::from_millis(5)).await,
            None => bail!("a daemon is just coming up or going: try again"),
        }
    };
    // Their network slots are removed with them.
    let mut host = Host::open()?;
    let engine = EngineArgs::default().choose(&host).engine;
    let network = network::open(&NetworkArgs::default(), home.path(), engine::card(engine))?;
    confine(&mut host, &ConfinementArgs::default())?;
    let sandboxes = open(host, HostOptions::default(), network.clone(), engine).await?;
    sandboxes.stop_all().await;
    sandboxes.close().await;
    network::close(network).await;
    Ok(())
}
