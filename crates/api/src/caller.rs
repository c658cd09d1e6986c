//! Who calls.

use crate::app::App;
use crate::error::{ApiError, reveal};
use crate::keys::{Key, Scope};
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use jiffy_engine::Engine;
use std::sync::Arc;

/// Longest key that is looked at.
const MAX_KEY: usize = 256;

/// Who calls. A listener that knows that only the host's owner can reach it inserts [`Caller::Owner`] into the request's extensions;
/// everybody else shows a key.
#[derive(Debug, Clone)]
pub enum Caller {
    /// Whoever runs this host.
    Owner,
    /// The holder of an API key.
    Key(Arc<Key>),
}

impl Caller {
    pub(crate) fn is_owner(&self) -> bool {
        matches!(self, Self::Owner)
    }

    /// Whether the caller manages the host: templates, pools, everybody's sandboxes.
    pub(crate) fn is_admin(&self) -> bool {
        match self {
            Self::Owner => true,
            Self::Key(key) => key.scope == Scope::Admin,
        }
    }

    /// Whether the caller may only look.
    pub(crate) fn only_reads(&self) -> bool {
        matches!(self, Self::Key(key) if key.scope == Scope::Read)
    }

    /// Whether something that belongs to `owner` exists for the caller.
    pub(crate) fn sees(&self, owner: Option<&str>) -> bool {
        match self {
            Self::Owner => true,
            Self::Key(key) => key.scope != Scope::Create || owner == Some(key.id.as_str()),
        }
    }

    /// Whom the caller's sandboxes belong to.
    pub(crate) fn owner_id(&self) -> Option<String> {
        self.key().map(|key| key.id.clone())
    }

    /// To whose things the caller is bound; none: everybody's.
    pub(crate) fn bounds(&self) -> Option<&str> {
        match self {
            Self::Key(key) if key.scope == Scope::Create => Some(&key.id),
            _ => None,
        }
    }

    pub(crate) fn key(&self) -> Option<&Arc<Key>> {
        match self {
            Self::Owner => None,
            Self::Key(key) => Some(key),
        }
    }

    pub(crate) fn require_admin(&self, what: &str) -> Result<(), ApiError> {
        if self.is_admin() {
            return Ok(());
        }
        Err(ApiError::forbidden(format!(
            "{what} needs a key with the scope `admin`"
        )))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let caller = parts.extensions.get::<Self>().cloned();
        caller.ok_or_else(unauthenticated)
    }
}

fn unauthenticated() -> ApiError {
    ApiError::new(
        StatusCode::UNAUTHORIZED,
        "unauthenticated",
        "show an API key in `X-API-KEY` or as `Authorization: Bearer`; `jiffy key create` makes one",
    )
}

/// The key a request shows.
fn shown(headers: &HeaderMap) -> Option<&str> {
    if let Some(key) = headers.get("x-api-key") {
        return key.to_str().ok();
    }
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// Lets nobody pass who is not known, and nobody write who may only look.
pub(crate) async fn authenticate<E: Engine>(
    State(app): State<App<E>>,
    mut request: Request,
    next: Next,
) -> Response {
    let caller = match request.extensions().get::<Caller>() {
        Some(caller) => caller.clone(),
        None => match known(&app, request.headers()) {
            Ok(caller) => caller,
            Err(e) => return e.into_response(),
        },
    };
    let writes = !matches!(*request.method(), Method::GET | Method::HEAD);
    if writes && caller.only_reads() {
        return ApiError::forbidden("this key may only look (scope `read`)").into_response();
    }
    let trusted = caller.is_admin();
    request.extensions_mut().insert(caller);
    let response = next.run(request).await;
    if trusted { reveal(response) } else { response }
}

fn known<E: Engine>(app: &App<E>, headers: &HeaderMap) -> Result<Caller, ApiError> {
    let key = shown(headers).filter(|k| !k.is_empty() && k.len() <= MAX_KEY);
    let key = key.ok_or_else(unauthenticated)?;
    match app.keys.check(key) {
        Ok(Some(key)) => Ok(Caller::Key(Arc::new(key))),
        Ok(None) => Err(ApiError::new(
            StatusCode::UNAUTHORIZED,
            "unauthenticated",
            "this API key is not known here, or was revoked; `jiffy key ls` shows those there are",
        )),
        Err(e) => Err(ApiError::internal(e.to_string())),
    }
}
