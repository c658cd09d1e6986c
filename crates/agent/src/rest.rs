//! Plain HTTP requests to the agent (`/files`, `/archive`, `/metrics` and others), in addition to
//! the Connect services. Clients send them through the gateway, and the host directly.

pub mod archive;
pub mod changes;
pub mod commands;
pub mod compose;
pub mod disk_freeze;
pub mod download;
pub mod error;
pub mod file_query;
pub mod free_memory;
pub mod hashes;
pub mod init;
pub mod metrics;
pub mod processes;
pub mod range;
pub mod restart;
pub mod signature;
pub mod tree;
pub mod upload;

use crate::body::{ReplyBody, json};
use crate::state::Agent;
use error::RestError;
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};
use std::rc::Rc;

/// Handles a request that is not an RPC.
pub async fn answer(agent: &Rc<Agent>, request: Request<&mut Incoming>) -> Response<ReplyBody> {
    let result = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/health") => Ok(no_content()),
        (&Method::GET | &Method::HEAD, "/files") => download::answer(agent, &request).await,
        (&Method::POST, "/files") => upload::answer(agent, request).await,
        (&Method::POST, "/files/compose") => compose::answer(agent, request).await,
        (&Method::GET, "/archive") => archive::send::answer(agent, &request).await,
        (&Method::PUT, "/archive") => archive::receive::answer(agent, request).await,
        (&Method::GET, "/layer") => archive::layer::answer(agent, &request).await,
        (&Method::GET, "/changes") => changes::answer(agent, &request).await,
        (&Method::POST, "/changes/hashes") => hashes::answer(agent, request).await,
        (&Method::GET, "/tree") => tree::list(agent, &request).await,
        (&Method::POST, "/tree") => tree::send(agent, request).await,
        (&Method::POST, "/tree/remove") => tree::remove(agent, request).await,
        (&Method::POST, "/restart") => restart::answer(agent, &request).await,
        (&Method::POST, "/free-memory/report") => free_memory::answer(agent, &request).await,
        (&Method::POST, "/disk/freeze") => disk_freeze::freeze(agent, &request).await,
        (&Method::POST, "/disk/thaw") => disk_freeze::thaw(agent, &request).await,
        (&Method::GET, "/metrics") => metrics::answer(agent).await,
        (&Method::GET, "/commands") => Ok(commands::answer(agent)),
        (&Method::GET, "/processes") => processes::list(agent, &request).await,
        (&Method::POST, "/processes/signal") => processes::signal(agent, &request).await,
        (&Method::GET, "/envs") => Ok(json(&agent.settings.borrow().env)),
        (&Method::POST, "/init") => init::answer(agent, request).await,
        (
            _,
            "/health"
            | "/files"
            | "/files/compose"
            | "/archive"
            | "/layer"
            | "/changes"
            | "/changes/hashes"
            | "/tree"
            | "/tree/remove"
            | "/restart"
            | "/free-memory/report"
            | "/disk/freeze"
            | "/disk/thaw"
            | "/metrics"
            | "/commands"
            | "/processes"
            | "/processes/signal"
            | "/envs"
            | "/init",
        ) => Err(RestError::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "the method is not allowed for this path",
        )),
        (_, path) => Err(RestError::new(
            StatusCode::NOT_FOUND,
            format!("no such path: {path}"),
        )),
    };
    result.unwrap_or_else(|e| e.response())
}

/// Rejects callers that are neither root nor authenticated by a token.
async fn only_root(agent: &Agent, username: Option<&str>, what: &str) -> Result<(), RestError> {
    // If the sandbox has a token, the request was already authenticated.
    let open = agent.settings.borrow().access_token.is_none();
    if open && agent.find_user::<RestError>(username).await?.uid != 0 {
        return Err(RestError::new(
            StatusCode::FORBIDDEN,
            format!("{what} only allowed for root: add username=root"),
        ));
    }
    Ok(())
}

/// Returns a successful response without a body.
fn no_content() -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}
