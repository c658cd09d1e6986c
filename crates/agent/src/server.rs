//! Connections, access and routing.

use crate::body::Reply;
use crate::rpc::request::{self, CallInfo};
use crate::rpc::{Code, RpcError, frame};
use crate::settings::same_secret;
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
    // A connection that breaks is the client's business.
    let _ = http1::Builder::new()
        .max_buf_size(128 * 1024)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

async fn answer_whole(agent: &Rc<Agent>, request: Request<Incoming>) -> Response<Reply> {
    let (head, mut body) = request.into_parts();
    let response = answer(agent, Request::from_parts(head, &mut body)).await;
    if matches!(response.body(), Reply::Whole(_)) && !body.is_end_stream() {
        request::discard(&mut body).await;
    }
    response
}

async fn answer(agent: &Rc<Agent>, request: Request<&mut Incoming>) -> Response<Reply> {
    if !has_access(agent, &request) {
        return RpcError::new(Code::Unauthenticated, "missing or wrong X-Access-Token").response();
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

/// With a token in force everything needs it but the probe, the files (which take a signature instead and check
/// for themselves) and what only the host can reach.
fn has_access(agent: &Agent, request: &Request<&mut Incoming>) -> bool {
    match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/health" | "/files")
        | (&Method::POST, "/files" | "/init") => true,
        _ => token_fits(agent, request.headers()),
    }
}

/// Whether the request carries the sandbox's token, if it has one.
pub fn token_fits(agent: &Agent, headers: &HeaderMap) -> bool {
    match &agent.settings.borrow().access_token {
        None => true,
        Some(token) => headers
            .get("x-access-token")
            .and_then(|v| v.to_str().ok())
            .is_some_and(|given| same_secret(given, token)),
    }
}

enum Kind {
    Unary,
    Stream,
}

/// Checks method and content type of a call.
fn admit(request: &Request<&mut Incoming>, kind: Kind) -> Result<(), Box<Response<Reply>>> {
    let refuse = |status| {
        let mut response = Response::new(Reply::empty());
        *response.status_mut() = status;
        Err(Box::new(response))
    };
    if request.method() != Method::POST {
        return refuse(StatusCode::METHOD_NOT_ALLOWED);
    }
    let given = request
        .headers()
        .get(header::CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.split(';').next())
        .map(str::trim);
    match (kind, given) {
        (Kind::Unary, None | Some("application/json"))
        | (Kind::Stream, Some("application/connect+json")) => Ok(()),
        _ => refuse(StatusCode::UNSUPPORTED_MEDIA_TYPE),
    }
}

/// JSON with status 200.
pub fn json(value: &impl serde::Serialize) -> Response<Reply> {
    let mut response = Response::new(Reply::whole(serde_json::to_vec(value).unwrap_or_default()));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/json"),
    );
    response
}

fn unary<T: serde::Serialize>(result: Result<T, RpcError>) -> Response<Reply> {
    match result {
        Ok(value) => json(&value),
        Err(e) => e.response(),
    }
}

fn streaming(result: Result<Reply, RpcError>) -> Response<Reply> {
    let reply = result.unwrap_or_else(|e| Reply::whole(frame::end(Some(&e))));
    let mut response = Response::new(reply);
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/connect+json"),
    );
    response
}

fn unknown(service: &str, method: &str) -> Response<Reply> {
    RpcError::new(
        Code::Unimplemented,
        format!("{service} has no method '{method}'"),
    )
    .response()
}

/// The empty message.
#[derive(serde::Serialize)]
struct Nothing {}

async fn process_call(
    agent: &Rc<Agent>,
    method: &str,
    request: Request<&mut Incoming>,
) -> Response<Reply> {
    use process::service;
    let kind = match method {
        "Start" | "Connect" | "StreamInput" => Kind::Stream,
        "List" | "SendSignal" | "SendInput" | "CloseStdin" | "Update" => Kind::Unary,
        _ => return unknown("process.Process", method),
    };
    if let Err(refusal) = admit(&request, kind) {
        return *refusal;
    }
    let call = CallInfo::of(request.headers());
    let body = request.into_body();
    let nothing = |()| Nothing {};
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
            Reply::whole([&frame::message(&Nothing {})[..], &frame::end(None)].concat())
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
                .map(nothing),
        ),
        "SendInput" => unary(match request::unary(body).await {
            Ok(r) => service::send_input(agent, r).await.map(nothing),
            Err(e) => Err(e),
        }),
        "CloseStdin" => unary(match request::unary(body).await {
            Ok(r) => service::close_stdin(agent, r).await.map(nothing),
            Err(e) => Err(e),
        }),
        _ => unary(match request::unary(body).await {
            Ok(r) => service::update(agent, r).await.map(nothing),
            Err(e) => Err(e),
        }),
    }
}

async fn filesystem_call(
    agent: &Rc<Agent>,
    method: &str,
    request: Request<&mut Incoming>,
) -> Response<Reply> {
    use filesystem::service;
    let kind = match method {
        "WatchDir" => Kind::Stream,
        "Stat" | "ListDir" | "MakeDir" | "Remove" | "Move" | "CreateWatcher"
        | "GetWatcherEvents" | "RemoveWatcher" => Kind::Unary,
        _ => return unknown("filesystem.Filesystem", method),
    };
    if let Err(refusal) = admit(&request, kind) {
        return *refusal;
    }
    let call = CallInfo::of(request.headers());
    let body = request.into_body();
    if method == "WatchDir" {
        return streaming(match call {
            Ok(call) => service::watch_dir(agent, call, body).await,
            Err(e) => Err(e),
        });
    }
    unary(match call {
        Ok(call) => service::unary(agent, method, call, body).await,
        Err(e) => Err(e),
    })
}
