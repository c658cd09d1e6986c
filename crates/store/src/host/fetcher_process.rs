//! [`FetcherProcess`]: the daemon's side of the fetcher: starts the process, and restarts it after
//! an exit.
//!
//! The *fetcher* is the process of this host that downloads missing memory of guests from the
//! store. A *grant* is a file that permits one VMM to read the layers of its snapshot.

use crate::host::fetch_grants::GrantDirectory;
use crate::host::fetcher::FetcherLock;
use crate::host::fetcher::{FETCHER_ARGUMENT, FetcherSettings};
use crate::host::{RemoteError, RemoteSettings};
use jiffy_confinement::in_new_pid_namespace;
use nix::unistd::geteuid;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Log file of the fetcher in the runtime directory.
pub const FETCHER_LOG: &str = "fetcher.log";
/// Size in bytes above which the log is removed at the next start.
const MAX_LOG_BYTES: u64 = 4 << 20;
/// Interval between checks whether the fetcher has exited.
pub const FETCHER_WATCH_INTERVAL: Duration = Duration::from_millis(250);
/// Minimum time between two starts of the fetcher.
const RESTART_DELAY: Duration = Duration::from_secs(1);

/// Fetcher of one data directory. It runs while grants exist and outlives this process.
#[derive(Debug)]
pub struct FetcherProcess {
    program: PathBuf,
    settings: FetcherSettings,
    grants: GrantDirectory,
    lock: FetcherLock,
    child: Mutex<StartedChild>,
}

/// Fetcher that this process started last, and its start time.
#[derive(Debug, Default)]
struct StartedChild(Option<(Child, Instant)>);

impl FetcherProcess {
    /// Manages the fetcher for grants in `run`. `program` is started with [`FETCHER_ARGUMENT`]. A
    /// fetcher that an earlier daemon started continues to run.
    pub fn new(program: PathBuf, store: &RemoteSettings, run: &Path) -> Result<Self, RemoteError> {
        let grants = GrantDirectory::open(run)?;
        grants.remove_unfinished()?;
        let lock = FetcherLock::open(&grants).map_err(RemoteError::io(grants.path()))?;
        Ok(Self {
            program,
            settings: FetcherSettings::new(store, run),
            grants,
            lock,
            child: Mutex::default(),
        })
    }

    /// Returns the directory of its grants.
    pub fn grants(&self) -> &GrantDirectory {
        &self.grants
    }

    /// Starts the fetcher if grants exist and no fetcher runs. Must be called after writing a grant
    /// and every [`FETCHER_WATCH_INTERVAL`].
    pub fn ensure(&self) -> Result<(), RemoteError> {
        let mut child = self.child.lock().unwrap_or_else(|e| e.into_inner());
        let running = match &mut child.0 {
            Some((process, _)) => matches!(process.try_wait(), Ok(None)),
            None => false,
        };
        if running || self.lock.is_taken() || self.grants.ids()?.is_empty() {
            return Ok(());
        }
        let last = child.0.as_ref().map(|(_, started)| started.elapsed());
        if last.is_some_and(|since| since < RESTART_DELAY) {
            return Ok(());
        }
        let started = self.start().map_err(RemoteError::io(&self.program))?;
        child.0 = Some((started, Instant::now()));
        Ok(())
    }

    /// Starts the fetcher. As root, it has its own PID namespace.
    fn start(&self) -> io::Result<Child> {
        let log = self.settings.run.join(FETCHER_LOG);
        if fs::metadata(&log).is_ok_and(|log| log.len() > MAX_LOG_BYTES) {
            fs::remove_file(&log)?;
        }
        let log = File::options().append(true).create(true).open(&log)?;
        let mut command = Command::new(&self.program);
        command
            .arg(FETCHER_ARGUMENT)
            .arg(serde_json::to_string(&self.settings)?)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        if geteuid().is_root() {
            in_new_pid_namespace(|| command.spawn())
        } else {
            command.spawn()
        }
    }
}
