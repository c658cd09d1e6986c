//! [`HostKey`]: the key of this host, which encrypts secrets before they are written to the disk.

use crate::SecretError;
use jiffy_store::DataKeys;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use zeroize::Zeroizing;

/// File with the key, in the data directory.
const KEY_FILE: &str = "secrets-key";
/// The key has one generation.
const GENERATION: u32 = 1;

/// Key of this host. It uses the cipher of the snapshot store.
#[derive(Clone)]
pub struct HostKey(DataKeys);

impl std::fmt::Debug for HostKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HostKey")
    }
}

impl HostKey {
    /// Reads the key of the data directory `home`. Creates it at the first use.
    pub fn open(home: &Path) -> Result<Self, SecretError> {
        let path = home.join(KEY_FILE);
        let failed = |source| SecretError::File {
            path: path.clone(),
            source,
        };
        let mut key = Zeroizing::new([0; 32]);
        match File::open(&path) {
            Ok(mut file) => {
                // A file that is too short is an error: a new key would invalidate all secrets.
                file.read_exact(&mut *key).map_err(failed)?;
                return Ok(Self(DataKeys::derive(GENERATION, &key)));
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(failed(e)),
        }
        getrandom::fill(&mut *key).map_err(|e| failed(io::Error::other(e)))?;
        // A crash must not leave a partial key, so the file is renamed when it is complete.
        let new = path.with_extension("new");
        let write = || -> io::Result<()> {
            let mut options = File::options();
            let options = options.create(true).truncate(true).write(true).mode(0o600);
            let mut file = options.open(&new)?;
            file.write_all(&*key)?;
            file.sync_all()?;
            std::fs::rename(&new, &path)?;
            // A power failure must not remove the key after secrets were encrypted with it.
            File::open(home)?.sync_all()
        };
        write().map_err(failed)?;
        Ok(Self(DataKeys::derive(GENERATION, &key)))
    }

    /// Encrypts `plain`. Decryption requires the same `context`.
    pub fn seal(&self, context: &str, plain: &[u8]) -> Result<Vec<u8>, SecretError> {
        let sealed = self.0.seal(context.as_bytes(), plain);
        sealed.map_err(|_| SecretError::Sealed(context.to_owned()))
    }

    /// Decrypts the output of [`Self::seal`]. `None` if it was changed, or was encrypted by another
    /// host or with another context.
    #[must_use]
    pub fn open_sealed(&self, context: &str, sealed: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
        let plain = self.0.open(context.as_bytes(), sealed);
        plain.ok().map(Zeroizing::new)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_host_key_persists_and_is_private() {
        let home = tempfile::tempdir().unwrap();
        let key = HostKey::open(home.path()).unwrap();
        let sealed = key.seal("a", b"value").unwrap();
        assert!(!sealed.windows(5).any(|part| part == b"value"));
        let again = HostKey::open(home.path()).unwrap();
        assert_eq!(&**again.open_sealed("a", &sealed).unwrap(), b"value");
        assert!(again.open_sealed("b", &sealed).is_none());
        let metadata = std::fs::metadata(home.path().join(KEY_FILE)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_short_host_key_is_not_replaced() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join(KEY_FILE), b"short").unwrap();
        HostKey::open(home.path()).unwrap_err();
        assert_eq!(std::fs::read(home.path().join(KEY_FILE)).unwrap(), b"short");
    }
}
