//! Examples of requests and responses in the OpenAPI document.

use jiffy_proto::agent::ENVD_VERSION;
use serde_json::{Map, Value, json};

const SANDBOX: &str = "j5xc8vu3pd4ik2nrmssr";
const SNAPSHOT: &str = "zbxdtv6u3pd4ik2nrmss";
const BUILD: &str = "0197d3a2-4f0e-7c61-9a52-6b1f0e8c2d47";
const HASH: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
const TIME: &str = "2026-01-01T10:00:00.000Z";

/// Request body of an operation. `None` if the operation has no body, or an optional body that is
/// rarely used.
pub(super) fn body(operation_id: &str) -> Option<Value> {
    let body = match operation_id {
        "createSandbox" | "createSandboxV2" => {
            json!({ "templateID": "base", "timeout": 3600, "idleTimeout": 600 })
        }
        "changeSandbox" => json!({ "name": "worker" }),
        "setTimeout" => json!({ "timeout": 3600, "idleTimeout": 600 }),
        "connectSandbox" | "connectSandboxV2" | "resumeSandbox" => {
            json!({ "timeout": 600 })
        }
        "refreshSandbox" => json!({ "duration": 600 }),
        "forkSandbox" => json!({ "count": 3, "timeout": 600 }),
        "rollbackSandbox" => json!({ "snapshotID": SNAPSHOT }),
        "restartSandbox" => json!({ "graceMs": 2000 }),
        "snapshotSandbox" => json!({ "name": "installed" }),
        "changeNetwork" => json!({ "denyOut": ["192.0.2.0/24"] }),
        "setNetwork" => json!({ "allowOut": ["pypi.org"], "denyOut": ["0.0.0.0/0"] }),
        "requestBuild" => json!({ "name": "worker", "cpuCount": 2, "memoryMB": 1024 }),
        "buildFromImage" => {
            json!({ "image": "registry.example.com/worker:1", "name": "worker", "cpu": 2000 })
        }
        "renameTemplate" => json!({ "alias": "worker-2" }),
        "startBuild" => json!({
            "fromTemplate": "base",
            "steps": [{ "type": "RUN", "args": ["pip install numpy"] }],
        }),
        "addTags" => json!({ "target": "worker:default", "tags": ["v1"] }),
        "removeTags" => json!({ "name": "worker", "tags": ["v1"] }),
        "changeTemplate" | "changeTemplateV1" => json!({ "public": true }),
        "pruneTemplates" => json!({ "unusedSeconds": 604_800 }),
        "prune" => json!({ "dryRun": true, "unusedSeconds": 604_800 }),
        "deployFunction" => json!({ "settings": { "public": true } }),
        "rollbackFunction" => json!({ "version": 3 }),
        "createKey" => json!({ "name": "ci", "scope": "create", "limits": { "sandboxes": 20 } }),
        "changeKey" => json!({ "limits": { "sandboxes": 40 }, "removeLimits": ["paused"] }),
        "rotateKey" => json!({ "overlapMs": 3_600_000 }),
        "revokeKey" => json!({ "end": true }),
        "createWebhook" => json!({
            "name": "audit", "url": "https://example.com/events", "signatureSecret": "nH3o8wPq",
        }),
        "updateWebhook" => json!({ "enabled": false }),
        "createSecret" => json!({ "name": "github-token", "value": "ghp_16C7e42F292c6912E7" }),
        "updateSecret" => json!({ "value": "ghp_16C7e42F292c6912E8" }),
        "createVolume" => json!({ "name": "datasets", "sizeMB": 20480 }),
        "changeVolumeEntry" => json!({ "uid": 1000, "gid": 1000, "mode": 0o644 }),
        "signalProcess" => json!({ "signal": "SIGTERM" }),
        "setPool" => json!({ "size": 4 }),
        "stopHost" => json!({ "killSandboxes": false }),
        _ => return None,
    };
    Some(body)
}

/// Value of a query parameter.
pub(super) fn query(operation_id: &str, name: &str) -> Option<Value> {
    let value = match (operation_id, name) {
        ("listSandboxesV2", "state") => json!(["running", "paused"]),
        ("listSandboxesV2", "limit") => json!(20),
        ("hasTag", "tag") => json!("v1"),
        ("compare", "a") => json!(SNAPSHOT),
        ("compare", "b") => json!(SANDBOX),
        ("getLineage", "sandboxID")
        | ("listSnapshots", "sandboxID")
        | ("allMetrics", "sandbox_ids") => json!(SANDBOX),
        ("waitForSandbox", "for") => json!("paused"),
        ("waitForSandbox", "seconds") | ("functionLogs", "wait") => json!(10),
        ("allMetrics", "now") => json!(true),
        ("preview", "port") => json!(8000),
        ("preview", "ttl") => json!(600),
        ("logsV2", "level") => json!("error"),
        ("logsV2", "limit") => json!(100),
        ("connections", "limit") => json!(50),
        ("functionLogs", "after") | ("buildStatus", "logsOffset") => json!(0),
        (_, "path") => json!("/models/small.bin"),
        _ => return None,
    };
    Some(value)
}

/// Value of a path parameter.
pub(super) fn path_value(name: &str) -> &'static str {
    match name {
        "sandboxID" => SANDBOX,
        "snapshotID" => SNAPSHOT,
        "templateID" | "alias" => "worker",
        "buildID" => BUILD,
        "agent" => "default",
        "hash" => HASH,
        "word" => "SECRET",
        "pid" => "812",
        "port" => "5432",
        "keyID" => "ci",
        "webhookID" => "kq3nv7xw2mzr5tyb8cfd",
        "recipe" => "browser",
        "secretID" => "github-token",
        "volumeID" => "datasets",
        "volumeSnapshotID" => "volsnap-7f3a9c21e5d84b60",
        "host" => "h2",
        _ => "hello",
    }
}

/// Adds an example to each successful response of `paths` that has a body.
pub(super) fn add_to_responses(paths: &mut Map<String, Value>, schemas: &Map<String, Value>) {
    let operations = paths.values_mut().filter_map(Value::as_object_mut);
    for operation in operations.flat_map(Map::values_mut) {
        let Some(Value::Object(responses)) = operation.get_mut("responses") else {
            continue;
        };
        for (_, response) in responses.iter_mut().filter(|(s, _)| s.starts_with('2')) {
            let Some(Value::Object(media)) = response.pointer_mut("/content/application~1json")
            else {
                continue;
            };
            if let Some(schema) = media.get("schema") {
                let example = of_schema(schema, "", schemas);
                media.insert("example".to_owned(), example);
            }
        }
    }
}

/// Returns a value that satisfies `schema`. `name` is the name of the field.
fn of_schema(schema: &Value, name: &str, schemas: &Map<String, Value>) -> Value {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = reference.rsplit('/').next().unwrap_or_default();
        return schemas
            .get(target)
            .map_or(Value::Null, |schema| of_schema(schema, name, schemas));
    }
    if let Some(values) = schema["enum"].as_array() {
        let running = values.iter().find(|value| *value == "running");
        return running.or(values.first()).cloned().unwrap_or_default();
    }
    if let Some(first) = schema["anyOf"].get(0) {
        return of_schema(first, name, schemas);
    }
    let kind = schema["type"].get(0).unwrap_or(&schema["type"]);
    match kind.as_str() {
        Some("object") => of_object(schema, schemas),
        Some("array") if schema["maxItems"] == 0 => json!([]),
        Some("array") => json!([of_schema(&schema["items"], name, schemas)]),
        Some("string") => string(schema, name),
        Some("integer") => integer(schema, name),
        Some("number") => json!(12.5),
        Some("boolean") => json!(false),
        _ => Value::Null,
    }
}

/// Returns an object with the required fields of `schema`.
fn of_object(schema: &Value, schemas: &Map<String, Value>) -> Value {
    let mut object = Map::new();
    let required = schema["required"].as_array();
    for name in required.into_iter().flatten().filter_map(Value::as_str) {
        let field = of_schema(&schema["properties"][name], name, schemas);
        object.insert(name.to_owned(), field);
    }
    Value::Object(object)
}

/// Returns an example of a text field, by its format or by its name.
fn string(schema: &Value, name: &str) -> Value {
    if schema["format"] == "date-time" {
        return json!(TIME);
    }
    json!(match name {
        "sandboxID" | "sandbox" | "id" => SANDBOX,
        "snapshotID" | "snapshot" => SNAPSHOT,
        "templateID" | "template" | "name" | "names" | "aliases" => "worker",
        "buildID" => BUILD,
        "envdVersion" => ENVD_VERSION,
        "version" => env!("CARGO_PKG_VERSION"),
        "engine" => "microvm",
        "protocol" => "tcp",
        "url" => "https://jiffy.example/sandboxes/j5xc8vu3pd4ik2nrmssr/proxy/8000/",
        "digest" | "fingerprint" => HASH,
        _ if schema["format"] == "uuid" => BUILD,
        // A letter, such as the state of a process.
        _ if schema["maxLength"] == 1 => "S",
        _ => "text",
    })
}

fn integer(schema: &Value, name: &str) -> Value {
    match name {
        "cpuCount" | "vcpus" => json!(2),
        "memoryMB" | "memory_mib" => json!(1024),
        "diskSizeMB" | "disk_mib" => json!(10_240),
        "port" => json!(443),
        _ if schema["minimum"].is_u64() => schema["minimum"].clone(),
        _ => json!(0),
    }
}
