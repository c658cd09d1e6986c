//! Return of a host: decides for each of its sandboxes whether the local state is still valid.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox. A host
//! *claims* a sandbox by a conditional write of its head, in which only one host succeeds. A
//! sandbox has a head from the first time that its snapshot is in the store. The *home* of a
//! sandbox is the member that has its files while no member owns it. The *root* of a snapshot is
//! the digest by which the store identifies it. An *epoch* of a member lasts from its registration
//! with the coordinator until the coordinator declares it dead.
//!
//! While the host was down or cut off, other members may have resumed or killed its sandboxes.
//! Their heads record this. A sandbox without a head was never stored, so no other member can run
//! it.

use crate::ids::{Digest, MemberId, Revision};
use crate::record::{Head, HeadState};

/// Sandbox of a host that has returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldSandbox {
    /// A guest runs.
    pub is_running: bool,
    /// Revision of the head that this member wrote last. `None` if the sandbox was never stored.
    pub revision: Option<Revision>,
    /// Root of the snapshot of the local state. `None` if the local state is not in the store.
    pub root: Option<Digest>,
}

/// Action for a sandbox of a host that has returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reconciliation {
    /// The local state is the newest one.
    Retain,
    /// The local state is the newest one, and the head must name the new epoch
    /// ([`super::Purpose::Adopt`]).
    Adopt,
    /// Another member has claimed the sandbox, or has stored a newer state: stop the guest and
    /// remove the local state.
    Remove,
    /// The sandbox was killed: stop the guest, remove the local state, and confirm the kill
    /// ([`super::Purpose::Confirm`]).
    Kill,
}

/// Compares a sandbox of this member with its head. A member must do so for all of its sandboxes
/// before it accepts requests in a new epoch or after its start.
#[must_use]
pub fn reconcile(me: MemberId, held: &HeldSandbox, head: Option<&Head>) -> Reconciliation {
    let Some(head) = head else {
        return match held.revision {
            None => Reconciliation::Retain,
            // Heads of killed sandboxes are removed if their home has left the fleet.
            Some(_) => Reconciliation::Remove,
        };
    };
    let is_current = held.revision == Some(head.revision);
    match head.state() {
        HeadState::Killed(_) => Reconciliation::Kill,
        HeadState::Running(owner) if owner.member == me && is_current => Reconciliation::Adopt,
        HeadState::Running(owner) if owner.member == me && held.revision < Some(head.revision) => {
            // This member claimed the sandbox but did not start a guest, or the answer to its
            // adoption was lost. Without a guest, the stored snapshot suffices: a later resume
            // claims the sandbox again.
            if held.is_running || held.root.is_none() {
                Reconciliation::Adopt
            } else {
                Reconciliation::Retain
            }
        }
        HeadState::Running(_) => Reconciliation::Remove,
        HeadState::Paused if held.is_running => Reconciliation::Remove,
        HeadState::Paused if held.root.is_some() && held.root == head.root() => {
            Reconciliation::Retain
        }
        HeadState::Paused => Reconciliation::Remove,
    }
}
