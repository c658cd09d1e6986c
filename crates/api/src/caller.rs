//! Caller of a request.

use crate::app::App;
use crate::error::{ApiError, in_one_form, reveal};
use crate::function_key::FunctionCaller;
use crate::hooks::TemplateInfo;
use crate::keys::{Key, Scope, Verdict, hash};
use axum::Router;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::middleware::{from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use jiffy_engine_api::steps;
use jiffy_proto::internal::InternalOrigin;
use std::net::IpAddr;
use std::sync::Arc;

/// Characters of a sandbox's id that a caller who may only look is shown: 50 of its 100 bits.
pub(crate) const SHORT_ID: usize = 10;

/// Longest key that is looked at.
const MAX_KEY: usize = 256;

/// Address of the client, for keys that are bound to addresses and for the limit on failures. A
/// listener inserts it into the request's extensions; headers are not believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientAddress(pub IpAddr);

/// Caller of a request. A listener that knows that only the host's owner can reach it inserts
/// [`Caller::Owner`] into the request's extensions; everybody else shows a key.
#[derive(Debug, Clone)]
pub enum Caller {
    /// Owner of this host.
    Owner,
    /// The holder of an API key.
    Key(Arc<Key>),
    /// The holder of a function's key for sandboxes, or a sandbox that calls a function.
    Function(Arc<FunctionCaller>),
}

impl Caller {
    pub(crate) fn is_owner(&self) -> bool {
        matches!(self, Self::Owner)
    }

    /// True if the caller manages the host: templates, pools, sandboxes of all keys.
    pub(crate) fn is_admin(&self) -> bool {
        match self {
            Self::Owner => true,
            Self::Key(key) => key.scope == Scope::Admin,
            Self::Function(_) => false,
        }
    }

    /// True if the caller may only read.
    pub(crate) fn only_reads(&self) -> bool {
        self.key().is_some_and(|key| key.scope == Scope::Read)
    }

    /// True if the caller may change a template that it sees.
    pub(crate) fn owns_template(&self, info: &TemplateInfo) -> bool {
        self.bounds().is_none() || info.owner.as_deref() == self.bounds()
    }

    /// True if something that belongs to `owner` exists for the caller.
    pub(crate) fn sees(&self, owner: Option<&str>) -> bool {
        match self {
            Self::Owner => true,
            Self::Key(key) => key.scope != Scope::Create || owner == Some(key.id.as_str()),
            Self::Function(function) => owner == Some(function.key.id.as_str()),
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
            Self::Function(function) => Some(&function.key.id),
            _ => None,
        }
    }

    /// True if the caller is told how the host as a whole is doing.
    pub fn sees_host(&self) -> bool {
        self.is_admin() || (self.only_reads() && self.bounds().is_none())
    }

    /// A sandbox's id as the caller may know it. The whole of it leads to the sandbox's ports, so
    /// that a caller who may only look is given a beginning, which finds it in all calls.
    pub(crate) fn shown_id<'a>(&self, id: &'a str) -> &'a str {
        match self.only_reads() {
            true => id.get(..SHORT_ID).unwrap_or(id),
            false => id,
        }
    }

    /// The name `[owner/]name[:tag]` of a template as the caller calls it: its own namespace is not
    /// said.
    pub(crate) fn called(&self, name: &str) -> String {
        let own = self.bounds().and_then(|key| {
            let rest = name.strip_prefix(key)?;
            rest.strip_prefix('/')
        });
        own.unwrap_or(name).to_owned()
    }

    pub(crate) fn key(&self) -> Option<&Arc<Key>> {
        match self {
            Self::Owner => None,
            Self::Key(key) => Some(key),
            Self::Function(function) => Some(&function.key),
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

pub(crate) fn unauthenticated() -> ApiError {
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

/// The key a request shows, if it has the length of one.
pub(crate) fn shown_key(headers: &HeaderMap) -> Option<&str> {
    shown(headers).filter(|key| !key.is_empty() && key.len() <= MAX_KEY)
}

/// Serves `router` to callers with a key in force only, or the host's owner. Handlers find the
/// [`Caller`].
pub fn guarded(app: &App, router: Router) -> Router {
    router
        .route_layer(from_fn_with_state(app.clone(), authenticate))
        .layer(map_response(in_one_form))
}

/// Lets nobody pass who is not known, and nobody write who may only look. The answer tells the
/// listener that its caller is known, by the [`Caller`] among its extensions.
pub(crate) async fn authenticate(
    State(app): State<App>,
    mut request: Request,
    next: Next,
) -> Response {
    let caller = match request.extensions().get::<Caller>() {
        Some(caller) => caller.clone(),
        None => match known(&app, &request) {
            Ok(caller) => caller,
            Err(e) => return e.into_response(),
        },
    };
    if let Caller::Function(function) = &caller
        && let Err(e) = function.check_call(request.method(), request.uri().path())
    {
        return e.into_response();
    }
    let writes = !matches!(*request.method(), Method::GET | Method::HEAD);
    if writes && caller.only_reads() {
        return ApiError::forbidden("this key may only look (scope `read`)").into_response();
    }
    let trusted = caller.is_admin();
    request.extensions_mut().insert(caller.clone());
    let response = match request_id(request.headers()) {
        Some(id) => steps::serve_request(id, next.run(request)).await,
        None => next.run(request).await,
    };
    let mut response = if trusted { reveal(response) } else { response };
    response.extensions_mut().insert(caller);
    response
}

/// Returns the id of a request. The listener has checked the header, or added it.
fn request_id(headers: &HeaderMap) -> Option<Arc<str>> {
    Some(headers.get("x-request-id")?.to_str().ok()?.into())
}

/// The holder of the key that a request shows. An address that showed too many wrong ones is told
/// so without a look at the file of keys; keys in force pass also then, so that an address shared
/// by many clients is not closed by one of them.
pub(crate) fn known(app: &App, request: &Request) -> Result<Caller, ApiError> {
    let from = request.extensions().get::<ClientAddress>().map(|a| a.0);
    let refused = |error: ApiError| {
        if let Some(ip) = from {
            app.authentication_limit.count(ip);
        }
        Err(error)
    };
    if let Some(origin) = request.extensions().get::<InternalOrigin>() {
        return app.internal_caller(origin, request);
    }
    let key = shown_key(request.headers());
    let wait = from.and_then(|ip| app.authentication_limit.wait(ip));
    if let Some(wait) = wait.filter(|_| key.is_none_or(|key| !app.keys.knows(&hash(key)))) {
        let message = "too many calls from this address showed no key in force: wait a moment";
        let seconds = wait.as_secs() + 1;
        return Err(ApiError::too_many("authentication_failures", message).after(seconds));
    }
    let Some(key) = key else {
        return refused(unauthenticated());
    };
    let verdict = app.keys.check(key, from);
    match verdict.map_err(|e| ApiError::internal(e.to_string()))? {
        Verdict::Valid(key) => Ok(Caller::Key(Arc::from(key))),
        Verdict::Unknown | Verdict::Revoked => refused(ApiError::new(
            StatusCode::UNAUTHORIZED,
            "unauthenticated",
            "this API key is not known here, or was revoked; `jiffy key ls` shows those there are",
        )),
        Verdict::Expired => refused(ApiError::new(
            StatusCode::UNAUTHORIZED,
            "key_expired",
            "this API key has expired; `jiffy key rotate KEY --expires 30d` makes it valid again",
        )),
        Verdict::Elsewhere => refused(ApiError::new(
            StatusCode::FORBIDDEN,
            "address_not_allowed",
            "this API key may not be used from this address; `jiffy key ls` shows from where",
        )),
    }
}
