//! The call that reads the audit log.

use super::events::respond;
use crate::app::App;
use crate::audit::Unrecorded;
use crate::audit_pages::{AuditSelection, has_other_calls};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::fleet::Forwarded;
use crate::query::Query;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use axum::{Extension, Json};

/// `GET /audit`: reads a page. Waits for the first entry if the request specifies this.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
    forwarded: Option<Extension<Forwarded>>,
    query: Query,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    caller.require_admin("reading the audit log")?;
    let selection = AuditSelection::parse(&query, &headers)?;
    let is_wait = !selection.wait.is_zero();
    let is_forwarded = forwarded.is_some() || query.get("host").is_some();
    let (page, missing) = app.audit_page(&caller, selection, is_forwarded).await?;
    // A reader that follows the log would otherwise add entries without end.
    let is_idle = is_wait && !has_other_calls(&page);
    let mut response = respond(Json(page), &query, &missing)?;
    if is_idle {
        response.extensions_mut().insert(Unrecorded);
    }
    Ok(response)
}
