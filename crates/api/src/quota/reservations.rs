//! Reservations of quota for sandboxes that are about to start, and for new volumes. A reservation
//! ends when the sandbox counts as used itself.

use super::{BUDGET_TIMEOUT, Denied, Quota, refusal, running};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::keys::Key;
use jiffy_engine_api::SandboxSize;
use jiffy_sandbox_manager::{DiskLimit, QuotaAmount, QuotaPermit, QuotaRequest, Sandbox};
use jiffy_volumes::{DEFAULT_BYTES, MIN_BYTES};
use std::sync::Arc;
use std::time::Instant;

impl Quota {
    /// Reserves `count` new sandboxes, which also count for the caller's creates per minute.
    /// If the sandboxes will be paused automatically, at their timeout or when they are idle
    /// (`pauses`), they count as paused from the start. Only keys have quotas: the host's owner
    /// gets an unlimited permit.
    pub async fn reserve_new(
        self: &Arc<Self>,
        caller: &Caller,
        size: SandboxSize,
        count: usize,
        pauses: bool,
    ) -> Result<QuotaPermit, ApiError> {
        let amount = QuotaAmount {
            paused: if pauses { count as u64 } else { 0 },
            ..running(size, count)
        };
        self.reserve_for(caller, amount, Some(count)).await
    }

    /// Reserves `count` children of a sandbox. They belong to the owner of the sandbox, who may be
    /// another key than the caller.
    pub async fn reserve_children(
        self: &Arc<Self>,
        caller: &Caller,
        parent: &Sandbox,
        count: usize,
    ) -> Result<QuotaPermit, ApiError> {
        let pauses = parent.settings().pauses();
        let amount = QuotaAmount {
            paused: if pauses { count as u64 } else { 0 },
            ..running(parent.size(), count)
        };
        self.reserve_of(caller, parent, amount, Some(count)).await
    }

    /// Reserves the resources of an existing sandbox that is about to run again, within the quota
    /// of its owner.
    pub async fn reserve_restart(
        self: &Arc<Self>,
        caller: &Caller,
        sandbox: &Sandbox,
    ) -> Result<QuotaPermit, ApiError> {
        let amount = running(sandbox.size(), 1);
        self.reserve_of(caller, sandbox, amount, None).await
    }

    /// Reserves the pause of a running sandbox that receives an idle timeout, within the quota of
    /// its owner.
    pub async fn reserve_pause_when_idle(
        self: &Arc<Self>,
        caller: &Caller,
        sandbox: &Sandbox,
    ) -> Result<QuotaPermit, ApiError> {
        let amount = QuotaAmount {
            paused: 1,
            ..QuotaAmount::default()
        };
        self.reserve_of(caller, sandbox, amount, None).await
    }

    /// Reserves the size of a new volume. Returns the size: by default [`DEFAULT_BYTES`], but
    /// at most half of the space that the limit of the key leaves. Free space on the disk of
    /// the host is not required, because most volumes never reach their size.
    pub async fn reserve_volume(
        self: &Arc<Self>,
        caller: &Caller,
        bytes: Option<u64>,
    ) -> Result<(u64, QuotaPermit), ApiError> {
        // The host's owner has no quota.
        let Some(key) = caller.key() else {
            return Ok((bytes.unwrap_or(DEFAULT_BYTES), QuotaPermit::unlimited()));
        };
        let deadline = Instant::now() + BUDGET_TIMEOUT;
        loop {
            match self.try_reserve_volume(key, bytes) {
                Ok(reserved) => return Ok(reserved),
                Err(Denied::Shares(missing)) if Instant::now() < deadline => {
                    self.request_shares(key, missing, deadline).await?;
                }
                Err(denied) => return Err(denied.error()),
            }
        }
    }

    /// Like [`Self::reserve_volume`] for a key, without waiting.
    fn try_reserve_volume(
        self: &Arc<Self>,
        key: &Key,
        bytes: Option<u64>,
    ) -> Result<(u64, QuotaPermit), Denied> {
        let limits = self.limits_of(key);
        let mut ledger = self.ledger.lock();
        // Read the usage under the lock of the ledger, as for other requests.
        let usage = self.usage_of(&key.id).map_err(Denied::Final)?;
        let now = usage.amount() + ledger.reserved(&key.id);
        let bytes = bytes.unwrap_or_else(|| {
            let left =
                refusal::disk_limit(&limits).map(|limit| limit.saturating_sub(now.disk_bytes));
            let half = left.map_or(DEFAULT_BYTES, |left| left / 2 / MIN_BYTES * MIN_BYTES);
            DEFAULT_BYTES.min(half).max(MIN_BYTES)
        });
        let amount = QuotaAmount {
            disk_bytes: bytes,
            ..QuotaAmount::default()
        };
        let request = QuotaRequest {
            amount,
            disk_floor: None,
        };
        if let Some(refusal) = refusal::check(&limits, &usage, now, &request) {
            return Err(Denied::Final(refusal));
        }
        let shares = self.fleet.admit(&key.id, &limits, now, amount);
        shares.map_err(Denied::Shares)?;
        ledger.reserve(&key.id, amount);
        Ok((bytes, self.permit(key, (amount, DiskLimit::Key))))
    }

    /// Reserves within the quota of the owner of a sandbox. The host's owner and revoked keys have
    /// no quota.
    async fn reserve_of(
        self: &Arc<Self>,
        caller: &Caller,
        sandbox: &Sandbox,
        amount: QuotaAmount,
        new: Option<usize>,
    ) -> Result<QuotaPermit, ApiError> {
        let Some(owner) = sandbox.owner() else {
            return Ok(QuotaPermit::unlimited());
        };
        if caller.key().is_some_and(|key| key.id == owner) {
            return self.reserve_for(caller, amount, new).await;
        }
        let key = self.keys.in_force(owner);
        let Some(key) = key.map_err(|e| ApiError::internal(e.to_string()))? else {
            return Ok(QuotaPermit::unlimited());
        };
        let request = QuotaRequest {
            amount,
            disk_floor: None,
        };
        self.reserve(&key, request, new).await
    }

    /// Reserves within the quota of the caller's key.
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
