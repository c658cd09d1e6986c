//! HTTP server of the agent: serves the connections of the host, authenticates requests, and routes
//! them to the services.

use crate::body::{ReplyBody, json};
use crate::rpc::request::{self, CallInfo};
use crate::rpc::{RpcCode, RpcError, frame};
use crate::settings::constant_time_eq;
use crate::state::Agent;
use crate::{filesystem, process, rest};
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::rc::Rc;
use tokio::net::UnixStream;

/// Serves one connection until it closes.
pub async fn serve(agent: Rc<Agent>, stream: UnixStream) {
    let service = service_fn(|request: Request<Incoming>| {
        let agent = Rc::clone(&agent);
        async move { Ok::<_, Infallible>(answer_whole(&agent, request).await) }
    });
    // Ignore the error: the client may close the connection at any time.
    let _ = http1::Builder::new()
        .max_buf_size(128 * 1024)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

/// Answers a request and reads the rest of its body if the response is complete.
async fn answer_whole(agent: &Rc<Agent>, request: Request<Incoming>) -> Response<ReplyBody> {
    let (head, mut body) = request.into_parts();
    let response = answer(agent, Request::from_parts(head, &mut body)).await;
    agent.hooks.check();
    // A streamed response may depend on the rest of the body, so only complete responses qualify.
    if matches!(response.body(), ReplyBody::Whole(_)) && !body.is_end_stream() {
        request::discard(&mut body).await;
    }
    response
}

/// Checks the access token, and passes the request to the service of its path.
async fn answer(agent: &Rc<Agent>, request: Request<&mut Incoming>) -> Response<ReplyBody> {
    if !has_access(agent, &request) {
        return RpcError::new(RpcCode::Unauthenticated, "missing or wrong X-Access-Token")
            .response();
    }
    let path = request.uri().path();
    if let Some(method) = path.strip_prefix("/process.Process/") {
        let method = method.to_owned();
        process_call(agent, &method, request).await
    } else if let Some(method) = path.strip_prefix("/filesystem.Filesystem/") {
        let method = method.to_owned();
        filesystem_call(agent, &method, request).await
    } else {
        rest::answer(agent, request).await
    }
}

/// Checks the token. If the sandbox has a token, all requests require it, with three exceptions:
/// - the health check;
/// - the files, whose handlers check the token themselves and also accept a signature;
/// - `/init`, which only the host can reach (`jiffy_proto::agent::HOST_ONLY_PATHS`).
fn has_access(agent: &Agent, request: &Request<&mut Incoming>) -> bool {
    match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/health" | "/files")
        | (&Method::POST, "/files" | "/init") => true,
        _ => has_valid_token(agent, request.headers()),
    }
}

/// Returns true if the request has the sandbox's token, or if the sandbox has no token.
pub fn has_valid_token(agent: &Agent, headers: &HeaderMap) -> bool {
    match &agent.settings.borrow().access_token {
        None => true,
        Some(token) => headers
            .get("x-access-token")
            .and_then(|v| v.to_str().ok())
            .is_some_and(|given| constant_time_eq(given, token)),
    }
}

/// Kind of a call, which determines the format of its response.
enum CallKind {
    /// One message in each direction.
    Unary,
    /// Frames of messages.
    Stream,
}

/// Checks the method and the content type of a call.
fn admit(request: &Request<&mut Incoming>, kind: CallKind) -> Result<(), Box<Response<ReplyBody>>> {
    let reject = |status| {
        let mut response = Response::new(ReplyBody::empty());
        *response.status_mut() = status;
        Err(Box::new(response))
    };
    if request.method() != Method::POST {
        return reject(StatusCode::METHOD_NOT_ALLOWED);
    }
    let given = request
        .headers()
        .get(header::CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.split(';').next())
        .map(str::trim);
    match (kind, given) {
        (CallKind::Unary, None | Some("application/json"))
        | (CallKind::Stream, Some("application/connect+json")) => Ok(()),
        _ => reject(StatusCode::UNSUPPORTED_MEDIA_TYPE),
    }
}

/// Returns the response to a unary call.
fn unary<T: serde::Serialize>(result: Result<T, RpcError>) -> Response<ReplyBody> {
    match result {
        Ok(value) => json(&value),
        Err(e) => e.response(),
    }
}

/// Returns the response to a streaming call.
fn streaming(result: Result<ReplyBody, RpcError>) -> Response<ReplyBody> {
    // As the Connect protocol requires, a stream reports its error in the last frame, with status
    // 200.
    let reply = result.unwrap_or_else(|e| ReplyBody::whole(frame::end(Some(&e))));
    let mut response = Response::new(reply);
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/connect+json"),
    );
    response
}

/// Returns the response to a call of a method that does not exist.
fn unknown_method(service: &str, method: &str) -> Response<ReplyBody> {
    RpcError::new(
        RpcCode::Unimplemented,
        format!("{service} has no method '{method}'"),
    )
    .response()
}

/// Empty message.
#[derive(serde::Serialize)]
struct EmptyMessage {}

/// Answers a call of the service `process.Process`.
async fn process_call(
    agent: &Rc<Agent>,
    method: &str,
    request: Request<&mut Incoming>,
) -> Response<ReplyBody> {
    use process::service;
    let kind = match method {
        "Start" | "Connect" | "StreamInput" => CallKind::Stream,
        "List" | "SendSignal" | "SendInput" | "CloseStdin" | "Update" => CallKind::Unary,
        _ => return unknown_method("process.Process", method),
    };
    if let Err(rejection) = admit(&request, kind) {
        return *rejection;
    }
    let call = CallInfo::of(request.headers());
    let body = request.into_body();
    let empty_message = |()| EmptyMessage {};
    match method {
        "Start" => streaming(match call {
            Ok(call) => service::start(agent, call, body).await,
            Err(e) => Err(e),
        }),
        "Connect" => streaming(match call {
            Ok(call) => service::connect(agent, call, body).await,
            Err(e) => Err(e),
        }),
        "StreamInput" => streaming(service::stream_input(agent, body).await.map(|()| {
            ReplyBody::whole([&frame::message(&EmptyMessage {})[..], &frame::end(None)].concat())
        })),
        "List" => unary(
            request::unary::<serde::de::IgnoredAny>(body)
                .await
                .map(|_| service::list(agent)),
        ),
        "SendSignal" => unary(
            request::unary(body)
                .await
                .and_then(|r| service::send_signal(agent, &r))
                .map(empty_message),
        ),
        "SendInput" => unary(match request::unary(body).await {
            Ok(r) => service::send_input(agent, r).await.map(empty_message),
            Err(e) => Err(e),
        }),
        "CloseStdin" => unary(match request::unary(body).await {
            Ok(r) => service::close_stdin(agent, r).await.map(empty_message),
            Err(e) => Err(e),
        }),
        // "Update": other methods were rejected above.
        _ => unary(match request::unary(body).await {
            Ok(r) => service::update(agent, r).await.map(empty_message),
            Err(e) => Err(e),
        }),
    }
}

/// Answers a call of the service `filesystem.Filesystem`.
async fn filesystem_call(
    agent: &Rc<Agent>,
    method: &str,
    request: Request<&mut Incoming>,
) -> Response<ReplyBody> {
    use filesystem::service;
    let kind = match method {
        "WatchDir" => CallKind::Stream,
        "Stat" | "ListDir" | "MakeDir" | "Remove" | "Move" | "CreateWatcher"
        | "GetWatcherEvents" | "RemoveWatcher" => CallKind::Unary,
        _ => return unknown_method("filesystem.Filesystem", method),
    };
    if let Err(rejection) = admit(&request, kind) {
        return *rejection;
    }
    let call = CallInfo::of(request.headers());
    let body = request.into_body();
    if method == "WatchDir" {
        return streaming(match call {
            Ok(call) => service::watch_dir(agent, call, body).await,
            Err(e) => Err(e),
        });
    }
    let answered = match call {
        Ok(call) => service::unary(agent, method, call, body).await,
        Err(e) => Err(e),
    };
    answered.unwrap_or_else(|e| e.response())
}
