//! Table of all locks, clients and waiting requests of a volume.
//!
//! The locks are advisory locks of programs in guests (fcntl(2), flock(2)). They exclude programs
//! in other guests that use the same volume. An *owner* of locks is a process (fcntl) or an open
//! file (flock) of a client.

use super::Outcome;
use super::file::{Family, FileLocks, Holder, LockRequest, RequestRange};
use nix::errno::Errno;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;

/// Maximum number of locked ranges of a client.
const MAX_LOCKS: usize = 1024;
/// Maximum number of waiting requests of a client, with late replies that it has not received.
const MAX_WAITING: usize = 256;
/// Maximum number of owners that the search for a deadlock visits.
const MAX_VISITED: usize = 64;

type Key = (u64, Family);

/// Reply to a request that waited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LateReply {
    /// Id of the request.
    pub id: u64,
    /// Error number. 0 if the lock was granted.
    pub error: i32,
}

/// Client with its locks.
#[derive(Debug)]
struct Client {
    replies: Sender<LateReply>,
    /// Number of granted locks.
    locks: usize,
    /// Number of waiting requests.
    waiting: usize,
    /// Number of late replies that the client has not received.
    undelivered: Arc<AtomicUsize>,
}

impl Client {
    /// Returns the number of waiting requests and of late replies that the client has not received.
    fn occupied(&self) -> usize {
        self.waiting + self.undelivered.load(Ordering::Relaxed)
    }
}

/// Locks of a volume.
#[derive(Debug)]
pub(super) struct Table {
    /// Clients by number.
    clients: HashMap<u64, Client>,
    next_client: u64,
    /// Files with locks or waiting requests.
    files: HashMap<Key, FileLocks>,
    /// True while only locks are granted that clients held before a restart of this process.
    is_reclaiming: bool,
    /// Other requests for locks that arrived while `is_reclaiming` was true.
    held_back: VecDeque<(u64, LockRequest)>,
    /// True if the marker file exists, by which the next process recognises lost locks.
    is_marked: bool,
}

impl Table {
    pub(super) fn new(is_reclaiming: bool) -> Self {
        Self {
            clients: HashMap::new(),
            next_client: 1,
            files: HashMap::new(),
            is_reclaiming,
            held_back: VecDeque::new(),
            is_marked: is_reclaiming,
        }
    }

    pub(super) fn is_marked(&self) -> bool {
        self.is_marked
    }

    pub(super) fn set_marked(&mut self) {
        self.is_marked = true;
    }

    /// Adds a client, and returns its number.
    pub(super) fn add_client(
        &mut self,
        replies: Sender<LateReply>,
        undelivered: Arc<AtomicUsize>,
    ) -> u64 {
        let number = self.next_client;
        self.next_client += 1;
        let client = Client {
            replies,
            locks: 0,
            waiting: 0,
            undelivered,
        };
        self.clients.insert(number, client);
        number
    }

    /// Releases all locks of a client whose connection has ended, and grants the requests that
    /// waited for them.
    pub(super) fn remove_client(&mut self, client: u64) {
        if self.clients.remove(&client).is_none() {
            return;
        }
        self.held_back.retain(|(of, _)| *of != client);
        let keys: Vec<Key> = self.files.keys().copied().collect();
        for key in keys {
            if let Some(file) = self.files.get_mut(&key) {
                file.remove_client(client);
            }
            self.grant_waiting(key);
        }
    }

    /// Executes a request of a client. While clients reclaim their locks after a restart, new locks
    /// are held back.
    pub(super) fn request(&mut self, client: u64, request: LockRequest) -> Result<Outcome, Errno> {
        let waiting = self.clients.get(&client).ok_or(Errno::EIO)?.occupied();
        let is_early = self.is_reclaiming && !request.is_reclaim;
        if is_early && request.range.kind.is_some() {
            if waiting >= MAX_WAITING {
                return Err(Errno::ENOLCK);
            }
            self.held_back.push_back((client, request));
            self.count_waiting(client, 1);
            return Ok(Outcome::Later);
        }
        self.acquire(client, request)
    }

    /// Executes a request, or lets it wait.
    fn acquire(&mut self, client: u64, request: LockRequest) -> Result<Outcome, Errno> {
        let key = (request.node, request.family);
        let state = self.clients.get(&client).ok_or(Errno::EIO)?;
        let (locks, waiting) = (state.locks, state.occupied());
        let file = self.files.entry(key).or_default();
        if file.conflicts(client, &request).next().is_none() {
            let growth = file.growth(client, &request);
            if growth > 0 && locks + growth > MAX_LOCKS {
                self.remove_unused(key);
                return Err(Errno::ENOLCK);
            }
            self.set(client, &request);
            self.grant_waiting(key);
            return Ok(Outcome::Done);
        }
        // As in Linux, flock first removes the lock that it replaces. Two holders of shared locks
        // that request exclusive locks would otherwise wait for each other.
        if request.family == Family::Flock {
            self.release(client, key, request.owner);
        }
        if !request.waits {
            return Err(Errno::EAGAIN);
        }
        if self.would_deadlock(client, &request) {
            return Err(Errno::EDEADLK);
        }
        if waiting >= MAX_WAITING {
            return Err(Errno::ENOLCK);
        }
        // The release may have removed the entry.
        let file = self.files.entry(key).or_default();
        file.waiting.push_back((client, request));
        self.count_waiting(client, 1);
        // The release may have removed the only conflict.
        self.grant_waiting(key);
        Ok(Outcome::Later)
    }

    /// Executes a request that no lock excludes.
    fn set(&mut self, client: u64, request: &LockRequest) {
        let key = (request.node, request.family);
        let (before, after) = self.files.entry(key).or_default().set(client, request);
        if let Some(state) = self.clients.get_mut(&client) {
            state.locks = (state.locks + after).saturating_sub(before);
        }
        self.remove_unused(key);
    }

    /// Removes the entry of a file without locks and without waiting requests.
    fn remove_unused(&mut self, key: Key) {
        if self.files.get(&key).is_some_and(FileLocks::is_unused) {
            self.files.remove(&key);
        }
    }

    /// Releases all locks of one owner on a file.
    pub(super) fn release(&mut self, client: u64, key: Key, owner: u64) {
        let Some(file) = self.files.get_mut(&key) else {
            return;
        };
        let removed = file.remove((client, owner));
        if let Some(state) = self.clients.get_mut(&client) {
            state.locks = state.locks.saturating_sub(removed);
        }
        if removed > 0 {
            self.grant_waiting(key);
        }
    }

    /// Grants requests that no lock excludes any longer, in the order of their arrival.
    fn grant_waiting(&mut self, key: Key) {
        loop {
            let Some(file) = self.files.get(&key) else {
                return;
            };
            let mut waiting = file.waiting.iter();
            let is_free = |(client, request): &(u64, LockRequest)| {
                file.conflicts(*client, request).next().is_none()
            };
            let Some(position) = waiting.position(is_free) else {
                break;
            };
            let file = self.files.get_mut(&key);
            let Some((client, request)) = file.and_then(|file| file.waiting.remove(position))
            else {
                break;
            };
            let growth = self
                .files
                .get(&key)
                .map_or(1, |file| file.growth(client, &request));
            let locks = self.clients.get(&client).map_or(0, |state| state.locks);
            let error = if growth > 0 && locks + growth > MAX_LOCKS {
                Errno::ENOLCK as i32
            } else {
                self.set(client, &request);
                0
            };
            self.reply(client, request.id, error);
        }
        self.remove_unused(key);
    }

    /// Ends the time in which only earlier locks are granted.
    pub(super) fn end_reclaims(&mut self) {
        self.is_reclaiming = false;
        for (client, request) in std::mem::take(&mut self.held_back) {
            // The request is counted again if it waits.
            self.count_waiting(client, -1);
            let error = match self.acquire(client, request) {
                Ok(Outcome::Later) => continue,
                Ok(Outcome::Done) => 0,
                Err(e) => e as i32,
            };
            self.send(client, request.id, error);
        }
    }

    /// Ends the waiting of a request, with `EINTR`, because a signal interrupted the waiting
    /// process. A request that has its answer already is unknown here.
    pub(super) fn interrupt(&mut self, client: u64, id: u64) {
        let is_it = |(of, request): &(u64, LockRequest)| *of == client && request.id == id;
        let take = |queue: &mut VecDeque<(u64, LockRequest)>| {
            let position = queue.iter().position(is_it);
            position.and_then(|at| queue.remove(at)).is_some()
        };
        let mut files = self.files.values_mut();
        let was_waiting = files.any(|file| take(&mut file.waiting)) || take(&mut self.held_back);
        if was_waiting {
            self.reply(client, id, Errno::EINTR as i32);
            self.files.retain(|_, file| !file.is_unused());
        }
    }

    /// Replies to a request that has waited.
    fn reply(&mut self, client: u64, id: u64, error: i32) {
        self.count_waiting(client, -1);
        self.send(client, id, error);
    }

    fn send(&self, client: u64, id: u64, error: i32) {
        if let Some(state) = self.clients.get(&client) {
            state.undelivered.fetch_add(1, Ordering::Relaxed);
            // Ignore the error: the client is about to be removed.
            let _ = state.replies.send(LateReply { id, error });
        }
    }

    fn count_waiting(&mut self, client: u64, change: isize) {
        if let Some(state) = self.clients.get_mut(&client) {
            state.waiting = state.waiting.saturating_add_signed(change);
        }
    }

    /// Returns a lock that conflicts with a request. `None` if the lock can be granted.
    pub(super) fn conflict(&self, client: u64, request: &LockRequest) -> Option<LockRequest> {
        let file = self.files.get(&(request.node, request.family))?;
        let ((of, owner), range, pid) = file.conflicts(client, request).next()?;
        Some(LockRequest {
            owner,
            // Processes of other guests have no number in this guest.
            pid: if of == client { pid } else { 0 },
            range: RequestRange {
                start: range.start,
                end: range.end,
                kind: Some(range.kind),
            },
            ..*request
        })
    }

    /// Returns whether a holder of a lock that excludes the request waits, directly or indirectly,
    /// for the owner of the request. Only ranges are checked, as in Linux.
    fn would_deadlock(&self, client: u64, request: &LockRequest) -> bool {
        if request.family == Family::Flock {
            return false;
        }
        let own: Holder = (client, request.owner);
        let mut visited: HashSet<Holder> = HashSet::new();
        let mut open = vec![(client, *request)];
        while let Some((client, request)) = open.pop() {
            let Some(file) = self.files.get(&(request.node, request.family)) else {
                continue;
            };
            for (holder, _, _) in file.conflicts(client, &request) {
                if holder == own {
                    return true;
                }
                if visited.len() < MAX_VISITED && visited.insert(holder) {
                    let all = self.files.values().flat_map(|file| &file.waiting);
                    let of_holder = all.filter(|(client, request)| {
                        (*client, request.owner) == holder && request.family == Family::Record
                    });
                    open.extend(of_holder);
                }
            }
        }
        false
    }
}
