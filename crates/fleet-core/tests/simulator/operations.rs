//! Operations on heads: they pass events to the state machines of resume, publish and update, and
//! execute the effects (actions) that these return.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox. A *root*
//! identifies the snapshot of a sandbox in the store.
//!
//! A *share* is the part of an API key's limit that one member may use. The *journal* is the
//! database in which a host records its own sandboxes.
//!
//! A *claim* of a sandbox is the write that makes a member its owner in the head. To *publish* a
//! paused sandbox is to upload its snapshot and to enter the root in the head. An *update* changes
//! the head for another purpose, such as a kill.

use super::host::{Input, Target};
use super::mutation::Mutation;
use super::records::{Answer, Key, Request, read, written};
use super::sandboxes::{Held, Local};
use super::world::{Action, World};
use jiffy_fleet_core::record::{Head, HeadState};
use jiffy_fleet_core::{
    Digest, HeadUpdate, HeadWrite, Publish, PublishEffect, PublishEvent, Purpose, Resume,
    ResumeAnswer, ResumeEffect, ResumeEvent, ResumeInput, SandboxId, UpdateEffect, UpdateEvent,
    Version,
};

/// Operation of a process on a sandbox.
#[derive(Debug)]
pub enum Operation {
    Resume {
        number: u64,
        machine: Resume,
        /// Index of the budget.
        owner: usize,
        /// Snapshot that is being restored.
        root: Option<Digest>,
        /// True while the sandbox is admitted within the share of the host, but does not run.
        is_counted: bool,
    },
    Publish {
        number: u64,
        machine: Box<Publish>,
        root: Digest,
        /// State of the guest in the snapshot.
        value: u64,
    },
    Update {
        number: u64,
        machine: HeadUpdate,
        purpose: Purpose,
    },
}

impl Operation {
    fn number(&self) -> u64 {
        match self {
            Self::Resume { number, .. }
            | Self::Publish { number, .. }
            | Self::Update { number, .. } => *number,
        }
    }
}

/// Event of an operation, except answers of the store.
#[derive(Debug, Clone)]
pub enum OperationEvent {
    Restored,
    RestoreFailed,
    ManifestWritten,
    ManifestFailed,
    Timer,
}

impl World {
    /// Returns the number of a new operation of a host.
    pub fn operation_number(&mut self, host: usize) -> u64 {
        self.hosts[host].next_operation += 1;
        self.hosts[host].next_operation
    }

    /// Requests the head of a sandbox for an operation.
    pub fn read_head(&mut self, host: usize, id: SandboxId, operation: u64) {
        let target = Target::Operation {
            id,
            operation,
            write: None,
        };
        self.call(host, target, Key::Head(id), Request::Read);
    }

    /// Starts a write of the head of a sandbox for an operation.
    fn write_head(&mut self, host: usize, id: SandboxId, operation: u64, write: HeadWrite) {
        let target = Target::Operation {
            id,
            operation,
            write: Some(write.write.0),
        };
        let bytes = write.head.encode().unwrap();
        let number = (operation, write.write.0);
        self.write(host, target, Key::Head(id), bytes, write.expected, number);
    }

    /// Passes an answer of the store to an operation. `write` is the number of the write, or `None`
    /// for a read. The answer is ignored if the operation has ended.
    pub fn operation_answered(
        &mut self,
        host: usize,
        id: SandboxId,
        operation: u64,
        write: Option<u64>,
        answer: Answer,
    ) {
        let decode = |bytes: &[u8]| Head::decode(bytes, id).unwrap();
        let write = write.map(jiffy_fleet_core::WriteId);
        match self.take_operation(host, id, operation) {
            Some(Operation::Resume { .. }) => {
                let event = match write {
                    None => ResumeEvent::HeadRead(read(answer, decode)),
                    Some(write) => ResumeEvent::HeadWritten {
                        write,
                        outcome: written(answer, decode),
                    },
                };
                self.resume_event(host, id, event);
            }
            Some(Operation::Publish { .. }) => {
                if let Some(write) = write {
                    let outcome = written(answer, decode);
                    self.publish_event(host, id, PublishEvent::HeadWritten { write, outcome });
                }
            }
            Some(Operation::Update { .. }) => {
                let event = match write {
                    None => UpdateEvent::HeadRead(read(answer, decode)),
                    Some(write) => UpdateEvent::HeadWritten {
                        write,
                        outcome: written(answer, decode),
                    },
                };
                self.update_event(host, id, event);
            }
            None => {}
        }
    }

    /// Passes an event to an operation. The event is ignored if the operation has ended.
    pub fn operation_event(
        &mut self,
        host: usize,
        id: SandboxId,
        operation: u64,
        event: OperationEvent,
    ) {
        match (self.take_operation(host, id, operation), event) {
            (Some(Operation::Resume { root, .. }), OperationEvent::Restored) => {
                if self.mutation == Mutation::IdentityBeforeClaim {
                    let value = root.map_or(0, |root| self.roots[&root].1);
                    self.check_identity(host, id, None, value);
                }
                self.resume_event(host, id, ResumeEvent::Restored);
            }
            (Some(Operation::Resume { .. }), OperationEvent::RestoreFailed) => {
                self.resume_event(host, id, ResumeEvent::RestoreFailed);
            }
            (Some(Operation::Resume { .. }), OperationEvent::Timer) => {
                self.resume_event(host, id, ResumeEvent::Timer);
            }
            (Some(Operation::Publish { .. }), OperationEvent::ManifestWritten) => {
                self.publish_event(host, id, PublishEvent::ManifestWritten);
            }
            (Some(Operation::Publish { .. }), OperationEvent::ManifestFailed) => {
                self.publish_event(host, id, PublishEvent::ManifestFailed);
            }
            (Some(Operation::Publish { .. }), OperationEvent::Timer) => {
                self.publish_event(host, id, PublishEvent::Timer);
            }
            (Some(Operation::Update { .. }), OperationEvent::Timer) => {
                self.update_event(host, id, UpdateEvent::Timer);
            }
            _ => {}
        }
    }

    /// Returns the operation of a sandbox if it has this number.
    fn take_operation(&self, host: usize, id: SandboxId, number: u64) -> Option<&Operation> {
        let operation = self.hosts[host].operations.get(&id)?;
        (operation.number() == number).then_some(operation)
    }

    /// Delivers an event to the operation of a sandbox after a delay.
    fn operation_later(&mut self, host: usize, id: SandboxId, delay: u64, event: OperationEvent) {
        let Some(operation) = self.hosts[host].operations.get(&id) else {
            return;
        };
        let input = Input::Operation {
            id,
            operation: operation.number(),
            event,
        };
        let process = self.hosts[host].process;
        let input = Box::new(input);
        self.after(
            delay,
            Action::Process {
                host,
                process,
                input,
            },
        );
    }

    /// Schedules the timer of an operation.
    fn schedule_operation(&mut self, host: usize, id: SandboxId) {
        let entry = &self.hosts[host];
        let wake_at = entry
            .operations
            .get(&id)
            .and_then(|operation| match operation {
                Operation::Resume { machine, .. } => machine.wake_at(),
                Operation::Publish { machine, .. } => machine.wake_at(),
                Operation::Update { machine, .. } => machine.wake_at(),
            });
        if let Some(at) = wake_at {
            let delay = entry.time_of(at).saturating_sub(self.now).max(1);
            self.operation_later(host, id, delay, OperationEvent::Timer);
        }
    }

    /// Passes an event to the state machine of a resume, and executes its effects.
    fn resume_event(&mut self, host: usize, id: SandboxId, event: ResumeEvent) {
        let mut effects = Vec::new();
        let entry = &mut self.hosts[host];
        let now = entry.clock(self.now);
        let member = entry.member.as_ref().unwrap();
        let input = ResumeInput {
            now,
            member: entry.id,
            authority: member.authority(now),
            is_dead: &|owner| member.is_dead(owner),
        };
        if let Some(Operation::Resume { machine, .. }) = entry.operations.get_mut(&id) {
            machine.handle(&input, event, &mut effects);
        }
        for effect in effects {
            self.trace(host, &(id, &effect));
            self.resume_effect(host, id, effect);
        }
        self.schedule_operation(host, id);
    }

    /// Executes an effect of a resume.
    fn resume_effect(&mut self, host: usize, id: SandboxId, effect: ResumeEffect) {
        let Some(Operation::Resume {
            number,
            owner,
            root,
            is_counted,
            ..
        }) = self.hosts[host].operations.get_mut(&id)
        else {
            return;
        };
        let (number, owner) = (*number, *owner);
        match effect {
            ResumeEffect::ReadHead => self.read_head(host, id, number),
            ResumeEffect::StartRestore(snapshot) => {
                *root = Some(snapshot.root);
                let delay = self.between(10, 300);
                let is_possible =
                    self.store.roots.contains(&snapshot.root) && self.outages[host] <= self.now;
                let event = match is_possible {
                    true => OperationEvent::Restored,
                    false => OperationEvent::RestoreFailed,
                };
                self.operation_later(host, id, delay, event);
            }
            ResumeEffect::WriteHead(write) => self.write_head(host, id, number, write),
            ResumeEffect::AssignIdentity {
                revision,
                head,
                version,
            } => {
                *is_counted = false;
                let value = root.map_or(0, |root| self.roots[&root].1);
                self.counts.claims += 1;
                self.check_identity(host, id, Some(revision), value);
                let held = Held {
                    owner,
                    local: Local::Running,
                    value: value + 1,
                    head: Some((*head, version)),
                    root: None,
                };
                self.hold(host, id, held);
            }
            ResumeEffect::DropGuest => self.counts.claims_lost += 1,
            ResumeEffect::Answer(answer) => {
                // The local copy of a sandbox that has moved is not the newest state.
                let is_moved = matches!(answer, ResumeAnswer::Forward(_) | ResumeAnswer::Killed);
                if is_moved && self.hosts[host].held.contains_key(&id) {
                    self.forget(host, id);
                }
            }
            ResumeEffect::Finished => {
                let is_counted = *is_counted;
                self.hosts[host].operations.remove(&id);
                if is_counted {
                    self.release(host, owner);
                }
            }
        }
    }

    /// Passes an event to the state machine of a publish, and executes its effects.
    fn publish_event(&mut self, host: usize, id: SandboxId, event: PublishEvent) {
        let mut effects = Vec::new();
        let entry = &mut self.hosts[host];
        let now = entry.clock(self.now);
        if let Some(Operation::Publish { machine, .. }) = entry.operations.get_mut(&id) {
            machine.handle(now, event, &mut effects);
        }
        self.publish_effects(host, id, effects);
        self.schedule_operation(host, id);
    }

    /// Executes the effects of a publish.
    pub fn publish_effects(&mut self, host: usize, id: SandboxId, effects: Vec<PublishEffect>) {
        for effect in effects {
            let Some(&Operation::Publish {
                number,
                root,
                value,
                ..
            }) = self.hosts[host].operations.get(&id)
            else {
                return;
            };
            self.trace(host, &(id, &effect));
            match effect {
                PublishEffect::WriteManifest(root) => {
                    let delay = self.between(20, 2_000);
                    if self.outages[host] > self.now {
                        self.operation_later(host, id, delay, OperationEvent::ManifestFailed);
                        continue;
                    }
                    self.after(delay, Action::Manifest(root));
                    // Usually the answer arrives after the manifest is stored.
                    let answered = match self.mutation {
                        Mutation::HeadBeforeManifest => 1,
                        _ => delay + 5,
                    };
                    self.operation_later(host, id, answered, OperationEvent::ManifestWritten);
                }
                PublishEffect::WriteHead(write) => {
                    let held = self.hosts[host].held.get(&id);
                    let former = held.and_then(|held| held.head.as_ref()?.0.root());
                    if self.mutation == Mutation::RetractBeforeHead
                        && let Some(former) = former
                    {
                        self.after(1, Action::Retract(former));
                    }
                    self.write_head(host, id, number, write);
                }
                PublishEffect::Stored { head, version, .. } => {
                    self.counts.stored += 1;
                    let acknowledged = self.acknowledged.entry(id).or_default();
                    *acknowledged = value.max(*acknowledged);
                    if let Some(mut held) = self.hosts[host].held.get(&id).cloned() {
                        held.head = Some((*head, version));
                        held.root = Some(root);
                        self.hold(host, id, held);
                    }
                }
                PublishEffect::Unavailable | PublishEffect::Failed => {}
                PublishEffect::Superseded(_) => self.forget(host, id),
                PublishEffect::Retract(root) => {
                    let delay = self.between(1, 2_000);
                    self.after(delay, Action::Retract(root));
                }
                PublishEffect::Finished => {
                    self.hosts[host].operations.remove(&id);
                }
            }
        }
    }

    /// Passes an event to the state machine of an update, and executes its effects.
    fn update_event(&mut self, host: usize, id: SandboxId, event: UpdateEvent) {
        let mut effects = Vec::new();
        let entry = &mut self.hosts[host];
        let now = entry.clock(self.now);
        if let Some(Operation::Update { machine, .. }) = entry.operations.get_mut(&id) {
            machine.handle(now, self.now, event, &mut effects);
        }
        for effect in effects {
            self.trace(host, &(id, &effect));
            self.update_effect(host, id, effect);
        }
        self.schedule_operation(host, id);
    }

    /// Executes an effect of an update.
    fn update_effect(&mut self, host: usize, id: SandboxId, effect: UpdateEffect) {
        let Some(&Operation::Update {
            number, purpose, ..
        }) = self.hosts[host].operations.get(&id)
        else {
            return;
        };
        match effect {
            UpdateEffect::ReadHead => self.read_head(host, id, number),
            UpdateEffect::WriteHead(write) => self.write_head(host, id, number, write),
            UpdateEffect::Stored { head, version, .. } => {
                self.updated(host, id, purpose, Some((*head, version)));
            }
            UpdateEffect::Unchanged(head) => {
                let is_still_owner = head.as_ref().is_some_and(|head| match head.state() {
                    HeadState::Running(owner) => owner.member == self.hosts[host].id,
                    _ => false,
                });
                let is_running =
                    head.is_some_and(|head| matches!(head.state(), HeadState::Running(_)));
                match purpose {
                    // The head already names this host as the owner.
                    Purpose::Adopt(_) if is_still_owner => {}
                    // The sandbox has no head or is already killed: the kill is complete.
                    Purpose::Kill { .. } if !is_running => {
                        self.updated(host, id, purpose, None);
                    }
                    // The copy of a sandbox that runs elsewhere is removed.
                    _ => self.forget(host, id),
                }
            }
            UpdateEffect::Retract(root) => {
                let delay = self.between(1, 2_000);
                self.after(delay, Action::Retract(root));
            }
            UpdateEffect::Finished => {
                self.hosts[host].operations.remove(&id);
            }
        }
    }

    /// Changes the journal of a host after an update of a head.
    fn updated(
        &mut self,
        host: usize,
        id: SandboxId,
        purpose: Purpose,
        head: Option<(Head, Version)>,
    ) {
        match purpose {
            Purpose::Kill { .. } => {
                self.counts.kills += 1;
                let now = self.now;
                self.killed.entry(id).or_insert(now);
                self.forget(host, id);
            }
            Purpose::Adopt(_) => {
                if let (Some(head), Some(mut held)) =
                    (head, self.hosts[host].held.get(&id).cloned())
                {
                    held.head = Some(head);
                    self.hold(host, id, held);
                }
            }
            Purpose::Confirm(_) | Purpose::Release(_) => {}
        }
    }
}
