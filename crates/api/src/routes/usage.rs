//! The call that reads the usage of keys.

use super::events::respond;
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::fleet::Forwarded;
use crate::query::Query;
use crate::usage::UsageSelection;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use axum::{Extension, Json};

/// `GET /usage`: a page of the usage by day and key.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
    forwarded: Option<Extension<Forwarded>>,
    query: Query,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let selection = UsageSelection::parse(&app, &caller, &query, &headers)?;
    let is_forwarded = forwarded.is_some() || query.get("host").is_some();
    let (page, missing) = app.usage_page(&caller, &selection, is_forwarded).await?;
    respond(Json(page), &query, &missing)
}
