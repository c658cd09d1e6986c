//! Tests for forwarding of host ports to ports of a sandbox.

use crate::support::forward::Forward;
use crate::support::read_until;
use crate::support::remote::Remote;
use jiffy_test_attributes::jiffy_test;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

/// Echoes complete connections in capitals on the guest's loopback address, and reports when it
/// listens.
const SERVER: &str = "cat >/tmp/server.py <<'END'
import socket, threading
def serve(c):
    got = b''
    while part := c.recv(65536):
        got += part
    c.sendall(got.upper()); c.close()
s = socket.create_server(('127.0.0.1', 7000))
open('/tmp/listens', 'w').close()
while True:
    threading.Thread(target=serve, args=(s.accept()[0],)).start()
END
setsid python3 /tmp/server.py >/dev/null 2>&1 &
until [ -e /tmp/listens ]; do sleep 0.02; done";

#[jiffy_test]
fn any_protocol_reaches_a_port_of_a_sandbox_even_on_loopback() {
    let remote = Remote::new(&["--warm-pool", "0"]);
    let id = remote.ok(&["create"]);
    remote.sh(&id, SERVER);
    let mut forward = Forward::new(&remote, &[&id[..6], ":7000", ":7001"], 2);
    // The data is not HTTP, and is larger than any buffer. Its end requires a half-closed
    // connection.
    let output = b"not http\r\n\0".repeat(100_000);
    let mut streams: Vec<TcpStream> = (0..3).map(|_| forward.connect(0)).collect();
    let echo = |stream: &mut TcpStream| -> std::io::Result<Vec<u8>> {
        stream.write_all(&output)?;
        stream.shutdown(Shutdown::Write)?;
        let mut received = Vec::new();
        stream.read_to_end(&mut received)?;
        Ok(received)
    };
    let echoed: Vec<_> = std::thread::scope(|scope| {
        let clients = streams
            .iter_mut()
            .map(|stream| scope.spawn(|| echo(stream)));
        let clients: Vec<_> = clients.collect();
        clients.into_iter().map(|c| c.join().unwrap()).collect()
    });
    let whole = |received: &Vec<u8>| *received == output.to_ascii_uppercase();
    if !echoed
        .iter()
        .all(|received| received.as_ref().is_ok_and(whole))
    {
        let found: Vec<_> = echoed
            .iter()
            .map(|received| received.as_ref().map(Vec::len))
            .collect();
        panic!("{found:?}, and the command said: {}", forward.end());
    }
    // Without a listener, the connection is closed, and the command reports the reason and
    // continues.
    let mut closed = forward.connect(1);
    assert_eq!(closed.read(&mut [0]).unwrap_or(0), 0);
    let mut report = forward.process.stderr.take().unwrap();
    read_until(&mut report, "nothing listens on port 7001");
    let mut stream = forward.connect(0);
    stream.write_all(b"still").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut received = String::new();
    stream.read_to_string(&mut received).unwrap();
    assert_eq!(received, "STILL");
}

#[jiffy_test]
fn ports_that_cannot_be_forwarded_are_reported_at_once() {
    let remote = Remote::new(&["--warm-pool", "0"]);
    let id = remote.ok(&["create"]);
    for bad in ["x", "0", "80:0", "70000", "1:2:3"] {
        let done = remote.call(&["port-forward", &id, bad]);
        assert_eq!(done.code, Some(2), "{bad}: {done:?}");
        assert!(done.stderr.contains("pair of ports"), "{done:?}");
    }
    let unknown = remote.call(&["port-forward", "zzzz", "80"]);
    assert_eq!(unknown.code, Some(1));
    assert!(unknown.stderr.contains("zzzz"), "{unknown:?}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let done = remote.call(&["port-forward", &id, &format!("{port}:80")]);
    assert!(
        done.stderr.contains("cannot listen on 127.0.0.1"),
        "{done:?}"
    );
    // Access by key: invalid, valid, of scope `read`, and of another owner.
    let key = |args: &[&str]| {
        remote
            .test_home
            .ok(&[&["key", "create", "--name"], args].concat())
    };
    let ask_port = |port: u16, key: &str, upgrade: &str| {
        let authority = remote.url.strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(authority).unwrap();
        let path = format!("/sandboxes/{id}/ports/{port}");
        let head = format!(
            "GET {path} HTTP/1.1\r\nHost: {authority}\r\nX-API-Key: {key}\r\n{upgrade}\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line
    };
    let ask = |key: &str, upgrade: &str| ask_port(22, key, upgrade);
    let upgrade = "Connection: upgrade\r\nUpgrade: tcp\r\n";
    assert!(ask("nobody", upgrade).contains(" 401 "));
    // Requests without an upgrade of the connection are rejected.
    assert!(ask(&remote.key, "").contains(" 426 "));
    // No program listens on port 22 of the guest.
    assert!(ask(&remote.key, upgrade).contains(" 502 "));
    // The agent has an interface for the host only, which the gateway does not expose.
    assert!(ask_port(49983, &remote.key, upgrade).contains(" 403 "));
    // A key of the scope `read` gets no stream.
    assert!(ask(&key(&["reader", "--scope", "read"]), upgrade).contains(" 40"));
    // The sandbox belongs to another key.
    assert!(ask(&key(&["other"]), upgrade).contains(" 404 "));
}
