//! Events on a real host: they survive the death of the daemon, and `jiffy events` follows them.

use crate::support::test_home::TestHome;
use crate::support::{read_until, wait_for};
use jiffy_test_attributes::jiffy_test;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;

/// Returns the types of printed events.
fn types(lines: &str) -> Vec<String> {
    let event = |line: &str| -> Value { serde_json::from_str(line).unwrap() };
    let events = lines.lines().map(event);
    events
        .map(|event| event["type"].as_str().unwrap().to_owned())
        .collect()
}

#[jiffy_test]
fn events_survive_a_killed_daemon_and_are_followed_over_its_restart() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "--name", "web"]);
    let mut following = test_home.begin(&["events", "--follow", "--json", "--sandbox", "web"]);
    let mut lines = BufReader::new(following.stdout.take().unwrap()).lines();
    let mut next = || {
        let line = lines.next().unwrap().unwrap();
        types(&line).remove(0)
    };
    assert_eq!(next(), "sandbox.created");
    assert_eq!(next(), "sandbox.ready");
    test_home.kill_daemon();
    // The next command starts another daemon.
    test_home.ok(&["pause", &id]);
    assert_eq!(next(), "sandbox.paused");
    test_home.ok(&["kill", &id]);
    assert_eq!(next(), "sandbox.killed");
    following.kill().unwrap();
    following.wait().unwrap();
    let printed = test_home.ok(&["events", "--json", "--sandbox", &id]);
    let all = [
        "sandbox.created",
        "sandbox.ready",
        "sandbox.paused",
        "sandbox.killed",
    ];
    assert_eq!(types(&printed), all);
    // `jiffy key` changes the keys without the daemon, which notices the change.
    test_home.ok(&["key", "create", "--name", "ci"]);
    wait_for("the event of the key", || {
        let printed = test_home.ok(&["events", "--json", "--type", "key.created"]);
        (!printed.is_empty()).then_some(())
    });
}

/// Receives one delivery of a webhook and answers 200. Returns its head and its body.
fn delivery(listener: &TcpListener) -> (String, Value) {
    let (mut stream, _) = listener.accept().unwrap();
    let mut request = read_until(&mut stream, "\r\n\r\n");
    let length = request.split("content-length: ").nth(1).unwrap();
    let length: usize = length.split("\r\n").next().unwrap().parse().unwrap();
    let head = request.find("\r\n\r\n").unwrap() + 4;
    while request.len() < head + length {
        let mut more = [0; 4096];
        let read = stream.read(&mut more).unwrap();
        request += std::str::from_utf8(&more[..read]).unwrap();
    }
    stream
        .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        .unwrap();
    let body = serde_json::from_str(&request[head..]).unwrap();
    (request[..head].to_owned(), body)
}

#[jiffy_test]
fn webhooks_reach_no_internal_address_unless_allowed_and_survive_a_killed_daemon() {
    let test_home = TestHome::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/events", listener.local_addr().unwrap());
    let create = [
        "webhook", "create", &url, "--event", "created", "--event", "killed",
    ];
    let created = test_home.call_with(&create, b"secret\n");
    assert_eq!(created.code, Some(0), "{}", created.stderr);
    let webhook = created.stdout.trim().to_owned();
    let sandbox = test_home.ok(&["create"]);
    let pending = wait_for("a failed attempt", || {
        let pending = test_home.json(&["webhook", "deliveries", &webhook]);
        let first = pending.get(0)?.clone();
        first["error"].is_string().then_some(first)
    });
    let error = pending["error"].as_str().unwrap();
    assert!(error.contains("public internet"), "{error}");
    assert_eq!(pending["sandboxID"], sandbox.as_str());
    test_home.kill_daemon();
    let mut daemon = test_home.serve(&["--allow-private", "127.0.0.0/8"]);
    let (head, body) = delivery(&listener);
    assert!(head.starts_with("POST /events HTTP/1.1\r\n"), "{head}");
    assert!(head.contains(&format!("e2b-webhook-id: {webhook}\r\n")));
    assert!(head.contains("e2b-signature: "));
    assert_eq!(body["type"], "sandbox.lifecycle.created");
    assert_eq!(body["sandboxId"], sandbox.as_str());
    test_home.ok(&["kill", &sandbox]);
    assert_eq!(delivery(&listener).1["type"], "sandbox.lifecycle.killed");
    test_home.ok(&["webhook", "rm", &webhook]);
    assert_eq!(test_home.ok(&["webhook", "ls", "--json"]), "[]");
    test_home.ok(&["serve", "--stop"]);
    assert!(daemon.wait().unwrap().success());
}
