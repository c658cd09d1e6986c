//! Changes of a head that involve no guest. The head of a sandbox is the record that decides which
//! member may run it. The changes are:
//! - the kill of a sandbox, and the confirmation that a member has removed its files
//! - adoption: a member that was registered again (in a new epoch) becomes the owner of its sandbox
//!   again
//! - release: a member gives up a sandbox that it has claimed, but whose guest does not exist
//!
//! A host *claims* a sandbox by a conditional write of its head, in which only one host succeeds.
//! The *home* of a sandbox is the member that has its files while no member owns it.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead.

use super::HeadWrite;
use super::write::{Known, Writer};
use crate::effect::{ReadOutcome, WriteOutcome};
use crate::ids::{Digest, MemberId, Millis, Owner, Revision, SandboxId, Version, WriteId};
use crate::record::{Head, HeadState, KilledAt};
use crate::timing::Timing;

/// Purpose of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Kill the sandbox. A sandbox that runs on another member than `by` and `home` is not killed:
    /// the request must be forwarded to its owner.
    Kill {
        /// This member.
        by: MemberId,
        /// Member that has files of the sandbox and cannot be reached. The kill is then recorded
        /// also if the sandbox was never stored.
        home: Option<MemberId>,
    },
    /// Confirm that this member has removed the files of a killed sandbox.
    Confirm(MemberId),
    /// Make the current epoch of this member the owner of a sandbox that it owned before.
    Adopt(Owner),
    /// Permit any member to claim a sandbox that this owner has claimed, but does not run.
    Release(Owner),
}

/// Event for [`HeadUpdate::handle`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UpdateEvent {
    /// Answer to [`UpdateEffect::ReadHead`].
    HeadRead(ReadOutcome<Head>),
    /// Answer to [`UpdateEffect::WriteHead`].
    HeadWritten {
        /// Number of the write.
        write: WriteId,
        /// Outcome.
        outcome: WriteOutcome<Head>,
    },
    /// The time of [`HeadUpdate::wake_at`] has come.
    Timer,
}

/// Action that the caller must perform, in the order of the effects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UpdateEffect {
    /// Read the head.
    ReadHead,
    /// Write the head.
    WriteHead(HeadWrite),
    /// The change is stored.
    Stored {
        /// Revision of the head.
        revision: Revision,
        /// Head.
        head: Box<Head>,
        /// Version of the head.
        version: Version,
    },
    /// The change is not needed, or no longer possible. Contains the current head. `None` if no
    /// head exists.
    Unchanged(Option<Box<Head>>),
    /// Remove the snapshot with this root (digest) from the store.
    Retract(Digest),
    /// The operation is complete: another operation on the sandbox may start.
    Finished,
}

/// Change of a head that is retried until its outcome is known.
#[derive(Debug)]
pub struct HeadUpdate {
    id: SandboxId,
    purpose: Purpose,
    writer: Writer,
    /// Time at which the head is read again. `None` if no read is planned.
    read_at: Option<Millis>,
    /// Wall clock at the last event.
    wall_ms: u64,
}

impl HeadUpdate {
    /// Starts a change by a read of the head.
    #[must_use]
    pub fn new(id: SandboxId, purpose: Purpose) -> (Self, UpdateEffect) {
        let update = Self {
            id,
            purpose,
            writer: Writer::default(),
            read_at: None,
            wall_ms: 0,
        };
        (update, UpdateEffect::ReadHead)
    }

    /// Returns the time at which [`UpdateEvent::Timer`] must be reported.
    #[must_use]
    pub fn wake_at(&self) -> Option<Millis> {
        self.writer.wake_at().or(self.read_at)
    }

    /// Processes an event and appends the effects. `wall_ms` is the wall clock in milliseconds
    /// since 1970.
    pub fn handle(
        &mut self,
        now: Millis,
        wall_ms: u64,
        event: UpdateEvent,
        effects: &mut Vec<UpdateEffect>,
    ) {
        self.wall_ms = wall_ms;
        match event {
            UpdateEvent::HeadRead(ReadOutcome::Found(head, version)) => {
                self.change(Some((*head, version)), effects);
            }
            UpdateEvent::HeadRead(ReadOutcome::Missing) => self.change(None, effects),
            UpdateEvent::HeadRead(ReadOutcome::Failed) => self.read_later(now),
            UpdateEvent::HeadWritten { write, outcome } => {
                match self.writer.outcome(now, write, outcome) {
                    Some(Known::Done(head, version)) => self.done(head, version, effects),
                    Some(Known::Lost(current)) => {
                        self.change(current.map(|current| *current), effects)
                    }
                    Some(Known::Rejected(_)) => self.read_later(now),
                    Some(Known::Unknown) | None => {}
                }
            }
            UpdateEvent::Timer => {
                let due = self.writer.due(now);
                effects.extend(due.map(UpdateEffect::WriteHead));
                if self.read_at.take_if(|at| *at <= now).is_some() {
                    effects.push(UpdateEffect::ReadHead);
                }
            }
        }
    }

    fn read_later(&mut self, now: Millis) {
        self.read_at = Some(now.plus(Timing::PRODUCTION.repeat));
    }

    /// Writes the successor of a head, or ends the operation.
    fn change(&mut self, current: Option<(Head, Version)>, effects: &mut Vec<UpdateEffect>) {
        let (head, version) = match current {
            Some((head, version)) => (self.successor(&head).ok_or(head), Some(version)),
            None => match self.purpose {
                Purpose::Kill {
                    home: Some(home), ..
                } => {
                    let killed = HeadState::Killed(KilledAt {
                        at_ms: self.wall_ms,
                        home: Some(home),
                    });
                    (Ok(Head::new(self.id, killed, None, None)), None)
                }
                _ => {
                    effects.extend([UpdateEffect::Unchanged(None), UpdateEffect::Finished]);
                    return;
                }
            },
        };
        match head {
            Ok(successor) => {
                let write = self.writer.start(successor, version);
                effects.push(UpdateEffect::WriteHead(write));
            }
            Err(head) => {
                effects.push(UpdateEffect::Unchanged(Some(Box::new(head))));
                effects.push(UpdateEffect::Finished);
            }
        }
    }

    /// Returns the changed head. `None` if the change is not needed or not possible.
    fn successor(&self, head: &Head) -> Option<Head> {
        match (self.purpose, head.state()) {
            (Purpose::Kill { by, home, .. }, HeadState::Running(owner))
                if owner.member != by && Some(owner.member) != home =>
            {
                None
            }
            (Purpose::Kill { by, home }, HeadState::Paused | HeadState::Running(_)) => {
                let at_ms = self.wall_ms;
                // The member that created the head may still have files (`Head::origin`), and must
                // confirm the kill as well.
                let origin = head.origin.filter(|&origin| origin != by);
                let home = home.or(origin);
                head.successor(by, HeadState::Killed(KilledAt { at_ms, home }))
            }
            (Purpose::Confirm(me), HeadState::Killed(killed)) if killed.home == Some(me) => {
                let confirmed = KilledAt {
                    // After the home, the member in `Head::origin` must confirm the kill.
                    home: head.origin.filter(|&origin| origin != me),
                    ..killed
                };
                head.successor(me, HeadState::Killed(confirmed))
            }
            (Purpose::Adopt(me), HeadState::Running(owner))
                if owner.member == me.member && owner.epoch < me.epoch =>
            {
                head.successor(me.member, HeadState::Running(me))
            }
            (Purpose::Release(me), HeadState::Running(owner)) if owner == me => {
                head.successor(me.member, HeadState::Paused)
            }
            _ => None,
        }
    }

    /// Reports the written head. After a kill, the snapshot is also removed from the store.
    fn done(&self, head: Box<Head>, version: Version, effects: &mut Vec<UpdateEffect>) {
        let root = match self.purpose {
            Purpose::Kill { .. } => head.root(),
            Purpose::Confirm(_) | Purpose::Adopt(_) | Purpose::Release(_) => None,
        };
        effects.push(UpdateEffect::Stored {
            revision: head.revision,
            head,
            version,
        });
        effects.extend(root.map(UpdateEffect::Retract));
        effects.push(UpdateEffect::Finished);
    }
}

/// Returns whether the head of a killed sandbox may be removed. `now_ms` is the wall clock in
/// milliseconds since 1970, and `is_removed` returns whether a member has left the fleet.
///
/// Without the head, a home that has not confirmed the kill would run the sandbox again after its
/// return.
#[must_use]
pub fn may_purge(
    head: &Head,
    now_ms: u64,
    timing: &Timing,
    is_removed: &dyn Fn(MemberId) -> bool,
) -> bool {
    match head.state() {
        HeadState::Killed(killed) => {
            now_ms.saturating_sub(killed.at_ms) >= timing.killed
                && killed.home.is_none_or(is_removed)
        }
        HeadState::Paused | HeadState::Running(_) => false,
    }
}
