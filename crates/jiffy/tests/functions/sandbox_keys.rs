//! Tests for functions that call sandboxes, and for sandboxes that call functions.
//!
//! With the *callback secret* of a function, a sandbox can only invoke this function.

use super::client::FunctionClient;
use crate::support::lab::with_lab;
use crate::support::network_probe::assert_clean;
use crate::support::remote::Remote;
use crate::support::skip;
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Component that sends a request to the authority in its path; see the first lines of `http.wat`.
const HTTP: &[u8] = include_bytes!("../../../function-runtime/tests/guests/http.wat");
/// Answer of the component for a denied request. For a response, it answers with R and the first
/// digit of the status.
const DENIED: &str = "EP";

/// Raw HTTP requests of a guest.
const ASK: &str = r#"
import http.client, socket
NAME = "api.jiffy.internal"
def ask(path, key=None, host=NAME, at=NAME, method="POST"):
    try:
        c = http.client.HTTPConnection(at, 80, timeout=20)
        c.request(method, path, headers={"Host": host, **({"X-API-KEY": key} if key else {})})
        r = c.getresponse()
        return "%d %s" % (r.status, r.read().decode()[:22])
    except OSError as e:
        return type(e).__name__
"#;

fn component(directory: &Path) -> PathBuf {
    let path = directory.join("http.wasm");
    fs::write(&path, wat::parse_bytes(HTTP).unwrap()).unwrap();
    path
}

/// Returns the files with records of functions of this name.
fn records(remote: &Remote, name: &str) -> Vec<PathBuf> {
    let directory = remote.test_home.dir.path().join("functions");
    let owners = fs::read_dir(directory).unwrap().flatten();
    let paths = owners.map(|owner| owner.path().join("records").join(format!("{name}.json")));
    paths.filter(|path| path.exists()).collect()
}

/// Returns the secret and the callback secret of the only function of this name.
fn secrets(remote: &Remote, name: &str) -> (String, String) {
    let [path] = &records(remote, name)[..] else {
        panic!("{:?}", records(remote, name));
    };
    assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o077, 0);
    let record: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let secret = |field: &str| record["sandbox_key"][field].as_str().unwrap().to_owned();
    (secret("secret"), secret("callback"))
}

/// Sends an API call. Returns status and body.
fn call(remote: &Remote, key: &str, method: &str, path: &str, body: &Value) -> (u16, String) {
    let headers =
        format!("host: localhost\r\nx-api-key: {key}\r\ncontent-type: application/json\r\n");
    let mut client = FunctionClient::connect(&remote.url, &headers);
    let body = match body {
        Value::Null => String::new(),
        body => body.to_string(),
    };
    let answer = client.send(method, path, body.as_bytes()).unwrap();
    (answer.status, answer.text())
}

#[jiffy_test]
fn a_function_reaches_the_control_plane_with_a_key_only_and_nothing_else_of_its_host() {
    let remote = Remote::new(&[]);
    let directory = tempfile::tempdir().unwrap();
    let module = component(directory.path());
    let module = module.to_str().unwrap();
    let deploy =
        |more: &[&str]| remote.call(&[&["function", "deploy", "f", module], more].concat());
    let fetch = |authority: &str| {
        let path = format!("/functions/f/invoke/f{authority}");
        let (status, answer) = call(&remote, &remote.key, "GET", &path, &Value::Null);
        assert_eq!(status, 200, "{answer}");
        answer[..2].to_owned()
    };
    let (name, daemon) = ("api.jiffy.internal", remote.url.replace("http://", ""));
    // Denied without a key, even if the list contains the host.
    assert_eq!(
        deploy(&["--allow", "*.internal", "--allow", "localhost"]).code,
        Some(0)
    );
    assert_eq!(fetch(name), DENIED);
    let refused = deploy(&["--allow", name]);
    assert!(
        refused.stderr.contains("only with a sandbox key"),
        "{refused:?}"
    );
    let refused = deploy(&["--sandbox-key", "admin"]);
    assert!(refused.code != Some(0), "{refused:?}");

    // With a key, only its name and port are permitted. The function sends no other key and has no
    // own rights.
    let deployed = deploy(&["--sandbox-key", "create"]);
    assert_eq!(deployed.code, Some(0), "{deployed:?}");
    for authority in [name, "API.jiffy.internal", "api.jiffy.internal.:80"] {
        assert_eq!(fetch(authority), "R4", "{authority}");
    }
    let port = daemon.rsplit(':').next().unwrap();
    for authority in [
        format!("{name}:{port}"),
        format!("{name}:443"),
        format!("{name}:8080"),
        daemon.clone(),
        format!("localhost:{port}"),
        format!("jiffy.internal:{port}"),
        "127.0.0.1".to_owned(),
        "[::1]".to_owned(),
        "169.254.0.22".to_owned(),
    ] {
        assert_eq!(fetch(&authority), DENIED, "{authority}");
    }

    // No output contains the key, and it is not valid for other connections.
    let (secret, callback) = secrets(&remote, "f");
    let shown = [
        remote.ok(&["function", "info", "f"]),
        remote.ok(&["function", "info", "f", "--json"]),
        remote.ok(&["function", "ls", "--json"]),
        remote.ok(&["function", "versions", "f", "--json"]),
        remote.ok(&["function", "logs", "f"]),
        remote.test_home.ok(&["function", "ls", "--all", "--json"]),
    ];
    for text in shown {
        assert!(
            !text.contains(&secret) && !text.contains(&callback),
            "{text}"
        );
    }
    let info = remote.json(&["function", "info", "f"]);
    assert_eq!(info["sandboxKey"], "create");
    for secret in [&secret, &callback] {
        assert_eq!(
            call(&remote, secret, "GET", "/sandboxes", &Value::Null).0,
            401
        );
    }
    // Versions of the function keep the key. A deployment replaces or revokes it.
    deploy(&["--sandbox-key", "create"]);
    assert_eq!(secrets(&remote, "f"), (secret.clone(), callback));
    deploy(&["--sandbox-key", "create", "--renew-sandbox-key"]);
    assert_ne!(secrets(&remote, "f").0, secret);
    assert_eq!(fetch(name), "R4");
    let without = deploy(&[]);
    assert_eq!(without.code, Some(0), "{without:?}");
    assert_eq!(fetch(name), DENIED);
    assert_eq!(
        remote.json(&["function", "info", "f"])["sandboxKey"],
        Value::Null
    );

    // The operator has no key: the function's sandboxes belong to a key that is removed with the
    // function.
    let home = &remote.test_home;
    home.ok(&["function", "deploy", "own", module, "--sandbox-key", "read"]);
    // No list of hosts is required.
    let fetched = home.ok(&["function", "invoke", "own", "/fapi.jiffy.internal"]);
    assert!(fetched.starts_with("R4"), "{fetched}");
    let keys = || home.json(&["key", "ls", "--all"]);
    let own = |keys: &Value| {
        let all = keys.as_array().unwrap().iter();
        let mut own = all.filter(|key| key["name"] == "function own");
        own.next().cloned().unwrap()
    };
    assert_eq!(own(&keys())["revoked_ms"], Value::Null);
    home.ok(&["function", "rm", "own"]);
    assert_ne!(own(&keys())["revoked_ms"], Value::Null);
    remote.ok(&["function", "rm", "f"]);
}

/// Creates a sandbox with these rules.
fn sandbox(remote: &Remote, key: &str, rules: Value) -> String {
    let mut body = json!({ "templateID": "base", "timeout": 600 });
    let fields = body.as_object_mut().unwrap();
    fields.extend(rules.as_object().unwrap().clone());
    let (status, answer) = call(remote, key, "POST", "/sandboxes", &body);
    assert_eq!(status, 201, "{answer}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    answer["sandboxID"].as_str().unwrap().to_owned()
}

/// Returns the output lines of a program in a guest.
fn python(remote: &Remote, id: &str, program: &str) -> Vec<String> {
    let program = format!("{ASK}\n{program}");
    let output = remote
        .test_home
        .ok(&["exec", id, "--", "python3", "-c", &program]);
    output.lines().map(str::to_owned).collect()
}

#[jiffy_test(lab)]
fn a_sandbox_calls_the_function_whose_key_it_was_given_and_nothing_else() {
    with_lab(|_| {
        let options = ["--network", "on", "--warm-pool", "0"];
        let remote = Remote::new(&options);
        let directory = tempfile::tempdir().unwrap();
        let module = component(directory.path());
        let deploy = ["function", "deploy", "f", module.to_str().unwrap()];
        remote.ok(&[&deploy[..], &["--sandbox-key", "create"]].concat());
        sandbox_and_function(&remote);
        remote.test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
        drop(remote);
        assert_clean();
    });
}

/// Tests which sandboxes reach the function, and how the access ends.
fn sandbox_and_function(remote: &Remote) {
    let (secret, callback) = secrets(remote, "f");
    let name = json!({ "network": { "allowOut": ["api.jiffy.internal"] } });
    let closed = json!({
        "allow_internet_access": false,
        "network": { "allowOut": ["api.jiffy.internal"] },
    });
    let invoke = format!("ask('/functions/f/invoke/x', '{callback}')");
    for rules in [name.clone(), closed] {
        let id = sandbox(remote, &remote.key, rules);
        let report = python(
            remote,
            &id,
            &format!(
                r#"
print({invoke})
print(ask('/functions/f/invoke/x'))
print(ask('/functions/f/invoke/x', '{secret}'))
print(ask('/functions/f/invoke/x', '{}'))
print(ask('/functions/other/invoke/x', '{callback}'))
print(ask('/functions/f', '{callback}', method='GET'))
print(ask('/sandboxes', '{callback}', method='GET'))
print(ask('/functions/f/invoke/x', '{callback}', host='localhost'))
print(ask('/functions/f/invoke/x', '{callback}', host='f.fn.localhost'))
found = []
for port in [22, 53, 80, 443, 3000, 3180, 3443, 49983]:
    try: socket.create_connection((socket.gethostbyname(NAME), port), 5); found.append(port)
    except OSError: pass
print(found)
# A second request on the same connection reaches no other host.
c = http.client.HTTPConnection(NAME, 80, timeout=20)
for host in (NAME, "localhost"):
    c.request("POST", "/functions/f/invoke/x", headers={{"Host": host, "X-API-KEY": "{callback}"}})
    r = c.getresponse(); r.read(); print(r.status)
"#,
                remote.key
            ),
        );
        let status: Vec<&str> = report.iter().map(|line| &line[..3]).collect();
        // The callback secret invokes the function. Requests without a key, with the function's own
        // secret and with the owner's key are rejected (1 to 3). The callback secret is rejected
        // for other calls (4 to 6) and other host names (7 and 8).
        assert_eq!(report[0], "200 hello from a component", "{report:?}");
        assert_eq!(status[1..4], ["401"; 3], "{report:?}");
        assert_eq!(status[4..7], ["401", "401", "403"], "{report:?}");
        assert_eq!(status[7..9], ["403", "403"], "{report:?}");
        // Only the ports for DNS (53) and for the control plane (80) accept connections.
        assert_eq!(report[9], "[53, 80]");
        assert_eq!(status[10..], ["200", "421"]);
    }

    // The control plane is not accessible without a rule that names it, neither by a pattern nor by
    // its address.
    for rules in [
        json!({}),
        json!({ "allow_internet_access": false }),
        json!({ "network": { "allowOut": ["*.internal", "*.jiffy.internal"] } }),
        json!({ "network": { "allowOut": ["9.9.9.9"], "denyOut": ["0.0.0.0/0"] } }),
    ] {
        let id = sandbox(remote, &remote.key, rules.clone());
        let at = format!("ask('/functions/f/invoke/x', '{callback}', at='169.254.0.22')");
        let report = python(remote, &id, &format!("print({invoke})\nprint({at})"));
        assert_eq!(report[0], "gaierror", "{rules}");
        assert!(!report[1].starts_with("200"), "{rules}: {report:?}");
    }

    // The secret is not valid in another key's sandbox, and sandboxes of the operator have no
    // access.
    let create = ["key", "create", "--name", "other"];
    let other = remote.test_home.ok(&create);
    let id = sandbox(remote, &other, name.clone());
    let report = python(remote, &id, &format!("print({invoke})"));
    assert!(report[0].starts_with("401"), "{report:?}");
    let id = crate::support::network_probe::create(&remote.test_home, name.clone());
    let report = python(remote, &id, &format!("print({invoke})"));
    assert_eq!(report[0], "gaierror");

    // The removal of rules or keys revokes the access.
    let id = sandbox(remote, &remote.key, name);
    assert!(python(remote, &id, &format!("print({invoke})"))[0].starts_with("200"));
    let path = format!("/sandboxes/{id}/network");
    let (status, answer) = call(remote, &remote.key, "PUT", &path, &json!({}));
    assert_eq!(status, 204, "{answer}");
    assert_eq!(
        python(remote, &id, &format!("print({invoke})"))[0],
        "gaierror"
    );
    let rules = json!({ "allowOut": ["api.jiffy.internal"] });
    assert_eq!(call(remote, &remote.key, "PUT", &path, &rules).0, 204);
    assert!(python(remote, &id, &format!("print({invoke})"))[0].starts_with("200"));
    remote.ok(&["function", "rm", "f"]);
    assert!(python(remote, &id, &format!("print({invoke})"))[0].starts_with("401"));
}

/// Builds the example like its author would, if the tools are installed.
fn example(directory: &Path) -> Option<PathBuf> {
    let has_npm = Command::new("npm").arg("--version").output();
    if !has_npm.is_ok_and(|output| output.status.success()) {
        skip("npm is not installed");
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/functions/agent");
    for entry in fs::read_dir(source).unwrap().flatten() {
        if entry.file_type().unwrap().is_file() {
            fs::copy(entry.path(), directory.join(entry.file_name())).unwrap();
        }
    }
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("example-packages");
    let packages = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/example-packages");
    let packages = (packages, vec![directory, cache.as_path()]);
    let own = ["test", "build"].map(|script| (directory.join(script), Vec::new()));
    for (script, arguments) in [packages].into_iter().chain(own) {
        let ran = Command::new(&script).args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert!(ran.status.success(), "{}: {text}", script.display());
    }
    Some(directory.join("function.wasm"))
}

#[jiffy_test(lab)]
fn the_example_runs_each_job_in_a_sandbox_that_calls_it_back_and_ends() {
    if std::env::var_os("JIFFY_EXAMPLES").is_none() {
        return skip("building the example takes minutes on a busy host: make soak");
    }
    let directory = tempfile::tempdir().unwrap();
    let Some(module) = example(directory.path()) else {
        return;
    };
    with_lab(|_| {
        let options = ["--network", "on", "--warm-pool", "0"];
        let remote = Remote::new(&options);
        jobs(&remote, &module);
        remote.test_home.ok(&["daemon", "stop", "--kill-sandboxes"]);
        drop(remote);
        assert_clean();
    });
}

/// Tests the example: each request runs a job in a new sandbox.
fn jobs(remote: &Remote, module: &Path) {
    let deploy = ["function", "deploy", "agent", module.to_str().unwrap()];
    let limits = ["--timeout", "2m", "--cpu-ms", "5000", "--memory", "256MiB"];
    let key = ["--sandbox-key", "create"];
    remote.ok(&[&deploy[..], &limits, &key].concat());
    let run = |program: &str| -> Value {
        let answer = remote.ok(&["function", "invoke", "agent", "-d", program]);
        serde_json::from_str(&answer).unwrap_or_else(|e| panic!("{e}: {answer}"))
    };
    let job = r#"hostname; id -un >&2
curl -sS -H "X-API-KEY: $JIFFY_CALLBACK_KEY" -d "half done" "${JIFFY_CALLBACK_URL}report"
env | grep -c E2B_API_KEY; curl -sS -m 5 http://9.9.9.9/ >/dev/null && echo out; exit 7"#;
    let first = run(job);
    assert_eq!(first["status"], 7, "{first}");
    assert!(
        first["errors"].as_str().unwrap().starts_with("user\n"),
        "{first}"
    );
    let output = first["output"].as_str().unwrap();
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines[1..], ["noted", "0"], "{first}");
    let logs = remote.ok(&["function", "logs", "agent"]);
    assert!(logs.contains("report: half done"), "{logs}");
    // Each job has a separate sandbox, which leaves no files.
    let second = run("hostname; ls /tmp");
    assert_eq!(second["status"], 0, "{second}");
    assert_ne!(
        second["output"].as_str().unwrap().lines().next(),
        Some(lines[0])
    );
    assert_eq!(remote.json(&["ls"]), json!([]));
    // A function with the scope `read` cannot create sandboxes.
    remote.ok(&[&deploy[..], &limits, &["--sandbox-key", "read"]].concat());
    let refused = remote.call(&["function", "invoke", "agent", "-d", "true"]);
    let text = format!("{}{}", refused.stdout, refused.stderr);
    assert!(
        text.contains("no sandbox") && text.contains("is read-only"),
        "{text}"
    );
}
