//! Signed links to files, which lead to the sandbox that signed them without naming it.

use crate::support;

use axum::Router;
use axum::routing::get;
use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use hyper::Request;
use sha2::{Digest, Sha256};
use support::client::{Body, body, send_request};
use support::guest::Guests;
use support::{ID, Setup};

/// Returns a request for `/etc/hosts` with a link signed with `token`.
fn link(token: &str) -> Request<Body> {
    let digest = Sha256::digest(format!("/etc/hosts:read::{token}"));
    let signature = STANDARD_NO_PAD.encode(digest).replace('+', "%2B");
    let uri = format!("/files?path=/etc/hosts&signature=v1_{signature}");
    let request = Request::builder().uri(uri).header("host", "127.0.0.1");
    request.body(body("")).unwrap()
}

#[tokio::test]
async fn a_link_reaches_only_the_sandbox_that_signed_it() {
    let agent = Router::new().fallback(get(|request: axum::extract::Request| async move {
        format!("the agent saw {}", request.uri())
    }));
    let guests = Guests::one(ID, 49_983, agent);
    let setup = Setup::new(&guests).await;
    // The token of the agent: see `Guests`.
    let token: String = ID.chars().rev().collect();
    let (status, text) = send_request(setup.address, link(&token)).await;
    assert_eq!(status, 200);
    assert!(
        text.starts_with("the agent saw /files?path=/etc/hosts&signature=v1_"),
        "{text}"
    );
    let opened = guests.opened_count();
    let (status, text) = send_request(setup.address, link("unknown-token")).await;
    assert_eq!(status, 401);
    assert!(text.contains("\"code\":401"), "{text}");
    assert_eq!(guests.opened_count(), opened);
}

#[tokio::test]
async fn without_a_signature_files_go_to_the_control_plane() {
    let setup = Setup::new(&Guests::default()).await;
    let request = Request::builder().uri("/files?path=/a");
    let request = request.header("host", "localhost");
    let (status, text) = send_request(setup.address, request.body(body("")).unwrap()).await;
    assert_eq!(status, 200);
    assert!(text.starts_with("GET /files"), "{text}");
}
