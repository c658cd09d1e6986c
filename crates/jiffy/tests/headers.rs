//! Headers with secrets, which the host adds to requests of real guests in a simulated internet.

use crate::site_settings::network::TestAuthority;
use crate::support::lab::Lab;
use crate::support::network_probe::{assert_clean, call, create, python};
use crate::support::skip;
use crate::support::socks_proxy::{ADDRESS, PASSWORD, SocksProxy, USER, microsocks};
use crate::support::test_home::TestHome;
use crate::support::wait_for;
use jiffy_test_attributes::jiffy_test;
use jsonwebtoken::jwk::JwkSet;
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Public address of the daemon in identity tokens.
const ISSUER: &str = "https://issuer.example";
/// Audience of identity tokens.
const AUDIENCE: &str = "sts.amazonaws.com";
/// Value of the secret.
const SECRET: &str = "value-of-the-secret-that-no-guest-receives";

/// Web server that appends host, path and authorization of each request to a file.
const SERVER: &str = r#"
import http.server, os, ssl, sys, threading
log, certificate, key = sys.argv[1:4]
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        with open(log, "a") as file:
            file.write(f"{self.headers['Host']} {self.path} {self.headers.get('Authorization')}\n")
        body = b"served"
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("0.0.0.0", 8443), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate, key)
server.socket = context.wrap_socket(server.socket, server_side=True)
open(log, "a").close()
# Exit when the test process, which holds the other end of standard input, has ended.
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
server.serve_forever()
"#;

/// Functions of guests: requests, and the issuer of the certificate of a host.
const GUEST: &str = r#"
import ssl, socket, urllib.request, urllib.error
def get(url, **headers):
    try: return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20).status
    except urllib.error.HTTPError as e: return e.code
    except OSError as e: return type(e).__name__
def connect(name, address):
    context = ssl.create_default_context()
    return context.wrap_socket(socket.create_connection((address, 443), 20), server_hostname=name)
def issuer(name, address="9.9.9.9"):
    with connect(name, address) as s:
        names = {k: v for part in s.getpeercert()["issuer"] for k, v in part}
        return "host" if names["commonName"].startswith("Jiffy headers of a sandbox") else "server"
def raw(name, address, request):
    with connect(name, address) as s:
        s.sendall(request.encode()); return s.recv(4096).decode().split()[1]
"#;

/// A web server in the internet of a lab. Its process ends with this value.
struct WebServer(Child);

impl Drop for WebServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the server at port 443 of 9.9.9.9.
fn serve(lab: &Lab, directory: &Path, log: &Path) -> WebServer {
    let server = lab.in_internet(|| {
        // Other servers of the lab occupy the port at all addresses.
        let redirect = "add table ip web\n\
            add chain ip web in { type nat hook prerouting priority dstnat; }\n\
            add chain ip web local { type nat hook output priority -100; }\n\
            add rule ip web in ip daddr 9.9.9.9 tcp dport 443 redirect to :8443\n\
            add rule ip web local ip daddr 9.9.9.9 tcp dport 443 redirect to :8443\n";
        let rules = directory.join("redirect.nft");
        fs::write(&rules, redirect).unwrap();
        let loaded = Command::new("nft").arg("-f").arg(&rules).status();
        assert!(loaded.unwrap().success());
        Command::new("python3")
            .args(["-c", SERVER])
            .arg(log)
            .args(["leaf.pem", "leaf.key"].map(|name| directory.join(name)))
            .stdin(Stdio::piped())
            .spawn()
            .unwrap()
    });
    let server = WebServer(server);
    wait_for("the web server", || log.exists().then_some(()));
    server
}

/// Returns whether a file below `directory` contains `text`. Files may be removed meanwhile.
fn contains(directory: &Path, text: &str) -> bool {
    // `grep` skips holes of memory and disk files.
    let mut grep = Command::new("grep");
    let found = grep.args(["-rqsF", "--devices=skip", text]).arg(directory);
    found.status().unwrap().success()
}

#[jiffy_test(lab)]
fn a_guest_uses_a_secret_that_it_never_receives() {
    in_lab_with_server(|lab, test_home, log, options, daemon| {
        check(test_home, log, options, daemon);
        check_identity(test_home, log);
        check_through_proxy(lab, test_home, log);
        check_removal(test_home, log);
    });
}

#[jiffy_test(engine = "gvisor", lab)]
fn a_guest_on_gvisor_uses_a_secret_that_it_never_receives() {
    in_lab_with_server(|_, test_home, log, _, _| check_use(test_home, log));
}

/// Runs `work` with the lab, a data directory that has the secret, the file with the server's
/// requests, the options of the daemon, and the daemon.
fn in_lab_with_server(work: impl FnOnce(&Lab, &TestHome, &Path, &[&str], &mut Child) + Send) {
    crate::support::lab::with_lab(|lab| {
        let directory = tempfile::tempdir().unwrap();
        let authority = TestAuthority::new("Test CA");
        let (certificate, key) = authority.issue(&["api.example", "other.example"]);
        for (name, text) in [
            ("ca.pem", authority.pem.clone()),
            ("leaf.pem", certificate.pem()),
            ("leaf.key", key.serialize_pem()),
        ] {
            fs::write(directory.path().join(name), text).unwrap();
        }
        let log = directory.path().join("requests");
        let _server = serve(lab, directory.path(), &log);
        let test_home = TestHome::new();
        let ca = directory.path().join("ca.pem");
        let options = [
            "--network",
            "on",
            "--warm-pool",
            "0",
            "--identity-issuer",
            ISSUER,
        ];
        let options = [&options[..], &["--guest-ca"]].concat();
        let options = [&options[..], &[ca.to_str().unwrap()]].concat();
        let mut daemon = test_home.serve(&options);
        let secret = format!("{SECRET}\n");
        let stored = test_home.call_with(&["secret", "create", "token"], secret.as_bytes());
        assert_eq!(stored.code, Some(0), "{stored:?}");
        work(lab, &test_home, &log, &options, &mut daemon);
        test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
        let _ = daemon.wait();
        drop(test_home);
        assert_clean();
    });
}

/// Returns rules that add the secret with this name to requests to `api.example`.
fn rules(secret: &str) -> Value {
    let value = format!("Bearer ${{e2b.secrets.{secret}}}");
    json!({ "api.example": [{ "transform": { "headers": { "Authorization": value } } }] })
}

/// Returns the output of an expression in a guest.
fn say(test_home: &TestHome, id: &str, expression: &str) -> String {
    python(test_home, id, &format!("{GUEST}\nprint({expression})"))
}

/// Returns the requests that the server received since the last call.
fn received(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap();
    fs::write(log, "").unwrap();
    text
}

/// Checks the use of a secret by one guest and its fork.
fn check_use(test_home: &TestHome, log: &Path) {
    let id = create(test_home, json!({ "network": { "rules": rules("token") } }));
    let request = "get('https://api.example/x', Authorization='guest')";
    let with_secret = format!("api.example /x Bearer {SECRET}\n");
    assert_eq!(say(test_home, &id, request), "200");
    assert_eq!(received(log), with_secret);
    let issuers = "issuer('api.example'), issuer('other.example')";
    assert_eq!(say(test_home, &id, issuers), "host server");
    let child = test_home.ok(&["fork", &id]);
    let child = child.lines().next().unwrap();
    assert_eq!(say(test_home, child, request), "200");
    assert_eq!(received(log), with_secret);
}

/// Checks rules with a secret: which requests receive the header, and when rules end.
fn check(test_home: &TestHome, log: &Path, options: &[&str], daemon: &mut Child) {
    let body = json!({ "templateID": "base", "network": { "rules": rules("missing") } });
    assert_eq!(call(test_home, "POST", "/sandboxes", &body).0, 400);
    let id = create(test_home, json!({ "network": { "rules": rules("token") } }));
    let say = |id: &str, what: &str| say(test_home, id, what);
    let received = || received(log);
    let with_secret = format!("api.example /x Bearer {SECRET}\n");
    assert_eq!(
        say(&id, "get('https://api.example/x', Authorization='guest')"),
        "200"
    );
    assert_eq!(received(), with_secret);
    // Only connections to the named host are decrypted.
    assert_eq!(
        say(&id, "issuer('api.example'), issuer('other.example')"),
        "host server"
    );
    assert_eq!(say(&id, "get('https://other.example/x')"), "200");
    assert_eq!(received(), "other.example /x None\n");
    // The host resolves the name: the address that the guest chose is not used.
    let get = "GET /x HTTP/1.1\\r\\nHost: api.example\\r\\nConnection: close\\r\\n\\r\\n";
    assert_eq!(
        say(&id, &format!("raw('api.example', '8.8.8.8', '{get}')")),
        "200"
    );
    assert_eq!(received(), with_secret);
    // Names that disagree, and plain HTTP, receive nothing.
    let other = get.replace("Host: api", "Host: other");
    assert_eq!(
        say(&id, &format!("raw('api.example', '9.9.9.9', '{other}')")),
        "421"
    );
    assert_eq!(
        say(&id, &format!("raw('other.example', '9.9.9.9', '{get}')")),
        "200"
    );
    assert_eq!(received(), "api.example /x None\n");
    assert_eq!(say(&id, "get('http://api.example/x')"), "403");
    // The rules are carried by forks, pauses and the next daemon.
    let child = test_home.ok(&["fork", &id]);
    let child = child.lines().next().unwrap();
    assert_eq!(say(child, "get('https://api.example/x')"), "200");
    assert_eq!(received(), with_secret);
    test_home.ok(&["kill", child]);
    test_home.ok(&["pause", &id]);
    assert!(!contains(test_home.dir.path(), SECRET));
    test_home.ok(&["resume", &id]);
    assert_eq!(say(&id, "get('https://api.example/x')"), "200");
    assert_eq!(received(), with_secret);
    test_home.kill_daemon();
    let _ = daemon.wait();
    // Start the next daemon with the same options: it must know the authority of the server, too.
    *daemon = test_home.serve(options);
    assert_eq!(say(&id, "get('https://api.example/x')"), "200");
    assert_eq!(received(), with_secret);
    // Each use is recorded without the value. A new daemon starts a new record, so the record
    // contains only the use after the restart.
    let path = format!("/sandboxes/{id}/connections");
    let (_, record) = call(test_home, "GET", &path, &Value::Null);
    assert!(!record.contains(SECRET));
    let record: Value = serde_json::from_str(&record).unwrap();
    let connections = record["connections"].as_array().unwrap().iter();
    let used: Vec<_> = connections.filter(|c| c["protocol"] == "http").collect();
    assert_eq!(used.len(), 1, "{record}");
    let expected = json!({ "method": "GET", "status": 200, "secrets": ["token"] });
    assert_eq!(
        (&used[0]["host"], &used[0]["request"]),
        (&json!("api.example"), &expected)
    );
    // Rules are changed while the sandbox runs, also of a sandbox that had none.
    let plain = create(test_home, json!({}));
    let path = format!("/sandboxes/{plain}/network");
    assert_eq!(say(&plain, "issuer('api.example')"), "server");
    let put = |rules: Value| call(test_home, "PUT", &path, &json!({ "rules": rules })).0;
    assert_eq!(put(rules("token")), 204);
    assert_eq!(
        say(
            &plain,
            "issuer('api.example'), get('https://api.example/x')"
        ),
        "host 200"
    );
    assert_eq!(received(), with_secret);
    assert_eq!(put(json!({})), 204);
    assert_eq!(
        say(
            &plain,
            "issuer('api.example'), get('https://api.example/x')"
        ),
        "server 200"
    );
    assert_eq!(received(), "api.example /x None\n");
}

/// Checks that a removed secret is an error, and not an empty header.
fn check_removal(test_home: &TestHome, log: &Path) {
    let id = create(test_home, json!({ "network": { "rules": rules("token") } }));
    test_home.ok(&["secret", "rm", "token"]);
    let status = say(test_home, &id, "get('https://api.example/x')");
    assert_eq!((status.as_str(), received(log).as_str()), ("502", ""));
}

/// Checks that requests with headers leave through the egress proxy of the sandbox, or not at all.
fn check_through_proxy(lab: &Lab, test_home: &TestHome, log: &Path) {
    let Some(program) = microsocks() else {
        return skip("microsocks is missing: run scripts/test-servers");
    };
    let proxy = SocksProxy::start(&program, test_home.dir.path().join("socks.log"), lab);
    let network = |rest: Value| {
        let mut network = rest;
        network["rules"] = rules("token");
        network["egressProxy"] =
            json!({ "address": ADDRESS, "username": USER, "password": PASSWORD });
        network
    };
    let id = create(test_home, json!({ "network": network(json!({})) }));
    let path = format!("/sandboxes/{id}/network");
    let say = |what: &str| say(test_home, &id, what);
    let with_secret = format!("api.example /x Bearer {SECRET}\n");
    // With access to all addresses, and with rules that allow the name or the address only.
    let restricted = |allowed: &str| json!({ "allowOut": [allowed], "denyOut": ["0.0.0.0/0"] });
    for (rest, server) in [
        (json!({}), "api.example:443"),
        (restricted("api.example"), "api.example:443"),
        (restricted("9.9.9.9"), "9.9.9.9:443"),
    ] {
        assert_eq!(call(test_home, "PUT", &path, &network(rest)).0, 204);
        assert!(!proxy.connected_to(server));
        assert_eq!(say("get('https://api.example/x')"), "200", "{server}");
        assert_eq!(received(log), with_secret);
        assert!(proxy.connected_to(server));
        proxy.forget();
    }
    assert_eq!(
        say("issuer('api.example'), issuer('other.example')"),
        "host server"
    );
    // Rules that do not allow the host, and a proxy that does not run.
    let denied = network(restricted("8.8.8.8"));
    assert_eq!(call(test_home, "PUT", &path, &denied).0, 204);
    assert_eq!(say("get('https://api.example/x')"), "502");
    assert_eq!(call(test_home, "PUT", &path, &network(json!({}))).0, 204);
    drop(proxy);
    assert_eq!(say("get('https://api.example/x')"), "502");
    assert_eq!(received(log), "");
    test_home.ok(&["kill", &id]);
}

/// Returns the claims of the only token that the server received since the last call. Verifies the
/// token as a service does, with the keys that the daemon publishes.
fn claims(test_home: &TestHome, log: &Path) -> Value {
    let text = received(log);
    let token = text.trim().rsplit(' ').next().unwrap();
    assert!(
        text.starts_with("api.example /x Bearer ") && text.lines().count() == 1,
        "{text}"
    );
    let (status, keys) = call(test_home, "GET", "/.well-known/jwks.json", &Value::Null);
    assert_eq!(status, 200, "{keys}");
    let keys: JwkSet = serde_json::from_str(&keys).unwrap();
    let id = decode_header(token).unwrap().kid.unwrap();
    let key = DecodingKey::from_jwk(keys.find(&id).unwrap()).unwrap();
    let mut rules = Validation::new(Algorithm::ES256);
    rules.set_audience(&[AUDIENCE]);
    rules.set_issuer(&[ISSUER]);
    // No file of the host contains the token: it never was in the guest, a log or a record.
    assert!(!contains(test_home.dir.path(), token));
    decode::<Value>(token, &key, &rules).unwrap().claims
}

/// Checks that a server recognises a sandbox and its fork by tokens that neither receives.
fn check_identity(test_home: &TestHome, log: &Path) {
    let value = "Bearer ${e2b.identity.tokens.aws}";
    let rules =
        json!({ "api.example": [{ "transform": { "headers": { "Authorization": value } } }] });
    let token = json!({ "audience": AUDIENCE, "tokenType": "JWT-SVID" });
    let body = json!({ "iam": { "tokens": { "aws": token } }, "network": { "rules": rules } });
    let id = create(test_home, body);
    let child = test_home.ok(&["fork", &id]);
    let child = child.lines().next().unwrap();
    let subject = |id: &str| {
        format!("spiffe://issuer.example/owner/host/template/host/base/default/sandbox/{id}")
    };
    for sandbox in [&id, child] {
        let status = say(
            test_home,
            sandbox,
            "get('https://api.example/x', Authorization='guest')",
        );
        assert_eq!(status, "200");
        let claims = claims(test_home, log);
        assert_eq!(claims["sub"], subject(sandbox));
        // The token is valid for five minutes.
        assert_eq!(
            claims["exp"].as_u64().unwrap() - claims["iat"].as_u64().unwrap(),
            300
        );
    }
    let path = format!("/sandboxes/{id}/connections");
    let (_, record) = call(test_home, "GET", &path, &Value::Null);
    assert!(record.contains("\"tokens\":[\"aws\"]"), "{record}");
    assert!(
        test_home
            .ok(&["logs", &id, "--network"])
            .contains("(tokens: aws)")
    );
    // Tokens are not sent without TLS.
    assert_eq!(say(test_home, &id, "get('http://api.example/x')"), "403");
    assert_eq!(received(log), "");
    test_home.ok(&["kill", &id, child]);
}
