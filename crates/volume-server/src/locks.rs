//! Advisory locks of files between all clients of a volume.
//!
//! A client is the mount of a volume in one guest, with its stream to this process. A request that
//! must wait is queued, and its client receives the reply later, so that no thread waits. A client
//! that ends loses its locks.
//!
//! If the process ends, all locks are lost. The agents of the guests then *reclaim* the locks: they
//! request the locks that their guests held from the next process. If the previous process could
//! have had locks, the next process grants only these locks for [`RECLAIM_TIME`].

mod file;
mod table;

pub(crate) use file::{Family, LockRequest, RequestRange};
pub use table::LateReply;

use nix::errno::Errno;
use parking_lot::Mutex;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;
use table::Table;

/// Time after the start of a process in which only locks are granted that clients held before.
const RECLAIM_TIME: Duration = Duration::from_secs(5);

/// Locks of a volume.
#[derive(Debug)]
pub(crate) struct Locks {
    table: Mutex<Table>,
    /// File that exists from the first lock until the process ends without clients. If it exists at
    /// the start of a process, the previous process has failed with locks.
    marker: PathBuf,
}

/// Result of a request for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The request is complete.
    Done,
    /// The client receives a [`LateReply`].
    Later,
}

impl Locks {
    /// Creates the locks of a volume. `marker` is the path of a file that this type creates.
    pub(crate) fn open(marker: PathBuf) -> io::Result<Arc<Self>> {
        let is_reclaiming = marker.exists();
        let locks = Arc::new(Self {
            table: Mutex::new(Table::new(is_reclaiming)),
            marker,
        });
        if is_reclaiming {
            let weak = Arc::downgrade(&locks);
            let thread = std::thread::Builder::new().name("reclaim".to_owned());
            thread.spawn(move || {
                std::thread::sleep(RECLAIM_TIME);
                if let Some(locks) = Weak::upgrade(&weak) {
                    locks.table.lock().end_reclaims();
                }
            })?;
        }
        Ok(locks)
    }

    /// Adds a client. `undelivered` is the number of late replies that it has not received. Returns
    /// the number of the client, and the receiver of the replies, which ends with the client.
    pub(crate) fn add_client(&self, undelivered: Arc<AtomicUsize>) -> (u64, Receiver<LateReply>) {
        let (sender, receiver): (Sender<LateReply>, _) = channel();
        let client = self.table.lock().add_client(sender, undelivered);
        (client, receiver)
    }

    /// Removes a client with its locks and requests. Later requests of the client fail.
    pub(crate) fn remove_client(&self, client: u64) {
        self.table.lock().remove_client(client);
    }

    /// Locks or unlocks a range.
    pub(crate) fn request(&self, client: u64, request: LockRequest) -> Result<Outcome, Errno> {
        let mut table = self.table.lock();
        if request.range.kind.is_some() && !table.is_marked() {
            // Create the file before the lock is granted: if this process crashes in between, the
            // next process finds the file and waits for reclaims.
            File::create(&self.marker).map_err(|e| crate::contents::errno(&e))?;
            table.set_marked();
        }
        table.request(client, request)
    }

    /// Returns the lock that prevents a request, with the process that holds it.
    pub(crate) fn conflict(&self, client: u64, request: &LockRequest) -> Option<LockRequest> {
        self.table.lock().conflict(client, request)
    }

    /// Removes all locks of an owner on a file.
    pub(crate) fn release(&self, client: u64, node: u64, family: Family, owner: u64) {
        self.table.lock().release(client, (node, family), owner);
    }

    /// Lets the request `id` fail with `EINTR` if it waits. Otherwise has no effect.
    pub(crate) fn interrupt(&self, client: u64, id: u64) {
        self.table.lock().interrupt(client, id);
    }

    /// Records that the process ends without clients, and therefore without locks.
    pub(crate) fn finish(&self) {
        match fs::remove_file(&self.marker) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(error = %e, "cannot remove the marker of locks");
            }
            _ => {}
        }
    }
}
