//! Processes of hosts: they pass events to the state machine `Member` and execute the effects
//! (actions) that it returns.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox. A *shard*
//! is a part of the fleet's sandboxes. Its record lists the members and names the coordinator.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead. After each registration in a new epoch, a host *reconciles*: it compares its
//! sandboxes with their heads.

use super::mutation::Mutation;
use super::operations::{Operation, OperationEvent};
use super::records::{Answer, Key, Request, read, written};
use super::sandboxes::Held;
use super::world::{Action, World};
use crate::random::Random;
use jiffy_fleet_core::record::ShardRecord;
use jiffy_fleet_core::{
    Acknowledgement, Admission, Body, Effect, Epoch, Event, HostStatus, Instance, Member,
    MemberConfig, MemberId, Message, Millis, Owner, RejectionReason, RowRequest, SandboxId,
    ShardId, Version,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Receiver of an answer of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Read of the shard's record by the member.
    ShardRead,
    /// Write of the shard's record by the member, with the number of the write.
    ShardWrite(u64),
    /// Operation on the head of a sandbox.
    Operation {
        id: SandboxId,
        operation: u64,
        /// Number of the write. `None` for a read.
        write: Option<u64>,
    },
    /// Comparison of a local sandbox with its head, after the registration in this epoch.
    Reconcile { id: SandboxId, epoch: Epoch },
    /// The answer is ignored.
    None,
}

/// Input of a process.
#[derive(Debug, Clone)]
pub enum Input {
    Timer,
    Message {
        from: MemberId,
        message: Box<Message>,
    },
    Answer {
        target: Target,
        answer: Answer,
    },
    Operation {
        id: SandboxId,
        operation: u64,
        event: OperationEvent,
    },
    Create {
        owner: usize,
        admission: Box<Admission>,
    },
}

/// A host. Sandboxes and boot id outlive its process.
pub struct Host {
    pub id: MemberId,
    /// Time of the local clock at the start of the simulation, in milliseconds.
    clock_offset: u64,
    /// Speed of the local clock in millionths: 1,000,000 is exact.
    clock_ppm: u64,
    pub boot: u8,
    /// Number of the process. Changes at each start and end.
    pub process: u32,
    /// State machine of the running process. `None` if no process runs.
    pub member: Option<Member>,
    /// Time until which the process is stopped, as by `SIGSTOP`. Zero if it is not.
    pub stopped_until: u64,
    /// Inputs that arrived while the process was stopped.
    waiting: Vec<Input>,
    /// Time of the next scheduled timer.
    wake_at: u64,
    /// Sandboxes in the journal of the host.
    pub held: BTreeMap<SandboxId, Held>,
    pub operations: BTreeMap<SandboxId, Operation>,
    pub next_operation: u64,
    /// The host accepts requests.
    pub is_accepting: bool,
    /// Sandboxes that are not compared with their heads yet, since the last registration.
    pub reconciling: BTreeSet<SandboxId>,
    /// Start of this comparison.
    pub reconcile_started: u64,
    /// Time on the local clock at which each write of the shard's record was first sent.
    pub sent: HashMap<u64, Millis>,
}

impl Host {
    pub fn new(index: usize, random: &mut Random) -> Self {
        Self {
            id: MemberId(index as u32 + 1),
            clock_offset: u64::from(random.below(1_000_000)),
            clock_ppm: 999_900 + u64::from(random.below(201)),
            boot: 1,
            process: 0,
            member: None,
            stopped_until: 0,
            waiting: Vec::new(),
            wake_at: 0,
            held: BTreeMap::new(),
            operations: BTreeMap::new(),
            next_operation: 1,
            is_accepting: false,
            reconciling: BTreeSet::new(),
            reconcile_started: 0,
            sent: HashMap::new(),
        }
    }

    /// Returns the local time.
    pub fn clock(&self, now: u64) -> Millis {
        Millis(self.clock_offset + now * self.clock_ppm / 1_000_000)
    }

    /// Returns the time at which the local clock shows `local`.
    pub fn time_of(&self, local: Millis) -> u64 {
        local
            .0
            .saturating_sub(self.clock_offset)
            .saturating_mul(1_000_000)
            / self.clock_ppm
            + 1
    }

    pub fn authority(&self, now: u64) -> Option<Owner> {
        self.member.as_ref()?.authority(self.clock(now))
    }
}

impl World {
    /// Starts a process of a host, if none runs. Its first input is an expired timer.
    pub fn start_process(&mut self, host: usize) {
        if self.hosts[host].member.is_some() {
            return;
        }
        let timing = self.timing;
        let now = self.now;
        let owners = self.owners.clone();
        let entry = &mut self.hosts[host];
        entry.process += 1;
        entry.is_accepting = false;
        let sample = crate::samples::row(entry.id.0);
        let local = entry.clock(now);
        let mut member = Member::new(
            MemberConfig {
                fleet: crate::samples::fleet(),
                id: entry.id,
                instance: Instance {
                    // Four bits for the number of the boot, and four bits for the host.
                    boot: [entry.boot + entry.id.0 as u8 * 16; 16],
                    started_ms: local.0,
                },
                address: sample.address,
                version: sample.version,
                capacity: sample.capacity,
                timing,
            },
            local,
        );
        member.set_status(HostStatus {
            free_cpu_milli: 64_000,
            free_memory_mib: 262_144,
            free_disk_mib: 4_000_000,
            is_store_reachable: true,
            templates: Vec::new(),
            ..HostStatus::default()
        });
        for (owner, limit) in &owners {
            member.set_limit(owner, Some(*limit));
        }
        for held in entry.held.values().filter(|held| held.is_running()) {
            member.shares().count(&owners[held.owner].0, 1);
        }
        entry.member = Some(member);
        self.input(host, u32::MAX, Input::Timer);
    }

    /// Ends a process. Guests survive unless the host loses power.
    pub fn kill_process(&mut self, host: usize) {
        let entry = &mut self.hosts[host];
        entry.member = None;
        entry.operations.clear();
        entry.reconciling.clear();
        entry.waiting.clear();
        entry.sent.clear();
        entry.wake_at = 0;
        entry.is_accepting = false;
        entry.stopped_until = 0;
        entry.process += 1;
    }

    /// Continues a stopped process: it handles the inputs that have arrived meanwhile.
    pub fn continue_process(&mut self, host: usize, process: u32) {
        let entry = &mut self.hosts[host];
        if entry.process != process || entry.member.is_none() || entry.stopped_until > self.now {
            return;
        }
        entry.stopped_until = 0;
        let mut waiting = std::mem::take(&mut entry.waiting);
        // Expired timers run before or after messages that arrived while the process was stopped.
        if self.chance(50) {
            waiting.insert(0, Input::Timer);
        } else {
            waiting.push(Input::Timer);
        }
        for input in waiting {
            self.input(host, process, input);
        }
    }

    /// Processes an input of a process. `u32::MAX` is the current process.
    pub fn input(&mut self, host: usize, process: u32, input: Input) {
        let now = self.now;
        let entry = &mut self.hosts[host];
        if entry.member.is_none() || process != u32::MAX && process != entry.process {
            return;
        }
        if entry.stopped_until > now {
            if !matches!(input, Input::Timer) {
                entry.waiting.push(input);
            }
            return;
        }
        match input {
            Input::Timer => self.handle(host, Event::Timer),
            Input::Message { from, message } => {
                let has_grants = match &message.body {
                    Body::Acknowledged(acknowledgement) => !acknowledgement.grants.is_empty(),
                    _ => false,
                };
                self.handle(host, Event::Message { from, message });
                if has_grants {
                    (0..self.owners.len()).for_each(|owner| self.check_budget(owner));
                }
            }
            Input::Answer { target, answer } => self.answered(host, target, answer),
            Input::Operation {
                id,
                operation,
                event,
            } => self.operation_event(host, id, operation, event),
            Input::Create { owner, admission } => {
                let local = self.hosts[host].clock(now);
                let member = self.hosts[host].member.as_mut().unwrap();
                if member.accept_placement(local, &admission).is_ok() {
                    self.check_budget(owner);
                    self.create(host, owner);
                }
            }
        }
        self.check_authority(host);
        self.schedule(host);
    }

    /// Passes an answer of the store to the state machine or operation that waits for it.
    fn answered(&mut self, host: usize, target: Target, answer: Answer) {
        let shard = |bytes: &[u8]| {
            ShardRecord::decode(bytes, &crate::samples::fleet(), ShardId(0)).unwrap()
        };
        match target {
            Target::ShardRead => self.handle(host, Event::ShardRead(read(answer, shard))),
            Target::ShardWrite(write) => self.handle(
                host,
                Event::ShardWritten {
                    write: jiffy_fleet_core::WriteId(write),
                    outcome: written(answer, shard),
                },
            ),
            Target::Operation {
                id,
                operation,
                write,
            } => self.operation_answered(host, id, operation, write, answer),
            Target::Reconcile { id, epoch } => self.reconciled(host, id, epoch, answer),
            Target::None => {}
        }
    }

    /// Schedules the next timer of a member.
    fn schedule(&mut self, host: usize) {
        let entry = &self.hosts[host];
        let Some(member) = &entry.member else {
            return;
        };
        let at = entry.time_of(member.wake_at()).max(self.now + 1);
        let is_scheduled = entry.wake_at > self.now && entry.wake_at <= at;
        if is_scheduled {
            return;
        }
        let process = entry.process;
        self.hosts[host].wake_at = at;
        self.after(
            at - self.now,
            Action::Process {
                host,
                process,
                input: Box::new(Input::Timer),
            },
        );
    }

    /// Passes an event to the state machine `Member`, and executes its effects.
    pub fn handle(&mut self, host: usize, event: Event) {
        let local = self.hosts[host].clock(self.now);
        let mut effects = Vec::new();
        if let Some(member) = &mut self.hosts[host].member {
            member.handle(local, event, &mut effects);
        }
        self.perform(host, effects);
    }

    pub fn perform(&mut self, host: usize, effects: Vec<Effect>) {
        for effect in effects {
            self.trace(host, &effect);
            self.perform_one(host, effect);
        }
    }

    /// Prints an effect in the trace of a replayed seed.
    pub fn trace(&self, host: usize, effect: &dyn std::fmt::Debug) {
        if self.is_traced {
            println!("{} {}: {effect:?}", self.now, self.hosts[host].id);
        }
    }

    /// Executes an effect. Some effects only change the counts, or are violations.
    fn perform_one(&mut self, host: usize, effect: Effect) {
        match effect {
            Effect::Send {
                to, mut message, ..
            } => {
                self.mutate_message(host, &mut message);
                if let Body::Acknowledged(_) = message.body {
                    self.check_acknowledgement(host);
                }
                if let Body::Registered { .. } | Body::Heartbeat(_) = message.body {
                    // Check the encoding of messages as well.
                    let text = message.encode().unwrap();
                    assert_eq!(Message::decode(&text).unwrap(), *message);
                }
                self.send(host, to, super::world::message(host, *message));
            }
            Effect::ReadShard => self.call(host, Target::ShardRead, Key::Shard, Request::Read),
            Effect::ReplaceShard {
                write,
                record,
                expected,
            } => {
                let local = self.hosts[host].clock(self.now);
                self.hosts[host].sent.entry(write.0).or_insert(local);
                let bytes = record.encode().unwrap();
                let target = Target::ShardWrite(write.0);
                // Writes of the shard belong to no operation: 0 stands for none.
                self.write(
                    host,
                    target,
                    Key::Shard,
                    bytes,
                    Some(expected),
                    (0, write.0),
                );
            }
            Effect::ListRows { list, after, limit } => {
                let (rows, is_last) = self.list_rows(host, after, limit);
                self.handle(
                    host,
                    Event::RowsListed {
                        list,
                        after,
                        rows,
                        is_last,
                    },
                );
            }
            Effect::Registered { epoch } => self.start_reconciling(host, epoch),
            Effect::EpochEnded { .. } => self.hosts[host].is_accepting = false,
            Effect::TermStarted(_) => self.counts.takeovers += 1,
            Effect::Verdict(owner) => {
                self.counts.verdicts += 1;
                if !self.store.is_dead(owner) {
                    self.violate(format!("verdict on {owner} reported before its commit"));
                }
            }
            Effect::TermEnded { .. }
            | Effect::MassSilence { .. }
            | Effect::Rejected(_)
            | Effect::Pools(_)
            | Effect::RowsRemoved { .. } => {}
            Effect::RowsRejected { error, .. } => self.violate(error.to_string()),
            Effect::Regressed { term, seq } => {
                self.violate(format!("regression to {term}, {seq} reported"));
            }
        }
    }

    /// In the mutant `AcknowledgeCondemned`, acknowledges heartbeats of members that are about to
    /// be declared dead.
    fn mutate_message(&self, host: usize, message: &mut Message) {
        if self.mutation != Mutation::AcknowledgeCondemned {
            return;
        }
        let entry = &self.hosts[host];
        let renewed = self.store.truth.renewed.get(&(host, entry.process));
        let age = entry
            .clock(self.now)
            .since(renewed.copied().unwrap_or_default());
        if let Body::Rejected(rejection) = &message.body
            && rejection.reason == RejectionReason::Condemned
            && age < self.timing.acknowledge
        {
            message.body = Body::Acknowledged(Acknowledgement {
                instance: rejection.instance,
                seq: rejection.seq,
                grants: Vec::new(),
                recalls: Vec::new(),
                // Requests no rows.
                rows: RowRequest::Changes { from: u64::MAX },
                record: Version(Box::default()),
                pools: Vec::new(),
            });
        }
    }
}
