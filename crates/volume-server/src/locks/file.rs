//! Locks of one file, and the requests that wait for them.
//!
//! The locks are advisory locks of programs in guests (fcntl(2), flock(2)). They exclude programs
//! in other guests that use the same volume. An *owner* of locks is a process (fcntl) or an open
//! file (flock) of a client.

use jiffy_proto::file_lock::{LockKind, LockRange, LockRanges};
use std::collections::{BTreeMap, VecDeque};

/// Families of locks, which do not exclude each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Family {
    /// Locks of ranges (fcntl).
    Record,
    /// Locks of whole files (flock).
    Flock,
}

/// Range of a request. `kind` is `None` to unlock the range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestRange {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) kind: Option<LockKind>,
}

/// Request for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LockRequest {
    /// Id of the request.
    pub(crate) id: u64,
    pub(crate) node: u64,
    pub(crate) family: Family,
    /// Number that the client's kernel chose for the owner.
    pub(crate) owner: u64,
    pub(crate) range: RequestRange,
    /// Process of the client.
    pub(crate) pid: u32,
    /// True to wait for the lock.
    pub(crate) waits: bool,
    /// True if the client held the lock before its connection was lost.
    pub(crate) is_reclaim: bool,
}

/// A client and one of its owners.
pub(crate) type Holder = (u64, u64);

/// Locks of an owner.
#[derive(Debug, Default)]
struct Held {
    ranges: LockRanges,
    pid: u32,
}

/// Locks of one family on one file.
#[derive(Debug, Default)]
pub(crate) struct FileLocks {
    /// Granted locks by holder.
    held: BTreeMap<Holder, Held>,
    /// Requests that wait, in the order of their arrival.
    pub(crate) waiting: VecDeque<(u64, LockRequest)>,
}

impl LockRequest {
    /// Returns the requested lock. `None` if the request unlocks.
    pub(crate) fn lock(&self) -> Option<LockRange> {
        let range = self.range;
        let kind = range.kind?;
        Some(LockRange {
            start: range.start,
            end: range.end,
            kind,
        })
    }
}

impl FileLocks {
    pub(crate) fn is_unused(&self) -> bool {
        self.held.is_empty() && self.waiting.is_empty()
    }

    /// Returns the locks of other owners that exclude a request, with their holders and processes.
    pub(crate) fn conflicts(
        &self,
        client: u64,
        request: &LockRequest,
    ) -> impl Iterator<Item = (Holder, LockRange, u32)> {
        let (own, lock) = ((client, request.owner), request.lock());
        let others = self.held.iter().filter(move |(holder, _)| **holder != own);
        others.flat_map(move |(holder, held)| {
            let excluding =
                move |range: &&LockRange| lock.is_some_and(|lock| range.conflicts_with(&lock));
            let ranges = held.ranges.iter().filter(excluding);
            ranges.map(|range| (*holder, *range, held.pid))
        })
    }

    /// Returns the number of ranges that the client would have more than now after the request.
    pub(crate) fn growth(&self, client: u64, request: &LockRequest) -> usize {
        let held = self.held.get(&(client, request.owner));
        let mut ranges = held.map(|held| held.ranges.clone()).unwrap_or_default();
        let before = ranges.len();
        ranges.set(request.range.start, request.range.end, request.range.kind);
        ranges.len().saturating_sub(before)
    }

    /// Executes a request that no lock excludes. Returns the numbers of ranges of the owner before
    /// and after.
    pub(crate) fn set(&mut self, client: u64, request: &LockRequest) -> (usize, usize) {
        let holder = (client, request.owner);
        let held = self.held.entry(holder).or_default();
        let before = held.ranges.len();
        held.ranges
            .set(request.range.start, request.range.end, request.range.kind);
        held.pid = request.pid;
        let after = held.ranges.len();
        if after == 0 {
            self.held.remove(&holder);
        }
        (before, after)
    }

    /// Removes the locks of an owner. Returns their number.
    pub(crate) fn remove(&mut self, holder: Holder) -> usize {
        let removed = self.held.remove(&holder);
        removed.map_or(0, |held| held.ranges.len())
    }

    /// Removes the locks and requests of a client.
    pub(crate) fn remove_client(&mut self, client: u64) {
        self.held.retain(|(of, _), _| *of != client);
        self.waiting.retain(|(of, _)| *of != client);
    }
}
