//! [`Host`]: the interface through which a node uses the daemon that contains it. The daemon
//! implements it.
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox. The *journal* is the database in which a host records its sandboxes. A *warm pool*
//! contains started guests for future creates. An *epoch* of a member lasts from its registration
//! with the coordinator until the coordinator declares it dead. A *verdict* is the decision of the
//! coordinator that an epoch is dead. To *claim* a sandbox means to become its owner in the head.

use super::query::HostSummary;
use async_trait::async_trait;
use jiffy_fleet_core::{Epoch, HostStatus, Owner, PoolDemand};

/// Daemon of a member.
#[async_trait]
pub trait Host: Send + Sync {
    /// Returns free resources and templates. Called before each heartbeat, and must not block.
    fn status(&self) -> HostStatus;

    /// Returns whether the shares (parts of the limits of API keys) include all existing sandboxes
    /// when the node starts. If not, another part of the daemon counts them later, and calls
    /// [`jiffy_fleet_core::MemberShares::set_complete`].
    fn starts_counted(&self) -> bool {
        true
    }

    /// Returns the numbers of sandboxes for operators. Called for each request for the state of
    /// the fleet, not periodically. Must not block.
    fn summary(&self) -> HostSummary;

    /// Changes the sizes of the warm pools of this host to the demand of the fleet. The list
    /// contains all templates that are in demand, the largest pool first. Must not block.
    fn set_pools(&self, _pools: Vec<PoolDemand>) {}

    /// Compares the heads of all sandboxes of this host with its journal, and stops the sandboxes
    /// that have moved or were killed. The node repeats a failed call until `owner` is no longer
    /// the current epoch, so repeated calls must be possible.
    ///
    /// # Errors
    /// [`ReconcileError`] if a head could not be read or written.
    async fn reconcile(&self, owner: Owner) -> Result<(), ReconcileError>;

    /// Reports the end of this member's epoch. Running sandboxes continue. The host can claim no
    /// stored sandboxes before the next reconciliation, because claims need the authority of an
    /// epoch.
    fn epoch_ended(&self, _epoch: Epoch) {}

    /// Reports, on the coordinator only, that the verdict on an epoch was committed.
    fn verdict(&self, _owner: Owner) {}
}

/// Failure of a reconciliation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot compare sandbox {sandbox} with its head: {reason}")]
pub struct ReconcileError {
    /// First sandbox that could not be compared.
    pub sandbox: String,
    /// Reason.
    pub reason: String,
}
