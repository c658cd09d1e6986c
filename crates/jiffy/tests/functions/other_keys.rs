//! Tests for calls on functions of another key, and for quotas of keys with functions.
//!
//! An *exchange* is a request to a sandbox or function with its response or stream. A *direct*
//! connection is passed from the daemon to the process of the tenant, which then serves its
//! requests without the gateway.

use super::client::{FunctionClient, FunctionResponse};
use super::{FunctionDaemon, PROBE, constant};
use crate::support::wait_for;
use serde_json::{Value, json};

const BOUNDARY: &str = "boundary";

/// Deploys a public function with the key `key`, over HTTP.
fn deploy(daemon: &FunctionDaemon, key: &str, name: &str, module: &[u8]) -> FunctionResponse {
    let headers = format!(
        "host: localhost\r\nx-api-key: {key}\r\n\
         content-type: multipart/form-data; boundary={BOUNDARY}\r\n"
    );
    let part = |name: &str| {
        format!("--{BOUNDARY}\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n")
    };
    let mut form = part("settings").into_bytes();
    form.extend_from_slice(b"{\"public\":true}\r\n");
    form.extend_from_slice(part("module").as_bytes());
    form.extend_from_slice(module);
    form.extend_from_slice(format!("\r\n--{BOUNDARY}--\r\n").as_bytes());
    let mut client = FunctionClient::connect(&daemon.remote.url, &headers);
    client
        .send("POST", &format!("/functions/{name}"), &form)
        .unwrap()
}

fn send(daemon: &FunctionDaemon, key: &str, method: &str, path: &str) -> FunctionResponse {
    daemon.connect(key).send(method, path, b"").unwrap()
}

fn get(daemon: &FunctionDaemon, key: &str, path: &str) -> Value {
    let answer = daemon.by_path(key, path);
    serde_json::from_slice(&answer.body).unwrap_or_else(|e| panic!("{path}: {e}: {answer:?}"))
}

/// Returns the function as its owner sees it, with its versions and its answer.
fn owner_view(daemon: &FunctionDaemon) -> Value {
    let key = &daemon.remote.key;
    let mut function = get(daemon, key, "/functions/hello");
    function["metrics"].take();
    let versions = get(daemon, key, "/functions/hello/versions");
    let answer = daemon.by_path(key, "/functions/hello/invoke/").text();
    json!([function, versions, answer])
}

/// Returns the calls of the API document that name a function, except for the deployment.
fn calls(daemon: &FunctionDaemon) -> Vec<(String, String)> {
    let document = get(daemon, &daemon.remote.key, "/openapi.json");
    let mut all = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        let Some(call) = path.strip_prefix("/functions/{name}") else {
            continue;
        };
        let methods = methods.as_object().unwrap().keys();
        all.extend(methods.map(|method| (method.to_uppercase(), call.to_owned())));
    }
    let count = all.len();
    all.retain(|call| *call != ("POST".to_owned(), String::new()));
    assert!(all.len() == count - 1 && all.len() >= 8, "{all:?}");
    all.extend(["", "/", "/some/path"].map(|path| ("POST".to_owned(), format!("/invoke{path}"))));
    all
}

/// Tests that functions of a key do not exist for another key, and that no call changes them.
pub fn calls_of_other_keys(daemon: &FunctionDaemon) {
    let before = owner_view(daemon);
    let label = before[0]["label"].as_str().unwrap();
    let (other, reader) = (daemon.key("create"), daemon.key("read"));
    for (method, call) in calls(daemon) {
        for name in ["hello", label] {
            let path = format!("/functions/{name}{call}");
            let answer = send(daemon, &other, &method, &path);
            let unknown = (404, "function_not_found".to_owned());
            assert_eq!(answer.refusal(), unknown, "{method} {path}");
        }
        if method != "GET" {
            let path = format!("/functions/{label}{call}");
            let answer = send(daemon, &reader, &method, &path);
            assert_eq!(answer.refusal().0, 403, "{method} {path}");
        }
        assert_eq!(owner_view(daemon), before, "{method} {call}");
    }

    // A deployment with the same name creates another function.
    let module = constant("the other's");
    assert_eq!(deploy(daemon, &reader, "hello", &module).refusal().0, 403);
    assert_eq!(deploy(daemon, &other, label, &module).refusal().0, 400);
    let deployed = deploy(daemon, &other, "hello", &module);
    let own: Value = serde_json::from_slice(&deployed.body).unwrap();
    assert_eq!(
        (deployed.status, &own["version"]),
        (200, &json!(1)),
        "{own}"
    );
    assert_ne!(own["label"], label);
    // The other function has one version, so a rollback is not possible.
    for (method, call, status) in [
        ("POST", "/rollback", 404),
        ("POST", "/disable", 200),
        ("DELETE", "", 204),
    ] {
        let answer = send(daemon, &other, method, &format!("/functions/hello{call}"));
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(owner_view(daemon), before, "{method} {call}");
    }
}

/// Tests the disk quota and the limit of exchanges of a key with a function.
pub fn budgets(daemon: &FunctionDaemon) {
    let create = ["key", "create", "--name", "small", "--max-exchanges", "1"];
    let create = [&create[..], &["--max-disk", "1MiB"]].concat();
    let key = daemon.remote.test_home.ok(&create);
    let module = wat::parse_bytes(PROBE).unwrap();
    let deployed = deploy(daemon, &key, "bounded", &module);
    let label = serde_json::from_slice::<Value>(&deployed.body).unwrap()["label"].clone();
    let label = label.as_str().unwrap();
    let used = || get(daemon, &key, "/limits")["used"].clone();

    // The modules of a key count towards its disk quota, and a module that exceeds the quota is not
    // stored.
    let bytes = used()["disk"]["functions"].as_u64().unwrap();
    assert!(bytes > module.len() as u64, "{bytes}");
    // The module and its compiled code exceed the rest of the quota.
    let large = constant(&"x".repeat(300 << 10));
    let refused = deploy(daemon, &key, "large", &large);
    assert_eq!(refused.refusal(), (507, "max_disk".to_owned()));
    assert_eq!(used()["disk"]["functions"], bytes);

    // A request in flight uses the only exchange, regardless of the route of further requests.
    let echo = "/functions/bounded/invoke/echo";
    let host = format!("host: {label}.fn.localhost\r\n");
    let connect_direct = || FunctionClient::connect(&daemon.direct, &host);
    let refused = (429, "max_exchanges".to_owned());
    let assert_refused = || {
        assert_eq!(daemon.by_path(&key, echo).refusal(), refused);
        assert_eq!(daemon.by_host(label, "").refusal(), refused);
        assert_eq!(connect_direct().get("/echo").unwrap().refusal(), refused);
        let other = daemon.by_path(&daemon.remote.key, "/functions/hello/invoke/");
        assert_eq!(other.status, 200, "another key's");
    };
    let is_free = || {
        let answer = daemon.by_path(&key, echo);
        (answer.status == 200).then_some(())
    };
    let mut slow = daemon.connect(&key);
    slow.begin("POST", echo, 4);
    wait_for("the request", || (used()["exchanges"] == 1).then_some(()));
    assert_refused();
    assert_eq!(slow.finish(b"body").unwrap().text(), "body");
    wait_for("the end of the request", is_free);

    // An idle direct connection does not count, but its requests do.
    let mut open = connect_direct();
    assert_eq!(open.get("/echo").unwrap().status, 200);
    wait_for("the connection to be idle", is_free);
    open.begin("POST", "/echo", 4);
    wait_for("the request", || (used()["exchanges"] == 1).then_some(()));
    assert_refused();
    assert_eq!(open.finish(b"body").unwrap().text(), "body");
    wait_for("the end of the request", is_free);
    assert_eq!(open.get("/echo").unwrap().status, 200);
    drop(open);
    let removed = send(daemon, &key, "DELETE", "/functions/bounded");
    assert_eq!(removed.status, 204);
    assert_eq!(used()["diskBytes"], 0);
}
