//! DevTools of a browser in a sandbox, through the daemon, under the sandbox's own host name.

use super::LIMIT;
use super::test_home::TestHome;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

/// Port of DevTools in the template `browser`.
pub const PORT: u16 = 9222;

/// Domain that the daemon must be configured with.
pub const DOMAIN: &str = "sandboxes.test";

/// Returns the host name of sandbox `id`.
pub fn host(id: &str) -> String {
    host_at(id, PORT)
}

/// Returns the host name of a port of a sandbox.
fn host_at(id: &str, port: u16) -> String {
    format!("{port}-{id}.{DOMAIN}")
}

/// Sends a `GET` to this host name. Returns status and JSON.
pub fn get(test_home: &TestHome, id: &str, path: &str) -> (u16, Value) {
    let (status, body) = get_at(test_home, id, PORT, path);
    (status, serde_json::from_str(&body).unwrap_or_default())
}

/// Sends a `GET` to another port. Returns status and text.
pub fn get_at(test_home: &TestHome, id: &str, port: u16, path: &str) -> (u16, String) {
    let head = format!("GET {path} HTTP/1.0\r\nHost: {}", host_at(id, port));
    let mut stream = begin(test_home, &head);
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

/// Sends the head of a request to the daemon. The caller reads the answer.
fn begin(test_home: &TestHome, head: &str) -> UnixStream {
    let mut stream = UnixStream::connect(test_home.dir.path().join("run/jiffy.sock")).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    write!(stream, "{head}\r\n\r\n").unwrap();
    stream
}

/// Requests a WebSocket. Returns the stream and the answer's head. `more` contains additional
/// headers.
pub fn upgrade(test_home: &TestHome, id: &str, path: &str, more: &str) -> (UnixStream, String) {
    let head = format!(
        "GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=={more}",
        host(id)
    );
    let mut stream = begin(test_home, &head);
    let answer = super::read_until(&mut stream, "\r\n\r\n");
    (stream, answer)
}

/// DevTools of a page.
pub struct Page {
    stream: UnixStream,
    calls: u64,
    /// Received events that no call has waited for.
    events: Vec<String>,
}

impl Page {
    /// Connects to the page that the browser opened at its start.
    pub fn first(test_home: &TestHome, id: &str) -> Self {
        let (status, pages) = get(test_home, id, "/json/list");
        assert_eq!(status, 200);
        let url = pages[0]["webSocketDebuggerUrl"].as_str().unwrap();
        let path = url.strip_prefix(&format!("ws://{}", host(id)));
        let path = path.unwrap_or_else(|| panic!("{url}"));
        let (stream, answer) = upgrade(test_home, id, path, "");
        assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
        Self {
            stream,
            calls: 0,
            events: Vec::new(),
        }
    }

    /// Runs a command, and returns its result.
    pub fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.calls += 1;
        let call = json!({ "id": self.calls, "method": method, "params": parameters });
        self.send(call.to_string().as_bytes());
        loop {
            let message = self.receive();
            if message["id"] == self.calls {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].clone();
            }
            self.events
                .extend(message["method"].as_str().map(str::to_owned));
        }
    }

    /// Loads `url`, and waits until it is loaded.
    pub fn load(&mut self, url: &str) {
        self.call("Page.enable", &json!({}));
        self.events.clear();
        self.call("Page.navigate", &json!({ "url": url }));
        let loaded = "Page.loadEventFired";
        if !self.events.iter().any(|event| event == loaded) {
            while self.receive()["method"] != loaded {}
        }
    }

    /// Returns the value of a JavaScript expression.
    pub fn evaluate(&mut self, code: &str) -> Value {
        let parameters = json!({ "expression": code, "returnByValue": true });
        let mut result = self.call("Runtime.evaluate", &parameters);
        assert!(result["exceptionDetails"].is_null(), "{code}: {result}");
        result["result"]["value"].take()
    }

    /// Sends one text frame (RFC 6455, 5.2), masked with zeros.
    fn send(&mut self, text: &[u8]) {
        let mut frame = vec![0x81];
        match u16::try_from(text.len()).unwrap() {
            n @ 0..126 => frame.push(0x80 | n.to_le_bytes()[0]),
            n => {
                frame.push(0x80 | 126);
                frame.extend(n.to_be_bytes());
            }
        }
        frame.extend([0; 4]);
        frame.extend(text);
        self.stream.write_all(&frame).unwrap();
    }

    /// Receives one message. Chromium sends each message as one frame.
    fn receive(&mut self) -> Value {
        let mut head = [0; 2];
        self.stream.read_exact(&mut head).unwrap();
        assert_eq!(head[0], 0x81, "text, whole");
        let mut bytes = |n: usize| {
            let mut bytes = vec![0; n];
            self.stream.read_exact(&mut bytes).unwrap();
            bytes
        };
        let length = match head[1] {
            126 => u64::from(u16::from_be_bytes(bytes(2).try_into().unwrap())),
            127 => u64::from_be_bytes(bytes(8).try_into().unwrap()),
            n => n.into(),
        };
        serde_json::from_slice(&bytes(length.try_into().unwrap())).unwrap()
    }
}
