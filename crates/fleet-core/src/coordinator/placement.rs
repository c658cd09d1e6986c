//! Placement of new sandboxes by the coordinator: selects a host, reserves its resources, and
//! grants the host the shares of budgets that the sandbox needs. A *budget* is the limit of an API
//! key, and a *share* is the part of it that one member may use.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor. An
//! *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead. A restart of the daemon continues the epoch, but a reboot of the host does
//! not.

use super::Coordinator;
use super::budgets::BudgetExhausted;
use crate::ids::{Instance, MemberId, Millis, Owner, Term};
use crate::message::{BudgetNeed, Grant};
use jiffy_scheduler::{Explanation, HostId, PlacementError, PlacementRequest, ReservationId};
use serde::{Deserialize, Serialize};

/// Host for a new sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreatePlacement {
    /// Address of the host.
    pub address: String,
    /// Reservation of the sandbox's resources.
    pub reservation: ReservationId,
    /// Part of the request to the host, for [`crate::Member::accept_placement`].
    pub admission: Admission,
}

/// Permission of the coordinator for one sandbox on a host. It is valid only for the process and
/// the epoch that the coordinator knew.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admission {
    /// Term of the coordinator.
    pub term: Term,
    /// Host and its epoch.
    pub host: Owner,
    /// Process of the host.
    pub instance: Instance,
    /// Grants that the host must apply before it admits the sandbox.
    pub grants: Vec<Grant>,
}

/// Error of a create.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CreateError {
    /// This member is not the coordinator, or cannot reach the records.
    #[error("no coordinator is available: retry, or create within the shares of this host")]
    NoCoordinator,
    /// The owner's budget is exhausted.
    #[error(transparent)]
    Budget(#[from] BudgetExhausted),
    /// No host is suitable.
    #[error(transparent)]
    Placement(#[from] PlacementError),
}

impl Coordinator {
    /// Selects a host for a sandbox, reserves its resources and counts it in its owner's budgets.
    pub fn place(
        &mut self,
        now: Millis,
        needs: &[BudgetNeed],
        request: &PlacementRequest,
    ) -> Result<CreatePlacement, CreateError> {
        if !self.has_authority(now) {
            return Err(CreateError::NoCoordinator);
        }
        match self.place_within(now, needs, request) {
            // The whole limit is divided between the members, but some of them hold unused shares.
            // Try again, and exclude the members that do not hold enough of them.
            Err(CreateError::Budget(error)) if error.is_unused_elsewhere => {
                let rows = self.committed.members.iter();
                let others = rows.filter(|row| !self.budgets.holds(needs, row.id));
                let mut request = request.clone();
                request.excluded.extend(others.map(|row| row.id.host()));
                self.place_within(now, needs, &request)
                    .map_err(|_| error.into())
            }
            placed => placed,
        }
    }

    /// Excludes hosts that have sent no heartbeat for [`Timing::unplaceable`] from placements. A
    /// create that is sent to a lost host waits until the host is declared dead.
    ///
    /// [`Timing::unplaceable`]: crate::Timing::unplaceable
    pub(super) fn exclude_silent(&mut self, now: Millis) {
        let limit = self.timing.unplaceable;
        for (id, peer) in &self.peers {
            // A host without a heartbeat in this term needs no exclusion: it has no free resources
            // yet.
            if peer.heard.is_some_and(|heard| now.since(heard) >= limit) {
                self.scheduler.set_silent(id.host());
            }
        }
    }

    /// Selects a host, and cancels the reservation if the budgets do not permit the sandbox.
    fn place_within(
        &mut self,
        now: Millis,
        needs: &[BudgetNeed],
        request: &PlacementRequest,
    ) -> Result<CreatePlacement, CreateError> {
        let placement = self.scheduler.place(request, now.0)?;
        match self.admission(placement.host, needs) {
            Ok((address, admission)) => {
                self.count_demand(placement.host, request);
                Ok(CreatePlacement {
                    address,
                    reservation: placement.reservation,
                    admission,
                })
            }
            Err(error) => {
                self.scheduler.reject(placement.reservation);
                Err(error)
            }
        }
    }

    /// Counts a placement for the warm pools of the selected host and of the next one.
    fn count_demand(&mut self, host: HostId, request: &PlacementRequest) {
        let Some(template) = request.template else {
            return;
        };
        self.demand.add(MemberId(host.0), template);
        let mut request = request.clone();
        request.excluded.push(host);
        if let Some(next) = self.scheduler.next_host(&request) {
            self.demand.add(MemberId(next.0), template);
        }
    }

    /// Returns the address of a host, and the permission for one sandbox on it with the grants of
    /// budgets.
    fn admission(
        &mut self,
        host: HostId,
        needs: &[BudgetNeed],
    ) -> Result<(String, Admission), CreateError> {
        let member = MemberId(host.0);
        let members = self.live_count();
        // Look up the row before the budgets are changed: if the row is missing, the sandbox must
        // not be counted.
        let row = self.committed.row(member).ok_or(PlacementError::NoHosts)?;
        let admission = Admission {
            term: self.committed.term,
            host: Owner {
                member,
                epoch: row.epoch,
            },
            instance: row.instance,
            grants: self.budgets.admit(needs, member, members)?,
        };
        Ok((row.address.clone(), admission))
    }

    /// Increases the share of a member that needs more.
    pub fn request_share(
        &mut self,
        now: Millis,
        member: MemberId,
        need: &BudgetNeed,
    ) -> Result<Option<Grant>, CreateError> {
        if !self.has_authority(now) || self.committed.row(member).is_none() {
            return Err(CreateError::NoCoordinator);
        }
        let members = self.live_count();
        Ok(self.budgets.request(need, member, members)?)
    }

    /// Explains the placement of a sandbox.
    pub fn explain(&self, request: &PlacementRequest) -> Explanation {
        self.scheduler.explain(request)
    }
}
