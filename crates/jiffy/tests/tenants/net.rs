//! Tests for networks of two tenants: no address, frame or name reaches a sandbox of the other
//! tenant.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use super::two_keys::TwoKeys;
use crate::support::lab::{output, with_lab6};
use crate::support::wait_for;
use jiffy_test_attributes::jiffy_test;
use serde_json::json;

/// Answers at TCP port 80 and receives at UDP port 7, on all addresses; records the senders.
const LISTEN: &str = r#"
import socket, threading
def note(who): open("/tmp/heard", "a").write(who + "\n")
tcp, udp = socket.socket(socket.AF_INET6), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
for s, port in ((tcp, 80), (udp, 7)):
    s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("::", port))
tcp.listen(64)
def datagrams():
    while True: note(udp.recvfrom(99)[1][0])
threading.Thread(target=datagrams).start()
open("/tmp/ready", "w").close()
while True:
    s, who = tcp.accept()
    note(who[0]); s.sendall(b"alice\n"); s.close()
"#;

/// Tries every address with sockets and, if the engine permits, with frames with other source
/// addresses. Prints the answers.
const REACH: &str = r#"
import fcntl, socket, struct
found = set()
for host in V4 + V6:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    at = (host, 80, 0, socket.if_nametoindex("eth0")) if ":" in host else (host, 80)
    s = socket.socket(family); s.settimeout(1)
    try:
        s.connect(at); said = s.recv(9)
        if b"alice" in said: found.add(host)
    except OSError: pass
    s.close()
    u = socket.socket(family, socket.SOCK_DGRAM)
    try: u.sendto(b"udp", (host, 7) + at[2:])
    except OSError: pass
    u.close()
def checksum(data):
    total = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    while total >> 16: total = (total & 0xffff) + (total >> 16)
    return struct.pack("!H", total ^ 0xffff)
def packet(source, to):
    payload = struct.pack("!HHHH", 5000, 7, 12, 0) + b"raw!"
    head = struct.pack("!BBHHHBB", 0x45, 0, 32, 77, 0, 64, 17)
    tail = socket.inet_aton(source) + socket.inet_aton(to)
    return head + checksum(head + b"\0\0" + tail) + tail + payload
macs = [bytes([2, 0x4a, 0x49, 0x46, 0x46, n]) for n in (1, 2, 3, 4)] + [b"\xff" * 6]
try:
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); link.bind(("eth0", 0))
    frames = [(0x0800, packet(a, b)) for a in ("169.254.0.21", "169.254.0.22", "198.18.0.0", "198.18.0.3") for b in V4]
    # IPv6 neighbour discovery: a solicitation for the other, and an advertisement of its address.
    six = socket.inet_pton(socket.AF_INET6, "fd6a:6966:6679::21")
    for kind in (135, 136):
        body = struct.pack("!BBHI", kind, 0, 0, 0x60000000) + six + b"\2\1" + macs[0]
        frames.append((0x86dd, struct.pack("!IHBB", 0x60000000, len(body), 58, 255) + six + socket.inet_pton(socket.AF_INET6, "ff02::1") + body))
    for kind, frame in frames:
        for to in macs:
            for source in macs[:4]:
                try: link.send(to + source + struct.pack("!H", kind) + frame.ljust(46, b"\0"))
                except OSError: pass
except OSError: pass
print(sorted(found))
"#;

/// Sends 24 requests with the host name `rebind.example`. The transparent proxy of the slot ignores
/// the address 9.9.9.9: it reads the name from the `Host` header and resolves the name again for
/// each connection. The lab's name server answers alternately with an address of the lab's internet
/// and with an address of a slot. Prints the first words of all responses, without duplicates:
/// `internet` from the lab's server, `HTTP/1.1` from the proxy if it denies the connection.
const REBIND: &str = r#"
import socket
said = set()
for _ in range(24):
    with socket.create_connection(("9.9.9.9", 80), 20) as s:
        s.sendall(b"GET / HTTP/1.1\r\nHost: rebind.example\r\n\r\n")
        said.add((s.recv(99).split() or [b"closed"])[0].decode())
print(*sorted(said))
"#;

#[jiffy_test(engine = "each", lab)]
fn no_address_frame_or_name_leads_to_another_tenants_sandbox() {
    with_lab6(|_| {
        let options = ["--network", "on", "--warm-pool", "0"];
        let keys = TwoKeys::new(&options);
        let alice = keys.ok(&keys.alice, &["create"]);
        let mallory = keys.ok(&keys.mallory, &["create"]);
        let root = |key: &str, id: &str, program: &str| {
            let call = ["exec", "--user", "root", id, "--", "python3", "-c", program];
            keys.ok(key, &call)
        };
        let begin = "nohup python3 -c \"$0\" >/dev/null 2>&1 &";
        let listen = [
            "exec", "--user", "root", &alice, "--", "sh", "-c", begin, LISTEN,
        ];
        keys.ok(&keys.alice, &listen);
        let show = |file: &str| {
            let script = format!("cat {file} 2>/dev/null || echo none");
            keys.ok(&keys.alice, &["exec", &alice, "--", "sh", "-c", &script])
        };
        wait_for("the server", || {
            (show("/tmp/ready") != "none").then_some(())
        });
        // The listener records every sender that reaches it.
        let own =
            "import socket\nprint(socket.create_connection(('127.0.0.1', 80)).recv(9).decode())";
        assert_eq!(root(&keys.alice, &alice, own), "alice");
        let received = show("/tmp/heard");
        assert_eq!(received.lines().count(), 1, "{received}");

        // All IPv6 addresses of the host, and for each a nearby address: the same text with the
        // digit 1 appended.
        let devices = output("ip", &["-6", "-br", "addr"]);
        let six = devices
            .split_whitespace()
            .filter_map(|word| word.split_once('/'))
            .map(|(address, _)| address)
            .filter(|address| address.starts_with("fd6a:") || address.starts_with("fe80:"));
        let mut six: Vec<String> = six
            .flat_map(|address| [address.to_owned(), format!("{address}1")])
            .collect();
        // Address and gateway of each guest (IPv6), and the group of all hosts of a link.
        six.extend(["fd6a:6966:6679::21", "fd6a:6966:6679::22", "ff02::1"].map(str::to_owned));
        // 198.18.0.0/15 contains the addresses of the slots. In each slot, 169.254.0.21 is the
        // guest (here the sender itself), 169.254.0.22 the gateway, and .20 and .23 the remaining
        // addresses of their network.
        let mut four: Vec<String> = (0..24).map(|n| format!("198.18.0.{n}")).collect();
        four.extend(["169.254.0.22", "169.254.0.23", "169.254.0.20"].map(str::to_owned));
        let program = format!("V4, V6 = {four:?}, {six:?}\n{REACH}");
        assert_eq!(root(&keys.mallory, &mallory, &program), "[]");

        let body = json!({ "templateID": "base", "network": {
            "allowOut": ["rebind.example"], "denyOut": ["0.0.0.0/0"] } });
        let (status, created) = keys.http(&keys.mallory, "POST", "/sandboxes", &body);
        assert_eq!(status, 201, "{created}");
        let bound = created["sandboxID"].as_str().unwrap();
        let said = keys.ok(
            &keys.mallory,
            &["exec", bound, "--", "python3", "-c", REBIND],
        );
        // If the name resolves to the internet, the lab's server answers. If the name resolves to a
        // slot, the proxy answers with an HTTP error.
        assert_eq!(said, "HTTP/1.1 internet");
        assert_eq!(show("/tmp/heard"), received);
    });
}
