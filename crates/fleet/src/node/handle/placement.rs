//! Requests of this daemon to the coordinator of the fleet: placements (selections of hosts for new
//! sandboxes), and larger shares of budgets.
//!
//! A budget is the limit of an API key for its sandboxes on all hosts. The coordinator divides it
//! into shares, so that a host can create sandboxes within its share without a request. A *row* is
//! the entry of a sandbox in the coordinator's directory.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead.

use super::{Command, Node, NodeError};
use crate::node::query::{
    Answer, Decision, NotPlaced, PlaceRequest, Placed, PlacementEnd, Query, ShareRequest, Shares,
};
use jiffy_fleet_core::{Admission, MemberId, Millis, RejectionReason, SandboxHash, SharedShares};
use tokio::sync::oneshot;

/// Failure to place a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// No coordinator can decide.
    #[error("no coordinator is available: retry")]
    NoCoordinator,
    /// The coordinator has rejected the request.
    #[error(transparent)]
    NotPlaced(#[from] NotPlaced),
}

impl Node {
    /// Returns the host for a new sandbox. The coordinator reserves resources of the host for 10 s.
    /// For 30 s, it also reserves the rows of the sandbox's name and idempotency key in its
    /// directory, so that no other host creates the same sandbox.
    ///
    /// # Errors
    /// [`PlaceError`] if no host was selected.
    pub async fn place(&self, request: PlaceRequest) -> Result<Placed, PlaceError> {
        let coordinator = self.members().coordinator();
        let (member, address) = coordinator.ok_or(PlaceError::NoCoordinator)?;
        let query = Query::Place(Box::new(request));
        match self.query(member, &address, query).await {
            Some(Answer::Placed(placed)) => Ok(*placed),
            Some(Answer::NotPlaced(reason)) => Err(reason.into()),
            _ => Err(PlaceError::NoCoordinator),
        }
    }

    /// Reports the end of a placement. Waits for nothing: an unreported placement expires.
    pub fn end_placement(&self, end: PlacementEnd) {
        let node = self.clone();
        tokio::spawn(async move {
            if let Some((member, address)) = node.members().coordinator() {
                node.query(member, &address, Query::Ended(end)).await;
            }
        });
    }

    /// Accepts a placement on this member, and applies its grants (new sizes of shares).
    ///
    /// # Errors
    /// [`NodeError::Placement`] if the placement was made for another process or epoch of this
    /// member, or by a former coordinator.
    pub async fn accept_placement(&self, admission: Admission) -> Result<(), NodeError> {
        let (sender, result) = oneshot::channel();
        self.try_send(Command::AcceptPlacement(Box::new(admission), sender))?;
        let accepted: Result<(), RejectionReason> = result.await.map_err(|_| NodeError::Stopped)?;
        accepted.map_err(NodeError::Placement)
    }

    /// Requests larger shares, and applies the grants. `None` without a coordinator.
    pub async fn request_shares(&self, request: ShareRequest) -> Option<Shares> {
        let (member, address) = self.members().coordinator()?;
        let answer = self.query(member, &address, Query::Share(request)).await?;
        let Answer::Shares(granted) = answer else {
            return None;
        };
        let now = self.now();
        let mut shares = self.inner.shares.lock();
        for grant in &granted.grants {
            shares.apply(now, grant);
        }
        drop(shares);
        Some(granted)
    }

    /// Returns the decisions of the coordinator about the sandbox of a row, and the decision whose
    /// id is `text`. `None` without a coordinator.
    pub async fn decisions(&self, row: SandboxHash, text: &str) -> Option<Vec<Decision>> {
        let (member, address) = self.members().coordinator()?;
        let query = Query::Why(row, text.to_owned());
        match self.query(member, &address, query).await? {
            Answer::Decisions(decisions) => Some(decisions),
            _ => None,
        }
    }

    /// Sends a heartbeat soon, because shares are unused or the state of the host has changed.
    pub fn hasten_heartbeat(&self) {
        // Ignore an error: the next heartbeat follows in 2 s.
        let _ = self.try_send(Command::HastenHeartbeat);
    }

    /// Returns whether a member has the sandbox of a row. `None` without an answer.
    pub async fn has_row(&self, member: MemberId, row: SandboxHash) -> Option<bool> {
        let address = self.members().row(member)?.address.clone();
        match self.query(member, &address, Query::Local(row)).await? {
            Answer::Found(_) => Some(true),
            Answer::Absent => Some(false),
            _ => None,
        }
    }

    /// Returns the shares of this member.
    #[must_use]
    pub fn shares(&self) -> SharedShares {
        self.inner.shares.clone()
    }

    /// Returns the time of the node's clock.
    #[must_use]
    pub fn now(&self) -> Millis {
        self.inner.clock.now()
    }
}
