//! Tests for rejected deployments, and for schedules.

use super::client::{FunctionClient, FunctionResponse};
use super::{FunctionDaemon, constant, wait_for};
use serde_json::Value;

/// Maximum size of a module in bytes.
const MAX_MODULE_BYTES: usize = 64 << 20;
/// Schedule with a call in the next minute.
const EVERY_MINUTE: &str = "* * * * *";
/// Schedule without a call during the test.
const NEW_YEAR: &str = "0 0 1 1 * Europe/Berlin";

/// Deploys `module` as the function `refused` with a multipart form. Returns the response.
fn deploy(daemon: &FunctionDaemon, module: &[u8]) -> FunctionResponse {
    let key = &daemon.remote.key;
    let kind = "multipart/form-data; boundary=part";
    let headers = format!("host: localhost\r\nx-api-key: {key}\r\ncontent-type: {kind}\r\n");
    let head = "--part\r\ncontent-disposition: form-data; name=\"module\"\r\n\r\n";
    let form = [head.as_bytes(), module, b"\r\n--part--\r\n"].concat();
    let mut client = FunctionClient::connect(&daemon.remote.url, &headers);
    client.send("POST", "/functions/refused", &form).unwrap()
}

pub fn refused_modules(daemon: &FunctionDaemon) {
    let answer = deploy(daemon, b"\0asm\x01\0\0\0\xff");
    assert_eq!(answer.refusal(), (422, "invalid_module".to_owned()));
    let answer = deploy(daemon, &vec![0; MAX_MODULE_BYTES + 1]);
    assert_eq!(answer.refusal(), (413, "module_too_large".to_owned()));
    let shown = daemon.remote.call(&["function", "info", "refused"]);
    assert_eq!(shown.code, Some(1), "{shown:?}");
}

/// Returns the schedule of the function `tick`.
fn schedule(daemon: &FunctionDaemon) -> Value {
    let info = daemon.remote.json(&["function", "info", "tick"]);
    info["schedule"].clone()
}

/// Tests that a schedule is validated, shown and retained.
pub fn schedules(daemon: &FunctionDaemon) {
    let remote = &daemon.remote;
    let path = daemon.module(&constant("tick"));
    let deploy = ["function", "deploy", "tick", path.to_str().unwrap()];
    let refused = remote.call(&[&deploy[..], &["--schedule", "61 * * * *"]].concat());
    assert!(
        refused.code == Some(1) && refused.stderr.contains("is not a valid schedule"),
        "{refused:?}"
    );
    remote.ok(&[&deploy[..], &["--schedule", NEW_YEAR]].concat());
    let shown = schedule(daemon);
    assert_eq!(shown["cron"], NEW_YEAR, "{shown}");
    // Midnight in Berlin, as a time in UTC.
    let next = shown["nextAt"].as_str().unwrap();
    assert!(next.contains("-12-31T23:00:00"), "{shown}");
    // The schedule remains until a deployment replaces it.
    remote.ok(&deploy);
    let info = remote.ok(&["function", "info", "tick"]);
    assert!(info.contains(NEW_YEAR), "{info}");
    remote.ok(&[&deploy[..], &["--schedule", ""]].concat());
    assert_eq!(schedule(daemon), Value::Null);
    remote.ok(&[&deploy[..], &["--schedule", EVERY_MINUTE]].concat());
}

/// Tests that a call that was due has been made. A run that ends within its first minute has no due
/// call.
pub fn scheduled_calls(daemon: &FunctionDaemon) {
    let shown = schedule(daemon);
    if !shown["lastAt"].is_null() {
        wait_for("the end of the scheduled call", || {
            (schedule(daemon)["lastStatus"] == 200).then_some(())
        });
    }
    for count in ["missed", "skipped"] {
        assert_eq!(shown[count], 0, "{shown}");
    }
    println!("scheduled: {shown}");
    daemon.remote.ok(&["function", "rm", "tick"]);
}
