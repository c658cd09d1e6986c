//! Tests for network access of sandboxes, with real guests in a simulated internet.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use crate::named_ports::check_named_ports;
use crate::support::lab::{HOST, PRIVATE, PUBLIC, output, with_lab};
use crate::support::network_probe::{
    PRELUDE, assert_clean, call, create, networked, python, reach, root_python,
};
use crate::support::test_home::TestHome;
use crate::support::wait_for;
use jiffy_engine_api::NetworkRules;
use jiffy_network::{Network, NetworkConfig, NicKind};
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

#[jiffy_test(lab)]
fn a_sandbox_reaches_the_internet_and_neither_host_nor_neighbours_nor_private_ranges() {
    networked(&[], |test_home, _| {
        let (id, other) = (test_home.ok(&["create"]), test_home.ok(&["create"]));
        for host in PUBLIC {
            assert_eq!(reach(test_home, &id, host), "internet", "{host}");
        }
        // All guests have the same address inside (169.254.0.21) and the same gateway
        // (169.254.0.22). Outside, the other guest has the address of its slot, one of
        // 198.18.0.0/28.
        test_home.sh(&other, "nohup python3 -m http.server 80 >/dev/null 2>&1 &");
        let slots: Vec<String> = (0..16).map(|i| format!("198.18.0.{i}")).collect();
        let refused = PRIVATE.iter().map(|a| (*a).to_owned());
        for host in refused
            .chain([HOST.to_owned(), "169.254.0.22".to_owned()])
            .chain(slots)
        {
            assert_eq!(
                reach(test_home, &id, &host),
                "ConnectionRefusedError",
                "{host}"
            );
        }
        // Guests cannot reach the host, and the host cannot reach guests.
        let guest = std::net::TcpStream::connect_timeout(
            &"198.18.0.1:80".parse().unwrap(),
            Duration::from_millis(300),
        );
        assert!(guest.is_err());
        // The guest supports IPv6, but has no route: this lab has no IPv6.
        assert_eq!(
            python(
                test_home,
                &id,
                "print(socket.has_dualstack_ipv6(), tcp('2a00:9::9'))"
            ),
            "True OSError"
        );
    });
}

#[jiffy_test(lab)]
fn names_are_resolved_while_at_least_one_host_is_allowed() {
    networked(&[], |test_home, _| {
        let id = create(test_home, json!({}));
        let resolve = "\ntry: print(socket.gethostbyname('some.example'))\nexcept OSError as e: print('none')";
        assert_eq!(python(test_home, &id, resolve), "9.9.9.9");
        let closed = create(test_home, json!({ "allow_internet_access": false }));
        assert_eq!(python(test_home, &closed, resolve), "none");
        let some = create(
            test_home,
            json!({ "allow_internet_access": false, "network": { "allowOut": ["9.9.9.9"] } }),
        );
        assert_eq!(python(test_home, &some, resolve), "9.9.9.9");
        assert_eq!(reach(test_home, &some, "some.example"), "internet");
    });
}

#[jiffy_test(lab)]
fn a_guest_cannot_send_from_another_address() {
    networked(&[], |test_home, lab| {
        let id = test_home.ok(&["create"]);
        // `frame` sends a packet to the MAC address of the gateway. `mac` is the sender's.
        let program = r#"
import struct
def udp(source, text):
    payload = struct.pack("!HHHH", 5000, 7, 8 + len(text), 0) + text
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 0, 0, 64, 17, 0,
                       socket.inet_aton(source), socket.inet_aton("9.9.9.9"))
    total = sum(struct.unpack("!10H", head))
    total = (total >> 16) + (total & 0xffff)
    head = head[:10] + struct.pack("!H", 0xffff - (total + (total >> 16)) & 0xffff) + head[12:]
    return head + payload
def frame(mac, packet):
    link.send(b"\x02\x4a\x49\x46\x46\x02" + mac + b"\x08\x00" + packet)
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
link.bind(("eth0", 0))
own = bytes.fromhex(open("/sys/class/net/eth0/address").read().strip().replace(":", ""))
frame(own, udp("8.8.4.4", b"another's address"))
frame(own, udp("169.254.0.23", b"a neighbour's address"))
frame(own, udp("198.18.0.1", b"the slot's address"))
frame(b"\x02\x4a\x49\x46\x46\x09", udp("169.254.0.21", b"another's card"))
frame(own, udp("169.254.0.21", b"its own"))
"#;
        root_python(test_home, &id, program);
        // Earlier packets used the same path, so they have arrived.
        let (from, text) = lab.datagrams.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(String::from_utf8_lossy(&text), "its own");
        assert_eq!(from.ip().to_string(), HOST);
        assert!(lab.datagrams.try_recv().is_err());
    });
}

#[jiffy_test(lab)]
fn rules_are_enforced_from_the_first_packet_and_a_change_cuts_connections() {
    networked(&["--allow-private", "10.9.9.0/24"], |test_home, _| {
        let id = create(
            test_home,
            json!({ "network": { "allowOut": ["9.9.9.9"], "denyOut": ["8.8.8.0/24", "9.0.0.0/8"] } }),
        );
        let now = |id: &str| {
            ["9.9.9.9", "8.8.8.8", "11.0.0.1", "10.9.9.9"]
                .map(|h| reach(test_home, id, h) == "internet")
        };
        // An allowed address takes precedence over a denied range. Other public addresses are
        // allowed by default, and the private one by the option of the daemon.
        assert_eq!(now(&id), [true, false, true, true]);
        let closed = create(test_home, json!({ "allow_internet_access": false }));
        assert_eq!(now(&closed), [false; 4]);

        // A program in the guest exchanges single bytes on one connection, and writes `on`, or the
        // error of the connection, to a file.
        let talk = "nohup python3 -c 'import socket, time\n\
            s = socket.create_connection((\"9.9.9.9\", 80))\n\
            s.recv(100)\n\
            try:\n\
            \x20   while True:\n\
            \x20       s.sendall(b\"x\"); s.recv(1); open(\"/tmp/talk\", \"w\").write(\"on\"); time.sleep(0.05)\n\
            except OSError as e:\n\
            \x20   open(\"/tmp/talk\", \"w\").write(type(e).__name__)' >/dev/null 2>&1 &";
        test_home.sh(&id, talk);
        let report = |what: &str| {
            wait_for(what, || {
                (test_home.sh(&id, "cat /tmp/talk 2>/dev/null || true") == what).then_some(())
            });
        };
        report("on");
        let path = format!("/sandboxes/{id}/network");
        let put = |rules: Value| call(test_home, "PUT", &path, &rules).0;
        assert_eq!(put(json!({ "denyOut": ["9.9.9.9"] })), 204);
        report("ConnectionResetError");
        assert_eq!(now(&id), [false, true, true, true]);
        // Invalid rules are rejected, and change nothing.
        for rules in [
            json!({ "allowOut": ["2a00:9::9"], "denyOut": ["0.0.0.0/0"] }),
            json!({ "allowOut": ["10.1.0.0/16"] }),
            json!({ "dnsServers": ["127.0.0.1"] }),
        ] {
            let (status, why) = call(test_home, "PUT", &path, &rules);
            assert_eq!(status, 400, "{rules}: {why}");
            let body = json!({ "templateID": "base", "network": rules });
            assert_eq!(
                call(test_home, "POST", "/sandboxes", &body).0,
                400,
                "{rules}"
            );
        }
        assert_eq!(now(&id), [false, true, true, true]);
        // The rules persist across pause and resume, and apply to children.
        test_home.ok(&["pause", &id]);
        test_home.ok(&["resume", &id]);
        assert_eq!(now(&id), [false, true, true, true]);
        let child = test_home.ok(&["fork", &id]);
        assert_eq!(
            now(child.lines().next().unwrap()),
            [false, true, true, true]
        );
        assert_eq!(put(json!({})), 204);
        assert_eq!(now(&id), [true; 4]);
    });
}

#[jiffy_test(lab)]
fn the_send_rate_is_limited_until_the_limit_is_lifted() {
    /// The limit of the sandbox (1 Mbit/s) in bytes per second.
    const RATE_BYTES: f64 = 125_000.0;
    networked(&[], |test_home, lab| {
        let id = create(test_home, json!({ "network": { "egressMbps": 1 } }));
        let flood = "import socket, time\n\
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
            began = time.monotonic()\n\
            for _ in range(1000):\n\
            \x20   s.sendto(bytes(1000), ('9.9.9.9', 7)); time.sleep(0.0002)\n\
            print(time.monotonic() - began)\n\
            s.sendto(b'end', ('9.9.9.9', 7))";
        let arrived = || {
            let took: f64 = python(test_home, &id, flood).parse().unwrap();
            let mut bytes = 0;
            // The last packet may be lost like others.
            while let Ok((_, datagram)) = lab.datagrams.recv_timeout(Duration::from_secs(1)) {
                bytes += datagram.len();
            }
            (took, bytes)
        };
        let (took, bytes) = arrived();
        // The burst may be one second's worth. Half a second is tolerance.
        let most = RATE_BYTES * (took + 1.5);
        assert!(bytes > 20_000, "{bytes} bytes in {took} s");
        assert!((bytes as f64) < most, "{bytes} bytes in {took} s");
        // The limit also applies after a pause, and new rules remove it.
        test_home.ok(&["pause", &id]);
        test_home.ok(&["resume", &id]);
        let (took, bytes) = arrived();
        // The burst may be one second's worth.
        let most = RATE_BYTES * (took + 1.5);
        assert!((bytes as f64) < most, "{bytes} bytes in {took} s");
        let path = format!("/sandboxes/{id}/network");
        assert_eq!(call(test_home, "PUT", &path, &json!({})).0, 204);
        let (took, bytes) = arrived();
        // Without a limit, most of the 1,000,000 sent bytes arrive.
        assert!(bytes > 600_000, "{bytes} bytes in {took} s");
    });
}

/// Functions of Python for guests. `greet`, `http` and `tls` return the first word of the answer:
/// `internet` from a server of the lab, or `HTTP/1.1` if the host's proxy rejects the name.
pub const GREET: &str = r#"
import ssl
def greet(host, port, greeting, patience=10):
    try:
        with socket.create_connection((host, port), patience) as s:
            s.sendall(greeting)
            return (s.recv(100).decode(errors="replace").split() or ["closed"])[0]
    except OSError as e:
        return type(e).__name__
def http(name, host="8.8.8.8"):
    return greet(host, 80, f"GET / HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())
def tls(name, host="8.8.8.8"):
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = ssl.create_default_context().wrap_bio(there, here, server_hostname=name)
    try: hello.do_handshake()
    except ssl.SSLWantReadError: pass
    return greet(host, 443, here.read())
def resolve(name):
    try: return socket.gethostbyname(name)
    except OSError: return "none"
"#;

#[jiffy_test(lab)]
fn allowed_names_are_sniffed_and_resolved_by_the_host() {
    networked(&[], |test_home, _| {
        let rules = json!({ "allowOut": ["good.example", "*.wild.example", "trap.example", "trap5.example", "trap6.example", "*.git.example:22", "trap5.example:22", "trap1.git.example:22"], "denyOut": ["0.0.0.0/0"] });
        let id = create(test_home, json!({ "network": rules }));
        let say = |what: &str| python(test_home, &id, &format!("{GREET}\nprint({what})"));
        check_named_ports(test_home, &id, &rules);
        // The host ignores the address that the guest selected (8.8.8.8), and resolves the name.
        assert_eq!(
            say("http('good.example'), tls('good.example'), http('a.b.wild.example:80')"),
            "internet internet internet"
        );
        // The proxy answers a name that is not allowed with an HTTP error.
        assert_eq!(
            say("http('evil.example', '9.9.9.9'), http('wild.example')"),
            "HTTP/1.1 HTTP/1.1"
        );
        // At port 443, the proxy closes the connection: it cannot answer before the handshake.
        assert_eq!(
            say(
                "tls('evil.example', '9.9.9.9'), greet('9.9.9.9', 443, b'GET / HTTP/1.1\\r\\n\\r\\n')"
            ),
            "closed closed"
        );
        // The proxy does not connect to a private or special-purpose address of an allowed name.
        // The lab resolves `trap5.example` to 168.63.129.16, `trap6.example` to 192.0.2.9 and
        // `trap.example` to 10.9.9.9.
        assert_eq!(
            say("http('trap5.example'), http('trap6.example'), tls('trap5.example')"),
            "HTTP/1.1 HTTP/1.1 closed"
        );
        assert_eq!(
            say("http('trap.example'), http('good.example', '10.9.9.9')"),
            "HTTP/1.1 ConnectionRefusedError"
        );
        // Guests cannot reach other ports, and not the port of the proxy (3180) directly.
        assert_eq!(
            say("tcp('9.9.9.9', 7), tcp('169.254.0.22', 3180)"),
            "ConnectionRefusedError ConnectionRefusedError"
        );
        // DNS questions could leak data as well.
        assert_eq!(
            say(
                "resolve('good.example'), resolve('x.wild.example'), resolve('secret.evil.example')"
            ),
            "9.9.9.9 9.9.9.9 none"
        );
        let retained = "import threading\n\
            s = socket.create_connection(('8.8.8.8', 80), 20)\n\
            s.sendall(b'GET / HTTP/1.1\\r\\nHost: good.example\\r\\n\\r\\n')\n\
            s.recv(4096)\n\
            ssh = socket.create_connection(('a.git.example', 22), 20)\n\
            ssh.recv(4096); open('/tmp/open', 'w').close()\n\
            while s.recv(4096): pass\n\
            while ssh.recv(4096): pass\n\
            open('/tmp/cut', 'w').close()";
        let retained = format!("{PRELUDE}\n{retained}");
        test_home.ok(&[
            "exec",
            &id,
            "--",
            "sh",
            "-c",
            "nohup python3 -c \"$0\" >/tmp/log 2>&1 &",
            &retained,
        ]);
        let there = |file: &str| {
            wait_for(file, || {
                (test_home.sh(&id, &format!("ls {file} 2>/dev/null || true")) == file).then_some(())
            });
        };
        there("/tmp/open");
        let path = format!("/sandboxes/{id}/network");
        let other =
            json!({ "allowOut": ["other.example", "other.example:22"], "denyOut": ["0.0.0.0/0"] });
        assert_eq!(call(test_home, "PUT", &path, &other).0, 204);
        there("/tmp/cut");
        assert_eq!(
            say("http('good.example'), http('other.example'), tcp('9.9.9.9', 22)"),
            "HTTP/1.1 internet ConnectionResetError"
        );
        assert_eq!(say("tcp('other.example', 22)"), "internet");
        // The next daemon continues to enforce the rules. It knows no resolved address.
        test_home.kill_daemon();
        assert_eq!(
            say(
                "http('good.example'), http('other.example'), tcp('9.9.9.9', 22), tcp('other.example', 22)"
            ),
            "HTTP/1.1 internet ConnectionResetError internet"
        );
    });
}

#[jiffy_test(lab)]
fn clones_and_rolled_back_guests_have_a_network_at_once() {
    networked(&[], |test_home, _| {
        let id = test_home.ok(&["create"]);
        assert_eq!(reach(test_home, &id, "9.9.9.9"), "internet");
        test_home.ok(&["snapshot", &id, "--name", "before"]);
        let copy = test_home.ok(&["create", "--from", "before"]);
        let began = Instant::now();
        assert_eq!(reach(test_home, &copy, "9.9.9.9"), "internet");
        eprintln!(
            "a clone reached the internet {:?} after it was made",
            began.elapsed()
        );
        test_home.ok(&["rollback", &id, "before"]);
        assert_eq!(reach(test_home, &id, "9.9.9.9"), "internet");
        assert_eq!(reach(test_home, &copy, "9.9.9.9"), "internet");
    });
}

#[jiffy_test(lab)]
fn only_the_network_survives_a_killed_daemon() {
    networked(&[], |test_home, _| {
        let id = create(test_home, json!({ "network": { "denyOut": ["8.8.8.8"] } }));
        let removed = test_home.ok(&["create"]);
        let now = || ["9.9.9.9", "8.8.8.8"].map(|host| reach(test_home, &id, host));
        let right = ["internet".to_owned(), "ConnectionRefusedError".to_owned()];
        assert_eq!(now(), right);
        test_home.kill_daemon();
        // List the slots only now: until it was killed, the daemon was creating slots in advance.
        let before = slots();
        assert!(before.len() >= 2, "{before:?}");
        // The next daemon finds the guest's slot, and removes slots without a guest.
        test_home.ok(&["kill", &removed]);
        assert_eq!(now(), right);
        assert_eq!(
            python(test_home, &id, "print(socket.gethostbyname('a.example'))"),
            "9.9.9.9"
        );
        test_home.ok(&["kill", &id]);
        wait_for("slots of exited guests to be removed", || {
            (slots().iter().all(|s| !before.contains(s))).then_some(())
        });
    });
}

/// Returns the devices of slots in the lab's host with their numbers, because names are reused.
fn slots() -> Vec<String> {
    let links = output("ip", &["-o", "link"]);
    let names = links.lines().filter_map(|line| line.split('@').next());
    names
        .filter(|name| name.contains(": jf"))
        .map(str::to_owned)
        .collect()
}

#[jiffy_test(lab)]
fn a_firewall_that_drops_forwarded_packets_is_passed_and_restored() {
    with_lab(|_| {
        let test_home = TestHome::new();
        if std::process::Command::new("iptables")
            .arg("-V")
            .output()
            .is_err()
        {
            return crate::support::skip("`iptables` is not installed");
        }
        // Create the same rules as Docker.
        let iptables = |args: &str| output("iptables", &args.split(' ').collect::<Vec<_>>());
        for rule in [
            "-P FORWARD DROP",
            "-N DOCKER-USER",
            "-I FORWARD -j DOCKER-USER",
        ] {
            iptables(rule);
        }
        let before = iptables("-S");
        let mut daemon = test_home.serve(&["--network", "on"]);
        let id = test_home.ok(&["create"]);
        assert_eq!(reach(&test_home, &id, "9.9.9.9"), "internet");
        test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
        daemon.wait().unwrap();
        assert_eq!(iptables("-S"), before);
    });
}

#[jiffy_test(engine = "none", lab)]
fn a_slot_is_assigned_within_a_millisecond_and_is_never_reused() {
    with_lab(|_| {
        let home = tempfile::tempdir().unwrap();
        let config = NetworkConfig {
            ready: 8,
            ..NetworkConfig::new(home.path())
        };
        let began = Instant::now();
        let network = Network::open(&config).unwrap();
        eprintln!(
            "the host is set up and the first slot made after {:?}",
            began.elapsed()
        );
        wait_for("slots to be created in advance", || {
            (network.slots().0 == 8).then_some(())
        });
        eprintln!("eight slots are made after {:?}", began.elapsed());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let (mut took, mut leases) = (Vec::new(), Vec::new());
            for _ in 0..5 {
                let began = Instant::now();
                let lease = network.take(NicKind::Tap).await.unwrap();
                took.push(began.elapsed());
                let began = Instant::now();
                lease.replace(&NetworkRules::default()).await.unwrap();
                lease.open().unwrap();
                eprintln!(
                    "taken in {:?}, opened in {:?}",
                    took[took.len() - 1],
                    began.elapsed()
                );
                leases.push(lease);
            }
            // The median of five.
            took.sort();
            assert!(took[2] < Duration::from_millis(1), "{took:?}");
            let used: Vec<u32> = leases.iter().map(|l| l.number()).collect();
            drop(leases);
            for _ in 0..10 {
                assert!(!used.contains(&network.take(NicKind::Tap).await.unwrap().number()));
            }
        });
        network.close();
        assert_clean();
    });
}

#[jiffy_test(engine = "none", lab)]
fn networks_of_a_removed_data_directory_are_removed_by_the_next_daemon() {
    with_lab(|_| {
        let (removed, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let open =
            |home: &tempfile::TempDir| Network::open(&NetworkConfig::new(home.path())).unwrap();
        let remaining = open(&removed);
        let range = remaining.range();
        // By default, four slots are created in advance.
        wait_for("its slots", || (slots().len() == 4).then_some(()));
        let before = slots();
        // As if its daemon was killed and the data directory was removed afterwards.
        std::mem::forget(remaining);
        drop(removed);
        let next = open(&home);
        // The range of addresses that the removed directory had claimed is free again.
        assert_eq!(next.range(), range);
        wait_for("orphaned slots to be removed", || {
            slots().iter().all(|s| !before.contains(s)).then_some(())
        });
        next.close();
        assert_clean();
    });
}
