//! Simulated store: records with conditional writes, and roots (identities) of the stored
//! snapshots. A *verdict* is the decision of the coordinator, committed in the record of the shard,
//! that an epoch is dead.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox. An *epoch*
//! of a member lasts from its registration with the coordinator until the coordinator declares it
//! dead.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor. A
//! *shard* is a part of the fleet's sandboxes. Its record lists the members and names the
//! coordinator.

use jiffy_fleet_core::record::{Head, HeadState, ShardRecord};
use jiffy_fleet_core::{
    Digest, MemberId, Millis, Owner, ReadOutcome, SandboxId, ShardId, Term, Version, WriteOutcome,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Key of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    Shard,
    Head(SandboxId),
}

/// Identity of a write: host, process, operation and number. Equal tokens mean equal bytes, so a
/// repeated write is recognised.
pub type Token = (usize, u32, u64, u64);

/// Request that arrives at the store.
#[derive(Debug, Clone)]
pub enum Request {
    Read,
    Write {
        bytes: Vec<u8>,
        expected: Option<Version>,
        token: Token,
    },
    Purge {
        expected: Version,
    },
}

/// Result of a request, before it is decoded for its caller.
#[derive(Debug, Clone)]
pub enum Answer {
    Read(Option<(Vec<u8>, Version)>),
    Done(Version),
    Lost(Option<(Vec<u8>, Version)>),
    /// The write was not sent.
    Rejected,
    Unknown,
    Failed,
}

struct Stored {
    bytes: Vec<u8>,
    version: u64,
    token: Token,
}

/// Facts about the shard, from the order in which writes were applied.
#[derive(Default)]
pub struct Truth {
    /// Epochs that are dead, with the time of their verdict.
    pub dead: BTreeMap<Owner, u64>,
    /// Time at which each term started.
    pub terms: BTreeMap<Term, u64>,
    /// Time at which a process sent the replacement of the shard's record that was applied last. By
    /// host and process, on the clock of the host.
    pub renewed: HashMap<(usize, u32), Millis>,
    pub verdicts: u64,
    /// Members that the last replacement of the record has registered in a new epoch, after a
    /// verdict.
    pub returned: Vec<MemberId>,
}

/// Records and roots in the store.
#[derive(Default)]
pub struct Store {
    records: BTreeMap<Key, Stored>,
    next_version: u64,
    pub roots: BTreeSet<Digest>,
    pub truth: Truth,
    /// Verdicts within the grace period are violations.
    pub checks_grace: bool,
}

fn version(number: u64) -> Version {
    Version(number.to_be_bytes().into())
}

impl Store {
    /// Stores a record before the simulation starts.
    pub fn create(&mut self, key: Key, bytes: Vec<u8>) {
        self.next_version += 1;
        let version = self.next_version;
        let token = (usize::MAX, 0, 0, version);
        self.records.insert(
            key,
            Stored {
                bytes,
                version,
                token,
            },
        );
    }

    fn current(&self, key: Key) -> Option<(Vec<u8>, Version)> {
        let stored = self.records.get(&key)?;
        Some((stored.bytes.clone(), version(stored.version)))
    }

    pub fn head(&self, id: SandboxId) -> Option<Head> {
        let stored = self.records.get(&Key::Head(id))?;
        Some(Head::decode(&stored.bytes, id).unwrap())
    }

    /// Returns all heads with their versions.
    pub fn heads(&self) -> Vec<(Head, Version)> {
        let heads = self.records.iter().filter_map(|(key, stored)| match key {
            Key::Head(id) => Some((
                Head::decode(&stored.bytes, *id).unwrap(),
                version(stored.version),
            )),
            Key::Shard => None,
        });
        heads.collect()
    }

    pub fn shard(&self) -> ShardRecord {
        let stored = &self.records[&Key::Shard];
        ShardRecord::decode(&stored.bytes, &crate::samples::fleet(), ShardId(0)).unwrap()
    }

    /// Executes a request. Returns a violation.
    pub fn execute(&mut self, now: u64, key: Key, request: &Request) -> (Answer, Option<String>) {
        match request {
            Request::Read => (Answer::Read(self.current(key)), None),
            Request::Purge { expected } => {
                if self
                    .current(key)
                    .is_some_and(|(_, version)| version == *expected)
                {
                    self.records.remove(&key);
                }
                // The answer to a purge is ignored.
                (Answer::Failed, None)
            }
            Request::Write {
                bytes,
                expected,
                token,
            } => {
                let current = self.records.get(&key);
                if let Some(stored) = current.filter(|stored| stored.token == *token) {
                    return (Answer::Done(version(stored.version)), None);
                }
                if current.map(|stored| version(stored.version)) != *expected {
                    return (Answer::Lost(self.current(key)), None);
                }
                let former = current.map(|stored| stored.bytes.clone());
                self.next_version += 1;
                let number = self.next_version;
                let stored = Stored {
                    bytes: bytes.clone(),
                    version: number,
                    token: *token,
                };
                self.records.insert(key, stored);
                let violation = match key {
                    Key::Shard => self.shard_replaced(now, &former.unwrap()),
                    Key::Head(id) => self.head_violation(id),
                };
                (Answer::Done(version(number)), violation)
            }
        }
    }

    /// Records the changes in a new record of the shard: terms, verdicts, and members that have
    /// returned. Returns a violation if a verdict came within the grace period of a term.
    fn shard_replaced(&mut self, now: u64, former: &[u8]) -> Option<String> {
        let former = ShardRecord::decode(former, &crate::samples::fleet(), ShardId(0)).unwrap();
        let record = self.shard();
        if record.term != former.term {
            self.truth.terms.insert(record.term, now);
        }
        let started = self.truth.terms.get(&record.term).copied().unwrap_or(0);
        let mut violation = None;
        self.truth.returned.clear();
        for row in &former.members {
            let new = record.row(row.id).unwrap();
            if new.state.is_live() && new.epoch != row.epoch {
                self.truth.returned.push(row.id);
            }
            if row.state.is_live() && (!new.state.is_live() || new.epoch != row.epoch) {
                let owner = Owner {
                    member: row.id,
                    epoch: row.epoch,
                };
                self.truth.dead.insert(owner, now);
                self.truth.verdicts += 1;
                // The grace period is 12 s on the clock of the coordinator, which may be 100 ppm
                // fast. Term 1 starts with the simulation, not with a takeover.
                if self.checks_grace && now - started < 11_990 && record.term != Term(1) {
                    violation = Some(format!(
                        "verdict on {owner} {} ms after the start of {}",
                        now - started,
                        record.term
                    ));
                }
            }
        }
        violation
    }

    /// Returns a violation if the head of a sandbox names a root that is not in the store.
    pub fn head_violation(&self, id: SandboxId) -> Option<String> {
        let head = self.head(id)?;
        if matches!(head.state(), HeadState::Killed(_)) {
            return None;
        }
        let root = head.root()?;
        (!self.roots.contains(&root)).then(|| {
            format!(
                "the head of {id} ({}) names a root that is not stored",
                head.revision
            )
        })
    }

    /// Returns whether the verdict on an epoch was committed.
    pub fn is_dead(&self, owner: Owner) -> bool {
        self.truth.dead.contains_key(&owner)
    }
}

/// Decodes the answer to a read.
pub fn read<R>(answer: Answer, decode: impl Fn(&[u8]) -> R) -> ReadOutcome<R> {
    match answer {
        Answer::Read(Some((bytes, version))) => {
            ReadOutcome::Found(Box::new(decode(&bytes)), version)
        }
        Answer::Read(None) => ReadOutcome::Missing,
        _ => ReadOutcome::Failed,
    }
}

/// Decodes the answer to a write.
pub fn written<R>(answer: Answer, decode: impl Fn(&[u8]) -> R) -> WriteOutcome<R> {
    match answer {
        Answer::Done(version) => WriteOutcome::Done(version),
        Answer::Lost(current) => {
            WriteOutcome::Lost(current.map(|(bytes, version)| Box::new((decode(&bytes), version))))
        }
        Answer::Rejected => WriteOutcome::Rejected,
        Answer::Read(_) | Answer::Unknown | Answer::Failed => WriteOutcome::Unknown,
    }
}
