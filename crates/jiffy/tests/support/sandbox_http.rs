//! HTTP to a port of a sandbox, through the daemon.

use super::LIMIT;
use super::test_home::TestHome;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

/// Sends a request to TCP `port` in sandbox `id`. Uses HTTP/1.0, so that the answer ends with the
/// connection and is not chunked.
pub fn send(
    test_home: &TestHome,
    id: &str,
    port: u16,
    method: &str,
    path: &str,
    body: &Value,
) -> UnixStream {
    let body = body.to_string();
    let length = body.len();
    connect_and_send(
        test_home,
        &format!(
            "{method} {path} HTTP/1.0\r\nHost: localhost\r\nE2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: {port}\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        ),
    )
}

/// Sends a request to the daemon. The caller reads the answer.
fn connect_and_send(test_home: &TestHome, request: &str) -> UnixStream {
    let mut stream = UnixStream::connect(test_home.dir.path().join("run/jiffy.sock")).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

/// Reads an answer. Returns status and body.
fn read_response(mut stream: UnixStream) -> (u16, String) {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

/// Sends a request. Returns status and body of the answer.
pub fn ask(
    test_home: &TestHome,
    id: &str,
    port: u16,
    method: &str,
    path: &str,
    body: &Value,
) -> (u16, String) {
    read_response(send(test_home, id, port, method, path, body))
}

/// Sends a request without a body. Returns status and body of the answer.
pub fn get(test_home: &TestHome, id: &str, port: u16, path: &str) -> (u16, String) {
    let request = format!(
        "GET {path} HTTP/1.0\r\nHost: localhost\r\nE2b-Sandbox-Id: {id}\r\n\
         E2b-Sandbox-Port: {port}\r\n\r\n"
    );
    read_response(connect_and_send(test_home, &request))
}

/// Starts an API call.
pub fn begin_call(test_home: &TestHome, method: &str, path: &str, body: &Value) -> UnixStream {
    let body = body.to_string();
    let length = body.len();
    connect_and_send(
        test_home,
        &format!(
            "{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        ),
    )
}

/// Reads the answer to an API call. Returns status, head and body. `None` if the daemon
/// disconnected.
pub fn finish_call(mut stream: UnixStream) -> Option<(u16, String, String)> {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Some((status, head.to_lowercase(), body.to_owned()))
}

/// Returns sandbox `id` as described by the API.
pub fn sandbox(test_home: &TestHome, id: &str) -> Value {
    let request = format!("GET /sandboxes/{id} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    let (status, body) = read_response(connect_and_send(test_home, &request));
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

/// Returns the access token of the agent of sandbox `id`.
pub fn token(test_home: &TestHome, id: &str) -> String {
    let sandbox = sandbox(test_home, id);
    sandbox["envdAccessToken"].as_str().unwrap().to_owned()
}

/// Requests a file from the agent of sandbox `id` with this token.
pub fn read(test_home: &TestHome, id: &str, path: &str, token: Option<&str>) -> (u16, String) {
    let token = token.map_or_else(String::new, |t| format!("X-Access-Token: {t}\r\n"));
    let request = format!(
        "GET /files?path={path} HTTP/1.0\r\nHost: localhost\r\nE2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: 49983\r\n{token}\r\n"
    );
    read_response(connect_and_send(test_home, &request))
}

/// Returns the events of one execution in the code interpreter of sandbox `id`.
pub fn execute(test_home: &TestHome, id: &str, body: &Value) -> Vec<Value> {
    let (status, text) = ask(test_home, id, 49_999, "POST", "/execute", body);
    assert_eq!(status, 200, "{text}");
    let events: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .filter(|event: &Value| event["type"] != "keepalive")
        .collect();
    assert_eq!(events.first().unwrap()["type"], "number_of_executions");
    assert_eq!(events.last().unwrap()["type"], "end_of_execution");
    events
}

/// Returns the text of the main result of `code` in the default context of `language`.
pub fn result(test_home: &TestHome, id: &str, language: &str, code: &str) -> String {
    let events = execute(
        test_home,
        id,
        &json!({ "code": code, "language": language }),
    );
    let main = events.iter().find(|e| e["is_main_result"] == true);
    let main = main.unwrap_or_else(|| panic!("{code}: {events:?}"));
    main["text"].as_str().unwrap().to_owned()
}

/// Returns the standard output of an execution.
pub fn stdout(events: &[Value]) -> String {
    let pieces = events.iter().filter(|e| e["type"] == "stdout");
    pieces.map(|e| e["text"].as_str().unwrap()).collect()
}

/// Requests bytes from the agent of sandbox `id` with its token.
pub fn bytes(test_home: &TestHome, id: &str, path: &str) -> (u16, Vec<u8>) {
    let token = token(test_home, id);
    let mut stream = connect_and_send(
        test_home,
        &format!(
            "GET {path} HTTP/1.0\r\nHost: localhost\r\nE2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: 49983\r\nX-Access-Token: {token}\r\n\r\n"
        ),
    );
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|w| w == b"\r\n\r\n").unwrap();
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer.split_off(end + 4))
}

/// Returns the KVM exits of the guest of sandbox `id` so far. `None` if KVM does not count them.
pub fn exits(test_home: &TestHome, id: &str) -> Option<u64> {
    let request = format!("GET /sandboxes/{id}/process HTTP/1.0\r\nHost: localhost\r\n\r\n");
    let (status, body) = read_response(connect_and_send(test_home, &request));
    assert_eq!(status, 200, "{body}");
    serde_json::from_str::<Value>(&body).unwrap()["exits"].as_u64()
}
