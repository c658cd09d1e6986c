//! [`Member`]: the state machine of a member, that is, of the daemon of one host in a fleet.
//!
//! A *share* is the part of an API key's limit that one member may use. A *shard* is a part of the
//! fleet's sandboxes. Its record in the shared store has one row per member, and names the
//! coordinator. An *epoch* of a member lasts from its registration with the coordinator until the
//! coordinator declares it dead. The *term* counts the coordinators of a fleet: each has a higher
//! term than its predecessor. To *claim* a stored sandbox means to become its owner in the record
//! (head) that decides which member may run it.
//!
//! A member registers with the coordinator of its shard and receives an epoch. It then sends
//! heartbeats. An acknowledged heartbeat gives the member the authority to claim, resume and
//! restore stored sandboxes until a deadline. If acknowledgements fail to arrive, the member reads
//! the shard's record, and may take over the role of the coordinator (`takeover`).

mod messages;
mod placement;
mod takeover;

use crate::coordinator::{Coordinator, MembershipError, message_of};
use crate::directory::{Directory, RowChange, RowSender};
use crate::effect::{Effect, Event};
use crate::ids::{Epoch, FleetId, Instance, MemberId, Millis, Owner, Version};
use crate::message::{Body, BudgetOwner, Heartbeat, HostStatus, PoolDemand, Registration};
use crate::record::{Capacity, ShardRecord};
use crate::shares::{MemberShares, SharedShares};
use crate::timing::Timing;
use parking_lot::MutexGuard;
use std::collections::{BTreeMap, VecDeque};
use takeover::Takeover;

/// Maximum number of sent heartbeats that the member remembers. An acknowledgement of an older
/// heartbeat is ignored.
const MAX_SENT: usize = 16;

/// Settings of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberConfig {
    /// Fleet.
    pub fleet: FleetId,
    /// Number of the member.
    pub id: MemberId,
    /// This process.
    pub instance: Instance,
    /// Address for messages of other members, as `HOST:PORT`.
    pub address: String,
    /// Version of Jiffy.
    pub version: String,
    /// Resources and properties of the host.
    pub capacity: Capacity,
    /// Times.
    pub timing: Timing,
}

/// Record of the shard, as this member read it last.
#[derive(Debug)]
struct Observed {
    record: ShardRecord,
    version: Version,
    /// Time of the read.
    read_at: Millis,
}

/// State machine of a member, which may also be the coordinator of its shard.
#[derive(Debug)]
pub struct Member {
    config: MemberConfig,
    /// Current epoch. `None` while this member is not registered.
    epoch: Option<Epoch>,
    /// Latest epoch of this member that has ended.
    ended: Option<Epoch>,
    observed: Option<Observed>,
    /// Newest version of the record, from a read or an acknowledgement, and the time of its first
    /// receipt.
    newest: Option<(Version, Millis)>,
    /// Time at which the read in progress was started. `None` if no read is in progress.
    reading: Option<Millis>,
    next_read: Millis,
    next_heartbeat: Millis,
    /// Number of heartbeats sent so far.
    heartbeats: u64,
    /// Number of registrations sent so far.
    registrations: u64,
    /// Number and time of each heartbeat that was sent and not acknowledged, oldest first.
    sent: VecDeque<(u64, Millis)>,
    /// End of the authority. It is counted from the sending of a heartbeat, not from the receipt of
    /// its acknowledgement, so that it ends before the coordinator can declare this member dead.
    deadline: Option<Millis>,
    /// Time of the last acknowledgement. The shard's record is read only if this time is long ago.
    acknowledged: Millis,
    /// Write by which this member becomes the coordinator. `None` if it attempts none.
    takeover: Option<Takeover>,
    next_write: u64,
    /// State of the coordinator, while this member has that role.
    coordinator: Option<Box<Coordinator>>,
    /// Limits of the owners' budgets.
    limits: BTreeMap<BudgetOwner, u64>,
    status: HostStatus,
    shares: SharedShares,
    rows: RowSender,
    /// Sizes of warm pools in the latest acknowledgement.
    pools: Vec<PoolDemand>,
}

impl Member {
    /// Creates the state of a member that has just started. The first event must be
    /// [`Event::Timer`].
    #[must_use]
    pub fn new(config: MemberConfig, now: Millis) -> Self {
        Self {
            config,
            epoch: None,
            ended: None,
            observed: None,
            newest: None,
            reading: None,
            next_read: now,
            next_heartbeat: now,
            heartbeats: 0,
            registrations: 0,
            sent: VecDeque::new(),
            deadline: None,
            acknowledged: now,
            takeover: None,
            next_write: 1,
            coordinator: None,
            limits: BTreeMap::new(),
            status: HostStatus::default(),
            shares: SharedShares::default(),
            rows: RowSender::default(),
            pools: Vec::new(),
        }
    }

    /// Returns the number of this member.
    #[must_use]
    pub fn id(&self) -> MemberId {
        self.config.id
    }

    /// Returns this member and its epoch if it may claim, resume and restore stored sandboxes.
    #[must_use]
    pub fn authority(&self, now: Millis) -> Option<Owner> {
        let epoch = self.epoch?;
        (now < self.deadline?).then_some(Owner {
            member: self.config.id,
            epoch,
        })
    }

    /// Returns the time at which the authority ends. `None` without an acknowledged heartbeat.
    #[must_use]
    pub fn deadline(&self) -> Option<Millis> {
        self.deadline
    }

    /// Returns the epoch. `None` if this member is not registered.
    #[must_use]
    pub fn epoch(&self) -> Option<Epoch> {
        self.epoch
    }

    /// Returns the record of the shard, as this member knows it.
    #[must_use]
    pub fn shard(&self) -> Option<&ShardRecord> {
        match &self.coordinator {
            Some(coordinator) => Some(coordinator.record()),
            None => self.observed.as_ref().map(|observed| &observed.record),
        }
    }

    /// Returns whether an owner's epoch is dead according to the record that this member knows.
    /// False if that is not known.
    #[must_use]
    pub fn is_dead(&self, owner: Owner) -> bool {
        self.shard()
            .and_then(|record| record.row(owner.member))
            .is_some_and(|row| {
                row.epoch > owner.epoch || row.epoch == owner.epoch && !row.state.is_live()
            })
    }

    /// Returns whether this member is the coordinator. It may have lost its authority.
    #[must_use]
    pub fn is_coordinator(&self) -> bool {
        self.coordinator.is_some()
    }

    /// Returns the time of the last heartbeat of each live member if this member is the
    /// coordinator. `None` for a member without heartbeat in this term.
    pub fn heartbeats(&self) -> impl Iterator<Item = (MemberId, Option<Millis>)> {
        let coordinator = self.coordinator.iter();
        coordinator.flat_map(|coordinator| coordinator.heartbeats())
    }

    /// Returns the directory if this member is the coordinator.
    #[must_use]
    pub fn directory(&self) -> Option<&Directory> {
        self.coordinator
            .as_ref()
            .map(|coordinator| &coordinator.directory)
    }

    /// Returns whether this member is the coordinator and has the rows of all live members. Until
    /// then, a sandbox that the directory does not contain may exist.
    #[must_use]
    pub fn is_directory_complete(&self) -> bool {
        let coordinator = self.coordinator.as_ref();
        coordinator.is_some_and(|coordinator| coordinator.is_directory_complete())
    }

    /// Returns the shares of this member.
    pub fn shares(&self) -> MutexGuard<'_, MemberShares> {
        self.shares.lock()
    }

    /// Returns the shares for other parts of the process.
    #[must_use]
    pub fn shared_shares(&self) -> SharedShares {
        self.shares.clone()
    }

    /// Changes the state of the host that the next heartbeats report.
    pub fn set_status(&mut self, status: HostStatus) {
        self.status = status;
    }

    /// Sets the wall clock in milliseconds since 1970. The coordinator writes it to the rows of
    /// dead members, for operators. No decision depends on it.
    pub fn set_wall_clock(&mut self, ms: u64) {
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.wall_ms = ms;
        }
    }

    /// Makes the next event send a heartbeat, for example because the content of heartbeats has
    /// changed.
    pub fn hasten_heartbeat(&mut self, now: Millis) {
        self.next_heartbeat = self.next_heartbeat.min(now);
    }

    /// Changes the limit of an owner's budget. `None` removes the limit.
    pub fn set_limit(&mut self, owner: &BudgetOwner, limit: Option<u64>) {
        match limit {
            Some(limit) => self.limits.insert(owner.clone(), limit),
            None => self.limits.remove(owner),
        };
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.set_limit(owner, limit);
        }
    }

    /// Accepts records that are older than those read before, after an operator has restored them.
    pub fn accept_restore(&mut self) {
        self.observed = None;
        self.newest = None;
    }

    /// Returns the time at which [`Event::Timer`] must be reported.
    #[must_use]
    pub fn wake_at(&self) -> Millis {
        let read = match self.reading {
            Some(_) => Millis(u64::MAX),
            None => self.next_read.max(self.read_needed_at()),
        };
        let takeover = self
            .takeover
            .as_ref()
            .and_then(|takeover| takeover.repeat_at);
        let coordinator = self.coordinator.as_ref().map(|c| c.wake_at());
        [Some(read), Some(self.next_heartbeat), takeover, coordinator]
            .into_iter()
            .flatten()
            .fold(Millis(u64::MAX), Millis::min)
    }

    /// Processes an event and appends the effects. `now` must have been read after the event was
    /// received.
    pub fn handle(&mut self, now: Millis, event: Event, effects: &mut Vec<Effect>) {
        match event {
            Event::Timer => {}
            Event::Message { from, message } => self.receive(now, from, &message, effects),
            Event::ShardRead(outcome) => self.shard_read(now, outcome, effects),
            Event::ShardWritten { write, outcome } => {
                self.shard_written(now, write, outcome, effects);
            }
            Event::RowsListed {
                list,
                after,
                rows,
                is_last,
            } => {
                if let Some(page) = self.rows.page(list, after, rows, is_last) {
                    self.send_to_coordinator(Body::Rows(page), effects);
                }
            }
        }
        self.tick(now, effects);
    }

    /// Records a change of a local sandbox, and sends it to the coordinator.
    pub fn change_row(&mut self, change: RowChange, effects: &mut Vec<Effect>) {
        let message = self.rows.record(change);
        if self.epoch.is_some() {
            self.send_to_coordinator(Body::Rows(message), effects);
        }
    }

    /// Requests to leave the fleet. The message may be lost: repeat the call until
    /// [`Effect::EpochEnded`].
    pub fn leave(&mut self, effects: &mut Vec<Effect>) {
        self.send_to_coordinator(Body::Leave, effects);
    }

    /// Declares a silent member dead, also during mass silence. Takes effect with the next
    /// replacement of the shard's record.
    ///
    /// # Errors
    /// [`MembershipError`] if the member sends heartbeats, or this member is not the coordinator.
    pub fn confirm_dead(&mut self, now: Millis, id: MemberId) -> Result<(), MembershipError> {
        self.coordinator()?.confirm_dead(now, id)
    }

    /// Starts or ends the drain of a member, which accepts no new sandboxes meanwhile.
    ///
    /// # Errors
    /// [`MembershipError`] if the state of the member does not permit it.
    pub fn set_draining(&mut self, id: MemberId, drain: bool) -> Result<(), MembershipError> {
        self.coordinator()?.set_draining(id, drain)
    }

    /// Removes a dead member, or a front (a machine that only passes requests), from the fleet.
    ///
    /// # Errors
    /// [`MembershipError`] if a host is not dead, or was removed before.
    pub fn remove(&mut self, now: Millis, id: MemberId) -> Result<(), MembershipError> {
        self.coordinator()?.remove(now, id)
    }

    fn coordinator(&mut self) -> Result<&mut Coordinator, MembershipError> {
        let id = self.shard().map(|record| record.coordinator);
        self.coordinator
            .as_deref_mut()
            .ok_or(MembershipError::NotCoordinator(id))
    }

    /// Performs all actions that are due: repeats writes, reads the shard's record, sends a
    /// heartbeat.
    fn tick(&mut self, now: Millis, effects: &mut Vec<Effect>) {
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.tick(now, effects);
        }
        if let Some(takeover) = &mut self.takeover
            && takeover.repeat_at.is_some_and(|at| at <= now)
        {
            takeover.repeat_at = None;
            effects.push(Effect::ReplaceShard {
                write: takeover.write,
                record: Box::new(takeover.record.clone()),
                expected: takeover.expected.clone(),
            });
        }
        if self.reading.is_none() && self.next_read <= now && self.read_needed_at() <= now {
            self.reading = Some(now);
            self.next_read = now.plus(self.config.timing.poll);
            effects.push(Effect::ReadShard);
        }
        if self.next_heartbeat <= now {
            self.next_heartbeat = now.plus(self.config.timing.heartbeat);
            self.send_heartbeat(now, effects);
        }
    }

    /// Returns the time at which the shard's record must be read: at once if it was never read,
    /// otherwise if no heartbeat has been acknowledged for `Timing::observe`.
    fn read_needed_at(&self) -> Millis {
        match &self.observed {
            None => Millis(0),
            Some(_) => self.acknowledged.plus(self.config.timing.observe),
        }
    }

    /// Sends a heartbeat, or a registration if this member has no epoch.
    fn send_heartbeat(&mut self, now: Millis, effects: &mut Vec<Effect>) {
        let timing = self.config.timing;
        // Without the shard's record, the coordinator is not known.
        if self.observed.is_none() && self.coordinator.is_none() {
            return;
        }
        if self.epoch.is_none() {
            self.registrations += 1;
            let registration = Registration {
                instance: self.config.instance,
                number: self.registrations,
                ended: self.ended,
                address: self.config.address.clone(),
                version: self.config.version.clone(),
                capacity: self.config.capacity.clone(),
            };
            self.send_to_coordinator(Body::Register(registration), effects);
            return;
        }
        self.heartbeats += 1;
        if self.sent.len() == MAX_SENT {
            self.sent.pop_front();
        }
        self.sent.push_back((self.heartbeats, now));
        let mut shares = self.shares.lock();
        shares.return_unused(now, timing.unused_share);
        let (is_complete, shares) = (shares.is_complete(), shares.report(now));
        let heartbeat = Heartbeat {
            instance: self.config.instance,
            seq: self.heartbeats,
            status: self.status.clone(),
            shares,
            is_complete,
            rows: self.rows.last(),
        };
        self.send_to_coordinator(Body::Heartbeat(heartbeat), effects);
    }

    /// Sends a message to the coordinator that the shard's record names. Does nothing if this
    /// member has not read the record yet.
    fn send_to_coordinator(&self, body: Body, effects: &mut Vec<Effect>) {
        let Some(record) = self.shard() else {
            return;
        };
        let Some(row) = record.row(record.coordinator) else {
            return;
        };
        // The record names this member, but the state of the coordinator was lost with the former
        // process. This process must take over first, like any other member.
        if record.coordinator == self.config.id && self.coordinator.is_none() {
            return;
        }
        effects.push(Effect::Send {
            to: record.coordinator,
            address: Some(row.address.clone()),
            message: Box::new(message_of(
                &self.config.fleet,
                record.term,
                self.epoch,
                body,
            )),
        });
    }
}
