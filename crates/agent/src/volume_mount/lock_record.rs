//! Advisory locks of the guest's processes. The server of a volume releases the locks of a guest
//! whose stream ends, for example at a pause. The next stream starts with requests for these locks:
//! the agent *reclaims* them. If another sandbox has taken one meanwhile, the file is unusable for
//! this guest until its former owner closes the file: the process believes that it holds the lock.

use super::message::{number, opcode};
use jiffy_proto::file_lock::{LOCKS_MARK, LockKind, LockRanges, RECLAIM};
use std::collections::{BTreeMap, BTreeSet};

/// Requests of the FUSE protocol that concern locks.
const SETLK: u32 = 32;
const SETLKW: u32 = 33;
/// Opcodes of requests that use the content of a file.
const CONTENT: [u32; 5] = [
    4,  // SETATTR
    15, // READ
    16, // WRITE
    20, // FSYNC
    43, // FALLOCATE
];
/// Length of the header of a request.
const HEADER: usize = 40;
/// Bit of the ids of requests that the agent makes. The kernel counts its ids from 1.
const OWN_ID: u64 = 1 << 63;
/// Flag of a lock request for flock.
const FLOCK: u32 = 1;

/// Owner of locks on a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Owner {
    /// Number of the file.
    node: u64,
    /// True for flock(2), false for locks of fcntl(2). The two kinds do not conflict.
    is_flock: bool,
    /// Number by which the kernel identifies the owner: a process or an open file.
    owner: u64,
}

/// Fields of a request for a lock.
#[derive(Debug, Clone, Copy)]
struct LockRequest {
    of: Owner,
    /// First and last byte of the range.
    start: u64,
    end: u64,
    /// `None` to unlock.
    kind: Option<LockKind>,
}

/// Locks of one mount.
#[derive(Debug, Default)]
pub(super) struct LockRecord {
    /// Locks that the guest holds.
    held: BTreeMap<Owner, LockRanges>,
    /// Owners of locks that another sandbox has taken.
    lost: BTreeSet<Owner>,
    /// Owners whose locks are requested again, by the id of the request.
    reclaimed: BTreeMap<u64, Owner>,
    /// Number of requests that the agent has made.
    requests: u64,
    /// Number of the stream with which the locks were requested last.
    generation: u64,
}

/// Returns the number in the four bytes at offset `at`.
fn u32_at(message: &[u8], at: usize) -> Option<u32> {
    number(message, at).map(u32::from_le_bytes)
}

/// Returns the number in the eight bytes at offset `at`.
fn u64_at(message: &[u8], at: usize) -> Option<u64> {
    number(message, at).map(u64::from_le_bytes)
}

/// Marks an INIT request. The mark states that this agent requests the locks again after a restart
/// of the server. The server offers locks between sandboxes only to such agents.
pub(super) fn mark_init(request: &mut [u8]) {
    // Last reserved field of `struct fuse_init_in`.
    let last = request.get_mut(HEADER + 60..HEADER + 64);
    if let Some(last) = last {
        last.copy_from_slice(&LOCKS_MARK.to_le_bytes());
    }
}

/// Returns the node that a request locks. `None` for a request that unlocks, and for all others.
pub(super) fn locked_node(request: &[u8]) -> Option<u64> {
    let lock = LockRequest::parse(request)?;
    lock.kind.map(|_| lock.of.node)
}

impl LockRequest {
    /// Parses a lock request of the kernel. `None` for other requests. The body has the fields file
    /// handle, owner, start, end (64 bits each), kind, process, flags and padding (32 bits each).
    fn parse(message: &[u8]) -> Option<Self> {
        if !matches!(opcode(message), SETLK | SETLKW) {
            return None;
        }
        let kind = match u32_at(message, HEADER + 32)?.cast_signed() {
            libc::F_RDLCK => Some(LockKind::Shared),
            libc::F_WRLCK => Some(LockKind::Exclusive),
            _ => None,
        };
        Some(Self {
            of: Owner {
                node: u64_at(message, 16)?,
                is_flock: u32_at(message, HEADER + 40)? & FLOCK != 0,
                owner: u64_at(message, HEADER + 8)?,
            },
            start: u64_at(message, HEADER + 16)?,
            end: u64_at(message, HEADER + 24)?,
            kind,
        })
    }
}

impl LockRecord {
    /// Records the reply to a request on the stream `generation`. Returns false if the request must
    /// be repeated, because a later stream was attached.
    pub(super) fn replied(&mut self, request: &[u8], error: i32, generation: u64) -> bool {
        let Some(lock) = LockRequest::parse(request) else {
            return true;
        };
        if generation != self.generation {
            return false;
        }
        if error == 0 {
            let ranges = self.held.entry(lock.of).or_default();
            ranges.set(lock.start, lock.end, lock.kind);
            if ranges.is_empty() {
                self.held.remove(&lock.of);
            }
        } else if lock.of.is_flock && matches!(-error, libc::EAGAIN | libc::EINTR) {
            // A request that is not granted has removed the lock that it would have replaced.
            self.held.remove(&lock.of);
        }
        true
    }

    /// Returns whether a request must fail because a lock was lost. An owner that unlocks its lost
    /// lock can use the file again.
    pub(super) fn is_denied(&mut self, request: &[u8]) -> bool {
        if self.lost.is_empty() {
            return false;
        }
        if let Some(lock) = LockRequest::parse(request) {
            if lock.kind.is_none() {
                self.lost.remove(&lock.of);
            }
            return self.lost.contains(&lock.of);
        }
        let node = u64_at(request, 16).unwrap_or_default();
        CONTENT.contains(&opcode(request)) && self.lost.iter().any(|lost| lost.node == node)
    }

    /// Records that a process closes a descriptor (FLUSH). Returns whether the owner had locks,
    /// which the server must release.
    pub(super) fn closed(&mut self, request: &[u8]) -> bool {
        let owner = u64_at(request, HEADER + 16);
        self.end(request, false, owner)
    }

    /// Records that an open file was closed (RELEASE). Returns whether it had a lock, which the
    /// server must release.
    pub(super) fn released(&mut self, request: &[u8]) -> bool {
        let owner = u64_at(request, HEADER + 16);
        self.end(request, true, owner)
    }

    /// Removes the locks of an owner. `is_flock` is true for locks of `flock`, and false for locks
    /// of `fcntl`. Returns whether the owner had locks, which the server must release.
    fn end(&mut self, request: &[u8], is_flock: bool, owner: Option<u64>) -> bool {
        let (Some(node), Some(owner)) = (u64_at(request, 16), owner) else {
            return true;
        };
        let of = Owner {
            node,
            is_flock,
            owner,
        };
        let was_lost = self.lost.remove(&of);
        self.held.remove(&of).is_some() || was_lost
    }

    /// Returns requests for all locks, with which the stream `generation` starts.
    pub(super) fn reclaim(&mut self, generation: u64) -> Vec<u8> {
        self.generation = generation;
        self.reclaimed.clear();
        let mut messages = Vec::new();
        for (of, ranges) in &self.held {
            for range in ranges.iter() {
                self.requests += 1;
                let id = OWN_ID | self.requests;
                self.reclaimed.insert(id, *of);
                let kind = match range.kind {
                    LockKind::Shared => libc::F_RDLCK,
                    LockKind::Exclusive => libc::F_WRLCK,
                };
                let flags = RECLAIM | if of.is_flock { FLOCK } else { 0 };
                let mut put = |bytes: &[u8]| messages.extend_from_slice(bytes);
                // Length of the request: a header of 40 bytes and a body of 48 (`fuse_lk_in`).
                put(&88_u32.to_le_bytes());
                put(&SETLK.to_le_bytes());
                put(&id.to_le_bytes());
                put(&of.node.to_le_bytes());
                // User, group, process and padding.
                put(&[0; 16]);
                // Fields of the body, in the order of `LockRequest::parse`. The file handle is 0.
                put(&0_u64.to_le_bytes());
                put(&of.owner.to_le_bytes());
                put(&range.start.to_le_bytes());
                put(&range.end.to_le_bytes());
                put(&kind.cast_unsigned().to_le_bytes());
                put(&0_u32.to_le_bytes());
                put(&flags.to_le_bytes());
                put(&0_u32.to_le_bytes());
            }
        }
        messages
    }

    /// Records the reply to a request of [`Self::reclaim`]. Returns false if the reply is for
    /// another request.
    pub(super) fn reclaimed(&mut self, id: u64, error: i32, generation: u64) -> bool {
        if id & OWN_ID == 0 {
            return false;
        }
        if generation == self.generation
            && let Some(of) = self.reclaimed.remove(&id)
            && error != 0
            // The owner may have closed the file meanwhile.
            && self.held.remove(&of).is_some()
        {
            self.lost.insert(of);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a request of the FUSE protocol with this opcode, node and body.
    fn request(opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
        let mut message = vec![0; 16];
        message[4..8].copy_from_slice(&opcode.to_le_bytes());
        message.extend_from_slice(&node.to_le_bytes());
        message.resize(HEADER, 0);
        message.extend_from_slice(body);
        message
    }

    /// Returns a request for a lock (`struct fuse_lk_in`) on node 5, by process 7.
    fn lock(owner: u64, range: (u64, u64), kind: i32, flags: u32) -> Vec<u8> {
        let mut body = vec![0; 8];
        for value in [owner, range.0, range.1] {
            body.extend_from_slice(&value.to_le_bytes());
        }
        for value in [kind.cast_unsigned(), 7, flags, 0] {
            body.extend_from_slice(&value.to_le_bytes());
        }
        request(SETLK, 5, &body)
    }

    /// Returns a FLUSH or RELEASE of node 5 by this owner.
    fn close(opcode: u32, owner: u64) -> Vec<u8> {
        let mut body = vec![0; 16];
        body.extend_from_slice(&owner.to_le_bytes());
        request(opcode, 5, &body)
    }

    #[test]
    fn held_locks_are_requested_again_and_a_lost_lock_makes_its_file_unusable_until_it_is_closed() {
        let mut record = LockRecord::default();
        // Replies without error (0) on the first stream (0).
        record.replied(&lock(1, (0, 9), libc::F_WRLCK, 0), 0, 0);
        record.replied(&lock(1, (4, 5), libc::F_UNLCK, 0), 0, 0);
        record.replied(&lock(2, (0, u64::MAX), libc::F_RDLCK, FLOCK), 0, 0);
        // A lock that was not granted, and is not requested again.
        record.replied(&lock(3, (0, 9), libc::F_WRLCK, 0), -libc::EAGAIN, 0);
        let messages = record.reclaim(1);
        // A late reply of the previous stream is ignored: the request is repeated.
        assert!(!record.replied(&lock(4, (0, 9), libc::F_RDLCK, 0), 0, 0));
        // A request for a lock has 88 bytes: a header of `HEADER` bytes and a body of 48 bytes.
        let all: Vec<_> = messages.chunks(88).collect();
        assert_eq!(all.len(), 3);
        let parsed: Vec<_> = all
            .iter()
            .map(|message| LockRequest::parse(message).unwrap())
            .map(|lock| (lock.of.owner, lock.of.is_flock, lock.start, lock.end))
            .collect();
        let expected = [(1, false, 0, 3), (1, false, 6, 9), (2, true, 0, u64::MAX)];
        assert_eq!(parsed, expected);
        let id = |message: &[u8]| u64_at(message, 8).unwrap();
        assert!(record.reclaimed(id(all[0]), 0, 1));
        assert!(record.reclaimed(id(all[1]), -libc::EAGAIN, 1));
        assert!(record.reclaimed(id(all[2]), 0, 1));
        assert!(!record.reclaimed(6, 0, 1));
        for opcode in CONTENT {
            assert!(record.is_denied(&request(opcode, 5, &[])));
            assert!(!record.is_denied(&request(opcode, 6, &[])));
        }
        assert!(record.is_denied(&lock(1, (0, 0), libc::F_RDLCK, 0)));
        assert!(!record.is_denied(&lock(9, (0, 0), libc::F_RDLCK, 0)));
        // The opcode of FLUSH is 25, of RELEASE 18, and of READ 15.
        assert!(!record.closed(&close(25, 9)));
        assert!(record.closed(&close(25, 1)));
        assert!(!record.is_denied(&request(15, 5, &[])));
        assert!(record.released(&close(18, 2)));
        assert!(!record.released(&close(18, 2)));
        assert!(record.reclaim(2).is_empty());
    }
}
