//! Tests for connections to servers in a sandbox over its network interface.

use crate::support::forward::Forward;
use crate::support::remote::Remote;
use jiffy_test_attributes::jiffy_test;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// Sends each client its address, and its input in capitals. Ports: 7000 on all addresses, 7001 on
/// the loopback address, 7002 on the IPv6 loopback address.
const SERVERS: &str = "cat >/tmp/server.py <<'END'
import socket, threading
def serve(c, peer):
    c.sendall((peer[0] + '\\n').encode())
    while part := c.recv(65536):
        c.sendall(part.upper())
    c.close()
def listen(family, host, port):
    s = socket.create_server((host, port), family=family)
    while True:
        threading.Thread(target=serve, args=s.accept()).start()
for at in ((socket.AF_INET, '', 7000), (socket.AF_INET, '127.0.0.1', 7001), (socket.AF_INET6, '::1', 7002)):
    threading.Thread(target=listen, args=at).start()
END
setsid python3 /tmp/server.py >/dev/null 2>&1 &
for port in 7000 7001; do
    until python3 -c \"import socket; socket.create_connection(('127.0.0.1', $port))\" 2>/dev/null
    do sleep 0.02; done
done
until python3 -c \"import socket; socket.create_connection(('::1', 7002))\" 2>/dev/null
do sleep 0.02; done";

/// Timeout for the end of a connection.
const END_LIMIT: Duration = Duration::from_secs(20);

/// Connects to a guest. `port` is an index of the forwarded ports. Returns the connection and the
/// client address that the guest sees.
fn connect(forward: &Forward, port: usize) -> (BufReader<TcpStream>, String) {
    let mut stream = BufReader::new(forward.connect(port));
    let mut peer = String::new();
    stream.read_line(&mut peer).unwrap();
    (stream, peer.trim_end().to_owned())
}

fn echo(stream: &mut BufReader<TcpStream>) {
    stream.get_mut().write_all(b"word\n").unwrap();
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    assert_eq!(line, "WORD\n");
}

/// Waits until the other side has closed an idle connection.
fn assert_closes(stream: &mut BufReader<TcpStream>) {
    let began = Instant::now();
    let stream = stream.get_mut();
    stream.set_read_timeout(Some(END_LIMIT)).unwrap();
    let read = stream.read(&mut [0]);
    assert!(
        !matches!(read, Ok(1..)) && began.elapsed() < END_LIMIT,
        "{read:?}"
    );
}

#[jiffy_test]
fn servers_on_any_address_are_reached_and_connections_end_with_the_guest_they_lead_to() {
    let remote = Remote::new(&["--warm-pool", "0", "--engine", "microvm"]);
    let id = remote.ok(&["create"]);
    remote.sh(&id, SERVERS);
    let ports = [&id[..], ":7000", ":7001", ":7002"];
    let forward = Forward::new(&remote, &ports, 3);

    // Connections lead over the interface if it exists on this engine, otherwise through the agent.
    let has_network = remote.sh(&id, "ls /sys/class/net").contains("eth0");
    // The guest sees its gateway as the client of connections over the interface.
    let direct = if has_network {
        "169.254.0.22"
    } else {
        "127.0.0.1"
    };
    for (port, from) in [(0, direct), (1, "127.0.0.1"), (2, "::1")] {
        let (mut stream, peer) = connect(&forward, port);
        assert_eq!(peer, from, "port {port}");
        echo(&mut stream);
        // Data sent before a client shuts down its direction is answered.
        stream.get_mut().write_all(b"last").unwrap();
        stream.get_mut().shutdown(Shutdown::Write).unwrap();
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "LAST");
    }

    // Connections that are open at the snapshot and at the rollback.
    let (mut old, _) = connect(&forward, 0);
    remote.ok(&["snapshot", &id, "--name", "here"]);
    echo(&mut old);
    let (mut young, _) = connect(&forward, 0);
    remote.ok(&["rollback", &id, "here"]);
    assert_closes(&mut old);
    assert_closes(&mut young);
    // The new connection may use the guest's interface or the agent: a guest that has just reset
    // its connections may answer late on its interface.
    let (mut stream, _) = connect(&forward, 0);
    echo(&mut stream);

    remote.ok(&["pause", &id]);
    assert_closes(&mut stream);
    remote.ok(&["resume", &id]);
    let (mut stream, _) = connect(&forward, 0);
    echo(&mut stream);

    remote.ok(&["rm", &id]);
    assert_closes(&mut stream);
}
