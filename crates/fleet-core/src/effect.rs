//! Interface of the state machine [`crate::Member`]: the events that its caller reports, and the
//! effects that the caller must execute.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor. An
//! *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead. A restart of the daemon continues the epoch, but a reboot of the host does
//! not. A *verdict* is the decision that an epoch is dead. The record of a *shard* (a part of the
//! fleet's sandboxes) names the members and the coordinator.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox. A *row* is
//! the entry of one sandbox in the coordinator's *directory*, which lists the hosts of all
//! sandboxes.

use crate::directory::{DirectoryError, Row, SandboxHash};
use crate::ids::{Epoch, MemberId, Owner, Term, Version, WriteId};
use crate::message::{Message, PoolDemand, RejectionReason};
use crate::record::ShardRecord;

/// Outcome of a conditional write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WriteOutcome<R> {
    /// The record has the written content and this version.
    Done(Version),
    /// The record has another version. Contains the record that was read, or `None` if no record
    /// exists.
    Lost(Option<Box<(R, Version)>>),
    /// The write was not sent, or was rejected. It will not arrive later.
    Rejected,
    /// The write may still arrive, also if the record is unchanged at present.
    Unknown,
}

/// Outcome of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadOutcome<R> {
    /// The record and its version.
    Found(Box<R>, Version),
    /// The record does not exist.
    Missing,
    /// The record could not be read, or not decoded.
    Failed,
}

/// Event for [`crate::Member::handle`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The time of [`crate::Member::wake_at`] has come.
    Timer,
    /// A message was received.
    Message {
        /// Sender, from its certificate.
        from: MemberId,
        /// Message.
        message: Box<Message>,
    },
    /// Answer to [`Effect::ReadShard`].
    ShardRead(ReadOutcome<ShardRecord>),
    /// Answer to [`Effect::ReplaceShard`].
    ShardWritten {
        /// Number of the write.
        write: WriteId,
        /// Outcome.
        outcome: WriteOutcome<ShardRecord>,
    },
    /// Answer to [`Effect::ListRows`].
    RowsListed {
        /// Number of the list.
        list: u64,
        /// Last hash of the previous page.
        after: Option<SandboxHash>,
        /// Rows after `after`, in the order of their hashes.
        rows: Vec<Row>,
        /// No row follows.
        is_last: bool,
    },
}

/// Action that the caller of [`crate::Member::handle`] must perform, in the order of the effects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Send a message. It may be lost, delayed or repeated.
    Send {
        /// Receiver. May be the sending member itself.
        to: MemberId,
        /// Address of the receiver. `None` for an answer on the connection of the request.
        address: Option<String>,
        /// Message.
        message: Box<Message>,
    },
    /// Read the record of the shard. Exactly one [`Event::ShardRead`] must follow.
    ReadShard,
    /// Replace the record of the shard. Exactly one [`Event::ShardWritten`] must follow. The same
    /// write may be requested again after [`WriteOutcome::Unknown`], and must then be sent with the
    /// same bytes.
    ReplaceShard {
        /// Number of the write.
        write: WriteId,
        /// New record.
        record: Box<ShardRecord>,
        /// Version that the record must have.
        expected: Version,
    },
    /// List rows of the local sandboxes and report [`Event::RowsListed`].
    ListRows {
        /// Number of the list.
        list: u64,
        /// Last hash of the previous page.
        after: Option<SandboxHash>,
        /// Maximum number of rows.
        limit: usize,
    },
    /// This member is registered. If the epoch is new, the member must compare the heads of all its
    /// sandboxes ([`crate::reconcile`]) before it accepts requests.
    Registered {
        /// Epoch.
        epoch: Epoch,
    },
    /// The epoch of this member has ended: it must accept no requests until it is registered.
    EpochEnded {
        /// Ended epoch.
        epoch: Epoch,
    },
    /// This member is the coordinator.
    TermStarted(Term),
    /// This member is no longer the coordinator.
    TermEnded {
        /// Term.
        term: Term,
        /// Reason.
        reason: TermEnd,
    },
    /// The verdict on an epoch is committed in the record of the shard. Other members may now claim
    /// the sandboxes of this epoch.
    Verdict(Owner),
    /// Mass silence, in which more than half of the members send no heartbeats, has started or
    /// ended. While it lasts, silence leads to no verdict unless an operator confirms the death.
    MassSilence {
        /// Number of members without a recent heartbeat ([`crate::Timing::unacknowledged`]). Zero
        /// if the mass silence has ended.
        silent: usize,
        /// Number of members.
        members: usize,
    },
    /// The coordinator rejects this member.
    Rejected(RejectionReason),
    /// A member no longer has these sandboxes: their rows were removed from the directory.
    RowsRemoved {
        /// Member.
        member: MemberId,
        /// Removed rows.
        rows: Vec<SandboxHash>,
    },
    /// The sizes of the warm pools of this host have changed. The list contains all of them, the
    /// largest first.
    Pools(Vec<PoolDemand>),
    /// Rows of a member were not stored in the directory.
    RowsRejected {
        /// Member.
        member: MemberId,
        /// Reason.
        error: DirectoryError,
    },
    /// The record of the shard is older than the result of an earlier read. It was probably
    /// restored from a backup. This member ignores the record until
    /// [`crate::Member::accept_restore`] is called.
    Regressed {
        /// Term of the record.
        term: Term,
        /// Number of replacements of the record so far.
        seq: u64,
    },
}

/// Reason for the end of a term.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TermEnd {
    /// The record was replaced by another member.
    Replaced {
        /// Term in the record. `None` if the record does not exist.
        by: Option<Term>,
    },
}
