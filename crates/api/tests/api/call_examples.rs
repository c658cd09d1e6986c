//! Examples of requests for the reference of the API.

use jiffy_api::openapi;
use serde_json::{Value, json};

/// Maximum width of a line.
const WIDTH: usize = 100;
const SANDBOX: &str = "j5xc8vu3pd4ik2nrmssr";
const SNAPSHOT: &str = "zbxdtv6u3pd4ik2nrmss";
const BUILD: &str = "0197d3a2-4f0e-7c61-9a52-6b1f0e8c2d47";
const HASH: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

/// Request bodies by operation. Operations with an optional body that is rarely used have none.
fn body(operation_id: &str) -> Option<Value> {
    let body = match operation_id {
        "createSandbox" | "createSandboxV2" => json!({ "templateID": "base", "timeout": 600 }),
        "changeSandbox" => json!({ "name": "worker" }),
        "connectSandbox" | "connectSandboxV2" | "resumeSandbox" | "setTimeout" => {
            json!({ "timeout": 600 })
        }
        "refreshSandbox" => json!({ "duration": 600 }),
        "forkSandbox" => json!({ "count": 3, "timeout": 600 }),
        "rollbackSandbox" => json!({ "snapshotID": SNAPSHOT }),
        "restartSandbox" => json!({ "graceMs": 2000 }),
        "snapshotSandbox" => json!({ "name": "installed" }),
        "setNetwork" => json!({ "allowOut": ["pypi.org"], "denyOut": ["0.0.0.0/0"] }),
        "requestBuild" => json!({ "name": "worker", "cpuCount": 2, "memoryMB": 1024 }),
        "startBuild" => json!({
            "fromTemplate": "base",
            "steps": [{ "type": "RUN", "args": ["pip install numpy"] }],
        }),
        "addTags" => json!({ "target": "worker:default", "tags": ["v1"] }),
        "removeTags" => json!({ "name": "worker", "tags": ["v1"] }),
        "changeTemplate" => json!({ "public": true }),
        "pruneTemplates" => json!({ "unusedSeconds": 604_800 }),
        "prune" => json!({ "dryRun": true, "unusedSeconds": 604_800 }),
        "rollbackFunction" => json!({ "version": 3 }),
        "revokeKey" => json!({ "end": true }),
        "setPool" => json!({ "size": 4 }),
        "stopHost" => json!({ "killSandboxes": false }),
        _ => return None,
    };
    Some(body)
}

/// Query strings by operation.
fn query(operation_id: &str) -> &'static str {
    match operation_id {
        "listSandboxesV2" => "?state=running,paused&limit=20",
        "listSnapshots" => "?sandboxID=j5xc8vu3pd4ik2nrmssr",
        "waitForSandbox" => "?for=paused&seconds=10",
        "allMetrics" => "?sandbox_ids=j5xc8vu3pd4ik2nrmssr&now=true",
        "preview" => "?port=8000&ttl=600",
        "logsV2" => "?level=error&limit=100",
        "connections" => "?limit=50",
        "functionLogs" => "?after=0&wait=10",
        "buildStatus" => "?logsOffset=0",
        _ => "",
    }
}

/// Value of a path parameter.
fn path_value(name: &str) -> &'static str {
    match name {
        "sandboxID" => SANDBOX,
        "snapshotID" => SNAPSHOT,
        "templateID" | "alias" => "worker",
        "buildID" => BUILD,
        "hash" => HASH,
        "word" => "SECRET",
        "port" => "5432",
        "keyID" => "ci",
        "name" => "hello",
        other => panic!("no example of the path parameter {other}"),
    }
}

/// Returns the `curl` command of an example request.
pub fn curl(method: &str, path: &str, operation: &Value) -> String {
    let id = operation["operationId"].as_str().unwrap();
    let parts: Vec<&str> = path
        .split('/')
        .map(|part| match part.strip_prefix('{') {
            Some(name) => path_value(name.trim_end_matches('}')),
            None => part,
        })
        .collect();
    let url = format!("\"$API{}{}\"", parts.join("/"), query(id));
    let key = if operation["security"].is_array() {
        ""
    } else {
        "-H \"X-API-KEY: $KEY\" "
    };
    let body = body(id);
    // `curl` sends GET without a body, and POST with one.
    let is_default_method = method == if body.is_some() { "POST" } else { "GET" };
    let method = if is_default_method {
        String::new()
    } else {
        format!("-X {method} ")
    };
    let mut command = format!("curl {key}{method}{url}");
    if command.len() > WIDTH {
        command = format!("curl {key}{method}\\\n  {url}");
    }
    match (id, body) {
        ("deployFunction", _) => {
            let settings = r#"-F 'settings={"public":true};type=application/json'"#;
            format!("curl {key}{url} \\\n  {settings} -F module=@hello.wasm")
        }
        ("upload", _) => format!("curl -T files.tar.gz {url}"),
        ("streamPort", _) => upgrade(&command, "tcp"),
        ("leaseSandbox", _) => upgrade(&command, "lease"),
        (_, Some(body)) => format!("{command} \\\n  --json '{body}'"),
        (_, None) => command,
    }
}

fn upgrade(command: &str, protocol: &str) -> String {
    format!("{command} \\\n  --http1.1 -N -H 'Connection: Upgrade' -H 'Upgrade: {protocol}'")
}

#[test]
fn examples_fit_the_document() {
    let document = openapi::document();
    for operations in document["paths"].as_object().unwrap().values() {
        for operation in operations.as_object().unwrap().values() {
            let id = operation["operationId"].as_str().unwrap();
            check_query(id, operation);
            let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
            let reference = [schema, &schema["anyOf"][0]]
                .into_iter()
                .find_map(|schema| schema["$ref"].as_str());
            match (body(id), reference) {
                (Some(body), Some(reference)) => {
                    let name = reference.rsplit('/').next().unwrap();
                    check_body(id, &document["components"]["schemas"][name], &body);
                }
                (Some(_), None) => panic!("{id} has an example and takes no body"),
                (None, Some(_)) => {
                    let is_required = operation["requestBody"]["required"] == true;
                    assert!(!is_required, "{id} has no example of its body");
                }
                (None, None) => {}
            }
        }
    }
}

/// Checks that the fields of an example exist and that no required field is missing.
fn check_body(id: &str, schema: &Value, body: &Value) {
    for name in body.as_object().unwrap().keys() {
        let field = &schema["properties"][name];
        assert!(!field.is_null(), "{id}: no field {name}");
    }
    for name in schema["required"].as_array().into_iter().flatten() {
        let field = &body[name.as_str().unwrap()];
        assert!(!field.is_null(), "{id}: {name} is missing");
    }
}

fn check_query(id: &str, operation: &Value) {
    let parameters = operation["parameters"].as_array().unwrap();
    for pair in query(id).trim_start_matches('?').split('&') {
        let name = pair.split('=').next().unwrap();
        let is_known = parameters
            .iter()
            .any(|parameter| parameter["in"] == "query" && parameter["name"] == name);
        assert!(name.is_empty() || is_known, "{id}: no parameter {name}");
    }
}
