//! Authentication of requests: determines the [`Caller`] from the listener or from an API key.
//!
//! A *sandbox key* belongs to a function. With its two secrets, the function calls the API, and
//! sandboxes call the function.

use crate::app::App;
use crate::audit::AuditedCaller;
use crate::error::{ApiError, convert_error, reveal};
use crate::function_key::FunctionCaller;
use crate::hooks::TemplateInfo;
use crate::ignored_fields::IgnoredFields;
use crate::keys::{Key, KeyError, Scope, Verdict, hash};
use axum::Router;
use axum::body::HttpBody;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::middleware::{from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use jiffy_engine_api::steps::{self, ServedRequest};
use jiffy_proto::internal::InternalOrigin;
use std::net::IpAddr;
use std::sync::Arc;

/// Number of characters of a sandbox id that a read-only caller is shown. These characters contain
/// 50 of the id's 100 random bits: enough to be unique, but not enough to reach the sandbox's
/// ports.
pub(crate) const SHORT_ID: usize = 10;

/// Path of the MCP server, which a listener may add to the routes of the API.
pub const MCP_PATH: &str = "/mcp";

/// Maximum length of a key in bytes. Longer keys are rejected without a lookup.
const MAX_KEY: usize = 256;

/// Address of the client, for keys that are bound to addresses and for the limit on failed
/// authentications. A listener inserts the address into the request's extensions; headers are not
/// trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientAddress(pub IpAddr);

/// Caller of a request. A listener that only the host's owner can reach inserts [`Caller::Owner`]
/// into the request's extensions. All other callers present a key.
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

    /// Returns whether the caller manages the host: templates, pools, sandboxes of all keys.
    pub fn is_admin(&self) -> bool {
        match self {
            Self::Owner => true,
            Self::Key(key) => key.scope == Scope::Admin,
            Self::Function(_) => false,
        }
    }

    /// Returns whether the caller is read-only.
    pub fn is_read_only(&self) -> bool {
        self.key().is_some_and(|key| key.scope == Scope::Read)
    }

    /// Returns whether the caller may manage a template that is visible to it. Callers without an
    /// [`Self::owner_scope`] may manage all templates, and other callers their own. This includes
    /// read-only keys, whose changes [`authenticate`] rejects.
    pub(crate) fn owns_template(&self, info: &TemplateInfo) -> bool {
        self.owner_scope().is_none() || info.owner.as_deref() == self.owner_scope()
    }

    /// Returns whether a resource of `owner` is visible to the caller.
    pub(crate) fn sees(&self, owner: Option<&str>) -> bool {
        match self {
            Self::Owner => true,
            // Keys with the scopes `admin` and `read` see the resources of all keys.
            Self::Key(key) => key.scope != Scope::Create || owner == Some(key.id.as_str()),
            Self::Function(function) => owner == Some(function.key.id.as_str()),
        }
    }

    /// Returns the owner of sandboxes that the caller creates. `None` is the host's owner.
    pub(crate) fn owner_id(&self) -> Option<String> {
        self.key().map(|key| key.id.clone())
    }

    /// Returns the owner to whose resources the caller is restricted. `None` if unrestricted.
    pub(crate) fn owner_scope(&self) -> Option<&str> {
        match self {
            Self::Key(key) if key.scope == Scope::Create => Some(&key.id),
            Self::Function(function) => Some(&function.key.id),
            _ => None,
        }
    }

    /// Returns whether the caller may read the state of the host as a whole.
    pub fn sees_host(&self) -> bool {
        // A read-only sandbox key of a function is restricted to the resources of one API key.
        self.is_admin() || (self.is_read_only() && self.owner_scope().is_none())
    }

    /// Returns a sandbox's id in the form that the caller may see. The complete id grants access to
    /// the sandbox's ports, so a read-only caller is shown a prefix. All calls accept that prefix.
    pub(crate) fn shown_id<'a>(&self, id: &'a str) -> &'a str {
        if self.is_read_only() {
            id.get(..SHORT_ID).unwrap_or(id)
        } else {
            id
        }
    }

    /// Returns the name `[owner/]name[:tag]` of a template as shown to the caller: without the
    /// owner if the template is in the caller's own namespace.
    pub(crate) fn display_name(&self, name: &str) -> String {
        let own = self.owner_scope().and_then(|key| {
            let rest = name.strip_prefix(key)?;
            rest.strip_prefix('/')
        });
        own.unwrap_or(name).to_owned()
    }

    /// Returns the key of the caller. `None` for the host's owner.
    pub fn key(&self) -> Option<&Arc<Key>> {
        match self {
            Self::Owner => None,
            Self::Key(key) => Some(key),
            Self::Function(function) => Some(&function.key),
        }
    }

    /// Returns an error unless the caller manages the host. `what` describes the operation.
    pub(crate) fn require_admin(&self, what: &str) -> Result<(), ApiError> {
        if self.is_admin() {
            return Ok(());
        }
        Err(ApiError::forbidden(format!(
            "{what} requires a key with the scope `admin`"
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
        "no API key: send one in `X-API-KEY` or as `Authorization: Bearer`; `jiffy key create` creates one",
    )
}

/// Returns the key in the headers of a request.
fn presented_key(headers: &HeaderMap) -> Option<&str> {
    if let Some(key) = headers.get("x-api-key") {
        return key.to_str().ok();
    }
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    // The scheme of `Authorization` is not case-sensitive (RFC 9110, 11.1).
    let (scheme, key) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// Returns the key in the headers of a request, if its length is valid.
pub fn key_of_request(headers: &HeaderMap) -> Option<&str> {
    presented_key(headers).filter(|key| is_key_length(key))
}

/// Returns whether a key may have the length of `key`.
pub(crate) fn is_key_length(key: &str) -> bool {
    !key.is_empty() && key.len() <= MAX_KEY
}

/// Restricts `router` to the host's owner and to callers with a key in force. Inserts the
/// [`Caller`] into the request's extensions. Errors of the router receive the form of this API.
pub fn guarded(app: &App, router: Router) -> Router {
    authenticated(app, router).layer(map_response(convert_error))
}

/// Like [`guarded`], for a router whose errors have a form of their own.
pub fn authenticated(app: &App, router: Router) -> Router {
    router.route_layer(from_fn_with_state(app.clone(), authenticate))
}

/// Rejects unauthenticated requests, and changes by read-only keys. Inserts the [`Caller`] into the
/// extensions of the response, so that the listener knows that the caller is authenticated.
pub(crate) async fn authenticate(
    State(app): State<App>,
    mut request: Request,
    next: Next,
) -> Response {
    let caller = match request.extensions().get::<Caller>() {
        Some(caller) => caller.clone(),
        None => match identify(&app, &request) {
            Ok(caller) => caller,
            Err(e) => return e.into_response(),
        },
    };
    if let Some(audited) = request.extensions().get::<AuditedCaller>() {
        audited.set(&caller);
    }
    // A function's key permits only some calls.
    if let Caller::Function(function) = &caller
        && let Err(e) = function.check_call(request.method(), request.uri().path())
    {
        return e.into_response();
    }
    // `GET` calls that create a secret check the scope themselves. Messages of MCP lead to calls
    // that are checked one by one.
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    let is_write = !is_read && request.uri().path() != MCP_PATH;
    if is_write && caller.is_read_only() {
        return ApiError::read_only().into_response();
    }
    let is_admin = caller.is_admin();
    // Handlers extract the caller from the request.
    request.extensions_mut().insert(caller.clone());
    let has_body = !request.body().is_end_stream();
    let ignored = has_body.then(IgnoredFields::default);
    if let Some(ignored) = &ignored {
        request.extensions_mut().insert(ignored.clone());
    }
    let served = ServedRequest {
        id: request_id(request.headers()),
        caller: caller.key().map(|key| key.id.as_str().into()),
    };
    let response = steps::serve_request(served, next.run(request)).await;
    // Only administrators see messages of internal errors, which may name files of the host.
    let mut response = if is_admin { reveal(response) } else { response };
    if let Some(ignored) = ignored {
        app.report_ignored(&ignored, &caller, &mut response);
    }
    // The listener reads the caller from the response.
    response.extensions_mut().insert(caller);
    response
}

/// Returns the id of a request. The listener validated or added the header.
fn request_id(headers: &HeaderMap) -> Option<Arc<str>> {
    Some(headers.get("x-request-id")?.to_str().ok()?.into())
}

/// Returns the error of a key that cannot be verified.
pub(crate) fn unverifiable(error: KeyError) -> ApiError {
    match error {
        KeyError::Fleet(e) if e.is_temporary() => ApiError::fleet_unavailable(e.to_string()),
        e => ApiError::internal(e.to_string()),
    }
}

/// Authenticates a request by its key. See [`check_key`] for the limit on failures.
pub(crate) fn identify(app: &App, request: &Request) -> Result<Caller, ApiError> {
    let from = request.extensions().get::<ClientAddress>().map(|a| a.0);
    // On a connection from a function or sandbox of this host, only the secrets of sandbox keys are
    // valid, and failures are not counted.
    if let Some(origin) = request.extensions().get::<InternalOrigin>() {
        return app.internal_caller(origin, request);
    }
    check_key(app, key_of_request(request.headers()), from).map(Caller::Key)
}

/// Verifies the key of a client at `from`, and counts its failures. After too many failures from
/// one address, requests from that address are rejected. Keys in force are still accepted, so that
/// a client cannot lock out others behind the same address.
pub(crate) fn check_key(
    app: &App,
    key: Option<&str>,
    from: Option<IpAddr>,
) -> Result<Arc<Key>, ApiError> {
    let count_failure = |error: ApiError| {
        if let Some(ip) = from {
            app.authentication_limit.count(ip);
        }
        Err(error)
    };
    let wait = from.and_then(|ip| app.authentication_limit.wait(ip));
    // A key in force is accepted nevertheless.
    if let Some(wait) = wait.filter(|_| key.is_none_or(|key| !app.keys.is_in_force(&hash(key)))) {
        let message = "too many failed authentications from this address: retry later";
        // Round up: a retry must not arrive too early.
        let seconds = wait.as_secs() + 1;
        return Err(ApiError::too_many("authentication_failures", message).after(seconds));
    }
    let Some(key) = key else {
        return count_failure(unauthenticated());
    };
    let verdict = app.keys.check(key, from);
    match verdict.map_err(unverifiable)? {
        Verdict::Valid(key) => Ok(Arc::from(key)),
        Verdict::Unknown | Verdict::Revoked => count_failure(ApiError::new(
            StatusCode::UNAUTHORIZED,
            "unauthenticated",
            "the API key is unknown or was revoked; `jiffy key ls` lists the keys of this host",
        )),
        Verdict::Expired => count_failure(ApiError::new(
            StatusCode::UNAUTHORIZED,
            "key_expired",
            "the API key has expired; `jiffy key rotate KEY --expires 30d` renews it",
        )),
        Verdict::Elsewhere => count_failure(ApiError::new(
            StatusCode::FORBIDDEN,
            "address_not_allowed",
            "the API key may not be used from this address; `jiffy key ls` lists its allowed addresses",
        )),
    }
}
