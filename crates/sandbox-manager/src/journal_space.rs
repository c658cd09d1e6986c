//! Disk space reserved for the journal, so that it can record changes that have already happened
//! even if the disk is full.
//!
//! The write-ahead log has blocks allocated beyond its end, more than it fills between two
//! checkpoints, and restarts from its beginning after each checkpoint. The database has free pages,
//! which a checkpoint fills without growing the file. Blocks beyond the end of the database would
//! not be enough: every checkpoint truncates the file and frees them. File systems that cannot
//! preallocate or that never write in place reserve no space.

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use rusqlite::Connection;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Number of pages in the log that triggers a checkpoint.
pub(crate) const CHECKPOINT_PAGES: u32 = 512;
/// Size of a page in bytes, SQLite's default.
const PAGE_BYTES: u64 = 4096;
/// Bytes allocated for the log: its size at a checkpoint, doubled.
const LOG_BYTES: u64 = 4 << 20;
/// Bytes of free pages that are added to the database when it has too few.
const FREE_BYTES: u64 = 1 << 20;
/// Minimum number of free pages before more are added.
const MIN_FREE_PAGES: u64 = FREE_BYTES / 2 / PAGE_BYTES;

/// Reason why space cannot be reserved.
#[derive(Debug)]
pub(crate) enum SpaceError {
    /// The disk is full or failed.
    Disk(io::Error),
    /// SQLite failed.
    Database(rusqlite::Error),
}

impl From<rusqlite::Error> for SpaceError {
    fn from(e: rusqlite::Error) -> Self {
        Self::Database(e)
    }
}

/// Files of a journal, and whether the log's space is allocated.
#[derive(Debug)]
pub(crate) struct ReservedSpace {
    // Closing any descriptor of the database file releases the POSIX locks that SQLite holds on it.
    // `database` must therefore stay open as long as the connection.
    database: File,
    log: File,
    is_log_allocated: bool,
}

impl ReservedSpace {
    /// Opens the files of the database in `file`, which SQLite has open. Reserves no space yet.
    pub fn of(file: &Path) -> io::Result<Self> {
        let mut log = file.as_os_str().to_owned();
        log.push("-wal");
        let open = |path: &Path| File::options().read(true).write(true).open(path);
        Ok(Self {
            database: open(file)?,
            log: open(&PathBuf::from(log))?,
            is_log_allocated: false,
        })
    }

    /// Reserves the missing space.
    pub fn ensure(&mut self, connection: &Connection) -> Result<(), SpaceError> {
        // The log is allocated once per daemon: it never shrinks, since closing the database does
        // not truncate it.
        if !self.is_log_allocated {
            allocate(&self.log, LOG_BYTES).map_err(SpaceError::Disk)?;
            self.is_log_allocated = true;
        }
        let number = |pragma| connection.query_row(pragma, [], |row| row.get::<_, u64>(0));
        if number("PRAGMA freelist_count")? >= MIN_FREE_PAGES {
            return Ok(());
        }
        // The blocks are allocated first, so that the checkpoint can write the pages. An eighth is
        // added for SQLite's own pages, such as pages of the free list.
        let length = number("PRAGMA page_count")? * PAGE_BYTES + FREE_BYTES + FREE_BYTES / 8;
        allocate(&self.database, length).map_err(SpaceError::Disk)?;
        // The checkpoint writes the pages of the table to the file. Removing the table makes them
        // free pages. The table may exist already, if an earlier attempt failed before the removal.
        connection.execute_batch(&format!(
            "CREATE TABLE IF NOT EXISTS room (block BLOB);
             INSERT INTO room VALUES (zeroblob({FREE_BYTES}));
             PRAGMA wal_checkpoint;
             DROP TABLE room;"
        ))?;
        Ok(())
    }
}

/// Allocates blocks for the first `bytes` bytes of `file` without changing its length.
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    let length = i64::try_from(bytes).map_err(io::Error::other)?;
    match fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, length) {
        Ok(()) | Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL) => Ok(()),
        Err(e) => Err(e.into()),
    }
}
