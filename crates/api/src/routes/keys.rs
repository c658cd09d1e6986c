//! API keys.

use crate::app::App;
use crate::body::Optional;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::keys::{Key, KeyError};
use crate::wire::moment;
use axum::Json;
use axum::extract::{Path, State};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RevokeBody {
    end: bool,
}

/// `POST /keys/{id}/revoke`: revokes a key; with `end`, ends everything it has, and answers when
/// that is done. What is marked for its end does end, also if this call breaks off.
pub(super) async fn revoke(
    State(app): State<App>,
    caller: Caller,
    Path(which): Path<String>,
    Optional(body): Optional<RevokeBody>,
) -> Result<Json<Value>, ApiError> {
    caller.require_admin("revoking a key")?;
    let revoked = match body.end {
        true => app.keys.revoke_and_end(&which),
        false => app.keys.revoke(&which),
    };
    let key = revoked.map_err(refused)?;
    if !body.end {
        return Ok(Json(shown(&key)));
    }
    let ended = app.end_all_of(&key.id).await?;
    let mut shown = shown(&key);
    if let Some(map) = shown.as_object_mut() {
        map.insert("sandboxes".to_owned(), json!(ended.sandboxes));
        map.insert("builds".to_owned(), json!(ended.builds));
    }
    Ok(Json(shown))
}

fn shown(key: &Key) -> Value {
    json!({
        "keyID": key.id,
        "name": key.name,
        "revokedAt": key.revoked_ms.map(moment),
    })
}

fn refused(error: KeyError) -> ApiError {
    let message = error.to_string();
    match error {
        KeyError::Unknown(_) => ApiError::not_found("key_not_found", message),
        _ => ApiError::internal(message),
    }
}
