//! Field names in either spelling, and unknown fields.

use crate::support;

use jiffy_api::openapi;
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};
use support::{Answer, Api};

/// Returns a name in `snake_case`.
fn snake(name: &str) -> String {
    let mut text = String::new();
    let mut before = '_';
    for c in name.chars() {
        if c.is_ascii_uppercase() && !before.is_ascii_uppercase() && before != '_' {
            text.push('_');
        }
        text.push(c.to_ascii_lowercase());
        before = c;
    }
    text
}

/// Returns a name in `camelCase`.
fn camel(name: &str) -> String {
    let mut parts = name.split('_');
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |text, part| {
        let (head, tail) = part.split_at(1);
        text + &head.to_uppercase() + tail
    })
}

/// Returns a value that no field of this schema accepts.
fn wrong(schema: &Value) -> Value {
    let kinds = schema["type"].to_string();
    if kinds.contains("object") || kinds == "null" {
        // The schema of an option that Jiffy does not support has no `type`, whose text is then
        // `null`. Such an option accepts only an empty value.
        json!("wrong")
    } else {
        json!({ "wrong": { "deep": 1 } })
    }
}

#[test]
fn names_change_their_spelling() {
    assert_eq!(snake("templateID"), "template_id");
    assert_eq!(snake("minFreeDiskMb"), "min_free_disk_mb");
    assert_eq!(camel("allow_internet_access"), "allowInternetAccess");
}

#[tokio::test]
async fn every_field_of_every_body_is_read_in_either_spelling() {
    let api = Api::with_builder().await;
    let document = openapi::document();
    let mut fields = 0;
    for (path, calls) in document["paths"].as_object().unwrap() {
        for (method, call) in calls.as_object().unwrap() {
            let body = &call["requestBody"]["content"]["application/json"]["schema"];
            let Some(name) = body["$ref"].as_str().and_then(|r| r.rsplit('/').next()) else {
                continue;
            };
            let schema = &document["components"]["schemas"][name];
            let path = path
                .split('/')
                .map(|part| if part.starts_with('{') { "x" } else { part })
                .collect::<Vec<_>>()
                .join("/");
            let mut bodies = Vec::new();
            for (field, schema) in schema["properties"].as_object().unwrap() {
                for spelled in [snake(field), camel(field)] {
                    bodies.push((field, json!({ spelled: wrong(schema) })));
                }
                let Some(inner) = schema["properties"].as_object() else {
                    continue;
                };
                for (inner_field, schema) in inner {
                    for spelled in [snake(inner_field), camel(inner_field)] {
                        bodies.push((inner_field, json!({ field: { spelled: wrong(schema) } })));
                    }
                }
            }
            for (field, mut body) in bodies {
                // Without its template, a create would be rejected for another reason.
                if name == "NewSandbox" && field != "templateID" {
                    body["templateID"] = json!("base");
                }
                let method = method.to_uppercase();
                // A wrong value is rejected with the name of the field only if the field is read.
                let refused = api.call_as(&api.admin, &method, &path, body.clone()).await;
                assert_eq!(
                    refused.status, 400,
                    "{method} {path} {body}: {}",
                    refused.body
                );
                let reason = refused.text("message");
                let named = [camel(field), snake(field), field.clone()];
                let is_named = named.iter().any(|name| reason.contains(name));
                assert!(is_named, "{method} {path} {body}: {reason}");
                fields += 1;
            }
        }
    }
    assert!(fields > 100, "{fields}");
}

#[tokio::test]
async fn rules_of_a_running_sandbox_are_read_in_either_spelling() {
    let api = Api::new();
    let id = api.sandbox().await;
    let path = format!("/sandboxes/{id}/network");
    let settings = || api.host.get(&id).unwrap().settings().network.clone();
    for body in [
        json!({ "allowInternetAccess": false }),
        json!({ "allow_internet_access": false }),
    ] {
        api.put(&path, json!({})).await.expect(204);
        assert_eq!(settings().allow_internet_access, None);
        api.put(&path, body.clone()).await.expect(204);
        assert_eq!(settings().allow_internet_access, Some(false), "{body}");
    }
    let both = json!({ "allowInternetAccess": true, "allow_internet_access": false });
    api.put(&path, both).await.expect(400);
    assert_eq!(settings().allow_internet_access, Some(false));
    let lists = json!({ "allow_out": ["8.8.8.8"], "deny_out": ["0.0.0.0/0"] });
    api.put(&path, lists).await.expect(204);
    assert_eq!(
        (settings().allow_out.len(), settings().deny_out.len()),
        (1, 1)
    );
}

#[tokio::test]
async fn ports_of_a_running_sandbox_are_closed_opened_and_masked() {
    let api = Api::new();
    let id = api.sandbox().await;
    let path = format!("/sandboxes/{id}/network");
    let record = || api.host.get(&id).unwrap();
    let close = json!({ "allow_public_traffic": false, "maskRequestHost": "localhost:${PORT}" });
    api.put(&path, close).await.expect(204);
    let token = record().traffic_token().unwrap().to_owned();
    let network = record().settings().network.clone();
    assert!(network.restrict_traffic);
    assert_eq!(
        network.mask_request_host.as_deref(),
        Some("localhost:${PORT}")
    );
    let again = api
        .post(&format!("/v2/sandboxes/{id}/connect"), Value::Null)
        .await;
    assert_eq!(again.text("trafficAccessToken"), token);
    // Omitted fields and the token remain unchanged.
    api.put(&path, json!({ "denyOut": ["8.8.8.8"] }))
        .await
        .expect(204);
    assert_eq!(record().traffic_token(), Some(&*token));
    assert!(record().settings().network.mask_request_host.is_some());
    let open = json!({ "allowPublicTraffic": true, "mask_request_host": "" });
    api.put(&path, open).await.expect(204);
    assert_eq!(record().traffic_token(), None);
    let network = record().settings().network.clone();
    assert!(!network.restrict_traffic && network.mask_request_host.is_none());
    api.put(&path, json!({ "maskRequestHost": "a b" }))
        .await
        .expect(400);
}

#[tokio::test]
async fn unknown_members_of_objects_that_restrict_access_are_rejected() {
    let api = Api::new();
    let id = api.sandbox().await;
    let path = format!("/sandboxes/{id}/network");
    api.put(&path, json!({ "denyOut": ["8.8.8.8"] }))
        .await
        .expect(204);
    for bad in [
        json!({ "denyAll": true }),
        json!({ "internetAccess": false }),
        json!({ "network": { "denyOut": [] } }),
    ] {
        let refused = api.put(&path, bad).await.expect(400);
        assert!(refused.text("message").contains("unknown field"));
    }
    assert_eq!(
        api.host.get(&id).unwrap().settings().network.deny_out,
        ["8.8.8.8"]
    );
    for bad in [
        json!({ "templateID": "base", "network": { "allowInternetAccess": false } }),
        json!({ "templateID": "base", "lifecycle": { "on_timeouts": "pause" } }),
        json!({ "templateID": "base", "autoResume": { "enable": true } }),
    ] {
        let refused = api.post("/v2/sandboxes", bad).await.expect(400);
        assert!(refused.text("message").contains("unknown field"));
    }
    assert_eq!(api.host.list().len(), 1);
}

#[tokio::test]
async fn other_unknown_fields_are_named_in_the_response_and_counted() {
    let counts = Arc::new(OnceLock::new());
    let app = counts.clone();
    let api = Api::with(move |created| {
        let _ = app.set(created.clone());
        created
    });
    let ignored = |answer: &Answer| answer.header("jiffy-ignored-fields").map(str::to_owned);
    let sandbox = json!({ "templateID": "base", "env_vars": { "any": "name" } });
    let known = api.post("/v2/sandboxes", sandbox).await.expect(201);
    assert_eq!(ignored(&known), None);
    // Control characters of a name are replaced, because the names are sent in a header.
    let newer = json!({ "templateID": "base", "future": { "deep": 1 }, "x\r\ny": 2 });
    for _ in 0..2 {
        let answer = api.post("/v2/sandboxes", newer.clone()).await.expect(201);
        assert_eq!(ignored(&answer).as_deref(), Some("future, x??y"));
    }
    let id = known.id();
    let path = format!("/sandboxes/{id}/pause");
    let paused = api.post(&path, json!({ "later": true })).await.expect(204);
    assert_eq!(ignored(&paused).as_deref(), Some("later"));
    // Errors name the fields too, which may be their cause.
    let absent = json!({ "templateID": "absent", "future": 1 });
    let refused = api.post("/v2/sandboxes", absent).await.expect(404);
    assert_eq!(ignored(&refused).as_deref(), Some("future"));
    let families = counts.get().unwrap().figures();
    let family = families.iter().find(|f| f.name == "api_ignored_fields");
    let mut values = family.unwrap().values.clone();
    values.sort_by(|a, b| a.0.cmp(&b.0));
    let expected = [("future", 3.0), ("later", 1.0), ("x??y", 2.0)];
    assert_eq!(
        values,
        expected.map(|(name, count)| (name.to_owned(), count))
    );
}
