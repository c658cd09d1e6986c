//! Process of the fetcher.

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

/// First argument of a program that is to run as the fetcher. The second one is its
/// [`FetcherSettings`].
pub const FETCHER_ARGUMENT: &str = "--as-fetcher";

/// File in the directory of grants that a running fetcher has locked.
const LOCK_FILE: &str = "lock";

/// Settings of the fetcher: the store as its daemon uses it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetcherSettings {
    /// Address of the store.
    pub url: String,
    /// File of master keys.
    pub keyring: Option<PathBuf>,
    /// Data directory.
    pub home: PathBuf,
    /// Directory of running things.
    pub run: PathBuf,
    /// Bytes that cached layers may take on disk.
    pub cache_bytes: u64,
    /// Milliseconds for which a request to the store may bring nothing.
    pub timeout_ms: u64,
}

impl FetcherSettings {
    /// Settings of a fetcher for grants in `run`.
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

/// Lock by which there is one fetcher for a directory. The kernel drops it with the process.
#[derive(Debug)]
pub(crate) struct FetcherLock(File);

impl FetcherLock {
    pub(crate) fn open(grants: &GrantDirectory) -> std::io::Result<Self> {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let path = grants.path().join(LOCK_FILE);
        options.mode(0o600).open(path).map(Self)
    }

    /// Takes the lock; returns false if another process has it.
    fn take(&self) -> bool {
        fcntl(&self.0, FcntlArg::F_OFD_SETLK(&range(libc::F_WRLCK))).is_ok()
    }

    fn release(&self) {
        let _ = fcntl(&self.0, FcntlArg::F_OFD_SETLK(&range(libc::F_UNLCK)));
    }

    /// Returns true if a process has the lock. Does not take it, not even for a moment.
    pub(crate) fn is_taken(&self) -> bool {
        let mut found = range(libc::F_WRLCK);
        let asked = fcntl(&self.0, FcntlArg::F_OFD_GETLK(&mut found));
        asked.is_ok() && found.l_type != libc::F_UNLCK as libc::c_short
    }
}

fn range(kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 1,
        l_pid: 0,
    }
}

/// Main function of the fetcher's process. Must be called before another thread exists.
pub fn main() -> ExitCode {
    let _ = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!("the fetcher ended: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let settings = std::env::args().nth(2).unwrap_or_default();
    let settings: FetcherSettings = serde_json::from_str(&settings)?;
    // A signal of the daemon's terminal is not for the guests.
    let _ = nix::unistd::setsid();
    let grants = GrantDirectory::open(&settings.run)?;
    let lock = FetcherLock::open(&grants)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let _inside = runtime.enter();
    let store = settings.store()?;
    let check = DirectoryCheck::default();
    let remote = RemoteStore::open_for(&store, Some(check.clone()), key_broker::keyring)?;
    confine(&store, &grants, &check)?;
    while lock.take() {
        let mut service = FetchService::new(grants.clone(), remote.clone());
        runtime.block_on(service.run())?;
        lock.release();
        // A grant that was written just now relied on the lock.
        if grants.ids()?.is_empty() {
            break;
        }
    }
    Ok(())
}
