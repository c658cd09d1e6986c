//! Observations of sandboxes.

use super::parts::{count, log_entries, maybe, moment, object, text};
use crate::openapi::reference::schema;
use serde_json::{Value, json};

/// Metrics, logs, connections and addresses of sandboxes.
pub(super) fn guest() -> Value {
    let metric = [
        "timestamp",
        "timestampUnix",
        "cpuCount",
        "cpuUsedPct",
        "memUsed",
        "memTotal",
        "memCache",
        "diskUsed",
        "diskTotal",
    ];
    let line = object(
        &["timestamp", "line"],
        json!({ "timestamp": moment(), "line": text() }),
    );
    let connection = object(
        &[
            "timestamp",
            "protocol",
            "address",
            "port",
            "host",
            "question",
            "bytesOut",
            "bytesIn",
            "verdict",
            "reason",
            "times",
        ],
        json!({
            "timestamp": moment(),
            "protocol": text(),
            "address": maybe(text()),
            "port": maybe(count()),
            "host": maybe(text()),
            "question": maybe(text()),
            "bytesOut": maybe(count()),
            "bytesIn": maybe(count()),
            "verdict": { "type": "string", "enum": ["allowed", "refused"] },
            "reason": { "type": ["string", "null"], "enum": ["rules", "limit", "host", null] },
            "times": { "type": "integer", "minimum": 1 },
        }),
    );
    let entries = log_entries();
    json!({
        "Process": object(&["pid"], json!({ "pid": count(), "exits": maybe(count()) })),
        "Metric": object(&metric, json!({
            "timestamp": moment(),
            "timestampUnix": count(),
            "cpuCount": count(),
            "cpuUsedPct": { "type": "number", "minimum": 0 },
            "memUsed": count(),
            "memTotal": count(),
            "memCache": count(),
            "diskUsed": count(),
            "diskTotal": count(),
            "netBytesOut": count(),
            "netBytesIn": count(),
        })),
        "AllMetrics": object(&["sandboxes"], json!({
            "sandboxes": { "type": "object", "additionalProperties": schema("Metric") },
        })),
        "Logs": object(&["logs", "logEntries"], json!({
            "logs": { "type": "array", "items": line },
            "logEntries": entries,
        })),
        "LogsV2": object(&["logs"], json!({ "logs": entries })),
        "Connections": object(&["since", "connections", "missing", "untold"], json!({
            "since": maybe(moment()),
            "connections": { "type": "array", "items": connection },
            "missing": count(),
            "untold": { "type": "array", "items": text() },
        })),
        "Preview": object(&["url", "expiresAt"], json!({ "url": text(), "expiresAt": moment() })),
    })
}
