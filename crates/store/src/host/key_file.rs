//! Master key file of the store, created at the first start on a host that has none.

use crate::host::RemoteError;
use data_encoding::HEXLOWER;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Creates a key file at `path` unless it exists. Returns true if it was created.
pub fn make(path: &Path) -> Result<bool, RemoteError> {
    let failed = |e| RemoteError::io(path)(e);
    let content = content().map_err(failed)?;
    // The directory of the key file, and its parent directory: this daemon may have created the
    // directory of the key file.
    let directories = path.ancestors().skip(1).take(2);
    let sync = || -> io::Result<()> {
        // The parent of a relative path is empty.
        for directory in directories.filter(|directory| !directory.as_os_str().is_empty()) {
            File::open(directory)?.sync_all()?;
        }
        Ok(())
    };
    // Write a new file and link it: a daemon that is killed here must not leave a partial key file.
    let new = path.with_extension("new");
    let write = || -> io::Result<bool> {
        let mut file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(content.as_bytes())?;
        file.sync_all()?;
        let linked = std::fs::hard_link(&new, path);
        std::fs::remove_file(&new)?;
        match linked {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            other => other.map(|()| true),
        }
    };
    let is_new = if path.exists() {
        false
    } else {
        write().map_err(failed)?
    };
    // The store must not use keys that a power failure could remove. An existing file may be from a
    // daemon that was killed before it synced the directory.
    sync().map_err(failed)?;
    Ok(is_new)
}

/// Returns a key file with new random keys.
fn content() -> io::Result<String> {
    let secret = || -> io::Result<String> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        Ok(HEXLOWER.encode(&bytes))
    };
    Ok(format!(
        "# Master keys of a snapshot store. Without them the store is unreadable: keep a copy,\n\
         # and copy it to every host that uses the store (--store-keys).\n\
         locator = \"{}\"\ncurrent = \"k1\"\n[keys]\nk1 = \"{}\"\n",
        secret()?,
        secret()?
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Keyring;

    #[test]
    fn a_file_of_keys_is_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.toml");
        assert!(make(&path).unwrap());
        let before = std::fs::read(&path).unwrap();
        assert_eq!(Keyring::load(&path).unwrap().current(), "k1");
        assert!(!make(&path).unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), before);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
