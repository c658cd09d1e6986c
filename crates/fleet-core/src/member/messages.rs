//! Messages that a member receives: requests of members to the coordinator, and the coordinator's
//! answers. Each message contains the term (number) of the coordinator that its sender knows. A
//! message of an unknown coordinator is ignored.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor. An
//! *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead. A *row* is the entry of one sandbox in the coordinator's directory, which
//! locates all sandboxes. A member sends changed rows, or on request a *list*: all of its rows, in
//! pages. A *shard* is a part of the fleet's sandboxes. Its record lists the members and names the
//! coordinator. A *share* is the part of an API key's limit that one member may use. The
//! coordinator *grants* shares and *recalls* unused parts.

use super::Member;
use crate::coordinator::message_of;
use crate::directory::{MAX_ROWS_PER_MESSAGE, RowRequest};
use crate::effect::Effect;
use crate::ids::{Epoch, Instance, MemberId, Millis};
use crate::message::{Acknowledgement, Body, Message, Rejection, RejectionReason};

impl Member {
    /// Handles a message of another member, or of this member to itself. Invalid messages are
    /// rejected or ignored.
    pub(super) fn receive(
        &mut self,
        now: Millis,
        from: MemberId,
        message: &Message,
        effects: &mut Vec<Effect>,
    ) {
        if let Err(reason) = message.check(&self.config.fleet) {
            self.reject(from, message, reason, effects);
            return;
        }
        if self.term().is_none_or(|term| message.term > term) {
            // The message names a later term. A sender could claim any term, so the member believes
            // only the shard's record: act as if the last acknowledgement were old, which makes the
            // member read it.
            self.acknowledged = self
                .acknowledged
                .min(Millis(now.0.saturating_sub(self.config.timing.observe)));
        }
        match &message.body {
            Body::Register(_) | Body::Heartbeat(_) | Body::Leave | Body::Rows(_) => {
                self.receive_request(now, from, message, effects);
            }
            _ => {
                let is_coordinator = self
                    .shard()
                    .is_some_and(|r| r.coordinator == from && r.term == message.term);
                if is_coordinator {
                    self.receive_answer(now, &message.body, effects);
                }
            }
        }
    }

    /// Processes a message for the coordinator.
    fn receive_request(
        &mut self,
        now: Millis,
        from: MemberId,
        message: &Message,
        effects: &mut Vec<Effect>,
    ) {
        let Some(coordinator) = &mut self.coordinator else {
            self.reject(from, message, RejectionReason::NotCoordinator, effects);
            return;
        };
        match &message.body {
            Body::Register(registration) => {
                coordinator.register(now, from, message, registration, effects);
            }
            Body::Heartbeat(heartbeat) => {
                coordinator.heartbeat(now, from, message, heartbeat, effects);
            }
            Body::Leave => coordinator.leave(from, message),
            Body::Rows(rows) => coordinator.receive_rows(from, message.epoch, rows, effects),
            _ => {}
        }
    }

    /// Answers a registration or a heartbeat with a rejection. Other messages need no answer.
    fn reject(
        &self,
        to: MemberId,
        message: &Message,
        reason: RejectionReason,
        effects: &mut Vec<Effect>,
    ) {
        let (instance, seq) = match &message.body {
            Body::Register(registration) => (registration.instance, 0),
            Body::Heartbeat(heartbeat) => (heartbeat.instance, heartbeat.seq),
            _ => return,
        };
        let rejection = Rejection {
            instance,
            seq,
            ended: None,
            reason,
        };
        let term = self.term().unwrap_or_default();
        effects.push(Effect::Send {
            to,
            address: None,
            message: Box::new(message_of(
                &self.config.fleet,
                term,
                self.epoch,
                Body::Rejected(rejection),
            )),
        });
    }

    /// Processes a message of the coordinator.
    fn receive_answer(&mut self, now: Millis, body: &Body, effects: &mut Vec<Effect>) {
        match body {
            Body::Registered { instance, epoch } => {
                self.registered(now, *instance, *epoch, effects);
            }
            Body::Acknowledged(acknowledgement) => {
                self.acknowledged(now, acknowledgement, effects);
            }
            Body::Rejected(rejection) => self.rejected(now, rejection, effects),
            Body::RowsWanted(request) => self.rows_wanted(*request, effects),
            // `Coordinating` has no content: its term has already made this member read the record.
            // The others are requests to a coordinator.
            Body::Coordinating
            | Body::Register(_)
            | Body::Heartbeat(_)
            | Body::Leave
            | Body::Rows(_) => {}
        }
    }

    /// Handles the confirmation of a registration: a new epoch of this member starts.
    fn registered(
        &mut self,
        now: Millis,
        instance: Instance,
        epoch: Epoch,
        effects: &mut Vec<Effect>,
    ) {
        let is_old = self.ended.is_some_and(|ended| epoch <= ended);
        if instance != self.config.instance || self.epoch.is_some() || is_old {
            return;
        }
        self.epoch = Some(epoch);
        // In a new epoch, the coordinator does not count unused parts of shares from the former
        // epoch, and may grant them to others. Keep only the parts in use, which the next heartbeat
        // reports.
        self.shares.lock().return_all_unused();
        self.next_heartbeat = now;
        effects.push(Effect::Registered { epoch });
    }

    /// Handles the acknowledgement of a heartbeat: extends the authority of this member until a
    /// new deadline, applies grants and recalls of shares, and sends the rows that the coordinator
    /// requests. *Authority* is the right to start stored sandboxes.
    fn acknowledged(
        &mut self,
        now: Millis,
        acknowledgement: &Acknowledgement,
        effects: &mut Vec<Effect>,
    ) {
        if acknowledgement.instance != self.config.instance {
            return;
        }
        let mut sent = self.sent.iter();
        let Some(position) = sent.position(|&(seq, _)| seq == acknowledgement.seq) else {
            return;
        };
        let Some((_, sent_at)) = self.sent.remove(position) else {
            return;
        };
        let deadline = sent_at.plus(self.config.timing.deadline);
        self.deadline = self.deadline.max(Some(deadline));
        self.acknowledged = now;
        self.newest_version(now, &acknowledgement.record);
        let mut shares = self.shares.lock();
        for grant in &acknowledgement.grants {
            shares.apply(now, grant);
        }
        for recall in &acknowledgement.recalls {
            shares.recall(recall);
        }
        drop(shares);
        if self.pools != acknowledgement.pools {
            self.pools.clone_from(&acknowledgement.pools);
            effects.push(Effect::Pools(self.pools.clone()));
        }
        match acknowledgement.rows {
            // The coordinator has received all changes: nothing is sent.
            RowRequest::Changes { from } if from > self.rows.last() => {}
            request => self.rows_wanted(request, effects),
        }
    }

    /// Handles a rejection of a registration or heartbeat. Some reasons end the epoch of this
    /// member.
    fn rejected(&mut self, now: Millis, rejection: &Rejection, effects: &mut Vec<Effect>) {
        if rejection.instance != self.config.instance {
            return;
        }
        // Answers to messages of an earlier epoch are ignored.
        let is_current = match self.epoch {
            None => rejection.seq == 0,
            Some(_) => self.sent.iter().any(|&(seq, _)| seq == rejection.seq),
        };
        if !is_current {
            return;
        }
        if self.epoch.is_none() && rejection.ended > self.ended {
            // The answer to an earlier registration was lost, or this process has been restarted.
            // Remember the epoch that has ended, and register again with it.
            self.ended = rejection.ended;
            self.next_heartbeat = now;
            return;
        }
        effects.push(Effect::Rejected(rejection.reason));
        match rejection.reason {
            RejectionReason::EpochEnded
            | RejectionReason::Left
            | RejectionReason::Superseded
            | RejectionReason::Unregistered => self.end_epoch(effects),
            _ => {}
        }
    }

    /// Sends the rows that the coordinator requests.
    fn rows_wanted(&mut self, request: RowRequest, effects: &mut Vec<Effect>) {
        match request {
            RowRequest::Changes { from } => {
                if let Some(message) = self.rows.changes(from) {
                    self.send_to_coordinator(Body::Rows(message), effects);
                }
            }
            RowRequest::Page { list, after } => {
                self.rows.start_page(list, after);
                effects.push(Effect::ListRows {
                    list,
                    after,
                    limit: MAX_ROWS_PER_MESSAGE,
                });
            }
        }
    }
}
