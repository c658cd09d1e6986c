//! `jiffy serve`: the daemon that owns the sandboxes of a data directory.
//!
//! It listens on `<data directory>/run/jiffy.sock`, which only its owner can open, and speaks HTTP/1.1 with JSON. This interface is
//! for the commands of the same version; what it does is `jiffy_host::Sandboxes`.

mod connect;
pub mod routes;

use crate::cli::ServeArgs;
use crate::daemon::{Daemon, socket};
use anyhow::Context;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use jiffy_host::{Host, MicroVmEngine, Options, Sandboxes};
use jiffy_image::Home;
use nix::fcntl::{Flock, FlockArg};
use routes::Routes;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// Runs the daemon until it is told to stop.
pub fn run(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        if args.stop {
            stop().await
        } else {
            serve(args).await
        }
    })?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(ExitCode::SUCCESS)
}

async fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    let host = Host::open()?;
    let home = host.home().clone();
    let Some(_lock) = lock(&home)? else {
        // Whoever started us finds the other one.
        eprintln!("jiffy: a daemon already runs on {}", home.path().display());
        return Ok(());
    };
    let options = Options {
        warm: args.warm_pool,
    };
    let engine = MicroVmEngine::new(host)?;
    let sandboxes = Sandboxes::open(engine, &home.path().join("state.db"), options)?;
    let path = socket(&home);
    let listener = listen(&path)?;
    let (tell_stop, mut stopped) = mpsc::channel(1);
    let routes = Routes::new(sandboxes.clone(), tell_stop);
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    // A terminal that closes is nothing to a daemon.
    let mut hang_up = signal(SignalKind::hangup())?;
    loop {
        tokio::select! {
            connection = listener.accept() => match connection {
                Ok((stream, _)) => {
                    let routes = routes.clone();
                    tokio::spawn(async move {
                        let service = service_fn(move |request| routes.clone().answer(request));
                        // A client that breaks off is its own affair.
                        let _ = http1::Builder::new()
                            .serve_connection(TokioIo::new(stream), service)
                            .with_upgrades()
                            .await;
                    });
                }
                Err(e) => {
                    eprintln!("jiffy: cannot accept a connection: {e}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            _ = stopped.recv() => break,
            _ = hang_up.recv() => {}
        }
    }
    drop(listener);
    let _ = fs::remove_file(&path);
    sandboxes.stop_all().await;
    Ok(())
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

async fn stop() -> anyhow::Result<()> {
    let home = Home::locate()?;
    let Some(daemon) = Daemon::find(&home).await else {
        return Ok(());
    };
    let () = daemon.call(hyper::Method::POST, "/stop", &()).await?;
    while lock(&home)?.is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}
