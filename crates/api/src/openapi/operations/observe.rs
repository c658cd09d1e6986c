//! Operations that observe a sandbox or connect to it.

use crate::openapi::operation::Operation;
use crate::openapi::operation::query;
use crate::routes::bounds::{
    DEFAULT_DIFFERENCES, MAX_DIFFERENCES, MAX_LINES, MAX_LINK_S, MAX_MOMENT, MAX_PATH,
};
use axum::http::Method;
use jiffy_api_types::{
    AllMetrics, Comparison, Connections, Lineage, Logs, LogsV2, Metric, NetworkUpdate, Preview,
    Process, Snapshot,
};
use serde_json::{Value, json};

fn seconds(name: &str, description: &str) -> Value {
    query(
        name,
        description,
        json!({ "type": "integer", "minimum": 0, "maximum": MAX_MOMENT }),
    )
}

fn lines(name: &str) -> Value {
    query(
        name,
        "Maximum number of lines",
        json!({ "type": "integer", "minimum": 0, "maximum": MAX_LINES, "default": MAX_LINES }),
    )
}

fn milliseconds(name: &str) -> Value {
    query(
        name,
        "Time of the first line, in milliseconds since 1970",
        json!({ "type": "integer", "minimum": 0, "maximum": MAX_MOMENT * 1000 }),
    )
}

/// Returns the parameter as a required one.
fn needed(mut parameter: Value) -> Value {
    if let Some(map) = parameter.as_object_mut() {
        map.insert("required".to_owned(), json!(true));
    }
    parameter
}

/// Operations on the network, metrics, logs and snapshots of sandboxes.
pub(super) fn observe() -> Vec<Operation> {
    let text = || json!({ "type": "string", "maxLength": 8192 });
    let word = |words: &[&str]| json!({ "type": "string", "enum": words });
    let port = query(
        "port",
        "Port of the guest",
        json!({ "type": "integer", "minimum": 1, "maximum": 65_535 }),
    );
    let port = needed(port);
    let ttl = json!({ "type": "integer", "minimum": 1, "maximum": MAX_LINK_S, "default": 3600 });
    vec![
        Operation::new(
            Method::PUT,
            "/sandboxes/{sandboxID}/network",
            "setNetwork",
            "Replace the network rules of a sandbox. Absent egress rules are cleared",
        )
        .takes::<NetworkUpdate>()
        .answers_no_content()
        .fails_with(&[409]),
        Operation::new(
            Method::PATCH,
            "/sandboxes/{sandboxID}/network",
            "changeNetwork",
            "Change the given network rules of a sandbox. Absent fields remain unchanged",
        )
        .takes::<NetworkUpdate>()
        .answers_no_content()
        .fails_with(&[409]),
        Operation::get(
            "/sandboxes/metrics",
            "allMetrics",
            "Get the latest metrics of several sandboxes",
        )
        .with(vec![
            query("sandbox_ids", "Ids, separated by commas", text()),
            query(
                "now",
                "Sample the metrics now. By default they are at most 10 s old",
                json!({ "type": "boolean", "default": false }),
            ),
        ])
        .merged()
        .answers::<AllMetrics>(200, "Metrics by sandbox")
        .fails_with(&[503]),
        Operation::get(
            "/sandboxes/{sandboxID}/metrics",
            "metrics",
            "Get metrics of a sandbox",
        )
        .with(vec![
            seconds("start", "Time of the first sample, in seconds since 1970"),
            seconds("end", "Time of the last sample, in seconds since 1970"),
        ])
        .answers::<Vec<Metric>>(200, "Samples, oldest first"),
        Operation::get(
            "/sandboxes/{sandboxID}/logs",
            "logs",
            "Get the last lines of the console",
        )
        .with(vec![milliseconds("start"), lines("limit")])
        .answers::<Logs>(200, "Lines"),
        Operation::get(
            "/v2/sandboxes/{sandboxID}/logs",
            "logsV2",
            "Get or search the last lines of the console",
        )
        .with(vec![
            milliseconds("cursor"),
            lines("limit"),
            query("direction", "Order of the lines", word(&["forward", "backward"])),
            query(
                "level",
                "Minimum severity",
                word(&["debug", "info", "warn", "error"]),
            ),
            query("search", "Text that the lines contain", text()),
        ])
        .answers::<LogsV2>(200, "Lines"),
        Operation::get(
            "/sandboxes/{sandboxID}/connections",
            "connections",
            "List allowed and rejected connections and DNS queries of a sandbox",
        )
        .with(vec![lines("limit")])
        .answers::<Connections>(200, "Connections, newest last"),
        Operation::get(
            "/sandboxes/{sandboxID}/preview",
            "preview",
            "Create a link to a port that is valid for a limited time and needs no key",
        )
        .with(vec![port, query("ttl", "Validity in seconds", ttl)])
        .answers::<Preview>(200, "Link")
        .fails_with(&[403, 409, 501]),
        Operation::get(
            "/sandboxes/{sandboxID}/process",
            "process",
            "Get the VMM process of a sandbox. Only the host's owner may call it",
        )
        .answers::<Process>(200, "Process")
        .fails_with(&[403, 409, 501]),
        Operation::get(
            "/sandboxes/{sandboxID}/ports/{port}",
            "streamPort",
            "Open a stream to a TCP port of the guest. Requires HTTP/1.1 with `Upgrade: tcp`",
        )
        .answers_with(101, "Connected. The bytes of the connection follow")
        .fails_with(&[403, 409, 426, 429, 501, 502]),
        Operation::post(
            "/sandboxes/{sandboxID}/lease",
            "leaseSandbox",
            "Remove the sandbox when this connection ends. Requires HTTP/1.1 with `Upgrade: lease`",
        )
        .answers_with(101, "The sandbox is removed when the connection ends")
        .fails_with(&[426]),
        Operation::get(
            "/snapshots",
            "listSnapshots",
            "List snapshots",
        )
        .with(vec![
            query(
                "sandboxID",
                "Only snapshots of this sandbox",
                json!({ "type": "string", "maxLength": 256 }),
            ),
            query("name", "Only snapshots with this name", text()),
            query(
                "all",
                "List snapshots of templates, pauses, forks and build steps too. Only for the host's \
                 owner",
                json!({ "type": "boolean", "default": false }),
            ),
        ])
        .paged()
        .merged()
        .answers::<Vec<Snapshot>>(200, "Page of snapshots")
        .fails_with(&[503]),
        Operation::get(
            "/lineage",
            "getLineage",
            "Get the sandboxes and snapshots that are connected with a sandbox or snapshot: its \
             ancestors, forks, snapshots and rollbacks",
        )
        .tagged("snapshots")
        .with(vec![
            query("sandboxID", "Id or name of the sandbox", text()),
            query("snapshotID", "Id or name of the snapshot", text()),
            query(
                "unfold",
                "Series of automatic snapshots that are returned as single snapshots: `all`, or at \
                 most 100 ids of snapshots, separated by commas, for the series that contain them",
                text(),
            ),
        ])
        .answers::<Lineage>(200, "Connected sandboxes and snapshots of the caller")
        .fails_with(&[404]),
        Operation::get(
            "/compare",
            "compare",
            "Compare the files of two sandboxes or snapshots of one template, by their contents. \
             With `path`, get both contents of one file. Snapshots and paused sandboxes are read in \
             temporary guests, which count towards no limit",
        )
        .tagged("snapshots")
        .with(vec![
            needed(query("a", "Id or name of the first sandbox or snapshot", text())),
            needed(query("b", "Id or name of the second sandbox or snapshot", text())),
            query(
                "path",
                "Absolute path of a file whose contents are returned, at most 1 MiB of each",
                json!({ "type": "string", "maxLength": MAX_PATH }),
            ),
        ])
        .paged_by_position(DEFAULT_DIFFERENCES, MAX_DIFFERENCES)
        .answers::<Comparison>(200, "Differences, or with `path` the contents of the file")
        .fails_with(&[403, 404, 409, 503]),
        Operation::get("/snapshots/{snapshotID}", "getSnapshot", "Get a snapshot")
            .answers::<Snapshot>(200, "Snapshot")
            .fails_with(&[503]),
    ]
}
