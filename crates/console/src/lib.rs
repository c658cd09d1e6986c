//! Web console of a daemon: the embedded page, sessions of signed-in users, and the calls that a
//! browser needs in addition to the API.
//!
//! | Path | Purpose |
//! |---|---|
//! | `/session`, `/sessions` | sign-in, sign-out, list and end of sessions |
//! | `/api/...` | calls of the API, as the caller of the session |
//! | `/guest/...`, `/download/...` | files of sandboxes |
//! | `/live` | WebSocket with terminals |
//! | other paths | the page |
//!
//! All paths except the page pass the checks of [`checks`], so that pages of other origins, in
//! particular pages of guests, cannot use a session. The router of the API checks permissions: it
//! receives the caller of the session as an extension of the request.

mod assets;
mod checks;
mod codes;
mod files;
mod guest_audit;
mod listening;
mod live;
mod live_feeds;
pub mod live_messages;
mod refusal;
mod session_routes;
mod session_store;
mod terminal;
mod terminals;

pub use session_store::{SessionStore, StoreError};

use crate::codes::Codes;
use crate::refusal::Refusal;
use crate::session_store::Session;
use crate::terminals::Terminals;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::middleware::{from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, delete, get, post};
use axum::{Extension, Json, Router};
use jiffy_api::{App, Caller, ClientAddress, ConsoleSession};
use jiffy_gateway::KnownCaller;
use std::sync::Arc;
use tokio::sync::watch;
use tower::ServiceExt;

/// Console of a daemon. Clones share the state.
#[derive(Clone)]
pub struct Console {
    pub(crate) app: App,
    /// Router of the API.
    api: Router,
    pub(crate) sessions: Arc<SessionStore>,
    pub(crate) codes: Arc<Codes>,
    pub(crate) terminals: Arc<Terminals>,
    pub(crate) settings: Arc<Settings>,
    /// Changes when sessions may have ended. Streams then check their session.
    pub(crate) sessions_changed: watch::Sender<()>,
}

/// Settings of a console.
pub struct Settings {
    /// URL of the console for browsers, without a path.
    pub url: String,
    /// True if the listener uses TLS.
    pub tls: bool,
    /// Names of the console in addition to loopback names. Only used with TLS.
    pub names: Vec<String>,
    /// Version of the daemon.
    pub version: &'static str,
}

impl Console {
    /// Creates the console of the daemon with the state `app` and the API `api`, whose links to
    /// ports must have another origin than the console.
    pub fn new(app: App, api: Router, sessions: SessionStore, settings: Settings) -> Self {
        let (sessions_changed, _) = watch::channel(());
        Self {
            app,
            api,
            sessions: Arc::new(sessions),
            codes: Arc::default(),
            terminals: Arc::default(),
            settings: Arc::new(settings),
            sessions_changed,
        }
    }

    /// Returns the router of the console's listener.
    pub fn router(&self) -> Router {
        let files = Router::new()
            .route("/guest/{id}/entries", get(files::list))
            .route("/guest/{id}/entries", delete(files::remove))
            .route("/guest/{id}/directories", post(files::make_directory))
            .route("/guest/{id}/moves", post(files::rename))
            .route("/guest/{id}/file", get(files::read).put(files::write))
            .route("/guest/{id}/downloads", post(files::ticket))
            .route("/download/{ticket}", get(files::download))
            .route_layer(from_fn_with_state(self.clone(), guest_audit::record));
        let calls = files
            .route("/api/{*path}", any(api))
            .route("/session", get(session_routes::current))
            .route("/session", delete(session_routes::sign_out))
            .route("/sessions", get(session_routes::list))
            .route("/sessions/{id}", delete(session_routes::end))
            .route("/guest/{id}/ports", get(listening::list))
            .route("/guest/{id}/terminals", get(live::list))
            .route("/live", any(live::upgrade))
            .route_layer(from_fn_with_state(self.clone(), authenticate))
            // Sign-in has no session yet.
            .route("/session", post(session_routes::sign_in))
            .route_layer(from_fn_with_state(self.clone(), checks::check));
        Router::new()
            .merge(calls)
            .fallback(assets::page)
            .layer(from_fn_with_state(self.clone(), checks::check_host))
            .layer(map_response(secure))
            .with_state(self.clone())
    }

    /// Returns the calls of the console on the owner's socket, the Unix socket of the daemon that
    /// only the owner of the host can open. `POST /console/codes` creates a code for signing in,
    /// and `GET /console` returns the address of the console.
    pub fn owner_router(&self) -> Router {
        let (console, url) = (self.clone(), self.settings.url.clone());
        let create = move |Extension(caller): Extension<Caller>| {
            let result = if matches!(caller, Caller::Owner) {
                console.codes.create().map(|code| {
                    let url = format!("{}/#code={code}", console.settings.url);
                    Json(serde_json::json!({ "url": url })).into_response()
                })
            } else {
                Err(Refusal::forbidden("codes are for the owner of the host"))
            };
            std::future::ready(result)
        };
        let address = move || std::future::ready(Json(serde_json::json!({ "url": url })));
        let router = Router::new()
            .route("/console/codes", post(create))
            .route("/console", get(address));
        jiffy_api::guarded(&self.app, router)
    }

    /// Returns the caller of a session. `None` if its key is no longer in force.
    pub(crate) fn caller_of(
        &self,
        session: &Session,
        from: ClientAddress,
    ) -> Result<Option<Caller>, Refusal> {
        let Some((id, secret)) = &session.key else {
            return Ok(Some(Caller::Owner));
        };
        let key = self.app.key_of_session(id, secret, Some(from.0));
        Ok(key.map_err(Refusal::Api)?.map(Caller::Key))
    }

    /// Returns the session and the caller of a request with the session cookie `secret`.
    pub(crate) fn find(
        &self,
        secret: &str,
        from: ClientAddress,
    ) -> Result<Option<(Session, Caller)>, Refusal> {
        let Some(session) = self.sessions.find(secret)? else {
            return Ok(None);
        };
        match self.caller_of(&session, from)? {
            Some(caller) => Ok(Some((session, caller))),
            None => {
                self.sessions.remove(&session.id)?;
                Ok(None)
            }
        }
    }
}

/// Rejects requests without a session. Inserts the [`Session`] and its [`Caller`].
async fn authenticate(
    State(console): State<Console>,
    mut request: Request,
    next: axum::middleware::Next,
) -> Response {
    let from = request.extensions().get::<ClientAddress>().copied();
    let Some(from) = from else {
        return Refusal::internal("the listener did not record the client").into_response();
    };
    let secret = match console.cookie(request.headers()) {
        Ok(secret) => secret.map(str::to_owned),
        Err(refusal) => return refusal.into_response(),
    };
    let found = secret.map(|secret| console.find(&secret, from)).transpose();
    match found.map(Option::flatten) {
        Ok(Some((session, caller))) => {
            request.extensions_mut().insert(session);
            request.extensions_mut().insert(caller);
            let mut response = next.run(request).await;
            response.extensions_mut().insert(KnownCaller);
            response
        }
        Ok(None) => Refusal::signed_out().into_response(),
        Err(refusal) => refusal.into_response(),
    }
}

/// `/api/...`: a call of the API. Its router checks the permissions of the caller.
async fn api(
    State(console): State<Console>,
    Extension(caller): Extension<Caller>,
    Extension(session): Extension<Session>,
    request: Request,
) -> Response {
    let is_change = !matches!(*request.method(), Method::GET | Method::HEAD);
    let path = request.uri().path_and_query().map(|path| path.as_str());
    let path = path.and_then(|path| path.strip_prefix("/api"));
    let Some(Ok(uri)) = path.map(str::parse::<Uri>) else {
        return Refusal::invalid("the path is invalid").into_response();
    };
    let (parts, body) = request.into_parts();
    let mut call = Request::new(body);
    *call.method_mut() = parts.method;
    *call.uri_mut() = uri;
    *call.headers_mut() = api_headers(parts.headers);
    if let Some(from) = parts.extensions.get::<ClientAddress>() {
        call.extensions_mut().insert(*from);
    }
    call.extensions_mut().insert(caller);
    call.extensions_mut().insert(ConsoleSession(session.id));
    let Ok(response) = console.api.clone().oneshot(call).await;
    // The call may have ended sessions, for example by a revocation.
    if is_change {
        console.sessions_changed.send_replace(());
    }
    response.map(Body::new)
}

/// Returns the headers that a call of the API receives. Credentials of the browser are removed: the
/// session determines the caller.
fn api_headers(headers: HeaderMap) -> HeaderMap {
    let mut headers = headers;
    for name in [
        "cookie",
        "authorization",
        "x-api-key",
        "origin",
        "referer",
        "upgrade",
    ] {
        headers.remove(name);
    }
    headers
}

/// Adds the headers of all responses of the console.
async fn secure(mut response: Response) -> Response {
    checks::add_security_headers(response.headers_mut());
    response
}

/// Response of a program that was built without the page.
pub(crate) const NOT_BUILT: (StatusCode, &str) = (
    StatusCode::NOT_IMPLEMENTED,
    "This program was built without the web console: run `make build` with Node 20.19 or later.\n",
);
