//! Tests for the removal of a key, and for access without a key.

use super::two_keys::TwoKeys;
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Timeout for the end of streams and links after the removal of their key.
const END_LIMIT: Duration = Duration::from_secs(5);

/// Answers every request with its head, and reports when it listens.
const ECHO: &str = "cat >/tmp/echo.py <<'END'
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Echo(BaseHTTPRequestHandler):
    def do_GET(self):
        body = str(self.headers).encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
s = ThreadingHTTPServer(('127.0.0.1', 8000), Echo)
open('/tmp/listens', 'w').close()
s.serve_forever()
END
setsid python3 /tmp/echo.py >/dev/null 2>&1 &
until [ -e /tmp/listens ]; do sleep 0.02; done";

impl TwoKeys {
    fn key(&self, args: &[&str]) -> String {
        self.remote
            .test_home
            .ok(&[&["key", "create"], args].concat())
    }

    /// Sends a `GET` to a port of a sandbox with additional header lines. Returns status and body.
    fn port(&self, id: &str, port: u16, path: &str, headers: &str) -> (u16, String) {
        let way = format!("E2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: {port}\r\n{headers}");
        self.raw("GET", path, &way, &Value::Null)
    }

    /// Opens a stream to a port of a sandbox.
    fn stream(&self, key: &str, id: &str, port: u16) -> TcpStream {
        let address = self.remote.url.strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        let head = format!(
            "GET /sandboxes/{id}/ports/{port} HTTP/1.1\r\nHost: {address}\r\nX-API-KEY: {key}\r\n\
             Connection: upgrade\r\nUpgrade: tcp\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            answer.extend(byte);
        }
        assert!(answer.starts_with(b"HTTP/1.1 101"), "{answer:?}");
        stream
    }
}

/// Returns the time until the other side closes the stream.
fn closed(mut stream: TcpStream) -> Duration {
    let began = Instant::now();
    stream.set_read_timeout(Some(4 * END_LIMIT)).unwrap();
    let received = stream.read_to_end(&mut Vec::new());
    assert!(
        !received.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock),
        "the stream remains open"
    );
    began.elapsed()
}

#[jiffy_test]
fn connections_of_a_key_end_with_it_and_its_sandboxes_on_request() {
    let keys = TwoKeys::new(&["--warm-pool", "0"]);
    let (alice, test_home) = (&keys.alice, &keys.remote.test_home);
    let id = keys.ok(alice, &["create"]);
    let paused = keys.ok(alice, &["create"]);
    let others = keys.ok(&keys.mallory, &["create"]);
    keys.ok(alice, &["pause", &paused]);
    keys.ok(alice, &["exec", &id, "--", "sh", "-c", ECHO]);

    // A key in a request to a guest is not forwarded to the guest.
    let shown = format!("X-API-KEY: {alice}\r\nAuthorization: Bearer {alice}\r\nX-Kept: 1\r\n");
    let (status, received) = keys.port(&id, 8000, "/", &shown);
    assert_eq!(status, 200, "{received}");
    let received = received.to_lowercase();
    assert!(received.contains("x-kept: 1"), "{received}");
    assert!(
        !received.contains("e2b_") && !received.contains("authorization"),
        "{received}"
    );

    // Streams that the key opened, and a link created with it, end with the key.
    let path = format!("/sandboxes/{id}/preview?port=8000");
    let (status, link) = keys.http(alice, "GET", &path, &Value::Null);
    assert_eq!(status, 200, "{link}");
    let link = link["url"].as_str().unwrap().to_owned();
    let link = link.strip_prefix(&keys.remote.url).unwrap();
    assert_eq!(keys.raw("GET", link, "", &Value::Null).0, 200);
    let stream = keys.stream(alice, &id, 8000);
    // Alice's key has the name `test`.
    test_home.ok(&["key", "revoke", "test"]);
    let took = closed(stream);
    assert!(took < END_LIMIT, "{took:?}");
    assert_eq!(keys.raw("GET", link, "", &Value::Null).0, 403);
    assert_eq!(keys.http(alice, "GET", "/sandboxes", &Value::Null).0, 401);
    // The sandboxes of the revoked key remain, and their public ports remain accessible.
    assert_eq!(keys.port(&id, 8000, "/", "").0, 200);
    assert_eq!(test_home.ok(&["exec", &id, "--", "echo", "ok"]), "ok");

    test_home.ok(&["key", "revoke", "test", "--end"]);
    assert_eq!(keys.port(&id, 8000, "/", "").0, 502);
    let remaining = test_home.ok(&["ls", "--json"]);
    assert!(
        !remaining.contains(&id) && !remaining.contains(&paused),
        "{remaining}"
    );
    assert_eq!(
        keys.ok(&keys.mallory, &["exec", &others, "--", "echo", "ok"]),
        "ok"
    );

    // A removal requested while no daemon is running takes effect when the next daemon starts.
    let address = keys.remote.url.strip_prefix("http://").unwrap();
    test_home.ok(&["daemon", "stop"]);
    test_home.ok(&["key", "revoke", "mallory", "--end"]);
    test_home.ok(&["daemon", "start", "--listen", address, "--warm-pool", "0"]);
    let began = Instant::now();
    while test_home.ok(&["ls", "--json"]).contains(&others) {
        assert!(
            began.elapsed() < 4 * END_LIMIT,
            "the sandbox is still running"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[jiffy_test]
fn a_key_grants_its_scope_only_and_no_key_grants_no_access() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let scraped = free.local_addr().unwrap().to_string();
    drop(free);
    let options = ["--warm-pool", "0", "--metrics-listen", &scraped];
    let keys = TwoKeys::new(&options);
    let alice = &keys.alice;
    let reader = keys.key(&["--name", "reader", "--scope", "read"]);

    // The agent requires its token unless the creator disabled it; the sandbox's id is then secret.
    let create = |body: Value| {
        let (status, created) = keys.http(alice, "POST", "/sandboxes", &body);
        assert_eq!(status, 201, "{created}");
        let token = created["envdAccessToken"].as_str().map(str::to_owned);
        (created["sandboxID"].as_str().unwrap().to_owned(), token)
    };
    let (id, token) = create(json!({ "templateID": "base" }));
    let stat = "/files?path=/etc/hostname&username=root";
    assert_eq!(keys.port(&id, 49983, stat, "").0, 401);
    let token = format!("X-Access-Token: {}\r\n", token.unwrap());
    assert_eq!(keys.port(&id, 49983, stat, &token).0, 200);
    // A user name, which clients send as Basic credentials, is forwarded.
    let user = "Authorization: Basic cm9vdDo=\r\n";
    let named = keys.port(
        &id,
        49983,
        "/files?path=/etc/hostname",
        &format!("{token}{user}"),
    );
    assert_eq!(named.0, 200, "{named:?}");
    let (open, none) = create(json!({ "templateID": "base", "secure": false }));
    assert_eq!(none, None);
    assert_eq!(keys.port(&open, 49983, stat, "").0, 200);
    // A key of scope `read` receives only the first characters of ids, which open no ports.
    let (_, seen) = keys.http(&reader, "GET", "/v2/sandboxes", &Value::Null);
    let seen = seen.as_array().unwrap();
    assert_eq!(seen.len(), 2);
    for sandbox in seen {
        let shown = sandbox["sandboxID"].as_str().unwrap();
        assert!(open.starts_with(shown) != id.starts_with(shown), "{shown}");
        assert_eq!(keys.port(shown, 49983, stat, "").0, 502);
    }

    // Metrics of the host require the scope for them, regardless of the client's address.
    let metrics = |headers: &str| keys.raw("GET", "/metrics", headers, &Value::Null).0;
    assert_eq!(metrics(""), 401);
    assert_eq!(metrics("X-Forwarded-For: 127.0.0.1\r\n"), 401);
    assert_eq!(metrics(&format!("X-API-KEY: {alice}\r\n")), 403);
    assert_eq!(metrics(&format!("Authorization: Bearer {reader}\r\n")), 200);
    let scrape = |path: &str| {
        let mut stream = TcpStream::connect(&scraped).unwrap();
        write!(stream, "GET {path} HTTP/1.0\r\nHost: {scraped}\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!(
        (scrape("/metrics"), scrape("/sandboxes")),
        ("200".into(), "404".into())
    );

    // Networks and validity of a key.
    let list = |key: &str| keys.http(key, "GET", "/sandboxes", &Value::Null);
    let elsewhere = keys.key(&["--name", "elsewhere", "--allow-from", "192.0.2.0/24"]);
    let here = [
        "--name",
        "here",
        "--allow-from",
        "192.0.2.7",
        "--allow-from",
        "127.0.0.0/8",
    ];
    let here = keys.key(&[&here[..], &["--expires", "1h"]].concat());
    assert_eq!(list(&elsewhere).0, 403);
    assert_eq!(list(&here).0, 200);
    let shown = keys.remote.test_home.ok(&["key", "ls"]);
    // "until 20" is followed by the remaining digits of the year.
    for words in [
        "from 192.0.2.0/24",
        "until 20",
        "from 192.0.2.7/32 127.0.0.0/8",
    ] {
        assert!(shown.contains(words), "{words}: {shown}");
    }
    let rotate = |args: &[&str]| {
        let command = [&["key", "rotate", "here"], args].concat();
        keys.remote.test_home.ok(&command)
    };
    let second = rotate(&["--overlap", "1h"]);
    assert_eq!((list(&here).0, list(&second).0), (200, 200));
    let third = rotate(&["--expires", "2s"]);
    assert_eq!(
        (list(&here).0, list(&second).0, list(&third).0),
        (401, 401, 200)
    );
    let began = Instant::now();
    while list(&third).0 == 200 {
        assert!(began.elapsed() < 4 * END_LIMIT, "the key does not expire");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(list(&third).1["error_code"], "key_expired");

    // Wrong keys of an address are rate limited. Calls with a correct key are not.
    let wrong = format!("e2b_{}", "0".repeat(40));
    let mut guesses = 0;
    while list(&wrong).0 == 401 {
        guesses += 1;
        assert!(guesses < 300, "guesses are not limited");
    }
    assert_eq!(list(&wrong).1["error_code"], "authentication_failures");
    assert_eq!(list(alice).0, 200);
}
