//! Main function of the fetcher, a process that the daemon starts and that outlives the daemon. It
//! is confined before it reads data from the store.
//!
//! A *grant* is a file that permits one VMM to read the layers of its snapshot.

use super::confine::confine;
use super::key_broker;
use super::service::FetchService;
use crate::DirectoryCheck;
use crate::host::fetch_grants::GrantDirectory;
use crate::host::{RemoteSettings, RemoteStore};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// First argument of a program that runs as the fetcher. The second argument is a
/// [`FetcherSettings`] in JSON.
pub const FETCHER_ARGUMENT: &str = "--as-fetcher";

/// File in the directory of grants that a running fetcher locks.
const LOCK_FILE: &str = "lock";

/// Settings of the fetcher, copied from its daemon's settings for the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetcherSettings {
    /// URL of the store.
    pub url: String,
    /// Key file.
    pub keyring: Option<PathBuf>,
    /// Data directory.
    pub home: PathBuf,
    /// Runtime directory.
    pub run: PathBuf,
    /// Maximum number of bytes on disk of the cached layers.
    pub cache_bytes: u64,
    /// Timeout in milliseconds of a request to the store.
    pub timeout_ms: u64,
}

impl FetcherSettings {
    /// Returns the settings of a fetcher for grants in `run`.
    pub fn new(store: &RemoteSettings, run: &Path) -> Self {
        Self {
            url: store.url.to_string(),
            keyring: store.keyring.clone(),
            home: store.home.clone(),
            run: run.to_owned(),
            cache_bytes: store.cache_bytes,
            timeout_ms: u64::try_from(store.timeout.as_millis()).unwrap_or(u64::MAX),
        }
    }

    fn store(&self) -> Result<RemoteSettings, Box<dyn Error>> {
        Ok(RemoteSettings {
            url: self.url.parse()?,
            keyring: self.keyring.clone(),
            home: self.home.clone(),
            cache_bytes: self.cache_bytes,
            upload_bytes_per_second: None,
            timeout: Duration::from_millis(self.timeout_ms),
        })
    }
}

/// Lock that allows one fetcher per directory. The kernel releases it when the process exits.
#[derive(Debug)]
pub(crate) struct FetcherLock(File);

impl FetcherLock {
    pub(crate) fn open(grants: &GrantDirectory) -> std::io::Result<Self> {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let path = grants.path().join(LOCK_FILE);
        options.mode(0o600).open(path).map(Self)
    }

    /// Acquires the lock. Returns false if another process holds it.
    fn take(&self) -> bool {
        fcntl(&self.0, FcntlArg::F_OFD_SETLK(&range(libc::F_WRLCK))).is_ok()
    }

    fn release(&self) {
        // Ignore the error: closing the file also releases the lock.
        let _ = fcntl(&self.0, FcntlArg::F_OFD_SETLK(&range(libc::F_UNLCK)));
    }

    /// Returns whether a process holds the lock, without acquiring it.
    pub(crate) fn is_taken(&self) -> bool {
        let mut holder = range(libc::F_WRLCK);
        let queried = fcntl(&self.0, FcntlArg::F_OFD_GETLK(&mut holder));
        queried.is_ok() && holder.l_type != libc::F_UNLCK as libc::c_short
    }
}

/// Returns a lock of the first byte of a file. `kind` is the type of the lock (fcntl(2)).
fn range(kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 1,
        l_pid: 0,
    }
}

/// Main function of the fetcher process. Must be called while the process is single-threaded.
pub fn main() -> ExitCode {
    let _ = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!(error = %e, "the fetcher exited");
            ExitCode::FAILURE
        }
    }
}

/// Confines this process, and serves grants until none exists. A lock ensures that one fetcher per
/// data directory serves them.
fn run() -> Result<(), Box<dyn Error>> {
    let settings = std::env::args().nth(2).unwrap_or_default();
    let settings: FetcherSettings = serde_json::from_str(&settings)?;
    // Leave the session of the daemon's terminal, whose signals (Ctrl-C) must not stop the fetcher:
    // guests wait for its chunks.
    let _ = nix::unistd::setsid();
    let grants = GrantDirectory::open(&settings.run)?;
    let lock = FetcherLock::open(&grants)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let _inside = runtime.enter();
    let store = settings.store()?;
    let check = DirectoryCheck::default();
    // Open the store before the confinement, which denies reading the key file and starting the key
    // broker.
    let remote = RemoteStore::open_for(&store, Some(check.clone()), key_broker::keyring)?;
    confine(&store, &grants, &check)?;
    while lock.take() {
        let mut service = FetchService::new(grants.clone(), remote.clone());
        runtime.block_on(service.run())?;
        lock.release();
        // Serve a grant that was written while the lock was still held: its writer started no
        // fetcher.
        if grants.ids()?.is_empty() {
            break;
        }
    }
    Ok(())
}
