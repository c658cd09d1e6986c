//! [`KeyFile`]: the keys of the issuer, in the file `identity-keys` of the data directory.

use crate::IdentityError;
use crate::signing_key::{SigningKey, StoredKey};
use jiffy_secrets::HostKey;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const NAME: &str = "identity-keys";

/// Contents of the file.
#[derive(Serialize, Deserialize)]
struct Stored {
    /// Keys, oldest first.
    keys: Vec<StoredKey>,
}

/// File with the keys of the issuer. The private keys in it are encrypted.
pub(crate) struct KeyFile {
    path: PathBuf,
    host_key: HostKey,
}

impl KeyFile {
    /// Returns the file of the data directory `home`, which need not exist.
    pub fn new(home: &Path, host_key: HostKey) -> Self {
        Self {
            path: home.join(NAME),
            host_key,
        }
    }

    fn failed(&self, source: io::Error) -> IdentityError {
        let path = self.path.clone();
        IdentityError::File { path, source }
    }

    /// Reads the keys, oldest first. Returns no keys if the file does not exist.
    pub fn read(&self) -> Result<Vec<SigningKey>, IdentityError> {
        let text = match fs::read(&self.path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(self.failed(e)),
        };
        let damaged = || IdentityError::Damaged {
            path: self.path.clone(),
        };
        let stored: Stored = serde_json::from_slice(&text).map_err(|_| damaged())?;
        let open = |key| SigningKey::open(&self.host_key, key).ok_or_else(damaged);
        stored.keys.into_iter().map(open).collect()
    }

    /// Replaces the keys in the file.
    pub fn write(&self, keys: &[StoredKey]) -> Result<(), IdentityError> {
        let keys = keys.to_vec();
        let new = self.path.with_extension("new");
        let write = || -> io::Result<()> {
            let text = serde_json::to_vec(&Stored { keys })?;
            let mut options = File::options();
            let options = options.create(true).truncate(true).write(true).mode(0o600);
            let mut file = options.open(&new)?;
            file.write_all(&text)?;
            file.sync_all()?;
            // A crash must not leave a partial file, so the file is renamed when it is complete.
            fs::rename(&new, &self.path)?;
            // A power failure must not remove a key that verifiers have already received.
            match self.path.parent() {
                Some(home) => File::open(home)?.sync_all(),
                None => Ok(()),
            }
        };
        write().map_err(|e| self.failed(e))
    }
}
