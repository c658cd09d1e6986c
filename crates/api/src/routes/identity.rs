//! Public description of the issuer of identity tokens, by which services verify the tokens. It
//! contains no secrets, so that the calls need no key.

use crate::app::App;
use crate::error::ApiError;
use crate::owned_objects::blocking;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CACHE_CONTROL;
use axum::response::{IntoResponse, Response};
use jiffy_identity::{IdentityError, TokenIssuer};
use serde_json::Value;
use std::sync::Arc;

/// Permits verifiers to store the responses for an hour, less than the time for which a new key is
/// published before it signs.
const CACHE: &str = "public, max-age=3600";

fn issuer(app: &App) -> Result<Arc<TokenIssuer>, ApiError> {
    app.issuer.clone().ok_or_else(|| {
        ApiError::new(
            StatusCode::NOT_FOUND,
            "no_such_call",
            "this host issues no identity tokens; its operator starts the daemon with \
             `--identity-issuer URL`",
        )
    })
}

fn cacheable(body: Value) -> Response {
    ([(CACHE_CONTROL, CACHE)], Json(body)).into_response()
}

/// `GET /.well-known/openid-configuration`: describes the issuer.
pub(super) async fn configuration(State(app): State<App>) -> Result<Response, ApiError> {
    Ok(cacheable(issuer(&app)?.discovery()))
}

/// `GET /.well-known/jwks.json`: returns the public keys.
pub(super) async fn public_keys(State(app): State<App>) -> Result<Response, ApiError> {
    let issuer = issuer(&app)?;
    let failed = |e: IdentityError| match e {
        IdentityError::Shared {
            is_temporary: true, ..
        } => ApiError::fleet_unavailable(e.to_string()),
        e => ApiError::internal(e.to_string()),
    };
    let keys = blocking(failed, move || issuer.public_keys()).await?;
    Ok(cacheable(keys))
}
