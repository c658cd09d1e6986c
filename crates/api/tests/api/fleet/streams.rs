//! Streams to ports of sandboxes on other members, and leases. A lease removes a sandbox when the
//! connection of its client ends.

use super::lab::Lab;
use crate::support::TestCaller;
use jiffy_api::Scope;
use serde_json::json;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Timeout of reads and of calls.
const LIMIT: Duration = Duration::from_secs(30);

/// Requests a stream to a port. Returns the connection and the head of the response.
async fn open(at: SocketAddr, caller: &TestCaller, path: &str) -> (TcpStream, String) {
    upgrade(at, caller, &format!("GET {path}"), "tcp").await
}

/// Requests an upgrade. Returns the connection and the head of the response.
async fn upgrade(
    at: SocketAddr,
    caller: &TestCaller,
    call: &str,
    protocol: &str,
) -> (TcpStream, String) {
    let TestCaller::Key(key) = caller else {
        unreachable!("a key opens the stream")
    };
    let mut stream = TcpStream::connect(at).await.unwrap();
    let request = format!(
        "{call} HTTP/1.1\r\nhost: jiffy\r\nx-api-key: {key}\r\nconnection: upgrade\r\nupgrade: {protocol}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(timeout(LIMIT, stream.read_u8()).await.unwrap().unwrap());
    }
    (stream, String::from_utf8(head).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_are_reached_through_every_member_until_key_or_host_is_lost() {
    let lab = Lab::start(3).await;
    let owner = (1..=3).find(|&host| !lab.is_coordinator(host)).unwrap();
    let other = (1..=3).find(|&host| host != owner).unwrap();
    let (key, new_key) = lab.key(Scope::Create);
    let (lasting, _) = lab.key(Scope::Admin);
    let (foreign, _) = lab.key(Scope::Create);
    let (reader, _) = lab.key(Scope::Read);
    let body = json!({ "templateID": "base", "name": "web" });
    let made = lab.call(owner, &key, "POST", "/sandboxes", body).await;
    let id = made.expect(201).id();
    lab.located(&id).await;
    for host in 1..=3 {
        let at = lab.listen(host).await;
        for target in [&*id, "web"] {
            let path = format!("/sandboxes/{target}/ports/8080");
            let (mut stream, head) = open(at, &key, &path).await;
            assert!(head.starts_with("HTTP/1.1 101"), "{host}: {head}");
            // Data in both directions, and the end of one direction.
            let sent = vec![7; 100_000];
            let (mut reading, mut writing) = stream.split();
            let mut received = Vec::new();
            let exchange = async {
                let write = async {
                    writing.write_all(&sent).await.unwrap();
                    writing.shutdown().await.unwrap();
                };
                let (_, read) = tokio::join!(write, reading.read_to_end(&mut received));
                read.unwrap();
            };
            timeout(LIMIT, exchange).await.unwrap();
            assert_eq!(received, sent);
        }
        let path = format!("/sandboxes/{id}/ports/");
        // Port 9 is closed, port 0 is invalid, and port 49983 is the agent.
        for (caller, port, status) in [
            (&key, "9", "502"),
            (&key, "0", "400"),
            (&key, "49983", "403"),
            (&foreign, "8080", "404"),
            (&reader, "8080", "403"),
        ] {
            let (_, head) = open(at, caller, &format!("{path}{port}")).await;
            assert!(
                head.starts_with(&format!("HTTP/1.1 {status}")),
                "{port}: {head}"
            );
        }
    }
    let at = lab.listen(other).await;
    let path = format!("/sandboxes/{id}/ports/8080");
    let (mut revoked, _) = open(at, &key, &path).await;
    let (mut lost, head) = open(at, &lasting, &path).await;
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    let ended = async |stream: &mut TcpStream| {
        let read = timeout(LIMIT, stream.read(&mut [0; 16])).await.unwrap();
        assert!(!matches!(read, Ok(1..)), "{read:?}");
    };
    lab.revoke(&new_key);
    ended(&mut revoked).await;
    lost.write_all(b"x").await.unwrap();
    assert_eq!(timeout(LIMIT, lost.read_u8()).await.unwrap().unwrap(), b'x');
    lab.freeze(owner);
    ended(&mut lost).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_through_another_member_removes_the_sandbox_when_it_ends() {
    let lab = Lab::start(2).await;
    let (key, _) = lab.key(Scope::Create);
    let body = json!({ "templateID": "base" });
    let made = lab.call(1, &key, "POST", "/sandboxes", body).await;
    let id = made.expect(201).id();
    let other = (1..=2).find(|&host| !lab.has(host, &id)).unwrap();
    let owner = 3 - other;
    lab.located(&id).await;
    let at = lab.listen(other).await;
    let call = format!("POST /sandboxes/{id}/lease");
    // A lease requires the protocol `lease`.
    let (_, head) = upgrade(at, &key, &call, "tcp").await;
    assert!(head.starts_with("HTTP/1.1 426"), "{head}");
    let (mut lease, head) = upgrade(at, &key, &call, "lease").await;
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    lease.write_all(b"x").await.unwrap();
    assert!(lab.has(owner, &id));
    drop(lease);
    let removed = async {
        while lab.has(owner, &id) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(LIMIT, removed).await.unwrap();
}
