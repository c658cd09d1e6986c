//! Tests for network access of sandboxes over IPv6, with real guests in a simulated internet.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use crate::support::lab::{HOST, HOST6, PRIVATE, PRIVATE6, PUBLIC, PUBLIC6};
use crate::support::network_probe::{
    PRELUDE, call, create, networked6, python, reach, root_python,
};
use jiffy_test_attributes::jiffy_test;
use serde_json::json;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

#[jiffy_test(lab)]
fn a_sandbox_reaches_the_ipv6_internet_and_neither_host_nor_neighbours_nor_private_ranges() {
    networked6(&[], |test_home, _| {
        let (id, other) = (test_home.ok(&["create"]), test_home.ok(&["create"]));
        for host in PUBLIC6.iter().chain(&PUBLIC).chain(&["six.example"]) {
            assert_eq!(reach(test_home, &id, host), "internet", "{host}");
        }
        // The guest's IPv6 address is a unique local address. For a name with addresses of both
        // versions, `getaddrinfo` therefore returns the IPv4 address first (RFC 6724).
        let both =
            "print(socket.getaddrinfo('some.example', 80, type=socket.SOCK_STREAM)[0][4][0])";
        assert_eq!(python(test_home, &id, both), "9.9.9.9");
        test_home.sh(
            &other,
            "nohup python3 -m http.server -b :: 80 >/dev/null 2>&1 &",
        );
        // Addresses of the host's ends of the slots.
        let own = crate::support::lab::output("ip", &["-6", "-br", "addr"]);
        let slots: Vec<String> = own
            .lines()
            .filter(|line| line.starts_with("jf"))
            .flat_map(|line| line.split_whitespace().skip(2))
            .filter_map(|net| net.split_once('/').map(|(address, _)| address.to_owned()))
            .filter(|address| address.starts_with("fd6a:"))
            .collect();
        assert!(slots.len() >= 2, "{own}");
        // An additional digit results in other addresses of the range of all slots. For the first
        // slot (`...::`), this is the address of the slot's own end (`...::1`).
        let next = slots.iter().map(|address| format!("{address}1"));
        let private = PRIVATE.iter().map(|address| format!("::ffff:{address}"));
        for host in slots.iter().cloned().chain(next).chain(private).chain(
            [
                HOST6,
                // Gateway of the guest.
                "fd6a:6966:6679::22",
                // 10.9.9.9 behind NAT64 and 6to4.
                "64:ff9b::a09:909",
                "2002:a09:909::1",
            ]
            .into_iter()
            .chain(PRIVATE6)
            .map(str::to_owned),
        ) {
            assert_eq!(
                reach(test_home, &id, &host),
                "ConnectionRefusedError",
                "{host}"
            );
        }
        // Packets with another source address do not leave the guest.
        let forged = r#"
import fcntl, struct
card = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
index = socket.if_nametoindex("eth0")
fcntl.ioctl(card, 0x8916, socket.inet_pton(socket.AF_INET6, "2a00:9::7") + struct.pack("Ii", 128, index))
forged = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
forged.settimeout(1)
bound = False
while not bound:
    # The address becomes usable a moment after it was set.
    try: bound = forged.bind(("2a00:9::7", 0)) is None
    except OSError: time.sleep(0.01)
try: print(forged.connect(("2a00:1::1", 80)))
except OSError as e: print(type(e).__name__)
"#;
        assert_eq!(root_python(test_home, &other, forged), "TimeoutError");
        assert_eq!(reach(test_home, &id, PUBLIC6[0]), "internet");
    });
}

/// Returns all devices of slots, or only the active devices.
fn slots(up: &[&str]) -> BTreeSet<String> {
    let all = crate::support::lab::output("ip", &[&["-br", "link", "show"], up].concat());
    let names = all.lines().filter_map(|line| line.split('@').next());
    let slots = names.filter(|name| name.starts_with("jf"));
    slots.map(str::to_owned).collect()
}

#[jiffy_test(lab)]
fn connections_survive_the_removal_of_neighbours() {
    networked6(&[], |test_home, _| {
        let id = test_home.ok(&["create"]);
        let own = slots(&["up"]);
        let program = r#"
import os
def connect(host):
    s = socket.create_connection((host, 80), 10)
    s.makefile().readline()
    return s
connections = [connect(host) for host in ("2a00:9::9", "9.9.9.9")]
open("/tmp/connected", "w").close()
while not os.path.exists("/tmp/go"): time.sleep(0.01)
for s in connections:
    # A packet that does not start a connection.
    s.shutdown(socket.SHUT_WR)
    print(s.recv(100))
"#;
        let program = format!("{PRELUDE}\n{program}");
        let connected = test_home.begin(&["exec", &id, "--", "python3", "-c", &program]);
        test_home.sh(&id, "until [ -e /tmp/connected ]; do sleep 0.01; done");
        for hosts in [&PUBLIC6[1..], &PUBLIC[1..2]] {
            let other = test_home.ok(&["create"]);
            assert_eq!(reach(test_home, &other, hosts[0]), "internet");
            let others: BTreeSet<String> = slots(&["up"]).difference(&own).cloned().collect();
            assert_eq!(others.len(), 1, "{others:?}");
            test_home.ok(&["rm", &other]);
            crate::support::wait_for("the neighbour's slot to be removed", || {
                others.is_disjoint(&slots(&[])).then_some(())
            });
        }
        test_home.sh(&id, "touch /tmp/go");
        let output = connected.wait_with_output().unwrap();
        // The servers have received the end of both connections and closed them.
        assert_eq!(String::from_utf8_lossy(&output.stdout), "b''\nb''\n");
    });
}

/// Reports when it listens, and then each sender of TCP or UDP data once, until a datagram to port
/// 7 arrives.
const SENDERS: &str = r#"
import socket, struct
card = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.ntohs(3))
print("listens", flush=True)
senders, port = set(), 0
while port != 7:
    packet, (_, protocol, kind, _, _) = card.recvfrom(2048)
    if kind == 4: continue # Outgoing.
    if protocol == 0x800: # IPv4
        at, transport = packet[0] % 16 * 4, packet[9]
        sender = socket.inet_ntop(socket.AF_INET, packet[12:16])
    elif protocol == 0x86dd: # IPv6
        at, transport = 40, packet[6]
        sender = socket.inet_ntop(socket.AF_INET6, packet[8:24])
    else: continue
    if transport not in (6, 17): continue
    senders.add(sender)
    port = struct.unpack("!H", packet[at + 2:at + 4])[0] if transport == 17 else 0
print(*sorted(senders))
"#;

/// Deletes all connection tracking entries of a host (IPCTNL_MSG_CT_DELETE without a filter,
/// acknowledged).
const FORGET: &str = r#"
import socket, struct
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
s.send(struct.pack("=IHHIIBBH", 20, 0x102, 5, 1, 0, 0, 0, 0))
print(struct.unpack("=IHHIIi", s.recv(100)[:20])[5])
"#;

#[jiffy_test(lab)]
fn packets_of_deleted_connections_do_not_leave_the_host() {
    networked6(&[], |test_home, lab| {
        let id = test_home.ok(&["create"]);
        let program = r#"
import os
connections = [socket.create_connection((host, 80), 10) for host in ("2a00:9::9", "9.9.9.9")]
for s in connections: s.makefile().readline()
open("/tmp/connected", "w").close()
while not os.path.exists("/tmp/go"): time.sleep(0.01)
for s in connections: s.shutdown(socket.SHUT_WR)
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"behind them", ("9.9.9.9", 7))
"#;
        let program = format!("{PRELUDE}\n{program}");
        let connected = test_home.begin(&["exec", &id, "--", "python3", "-c", &program]);
        test_home.sh(&id, "until [ -e /tmp/connected ]; do sleep 0.01; done");
        let mut senders = lab.in_internet(|| {
            let mut python = Command::new("python3");
            let python = python.args(["-c", SENDERS]).stdout(Stdio::piped());
            python.spawn().unwrap()
        });
        let mut senders_output = BufReader::new(senders.stdout.take().unwrap());
        let mut line = String::new();
        senders_output.read_line(&mut line).unwrap();
        assert_eq!(line, "listens\n");
        assert_eq!(
            crate::support::lab::output("python3", &["-c", FORGET]),
            "0\n"
        );
        test_home.sh(&id, "touch /tmp/go");
        let (_, datagram) = lab.datagrams.recv().unwrap();
        assert_eq!(datagram, b"behind them");
        line.clear();
        senders_output.read_line(&mut line).unwrap();
        assert!(senders.wait().unwrap().success());
        // Without tracking entries, packets of the open connections would leave with the guest's
        // address, untranslated. Only the new datagram has left, with the address of the host.
        assert_eq!(line, format!("{HOST}\n"));
        assert!(connected.wait_with_output().unwrap().status.success());
    });
}

#[jiffy_test(lab)]
fn rules_apply_to_both_ip_versions_and_to_copies() {
    networked6(&[], |test_home, _| {
        let refused = "ConnectionRefusedError";
        let some = create(
            test_home,
            json!({ "network": { "allowOut": ["2a00:9::/48"], "denyOut": ["0.0.0.0/0"] } }),
        );
        let seen =
            |id: &str| [PUBLIC6[1], PUBLIC6[0], PUBLIC[1]].map(|host| reach(test_home, id, host));
        assert_eq!(seen(&some), ["internet", refused, refused]);
        let copy = test_home.ok(&["fork", &some]);
        assert_eq!(seen(&copy), ["internet", refused, refused]);
        let rules = json!({ "denyOut": ["2a00:9::9"] });
        let path = format!("/sandboxes/{copy}/network");
        assert_eq!(call(test_home, "PUT", &path, &rules).0, 204);
        assert_eq!(seen(&copy), [refused, "internet", "internet"]);
        let names = json!({
            "allowOut": ["six.example", "six.example:22"], "denyOut": ["0.0.0.0/0"]
        });
        assert_eq!(call(test_home, "PUT", &path, &names).0, 204);
        let asks = |name: &str| {
            let program = format!(
                "s = socket.create_connection(('2a00:9::9', 80), 10)\n\
                 s.sendall(b'GET / HTTP/1.1\\r\\nHost: {name}\\r\\n\\r\\n')\nprint(s.recv(100).decode().split()[:2])"
            );
            python(test_home, &copy, &program)
        };
        assert!(
            asks("six.example").starts_with("['internet'"),
            "{}",
            asks("six.example")
        );
        assert_eq!(asks("other.example"), "['HTTP/1.1', '403']");
        // At another port, the address decides, after the name was resolved to it.
        let ssh = "print(tcp('2a00:9::9', 22), tcp('six.example', 22), tcp('2a00:1::1', 22))";
        assert_eq!(
            python(test_home, &copy, ssh),
            "ConnectionResetError internet ConnectionResetError"
        );
        let private = json!({ "allowOut": ["fd00::/8"] });
        assert_eq!(call(test_home, "PUT", &path, &private).0, 400);
    });
}

#[jiffy_test(lab)]
fn the_owner_of_the_host_opens_private_ranges_of_ipv6_too() {
    networked6(&["--allow-private", "fd00:9::/32"], |test_home, _| {
        let id = test_home.ok(&["create"]);
        assert_eq!(reach(test_home, &id, PRIVATE6[0]), "internet");
        for still in [HOST6, PRIVATE6[1], PRIVATE6[2]] {
            assert_eq!(
                reach(test_home, &id, still),
                "ConnectionRefusedError",
                "{still}"
            );
        }
    });
}
