//! Files of a session (its record, history and lock) in the user's state directory.

use crate::history::HistoryEntry;
use crate::limits::SessionLimits;
use crate::project::Project;
use crate::tree::SyncedTree;
use anyhow::Context;
use rustix::fs::{FlockOperation, flock};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Record of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionRecord {
    /// Project directory.
    pub project: PathBuf,
    /// Template of new sandboxes.
    pub template: String,
    /// False if the sandbox has no access to the internet.
    pub internet: bool,
    /// Id of the sandbox. `None` before the first command.
    pub sandbox: Option<String>,
    /// Limits.
    pub limits: SessionLimits,
    /// Number of the next command.
    pub next: u64,
}

/// Directory of a session, locked.
pub struct SessionFiles {
    directory: PathBuf,
    /// Holds the lock until it is closed.
    _lock: File,
}

impl SessionFiles {
    /// Opens the directory of a session, and waits for its lock.
    pub fn lock(project: &Project) -> anyhow::Result<Self> {
        let directory = project.state().to_owned();
        for name in ["", "history", "saved", "conflicts"] {
            create_directory(&directory.join(name))?;
        }
        let lock = open_lock(&directory.join("lock"))?;
        flock(&lock, FlockOperation::LockExclusive).map_err(io::Error::from)?;
        Ok(Self {
            directory,
            _lock: lock,
        })
    }

    /// Returns the path of a file or directory of the session.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Reads the record. `None` for a new session.
    pub fn record(&self) -> anyhow::Result<Option<SessionRecord>> {
        read(&self.path("session.json"))
    }

    /// Writes the record.
    pub fn write_record(&self, record: &SessionRecord) -> anyhow::Result<()> {
        write(&self.path("session.json"), record)
    }

    /// Reads the files at the last synchronisation.
    pub fn synced(&self) -> anyhow::Result<SyncedTree> {
        Ok(read(&self.path("synced.json"))?.unwrap_or_default())
    }

    /// Writes the files at the last synchronisation.
    pub fn write_synced(&self, tree: &SyncedTree) -> anyhow::Result<()> {
        write(&self.path("synced.json"), tree)
    }

    /// Reads the history.
    pub fn history(&self) -> anyhow::Result<BTreeMap<u64, HistoryEntry>> {
        let mut history = BTreeMap::new();
        let directory = self.path("history");
        let context = || format!("cannot read {}", directory.display());
        for file in fs::read_dir(&directory).with_context(context)? {
            let path = file.with_context(context)?.path();
            if path.extension().is_some_and(|e| e == "json")
                && let Some(entry) = read::<HistoryEntry>(&path)?
            {
                history.insert(entry.number, entry);
            }
        }
        Ok(history)
    }

    /// Writes an entry of the history.
    pub fn write_entry(&self, entry: &HistoryEntry) -> anyhow::Result<()> {
        write(&self.entry_path(entry.number), entry)
    }

    /// Removes an entry of the history with its copies of conflicts.
    pub fn remove_entry(&self, number: u64) -> anyhow::Result<()> {
        // Ignore errors: these files may not exist, and have no effect without the entry.
        let _ = fs::remove_file(self.running_path(number));
        let _ = fs::remove_dir_all(self.conflict_path(number));
        let path = self.entry_path(number);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(e).with_context(|| format!("cannot remove {}", path.display()))
            }
            _ => Ok(()),
        }
    }

    /// Locks the command `number` for the process that runs it. `None` if another process runs it.
    pub fn lock_command(&self, number: u64) -> anyhow::Result<Option<File>> {
        let lock = open_lock(&self.running_path(number))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(lock)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(io::Error::from(e).into()),
        }
    }

    /// Returns the directory for copies of conflicting files of a command.
    pub fn conflict_path(&self, number: u64) -> PathBuf {
        self.path("conflicts").join(number.to_string())
    }

    /// Creates an empty directory for files of the sandbox.
    pub fn staging(&self) -> anyhow::Result<PathBuf> {
        let path = self.path("staging");
        // Ignore the error: the directory usually does not exist.
        let _ = fs::remove_dir_all(&path);
        create_directory(&path)?;
        Ok(path)
    }

    /// Removes the session with all its data.
    pub fn remove(self) -> anyhow::Result<()> {
        fs::remove_dir_all(&self.directory)
            .with_context(|| format!("cannot remove {}", self.directory.display()))
    }

    fn entry_path(&self, number: u64) -> PathBuf {
        self.path("history").join(format!("{number}.json"))
    }

    fn running_path(&self, number: u64) -> PathBuf {
        self.path("history").join(format!("{number}.lock"))
    }
}

/// Creates a directory that only this user can access.
pub fn create_directory(path: &Path) -> anyhow::Result<()> {
    let mut builder = DirBuilder::new();
    let created = builder.recursive(true).mode(0o700).create(path);
    created.with_context(|| format!("cannot create {}", path.display()))
}

fn open_lock(path: &Path) -> anyhow::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).mode(0o600);
    file.open(path)
        .with_context(|| format!("cannot open {}", path.display()))
}

/// Reads a JSON file. `None` if it does not exist.
pub fn read<T: DeserializeOwned>(path: &Path) -> anyhow::Result<Option<T>> {
    let text = match fs::read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        result => result.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let value = serde_json::from_slice(&text).with_context(|| {
        format!(
            "{} is damaged: remove the session with `jiffy agent-shell end`",
            path.display()
        )
    })?;
    Ok(Some(value))
}

/// Writes a JSON file atomically.
pub fn write(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    let context = || format!("cannot write {}", path.display());
    let temporary = path.with_extension("new");
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(&temporary).with_context(context)?;
    file.write_all(&serde_json::to_vec(value)?)
        .with_context(context)?;
    fs::rename(&temporary, path).with_context(context)
}
