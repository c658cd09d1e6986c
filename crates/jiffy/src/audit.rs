//! `jiffy audit`: prints the audit log.

use crate::cli::AuditArgs;
use crate::events::since;
use crate::log_pages::{Output, print, with_fields};
use crate::runtime;
use jiffy_api_types::{AuditCaller, AuditEntry, AuditPage};
use jiffy_client::terminal;
use std::process::ExitCode;

/// Prints entries. With `--follow`, also prints new entries, until standard output is closed.
pub fn run(args: &AuditArgs) -> anyhow::Result<ExitCode> {
    let mut parameters = Vec::new();
    for (name, value) in [
        ("keyID", &args.key),
        ("sandboxID", &args.sandbox),
        ("address", &args.address),
        ("call", &args.call),
    ] {
        if let Some(value) = value {
            parameters.push((name, value.clone()));
        }
    }
    if args.rejected {
        parameters.push(("rejected", true.to_string()));
    }
    parameters.extend(since(args.since)?);
    let output = Output {
        follow: args.follow,
        json: args.json,
    };
    runtime()?.block_on(print::<AuditPage>(&args.host, &parameters, output, line))?;
    Ok(ExitCode::SUCCESS)
}

/// Formats an entry: time, status, call and details. Names come from clients and are escaped.
fn line(entry: &AuditEntry) -> String {
    let caller = match (entry.caller, &entry.key_id) {
        (AuditCaller::Owner, _) => "owner",
        (AuditCaller::Token, None) => "token",
        (AuditCaller::Unknown, _) | (_, None) => "unknown",
        (AuditCaller::Key | AuditCaller::Function | AuditCaller::Token, Some(key)) => key,
    };
    let (caller, call) = (terminal::line(caller), terminal::line(&entry.call));
    let line = format!("{} {} {caller:<20} {call}", entry.time, entry.status);
    let count = (entry.count > 1).then(|| entry.count.to_string());
    let paths = (!entry.paths.is_empty()).then(|| entry.paths.join(" "));
    let fields = [
        ("sandbox", &entry.sandbox_id),
        ("object", &entry.object),
        ("command", &entry.command),
        ("paths", &paths),
        ("from", &entry.address),
        ("session", &entry.session_id),
        ("error", &entry.error_code),
        ("request", &entry.request_id),
        ("count", &count),
    ];
    with_fields(line, &fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_of_unknown_callers_cannot_forge_lines() {
        let entry: AuditEntry = serde_json::from_value(serde_json::json!({
            "id": "i", "time": "T", "host": "h", "caller": "unknown", "address": "192.0.2.1",
            "call": "GET /sandboxes/{sandboxID}", "sandboxID": "a\nT 200 owner \u{1b}[2J",
            "status": 401, "error_code": "unauthenticated", "ms": 1, "count": 7,
        }))
        .unwrap();
        let line = line(&entry);
        assert_eq!(line.matches('\n').count(), 1, "{line}");
        assert!(!line.contains('\u{1b}'), "{line}");
        assert!(line.contains("error=unauthenticated count=7"), "{line}");
    }
}
