//! Decisions of a fleet of hosts.
//!
//! The crate performs no I/O, starts no threads and reads no clock: events are arguments, and
//! effects are results. A caller executes the effects. The same code therefore runs in a daemon and
//! in a simulation.

mod coordinator;
mod directory;
mod effect;
mod heads;
mod ids;
mod member;
mod message;
pub mod record;
mod shares;
mod timing;

pub use coordinator::{Admission, BudgetExhausted, CreateError, CreatePlacement, MembershipError};
pub use directory::{
    Directory, DirectoryError, Located, MAX_ROWS_PER_MESSAGE, Row, RowChange, RowMessage,
    RowReceiver, RowRequest, RowSender, RowState, SandboxHash,
};
pub use effect::{Effect, Event, ReadOutcome, TermEnd, WriteOutcome};
pub use heads::{
    HeadUpdate, HeadWrite, HeldSandbox, Publish, PublishEffect, PublishEvent, PublishInput,
    Purpose, Reconciliation, Resume, ResumeAnswer, ResumeEffect, ResumeEvent, ResumeInput,
    UpdateEffect, UpdateEvent, may_purge, reconcile,
};
pub use ids::{
    Digest, Epoch, FleetId, IdError, Instance, MAX_REVISION, MemberId, Millis, Owner, Revision,
    SLOTS, SandboxId, ShardId, Slot, Term, Version, WriteId,
};
pub use member::{Member, MemberConfig};
pub use message::{
    Acknowledgement, Body, BudgetOwner, Grant, GrantNumber, Heartbeat, HostStatus,
    MAX_MESSAGE_BYTES, MAX_SHARES_PER_MESSAGE, MAX_TEMPLATES, MESSAGE_FORMAT, Message,
    MessageError, OLDEST_MESSAGE_FORMAT, Recall, Registration, Rejection, RejectionReason,
    ShareReport,
};
pub use shares::MemberShares;
pub use timing::Timing;
