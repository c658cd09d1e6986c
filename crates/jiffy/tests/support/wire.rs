//! HTTP to a port of a sandbox, over the daemon.

use super::LIMIT;
use super::place::Place;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

/// vsock port where the agent joins streams to TCP ports.
const TCP_PORT: u32 = 49_984;

/// A stream to TCP `port` in sandbox `id`.
pub fn tcp(place: &Place, id: &str, port: u16) -> UnixStream {
    let mut stream = UnixStream::connect(place.dir.path().join("run/jiffy.sock")).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let request = format!(
        "POST /sandboxes/{id}/connect/{TCP_PORT} HTTP/1.1\r\nHost: daemon\r\nConnection: upgrade\r\n\
         Upgrade: jiffy-stream\r\nContent-Length: 0\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let head = super::read_until(&mut stream, "\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    stream.write_all(format!("{port}\n").as_bytes()).unwrap();
    assert_eq!(super::read_until(&mut stream, "\n"), "OK\n");
    stream
}

/// Sends a request; HTTP/1.0, so that the answer ends with the connection and is not cut into chunks.
pub fn send(stream: &mut UnixStream, method: &str, path: &str, body: &Value) {
    let body = body.to_string();
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.0\r\nHost: guest\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all((head + &body).as_bytes()).unwrap();
}

/// Status and body of the answer to one request.
pub fn ask(
    place: &Place,
    id: &str,
    port: u16,
    method: &str,
    path: &str,
    body: &Value,
) -> (u16, String) {
    let mut stream = tcp(place, id, port);
    send(&mut stream, method, path, body);
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

/// The events of one execution in the code interpreter of sandbox `id`.
pub fn execute(place: &Place, id: &str, body: &Value) -> Vec<Value> {
    let (status, text) = ask(place, id, 49_999, "POST", "/execute", body);
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

/// Text of the main result of `code` in the default context of `language`.
pub fn result(place: &Place, id: &str, language: &str, code: &str) -> String {
    let events = execute(place, id, &json!({ "code": code, "language": language }));
    let main = events.iter().find(|e| e["is_main_result"] == true);
    let main = main.unwrap_or_else(|| panic!("{code}: {events:?}"));
    main["text"].as_str().unwrap().to_owned()
}

/// What `code` writes to standard output.
pub fn stdout(events: &[Value]) -> String {
    let pieces = events.iter().filter(|e| e["type"] == "stdout");
    pieces.map(|e| e["text"].as_str().unwrap()).collect()
}
