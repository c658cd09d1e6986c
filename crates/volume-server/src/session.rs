//! Session of one client of a volume: answers its requests.
//!
//! The client is the kernel of a guest, whose agent passes FUSE requests on, or the daemon. A guest
//! is not trusted.

mod lock_requests;
mod requests;

pub(crate) use lock_requests::{is_ordered, late_message};

use crate::abi::{Fields, FieldsMut, REPLY_HEADER, REQUEST_HEADER, finish, opcode};
use crate::locks::LateReply;
use crate::volume::Volume;
use nix::errno::Errno;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;

/// Maximum length of the data of a WRITE or READ in bytes.
pub const MAX_WRITE: u32 = 256 << 10;
/// Maximum length of a message in bytes.
pub const MAX_MESSAGE: usize = MAX_WRITE as usize + 4096;

/// Maximum number of nodes of which a session records the use, with about 40 bytes for each. A
/// further node that loses its last name is removed although the client uses it.
const MAX_USED_NODES: usize = 1 << 20;

/// Rights of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionRights {
    /// Rejects all changes.
    pub is_read_only: bool,
    /// The client is the daemon, which may make requests that are no part of FUSE.
    pub is_daemon: bool,
}

/// Session of one client. Requests may be answered by several threads.
#[derive(Debug)]
pub struct Session {
    volume: Arc<Volume>,
    rights: SessionRights,
    /// Number of times that the client received each node in this session. The number is 0 if the
    /// client knows the node only from an earlier session.
    lookups: Mutex<HashMap<u64, u64>>,
    /// Number of the client in the table of locks.
    client: u64,
    /// Late replies for the client, until a thread takes the receiver.
    late: Mutex<Option<Receiver<LateReply>>>,
    /// Number of late replies that the client has not received.
    undelivered: Arc<AtomicUsize>,
}

/// Operations that change a volume.
const CHANGES: [u32; 14] = [
    opcode::SETATTR,
    opcode::SYMLINK,
    opcode::MKNOD,
    opcode::MKDIR,
    opcode::UNLINK,
    opcode::RMDIR,
    opcode::RENAME,
    opcode::LINK,
    opcode::WRITE,
    opcode::CREATE,
    opcode::FALLOCATE,
    opcode::RENAME2,
    opcode::TMPFILE,
    opcode::REPLACE,
];

impl Session {
    /// Starts a session.
    pub fn new(volume: Arc<Volume>, rights: SessionRights) -> Self {
        let undelivered = Arc::<AtomicUsize>::default();
        let (client, late) = volume.locks().add_client(undelivered.clone());
        Self {
            volume,
            rights,
            lookups: Mutex::default(),
            client,
            late: Mutex::new(Some(late)),
            undelivered,
        }
    }

    /// Answers a request. Returns true if `reply` has been replaced by the reply. Returns false if
    /// the request has no reply, or if its reply follows later ([`LateReply`]).
    ///
    /// # Errors
    /// Fails if the request has no valid header. The client violates the protocol then.
    pub fn answer(&self, request: &[u8], reply: &mut Vec<u8>) -> Result<bool, Errno> {
        let mut fields = Fields(request);
        let header = fields.request_header()?;
        if header.length as usize != request.len() {
            return Err(Errno::EINVAL);
        }
        reply.clear();
        reply.resize(REPLY_HEADER, 0);
        let is_change = CHANGES.contains(&header.opcode);
        // Changes wait while an image of the volume is written.
        let _change = is_change.then(|| self.volume.changes().read());
        let done = if self.rights.is_read_only && is_change {
            Err(Errno::EROFS)
        } else {
            self.dispatch(&header, fields, reply)
        };
        let error = match done {
            Ok(requests::Answer::Reply) => 0,
            Ok(requests::Answer::None) => return Ok(false),
            Err(e) => {
                reply.truncate(REPLY_HEADER);
                -(e as i32)
            }
        };
        if let Some(field) = reply.get_mut(4..8) {
            field.copy_from_slice(&error.to_le_bytes());
        }
        if let Some(field) = reply.get_mut(8..REPLY_HEADER) {
            field.copy_from_slice(&header.id.to_le_bytes());
        }
        finish(reply);
        Ok(true)
    }

    /// Returns the receiver of replies to requests that waited for a lock, which ends with the
    /// session. `None` after the first call.
    pub fn late_replies(&self) -> Option<Receiver<LateReply>> {
        self.late.lock().take()
    }

    /// Records that the client has received a late reply.
    pub fn late_delivered(&self) {
        self.undelivered.fetch_sub(1, Ordering::Relaxed);
    }

    /// Releases the locks of the client, and lets its later requests for locks fail.
    pub fn end_locks(&self) {
        self.volume.locks().remove_client(self.client);
    }

    /// Returns the number of nodes whose use is recorded.
    pub fn used_nodes(&self) -> usize {
        self.lookups.lock().len()
    }

    /// Records that the client received a node.
    fn found(&self, node: u64) {
        let mut lookups = self.lookups.lock();
        if let Some(count) = lookups.get_mut(&node) {
            *count = count.saturating_add(1);
        } else if lookups.len() < MAX_USED_NODES {
            self.volume.hold(node);
            lookups.insert(node, 1);
        }
    }

    /// Records that the client uses a node, which it may know from an earlier session.
    ///
    /// # Errors
    /// The node does not exist. Its number is not recorded: a hostile client may use any number.
    fn used(&self, node: u64) -> Result<(), Errno> {
        let mut lookups = self.lookups.lock();
        if lookups.contains_key(&node) || lookups.len() >= MAX_USED_NODES {
            return Ok(());
        }
        // Hold the node first, so that it is not removed meanwhile.
        self.volume.hold(node);
        let exists = self.volume.exists(node);
        if exists.is_ok() {
            lookups.insert(node, 0);
            return Ok(());
        }
        drop(lookups);
        self.volume.release(node);
        exists
    }

    /// Records that the client forgot a node `count` times.
    fn forget(&self, node: u64, count: u64) {
        let mut lookups = self.lookups.lock();
        let Some(known) = lookups.get_mut(&node) else {
            return;
        };
        *known = known.saturating_sub(count);
        if *known > 0 {
            return;
        }
        lookups.remove(&node);
        drop(lookups);
        self.volume.release(node);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end_locks();
        for node in self.lookups.get_mut().keys() {
            self.volume.release(*node);
        }
    }
}

/// Returns the length of the message that starts with `header`, if it can be a request.
pub(crate) fn request_length(header: &[u8; 4]) -> Option<usize> {
    let length = usize::try_from(u32::from_le_bytes(*header)).ok()?;
    (REQUEST_HEADER..=MAX_MESSAGE)
        .contains(&length)
        .then_some(length)
}

/// Appends the reply to an OPEN of a file that was created.
fn put_open(reply: &mut Vec<u8>) {
    reply.put_u64(0);
    // FOPEN_KEEP_CACHE: the page cache remains valid. The client notices changes by times and
    // lengths.
    reply.put_u32(1 << 1);
    reply.put_u32(0);
}
