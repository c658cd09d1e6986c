//! [`Authority`]: the right of this host to claim sandboxes. A member of a fleet has it only while
//! its heartbeats are acknowledged; a host without a fleet always has it.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead.
//!
//! To *claim* a sandbox means to become its owner in its head: the record in the store that decides
//! which host may run it.

use crate::node::Node;
use jiffy_fleet_core::{MemberId, Owner};
use std::fmt;

/// Identity of this host, and its right to claim sandboxes.
pub trait Authority: fmt::Debug + Send + Sync {
    /// Returns the number of this host.
    fn member(&self) -> MemberId;

    /// Returns this host and its epoch if it may claim sandboxes now.
    fn owner(&self) -> Option<Owner>;

    /// Returns whether the epoch of another host is dead.
    fn is_dead(&self, owner: Owner) -> bool;
}

/// A host without a fleet always has its authority, and knows of no death.
impl Authority for Owner {
    fn member(&self) -> MemberId {
        self.member
    }

    fn owner(&self) -> Option<Owner> {
        Some(*self)
    }

    fn is_dead(&self, _owner: Owner) -> bool {
        false
    }
}

impl Authority for Node {
    fn member(&self) -> MemberId {
        self.id()
    }

    fn owner(&self) -> Option<Owner> {
        self.authority()
    }

    fn is_dead(&self, owner: Owner) -> bool {
        Self::is_dead(self, owner)
    }
}
