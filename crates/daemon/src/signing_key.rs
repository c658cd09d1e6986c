//! Key that signs preview links, the URLs by which users without a token reach a port of a sandbox.

use anyhow::Context;
use jiffy_image::Home;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;

/// File with the key.
const SIGNING_KEY_FILE: &str = "preview-key";

/// Returns the signing key. It is created once, so that preview links remain valid after a restart.
pub(crate) fn signing_key(home: &Home) -> anyhow::Result<[u8; 32]> {
    let path = home.path().join(SIGNING_KEY_FILE);
    let context = || format!("cannot open {}", path.display());
    let mut key = [0; 32];
    match File::open(&path) {
        Ok(mut file) => {
            // A file that is too short is an error: a new key would invalidate all links.
            file.read_exact(&mut key).with_context(context)?;
            return Ok(key);
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        // The key exists, but cannot be read now.
        Err(e) => return Err(e).with_context(context),
    }
    // A crash must not leave a partial key, so the file is renamed when it is complete.
    getrandom::fill(&mut key).context("cannot generate a random key")?;
    let new = path.with_extension("new");
    let mut options = File::options();
    let mut file = options
        .create(true)
        // An interrupted start may have left a partial file.
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&new)
        .with_context(context)?;
    file.write_all(&key).with_context(context)?;
    file.sync_all().with_context(context)?;
    std::fs::rename(&new, &path).with_context(context)?;
    // A power failure must not remove the key after links were created with it.
    let directory = File::open(home.path());
    directory.and_then(|d| d.sync_all()).with_context(context)?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn home() -> (tempfile::TempDir, Home) {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::at(dir.path()).unwrap();
        (dir, home)
    }

    #[test]
    fn the_signing_key_persists_and_is_private() {
        let (_dir, home) = home();
        let key = signing_key(&home).unwrap();
        assert_ne!(key, [0; 32]);
        assert_eq!(signing_key(&home).unwrap(), key);
        let metadata = std::fs::metadata(home.path().join(SIGNING_KEY_FILE)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_signing_key_that_cannot_be_read_is_not_replaced() {
        let (_dir, home) = home();
        let path = home.path().join(SIGNING_KEY_FILE);
        // Opening the file fails for any user: the link refers to itself.
        std::os::unix::fs::symlink(&path, &path).unwrap();
        signing_key(&home).unwrap_err();
        assert!(std::fs::symlink_metadata(&path).unwrap().is_symlink());
    }
}
