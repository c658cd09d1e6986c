//! Tests for egress proxies of sandboxes, with real guests in a simulated internet and a real
//! SOCKS5 proxy (microsocks).

use crate::support::lab::HOST;
use crate::support::network_probe::{call, create, networked, python};
use crate::support::skip;
use crate::support::socks_proxy::{ADDRESS, PASSWORD, SocksProxy, USER, microsocks};
use crate::support::test_home::TestHome;
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};
use std::process::Command;
use std::time::Duration;

/// Functions for programs in guests. `via` returns the address that the server sees.
const PROBE: &str = r#"
def via(host, port=80, greeting=b""):
    try:
        with socket.create_connection((host, port), 20) as s:
            s.sendall(greeting)
            line = s.makefile("rb").readline()
            return (line.decode(errors="replace").split() + ["closed"] * 2)[:2]
    except OSError as e:
        return type(e).__name__
def http(host, name): return via(host, 80, f"GET / HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())
def udp(host):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)
    try:
        s.connect((host, 7)); s.send(b"out"); return s.recv(10)
    except OSError: return "rejected"
"#;

/// Returns the value of the Python expression `what` in a guest. It can use the functions of
/// [`PROBE`].
fn say(test_home: &TestHome, id: &str, what: &str) -> String {
    python(test_home, id, &format!("{PROBE}\nprint(({what}))"))
}

/// Returns the rules with a proxy.
fn rules(address: &str, password: &str, rest: Value) -> Value {
    let mut rules = rest;
    rules["egressProxy"] = json!({
        "address": address, "username": USER, "password": password, "tls": { "enabled": false },
    });
    rules
}

#[jiffy_test(lab)]
fn all_connections_leave_through_the_egress_proxy_or_not_at_all() {
    let Some(program) = microsocks() else {
        return skip("microsocks is missing: run scripts/test-servers");
    };
    networked(&[], |test_home, lab| {
        let log = test_home.dir.path().join("microsocks.log");
        let proxy = SocksProxy::start(&program, log, lab);
        let direct = format!("['internet', '{HOST}']");
        let through = "['internet', '9.9.9.9']";
        let network = json!({ "network": rules(ADDRESS, PASSWORD, json!({})) });
        let id = create(test_home, network);
        let say = |what: &str| say(test_home, &id, what);

        // The proxy receives the name that was resolved, the address without one, and no name that
        // does not belong to the address.
        assert_eq!(
            say("http('a.example', 'a.example'), via('11.0.0.1', 22)"),
            format!("({through}, ['internet', '11.0.0.1'])")
        );
        assert!(proxy.connected_to("a.example:80") && proxy.connected_to("11.0.0.1:22"));
        assert_eq!(
            say("via('ssh.example', 22), http('9.9.9.9', 'false.example')"),
            format!("({through}, {through})")
        );
        assert!(proxy.connected_to("ssh.example:22") && proxy.connected_to("9.9.9.9:80"));
        assert!(!proxy.connected_to("false.example"));
        // Datagrams and private addresses are rejected, and names are resolved.
        assert_eq!(
            say(
                "udp('9.9.9.9'), via('10.9.9.9'), via('169.254.169.254'), socket.gethostbyname('a.example')"
            ),
            "('rejected', 'ConnectionRefusedError', 'ConnectionRefusedError', '9.9.9.9')"
        );
        assert!(
            lab.datagrams
                .recv_timeout(Duration::from_millis(100))
                .is_err()
        );
        credentials_are_hidden(test_home, &id);

        // Rules of the sandbox decide which connections the proxy receives.
        let path = format!("/sandboxes/{id}/network");
        let put = |rules: &Value| call(test_home, "PUT", &path, rules).0;
        let named =
            json!({ "allowOut": ["good.example", "git.example:22"], "denyOut": ["0.0.0.0/0"] });
        assert_eq!(put(&rules(ADDRESS, PASSWORD, named)), 204);
        // Jiffy answers the HTTP request to a denied name itself, with `HTTP/1.1` and an error.
        assert_eq!(
            say(
                "http('9.9.9.9', 'good.example'), via('git.example', 22), http('9.9.9.9', 'evil.example')[0], via('8.8.8.8', 22)"
            ),
            format!("({through}, {through}, 'HTTP/1.1', 'ConnectionResetError')")
        );
        assert!(proxy.connected_to("good.example:80") && proxy.connected_to("git.example:22"));
        assert!(!proxy.connected_to("evil.example") && !proxy.connected_to("8.8.8.8:22"));

        // A proxy that rejects the credentials, is at a private address, or does not run.
        let failed = "'ConnectionResetError'";
        let closed = |what: &str| {
            assert_eq!(
                say("via('9.9.9.9', 22), via('a.example', 22)"),
                format!("({failed}, {failed})"),
                "{what}"
            );
        };
        assert_eq!(put(&rules(ADDRESS, "other", json!({}))), 204);
        closed("credentials");
        let record = test_home.json(&["logs", &id, "--network"]);
        let lines = record["connections"].as_array().unwrap();
        let refused = |line: &Value| line["reason"] == "proxy" && line["address"] == "9.9.9.9";
        assert!(lines.iter().any(refused), "{record}");
        assert_eq!(put(&rules("trap.example:1080", PASSWORD, json!({}))), 204);
        closed("a private address");
        for address in ["10.9.9.9:1080", "127.0.0.1:1080", "[::1]:1080"] {
            assert_eq!(put(&rules(address, PASSWORD, json!({}))), 400, "{address}");
        }
        assert_eq!(put(&rules(ADDRESS, PASSWORD, json!({}))), 204);
        // The proxy also applies after a resume, to a clone, and with the next daemon.
        test_home.ok(&["pause", &id]);
        test_home.ok(&["resume", &id]);
        let copy = test_home.ok(&["fork", &id]);
        test_home.kill_daemon();
        for id in [&id, &copy] {
            assert_eq!(self::say(test_home, id, "via('a.example', 22)"), through);
        }
        drop(proxy);
        closed("no proxy");
        // Without the proxy, connections leave directly.
        assert_eq!(put(&json!({})), 204);
        assert_eq!(say("via('9.9.9.9')"), direct);
    });
}

/// Checks that neither the API, nor the guest, nor a file of the data directory shows the
/// credentials. Files of the guest's disk and memory, which are large, are not searched.
fn credentials_are_hidden(test_home: &TestHome, id: &str) {
    let (status, shown) = call(test_home, "GET", &format!("/sandboxes/{id}"), &json!({}));
    let shown_proxy = json!({ "address": ADDRESS });
    let shown_json: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(status, 200);
    assert_eq!(shown_json["network"]["egressProxy"], shown_proxy, "{shown}");
    let inspected = test_home.ok(&["inspect", id, "--json"]);
    let described = test_home.ok(&["inspect", id]);
    assert!(described.contains(ADDRESS), "{described}");
    for text in [&shown, &inspected, &described] {
        assert!(!text.contains(USER) && !text.contains(PASSWORD), "{text}");
    }
    let guest = "cat /proc/*/environ /etc/environment /run/jiffy/* 2>/dev/null | grep -a -c -e user-7f3a -e password-91c2 || true";
    assert_eq!(test_home.sh(id, guest), "0");
    let words = "-type f -size -16M -exec grep -l -a -e user-7f3a -e password-91c2 {} +";
    let mut find = Command::new("find");
    let found = find
        .arg(test_home.dir.path())
        .args(words.split(' '))
        .output()
        .unwrap();
    let files = String::from_utf8(found.stdout).unwrap();
    assert_eq!(files, "");
    // The search finds a text of the journal or the log.
    let words = words.replace("user-7f3a", "8.8.8.8:1080");
    let mut find = Command::new("find");
    let found = find
        .arg(test_home.dir.path())
        .args(words.split(' '))
        .output()
        .unwrap();
    assert!(!found.stdout.is_empty());
}
