//! Idle timeouts with real guests: which uses of a sandbox prevent its pause, and which resume it.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

use crate::support::build_project::BuildProject;
use crate::support::test_home::TestHome;
use crate::support::{sandbox_http, wait_for};
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};

/// Idle timeout of all sandboxes.
const IDLE: &str = "2s";
/// Idle timeout of sandboxes in use: longer than a use takes to start on a busy host.
const IDLE_OF_USED: &str = "5s";
/// Port of the server in a sandbox.
const PORT: u16 = 8000;
/// Starts a server that is no command of a client, and waits until it listens.
const SERVE: &str = "cd /tmp; setsid python3 -m http.server 8000 >/dev/null 2>&1 & \
     until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000))' 2>/dev/null; \
     do :; done";

fn create(test_home: &TestHome, idle: &str) -> String {
    test_home.ok(&["create", "--cpu", "1", "--idle-timeout", idle])
}

/// Returns the causes of the pauses of a sandbox.
fn causes(test_home: &TestHome, id: &str) -> Vec<Value> {
    let select = ["events", "--json", "--type", "sandbox.paused", "--sandbox"];
    let lines = test_home.ok(&[&select[..], &[id]].concat());
    let events = lines.lines().map(serde_json::from_str::<Value>);
    events
        .map(|event| event.unwrap()["cause"].clone())
        .collect()
}

fn is_paused(test_home: &TestHome, id: &str) -> bool {
    sandbox_http::sandbox(test_home, id)["state"] == "paused"
}

fn wait_until_paused(test_home: &TestHome, id: &str) {
    wait_for("the pause", || is_paused(test_home, id).then_some(()));
}

/// Returns the status of a request to the server in a sandbox.
fn request(test_home: &TestHome, id: &str) -> u16 {
    sandbox_http::get(test_home, id, PORT, "/").0
}

#[jiffy_test(engine = "each")]
fn an_idle_sandbox_is_paused_and_the_next_request_resumes_it() {
    let test_home = TestHome::new();
    // A sandbox that receives its idle timeout while it runs.
    let id = test_home.ok(&["create", "--cpu", "1"]);
    test_home.ok(&["timeout", &id, "1h", "--idle", IDLE]);
    assert!(
        test_home
            .ok(&["inspect", &id])
            .contains("idle timeout 2 s, then paused")
    );
    test_home.sh(&id, &format!("echo kept >/tmp/state; {SERVE}"));
    wait_until_paused(&test_home, &id);
    // A command resumes the sandbox, with its memory.
    assert_eq!(test_home.sh(&id, "cat /tmp/state"), "kept");
    wait_until_paused(&test_home, &id);
    assert_eq!(request(&test_home, &id), 200);
    // A new daemon adopts the running sandbox, and starts the timeout again.
    test_home.kill_daemon();
    // This command starts the new daemon, and uses no sandbox.
    test_home.ok(&["ls"]);
    wait_until_paused(&test_home, &id);
    test_home.ok(&["resume", &id]);
    wait_until_paused(&test_home, &id);
    // All four pauses above.
    assert_eq!(causes(&test_home, &id), vec![json!("idle"); 4]);
}

#[jiffy_test(engine = "each")]
fn a_sandbox_in_use_is_not_paused() {
    let test_home = TestHome::new();
    // A command of a client that waits for it, and a command whose client has disconnected.
    let attached = create(&test_home, IDLE_OF_USED);
    let mut client = test_home.begin(&["exec", &attached, "--", "sleep", "1000"]);
    let detached = create(&test_home, IDLE_OF_USED);
    let mut leaving = test_home.begin(&["exec", &detached, "--", "sleep", "1000"]);
    let has_command =
        |id: &str| test_home.call(&["exec", id, "--", "pgrep", "sleep"]).code == Some(0);
    for id in [&attached, &detached] {
        wait_for("the command", || has_command(id).then_some(()));
    }
    leaving.kill().unwrap();
    leaving.wait().unwrap();
    let busy = create(&test_home, IDLE_OF_USED);
    test_home.sh(
        &busy,
        "setsid sh -c 'while :; do :; done' >/dev/null 2>&1 &",
    );
    let idle = create(&test_home, IDLE_OF_USED);
    let served = create(&test_home, IDLE_OF_USED);
    test_home.sh(&served, SERVE);
    // Wait for two timeouts. Only the idle sandbox is paused, and the others remain in use.
    for _ in 0..2 {
        wait_for("the pause of the idle sandbox", || {
            assert_eq!(request(&test_home, &served), 200);
            is_paused(&test_home, &idle).then_some(())
        });
        test_home.ok(&["resume", &idle]);
    }
    for id in [&attached, &detached, &busy, &served] {
        assert!(!is_paused(&test_home, id), "{id}");
        assert_eq!(causes(&test_home, id), Vec::<Value>::new(), "{id}");
    }
    // The timeouts of these sandboxes start when their uses end.
    for (id, program) in [(&attached, "sleep"), (&detached, "sleep"), (&busy, "sh")] {
        test_home.call(&["exec", "--user", "root", id, "--", "pkill", "-x", program]);
    }
    client.wait().unwrap();
    // No client sends requests to `served` any longer.
    for id in [&attached, &detached, &busy, &served] {
        wait_until_paused(&test_home, id);
        assert_eq!(causes(&test_home, id), ["idle"]);
    }
}

#[jiffy_test(root)]
fn a_template_has_a_default_idle_timeout_and_its_start_command_is_no_use() {
    let project = BuildProject::new();
    project.file("Dockerfile", "FROM base\nWORKDIR /tmp\n");
    let start = [
        "--start",
        "exec python3 -m http.server 8000",
        "--ready-port",
        "8000",
    ];
    project.built("server", &[&start[..], &["--idle-timeout", IDLE]].concat());
    let test_home = &project.test_home;
    let shown = test_home.ok(&["template", "inspect", "server"]);
    assert!(shown.contains("idle timeout 2 s"), "{shown}");
    let id = test_home.ok(&["create", "--template", "server"]);
    wait_until_paused(test_home, &id);
    assert_eq!(request(test_home, &id), 200);
    let never = test_home.ok(&["create", "--template", "server", "--idle-timeout", "0"]);
    assert!(!test_home.ok(&["inspect", &never]).contains("idle timeout"));
}
