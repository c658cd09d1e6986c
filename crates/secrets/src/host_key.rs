//! [`HostKey`]: the key of this host or of its fleet, which encrypts secrets before they are
//! stored.

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

/// Key of this host, or key of a fleet of hosts. It uses the cipher of the snapshot store.
#[derive(Clone)]
pub struct HostKey {
    key: DataKeys,
    /// Key of this host before it became a member of a fleet. Sandboxes that were created before
    /// have texts that are encrypted with it.
    former: Option<DataKeys>,
}

impl std::fmt::Debug for HostKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HostKey")
    }
}

impl HostKey {
    /// Reads the key of the data directory `home`. Creates it at the first use.
    pub fn open(home: &Path) -> Result<Self, SecretError> {
        if let Some(key) = read(home)? {
            return Ok(Self { key, former: None });
        }
        let path = home.join(KEY_FILE);
        let failed = |source| SecretError::File {
            path: path.clone(),
            source,
        };
        let mut key = Zeroizing::new([0; 32]);
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
        let key = DataKeys::derive(GENERATION, &key);
        Ok(Self { key, former: None })
    }

    /// Uses the key of a fleet. The key of the data directory `home`, if there is one, decrypts
    /// texts from the time before this host became a member.
    ///
    /// # Errors
    /// [`SecretError::File`] if the file with the key of the host cannot be read.
    pub fn of_fleet(key: &[u8; 32], home: &Path) -> Result<Self, SecretError> {
        Ok(Self {
            key: DataKeys::derive(GENERATION, key),
            former: read(home)?,
        })
    }

    /// Encrypts `plain`. Decryption requires the same `context`.
    pub fn seal(&self, context: &str, plain: &[u8]) -> Result<Vec<u8>, SecretError> {
        let sealed = self.key.seal(context.as_bytes(), plain);
        sealed.map_err(|_| SecretError::Sealed(context.to_owned()))
    }

    /// Decrypts the output of [`Self::seal`]. `None` if it was changed, or was encrypted by another
    /// host or with another context.
    #[must_use]
    pub fn open_sealed(&self, context: &str, sealed: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
        let keys = [Some(&self.key), self.former.as_ref()]
            .into_iter()
            .flatten();
        let mut plain = keys.filter_map(|key| key.open(context.as_bytes(), sealed).ok());
        plain.next().map(Zeroizing::new)
    }
}

/// Reads the key of the data directory `home`. `None` if it has none.
fn read(home: &Path) -> Result<Option<DataKeys>, SecretError> {
    let path = home.join(KEY_FILE);
    let mut key = Zeroizing::new([0; 32]);
    let read = match File::open(&path) {
        // A file that is too short is an error: a new key would invalidate all secrets.
        Ok(mut file) => file.read_exact(&mut *key),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => Err(e),
    };
    read.map_err(|source| SecretError::File { path, source })?;
    Ok(Some(DataKeys::derive(GENERATION, &key)))
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
    fn hosts_of_a_fleet_share_a_key_and_read_their_former_texts() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let former = HostKey::open(one.path())
            .unwrap()
            .seal("a", b"old")
            .unwrap();
        let [first, second] = [&one, &two].map(|home| {
            let key = HostKey::of_fleet(&[7; 32], home.path());
            key.unwrap()
        });
        let sealed = first.seal("a", b"value").unwrap();
        assert_eq!(&**second.open_sealed("a", &sealed).unwrap(), b"value");
        assert_eq!(&**first.open_sealed("a", &former).unwrap(), b"old");
        assert!(second.open_sealed("a", &former).is_none());
        assert!(!two.path().join(KEY_FILE).exists());
    }

    #[test]
    fn a_short_host_key_is_not_replaced() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join(KEY_FILE), b"short").unwrap();
        HostKey::open(home.path()).unwrap_err();
        assert_eq!(std::fs::read(home.path().join(KEY_FILE)).unwrap(), b"short");
    }
}
