//! [`RemoteSettings`]: the options with which a daemon opens the shared store.

use crate::StoreUrl;
use crate::host::RemoteError;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Default of [`RemoteSettings::timeout`].
pub const STORE_TIMEOUT: Duration = Duration::from_secs(60);

/// File in the data directory that records the last opened store.
const LAST_STORE: &str = "store/last.json";

/// Settings of the shared store on a host.
#[derive(Debug, Clone)]
pub struct RemoteSettings {
    /// URL of the store.
    pub url: StoreUrl,
    /// Key file, which may name a command for wrapping and unwrapping. Defaults to
    /// `<home>/store/keys.toml`, which is created if it is missing.
    pub keyring: Option<PathBuf>,
    /// Data directory of this host.
    pub home: PathBuf,
    /// Maximum number of bytes on disk of the cached layers.
    pub cache_bytes: u64,
    /// Maximum rate of uploads to the store. `None` if unlimited.
    pub upload_bytes_per_second: Option<u64>,
    /// Maximum time for which a request to the store may receive no byte. Retries do not restart
    /// this time. A write has more time, according to its size.
    pub timeout: Duration,
}

/// Store that a daemon opened last with a data directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastStore {
    /// URL of the store.
    pub url: String,
    /// Key file. `None` for the file in the data directory.
    pub keyring: Option<PathBuf>,
}

impl LastStore {
    /// Reads the record. `None` if no store was opened yet.
    pub fn read(home: &Path) -> Result<Option<Self>, RemoteError> {
        let path = home.join(LAST_STORE);
        let failed = RemoteError::io(&path);
        match std::fs::read(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(e)),
            Ok(text) => match serde_json::from_slice(&text) {
                Ok(last) => Ok(Some(last)),
                Err(e) => Err(failed(e.into())),
            },
        }
    }

    /// Writes the record atomically.
    pub fn write(settings: &RemoteSettings) -> Result<(), RemoteError> {
        // Commands with another working directory read the record, so the path must be absolute. If
        // the path of the key file were missing, they would use the file in the data directory, and
        // thus other keys than this daemon.
        let absolute = |path: &PathBuf| path.canonicalize().map_err(RemoteError::io(path));
        let last = Self {
            url: settings.url.to_string(),
            keyring: settings.keyring.as_ref().map(absolute).transpose()?,
        };
        let path = settings.home.join(LAST_STORE);
        let new = path.with_extension("new");
        let write = || -> io::Result<()> {
            let mut file = File::create(&new)?;
            file.write_all(&serde_json::to_vec(&last)?)?;
            // A power failure must not leave an empty record.
            file.sync_all()?;
            std::fs::rename(&new, &path)
        };
        write().map_err(RemoteError::io(&path))
    }
}
