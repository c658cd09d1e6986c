//! Placements and budget shares of a [`Member`]. A *placement* selects the host of a new sandbox. A
//! *share* is the part of an API key's limit that one member may use. A *grant* is the new size of
//! a share.
//!
//! The first methods pass a call to the coordinator in this member, and fail if this member is not
//! the coordinator. [`Member::accept_placement`] runs on the selected host.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor.

use super::Member;
use crate::coordinator::{Admission, CreateError, CreatePlacement, HostLoad};
use crate::directory::SandboxHash;
use crate::ids::{MemberId, Millis};
use crate::message::{BudgetNeed, BudgetOwner, Grant, RejectionReason};
use jiffy_scheduler::{Explanation, PlacementRequest, ReservationId, TemplateId};

impl Member {
    /// Selects a host for a sandbox.
    ///
    /// # Errors
    /// [`CreateError`] if this member is not the coordinator, or no host may run the sandbox.
    pub fn place(
        &mut self,
        now: Millis,
        needs: &[BudgetNeed],
        request: &PlacementRequest,
    ) -> Result<CreatePlacement, CreateError> {
        match &mut self.coordinator {
            Some(coordinator) => coordinator.place(now, needs, request),
            None => Err(CreateError::NoCoordinator),
        }
    }

    /// Explains a placement. `None` if this member is not the coordinator.
    #[must_use]
    pub fn explain(&self, request: &PlacementRequest) -> Option<Explanation> {
        let coordinator = self.coordinator.as_ref()?;
        Some(coordinator.explain(request))
    }

    /// Returns whether any host has reported a template. False if this member is not the
    /// coordinator.
    #[must_use]
    pub fn is_on_a_host(&self, template: TemplateId) -> bool {
        let coordinator = self.coordinator.as_ref();
        coordinator.is_some_and(|coordinator| coordinator.scheduler.has_template(template))
    }

    /// Removes the row of a sandbox that its host does not have any longer. Returns false if the
    /// host has no row, or this member is not the coordinator.
    pub fn remove_row(&mut self, host: MemberId, hash: SandboxHash) -> bool {
        let coordinator = self.coordinator.as_mut();
        coordinator.is_some_and(|coordinator| coordinator.directory.remove(host, hash))
    }

    /// Returns the work in progress on a host. `None` if this member is not the coordinator.
    #[must_use]
    pub fn load(&self, id: MemberId) -> Option<&HostLoad> {
        self.coordinator.as_ref()?.load(id)
    }

    /// Increases the share of a member that needs more. Returns the grant that the member must
    /// apply. `None` if it has no grant of this term.
    ///
    /// # Errors
    /// [`CreateError`] if this member is not the coordinator, or the budget is exhausted.
    pub fn request_share(
        &mut self,
        now: Millis,
        member: MemberId,
        need: &BudgetNeed,
    ) -> Result<Option<Grant>, CreateError> {
        match &mut self.coordinator {
            Some(coordinator) => coordinator.request_share(now, member, need),
            None => Err(CreateError::NoCoordinator),
        }
    }

    /// Returns the owners whose shares this member counts as the coordinator.
    #[must_use]
    pub fn budget_owners(&self) -> Vec<BudgetOwner> {
        let coordinator = self.coordinator.iter();
        coordinator
            .flat_map(|coordinator| coordinator.budget_owners())
            .collect()
    }

    /// Accepts a placement on this member and applies the grants that it contains. The host then
    /// checks its own admission and [`MemberShares::admit`].
    ///
    /// # Errors
    /// [`RejectionReason`] if the placement was made for another process or epoch of this member,
    /// or by a former coordinator.
    pub fn accept_placement(
        &mut self,
        now: Millis,
        admission: &Admission,
    ) -> Result<(), RejectionReason> {
        if self.epoch != Some(admission.host.epoch) || admission.host.member != self.config.id {
            return Err(RejectionReason::EpochEnded);
        }
        if admission.instance != self.config.instance {
            return Err(RejectionReason::Superseded);
        }
        // A new coordinator does not know the grants of this placement: if they were applied, the
        // shares could exceed the limit.
        if self.term() != Some(admission.term) {
            return Err(RejectionReason::Term);
        }
        let mut shares = self.shares.lock();
        for grant in &admission.grants {
            shares.apply(now, grant);
        }
        Ok(())
    }

    /// Ends the reservation of a placement, because the host runs the sandbox or has rejected it.
    /// `is_running` states that the host runs it.
    pub fn end_placement(&mut self, reservation: ReservationId, is_running: bool) {
        if let Some(coordinator) = &mut self.coordinator {
            if is_running {
                coordinator.scheduler.confirm(reservation);
            } else {
                coordinator.scheduler.reject(reservation);
            }
        }
    }
}
