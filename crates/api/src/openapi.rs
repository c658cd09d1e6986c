//! The document that describes the control plane, at `/openapi.json`.

mod operation;
mod operations;
mod schemas;

use axum::http::Method;
use jiffy_api_types::ErrorBody;
use operation::Operation;
use schemas::{Schemas, schema_of};
use serde_json::{Map, Value, json};

/// The document.
pub fn document() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    let mut schemas = Schemas::new();
    for operation in operations::all() {
        let path = paths
            .entry(operation.path)
            .or_insert_with(|| Value::Object(Map::new()));
        if let Some(path) = path.as_object_mut() {
            path.insert(
                operation.method.as_str().to_lowercase(),
                shown(operation, &mut schemas),
            );
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Jiffy",
            "version": env!("CARGO_PKG_VERSION"),
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
            "description": "Sandboxes on one host, as E2B clients expect them, and what Jiffy adds.",
        },
        "servers": [{ "url": "/" }],
        "security": [{ "apiKey": [] }, { "bearer": [] }],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "apiKey": { "type": "apiKey", "in": "header", "name": "X-API-KEY" },
                "bearer": { "type": "http", "scheme": "bearer" },
            },
            "schemas": schemas.into_named(),
        },
    })
}

const TOO_LONG: &str =
    "The request's address (414) or head (431) is longer than 64 KiB; there is no body";

fn content(schema: &Value) -> Value {
    json!({ "application/json": { "schema": schema } })
}

fn shown(operation: Operation, schemas: &mut Schemas) -> Value {
    let mut answers = Map::new();
    for (status, description, body) in &operation.answers {
        let mut answer = json!({ "description": description });
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
    for status in operation.refusals() {
        let description = refusal(status);
        let answer = json!({
            "description": description,
            "content": content(&schemas.answer(schema_of::<ErrorBody>())),
        });
        answers.insert(status.to_string(), answer);
    }
    // Answered below the control plane, which never sees such a request.
    for status in ["414", "431"] {
        answers.insert(status.to_owned(), json!({ "description": TOO_LONG }));
    }
    let parameters: Vec<Value> = path_parameters(operation.path)
        .into_iter()
        .chain(operation.parameters)
        .collect();
    let mut shown = json!({
        "operationId": operation.id,
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": parameters,
        "responses": answers,
    });
    if let Some(map) = shown.as_object_mut() {
        if let Some((body, required)) = operation.body {
            let schema = schemas.request(body);
            let content = json!({ operation.media_type: { "schema": schema } });
            let body = json!({ "required": required, "content": content });
            map.insert("requestBody".to_owned(), body);
        }
        if operation.open {
            map.insert("security".to_owned(), json!([]));
        }
    }
    shown
}

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
            "schema": { "type": "string", "minLength": 1, "maxLength": 256 },
        })
    };
    names.map(parameter).collect()
}

fn refusal(status: u16) -> &'static str {
    match status {
        400 => "The request makes no sense, or asks for something this host does not have",
        401 => "No API key, or one that is not in force any more",
        403 => "The key's scope does not allow it, or its use from this address",
        404 => "It is not there, or not the caller's",
        409 => "Its state does not allow it",
        413 => "The body is too long",
        415 => "The body is not JSON",
        426 => "The call is for HTTP/1.1 with `Upgrade: tcp`",
        502 => "Nothing answers there in the guest",
        422 => "The `Idempotency-Key` was sent before with another request",
        429 => {
            "A limit of the key is reached, or that on failures to authenticate of this address; \
                `Retry-After` says when it helps to try again"
        }
        501 => "This host does not serve that",
        507 => {
            "The key keeps as much on disk as it may; the message says what is used and what would free it"
        }
        503 => "Refused for now; nothing changed",
        _ => "The host failed; nothing changed unless the message says so",
    }
}

/// Every call the document describes, as method and path.
pub fn described() -> Vec<(Method, &'static str)> {
    let all = operations::all().into_iter();
    all.map(|o| (o.method, o.path)).collect()
}
