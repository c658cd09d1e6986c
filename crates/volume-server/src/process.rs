//! Process that serves one volume: accepts sessions on a socket that the daemon created.

mod confine;
mod control;
mod seccomp;
mod streams;

pub use control::{ServerWatch, open_session, spawn, stop, watch, write_image};

use crate::attributes::Time;
use crate::usage::Quota;
use crate::volume::Volume;
use control::{Accepted, Watches};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use streams::Streams;

/// First argument of a program that serves a volume. The second argument is a [`ServerSettings`] in
/// JSON. Standard input is the listening socket.
pub const VOLUME_SERVER_ARGUMENT: &str = "--as-volume-server";

/// Time without sessions after which the process exits.
const LINGER: Duration = Duration::from_secs(10);

/// Settings of the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerSettings {
    /// Directory of the volume.
    pub directory: PathBuf,
    /// Maximum number of bytes.
    pub bytes: u64,
    /// Maximum number of nodes.
    pub nodes: u64,
}

/// Main function of the process. Must be called while the process is single-threaded.
pub fn main() -> ExitCode {
    let _ = tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(false)
        .try_init();
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!(error = %e, "the server of a volume exited");
            ExitCode::FAILURE
        }
    }
}

/// Reads the settings, confines this process, and serves clients.
fn run() -> Result<(), Box<dyn Error>> {
    let settings = std::env::args().nth(2).unwrap_or_default();
    let mut settings: ServerSettings = serde_json::from_str(&settings)?;
    // The new root has the directory at this path, without links.
    settings.directory = std::fs::canonicalize(&settings.directory)?;
    // Leave the session of the daemon's terminal, whose signals (Ctrl-C) must not stop the server:
    // sandboxes use the volume, and outlive the daemon.
    let _ = nix::unistd::setsid();
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    let listener = UnixListener::from(socket);
    confine::confine(&settings)?;
    let quota = Quota {
        bytes: settings.bytes,
        nodes: settings.nodes,
    };
    let volume = Volume::open(&settings.directory, quota)?;
    serve(&listener, &Streams::new(Arc::new(volume)))?;
    Ok(())
}

/// Accepts sessions until none exists for [`LINGER`].
fn serve(listener: &UnixListener, streams: &Streams) -> io::Result<()> {
    let timeout = PollTimeout::try_from(LINGER).unwrap_or(PollTimeout::MAX);
    // The present time is a number that no other process of this volume has.
    let mut watches = Watches::new(Time::now().0.unsigned_abs().max(1));
    loop {
        let mut waited = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        let ready = match poll(&mut waited, timeout) {
            Err(nix::errno::Errno::EINTR) => continue,
            other => other?,
        };
        if ready == 0 {
            if streams.count() == 0 {
                streams.finish();
                return Ok(());
            }
            continue;
        }
        let (connection, _) = listener.accept()?;
        match control::accept(&connection, streams) {
            Ok(Accepted::Session) => {}
            Ok(Accepted::Image(image)) => streams.write_image(image, connection),
            // Clients may have locks, so the marker of locks (`Streams::finish`) is not removed.
            Ok(Accepted::Stop) => return Ok(()),
            Ok(Accepted::Watch) => {
                if let Err(e) = watches.add(connection) {
                    tracing::warn!(error = %e, "cannot report the exit of the volume's server");
                }
            }
            Err(e) => tracing::warn!(error = %e, "cannot start a session of the volume"),
        }
    }
}

/// Serves the volume in `directory` on a thread without confinement, for tests.
pub fn serve_on_thread(settings: &ServerSettings, listener: UnixListener) -> io::Result<()> {
    let quota = Quota {
        bytes: settings.bytes,
        nodes: settings.nodes,
    };
    let volume = Volume::open(&settings.directory, quota).map_err(io::Error::other)?;
    let streams = Streams::new(Arc::new(volume));
    std::thread::Builder::new()
        .name("volume".to_owned())
        .spawn(move || serve(&listener, &streams))?;
    Ok(())
}
