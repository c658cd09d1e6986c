//! Sandboxes in the journals of hosts. The *journal* is the database in which a host records its
//! own sandboxes.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox. An *epoch*
//! of a member lasts from its registration with the coordinator until the coordinator declares it
//! dead.
//!
//! A *share* is the part of an API key's limit that one member may use. A *claim* of a sandbox is
//! the write that makes a member its owner in the head.

use super::host::Target;
use super::operations::Operation;
use super::records::{Answer, Key, Request, read};
use super::world::World;
use jiffy_fleet_core::record::{Head, HeadState, Policy, SandboxRecord};
use jiffy_fleet_core::{
    Digest, Epoch, HeadUpdate, HeldSandbox, Owner, Publish, PublishInput, Purpose, ReadOutcome,
    Reconciliation, Resume, Revision, Row, RowChange, RowState, SandboxHash, SandboxId, Version,
    reconcile,
};

/// Local state of a sandbox, which is in the journal of its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Local {
    Running,
    Paused,
    Killing,
}

/// Sandbox in the journal of a host.
#[derive(Debug, Clone)]
pub struct Held {
    /// Index of the budget.
    pub owner: usize,
    pub local: Local,
    /// State of the guest: a number that grows while it runs.
    pub value: u64,
    pub head: Option<(Head, Version)>,
    /// Root of the local state. `None` if the state is not stored.
    pub root: Option<Digest>,
}

impl Held {
    pub fn is_running(&self) -> bool {
        self.local == Local::Running
    }

    /// Returns the revision of the head that the host knows.
    pub fn revision(&self) -> Option<Revision> {
        self.head.as_ref().map(|(head, _)| head.revision)
    }

    /// Returns the owner that the head names, if the sandbox runs according to it.
    pub fn owner_of_head(&self) -> Option<Owner> {
        match self.head.as_ref()?.0.state() {
            HeadState::Running(owner) => Some(owner),
            _ => None,
        }
    }

    /// Returns the row of the sandbox: its entry in the directory of the coordinator.
    fn row(&self, id: SandboxId) -> Row {
        Row {
            hash: hash(id),
            revision: self.revision().unwrap_or_default(),
            state: match (self.local, self.root) {
                (Local::Running, _) => RowState::Running,
                (_, Some(_)) => RowState::Stored,
                _ => RowState::Paused,
            },
        }
    }
}

/// Returns a hash of a sandbox id. The real one is keyed by a secret.
pub fn hash(id: SandboxId) -> SandboxHash {
    let text = id.to_string();
    let mut value = 0xcbf2_9ce4_8422_2325_u64;
    let mut bytes = [0; 16];
    for half in bytes.chunks_mut(8) {
        for byte in text.bytes() {
            value = (value ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        half.copy_from_slice(&value.to_be_bytes());
    }
    SandboxHash(bytes)
}

impl World {
    /// Creates a sandbox within the shares of a host.
    pub fn create(&mut self, host: usize, owner: usize) {
        if !self.hosts[host].is_accepting || !self.admit(host, owner) {
            return;
        }
        let id = self.new_sandbox();
        let held = Held {
            owner,
            local: Local::Running,
            value: 1,
            head: None,
            root: None,
        };
        self.hold(host, id, held);
    }

    /// Counts a sandbox in the share of the host. Returns false if the share is exhausted.
    pub fn admit(&mut self, host: usize, owner: usize) -> bool {
        let key = self.owners[owner].0.clone();
        let entry = &mut self.hosts[host];
        let local = entry.clock(self.now);
        let member = entry.member.as_mut().unwrap();
        member.shares().admit(local, &key, 1)
    }

    /// Returns the part of the share that a sandbox has used.
    pub fn release(&mut self, host: usize, owner: usize) {
        let key = self.owners[owner].0.clone();
        let entry = &mut self.hosts[host];
        let local = entry.clock(self.now);
        if let Some(member) = &mut entry.member {
            member.shares().release(local, &key, 1);
        }
    }

    /// Stores the state of a sandbox in the journal and reports it to the coordinator.
    pub fn hold(&mut self, host: usize, id: SandboxId, held: Held) {
        let row = held.row(id);
        self.trace(
            host,
            &format!("holds {id}: {:?} {:?}", held.local, held.revision()),
        );
        self.hosts[host].held.insert(id, held);
        self.change_row(host, RowChange::Put(row));
    }

    /// Reports a change of a row to the coordinator.
    fn change_row(&mut self, host: usize, change: RowChange) {
        let mut effects = Vec::new();
        if let Some(member) = &mut self.hosts[host].member {
            member.change_row(change, &mut effects);
        }
        self.perform(host, effects);
    }

    /// Removes a sandbox from the journal.
    pub fn forget(&mut self, host: usize, id: SandboxId) {
        self.trace(host, &format!("forgets {id}"));
        if let Some(held) = self.hosts[host].held.remove(&id) {
            if held.is_running() {
                self.release(host, held.owner);
            }
            self.change_row(host, RowChange::Removed(hash(id)));
        }
    }

    /// Returns the rows of a host that follow a hash, and whether they are the last ones.
    pub fn list_rows(
        &self,
        host: usize,
        after: Option<SandboxHash>,
        limit: usize,
    ) -> (Vec<Row>, bool) {
        // Small pages, so that lists have several.
        let limit = limit.min(3);
        let held = self.hosts[host].held.iter();
        let mut rows: Vec<_> = held
            .map(|(&id, held)| held.row(id))
            .filter(|row| after.is_none_or(|after| row.hash > after))
            .collect();
        rows.sort_by_key(|row| row.hash);
        let is_last = rows.len() <= limit;
        rows.truncate(limit);
        (rows, is_last)
    }

    /// Pauses a running sandbox.
    pub fn pause(&mut self, host: usize, id: SandboxId) {
        let mut held = self.hosts[host].held[&id].clone();
        held.local = Local::Paused;
        held.root = None;
        self.release(host, held.owner);
        self.hold(host, id, held);
        self.publish(host, id);
    }

    /// Starts the upload of a paused sandbox, after which its head names the new snapshot.
    pub fn publish(&mut self, host: usize, id: SandboxId) {
        let held = self.hosts[host].held[&id].clone();
        let mut root = [0; 32];
        root[..8].copy_from_slice(&(self.roots.len() as u64 + 1).to_be_bytes());
        let root = Digest(root);
        self.roots.insert(root, (id, held.value));
        let mut snapshot = crate::samples::snapshot(0);
        snapshot.root = root;
        let publish = Publish::new(PublishInput {
            member: self.hosts[host].id,
            id,
            current: held.head,
            snapshot,
            record: SandboxRecord::Inline("{}".to_owned()),
            policy: Policy::default(),
        });
        let (machine, effect) = publish.unwrap();
        let number = self.operation_number(host);
        let operation = Operation::Publish {
            number,
            machine: Box::new(machine),
            root,
            value: held.value,
        };
        self.hosts[host].operations.insert(id, operation);
        self.publish_effects(host, id, vec![effect]);
    }

    /// Starts the resume of a sandbox by a read of its head. The head decides whether this host may
    /// run it.
    pub fn resume(&mut self, host: usize, id: SandboxId, owner: usize, from_stored: bool) {
        // Admit the sandbox within the share of the host before the claim: a claimed sandbox must
        // be able to run.
        let is_counted = self.admit(host, owner);
        if !is_counted && !self.has_no_limits {
            return;
        }
        let number = self.operation_number(host);
        let (machine, _) = Resume::new(from_stored);
        let operation = Operation::Resume {
            number,
            machine,
            owner,
            root: None,
            is_counted,
        };
        self.hosts[host].operations.insert(id, operation);
        self.read_head(host, id, number);
    }

    /// Starts an update of a head by a read of it.
    pub fn update(&mut self, host: usize, id: SandboxId, purpose: Purpose) {
        let number = self.operation_number(host);
        let (machine, _) = HeadUpdate::new(id, purpose);
        let operation = Operation::Update {
            number,
            machine,
            purpose,
        };
        self.hosts[host].operations.insert(id, operation);
        self.read_head(host, id, number);
    }

    /// Starts the comparison of all sandboxes of a host with their heads.
    pub fn start_reconciling(&mut self, host: usize, epoch: Epoch) {
        let now = self.now;
        let entry = &mut self.hosts[host];
        entry.is_accepting = false;
        entry.reconcile_started = now;
        let ids: Vec<_> = entry.held.keys().copied().collect();
        entry.reconciling = ids.iter().copied().collect();
        for id in ids {
            let target = Target::Reconcile { id, epoch };
            self.call(host, target, Key::Head(id), Request::Read);
        }
        self.accept_if_reconciled(host);
    }

    /// Acts upon the head of a sandbox that a host has read after its registration.
    pub fn reconciled(&mut self, host: usize, id: SandboxId, epoch: Epoch, answer: Answer) {
        let member = self.hosts[host].id;
        let current = self.hosts[host].member.as_ref().and_then(|m| m.epoch());
        if current != Some(epoch) || !self.hosts[host].reconciling.contains(&id) {
            return;
        }
        let head = match read(answer, |bytes| Head::decode(bytes, id).unwrap()) {
            ReadOutcome::Found(head, version) => Some((*head, version)),
            ReadOutcome::Missing => None,
            ReadOutcome::Failed => {
                let target = Target::Reconcile { id, epoch };
                return self.call(host, target, Key::Head(id), Request::Read);
            }
        };
        // A change of the head from a former epoch may still be in progress. Read the head again,
        // until the change is finished.
        let operation = self.hosts[host].operations.get(&id);
        if matches!(operation, Some(Operation::Update { .. })) {
            let target = Target::Reconcile { id, epoch };
            return self.call(host, target, Key::Head(id), Request::Read);
        }
        self.hosts[host].reconciling.remove(&id);
        if let Some(held) = self.hosts[host].held.get(&id).cloned() {
            let local = HeldSandbox {
                is_running: held.is_running(),
                revision: held.revision(),
                root: held.root,
            };
            let is_busy = self.hosts[host].operations.contains_key(&id);
            let action = reconcile(member, &local, head.as_ref().map(|(head, _)| head));
            match action {
                _ if held.local == Local::Killing => {
                    if !is_busy {
                        self.start_kill(host, id, None);
                    }
                }
                Reconciliation::Retain => {}
                Reconciliation::Adopt => {
                    if !is_busy {
                        let mut held = held;
                        held.head = head;
                        self.hold(host, id, held);
                        let me = Owner { member, epoch };
                        self.update(host, id, Purpose::Adopt(me));
                    }
                }
                Reconciliation::Remove | Reconciliation::Kill => {
                    self.hosts[host].operations.remove(&id);
                    self.forget(host, id);
                    if action == Reconciliation::Kill {
                        self.update(host, id, Purpose::Confirm(member));
                    }
                }
            }
        }
        self.accept_if_reconciled(host);
    }

    /// Makes the host accept requests once all of its sandboxes are compared with their heads.
    fn accept_if_reconciled(&mut self, host: usize) {
        if self.hosts[host].reconciling.is_empty() {
            self.hosts[host].is_accepting = true;
            self.check_kills(host);
        }
    }

    /// Kills a sandbox: the journal first, then the head.
    pub fn start_kill(
        &mut self,
        host: usize,
        id: SandboxId,
        home: Option<jiffy_fleet_core::MemberId>,
    ) {
        if let Some(mut held) = self.hosts[host].held.get(&id).cloned() {
            if held.is_running() {
                self.release(host, held.owner);
            }
            held.local = Local::Killing;
            self.hold(host, id, held);
        }
        let by = self.hosts[host].id;
        self.update(host, id, Purpose::Kill { by, home });
    }
}
