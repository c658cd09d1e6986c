//! Every call there is.

use super::operation::Operation;
use super::{query, schema};
use crate::routes::bounds::{
    AWAITED, MAX_LINES, MAX_LINK, MAX_MOMENT, MAX_PAGE, MAX_WAIT_S, STATES,
};
use axum::http::Method;
use jiffy_host::MAX_SANDBOX_NAME;
use serde_json::{Value, json};

fn list(name: &str) -> Value {
    json!({ "type": "array", "items": schema(name) })
}

/// Parameters that narrow a list of sandboxes.
fn filters() -> Vec<Value> {
    let text = json!({ "type": "string", "maxLength": 8192 });
    let states = json!({
        "name": "state", "in": "query", "required": false, "style": "form", "explode": false,
        "schema": {
            "type": "array", "minItems": 1, "maxItems": STATES.len(),
            "items": { "type": "string", "enum": STATES },
        },
    });
    let mut metadata = query("metadata", text);
    if let Some(map) = metadata.as_object_mut() {
        let what = "`key=value&key2=value2`, each part URL-encoded, and that encoded as one value";
        map.insert("description".to_owned(), json!(what));
    }
    vec![
        metadata,
        states,
        query(
            "startedAfter",
            json!({ "type": "string", "format": "date-time" }),
        ),
        query("template", json!({ "type": "string", "maxLength": 256 })),
        query(
            "name",
            json!({ "type": "string", "maxLength": MAX_SANDBOX_NAME }),
        ),
    ]
}

fn idempotent() -> Value {
    json!({
        "name": "Idempotency-Key", "in": "header", "required": false,
        "description": "The same request with the same key is answered again, not done again",
        "schema": { "type": "string", "pattern": "^[a-z0-9-]{1,255}$" },
    })
}

/// All of them.
pub(super) fn all() -> Vec<Operation> {
    let mut all = vec![
        Operation::get("/health", "health", "Whether the control plane answers")
            .answers(200, "It does", schema("Health"))
            .open(),
        Operation::get("/openapi.json", "openapi", "This document")
            .answers(200, "The document", json!({ "type": "object" }))
            .open(),
    ];
    all.extend(sandboxes());
    all.extend(inside());
    all.extend(templates());
    all
}

fn create(path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    Operation::post(path, id, summary)
        .with(vec![idempotent()])
        .takes("NewSandbox")
        .answers(
            201,
            "It runs, and its agent has answered",
            schema("Sandbox"),
        )
        .refuses(&[404, 409, 422, 429, 501, 503])
}

fn connect(path: &'static str, id: &'static str) -> Operation {
    let what = "Make sure that a sandbox runs; never shortens its time";
    let operation = Operation::post(path, id, what).may_take("ConnectSandbox");
    let answered = match path.starts_with("/v2/") {
        true => operation.answers(200, "It ran", schema("Sandbox")).answers(
            201,
            "It was woken",
            schema("Sandbox"),
        ),
        false => operation.answers(200, "It runs", schema("Sandbox")),
    };
    answered.refuses(&[409, 429, 501, 503])
}

fn sandboxes() -> Vec<Operation> {
    vec![
        create(
            "/v2/sandboxes",
            "createSandboxV2",
            "Make a sandbox; its agent wants a token",
        ),
        create(
            "/sandboxes",
            "createSandbox",
            "Make a sandbox; its agent wants a token if `secure`",
        ),
        Operation::get(
            "/v2/sandboxes",
            "listSandboxesV2",
            "Sandboxes that run or sleep",
        )
        .with(filters())
        .paged()
        .answers(200, "A page of them", list("ListedSandbox")),
        Operation::get(
            "/sandboxes",
            "listSandboxes",
            "Sandboxes that run, all at once",
        )
        .with(filters())
        .answers(200, "All of them", list("ListedSandbox")),
        Operation::get("/sandboxes/{sandboxID}", "getSandbox", "One sandbox").answers(
            200,
            "The sandbox",
            schema("SandboxDetail"),
        ),
        Operation::delete("/sandboxes/{sandboxID}", "killSandbox", "End a sandbox")
            .with(vec![query(
                "forget",
                json!({ "type": "boolean", "default": false }),
            )])
            .answers_nothing(),
        Operation::new(
            Method::PATCH,
            "/sandboxes/{sandboxID}",
            "changeSandbox",
            "Give a sandbox another name",
        )
        .takes("ChangeSandbox")
        .answers(200, "The sandbox", schema("SandboxDetail"))
        .refuses(&[409]),
        connect("/v2/sandboxes/{sandboxID}/connect", "connectSandboxV2"),
        connect("/sandboxes/{sandboxID}/connect", "connectSandbox"),
        Operation::post(
            "/sandboxes/{sandboxID}/resume",
            "resumeSandbox",
            "Wake a sandbox",
        )
        .may_take("ResumeSandbox")
        .answers(201, "It was woken", schema("Sandbox"))
        .refuses(&[409, 429, 501, 503]),
        Operation::post(
            "/sandboxes/{sandboxID}/pause",
            "pauseSandbox",
            "Put a sandbox to sleep, memory and all",
        )
        .may_take("PauseSandbox")
        .answers_nothing()
        .refuses(&[409, 429, 501, 503, 507]),
        Operation::post(
            "/sandboxes/{sandboxID}/timeout",
            "setTimeout",
            "End its time so long from now",
        )
        .takes("SetTimeout")
        .answers_nothing()
        .refuses(&[409]),
        Operation::post(
            "/sandboxes/{sandboxID}/refreshes",
            "refreshSandbox",
            "Give it at least so long from now",
        )
        .may_take("Refresh")
        .answers_nothing()
        .refuses(&[409]),
        Operation::post(
            "/sandboxes/{sandboxID}/fork",
            "forkSandbox",
            "Make sandboxes that begin as this one is now",
        )
        .may_take("ForkSandbox")
        .answers(
            201,
            "One entry per child, each with a sandbox or an error",
            list("Forked"),
        )
        .refuses(&[409, 429, 501, 503, 507]),
        Operation::post(
            "/sandboxes/{sandboxID}/promote",
            "promoteSandbox",
            "Keep this child of a fork and remove its siblings",
        )
        .answers(200, "Who went", schema("Promoted"))
        .refuses(&[409]),
        Operation::post(
            "/sandboxes/{sandboxID}/rollback",
            "rollbackSandbox",
            "Put a sandbox back to a snapshot; it keeps its id",
        )
        .takes("RollbackSandbox")
        .answers(200, "It is as it was", schema("RolledBack"))
        .refuses(&[409, 429, 501, 503]),
        Operation::post(
            "/sandboxes/{sandboxID}/restart",
            "restartSandbox",
            "End its processes and start what its template starts; disk, id and kernel stay",
        )
        .may_take("RestartSandbox")
        .answers(200, "It runs", schema("Sandbox"))
        .refuses(&[409, 501]),
        Operation::get(
            "/sandboxes/{sandboxID}/wait",
            "waitForSandbox",
            "Wait until a sandbox has ended, runs or sleeps",
        )
        .with(vec![
            query(
                "for",
                json!({ "type": "string", "enum": AWAITED, "default": "ended" }),
            ),
            query(
                "seconds",
                json!({ "type": "integer", "minimum": 0, "maximum": MAX_WAIT_S, "default": 0 }),
            ),
        ])
        .answers(
            200,
            "What it is now, or when the time was over",
            schema("Waited"),
        ),
        Operation::post(
            "/sandboxes/{sandboxID}/snapshots",
            "snapshotSandbox",
            "Take a snapshot of a sandbox, which runs on",
        )
        .may_take("SnapshotSandbox")
        .answers(201, "The snapshot", schema("Snapshot"))
        .refuses(&[409, 429, 501, 503, 507]),
    ]
}

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

fn inside() -> Vec<Operation> {
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
        .takes("NetworkUpdate")
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
        .answers(200, "By sandbox", schema("AllMetrics")),
        Operation::get(
            "/sandboxes/{sandboxID}/metrics",
            "metrics",
            "Figures of a sandbox",
        )
        .with(vec![moment("start"), moment("end")])
        .answers(200, "Oldest first", list("Metric")),
        Operation::get(
            "/sandboxes/{sandboxID}/logs",
            "logs",
            "The last lines of its console",
        )
        .with(vec![milliseconds("start"), lines("limit")])
        .answers(200, "The lines", schema("Logs")),
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
        .answers(200, "The lines", schema("LogsV2")),
        Operation::get(
            "/sandboxes/{sandboxID}/connections",
            "connections",
            "What a sandbox reached, or tried to, and which names it asked for",
        )
        .with(vec![lines("limit")])
        .answers(200, "Newest last", schema("Connections")),
        Operation::get(
            "/sandboxes/{sandboxID}/preview",
            "preview",
            "A link to one of its ports that holds for a while",
        )
        .with(vec![port, query("ttl", ttl)])
        .answers(200, "The link", schema("Preview"))
        .refuses(&[403, 409, 501]),
        Operation::get(
            "/sandboxes/{sandboxID}/process",
            "process",
            "The process behind a sandbox; only for the host's owner",
        )
        .answers(200, "It", schema("Process"))
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
        .answers(200, "A page of them", list("Snapshot")),
        Operation::get("/snapshots/{snapshotID}", "getSnapshot", "One snapshot").answers(
            200,
            "The snapshot",
            schema("Snapshot"),
        ),
    ]
}

fn templates() -> Vec<Operation> {
    let level = json!({ "type": "string", "enum": ["debug", "info", "warn", "error"] });
    let offset = json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX });
    let limit = json!({ "type": "integer", "minimum": 0, "maximum": MAX_PAGE });
    vec![
        Operation::get("/templates", "listTemplates", "Templates of this host").answers(
            200,
            "All of them",
            list("Template"),
        ),
        Operation::get(
            "/templates/{templateID}",
            "getTemplate",
            "One template with its build",
        )
        .answers(200, "The template", schema("Template")),
        Operation::delete(
            "/templates/{templateID}",
            "deleteTemplate",
            "Remove a template, or a snapshot",
        )
        .answers_nothing()
        .refuses(&[409]),
        Operation::get(
            "/templates/aliases/{alias}",
            "getAlias",
            "Whether there is a template of that name",
        )
        .answers(200, "There is", schema("Alias")),
        Operation::get("/templates/{templateID}/tags", "listTags", "Its tags").answers(
            200,
            "All of them",
            list("Tag"),
        ),
        Operation::get(
            "/templates/{templateID}/builds/{buildID}/status",
            "buildStatus",
            "How far a build is",
        )
        .with(vec![
            query("logsOffset", offset.clone()),
            query("limit", limit.clone()),
            query("level", level.clone()),
        ])
        .answers(200, "Its status and its lines", schema("BuildStatus")),
        Operation::post(
            "/v3/templates",
            "requestBuild",
            "Ask for a build of a template, which is made if there is none of its name",
        )
        .takes("NewTemplate")
        .answers(
            202,
            "It waits for its files and its start",
            schema("RequestedBuild"),
        )
        .refuses(&[409, 429, 501]),
        Operation::get(
            "/templates/{templateID}/files/{hash}",
            "buildFile",
            "Whether files are there, and where to send them to with `PUT`, as a tar, perhaps gzipped",
        )
        .answers(201, "A link that holds for an hour", schema("UploadLink"))
        .refuses(&[403, 429, 501]),
        Operation::put(
            "/templates/uploads/{word}",
            "upload",
            "Send files, as a link says; needs no key",
        )
        .answers_with(200, "Kept")
        .refuses(&[400, 404, 413, 429, 501, 503, 507])
        .open(),
        Operation::post(
            "/v2/templates/{templateID}/builds/{buildID}",
            "startBuild",
            "Start a build",
        )
        .takes("BuildStart")
        .accepts()
        .refuses(&[409, 429, 501]),
        Operation::get(
            "/templates/{templateID}/builds/{buildID}/logs",
            "buildLogs",
            "What a build said",
        )
        .with(vec![
            query("cursor", offset),
            query("limit", limit),
            query(
                "direction",
                json!({ "type": "string", "enum": ["forward", "backward"] }),
            ),
            query("level", level),
        ])
        .answers(200, "Its lines", schema("BuildLogs"))
        .refuses(&[501]),
        Operation::post(
            "/templates/{templateID}/builds/{buildID}/cancel",
            "cancelBuild",
            "End a build, and answer when it has; one that is over stays as it is",
        )
        .answers_nothing()
        .refuses(&[501]),
        Operation::post(
            "/templates/tags",
            "addTags",
            "Give more tags to what a tag is at",
        )
        .takes("AddTags")
        .answers(201, "It has them", schema("AddedTags"))
        .refuses(&[404, 429, 501]),
        Operation::delete("/templates/tags", "removeTags", "Take tags from a template")
            .takes("RemoveTags")
            .answers_nothing()
            .refuses(&[404, 501]),
        Operation::new(
            Method::PATCH,
            "/v2/templates/{templateID}",
            "changeTemplate",
            "Let every key use a template, or only the one that built it",
        )
        .takes("TemplateChange")
        .answers(200, "It is so", schema("ChangedTemplate"))
        .refuses(&[403, 501]),
        Operation::post(
            "/templates/prune",
            "pruneTemplates",
            "Remove what only makes later builds faster: snapshots of steps, and uploads; the caller's own, or all for whoever manages the host",
        )
        .may_take("Prune")
        .answers(200, "What is gone", schema("Pruned"))
        .refuses(&[501]),
        Operation::post(
            "/prune",
            "prune",
            "Remove what nothing needs, or tell what that would be: ended sandboxes, snapshots of booted templates, images that were imported for sandboxes, what builds left; the caller's own, or all for whoever manages the host",
        )
        .may_take("PruneHost")
        .answers(200, "What is gone, or would be", schema("PrunedHost")),
        Operation::get("/teams", "listTeams", "The one team there is").answers(
            200,
            "It",
            list("Team"),
        ),
        Operation::post(
            "/snapshots/{snapshotID}/verify",
            "verifySnapshot",
            "Read a snapshot and all below it again",
        )
        .answers(
            200,
            "What was found",
            json!({ "type": "array", "items": { "type": "object" } }),
        )
        .refuses(&[409, 501]),
        Operation::get("/engines", "listEngines", "How sandboxes are isolated here")
            .answers(200, "All there are", list("Engine")),
        Operation::get(
            "/limits",
            "getLimits",
            "Limits of a key, and what is used of them: the caller's own, or those of `key` for whoever manages the host",
        )
        .with(vec![query("key", json!({ "type": "string", "maxLength": 256 }))])
        .answers(200, "Its budget", schema("Budget"))
        .refuses(&[403, 404]),
        Operation::get(
            "/host",
            "host",
            "Which daemon this is, and what it has left",
        )
        .answers(200, "It", schema("Host"))
        .refuses(&[403]),
        Operation::post(
            "/host/stop",
            "stopHost",
            "End the daemon; only for the host's owner",
        )
        .may_take("StopHost")
        .accepts()
        .refuses(&[501]),
        Operation::post(
            "/keys/{keyID}/revoke",
            "revokeKey",
            "Revoke an API key, by its id or name, and end all it has if that is asked for",
        )
        .may_take("RevokeKey")
        .answers(200, "Revoked", schema("RevokedKey")),
        Operation::get(
            "/pools",
            "listPools",
            "Warm pools: sandboxes that wait for their creator",
        )
        .answers(200, "All of them", list("Pool"))
        .refuses(&[403]),
        Operation::new(
            Method::PUT,
            "/pools/{templateID}",
            "setPool",
            "How many sandboxes of a template are to wait",
        )
        .takes("SetPool")
        .answers(200, "The pool", schema("Pool"))
        .refuses(&[409, 501, 503]),
    ]
}
