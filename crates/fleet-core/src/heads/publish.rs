//! Publication of a pause: stores the paused state, so that any host of the fleet can resume it.
//!
//! A *member* is the daemon of one host of the fleet. The *head* of a sandbox is the record that
//! decides which member may run the sandbox.
//!
//! The order is important. The snapshot is uploaded first, because a head must not name a missing
//! snapshot. The head is written next. The root (digest of the manifest) of the replaced snapshot
//! is removed from the store last, since the former head still named it.

use super::HeadWrite;
use super::write::{Known, Writer};
use crate::effect::WriteOutcome;
use crate::ids::{Digest, MemberId, Millis, Revision, SandboxId, Version, WriteId};
use crate::record::{Head, HeadState, Policy, SandboxRecord, Snapshot};

/// Event for [`Publish::handle`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishEvent {
    /// Manifest, packs and records of the snapshot are in the store.
    ManifestWritten,
    /// The upload has failed.
    ManifestFailed,
    /// Answer to [`PublishEffect::WriteHead`].
    HeadWritten {
        /// Number of the write.
        write: WriteId,
        /// Outcome.
        outcome: WriteOutcome<Head>,
    },
    /// The time of [`Publish::wake_at`] has come.
    Timer,
}

/// Action that the caller must perform, in the order of the effects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishEffect {
    /// Upload the snapshot.
    WriteManifest(Digest),
    /// Write the head.
    WriteHead(HeadWrite),
    /// The snapshot is in the store, and the head names it. Report the pause as durable, and the
    /// sandbox as stored.
    Stored {
        /// Revision of the head.
        revision: Revision,
        /// Head.
        head: Box<Head>,
        /// Version of the head.
        version: Version,
    },
    /// The outcome is not known yet: answer a waiting request with 503. The operation continues.
    Unavailable,
    /// The upload has failed: retry with a new operation.
    Failed,
    /// Another member has replaced the head: the local state is not the newest one. `None` if the
    /// sandbox was killed and its head was removed.
    Superseded(Option<Box<(Head, Version)>>),
    /// Remove the snapshot with this root from the store.
    Retract(Digest),
    /// The operation is complete: another operation on the sandbox may start.
    Finished,
}

/// Content of the new head, and the head that it replaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishInput {
    /// This member.
    pub member: MemberId,
    /// Sandbox.
    pub id: SandboxId,
    /// Current head and its version. `None` if the sandbox was never stored.
    pub current: Option<(Head, Version)>,
    /// Snapshot of the pause.
    pub snapshot: Snapshot,
    /// Sandbox record.
    pub record: SandboxRecord,
    /// Options.
    pub policy: Policy,
}

/// Publication of a pause.
#[derive(Debug)]
pub struct Publish {
    /// Root of the replaced snapshot. `None` for the first snapshot, or if the roots are equal.
    former: Option<Digest>,
    /// Root of the new snapshot.
    new: Digest,
    /// Head to write and its expected version, until the manifest is written.
    prepared: Option<(Head, Option<Version>)>,
    writer: Writer,
    /// True if [`PublishEffect::Unavailable`] was emitted.
    is_answered: bool,
}

impl Publish {
    /// Starts the publication by the upload of the snapshot. `None` if the head has the maximum
    /// revision.
    #[must_use]
    pub fn new(input: PublishInput) -> Option<(Self, PublishEffect)> {
        let new = input.snapshot.root;
        let (mut head, version) = match input.current {
            Some((head, version)) => {
                let head = head.successor(input.member, HeadState::Paused)?;
                (head, Some(version))
            }
            None => {
                let mut head = Head::new(input.id, HeadState::Paused, None, None);
                // This member may fail before it has recorded the head in its journal, the database
                // of its own sandboxes. With `origin`, a later kill stays recorded until this
                // member confirms it ([`Head::origin`]).
                head.origin = Some(input.member);
                (head, None)
            }
        };
        // The head still has the snapshot of its predecessor.
        let former = head.root().filter(|&root| root != new);
        head.snapshot = Some(input.snapshot);
        head.record = Some(input.record);
        head.policy = input.policy;
        let publish = Self {
            former,
            new,
            prepared: Some((head, version)),
            writer: Writer::default(),
            is_answered: false,
        };
        Some((publish, PublishEffect::WriteManifest(new)))
    }

    /// Returns the time at which [`PublishEvent::Timer`] must be reported.
    #[must_use]
    pub fn wake_at(&self) -> Option<Millis> {
        self.writer.wake_at()
    }

    /// Cancels the publication before its head is written, because the sandbox resumes on this
    /// host. Returns false if the write of the head has started: its outcome must be awaited.
    pub fn cancel(&mut self) -> bool {
        self.prepared.take().is_some()
    }

    /// Processes an event and appends the effects.
    pub fn handle(&mut self, now: Millis, event: PublishEvent, effects: &mut Vec<PublishEffect>) {
        match event {
            PublishEvent::ManifestWritten => {
                if let Some((head, version)) = self.prepared.take() {
                    let write = self.writer.start(head, version);
                    effects.push(PublishEffect::WriteHead(write));
                }
            }
            PublishEvent::ManifestFailed => {
                if self.prepared.take().is_some() {
                    effects.extend([PublishEffect::Failed, PublishEffect::Finished]);
                }
            }
            PublishEvent::HeadWritten { write, outcome } => {
                if let Some(known) = self.writer.outcome(now, write, outcome) {
                    self.written(now, known, effects);
                }
            }
            PublishEvent::Timer => {
                let due = self.writer.due(now);
                effects.extend(due.map(PublishEffect::WriteHead));
            }
        }
    }

    /// Handles the outcome of the write of the head, and emits the removal of the snapshot that is
    /// no longer needed.
    fn written(&mut self, now: Millis, known: Known, effects: &mut Vec<PublishEffect>) {
        match known {
            Known::Done(head, version) => {
                effects.push(PublishEffect::Stored {
                    revision: head.revision,
                    head,
                    version,
                });
                effects.extend(self.former.map(PublishEffect::Retract));
                effects.push(PublishEffect::Finished);
            }
            Known::Lost(current) => {
                // An earlier attempt may have been written and replaced since. If the current head
                // has the new root, that root must stay, and the former root is unused.
                let root = current.as_ref().and_then(|current| current.0.root());
                let unused = if root == Some(self.new) {
                    self.former
                } else {
                    Some(self.new)
                };
                effects.push(PublishEffect::Superseded(current));
                effects.extend(unused.map(PublishEffect::Retract));
                effects.push(PublishEffect::Finished);
            }
            Known::Rejected(write) => {
                self.writer.start_later(now, *write.head, write.expected);
                self.unavailable(effects);
            }
            Known::Unknown => self.unavailable(effects),
        }
    }

    fn unavailable(&mut self, effects: &mut Vec<PublishEffect>) {
        if !self.is_answered {
            self.is_answered = true;
            effects.push(PublishEffect::Unavailable);
        }
    }
}
