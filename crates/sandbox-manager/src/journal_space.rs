//! Room on the disk that the journal has for itself, so that what has happened can be taken down
//! when the disk is full.
//!
//! The log has blocks beyond its end, more than it fills between two checkpoints, and begins anew
//! at each. The database has free pages inside, which a checkpoint fills without making the file
//! longer; blocks beyond its end would be taken away by every checkpoint. File systems that cannot
//! allocate ahead, and those that never write in place, keep no room.

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use rusqlite::Connection;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Pages in the log from which on it is written back.
pub(crate) const CHECKPOINT_PAGES: u32 = 512;
/// Bytes of a page, SQLite's default.
const PAGE_BYTES: u64 = 4096;
/// Bytes kept for the log: what it has at a checkpoint, and as much again.
const LOG_BYTES: u64 = 4 << 20;
/// Bytes of free pages that the database is given when it has few.
const FREE_BYTES: u64 = 1 << 20;
/// As few.
const MIN_FREE_PAGES: u64 = FREE_BYTES / 2 / PAGE_BYTES;

/// Why room is not kept.
#[derive(Debug)]
pub(crate) enum SpaceError {
    /// The disk has none.
    Disk(io::Error),
    /// SQLite says no.
    Database(rusqlite::Error),
}

impl From<rusqlite::Error> for SpaceError {
    fn from(e: rusqlite::Error) -> Self {
        Self::Database(e)
    }
}

/// The files of a journal, and whether its log has its room.
#[derive(Debug)]
pub(crate) struct ReservedSpace {
    // Closing a database file takes away the locks that SQLite has on it, so this stays open as
    // long as the connection.
    database: File,
    log: File,
    log_kept: bool,
}

impl ReservedSpace {
    /// The room of the database in `file`, which SQLite has open. Nothing is kept yet.
    pub fn of(file: &Path) -> io::Result<Self> {
        let mut log = file.as_os_str().to_owned();
        log.push("-wal");
        let open = |path: &Path| File::options().read(true).write(true).open(path);
        Ok(Self {
            database: open(file)?,
            log: open(&PathBuf::from(log))?,
            log_kept: false,
        })
    }

    /// Makes sure that everything is kept that should be.
    pub fn ensure(&mut self, connection: &Connection) -> Result<(), SpaceError> {
        if !self.log_kept {
            allocate(&self.log, LOG_BYTES).map_err(SpaceError::Disk)?;
            self.log_kept = true;
        }
        let number = |pragma| connection.query_row(pragma, [], |row| row.get::<_, u64>(0));
        if number("PRAGMA freelist_count")? >= MIN_FREE_PAGES {
            return Ok(());
        }
        // First the blocks, so that the pages do not get stuck in the log; a few more than are
        // asked for keep account of them.
        let length = number("PRAGMA page_count")? * PAGE_BYTES + FREE_BYTES + FREE_BYTES / 8;
        allocate(&self.database, length).map_err(SpaceError::Disk)?;
        connection.execute_batch(&format!(
            "CREATE TABLE IF NOT EXISTS room (block BLOB);
             INSERT INTO room VALUES (zeroblob({FREE_BYTES}));
             PRAGMA wal_checkpoint;
             DROP TABLE room;"
        ))?;
        Ok(())
    }
}

/// Gives `file` blocks for its first `bytes` bytes, without making it longer.
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    let length = i64::try_from(bytes).map_err(io::Error::other)?;
    match fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, length) {
        Ok(()) | Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL) => Ok(()),
        Err(e) => Err(e.into()),
    }
}
