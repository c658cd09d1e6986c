//! Registrations, heartbeats and verdicts of the members of a shard.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead. A restart of the daemon continues the epoch, but a reboot of the host does
//! not. The *term* counts the coordinators of a fleet: each has a higher term than its predecessor.
//! A *share* is the part of an API key's limit that one member may use.
//!
//! A *shard* is a part of the fleet's sandboxes. Its record has one row per member. The coordinator
//! changes rows in a draft of the record. The committed record is the version that was last written
//! successfully.
//!
//! Words of this module:
//! - A *silent* member has sent no heartbeat for so long that the coordinator may declare its epoch
//!   dead (`Timing::silence`).
//! - A *quiet* member has sent no heartbeat for a shorter time (`Timing::unacknowledged`). Quiet
//!   members are counted to detect mass silence, during which the coordinator decides no verdicts.
//! - A *verdict* is the decision that the epoch of a member is dead. It takes effect when the draft
//!   is committed. Until then, the member is *condemned*.
//! - During the *grace period*, a new coordinator makes no verdicts: members may still send their
//!   first heartbeats to it.
//! - A *front* is a machine without sandboxes that passes requests of clients to the members.

use super::membership_error::MembershipError;
use super::rows::list_number;
use super::{Coordinator, HostLoad, Peer, report_of};
use crate::directory::RowReceiver;
use crate::effect::Effect;
use crate::ids::{Epoch, MemberId, Millis};
use crate::message::{
    Acknowledgement, Body, Heartbeat, Message, Registration, Rejection, RejectionReason,
};
use crate::record::{MAX_MEMBERS, MAX_REMOVED_FRONTS, MAX_SHARD_BYTES, MemberRow, MemberState};

/// Maximum size of all rows. The rest of the record needs less than 64 KiB.
const MAX_ROWS_BYTES: usize = MAX_SHARD_BYTES - (64 << 10);

impl Coordinator {
    /// Processes a registration.
    pub fn register(
        &mut self,
        now: Millis,
        from: MemberId,
        message: &Message,
        registration: &Registration,
        effects: &mut Vec<Effect>,
    ) {
        let latest = self.registrations.get(&from);
        if latest.is_some_and(|&(instance, number)| {
            instance == registration.instance && number >= registration.number
        }) {
            return;
        }
        match self.try_register(now, from, message, registration, effects) {
            Ok(()) => {
                let latest = (registration.instance, registration.number);
                self.registrations.insert(from, latest);
                if let Some(peer) = self.peers.get_mut(&from) {
                    peer.heard = Some(now);
                }
            }
            Err(reason) => {
                let row = self.draft.row(from);
                let ended = row.filter(|_| reason == RejectionReason::EpochEnded);
                let rejection = Rejection {
                    instance: registration.instance,
                    seq: 0,
                    ended: ended.map(|row| row.epoch),
                    reason,
                };
                self.reject(from, registration.address.clone(), rejection, effects);
            }
        }
    }

    /// Handles a registration. The state of the member's row, and whether the registering process
    /// is a restart on the same boot, determine its epoch or the reason of a rejection. A new row
    /// takes effect with the next commit of the record.
    fn try_register(
        &mut self,
        now: Millis,
        from: MemberId,
        message: &Message,
        registration: &Registration,
        effects: &mut Vec<Effect>,
    ) -> Result<(), RejectionReason> {
        if message.term != self.committed.term {
            return Err(RejectionReason::Term);
        }
        // True if the former process of the member has sent no heartbeat for the time of silence.
        let is_former_silent = self.is_silent(now, from);
        let is_grace = now < self.grace_ends;
        let is_full = self.draft.members.len() >= MAX_MEMBERS;
        let Some(row) = self.draft.row(from) else {
            if is_full {
                return Err(RejectionReason::Full);
            }
            return self.insert(new_row(from, Epoch(1), registration));
        };
        let epoch = match row.state {
            MemberState::Left => return Err(RejectionReason::Left),
            // A late request of a process that was restarted since.
            MemberState::Dead if row.instance.is_restart_of(&registration.instance) => {
                return Err(RejectionReason::Superseded);
            }
            MemberState::Dead => Epoch(row.epoch.0 + 1),
            MemberState::Up | MemberState::Draining => {
                let former = row.instance;
                // The new process knows that the epoch of the row has ended. `None` is less than
                // any epoch: a process without a former epoch knows of no end.
                let is_given_up = registration.ended >= Some(row.epoch);
                let is_same =
                    former == registration.instance || registration.instance.is_restart_of(&former);
                if is_same && is_given_up && is_grace {
                    // No epoch is ended during the grace period. The member registers again later.
                    return Err(RejectionReason::Grace);
                } else if is_same && is_given_up {
                    // The process gave up the epoch of a live row, for example after a former
                    // coordinator reported a verdict and lost its term before the commit.
                    Epoch(row.epoch.0 + 1)
                } else if former == registration.instance {
                    // The registration is repeated. If the row is committed, the answer was lost
                    // and is sent again. Otherwise the answer follows the commit.
                    if self.committed.row(from) == Some(row) {
                        let row = row.clone();
                        self.send_registered(&row, effects);
                    }
                    return Ok(());
                } else if is_same {
                    // Restart on the same boot: the member keeps its epoch.
                    row.epoch
                } else if former.boot == registration.instance.boot {
                    // Late request of a process that was restarted since.
                    return Err(RejectionReason::Superseded);
                } else if is_grace {
                    // Other boot or other host. During the grace period, the coordinator does not
                    // know yet whether the former process still sends heartbeats.
                    return Err(RejectionReason::Grace);
                } else if !is_former_silent {
                    // Two hosts with the same member id are active.
                    return Err(RejectionReason::Duplicate);
                } else {
                    // The former process is silent, for example because the host was rebooted.
                    Epoch(row.epoch.0 + 1)
                }
            }
        };
        // The process must know the end of the former epoch before it receives a new one. The
        // rejection contains the ended epoch.
        if epoch > row.epoch && registration.ended < Some(row.epoch) {
            return Err(RejectionReason::EpochEnded);
        }
        let mut row = new_row(from, epoch, registration);
        if self
            .draft
            .row(from)
            .is_some_and(|old| old.state == MemberState::Draining)
        {
            row.state = MemberState::Draining;
        }
        self.insert(row)
    }

    /// Adds a row to the draft, unless the record becomes too large.
    fn insert(&mut self, row: MemberRow) -> Result<(), RejectionReason> {
        let (id, bytes) = (row.id, row.encoded_bytes());
        let others = self.row_bytes.iter().filter(|&(&other, _)| other != id);
        let total = others.fold(bytes, |sum, (_, bytes)| sum + bytes);
        if total > MAX_ROWS_BYTES {
            return Err(RejectionReason::Full);
        }
        self.row_bytes.insert(id, bytes);
        self.draft.insert(row);
        self.next_renew = self.soon();
        // `answer_registration` replaces the peer when the row is committed.
        let list = list_number(self.committed.term, 0);
        self.peers.entry(id).or_insert_with(|| Peer {
            heard: None,
            last_seq: 0,
            load: HostLoad::default(),
            rows: RowReceiver::new(list),
        });
        Ok(())
    }

    /// Processes a heartbeat.
    pub fn heartbeat(
        &mut self,
        now: Millis,
        from: MemberId,
        message: &Message,
        heartbeat: &Heartbeat,
        effects: &mut Vec<Effect>,
    ) {
        if let Err(reason) = self.try_heartbeat(now, from, message, heartbeat, effects) {
            let address = self.draft.row(from).map(|row| row.address.clone());
            let rejection = Rejection {
                instance: heartbeat.instance,
                seq: heartbeat.seq,
                ended: None,
                reason,
            };
            if let Some(address) = address {
                self.reject(from, address, rejection, effects);
            }
        }
    }

    /// Handles a heartbeat: checks that it comes from the registered process and its current epoch,
    /// records the state of the host and its shares, and acknowledges it. A member without
    /// acknowledgements loses its authority.
    fn try_heartbeat(
        &mut self,
        now: Millis,
        from: MemberId,
        message: &Message,
        heartbeat: &Heartbeat,
        effects: &mut Vec<Effect>,
    ) -> Result<(), RejectionReason> {
        if message.term != self.committed.term {
            return Err(RejectionReason::Term);
        }
        let Some(row) = self.committed.row(from) else {
            return Err(RejectionReason::Unregistered);
        };
        if row.state == MemberState::Left {
            return Err(RejectionReason::Left);
        }
        if !row.state.is_live() || Some(row.epoch) != message.epoch {
            return Err(RejectionReason::EpochEnded);
        }
        if row.instance != heartbeat.instance {
            return Err(if row.instance.is_restart_of(&heartbeat.instance) {
                RejectionReason::Superseded
            } else {
                RejectionReason::Unregistered
            });
        }
        // The member is condemned if the draft has a verdict on its epoch. The verdict may be
        // committed at any time from now on, so heartbeats are not acknowledged any longer.
        let is_condemned = self
            .draft
            .row(from)
            .is_none_or(|draft| !draft.state.is_live() || draft.epoch != row.epoch);
        if is_condemned {
            return Err(RejectionReason::Condemned);
        }
        let Some(peer) = self.peers.get_mut(&from) else {
            return Err(RejectionReason::Unregistered);
        };
        if heartbeat.seq <= peer.last_seq {
            return Ok(());
        }
        peer.heard = Some(now);
        peer.last_seq = heartbeat.seq;
        peer.load = HostLoad {
            creates: heartbeat.status.creates,
            builds: heartbeat.status.builds.clone(),
        };
        let host = from.host();
        self.scheduler
            .report(host, report_of(row, Some(&heartbeat.status)));
        if !self.has_authority(now) {
            return Err(RejectionReason::NoAuthority);
        }
        let members = self.live_count();
        let shares = (&*heartbeat.shares, heartbeat.is_complete);
        let (grants, recalls) = self.budgets.report(from, shares, members);
        let rows = self.peers.get(&from).map(|peer| peer.rows.request());
        if let (Some(rows), Some(row)) = (rows, self.committed.row(from)) {
            let body = Body::Acknowledged(Acknowledgement {
                instance: heartbeat.instance,
                seq: heartbeat.seq,
                grants,
                recalls,
                rows,
                record: self.version.clone(),
                pools: self.demand.pools(from),
            });
            effects.push(self.message(row, body));
        }
        Ok(())
    }

    /// Sends a rejection to a member.
    fn reject(
        &self,
        to: MemberId,
        address: String,
        rejection: Rejection,
        effects: &mut Vec<Effect>,
    ) {
        effects.push(Effect::Send {
            to,
            address: Some(address),
            message: Box::new(super::message_of(
                &self.committed.fleet,
                self.committed.term,
                None,
                Body::Rejected(rejection),
            )),
        });
    }

    /// Returns the number of members that are up or draining.
    pub(super) fn live_count(&self) -> u32 {
        self.peers.len() as u32
    }

    /// Returns the time at which a member becomes silent.
    pub(super) fn silent_at(&self, peer: &Peer) -> Millis {
        let silent = peer
            .heard
            .map_or(self.grace_ends, |heard| heard.plus(self.timing.silence));
        silent.max(self.grace_ends)
    }

    fn is_silent(&self, now: Millis, member: MemberId) -> bool {
        self.peers
            .get(&member)
            .is_none_or(|peer| self.silent_at(peer) <= now)
    }

    /// Decides verdicts on silent members, unless more than half of the live members are quiet
    /// (mass silence).
    pub(super) fn judge(&mut self, now: Millis, effects: &mut Vec<Effect>) {
        let is_live = |row: &&MemberRow| row.state.is_live();
        // Members that lose their connection together become silent at different times, depending
        // on their last heartbeats. The shorter time of quiet members reveals mass silence before
        // the first of them is declared dead.
        let is_quiet = |row: &&MemberRow| {
            self.peers.get(&row.id).is_none_or(|peer| {
                let heard = peer.heard.unwrap_or(Millis(0));
                now.since(heard) >= self.timing.unacknowledged
            })
        };
        let live: Vec<_> = self.committed.members.iter().filter(is_live).collect();
        let quiet = live.iter().copied().filter(is_quiet).count();
        let is_mass_silence = now >= self.grace_ends && quiet * 2 > live.len();
        if is_mass_silence != self.is_mass_silence {
            self.is_mass_silence = is_mass_silence;
            effects.push(Effect::MassSilence {
                silent: if is_mass_silence { quiet } else { 0 },
                members: live.len(),
            });
        }
        if is_mass_silence || now < self.grace_ends || !self.has_authority(now) {
            return;
        }
        let silent: Vec<_> = live
            .iter()
            .map(|row| row.id)
            .filter(|&id| id != self.id && self.is_silent(now, id))
            .collect();
        for id in silent {
            self.condemn(id);
        }
    }

    /// Decides that the epoch of a member is dead. The decision takes effect with its commit.
    fn condemn(&mut self, id: MemberId) {
        let epoch = self.committed.row(id).map(|row| row.epoch);
        if let Some(row) = self.draft.row_mut(id)
            && row.state.is_live()
            && Some(row.epoch) == epoch
        {
            row.state = MemberState::Dead;
            row.dead_since_ms = Some(self.wall_ms).filter(|&ms| ms > 0);
            self.row_bytes.insert(id, row.encoded_bytes());
            self.next_renew = self.soon();
        }
    }

    /// Decides that a silent member is dead, also during mass silence.
    pub fn confirm_dead(&mut self, now: Millis, id: MemberId) -> Result<(), MembershipError> {
        let row = self.draft.row(id).ok_or(MembershipError::Unknown(id))?;
        if !row.state.is_live() {
            return Err(MembershipError::State {
                member: id,
                state: row.state,
            });
        }
        if now < self.grace_ends {
            return Err(MembershipError::Grace(id));
        }
        let heard = self.peers.get(&id).and_then(|peer| peer.heard);
        if let Some(heard) = heard.filter(|_| !self.is_silent(now, id)) {
            return Err(MembershipError::Active {
                member: id,
                silent_ms: now.since(heard),
            });
        }
        self.condemn(id);
        Ok(())
    }

    /// Changes whether a member accepts new sandboxes.
    pub fn set_draining(&mut self, id: MemberId, drain: bool) -> Result<(), MembershipError> {
        let others = self
            .draft
            .members
            .iter()
            .filter(|row| row.state == MemberState::Up && row.id != id)
            .count();
        let row = self.draft.row_mut(id).ok_or(MembershipError::Unknown(id))?;
        match (row.state, drain) {
            (MemberState::Up, true) if others == 0 => Err(MembershipError::LastHost(id)),
            (MemberState::Up, true) => {
                row.state = MemberState::Draining;
                self.next_renew = self.soon();
                Ok(())
            }
            (MemberState::Draining, false) => {
                row.state = MemberState::Up;
                self.next_renew = self.soon();
                Ok(())
            }
            (state, _) => Err(MembershipError::State { member: id, state }),
        }
    }

    /// Removes a dead member or a front from the fleet. A front may still run: it has no sandboxes
    /// that could be lost. Members reject its certificate afterwards.
    pub fn remove(&mut self, now: Millis, id: MemberId) -> Result<(), MembershipError> {
        if id.is_front() {
            return self.remove_front(id);
        }
        let heard = self.peers.get(&id).and_then(|peer| peer.heard);
        let row = self.draft.row_mut(id).ok_or(MembershipError::Unknown(id))?;
        match row.state {
            MemberState::Dead => {
                row.state = MemberState::Left;
                self.next_renew = self.soon();
                Ok(())
            }
            MemberState::Left => Err(MembershipError::State {
                member: id,
                state: row.state,
            }),
            MemberState::Up | MemberState::Draining => Err(MembershipError::Active {
                member: id,
                silent_ms: heard.map_or(0, |heard| now.since(heard)),
            }),
        }
    }

    /// Adds a front to the removed fronts, which members do not serve.
    fn remove_front(&mut self, id: MemberId) -> Result<(), MembershipError> {
        let removed = &mut self.draft.removed_fronts;
        match removed.binary_search(&id) {
            Ok(_) => Err(MembershipError::State {
                member: id,
                state: MemberState::Left,
            }),
            Err(_) if removed.len() >= MAX_REMOVED_FRONTS => Err(MembershipError::TooManyFronts),
            Err(index) => {
                removed.insert(index, id);
                self.next_renew = self.soon();
                Ok(())
            }
        }
    }

    /// Processes the departure of a member.
    pub fn leave(&mut self, from: MemberId, message: &Message) {
        if message.term != self.committed.term {
            return;
        }
        if let Some(row) = self.draft.row_mut(from)
            && row.state.is_live()
            && Some(row.epoch) == message.epoch
        {
            row.state = MemberState::Left;
        }
    }
}

/// Returns the row of a member that has registered in a new epoch.
fn new_row(id: MemberId, epoch: Epoch, registration: &Registration) -> MemberRow {
    MemberRow {
        id,
        epoch,
        instance: registration.instance,
        address: registration.address.clone(),
        state: MemberState::Up,
        version: registration.version.clone(),
        capacity: registration.capacity.clone(),
        dead_since_ms: None,
        unknown: crate::record::UnknownFields::new(),
    }
}
