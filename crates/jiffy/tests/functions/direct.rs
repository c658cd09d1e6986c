//! Tests for direct requests to public functions of several owners on one port.
//!
//! A *direct* connection is passed from the daemon to the process of the tenant, which then serves
//! its requests without the gateway. The *label* of a function is the first part of its host name.

use super::client::{FunctionClient, FunctionResponse};
use super::{FunctionDaemon, constant};
use std::net::TcpListener;

/// Returns an unused address for `--functions-listen`.
pub fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

fn client(daemon: &FunctionDaemon, label: &str) -> FunctionClient {
    let headers = format!("host: {label}.fn.localhost\r\nx-request-id: mine\r\n");
    FunctionClient::connect(&daemon.direct, &headers)
}

fn get(daemon: &FunctionDaemon, label: &str) -> FunctionResponse {
    client(daemon, label).get("/path").unwrap()
}

/// Tests requests to functions of two owners on the address for direct requests.
pub fn direct_requests(daemon: &FunctionDaemon) {
    let remote = &daemon.remote;
    let label = |name: &str| {
        let info = remote.json(&["function", "info", name]);
        info["label"].as_str().unwrap().to_owned()
    };
    daemon.deploy("direct", &constant("direct"), &["--public"]);
    daemon.deploy("private", &constant("private"), &[]);
    let direct = label("direct");
    let port = daemon.direct.rsplit(':').next().unwrap();
    let info = remote.json(&["function", "info", "direct"]);
    assert_eq!(
        info["directUrl"],
        format!("http://{direct}.fn.localhost:{port}/"),
        "{info}"
    );
    let info = remote.json(&["function", "info", "private"]);
    assert_eq!(info.get("directUrl"), None, "{info}");
    let mut retained = client(daemon, &direct);
    for _ in 0..3 {
        let answer = retained.get("/path").unwrap();
        assert_eq!((answer.status, answer.text().as_str()), (200, "direct"));
        // The daemon assigns its own id, and ignores the client's id `mine`.
        assert_eq!(answer.header("x-request-id").unwrap().len(), 32);
    }
    let unknown = (404, "function_not_found".to_owned());
    for other in [&label("private"), "direct", "direct--000000000000"] {
        let answer = get(daemon, other);
        assert!(answer.header("x-request-id").is_some(), "{answer:?}");
        assert_eq!(answer.refusal(), unknown, "{other}");
    }
    // The control plane is not available on this port.
    let mut control = FunctionClient::connect(&daemon.direct, "host: localhost\r\n");
    assert_eq!(control.get("/functions").unwrap().refusal(), unknown);

    // A function of the same name of another owner on the same port.
    let other = daemon.key("create");
    let path = daemon.module(&constant("the other's"));
    let deploy = [
        "function",
        "deploy",
        "direct",
        path.to_str().unwrap(),
        "--public",
        "--json",
    ];
    let mut deploy = remote.command(&deploy);
    let deployed = crate::support::finish(deploy.env("JIFFY_API_KEY", &other).spawn().unwrap());
    let deployed: serde_json::Value = serde_json::from_str(&deployed.stdout).unwrap();
    let theirs = get(daemon, deployed["label"].as_str().unwrap());
    assert_eq!(theirs.text(), "the other's");
    assert_eq!(retained.get("/path").unwrap().text(), "direct");
    let removed = daemon
        .connect(&other)
        .send("DELETE", "/functions/direct", b"");
    assert_eq!(removed.unwrap().status, 204);

    // Changes apply to new and to open connections.
    remote.ok(&["function", "disable", "direct"]);
    let disabled = (503, "function_disabled".to_owned());
    assert_eq!(get(daemon, &direct).refusal(), disabled);
    assert_eq!(retained.get("/path").unwrap().refusal(), disabled);
    remote.ok(&["function", "enable", "direct"]);
    daemon.deploy("direct", &constant("second"), &[]);
    assert_eq!(get(daemon, &direct).text(), "second");
    assert_eq!(retained.get("/path").unwrap().text(), "second");
    let info = remote.json(&["function", "info", "direct"]);
    // Three requests at first, one after the other owner's deployment, and two to the new version.
    assert!(info["metrics"]["requests"].as_u64().unwrap() >= 6, "{info}");
    remote.ok(&["function", "rm", "direct", "private"]);
    assert_eq!(get(daemon, &direct).refusal(), unknown);
}
