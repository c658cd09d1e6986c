//! Reservations for sandboxes that are about to start.

use super::{Quota, running};
use crate::caller::Caller;
use crate::error::ApiError;
use jiffy_engine_api::SandboxSize;
use jiffy_sandbox_manager::{OnTimeout, QuotaAmount, QuotaPermit, QuotaRequest};
use std::sync::Arc;

impl Quota {
    /// Reserves `count` new sandboxes, which also count for the caller's creates per minute.
    /// Sandboxes that are paused at their timeout count as paused from the start. Only keys have
    /// quotas: the host's owner gets an unlimited permit.
    pub async fn reserve_new(
        self: &Arc<Self>,
        caller: &Caller,
        size: SandboxSize,
        count: usize,
        then: OnTimeout,
    ) -> Result<QuotaPermit, ApiError> {
        let paused = match then {
            OnTimeout::Pause => count as u64,
            OnTimeout::Kill => 0,
        };
        let amount = QuotaAmount {
            paused,
            ..running(size, count)
        };
        self.reserve_for(caller, amount, Some(count)).await
    }

    /// Reserves the resources of an existing sandbox that is about to run again.
    pub async fn reserve_restart(
        self: &Arc<Self>,
        caller: &Caller,
        size: SandboxSize,
    ) -> Result<QuotaPermit, ApiError> {
        self.reserve_for(caller, running(size, 1), None).await
    }

    async fn reserve_for(
        self: &Arc<Self>,
        caller: &Caller,
        amount: QuotaAmount,
        new: Option<usize>,
    ) -> Result<QuotaPermit, ApiError> {
        // The host's owner has no quota.
        let Some(key) = caller.key() else {
            return Ok(QuotaPermit::unlimited());
        };
        let request = QuotaRequest {
            amount,
            disk_floor: None,
        };
        self.reserve(key, request, new).await
    }
}
