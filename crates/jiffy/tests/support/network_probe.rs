//! Daemons in a lab, sandboxes with network rules, and the network access of their guests.

use super::LIMIT;
use super::lab::{Lab, output, with_lab, with_lab6};
use super::test_home::TestHome;
use super::wait_for;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

/// Functions for programs in guests.
pub const PRELUDE: &str = r#"
import socket, sys, time
def tcp(host, port=80, patience=10):
    try:
        with socket.create_connection((host, port), patience) as s:
            return s.recv(100).decode().split()[0]
    except OSError as e:
        return type(e).__name__
"#;

/// Returns the output of a Python program in a guest.
pub fn python(test_home: &TestHome, id: &str, program: &str) -> String {
    test_home.ok(&[
        "exec",
        id,
        "--",
        "python3",
        "-c",
        &format!("{PRELUDE}\n{program}"),
    ])
}

/// Like [`python`], as root.
pub fn root_python(test_home: &TestHome, id: &str, program: &str) -> String {
    let program = format!("{PRELUDE}\n{program}");
    test_home.ok(&[
        "exec", "--user", "root", id, "--", "python3", "-c", &program,
    ])
}

/// Returns the answer at TCP port 80 of `host` in a guest: name of the server, or of the error.
pub fn reach(test_home: &TestHome, id: &str, host: &str) -> String {
    python(test_home, id, &format!("print(tcp({host:?}))"))
}

/// Calls the control plane. Returns status and body.
pub fn call(test_home: &TestHome, method: &str, path: &str, body: &Value) -> (u16, String) {
    let mut stream = UnixStream::connect(test_home.dir.path().join("run/jiffy.sock")).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let body = body.to_string();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (
        head.split(' ').nth(1).unwrap().parse().unwrap(),
        body.to_owned(),
    )
}

/// Creates a sandbox with network rules.
pub fn create(test_home: &TestHome, rules: Value) -> String {
    let mut body = json!({ "templateID": "base", "timeout": 600 });
    body.as_object_mut()
        .unwrap()
        .extend(rules.as_object().unwrap().clone());
    let (status, answer) = call(test_home, "POST", "/sandboxes", &body);
    assert_eq!(status, 201, "{answer}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    answer["sandboxID"].as_str().unwrap().to_owned()
}

/// Runs `work` with a data directory whose daemon runs in a lab, started with `options`.
pub fn networked(options: &[&str], work: impl FnOnce(&TestHome, &Lab) + Send) {
    with_lab(|lab| in_lab(options, |test_home| work(test_home, lab)));
}

/// Like [`networked`], on a host with IPv6.
pub fn networked6(options: &[&str], work: impl FnOnce(&TestHome, &Lab) + Send) {
    with_lab6(|lab| in_lab(options, |test_home| work(test_home, lab)));
}

/// Runs `work` with a daemon whose sandboxes have a network. Afterwards, kills the sandboxes and
/// checks that no network remains.
fn in_lab(options: &[&str], work: impl FnOnce(&TestHome)) {
    let test_home = TestHome::new();
    let mut daemon = test_home.serve(&[&["--network", "on", "--warm-pool", "0"], options].concat());
    work(&test_home);
    test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
    daemon.wait().unwrap();
    drop(test_home);
    assert_clean();
}

/// Asserts that no resources of Jiffy remain in the lab's host.
pub fn assert_clean() {
    wait_for("the last slot to be removed", || {
        (!output("ip", &["link"]).contains("jf")).then_some(())
    });
    assert_eq!(output("nft", &["list", "ruleset"]), "");
    for version in ["-4", "-6"] {
        assert!(!output("ip", &[version, "route"]).contains("blackhole"));
    }
    for switch in [
        "ipv4/ip_forward",
        "ipv6/conf/all/forwarding",
        "ipv6/conf/eth0/force_forwarding",
    ] {
        // Not every kernel has the last setting.
        if let Ok(value) = std::fs::read_to_string(format!("/proc/sys/net/{switch}")) {
            assert_eq!(value.trim(), "0", "{switch}");
        }
    }
}
