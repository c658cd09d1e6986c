//! [`Coordinator`]: the state of the member that decides for a shard (a part of the fleet's
//! sandboxes) during one term, the time during which one member has this role. `Member` contains it
//! and passes it events: messages of members, the time, and outcomes of writes.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares the member dead. This decision is a *verdict*. The *directory* lists the hosts of all
//! sandboxes of the shard, in one row per sandbox. Members send their rows in lists. A *budget* is
//! the limit of an API key, and a *share* is the part of it that one member may use.
//!
//! The shard's record has one [`MemberRow`] per member. The coordinator changes these in a draft of
//! the record. The draft replaces the record every 3 s. If the draft contains a registration or a
//! verdict, it replaces the record as soon as 0.5 s have passed since the last replacement (group
//! commit). A change takes effect only when the replacement is known to have succeeded, because
//! another member may have taken over meanwhile.

mod budgets;
mod demand;
mod membership;
mod membership_error;
mod placement;
mod rows;

pub use budgets::BudgetExhausted;
pub use membership_error::MembershipError;
pub use placement::{Admission, CreateError, CreatePlacement};

use crate::directory::{Directory, RowReceiver};
use crate::effect::{Effect, TermEnd, WriteOutcome};
use crate::ids::{Epoch, FleetId, Instance, MemberId, Millis, Owner, Term, Version, WriteId};
use crate::message::{Body, BudgetOwner, MESSAGE_FORMAT, Message};
use crate::record::{MemberRow, MemberState, ShardRecord};
use crate::timing::Timing;
use budgets::Budgets;
use demand::Demand;
use jiffy_scheduler::{HostReport, Scheduler};
use rows::list_number;
use std::collections::BTreeMap;

/// Interval at which silent members are searched.
const JUDGE_INTERVAL_MS: u64 = 500;

/// Conditional replacement of the shard's record that was sent, and whose outcome is not known.
#[derive(Debug)]
struct InFlight {
    write: WriteId,
    record: ShardRecord,
    first_sent: Millis,
    /// True if an earlier attempt of this write may still arrive at the store.
    is_uncertain: bool,
    /// Time at which the write is repeated. `None` while a call is in progress.
    repeat_at: Option<Millis>,
}

/// Work in progress on a host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostLoad {
    /// Creates in progress.
    pub creates: u32,
    /// Templates that the host is building.
    pub builds: Vec<u64>,
}

/// State of a member at this coordinator.
#[derive(Debug)]
struct Peer {
    /// Time at which the last heartbeat or registration in this term was received.
    heard: Option<Millis>,
    /// Number of the last heartbeat.
    last_seq: u64,
    /// Work in progress according to the last heartbeat.
    load: HostLoad,
    /// Transfer of the member's rows into the directory.
    rows: RowReceiver,
}

/// Coordinator of a shard for one term.
#[derive(Debug)]
pub(crate) struct Coordinator {
    timing: Timing,
    id: MemberId,
    version: Version,
    /// The record after the last successful replacement. `version` is its version, on which the
    /// next replacement is conditional.
    committed: ShardRecord,
    /// The committed record with all changes that were decided since.
    draft: ShardRecord,
    /// Size in bytes of each [`MemberRow`] of the draft in the encoded record, whose total is
    /// limited.
    row_bytes: BTreeMap<MemberId, usize>,
    /// Replacement of the record whose outcome is unknown.
    in_flight: Option<InFlight>,
    /// Number of the next replacement.
    next_write: u64,
    next_renew: Millis,
    next_judge: Millis,
    /// Time at which the last replacement was sent.
    replaced: Millis,
    /// Time of the first attempt of the last successful replacement. The authority of the
    /// coordinator is counted from it, because any later time could exceed the wait of a takeover.
    renewed: Millis,
    /// Time before which no verdict is made: all members must have had the time to send a heartbeat
    /// to this new coordinator.
    grace_ends: Millis,
    /// Time after which shares are granted although members have not reported theirs. `None` in
    /// production ([`Timing::unreported_shares`]).
    shares_known: Option<Millis>,
    peers: BTreeMap<MemberId, Peer>,
    /// Process and number of the latest registration of each member in this term.
    registrations: BTreeMap<MemberId, (Instance, u64)>,
    /// Number of answered registrations. The lists of directory rows of each registration have
    /// their own numbers (`rows::list_number`).
    answered_registrations: u64,
    /// True while more than half of the members send no heartbeats. No verdicts are made then.
    is_mass_silence: bool,
    /// Wall clock in milliseconds since 1970, for operators. Zero if it is unknown.
    pub(crate) wall_ms: u64,
    pub(crate) scheduler: Scheduler,
    pub(crate) directory: Directory,
    budgets: Budgets,
    demand: Demand,
}

impl Coordinator {
    /// Creates the coordinator after its takeover was written. `sent` is the time of the first
    /// sending of the takeover, and `write` the number of the next write.
    pub fn new(
        timing: Timing,
        record: ShardRecord,
        version: Version,
        write: WriteId,
        (sent, now): (Millis, Millis),
        limits: BTreeMap<BudgetOwner, u64>,
    ) -> Self {
        let term = record.term;
        let live = || record.members.iter().filter(|row| row.state.is_live());
        let mut scheduler = Scheduler::new();
        for row in live() {
            scheduler.add_host(row.id.host(), row.capacity.spec(), report_of(row, None));
        }
        let peer = || Peer {
            heard: None,
            last_seq: 0,
            load: HostLoad::default(),
            rows: RowReceiver::new(list_number(term, 0)),
        };
        Self {
            timing,
            id: record.coordinator,
            version,
            row_bytes: record
                .members
                .iter()
                .map(|row| (row.id, row.encoded_bytes()))
                .collect(),
            draft: record.clone(),
            in_flight: None,
            next_write: write.0,
            next_renew: sent.plus(timing.renew),
            next_judge: now,
            replaced: sent,
            renewed: sent,
            grace_ends: now.plus(timing.grace),
            shares_known: timing.unreported_shares.map(|ms| now.plus(ms)),
            peers: live().map(|row| (row.id, peer())).collect(),
            registrations: BTreeMap::new(),
            answered_registrations: 0,
            is_mass_silence: false,
            wall_ms: 0,
            scheduler,
            directory: Directory::new(),
            budgets: Budgets::new(term, limits, live().map(|row| row.id).collect()),
            demand: Demand::new(now),
            committed: record,
        }
    }

    /// Returns the term.
    pub fn term(&self) -> Term {
        self.committed.term
    }

    /// Returns the committed record.
    pub fn record(&self) -> &ShardRecord {
        &self.committed
    }

    /// Returns whether the directory contains the rows of all live members.
    pub fn is_directory_complete(&self) -> bool {
        self.peers.values().all(|peer| peer.rows.is_complete())
    }

    /// Returns the time of the last heartbeat of each live member.
    pub fn heartbeats(&self) -> impl Iterator<Item = (MemberId, Option<Millis>)> {
        self.peers.iter().map(|(&id, peer)| (id, peer.heard))
    }

    /// Returns whether heartbeats are acknowledged at present.
    pub fn has_authority(&self, now: Millis) -> bool {
        now.since(self.renewed) < self.timing.acknowledge
    }

    /// Returns the time of the next event that this coordinator must process.
    pub fn wake_at(&self) -> Millis {
        let write = match &self.in_flight {
            Some(in_flight) => in_flight.repeat_at,
            None => Some(self.next_renew),
        };
        [write, Some(self.next_judge), self.shares_known]
            .into_iter()
            .flatten()
            .fold(Millis(u64::MAX), Millis::min)
    }

    /// Returns the number of the next write.
    pub fn next_write(&self) -> WriteId {
        WriteId(self.next_write)
    }

    /// Performs the actions that are due: repeats or starts a replacement of the record, and
    /// decides verdicts.
    pub fn tick(&mut self, now: Millis, effects: &mut Vec<Effect>) {
        if self.shares_known.is_some_and(|at| at <= now) {
            self.shares_known = None;
            self.budgets.complete();
        }
        if self.next_judge <= now {
            self.next_judge = now.plus(JUDGE_INTERVAL_MS);
            self.exclude_silent(now);
            self.demand.decay(now);
            self.judge(now, effects);
        }
        match &mut self.in_flight {
            Some(in_flight) if in_flight.repeat_at.is_some_and(|at| at <= now) => {
                in_flight.repeat_at = None;
                effects.push(Effect::ReplaceShard {
                    write: in_flight.write,
                    record: Box::new(in_flight.record.clone()),
                    expected: self.version.clone(),
                });
            }
            None if self.next_renew <= now => self.replace(now, effects),
            _ => {}
        }
    }

    /// Returns the earliest time at which an urgent change may replace the record.
    fn soon(&self) -> Millis {
        let earliest = self.replaced.plus(self.timing.repeat);
        self.next_renew.min(earliest)
    }

    /// Sends the draft as the next version of the shard's record.
    fn replace(&mut self, now: Millis, effects: &mut Vec<Effect>) {
        let mut record = self.draft.clone();
        record.seq = self.committed.seq.saturating_add(1);
        let write = WriteId(self.next_write);
        self.next_write += 1;
        self.next_renew = now.plus(self.timing.renew);
        self.replaced = now;
        effects.push(Effect::ReplaceShard {
            write,
            record: Box::new(record.clone()),
            expected: self.version.clone(),
        });
        self.in_flight = Some(InFlight {
            write,
            record,
            first_sent: now,
            is_uncertain: false,
            repeat_at: None,
        });
    }

    /// Processes the outcome of a replacement of the record. Returns the reason if the term has
    /// ended.
    pub fn written(
        &mut self,
        now: Millis,
        write: WriteId,
        outcome: WriteOutcome<ShardRecord>,
        effects: &mut Vec<Effect>,
    ) -> Option<TermEnd> {
        let in_flight = self.in_flight.as_mut().filter(|f| f.write == write)?;
        match outcome {
            WriteOutcome::Rejected if !in_flight.is_uncertain => {
                // The record is unchanged. The next replacement writes the draft, which may contain
                // newer changes.
                self.in_flight = None;
                self.next_renew = now.plus(self.timing.repeat);
                None
            }
            // A rejection may concern a repetition: an earlier attempt can still arrive.
            WriteOutcome::Rejected | WriteOutcome::Unknown => {
                in_flight.is_uncertain = true;
                in_flight.repeat_at = Some(now.plus(self.timing.repeat));
                None
            }
            WriteOutcome::Lost(current) => {
                let term = current.map(|current| current.0.term);
                Some(TermEnd::Replaced { by: term })
            }
            WriteOutcome::Done(version) => {
                if let Some(in_flight) = self.in_flight.take() {
                    self.version = version;
                    self.renewed = in_flight.first_sent;
                    let former = std::mem::replace(&mut self.committed, in_flight.record);
                    self.committed_changes(now, &former, effects);
                }
                None
            }
        }
    }

    /// Emits the effects of the changes that a replacement of the record has committed.
    fn committed_changes(&mut self, now: Millis, former: &ShardRecord, effects: &mut Vec<Effect>) {
        let committed = self.committed.clone();
        for row in &committed.members {
            let previous = former.row(row.id);
            if previous == Some(row) {
                continue;
            }
            // One replacement may contain both the verdict on a member and its removal. A member
            // that leaves ends its epoch as well.
            let ended = previous.filter(|previous| {
                previous.state.is_live() && (previous.epoch != row.epoch || !row.state.is_live())
            });
            if let Some(ended) = ended {
                effects.push(Effect::Verdict(Owner {
                    member: row.id,
                    epoch: ended.epoch,
                }));
                self.budgets.remove(row.id);
            }
            if row.state == MemberState::Left {
                self.directory.remove_host(row.id);
                self.budgets.remove(row.id);
            }
            if row.state.is_live() {
                let is_registration = previous.is_none_or(|previous| {
                    previous.epoch != row.epoch || previous.instance != row.instance
                });
                if is_registration {
                    self.answer_registration(now, row, effects);
                } else {
                    // The drain or undrain of an operator takes effect at once. Otherwise, the
                    // scheduler would learn the new state with the next heartbeat of the host.
                    let is_draining = row.state != MemberState::Up;
                    self.scheduler.set_draining(row.id.host(), is_draining);
                }
            } else {
                self.scheduler.remove_host(row.id.host());
                self.demand.remove(row.id);
                // Retain the state of the peer if the draft already contains the next registration
                // of the member, which uses it.
                if self
                    .draft
                    .row(row.id)
                    .is_none_or(|draft| !draft.state.is_live())
                {
                    self.peers.remove(&row.id);
                }
            }
        }
    }

    /// Adds a registered member to the state of the coordinator, and notifies the member.
    fn answer_registration(&mut self, now: Millis, row: &MemberRow, effects: &mut Vec<Effect>) {
        self.scheduler
            .add_host(row.id.host(), row.capacity.spec(), report_of(row, None));
        self.answered_registrations += 1;
        let list = list_number(self.committed.term, self.answered_registrations);
        let peer = Peer {
            heard: Some(now),
            last_seq: 0,
            load: HostLoad::default(),
            rows: RowReceiver::new(list),
        };
        self.peers.insert(row.id, peer);
        self.budgets.restart(row.id);
        self.send_registered(row, effects);
    }

    fn send_registered(&self, row: &MemberRow, effects: &mut Vec<Effect>) {
        let body = Body::Registered {
            instance: row.instance,
            epoch: row.epoch,
        };
        effects.push(self.message(row, body));
    }

    /// Changes the limit of an owner's budget.
    pub fn set_limit(&mut self, owner: &BudgetOwner, limit: Option<u64>) {
        self.budgets.set_limit(owner, limit);
    }

    /// Returns the work in progress on a member.
    pub fn load(&self, id: MemberId) -> Option<&HostLoad> {
        self.peers.get(&id).map(|peer| &peer.load)
    }

    /// Returns the owners whose shares are counted.
    pub fn budget_owners(&self) -> impl Iterator<Item = BudgetOwner> {
        self.budgets.owners().cloned()
    }

    /// Announces the coordinator to all members.
    pub fn announce(&self, effects: &mut Vec<Effect>) {
        for row in self
            .committed
            .members
            .iter()
            .filter(|row| row.id != self.id)
        {
            if row.state.is_live() {
                effects.push(self.message(row, Body::Coordinating));
            }
        }
    }

    /// Returns the effect that sends `body` to a member in the name of this term.
    fn message(&self, row: &MemberRow, body: Body) -> Effect {
        Effect::Send {
            to: row.id,
            address: Some(row.address.clone()),
            message: Box::new(message_of(
                &self.committed.fleet,
                self.committed.term,
                None,
                body,
            )),
        }
    }
}

/// Returns a message of this build's format.
pub(crate) fn message_of(fleet: &FleetId, term: Term, epoch: Option<Epoch>, body: Body) -> Message {
    Message {
        format: MESSAGE_FORMAT,
        fleet: fleet.clone(),
        term,
        epoch,
        body,
    }
}

/// Returns the state of a host for the scheduler. A host without heartbeat has no free resources.
fn report_of(row: &MemberRow, status: Option<&crate::message::HostStatus>) -> HostReport {
    let is_draining = row.state != MemberState::Up;
    match status {
        None => HostReport {
            is_draining,
            ..HostReport::default()
        },
        Some(status) => HostReport {
            free: status.free(),
            is_draining,
            is_store_reachable: status.is_store_reachable,
            templates: status
                .templates
                .iter()
                .map(|&template| jiffy_scheduler::TemplateId(template))
                .collect(),
        },
    }
}
