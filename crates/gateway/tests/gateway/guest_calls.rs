//! Record of commands and file paths of calls to agents.

use crate::support;

use axum::http::StatusCode;
use axum::response::IntoResponse;
use hyper::Request;
use jiffy_gateway::{Gateway, GuestCall, GuestCallLog, LinkSigner, SandboxAccess};
use std::sync::{Arc, Mutex};
use support::client::{self, Body};
use support::guest::{Guests, answering};
use support::{ID, KEY, Setup, config, control_plane};

/// Second sandbox.
const OTHER: &str = "iother0123456789abcd";
/// Port of the agent's API.
const AGENT_PORT: u16 = 49_983;

/// Recorded calls of agents.
#[derive(Debug, Clone, Default)]
struct Calls(Arc<Mutex<Vec<GuestCall>>>);

impl GuestCallLog for Calls {
    fn record(&self, call: GuestCall) {
        self.0.lock().unwrap().push(call);
    }
}

/// Returns the access settings of a sandbox that belongs to a key.
fn owned(owner: &str) -> SandboxAccess {
    SandboxAccess {
        owner: Some(owner.to_owned()),
        ..SandboxAccess::default()
    }
}

/// Starts a gateway that records calls of agents in `calls`.
fn recorded(guests: &Guests, calls: Option<Arc<dyn GuestCallLog>>) -> impl Future<Output = Setup> {
    let signer = Some(LinkSigner::new(&KEY));
    let control = control_plane();
    let gateway = Gateway::in_fleet(config(), guests.clone(), control, signer, None, calls);
    Setup::of(gateway, None)
}

/// Returns the body of a streaming call: a byte of flags, the length of the message, and the
/// message.
fn start(message: &str) -> Body {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    client::body([&[0], &length[..], message.as_bytes()].concat())
}

/// Returns two sandboxes with agents. The agent of `OTHER` answers 404 to all requests.
fn agents() -> Guests {
    let guests = Guests::one(ID, AGENT_PORT, answering(|| StatusCode::OK.into_response()));
    guests.add(ID, owned("alice"));
    guests.add(OTHER, owned("bob"));
    let missing = answering(|| StatusCode::NOT_FOUND.into_response());
    guests.web(OTHER, AGENT_PORT, missing);
    guests
}

/// Sends calls to agents that are recorded, and requests that are not.
async fn make_calls(setup: &Setup) {
    let message = r#"{"process":{"cmd":"sh","args":["-c","ls"],"envs":{"TOKEN":"hidden"}}}"#;
    let request = client::to(AGENT_PORT, "/process.Process/Start").method("POST");
    client::send_request(setup.address, request.body(start(message)).unwrap()).await;
    let request = client::to(AGENT_PORT, "/files?path=%2Fetc%2Fa%0Ab").method("POST");
    let request = request.body(client::body("content")).unwrap();
    client::send_request(setup.address, request).await;
    let request = Request::builder()
        .uri("/files?path=/missing")
        .header("host", "127.0.0.1")
        .header("e2b-sandbox-id", OTHER)
        .header("e2b-sandbox-port", AGENT_PORT)
        .body(client::body(""))
        .unwrap();
    client::send_request(setup.address, request).await;
    // Input of a process, and the port of a server, are not recorded.
    let request = client::to(AGENT_PORT, "/process.Process/SendInput").method("POST");
    let request = request.body(client::body("{}")).unwrap();
    client::send_request(setup.address, request).await;
    client::send_request(setup.address, client::get(3000, "/files?path=/x")).await;
}

#[tokio::test]
async fn commands_and_paths_are_recorded_without_environment_and_content() {
    let guests = agents();
    let calls = Calls::default();
    let setup = recorded(&guests, Some(Arc::new(calls.clone()))).await;
    make_calls(&setup).await;
    let calls = calls.0.lock().unwrap().clone();
    let of = |call: &GuestCall| (call.owner.clone().unwrap(), call.call, call.status);
    let expected = [
        ("alice", "POST /process.Process/Start", 200),
        ("alice", "POST /files", 200),
        ("bob", "GET /files", 404),
    ]
    .map(|(owner, call, status)| (owner.to_owned(), call, status));
    assert_eq!(calls.iter().map(of).collect::<Vec<_>>(), expected);
    assert_eq!(calls[0].command.as_deref(), Some("sh -c ls"));
    assert_eq!(calls[1].paths, [r"/etc/a\nb"]);
    assert_eq!(
        (&*calls[2].sandbox, &*calls[2].paths[0]),
        (OTHER, "/missing")
    );
    let text = format!("{calls:?}");
    assert!(
        !text.contains("hidden") && !text.contains("content"),
        "{text}"
    );
}

#[tokio::test]
async fn without_a_log_bodies_are_forwarded_unchanged() {
    let guests = agents();
    let setup = recorded(&guests, None).await;
    make_calls(&setup).await;
}

#[tokio::test]
async fn a_recorded_body_reaches_the_guest_unchanged_and_long_ones_are_marked() {
    let guests = Guests::default();
    guests.add(ID, owned("alice"));
    let echo = axum::Router::new().fallback(|body: axum::body::Body| async { body });
    guests.web(ID, AGENT_PORT, echo);
    let calls = Calls::default();
    let setup = recorded(&guests, Some(Arc::new(calls.clone()))).await;
    // All bytes of the length are ASCII, because the test reads the response as text.
    const LENGTH: usize = 0x0004_7f7f;
    let (first, last) = (r#"{"process":{"envs":{"A":""#, r#""},"cmd":"hidden"}}"#);
    let value = "x".repeat(LENGTH - first.len() - last.len());
    let message = format!("{first}{value}{last}");
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    let sent = [&[0], &length[..], message.as_bytes()].concat();
    let request = client::to(AGENT_PORT, "/process.Process/Start").method("POST");
    let request = request.body(client::body(sent.clone())).unwrap();
    let (status, answer) = client::send_request(setup.address, request).await;
    assert_eq!((status, answer.len()), (200, sent.len()));
    assert_eq!(answer.as_bytes(), sent);
    let calls = calls.0.lock().unwrap().clone();
    // The command is behind a value that is too long, so the record marks it as cut.
    assert_eq!(calls[0].command.as_deref(), Some("…"));
}
