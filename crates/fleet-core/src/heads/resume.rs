//! Resume of a stored sandbox on this member.
//!
//! A *member* is the daemon of one host of the fleet. The *head* of a sandbox is the record that
//! decides which member may run the sandbox. An *epoch* of a member lasts from its registration
//! with the coordinator until the coordinator declares it dead.
//!
//! The restore of the guest and the claim (the write of the head that makes this member the owner)
//! run concurrently. The guest receives its identity only after the claim is known to have
//! succeeded. If another member wins, or the outcome is unknown, the guest is dropped.

use super::HeadWrite;
use super::write::{Known, Writer};
use crate::effect::{ReadOutcome, WriteOutcome};
use crate::ids::{MemberId, Millis, Owner, Revision, Version, WriteId};
use crate::record::{Head, HeadState, Snapshot};

/// Event for [`Resume::handle`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResumeEvent {
    /// Answer to [`ResumeEffect::ReadHead`].
    HeadRead(ReadOutcome<Head>),
    /// Answer to [`ResumeEffect::WriteHead`].
    HeadWritten {
        /// Number of the write.
        write: WriteId,
        /// Outcome.
        outcome: WriteOutcome<Head>,
    },
    /// The guest is restored up to the point at which it needs its identity.
    Restored,
    /// The restore has failed. No guest exists.
    RestoreFailed,
    /// The time of [`Resume::wake_at`] has come.
    Timer,
}

/// Action that the caller must perform, in the order of the effects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResumeEffect {
    /// Read the head.
    ReadHead,
    /// Start the restore of this snapshot, without identity and network.
    StartRestore(Snapshot),
    /// Write the head.
    WriteHead(HeadWrite),
    /// Give the guest its identity and network. The sandbox runs with this revision.
    AssignIdentity {
        /// Revision of the head.
        revision: Revision,
        /// Head.
        head: Box<Head>,
        /// Version of the head, for the next pause.
        version: Version,
    },
    /// Terminate the restored guest, or cancel the restore.
    DropGuest,
    /// Answer the request. The operation may continue afterwards.
    Answer(ResumeAnswer),
    /// The operation is complete: another operation on the sandbox may start.
    Finished,
}

/// Answer to a resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResumeAnswer {
    /// The sandbox runs on this member.
    Running,
    /// The sandbox runs on another member: forward the request.
    Forward(Owner),
    /// The host of the sandbox was lost. The client must explicitly request a resume from the
    /// stored state, which may be older than the last state on the lost host.
    HostLost(Owner),
    /// The sandbox was killed.
    Killed,
    /// The sandbox was never stored.
    NotStored,
    /// The head changed: repeat the request.
    Changed,
    /// The records cannot be reached: answer 503.
    Unavailable,
    /// This member has no authority to claim: answer 503.
    NoAuthority,
    /// The restore has failed.
    RestoreFailed,
}

/// State of this member that a resume needs.
pub struct ResumeInput<'m> {
    /// Time, read after the event was received.
    pub now: Millis,
    /// This member. No guest of the sandbox runs on it.
    pub member: MemberId,
    /// [`crate::Member::authority`] at `now`.
    pub authority: Option<Owner>,
    /// [`crate::Member::is_dead`].
    pub is_dead: &'m dyn Fn(Owner) -> bool,
}

/// Progress of a resume.
#[derive(Debug)]
enum State {
    Reading,
    /// The claim is in flight, and a guest exists or is being restored.
    Claiming {
        me: Owner,
        is_restored: bool,
    },
    /// The claim was written, and the restore is in progress.
    Restoring {
        me: Owner,
        head: Box<Head>,
        version: Version,
    },
    /// The guest was dropped, and the outcome of its claim is not known yet. If the claim
    /// succeeded, the head is released.
    Resolving,
    /// The claim was written without a guest: the head is being changed to paused.
    Releasing,
    Finished,
}

/// Resume of a sandbox.
#[derive(Debug)]
pub struct Resume {
    /// True to use the stored state although the lost host of the sandbox may have a newer one.
    from_stored: bool,
    state: State,
    writer: Writer,
}

impl Resume {
    /// Starts a resume by a read of the head. With `from_stored`, the stored state is used although
    /// the lost host of the sandbox may have a newer one.
    #[must_use]
    pub fn new(from_stored: bool) -> (Self, ResumeEffect) {
        let resume = Self {
            from_stored,
            state: State::Reading,
            writer: Writer::default(),
        };
        (resume, ResumeEffect::ReadHead)
    }

    /// Returns the time at which [`ResumeEvent::Timer`] must be reported.
    #[must_use]
    pub fn wake_at(&self) -> Option<Millis> {
        self.writer.wake_at()
    }

    /// Processes an event and appends the effects.
    pub fn handle(
        &mut self,
        input: &ResumeInput<'_>,
        event: ResumeEvent,
        effects: &mut Vec<ResumeEffect>,
    ) {
        match event {
            ResumeEvent::HeadRead(outcome) => {
                if matches!(self.state, State::Reading) {
                    self.head_read(input, outcome, effects);
                }
            }
            ResumeEvent::HeadWritten { write, outcome } => {
                if let Some(known) = self.writer.outcome(input.now, write, outcome) {
                    self.written(input, known, effects);
                }
            }
            ResumeEvent::Restored => self.restored(input, effects),
            ResumeEvent::RestoreFailed => self.restore_failed(input, effects),
            ResumeEvent::Timer => {
                let due = self.writer.due(input.now);
                effects.extend(due.map(ResumeEffect::WriteHead));
            }
        }
    }

    /// Handles the head that was read. Starts the restore and the claim at the same time, or
    /// answers why the sandbox cannot be resumed here.
    fn head_read(
        &mut self,
        input: &ResumeInput<'_>,
        outcome: ReadOutcome<Head>,
        effects: &mut Vec<ResumeEffect>,
    ) {
        let (head, version) = match outcome {
            ReadOutcome::Found(head, version) => (*head, version),
            ReadOutcome::Missing => return self.finish(ResumeAnswer::NotStored, effects),
            ReadOutcome::Failed => return self.finish(ResumeAnswer::Unavailable, effects),
        };
        if let Some(answer) = self.obstacle(input, &head) {
            return self.finish(answer, effects);
        }
        let Some(me) = input.authority else {
            return self.finish(ResumeAnswer::NoAuthority, effects);
        };
        let claim = head.successor(me.member, HeadState::Running(me));
        let (Some(claim), Some(snapshot)) = (claim, head.snapshot) else {
            return self.finish(ResumeAnswer::NotStored, effects);
        };
        effects.push(ResumeEffect::StartRestore(snapshot));
        let write = self.writer.start(claim, Some(version));
        effects.push(ResumeEffect::WriteHead(write));
        self.state = State::Claiming {
            me,
            is_restored: false,
        };
    }

    /// Returns the reason for which the sandbox cannot be claimed. `None` if it can.
    fn obstacle(&self, input: &ResumeInput<'_>, head: &Head) -> Option<ResumeAnswer> {
        match head.state() {
            HeadState::Paused => None,
            HeadState::Killed(_) => Some(ResumeAnswer::Killed),
            // This member claimed the sandbox before, but has no guest: the guest was dropped, or
            // the host was restarted.
            HeadState::Running(owner) if owner.member == input.member => None,
            HeadState::Running(owner) if !(input.is_dead)(owner) => {
                Some(ResumeAnswer::Forward(owner))
            }
            HeadState::Running(_) if self.from_stored => None,
            HeadState::Running(owner) => Some(ResumeAnswer::HostLost(owner)),
        }
    }

    /// Handles the outcome of a write of the head: of the claim, or of the release after a failed
    /// resume.
    fn written(&mut self, input: &ResumeInput<'_>, known: Known, effects: &mut Vec<ResumeEffect>) {
        match (std::mem::replace(&mut self.state, State::Finished), known) {
            (State::Claiming { me, is_restored }, Known::Done(head, version)) => {
                if is_restored {
                    self.complete(input, me, head, version, effects);
                } else {
                    self.state = State::Restoring { me, head, version };
                }
            }
            (State::Claiming { .. }, Known::Lost(current)) => {
                effects.push(ResumeEffect::DropGuest);
                let answer = match current {
                    // Only heads of killed sandboxes are removed.
                    None => ResumeAnswer::Killed,
                    Some(current) => self
                        .obstacle(input, &current.0)
                        .unwrap_or(ResumeAnswer::Changed),
                };
                self.finish(answer, effects);
            }
            (State::Claiming { .. }, Known::Rejected(_)) => {
                effects.push(ResumeEffect::DropGuest);
                self.finish(ResumeAnswer::Unavailable, effects);
            }
            (State::Claiming { .. }, Known::Unknown) => {
                effects.push(ResumeEffect::DropGuest);
                effects.push(ResumeEffect::Answer(ResumeAnswer::Unavailable));
                self.state = State::Resolving;
            }
            (State::Resolving, Known::Done(head, version)) => {
                self.release(input.member, &head, version, effects);
            }
            // After a rejected release, the head stays with this member, which can claim it again.
            (State::Resolving | State::Releasing, Known::Lost(_) | Known::Rejected(_))
            | (State::Releasing, Known::Done(..)) => effects.push(ResumeEffect::Finished),
            (state, _) => self.state = state,
        }
    }

    /// Handles the end of the restore. The guest waits until the claim has succeeded.
    fn restored(&mut self, input: &ResumeInput<'_>, effects: &mut Vec<ResumeEffect>) {
        match std::mem::replace(&mut self.state, State::Finished) {
            State::Claiming { me, .. } => {
                self.state = State::Claiming {
                    me,
                    is_restored: true,
                };
            }
            State::Restoring { me, head, version } => {
                self.complete(input, me, head, version, effects);
            }
            state => self.state = state,
        }
    }

    /// Called when the host could not restore the sandbox. A claim that was already written is
    /// released, so that another host can try.
    fn restore_failed(&mut self, input: &ResumeInput<'_>, effects: &mut Vec<ResumeEffect>) {
        match std::mem::replace(&mut self.state, State::Finished) {
            State::Claiming { .. } => {
                effects.push(ResumeEffect::Answer(ResumeAnswer::RestoreFailed));
                self.state = State::Resolving;
            }
            State::Restoring { head, version, .. } => {
                effects.push(ResumeEffect::Answer(ResumeAnswer::RestoreFailed));
                self.release(input.member, &head, version, effects);
            }
            state => self.state = state,
        }
    }

    /// Completes the resume if this member still has the authority of the claim: otherwise another
    /// member may have claimed the sandbox against its dead epoch.
    fn complete(
        &mut self,
        input: &ResumeInput<'_>,
        me: Owner,
        head: Box<Head>,
        version: Version,
        effects: &mut Vec<ResumeEffect>,
    ) {
        if input.authority != Some(me) {
            effects.push(ResumeEffect::DropGuest);
            effects.push(ResumeEffect::Answer(ResumeAnswer::NoAuthority));
            return self.release(input.member, &head, version, effects);
        }
        effects.push(ResumeEffect::AssignIdentity {
            revision: head.revision,
            head,
            version,
        });
        self.finish(ResumeAnswer::Running, effects);
    }

    /// Changes a claimed head without a guest to paused, so that any member can claim it.
    fn release(
        &mut self,
        member: MemberId,
        head: &Head,
        version: Version,
        effects: &mut Vec<ResumeEffect>,
    ) {
        match head.successor(member, HeadState::Paused) {
            Some(paused) => {
                let write = self.writer.start(paused, Some(version));
                effects.push(ResumeEffect::WriteHead(write));
                self.state = State::Releasing;
            }
            None => {
                effects.push(ResumeEffect::Finished);
                self.state = State::Finished;
            }
        }
    }

    fn finish(&mut self, answer: ResumeAnswer, effects: &mut Vec<ResumeEffect>) {
        effects.push(ResumeEffect::Answer(answer));
        effects.push(ResumeEffect::Finished);
        self.state = State::Finished;
    }
}
