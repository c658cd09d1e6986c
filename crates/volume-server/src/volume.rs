//! Files of a volume: operations on its catalog and contents.
//!
//! The *catalog* is a database with names and attributes. The content of each file is in a file of
//! the host that is named by a number.

mod image_writer;
mod names;
mod open_nodes;
mod transfer;

pub use image_writer::ImageSummary;
pub use names::{MAX_NAME, RenameMode};
pub(crate) use open_nodes::OpenNodes;

use crate::VolumeError;
use crate::attributes::{Attributes, Change, Creation, Time};
use crate::catalog::{Catalog, DirectoryEntry};
use crate::contents::Contents;
use crate::locks::Locks;
use crate::usage::{Quota, Usage, charge};
use nix::errno::Errno;
use nix::libc;
use parking_lot::{Mutex, MutexGuard, RwLock};
use rusqlite::Connection;
use std::fs::{self, FileTimes};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Number of the root directory.
pub const ROOT: u64 = 1;
/// Number of locks for lengths of files.
const LENGTH_LOCKS: usize = 64;
/// Bits of a mode that can be changed.
const PERMISSIONS: u32 = 0o7777;

/// Files of a volume. One process may open a volume at a time.
#[derive(Debug)]
pub struct Volume {
    catalog: Mutex<Catalog>,
    contents: Contents,
    usage: Usage,
    open: Mutex<OpenNodes>,
    /// Held while the length of a file changes, so that its charge is exact.
    lengths: [Mutex<()>; LENGTH_LOCKS],
    locks: Arc<Locks>,
    /// Locked for reading while a request changes the volume, and for writing while an image of the
    /// volume is written.
    changes: RwLock<()>,
}

/// Usage and quota of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Quota.
    pub quota: Quota,
    /// Charged bytes: the lengths of all files, each rounded up to 4 KiB.
    pub bytes: u64,
    /// Nodes.
    pub nodes: u64,
}

impl Volume {
    /// Opens or creates the volume in `directory`. Counts its usage, and removes files that a
    /// client had removed while they were open.
    pub fn open(directory: &Path, quota: Quota) -> Result<Self, VolumeError> {
        let mut catalog = Catalog::open(directory)?;
        let contents = Contents::open(directory.join("data"))?;
        let path = catalog.path().to_owned();
        let file_failed = |e: Errno| VolumeError::File {
            path: path.clone(),
            source: e.into(),
        };
        create_root(&mut catalog).map_err(file_failed)?;
        let orphans = Catalog::orphans(catalog.read()).map_err(file_failed)?;
        let remove = |connection: &Connection| {
            let mut orphans = orphans.iter();
            orphans.try_for_each(|node| Catalog::remove_node(connection, *node))
        };
        catalog.change(remove).map_err(file_failed)?;
        let (mut bytes, mut unknown) = (0_u64, Vec::new());
        contents
            .for_each(|node, length| match Catalog::node(catalog.read(), node) {
                Ok(_) => bytes = bytes.saturating_add(charge(length)),
                Err(Errno::ESTALE) => unknown.push(node),
                Err(_) => {}
            })
            .map_err(|source| VolumeError::File {
                path: directory.join("data"),
                source,
            })?;
        for node in unknown {
            contents.remove(node);
        }
        let nodes = Catalog::count(catalog.read()).map_err(file_failed)?;
        let marker = directory.join("locks");
        Ok(Self {
            catalog: Mutex::new(catalog),
            contents,
            usage: Usage::new(quota, bytes, nodes),
            open: Mutex::default(),
            lengths: std::array::from_fn(|_| Mutex::default()),
            locks: Locks::open(marker.clone()).map_err(|source| VolumeError::File {
                path: marker,
                source,
            })?,
            changes: RwLock::default(),
        })
    }

    /// Returns the lock that a request holds for reading while it changes the volume.
    pub(crate) fn changes(&self) -> &RwLock<()> {
        &self.changes
    }

    pub(crate) fn catalog(&self) -> MutexGuard<'_, Catalog> {
        self.catalog.lock()
    }

    pub(crate) fn contents(&self) -> &Contents {
        &self.contents
    }

    /// Returns the advisory locks.
    pub(crate) fn locks(&self) -> &Locks {
        &self.locks
    }

    /// Returns usage and quota.
    pub fn space(&self) -> Space {
        Space {
            quota: self.usage.quota(),
            bytes: self.usage.bytes(),
            nodes: self.usage.nodes(),
        }
    }

    fn length_lock(&self, node: u64) -> MutexGuard<'_, ()> {
        let index = usize::try_from(node % LENGTH_LOCKS as u64).unwrap_or(0);
        // The index is below the length of the array.
        self.lengths.get(index).unwrap_or(&self.lengths[0]).lock()
    }

    /// Adds the length and the times of the content to the attributes of a file.
    fn complete(&self, mut found: Attributes, target: Option<usize>) -> Result<Attributes, Errno> {
        if found.is_file()
            && let Some(state) = self.contents.state(found.node)?
        {
            found.size = state.length;
            found.blocks = state.blocks;
            found.modified = Time(state.modified_ns);
            found.accessed = Time(state.accessed_ns);
            found.changed = found.changed.max(found.modified);
        } else if let Some(length) = target {
            found.size = length as u64;
        } else if found.is_directory() {
            found.size = 4096;
        }
        Ok(found)
    }

    /// Returns complete attributes of a node of the catalog.
    fn completed(&self, found: Attributes) -> Result<Attributes, Errno> {
        let target = if found.kind() == libc::S_IFLNK {
            Some(Catalog::target(self.catalog.lock().read(), found.node)?.len())
        } else {
            None
        };
        self.complete(found, target)
    }

    /// Returns the attributes of a node.
    pub fn attributes(&self, node: u64) -> Result<Attributes, Errno> {
        let found = Catalog::node(self.catalog.lock().read(), node)?;
        self.completed(found)
    }

    /// Returns an error unless the node exists.
    pub(crate) fn exists(&self, node: u64) -> Result<(), Errno> {
        Catalog::node(self.catalog.lock().read(), node).map(|_| ())
    }

    /// Looks up a name in a directory.
    pub fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attributes, Errno> {
        let found = {
            let catalog = self.catalog.lock();
            let found = Catalog::lookup(catalog.read(), parent, name)?;
            match found {
                Some(found) => found.attributes,
                None => {
                    Catalog::directory(catalog.read(), parent)?;
                    return Err(Errno::ENOENT);
                }
            }
        };
        self.completed(found)
    }

    /// Returns the parent of a directory. The parent of the root is the root.
    pub fn parent(&self, node: u64) -> Result<u64, Errno> {
        Catalog::parent(self.catalog.lock().read(), node)
    }

    /// Returns at most `limit` entries of a directory after a position.
    pub(crate) fn list(
        &self,
        node: u64,
        after: u64,
        limit: usize,
    ) -> Result<Vec<DirectoryEntry>, Errno> {
        let catalog = self.catalog.lock();
        Catalog::directory(catalog.read(), node)?;
        Catalog::list(catalog.read(), node, after, limit)
    }

    /// Returns complete attributes of an entry.
    pub(crate) fn entry_attributes(&self, entry: &DirectoryEntry) -> Result<Attributes, Errno> {
        self.completed(entry.attributes)
    }

    /// Returns the target of a symbolic link.
    pub fn target(&self, node: u64) -> Result<Vec<u8>, Errno> {
        Catalog::target(self.catalog.lock().read(), node)
    }

    /// Changes attributes of a node. Returns the new attributes.
    pub fn change(&self, node: u64, change: &Change) -> Result<Attributes, Errno> {
        if let Some(size) = change.size {
            self.truncate(node, size)?;
        }
        let set = |connection: &Connection| {
            let mut new = Catalog::node(connection, node)?;
            if let Some(mode) = change.mode {
                new.mode = new.kind() | (mode & PERMISSIONS);
            }
            new.uid = change.uid.unwrap_or(new.uid);
            new.gid = change.gid.unwrap_or(new.gid);
            new.accessed = change.accessed.unwrap_or(new.accessed);
            new.modified = change.modified.unwrap_or(new.modified);
            new.changed = Time::now();
            Catalog::set(connection, &new)?;
            Ok(new)
        };
        let new = self.catalog.lock().change(set)?;
        if new.is_file() && (change.accessed.is_some() || change.modified.is_some()) {
            let mut times = FileTimes::new();
            if let Some(time) = change.accessed {
                times = times.set_accessed(system_time(time));
            }
            if let Some(time) = change.modified {
                times = times.set_modified(system_time(time));
            }
            self.contents.set_times(node, times)?;
        }
        self.completed(new)
    }

    /// Writes the content of a node, and all changes of names and attributes, to the disk.
    pub fn sync(&self, node: u64) -> Result<(), Errno> {
        if self.attributes(node)?.is_file() {
            self.contents.sync(node)?;
        }
        self.sync_catalog()
    }

    /// Writes all changes of names and attributes to the disk.
    pub fn sync_catalog(&self) -> Result<(), Errno> {
        self.catalog.lock().sync()
    }

    /// Records that a client uses a node.
    pub(crate) fn hold(&self, node: u64) {
        self.open.lock().hold(node);
    }

    /// Records that a client stopped using a node. Removes the node if it has no name.
    pub(crate) fn release(&self, node: u64) {
        if !self.open.lock().release(node) {
            return;
        }
        if let Err(e) = self.remove_if_unused(node) {
            tracing::warn!(node, error = %e, "cannot remove a file without a name");
        }
    }

    /// Removes a node that has no name and that no client uses.
    fn remove_if_unused(&self, node: u64) -> Result<(), Errno> {
        let mut catalog = self.catalog.lock();
        let found = match Catalog::node(catalog.read(), node) {
            Ok(found) => found,
            Err(Errno::ESTALE) => return Ok(()),
            Err(e) => return Err(e),
        };
        if found.links > 0 || self.open.lock().is_held(node) {
            return Ok(());
        }
        catalog.change(|connection| Catalog::remove_node(connection, node))?;
        // The guard must not be held while the content is removed.
        drop(catalog);
        let _lock = self.length_lock(node);
        let length = if found.is_file() {
            self.contents.remove(node)
        } else {
            0
        };
        self.usage.remove_node(length);
        Ok(())
    }
}

/// Creates the root directory unless it exists. It has two links, and is its own parent.
fn create_root(catalog: &mut Catalog) -> Result<(), Errno> {
    match Catalog::node(catalog.read(), ROOT) {
        Err(Errno::ESTALE) => {}
        other => return other.map(|_| ()),
    }
    let root = Creation {
        mode: libc::S_IFDIR | 0o777,
        uid: 0,
        gid: 0,
        device: 0,
    };
    catalog.change(|connection| Catalog::add_node(connection, ROOT, &root, 2, ROOT, None))
}

/// Returns the time as the standard library represents it. Times before 1970 become 1970.
fn system_time(time: Time) -> SystemTime {
    let (seconds, nanoseconds) = time.parts();
    let seconds = u64::try_from(seconds).unwrap_or(0);
    SystemTime::UNIX_EPOCH
        .checked_add(Duration::new(seconds, nanoseconds))
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Removes the volume in `directory`.
pub fn remove(directory: &Path) -> std::io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
