//! Calls on API keys.

use crate::app::App;
use crate::body::Optional;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::keys::KeyError;
use crate::wire::moment;
use axum::Json;
use axum::extract::{Path, State};
use jiffy_api_types::{RevokeKey, RevokedKey};

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
    let key = revoked.map_err(refused)?;
    let ended = if body.end {
        // The mark in the database makes the background task complete the removal if this call
        // fails.
        Some(app.remove_resources_of(&key.id).await?)
    } else {
        None
    };
    Ok(Json(RevokedKey {
        sandboxes: ended.as_ref().map(|ended| ended.sandboxes),
        builds: ended.as_ref().map(|ended| ended.builds),
        revoked_at: moment(key.revoked_ms.unwrap_or_default()),
        key_id: key.id,
        name: key.name,
    }))
}

fn refused(error: KeyError) -> ApiError {
    let message = error.to_string();
    match error {
        KeyError::Unknown(_) => ApiError::not_found("key_not_found", message),
        _ => ApiError::internal(message),
    }
}
