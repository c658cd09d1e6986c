//! The OpenAPI document at `/openapi.json`, which describes the calls of the control plane.

mod examples;
mod operation;
mod operations;
mod schemas;

use axum::http::Method;
use jiffy_api_types::ErrorBody;
use operation::Operation;
use schemas::{Schemas, schema_of};
use serde_json::{Map, Value, json};

/// Returns the OpenAPI document.
pub fn document() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    let mut schemas = Schemas::new();
    // Several operations share a path with different methods.
    for operation in operations::all() {
        let path = paths
            .entry(operation.path)
            .or_insert_with(|| Value::Object(Map::new()));
        if let Some(path) = path.as_object_mut() {
            path.insert(
                operation.method.as_str().to_lowercase(),
                operation_object(operation, &mut schemas),
            );
        }
    }
    let schemas = schemas.into_named();
    examples::add_to_responses(&mut paths, &schemas);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Jiffy",
            "version": env!("CARGO_PKG_VERSION"),
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
            "description": "Sandboxes on one host: the API of E2B, and extensions of Jiffy.",
        },
        "servers": [{ "url": "/" }],
        "security": [{ "apiKey": [] }, { "bearer": [] }],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "apiKey": { "type": "apiKey", "in": "header", "name": "X-API-KEY" },
                "bearer": { "type": "http", "scheme": "bearer" },
            },
            "schemas": schemas,
        },
    })
}

const TOO_LONG: &str =
    "The URL (414) or the headers (431) are longer than 64 KiB. The response has no body";

fn content(schema: &Value) -> Value {
    json!({ "application/json": { "schema": schema } })
}

/// Returns the object of an operation in the document, and adds the schemas of its bodies to
/// `schemas`.
fn operation_object(operation: Operation, schemas: &mut Schemas) -> Value {
    let mut answers = Map::new();
    for (status, description, body) in &operation.answers {
        let mut answer = json!({ "description": description });
        // Responses without a schema have no body.
        if let (Some(body), Some(map)) = (body, answer.as_object_mut()) {
            map.insert("content".to_owned(), content(&schemas.answer(*body)));
            if operation.paged {
                let token = json!({
                    "description": "Token of the next page; absent on the last",
                    "schema": { "type": "string" },
                });
                map.insert("headers".to_owned(), json!({ "x-next-token": token }));
            }
        }
        answers.insert(status.to_string(), answer);
    }
    for status in operation.error_statuses() {
        let description = error_description(status);
        let answer = json!({
            "description": description,
            "content": content(&schemas.answer(schema_of::<ErrorBody>())),
        });
        answers.insert(status.to_string(), answer);
    }
    // The HTTP server rejects these requests before the control plane receives them.
    for status in ["414", "431"] {
        answers.insert(status.to_owned(), json!({ "description": TOO_LONG }));
    }
    let parameters: Vec<Value> = path_parameters(operation.path)
        .into_iter()
        .chain(operation.parameters)
        .map(|parameter| with_example(operation.id, parameter))
        .collect();
    let mut object = json!({
        "operationId": operation.id,
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": parameters,
        "responses": answers,
    });
    if let Some(map) = object.as_object_mut() {
        if let Some((body, required)) = operation.body {
            let schema = schemas.request(body);
            let mut content = json!({ "schema": schema });
            if let Some(example) = examples::body(operation.id) {
                content["example"] = example;
            }
            let content = json!({ operation.media_type: content });
            let body = json!({ "required": required, "content": content });
            map.insert("requestBody".to_owned(), body);
        }
        // Overrides the security requirement of the whole document.
        if operation.open {
            map.insert("security".to_owned(), json!([]));
        }
    }
    object
}

/// Adds the example of a query parameter.
fn with_example(operation_id: &str, mut parameter: Value) -> Value {
    let name = parameter["name"].as_str().unwrap_or_default();
    if let Some(example) = examples::query(operation_id, name) {
        parameter["example"] = example;
    }
    parameter
}

/// Returns the parameters in a path.
fn path_parameters(path: &str) -> Vec<Value> {
    let names = path.split('/').filter_map(|part| {
        let name = part.strip_prefix('{')?;
        name.strip_suffix('}')
    });
    let parameter = |name: &str| {
        json!({
            "name": name,
            "in": "path",
            "required": true,
            "description": path_parameter_description(name),
            "schema": { "type": "string", "minLength": 1, "maxLength": 256 },
            "example": examples::path_value(name),
        })
    };
    names.map(parameter).collect()
}

/// Returns the description of a parameter in paths.
fn path_parameter_description(name: &str) -> &'static str {
    match name {
        "sandboxID" => "Id or name of the sandbox",
        "snapshotID" => "Id or name of the snapshot",
        "templateID" => "Id or name of the template",
        "buildID" => "Id of the build",
        "agent" => "Name of the SSH agent",
        "alias" => "Name of the template",
        "hash" => "Hash of the files",
        "word" => "Secret part of the upload link",
        "pid" => "Process id in the guest",
        "port" => "Port of the guest",
        "keyID" => "Id or name of the API key",
        "secretID" => "Id or name of the secret",
        "volumeID" => "Id or name of the volume",
        "volumeSnapshotID" => "Id of the snapshot of a volume",
        "webhookID" => "Id of the webhook",
        "host" => "Host of the fleet, as `jiffy fleet nodes` names it",
        _ => "Name of the function",
    }
}

/// Returns the description of an error status, which is the same for all operations.
fn error_description(status: u16) -> &'static str {
    match status {
        400 => "Invalid request, or an option that this host does not support",
        401 => "API key missing, unknown, expired or revoked",
        403 => {
            "The scope of the key does not allow the operation, or the key may not be used from this address"
        }
        404 => "Not found, or owned by another key",
        409 => "The state of the object does not allow the operation",
        413 => "The body is too large",
        415 => "The body is not JSON",
        426 => "The request has no header `Upgrade`",
        502 => "No program listens on the port of the guest",
        422 => "Another request used this `Idempotency-Key`, or the content is invalid",
        429 => {
            "The key has reached a limit, or this address has too many authentication failures. \
             `Retry-After` has the time until the next attempt"
        }
        501 => "This host or engine does not support the operation",
        507 => {
            "The key has reached its disk limit. The message lists the usage and how to free space"
        }
        503 => "Temporarily unavailable; nothing changed",
        _ => "Internal error; nothing changed unless the message states otherwise",
    }
}

/// Returns method and path of each documented operation.
pub fn described() -> Vec<(Method, &'static str)> {
    let all = operations::all().into_iter();
    all.map(|o| (o.method, o.path)).collect()
}
