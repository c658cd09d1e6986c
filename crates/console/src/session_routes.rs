//! Handlers for sessions of the web console: sign-in, sign-out, list and end of sessions.

use crate::Console;
use crate::refusal::Refusal;
use crate::session_store::{IDLE_MS, Session, ShownSession};
use axum::extract::{Path, State};
use axum::http::header::{SET_COOKIE, USER_AGENT};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use jiffy_api::{Caller, ClientAddress};
use serde::{Deserialize, Serialize};

/// Body of a sign-in.
#[derive(Deserialize)]
pub(crate) struct SignIn {
    /// API key.
    key: Option<String>,
    /// Code that `jiffy console` printed.
    code: Option<String>,
}

/// Session as the page sees it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Current {
    session: String,
    /// `owner`, `admin`, `create` or `read`.
    scope: &'static str,
    #[serde(rename = "keyID")]
    key_id: Option<String>,
    key_name: Option<String>,
    version: &'static str,
}

/// Describes a session for the page.
fn current_of(console: &Console, session: &Session, caller: &Caller) -> Current {
    let key = caller.key();
    Current {
        session: session.id.clone(),
        scope: key.map_or("owner", |key| key.scope.name()),
        key_id: key.map(|key| key.id.clone()),
        key_name: key.map(|key| key.name.clone()),
        version: console.settings.version,
    }
}

/// `POST /session`: exchanges a key or a code for a session.
pub(crate) async fn sign_in(
    State(console): State<Console>,
    Extension(from): Extension<ClientAddress>,
    headers: HeaderMap,
    Json(body): Json<SignIn>,
) -> Result<Response, Refusal> {
    let (caller, key) = match (&body.key, &body.code) {
        (Some(key), None) => {
            let (key, secret) = console.app.sign_in(key.trim(), Some(from.0))?;
            (Caller::Key(key.clone()), Some((key.id.clone(), secret)))
        }
        (None, Some(code)) => {
            if !console.codes.take(code) {
                console.app.count_failed_sign_in(from.0)?;
                return Err(Refusal::new(
                    StatusCode::UNAUTHORIZED,
                    "code_expired",
                    "the code was used or has expired: run `jiffy console` again",
                ));
            }
            (Caller::Owner, None)
        }
        _ => return Err(Refusal::invalid("send either `key` or `code`")),
    };
    // The session of a previous sign-in in this browser would be unreachable.
    if let Some(secret) = console.cookie(&headers)?
        && let Some(previous) = console.sessions.find(secret)?
    {
        console.sessions.remove(&previous.id)?;
        console.sessions_changed.send_replace(());
    }
    let browser = headers
        .get(USER_AGENT)
        .and_then(|value| value.to_str().ok());
    let key = key
        .as_ref()
        .map(|(id, secret)| (id.as_str(), secret.as_slice()));
    let address = from.0.to_string();
    let (session, secret) = console
        .sessions
        .create(key, &address, browser.unwrap_or_default())?;
    let cookie = console.set_cookie(&secret, IDLE_MS / 1000);
    let body = current_of(&console, &session, &caller);
    Ok(([(SET_COOKIE, cookie)], Json(body)).into_response())
}

/// `GET /session`: describes the session, and extends the lifetime of its cookie.
pub(crate) async fn current(
    State(console): State<Console>,
    Extension(session): Extension<Session>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let secret = console.cookie(&headers)?.unwrap_or_default();
    let cookie = console.set_cookie(secret, IDLE_MS / 1000);
    let body = current_of(&console, &session, &caller);
    Ok(([(SET_COOKIE, cookie)], Json(body)).into_response())
}

/// `DELETE /session`: ends the session of the request.
pub(crate) async fn sign_out(
    State(console): State<Console>,
    Extension(session): Extension<Session>,
) -> Result<Response, Refusal> {
    console.sessions.remove(&session.id)?;
    console.sessions_changed.send_replace(());
    let cookie = console.set_cookie("", 0);
    Ok((StatusCode::NO_CONTENT, [(SET_COOKIE, cookie)]).into_response())
}

/// `GET /sessions`: lists the sessions of the caller's key, for administrators all sessions.
pub(crate) async fn list(
    State(console): State<Console>,
    Extension(session): Extension<Session>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Vec<ShownSession>>, Refusal> {
    let key = visible_key(&caller);
    let sessions = console.sessions.list(key.as_deref())?;
    let shown = |listed: Session| ShownSession {
        is_current: listed.id == session.id,
        id: listed.id,
        key_id: listed.key.map(|(id, _)| id),
        created_ms: listed.created_ms,
        used_ms: listed.used_ms,
        address: listed.address,
        browser: listed.browser,
    };
    Ok(Json(sessions.into_iter().map(shown).collect()))
}

/// `DELETE /sessions/{id}`: ends a session that the caller can list.
pub(crate) async fn end(
    State(console): State<Console>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<StatusCode, Refusal> {
    let key = visible_key(&caller);
    let sessions = console.sessions.list(key.as_deref())?;
    let is_visible = sessions.iter().any(|session| session.id == id);
    if !is_visible || !console.sessions.remove(&id)? {
        let message = "the session does not exist or has ended";
        return Err(Refusal::new(
            StatusCode::NOT_FOUND,
            "session_not_found",
            message,
        ));
    }
    console.sessions_changed.send_replace(());
    Ok(StatusCode::NO_CONTENT)
}

/// Returns the key to whose sessions the caller is restricted. `None` for administrators.
fn visible_key(caller: &Caller) -> Option<String> {
    let key = caller.key().filter(|_| !caller.is_admin());
    key.map(|key| key.id.clone())
}
