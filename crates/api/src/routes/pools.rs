//! Calls on warm pools: restored guests without an identity, which make creates fast.
//!
//! The *warm pool* has guests that were started in advance and wait for a create.

use crate::app::App;
use crate::body::Required;
use crate::caller::Caller;
use crate::error::ApiError;
use axum::Json;
use axum::extract::{Path, State};
use jiffy_api_types::{Pool, SetPool};
use jiffy_sandbox_manager::PoolSize;

fn shown(pool: PoolSize) -> Pool {
    Pool {
        template_id: pool.template,
        size: pool.wanted,
        ready: pool.waiting,
    }
}

/// `GET /pools`: lists the warm pools with their sizes.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
) -> Result<Json<Vec<Pool>>, ApiError> {
    if !caller.is_read_only() {
        caller.require_admin("reading pools")?;
    }
    Ok(Json(
        app.sandboxes
            .pool()
            .sizes()
            .into_iter()
            .map(shown)
            .collect(),
    ))
}

/// `PUT /pools/{templateID}`: sets the size of a warm pool. Its sandboxes start in the background.
pub(super) async fn set(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Required(body): Required<SetPool>,
) -> Result<Json<Pool>, ApiError> {
    caller.require_admin("changing a pool")?;
    let max_pool = app.config.max_pool;
    let size = usize::try_from(body.size).ok().filter(|s| *s <= max_pool);
    let size = size.ok_or_else(|| ApiError::invalid(format!("`size` must be 0 to {max_pool}")))?;
    let info = app.template(&caller, &id)?;
    // A pool belongs to one tag of a template.
    let name = info.reference();
    let set = app.sandboxes.pool().set(&name, info.size, size);
    Ok(Json(shown(set.await?)))
}
