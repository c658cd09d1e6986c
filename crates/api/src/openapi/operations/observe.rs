//! Operations that observe and reach a sandbox.

use crate::openapi::operation::Operation;
use crate::openapi::operation::query;
use crate::routes::bounds::{MAX_LINES, MAX_LINK, MAX_MOMENT};
use axum::http::Method;
use jiffy_api_types::{
    AllMetrics, Connections, Logs, LogsV2, Metric, NetworkUpdate, Preview, Process, Snapshot,
};
use serde_json::{Value, json};

fn moment(name: &str) -> Value {
    query(
        name,
        json!({ "type": "integer", "minimum": 0, "maximum": MAX_MOMENT }),
    )
}

fn lines(name: &str) -> Value {
    query(
        name,
        json!({ "type": "integer", "minimum": 0, "maximum": MAX_LINES, "default": MAX_LINES }),
    )
}

fn milliseconds(name: &str) -> Value {
    query(
        name,
        json!({ "type": "integer", "minimum": 0, "maximum": MAX_MOMENT * 1000 }),
    )
}

/// Operations on the network, figures, logs and snapshots of sandboxes.
pub(super) fn observe() -> Vec<Operation> {
    let text = || json!({ "type": "string", "maxLength": 8192 });
    let word = |words: &[&str]| json!({ "type": "string", "enum": words });
    let mut port = query(
        "port",
        json!({ "type": "integer", "minimum": 1, "maximum": 65_535 }),
    );
    if let Some(map) = port.as_object_mut() {
        map.insert("required".to_owned(), json!(true));
    }
    let ttl = json!({ "type": "integer", "minimum": 1, "maximum": MAX_LINK, "default": 3600 });
    vec![
        Operation::new(
            Method::PUT,
            "/sandboxes/{sandboxID}/network",
            "setNetwork",
            "Replace what a sandbox may reach",
        )
        .takes::<NetworkUpdate>()
        .answers_nothing()
        .refuses(&[409]),
        Operation::get(
            "/sandboxes/metrics",
            "allMetrics",
            "The latest figures of several sandboxes",
        )
        .with(vec![
            query("sandbox_ids", text()),
            query("now", json!({ "type": "boolean", "default": false })),
        ])
        .answers::<AllMetrics>(200, "By sandbox"),
        Operation::get(
            "/sandboxes/{sandboxID}/metrics",
            "metrics",
            "Figures of a sandbox",
        )
        .with(vec![moment("start"), moment("end")])
        .answers::<Vec<Metric>>(200, "Oldest first"),
        Operation::get(
            "/sandboxes/{sandboxID}/logs",
            "logs",
            "The last lines of its console",
        )
        .with(vec![milliseconds("start"), lines("limit")])
        .answers::<Logs>(200, "The lines"),
        Operation::get(
            "/v2/sandboxes/{sandboxID}/logs",
            "logsV2",
            "The last lines of its console, searched",
        )
        .with(vec![
            milliseconds("cursor"),
            lines("limit"),
            query("direction", word(&["forward", "backward"])),
            query("level", word(&["debug", "info", "warn", "error"])),
            query("search", text()),
        ])
        .answers::<LogsV2>(200, "The lines"),
        Operation::get(
            "/sandboxes/{sandboxID}/connections",
            "connections",
            "What a sandbox reached, or tried to, and which names it asked for",
        )
        .with(vec![lines("limit")])
        .answers::<Connections>(200, "Newest last"),
        Operation::get(
            "/sandboxes/{sandboxID}/preview",
            "preview",
            "A link to one of its ports that holds for a while",
        )
        .with(vec![port, query("ttl", ttl)])
        .answers::<Preview>(200, "The link")
        .refuses(&[403, 409, 501]),
        Operation::get(
            "/sandboxes/{sandboxID}/process",
            "process",
            "The process behind a sandbox; only for the host's owner",
        )
        .answers::<Process>(200, "It")
        .refuses(&[403, 409, 501]),
        Operation::get(
            "/sandboxes/{sandboxID}/ports/{port}",
            "streamPort",
            "A stream to a TCP port of the guest, for HTTP/1.1 with `Upgrade: tcp`",
        )
        .answers_with(101, "What follows are the bytes of the connection")
        .refuses(&[403, 409, 426, 429, 501, 502]),
        Operation::post(
            "/sandboxes/{sandboxID}/lease",
            "leaseSandbox",
            "Remove the sandbox when this connection ends, for HTTP/1.1 with `Upgrade: lease`",
        )
        .answers_with(101, "The sandbox lives as long as the connection")
        .refuses(&[426]),
        Operation::get(
            "/snapshots",
            "listSnapshots",
            "Snapshots that were asked for",
        )
        .with(vec![
            query("sandboxID", json!({ "type": "string", "maxLength": 256 })),
            query("name", text()),
            query("all", json!({ "type": "boolean", "default": false })),
        ])
        .paged()
        .answers::<Vec<Snapshot>>(200, "A page of them"),
        Operation::get("/snapshots/{snapshotID}", "getSnapshot", "One snapshot")
            .answers::<Snapshot>(200, "The snapshot"),
    ]
}
