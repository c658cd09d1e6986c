//! Load tests with the benchmark programs wrk and h2load, over direct connections and through the
//! gateway, with HTTP/1.1 and HTTP/2.

use super::{FunctionDaemon, constant};
use std::io::ErrorKind;
use std::process::Command;

/// Number of concurrent connections.
const CONNECTIONS: &str = "8";
/// Number of requests of h2load.
const REQUESTS: u64 = 2000;

/// Runs a client, which must succeed. `None` if it is not installed.
fn run(program: &str, arguments: &[&str]) -> Option<String> {
    let output = match Command::new(program).args(arguments).output() {
        Err(e) if e.kind() == ErrorKind::NotFound => {
            let is_ci = std::env::var_os("CI").is_some();
            assert!(!is_ci, "{program} is not installed: run scripts/setup");
            eprintln!("skipping {program}, which is not installed");
            return None;
        }
        output => output.unwrap(),
    };
    assert!(output.status.success(), "{program}: {output:?}");
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Returns the number before `unit` in a line of output.
fn number_of(text: &str, unit: &str) -> u64 {
    let before = text.split_once(unit).unwrap_or_else(|| panic!("{text}")).0;
    let number = before.rsplit([' ', '\n']).next().unwrap_or_default();
    number.parse().unwrap_or_else(|_| panic!("{text}"))
}

/// Returns the number of requests that wrk completed in a second. None may fail.
fn wrk(header: &str, url: &str) -> Option<u64> {
    let arguments = ["-t2", "-c", CONNECTIONS, "-d1s", "-H", header, url];
    let text = run("wrk", &arguments)?;
    let failed = ["Non-2xx", "Socket errors"].map(|error| text.contains(error));
    assert_eq!(failed, [false, false], "{text}");
    Some(number_of(&text, " requests in "))
}

/// Returns the number of requests that h2load completed. All must succeed.
fn h2load(version: &[&str], header: &str, url: &str) -> Option<u64> {
    let requests = REQUESTS.to_string();
    let load = ["-t2", "-c", CONNECTIONS, "-n", &requests, "-H", header, url];
    let text = run("h2load", &[version, &load].concat())?;
    assert!(
        text.contains(&format!("{REQUESTS} succeeded, 0 failed, 0 errored")),
        "{text}"
    );
    Some(number_of(&text, " 2xx"))
}

/// Runs both programs over both routes, as far as the programs are installed.
pub fn load_by_real_clients(daemon: &FunctionDaemon) {
    let remote = &daemon.remote;
    daemon.deploy("loaded", &constant("under load"), &["--public"]);
    let info = || remote.json(&["function", "info", "loaded"]);
    let host = format!("{}.fn.localhost", info()["label"].as_str().unwrap());
    let direct = format!("{}/path", daemon.direct);
    let by_path = format!("{}/functions/loaded/invoke/path", remote.url);
    let key = format!("X-API-Key: {}", remote.key);
    let answered = [
        wrk(&format!("Host: {host}"), &direct),
        wrk(&key, &by_path),
        h2load(&["--h1"], &format!(":authority: {host}"), &direct),
        h2load(&["--h1"], &key, &by_path),
        h2load(&[], &key, &by_path),
    ];
    println!("answered: {answered:?}");
    for answered in answered.into_iter().flatten() {
        assert!(answered >= 100, "{answered}");
    }
    let answered: u64 = answered.into_iter().flatten().sum();
    let metrics = &info()["metrics"];
    assert!(metrics["requests"].as_u64() >= Some(answered), "{metrics}");
    assert_eq!(metrics["faults"], serde_json::json!({}), "{metrics}");
    remote.ok(&["function", "rm", "loaded"]);
}
