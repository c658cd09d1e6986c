//! `GET /limits`: the budget (limits and usage) of a key.
//!
//! An *exchange* is a request to a sandbox or function with its response or stream.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::keys::{Key, Limits};
use crate::lookup::short;
use crate::query::Query;
use crate::quota::KeyUsage;
use axum::Json;
use axum::extract::State;
use jiffy_api_types::{Budget, BudgetLimits, BudgetUsage, DiskUsage};

/// Converts limits to their wire format. `exchanges` is a separate argument, because
/// `limits.max_exchanges` lacks the default of the host.
fn limits_in_force(limits: &Limits, exchanges: Option<u64>) -> BudgetLimits {
    BudgetLimits {
        sandboxes: limits.max_sandboxes,
        vcpus: limits.max_vcpus,
        memory_mb: limits.max_memory_mib,
        creates_per_minute: limits.creates_per_minute,
        paused: limits.max_paused,
        snapshots: limits.max_snapshots,
        templates: limits.max_templates,
        builds: limits.max_builds,
        exchanges,
        disk_bytes: limits.max_disk_mib.map(|mib| mib.saturating_mul(1 << 20)),
    }
}

impl From<KeyUsage> for BudgetUsage {
    fn from(usage: KeyUsage) -> Self {
        let amount = usage.amount();
        Self {
            sandboxes: amount.sandboxes,
            vcpus: amount.vcpus,
            memory_mb: amount.memory_mib,
            paused: amount.paused,
            snapshots: amount.snapshots,
            templates: amount.templates,
            builds: amount.builds,
            uploads: usage.builds.uploads,
            exchanges: usage.exchanges,
            disk_bytes: amount.disk_bytes,
            disk: DiskUsage {
                paused: usage.host.paused_bytes,
                snapshots: usage.host.snapshot_bytes,
                templates: usage.builds.template_bytes,
                uploads: usage.builds.upload_bytes,
                build_steps: usage.host.step_bytes,
                functions: usage.function_bytes,
                volumes: usage.volume_bytes,
            },
        }
    }
}

/// Limits and usage of one key.
fn budget(app: &App, key: &Key) -> Result<Budget, ApiError> {
    let limits = app.quota.limits_of(key);
    Ok(Budget {
        key_id: key.id.clone(),
        name: key.name.clone(),
        limits: limits_in_force(&limits, app.quota.max_exchanges(key)),
        used: app.quota.usage_of(&key.id)?.into(),
    })
}

/// `GET /limits`: returns the caller's budget. Administrators may read the budget of any `key`.
pub(super) async fn limits(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Json<Budget>, ApiError> {
    let Some(id) = query.get("key") else {
        let own = caller.key().ok_or_else(|| {
            ApiError::invalid("the host's owner has no limits: name a key with `?key=ID`")
        })?;
        return budget(&app, own).map(Json);
    };
    // Any key may read its own budget by id.
    if !caller.is_admin() && caller.key().is_none_or(|own| own.id != id) {
        return Err(ApiError::forbidden(
            "the budget of another key requires a key with the scope `admin`",
        ));
    }
    let found = app.keys.in_force(id);
    let found = found.map_err(|e| ApiError::internal(e.to_string()))?;
    let found = found.ok_or_else(|| {
        ApiError::not_found(
            "key_not_found",
            format!("key `{}` does not exist", short(id)),
        )
    })?;
    budget(&app, &found).map(Json)
}
