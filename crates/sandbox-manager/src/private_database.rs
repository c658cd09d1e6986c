//! Creation of SQLite databases that only their owner can read.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Creates the database `file` if it is missing, and makes it private to its owner, together with
/// its `-wal` and `-shm` files. SQLite creates missing `-wal` and `-shm` files with the mode of the
/// database.
pub fn restrict_to_owner(file: &Path) -> io::Result<()> {
    let mut options = fs::OpenOptions::new();
    // The mode applies from the creation on, so no other user can open the file in between.
    options.create(true).truncate(false).write(true).mode(0o600);
    drop(options.open(file)?);
    for suffix in ["", "-wal", "-shm"] {
        let mut name = file.as_os_str().to_owned();
        name.push(suffix);
        match fs::set_permissions(&name, Permissions::from_mode(0o600)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(())
}
