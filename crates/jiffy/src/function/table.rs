//! Tables and details of functions, from the JSON responses of the API.
//!
//! The *world* of a function is the interface between its WebAssembly module and the host.

use crate::columns::{Align, Table};
use serde_json::Value;
use std::fmt::Write as _;

/// Returns the text of the value at the JSON pointer `field`, for example `/limits/cpuMs`. Empty if
/// the value is missing.
fn text(value: &Value, field: &str) -> String {
    match value.pointer(field) {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// Returns the elements of a list. Empty if the value is not a list.
fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Returns the name of a changed function.
pub fn name(function: &Value) -> String {
    format!("{}\n", text(function, "/name"))
}

/// Returns the current version of a function and its address.
pub fn current_version(function: &Value) -> String {
    let (name, version) = (text(function, "/name"), text(function, "/version"));
    let mut line = format!("{name}: version {version} at {}", address(function));
    if function["public"] != true {
        line.push_str("; requests need a key");
    }
    line.push('\n');
    line
}

/// Returns the URL of a function, or its path if the daemon has no domain.
fn address(function: &Value) -> String {
    match text(function, "/url") {
        url if url.is_empty() => text(function, "/path"),
        url => url,
    }
}

/// Returns a table of functions.
pub fn functions(all: &Value) -> String {
    let all = list(all);
    if all.is_empty() {
        return "no functions; deploy one with `jiffy function deploy`\n".to_owned();
    }
    let mut table = Table::new([
        ("NAME", Align::Left),
        ("STATE", Align::Left),
        ("ACCESS", Align::Left),
        ("VERSION", Align::Right),
        ("WORLD", Align::Left),
        ("DEPLOYED", Align::Left),
        ("SCHEDULE", Align::Left),
    ]);
    for function in all {
        let access = if function["public"] == true {
            "public"
        } else {
            "key"
        };
        table.row([
            text(function, "/name"),
            text(function, "/state"),
            access.to_owned(),
            text(function, "/version"),
            text(function, "/world"),
            text(function, "/updatedAt"),
            text(function, "/schedule/cron"),
        ]);
    }
    table.text()
}

/// Returns a digest in the format of `deploy --digest`.
fn digest(version: &Value) -> String {
    match text(version, "/digest") {
        digits if digits.is_empty() => digits,
        digits => format!("blake3:{digits}"),
    }
}

/// Returns a table of the versions of a function, newest first.
pub fn versions(all: &Value) -> String {
    let mut table = Table::new([
        ("VERSION", Align::Right),
        ("CURRENT", Align::Left),
        ("WORLD", Align::Left),
        ("BYTES", Align::Right),
        ("DEPLOYED", Align::Left),
        ("STORE", Align::Left),
        ("DIGEST", Align::Left),
    ]);
    for version in list(all) {
        let current = if version["answers"] == true {
            "yes"
        } else {
            ""
        };
        table.row([
            text(version, "/version"),
            current.to_owned(),
            text(version, "/world"),
            text(version, "/bytes"),
            text(version, "/createdAt"),
            text(version, "/storeState"),
            digest(version),
        ]);
    }
    // The daemon omits the state if it has no store.
    if list(all).iter().all(|v| v["storeState"].is_null()) {
        table.remove_column("STORE");
    }
    table.text()
}

/// Returns the details of a function.
pub fn function(function: &Value) -> String {
    let mut shown = String::new();
    let mut line = |label: &str, value: String| {
        if !value.is_empty() {
            let _ = writeln!(shown, "{label:<13}{value}");
        }
    };
    line("name", text(function, "/name"));
    line("owner", text(function, "/owner"));
    line("state", text(function, "/state"));
    line("public", text(function, "/public"));
    line("version", text(function, "/version"));
    line("world", text(function, "/world"));
    line("digest", digest(function));
    line("store", text(function, "/storeState"));
    line("url", text(function, "/url"));
    line("direct url", text(function, "/directUrl"));
    line("path", text(function, "/path"));
    line(
        "memory",
        format!("{} MiB", text(function, "/limits/memoryMB")),
    );
    line(
        "processor",
        format!("{} ms", text(function, "/limits/cpuMs")),
    );
    line(
        "timeout",
        format!("{} ms", text(function, "/limits/timeoutMs")),
    );
    line("concurrency", text(function, "/limits/concurrency"));
    line("environment", words(&function["envNames"]));
    line("allow", words(&function["allow"]));
    line("sandbox key", text(function, "/sandboxKey"));
    line("schedule", text(function, "/schedule/cron"));
    line("next run", text(function, "/schedule/nextAt"));
    line("last run", text(function, "/schedule/lastAt"));
    line("last status", text(function, "/schedule/lastStatus"));
    line("missed", text(function, "/schedule/missed"));
    line("skipped", text(function, "/schedule/skipped"));
    line("requests", text(function, "/metrics/requests"));
    line("running", text(function, "/metrics/running"));
    line("failures", text(function, "/metrics/faults"));
    shown
}

fn words(all: &Value) -> String {
    let words = list(all).iter().filter_map(Value::as_str);
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_list_shows_state_access_and_schedule() {
        let all = json!([{ "name": "hello", "state": "enabled", "public": false, "version": 3,
            "world": "core", "updatedAt": "2026-01-01T00:00:00Z",
            "schedule": { "cron": "* * * * *" } }]);
        let text = functions(&all);
        assert!(
            text.contains("hello  enabled  key           3  core"),
            "{text}"
        );
        assert!(text.ends_with("* * * * *\n"), "{text}");
        assert!(functions(&json!([])).contains("jiffy function deploy"));
    }
}
