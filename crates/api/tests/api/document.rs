//! Consistency of the OpenAPI document and the router.

use crate::callers::OPEN;
use crate::support;

use jiffy_api::{calls, openapi};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use support::{Api, TestCaller};

#[test]
fn every_call_is_described_and_every_description_is_a_call() {
    let text = |(method, path): (axum::http::Method, &str)| format!("{method} {path}");
    let served: BTreeSet<String> = calls().into_iter().map(text).collect();
    let described: BTreeSet<String> = openapi::described().into_iter().map(text).collect();
    assert_eq!(served, described);
}

#[test]
fn the_openapi_document_is_complete() {
    let document = openapi::document();
    let mut ids = BTreeSet::new();
    for (path, calls) in document["paths"].as_object().unwrap() {
        for (method, call) in calls.as_object().unwrap() {
            let id = call["operationId"].as_str().unwrap();
            assert!(ids.insert(id.to_owned()), "{id} twice");
            let parameters = call["parameters"].as_array().unwrap();
            let in_path: Vec<&Value> = parameters.iter().filter(|p| p["in"] == "path").collect();
            assert_eq!(in_path.len(), path.matches('{').count(), "{method} {path}");
            assert!(!call["responses"].as_object().unwrap().is_empty());
        }
    }
    // Every reference has a target, and every schema is referenced.
    let text = document.to_string();
    let schemas = document["components"]["schemas"].as_object().unwrap();
    let used: BTreeSet<&str> = text
        .split("#/components/schemas/")
        .skip(1)
        .map(|rest| rest.split('"').next().unwrap())
        .collect();
    let known: BTreeSet<&str> = schemas.keys().map(String::as_str).collect();
    assert_eq!(used, known);
    for (name, schema) in schemas {
        assert!(schema["description"].is_string(), "{name} is not described");
        check_shape(name, schema);
    }
}

/// Checks that arrays have items, and that fields are described.
fn check_shape(at: &str, schema: &Value) {
    let kinds = match &schema["type"] {
        Value::Array(kinds) => kinds.clone(),
        kind => vec![kind.clone()],
    };
    let is_array = kinds.iter().any(|kind| kind == "array");
    assert!(!is_array || !schema["items"].is_null(), "{at} has no items");
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        assert!(
            field["description"].is_string(),
            "{at}.{name} is not described"
        );
        check_shape(&format!("{at}.{name}"), field);
    }
    for inner in ["items", "additionalProperties"] {
        if schema[inner].is_object() {
            check_shape(&format!("{at}/{inner}"), &schema[inner]);
        }
    }
}

#[tokio::test]
async fn the_document_and_health_need_no_key() {
    let api = Api::new();
    let document = api
        .call_as(&TestCaller::Nobody, "GET", "/openapi.json", Value::Null)
        .await;
    assert_eq!(document.expect(200).body, openapi::document());
    api.call_as(&TestCaller::Nobody, "GET", "/health", Value::Null)
        .await
        .expect(200);
}

#[tokio::test]
async fn every_other_call_requires_a_key() {
    let api = Api::new();
    for (method, path) in calls() {
        if OPEN.contains(&path) {
            continue;
        }
        let path = path.replace(['{', '}'], "");
        for who in [TestCaller::Nobody, TestCaller::Key("e2b_00".into())] {
            let refused = api.call_as(&who, method.as_str(), &path, Value::Null).await;
            assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
            assert_eq!(
                refused.expect_error(401),
                "unauthenticated",
                "{method} {path}"
            );
        }
    }
}

#[test]
fn a_response_that_violates_the_document_is_detected() {
    let document = openapi::document();
    let named = &document["components"]["schemas"];
    let problems = |name: &str, value: Value| {
        let schema = json!({ "$ref": format!("#/components/schemas/{name}") });
        support::schema::problems(&schema, named, &value).len()
    };
    let good = json!({ "code": 404, "message": "x" });
    assert_eq!(problems("Error", good), 0);
    assert_eq!(problems("Error", json!({ "code": 404 })), 1);
    assert_eq!(
        problems("Error", json!({ "code": "404", "message": "x" })),
        1
    );
    assert_eq!(problems("Error", json!({ "code": 200, "message": "x" })), 1);
    let alias = json!({ "templateID": 1, "public": null });
    assert_eq!(problems("Alias", alias), 2);
    let entry = json!({ "snapshotID": "x", "error": { "code": 500 } });
    assert_eq!(problems("Forked", entry), 1);
}
