//! Calls on API keys.

use crate::app::App;
use crate::body::{Optional, Required};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::keys::{KeyError, LimitChanges, Limits, Revocation, Validity};
use crate::wire::key::expiry;
use crate::wire::moment;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use jiffy_api_types::{
    ApiKey, ChangeKey, CreateKey, EventType, NewApiKey, RevokeKey, RevokedKey, RotateKey,
};
use jiffy_fleet::tables::TableError;
use std::time::Duration;

/// `GET /keys`: lists all keys, including revoked keys.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
) -> Result<Json<Vec<ApiKey>>, ApiError> {
    caller.require_admin("listing keys")?;
    let keys = app.keys.list().map_err(refused)?;
    Ok(Json(keys.into_iter().map(ApiKey::from).collect()))
}

/// `POST /keys`: creates a key.
pub(super) async fn create(
    State(app): State<App>,
    caller: Caller,
    Required(body): Required<CreateKey>,
) -> Result<(StatusCode, Json<NewApiKey>), ApiError> {
    caller.require_admin("creating a key")?;
    let name = body.name.as_deref().unwrap_or("unnamed");
    let validity = Validity {
        expires_ms: expiry(body.expires_at)?,
        addresses: body.addresses,
    };
    let limits = Limits::from(body.limits);
    check_limits(&app, &limits)?;
    let scope = body.scope.into();
    let created = app.keys.create_within(name, scope, limits, &validity);
    let created = created.map_err(refused)?;
    app.report_key(EventType::KeyCreated, &created.key);
    Ok((StatusCode::CREATED, Json(created.into())))
}

/// `PATCH /keys/{id}`: changes the limits of a key.
pub(super) async fn change(
    State(app): State<App>,
    caller: Caller,
    Path(which): Path<String>,
    Required(body): Required<ChangeKey>,
) -> Result<Json<ApiKey>, ApiError> {
    caller.require_admin("changing a key")?;
    let changes = LimitChanges {
        set: body.limits.into(),
        removed: body.remove_limits,
    };
    check_limits(&app, &changes.set)?;
    let key = app.keys.change_limits(&which, &changes).map_err(refused)?;
    app.quota.announce_limits(&key).await;
    Ok(Json(key.into()))
}

/// `POST /keys/{id}/rotate`: replaces the secret of a key.
pub(super) async fn rotate(
    State(app): State<App>,
    caller: Caller,
    Path(which): Path<String>,
    Optional(body): Optional<RotateKey>,
) -> Result<Json<NewApiKey>, ApiError> {
    caller.require_admin("replacing the secret of a key")?;
    let overlap = Duration::from_millis(body.overlap_ms);
    let expires = expiry(body.expires_at)?;
    let rotated = app.keys.rotate(&which, overlap, expires);
    Ok(Json(rotated.map_err(refused)?.into()))
}

/// `POST /keys/{id}/revoke`: revokes a key. With `end`, also removes all its resources, and
/// responds when this is done. The removal continues in the background if the client disconnects.
pub(super) async fn revoke(
    State(app): State<App>,
    caller: Caller,
    Path(which): Path<String>,
    Optional(body): Optional<RevokeKey>,
) -> Result<Json<RevokedKey>, ApiError> {
    caller.require_admin("revoking a key")?;
    let revoked = if body.end {
        app.keys.revoke_and_end(&which)
    } else {
        app.keys.revoke(&which)
    };
    let Revocation { key, unconfirmed } = revoked.map_err(refused)?;
    app.report_key(EventType::KeyRevoked, &key);
    let ended = if body.end {
        // `revoke_and_end` has marked the key's resources for removal. If this call fails, the
        // background task completes the removal.
        Some(app.remove_resources_of(&key.id).await?)
    } else {
        None
    };
    Ok(Json(RevokedKey {
        sandboxes: ended.as_ref().map(|ended| ended.sandboxes),
        builds: ended.as_ref().map(|ended| ended.builds),
        unconfirmed_hosts: unconfirmed,
        revoked_at: moment(key.revoked_ms.unwrap_or_default()),
        key_id: key.id,
        name: key.name,
    }))
}

fn check_limits(app: &App, limits: &Limits) -> Result<(), ApiError> {
    let max = app.config.max_timeout_s;
    match limits.idle_timeout_s {
        Some(seconds) if seconds > max => Err(ApiError::invalid(format!(
            "`limits.idleTimeout` must be 0 to {max} seconds"
        ))),
        _ => Ok(()),
    }
}

fn refused(error: KeyError) -> ApiError {
    let message = error.to_string();
    match error {
        KeyError::Fleet(e) if e.is_temporary() => ApiError::fleet_unavailable(message),
        KeyError::Fleet(TableError::Changed(_)) => ApiError::conflict("refused", message),
        KeyError::Name(_) | KeyError::Network(_) | KeyError::Networks | KeyError::Expired => {
            ApiError::invalid(message)
        }
        KeyError::Unknown(_) => ApiError::not_found("key_not_found", message),
        _ => ApiError::internal(message),
    }
}
