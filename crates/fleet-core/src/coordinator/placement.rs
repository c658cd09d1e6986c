//! Placement of new sandboxes.

use super::Coordinator;
use super::budgets::BudgetExhausted;
use crate::ids::{Instance, MemberId, Millis, Owner, Term};
use crate::message::{BudgetOwner, Grant};
use jiffy_scheduler::{PlacementError, PlacementRequest, ReservationId};
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

/// Process that a coordinator has selected, and the grant that it must apply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admission {
    /// Term of the coordinator.
    pub term: Term,
    /// Host and its epoch.
    pub host: Owner,
    /// Process of the host.
    pub instance: Instance,
    /// Grant that the host must apply before it admits the sandbox.
    pub grant: Option<Grant>,
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
    /// Selects a host for a sandbox, reserves its resources and counts it in the owner's budget.
    pub fn place(
        &mut self,
        now: Millis,
        owner: &BudgetOwner,
        request: &PlacementRequest,
    ) -> Result<CreatePlacement, CreateError> {
        if !self.has_authority(now) {
            return Err(CreateError::NoCoordinator);
        }
        let placement = self.scheduler.place(request, now.0)?;
        let member = MemberId(placement.host.0);
        let members = self.live_count();
        let grant = match self.budgets.admit(owner, member, members) {
            Ok(grant) => grant,
            Err(error) => {
                self.scheduler.reject(placement.reservation);
                return Err(error.into());
            }
        };
        let Some(row) = self.committed.row(member) else {
            return Err(PlacementError::NoHosts.into());
        };
        Ok(CreatePlacement {
            address: row.address.clone(),
            reservation: placement.reservation,
            admission: Admission {
                term: self.committed.term,
                host: Owner {
                    member,
                    epoch: row.epoch,
                },
                instance: row.instance,
                grant,
            },
        })
    }
}
