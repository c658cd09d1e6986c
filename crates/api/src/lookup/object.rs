//! Look-up of an id that may name a sandbox or a snapshot, for lineages and comparisons.
//!
//! The *lineage* of a sandbox or snapshot consists of the snapshots and sandboxes that are
//! connected with it: ancestors, descendants, and sandboxes created from them.

use super::{Liveness, short};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use axum::http::StatusCode;
use jiffy_sandbox_manager::{LineageObject, PinnedSnapshot, Snapshot, SnapshotPurpose};

impl App {
    /// Finds a snapshot like [`Self::snapshot`], and also the snapshot of a pause or a fork by its
    /// complete id.
    pub(crate) fn snapshot_of_lineage(
        &self,
        caller: &Caller,
        id: &str,
    ) -> Result<Snapshot, ApiError> {
        let automatic = [SnapshotPurpose::Pause, SnapshotPurpose::Fork];
        let is_match = |s: &Snapshot| {
            s.id() == id && automatic.contains(&s.purpose()) && caller.sees(s.owner())
        };
        self.snapshot(caller, id).or_else(|error| {
            let all = self.sandboxes.snapshots().like(id);
            all.into_iter().find(is_match).ok_or(error)
        })
    }

    /// Finds a sandbox or a snapshot. A snapshot that only the store has is fetched, and stays on
    /// this host as long as the guard exists.
    pub(crate) async fn object_or_fetched(
        &self,
        caller: &Caller,
        id: &str,
    ) -> Result<(LineageObject, Option<PinnedSnapshot>), ApiError> {
        match self.sandbox(caller, id, Liveness::IncludingBroken) {
            Ok(record) => return Ok((LineageObject::Sandbox(record.id().to_owned()), None)),
            Err(error) if error.status != StatusCode::NOT_FOUND => return Err(error),
            Err(_) => {}
        }
        if let Ok(found) = self.snapshot_of_lineage(caller, id) {
            return Ok((LineageObject::Snapshot(found.id().to_owned()), None));
        }
        let held = self.fetched(caller, id).await?.ok_or_else(|| {
            let message = format!(
                "sandbox or snapshot `{}` does not exist on this host",
                short(id)
            );
            ApiError::not_found("not_found", message)
        })?;
        let id = held.snapshot().id().to_owned();
        Ok((LineageObject::Snapshot(id), Some(held)))
    }
}
