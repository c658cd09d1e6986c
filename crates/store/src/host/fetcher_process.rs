//! The fetcher as the daemon starts it.

use crate::host::fetch_grants::GrantDirectory;
use crate::host::fetcher::FetcherLock;
use crate::host::fetcher::{FETCHER_ARGUMENT, FetcherSettings};
use crate::host::{RemoteError, RemoteSettings};
use nix::errno::Errno;
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::geteuid;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// File that the fetcher's messages go to, in the directory of running things.
pub const FETCHER_LOG: &str = "fetcher.log";
/// Size in bytes from which on the log is begun anew.
const MAX_LOG_BYTES: u64 = 4 << 20;
/// Time between two looks at a fetcher that may have died.
pub const FETCHER_WATCH_INTERVAL: Duration = Duration::from_millis(250);
/// Least time between two starts of a fetcher that does not stay.
const RESTART_DELAY: Duration = Duration::from_secs(1);

/// The fetcher of one data directory. It runs while there are grants, and outlives this process.
#[derive(Debug)]
pub struct FetcherProcess {
    program: PathBuf,
    settings: FetcherSettings,
    grants: GrantDirectory,
    lock: FetcherLock,
    child: Mutex<StartedChild>,
}

/// Fetcher that this process started last.
#[derive(Debug, Default)]
struct StartedChild(Option<(Child, Instant)>);

impl FetcherProcess {
    /// The fetcher for grants in `run`, run by `program` with [`FETCHER_ARGUMENT`]. One that an
    /// earlier daemon started goes on.
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

    /// Its grants.
    pub fn grants(&self) -> &GrantDirectory {
        &self.grants
    }

    /// Starts it if there are grants and it does not run. To be called after a grant was written,
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
        match geteuid().is_root() {
            true => in_new_pid_namespace(|| command.spawn()),
            false => command.spawn(),
        }
    }
}

/// Runs `start` on this thread; the one process that it starts is process 1 of a new PID namespace.
fn in_new_pid_namespace<T>(start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let own = File::open("/proc/self/ns/pid")?;
    match unshare(CloneFlags::CLONE_NEWPID) {
        // Root of a container without the right to do so.
        Err(Errno::EPERM) => return start(),
        other => other?,
    }
    let started = start();
    // Otherwise the thread could not start further processes.
    setns(&own, CloneFlags::CLONE_NEWPID)?;
    started
}
