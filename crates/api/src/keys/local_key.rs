//! `<home>/api-key`: the secret of a key of the host's owner.

use super::{KeyError, Keys, Limits, Scope, hash};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Returns the path of `<home>/api-key`, the file with the key of the host's owner. Creates file
/// and key at the first start. A revoked key is not created again.
pub fn local_key(home: &Path, keys: &Keys) -> Result<PathBuf, KeyError> {
    let path = home.join("api-key");
    let failed = |source| KeyError::File {
        path: path.clone(),
        source,
    };
    match fs::read_to_string(&path) {
        Ok(_) => return Ok(path),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(failed(e)),
    }
    let created = keys.create("local", Scope::Admin, Limits::default())?;
    write_secret(&path, &created.secret)?;
    Ok(path)
}

/// Returns the hash of the secret in the file at `path`. `None` if the file does not exist.
pub(super) fn hash_in(path: &Path) -> Result<Option<[u8; 32]>, KeyError> {
    match fs::read_to_string(path) {
        Ok(secret) => Ok(Some(hash(secret.trim()))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(KeyError::File {
            path: path.to_owned(),
            source,
        }),
    }
}

/// Writes the secret of the host's owner atomically.
pub(super) fn write_secret(path: &Path, secret: &str) -> Result<(), KeyError> {
    let failed = |source| KeyError::File {
        path: path.to_owned(),
        source,
    };
    // The file is complete on storage before it replaces the old file.
    let new = path.with_file_name(".new-api-key");
    let mut options = OpenOptions::new();
    options.create(true).truncate(true).write(true).mode(0o600);
    let mut file = options.open(&new).map_err(failed)?;
    writeln!(file, "{secret}").map_err(failed)?;
    file.sync_all().map_err(failed)?;
    fs::rename(&new, path).map_err(failed)
}
