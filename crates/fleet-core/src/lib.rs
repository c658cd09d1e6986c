//! Decisions of a fleet: several hosts that share API keys, and of which each can resume the stored
//! sandboxes of the others.
//!
//! The crate performs no I/O, starts no threads, reads no clock and uses no random numbers: events
//! are arguments, and effects are results. A caller executes the effects. The same code therefore
//! runs in a daemon (`jiffy_fleet::node`) and in the simulator (`tests/simulator`).
//!
//! # Words
//! - A *member* is the daemon of one host. An *instance* is one process of this daemon.
//! - A *front* is a machine without sandboxes that passes requests of clients to the members.
//! - A *record* is a small versioned object in the object store or in etcd, which all members read
//!   and write. A record changes only by conditional writes, of which at most one succeeds per
//!   version.
//! - A *shard* is a part of all sandboxes, selected by the first characters of their ids. A new
//!   fleet has one shard. The record of a shard has one row per member, and names the coordinator.
//! - The *coordinator* of a shard is the member that registers members, declares silent members
//!   dead and selects the hosts of new sandboxes. A *term* is the time during which one member has
//!   this role.
//! - An *epoch* is the time from a registration of a member until its death. A restart of the
//!   daemon continues the epoch, but a reboot of the host does not. A *verdict* declares an epoch
//!   dead.
//! - The *head* of a sandbox is the record that decides which member may run the sandbox. Its
//!   *owner* is the member, with its epoch, that runs the sandbox. A *claim* is the write of a head
//!   that makes a member the owner. A sandbox has a head from the first time that its snapshot is
//!   in the store.
//! - The *root* of a snapshot is the digest of its manifest, by which the store identifies it.
//! - The *home* of a sandbox is the member that has its files while no member owns it.
//! - The *directory* lists the host and the state of each sandbox of a shard, in the memory of the
//!   coordinator. A *row* is its entry for one sandbox.
//! - A *budget* is the limit of an API key for the sandboxes on all hosts. The coordinator divides
//!   it into *shares*, within which members admit sandboxes by themselves.
//!
//! # Members
//! [`Member`] is the state machine of a member: registration, heartbeats, deadline, observation of
//! the shard's record and takeover. It contains the coordinator of the shard while this member has
//! that role. The order of calls is:
//!
//! 1. [`Member::new`] at the start of the daemon. Then [`Member::set_limit`] for each owner with a
//!    limit, and [`MemberShares::count`] for each sandbox that exists.
//! 2. [`Member::handle`] with [`Event::Timer`] at once, and when the time of [`Member::wake_at`]
//!    has come. Call `wake_at` again after each event.
//! 3. [`Member::handle`] with each message and each answer. Read the clock (`CLOCK_BOOTTIME`) after
//!    the event was received, never before.
//! 4. Execute the effects in their order. [`Effect::Send`] to the own id is an event of this
//!    member. A write that is requested again has the same [`WriteId`] and must be sent with the
//!    same bytes, so that the record shows whose write it contains.
//! 5. After [`Effect::Registered`], call [`reconcile`] for all sandboxes of the host, unless the
//!    daemon has done so in this epoch. Read the head of a sandbox after a [`HeadUpdate`] of a
//!    former epoch is finished. Accept requests afterwards, until [`Effect::EpochEnded`].
//! 6. [`Member::authority`] before each claim, resume of a stored sandbox and restore.
//! 7. [`Member::change_row`] after each create, pause, resume, move and kill.
//!    [`Member::set_status`] when the state of the host changes.
//! 8. Creates: [`Member::place`] on the coordinator, [`Member::accept_placement`] and
//!    [`MemberShares::admit`] on the selected host, then [`Member::end_placement`] on the
//!    coordinator. Without a coordinator, [`MemberShares::admit`] on the own host only.
//!
//! # Heads
//! Each operation on a head is a state machine of its own. The caller executes at most one per
//! sandbox at a time, until it is finished:
//!
//! - [`Resume`]: start the restore and the claim at the same time. Give the guest its identity only
//!   for [`ResumeEffect::AssignIdentity`]: until then, another member may win the claim.
//! - [`Publish`] makes a pause durable: upload the snapshot, write the head, then remove the root
//!   of the replaced snapshot from the store.
//! - [`HeadUpdate`]: kill, confirmation of a kill, adoption after a return. Journal a kill first.
//!
//! Killed heads are removed only if [`may_purge`] permits it. If the home of a killed head is live,
//! request it to remove its copy and to execute [`Purpose::Confirm`].
//!
//! # Times
//! [`Timing`] explains why no verdict is possible while an acknowledged heartbeat is valid.

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

pub use coordinator::{
    Admission, BudgetExhausted, CreateError, CreatePlacement, HostLoad, MembershipError,
};
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
    Acknowledgement, Body, BudgetNeed, BudgetOwner, Grant, GrantNumber, Heartbeat, HostStatus,
    MAX_MESSAGE_BYTES, MAX_POOLS, MAX_SHARES_PER_MESSAGE, MAX_TEMPLATES, MESSAGE_FORMAT, Message,
    MessageError, OLDEST_MESSAGE_FORMAT, PoolDemand, Recall, Registration, Rejection,
    RejectionReason, ShareReport,
};
pub use shares::{MemberShares, SharedShares};
pub use timing::Timing;
