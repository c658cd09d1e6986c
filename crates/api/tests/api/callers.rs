//! Calls every operation of the OpenAPI document as callers that do not own the resource.
//!
//! The table is generated: new operations in the document are covered automatically. A path
//! parameter with a new name must be classified in [`Tenant::fill`].

use crate::builds::{build_id_of, built, id_of};
use crate::support;

use jiffy_api::{Limits, Scope, openapi};
use serde_json::{Map, Value, json};
use std::sync::LazyLock;
use support::{Answer, Api, TestCaller};

static DOCUMENT: LazyLock<Value> = LazyLock::new(openapi::document);
/// Calls that need no key. An upload requires its link instead.
pub const OPEN: [&str; 5] = [
    "/health",
    "/openapi.json",
    "/.well-known/openid-configuration",
    "/.well-known/jwks.json",
    "/templates/uploads/{word}",
];
/// Calls that name their resources in the query instead of the path.
const BY_QUERY: [(&str, &[&str]); 5] = [
    ("/volumecontent/{volumeID}/path", &["path=/"]),
    ("/volumecontent/{volumeID}/dir", &["path=/"]),
    ("/volumecontent/{volumeID}/file", &["path=/"]),
    (
        "/lineage",
        &["sandboxID={sandboxID}", "snapshotID={snapshotID}"],
    ),
    (
        "/compare",
        &[
            "a={sandboxID}&b={snapshotID}",
            "a={snapshotID}&b={sandboxID}&path=/etc/hosts",
        ],
    ),
];
/// A secret value of a sandbox that only its owner may read.
const SECRET: &str = "value-of-the-secret-variable";

/// Resources of one key.
struct Tenant {
    caller: TestCaller,
    key: String,
    sandbox: String,
    snapshot: String,
    template: String,
    build: String,
    name: String,
    secret: String,
    volume: String,
    volume_snapshot: String,
    webhook: String,
}

impl Tenant {
    /// Creates a key with a running sandbox, a snapshot and a built template.
    async fn new(api: &Api) -> Self {
        let (caller, key) = api.key(Scope::Create, Limits::default());
        let body = json!({
            "templateID": "base", "secure": true, "envVars": { "SECRET": SECRET },
            "network": { "allowPublicTraffic": false },
        });
        let created = api.call_as(&caller, "POST", "/v2/sandboxes", body).await;
        let sandbox = created.expect(201).id();
        let path = format!("/sandboxes/{sandbox}/snapshots");
        let body = json!({ "name": "mine" });
        let taken = api.call_as(&caller, "POST", &path, body).await.expect(201);
        let body = json!({ "name": "token", "value": SECRET });
        let stored = api.call_as(&caller, "POST", "/secrets", body).await;
        let body = json!({ "name": "data", "sizeMB": 1 });
        let volume = api.call_as(&caller, "POST", "/volumes", body).await;
        let path = "/volumes/data/snapshots";
        let volume_snapshot = api.call_as(&caller, "POST", path, Value::Null).await;
        let body = json!({
            "name": "hook", "url": "https://example.com/events", "enabled": false,
            "signatureSecret": SECRET,
        });
        let hook = api.call_as(&caller, "POST", "/events/webhooks", body).await;
        let name = "app".to_owned();
        built(api, &name, &key.key.id, &["default"]);
        Self {
            caller,
            key: key.key.id,
            sandbox,
            snapshot: taken.text("snapshotID"),
            template: id_of(&name),
            build: build_id_of(&name),
            name,
            secret: stored.expect(201).text("secretID"),
            volume: volume.expect(201).text("volumeID"),
            volume_snapshot: volume_snapshot.expect(201).text("volumeSnapshotID"),
            webhook: hook.expect(201).text("id"),
        }
    }

    /// Ids of resources that do not exist.
    fn unknown(&self) -> Self {
        let other = |id: &str| -> String { id.chars().rev().collect() };
        Self {
            caller: self.caller.clone(),
            key: other(&self.key),
            sandbox: other(&self.sandbox),
            snapshot: other(&self.snapshot),
            template: other(&self.template),
            build: other(&self.build),
            name: other(&self.name),
            secret: other(&self.secret),
            volume: other(&self.volume),
            volume_snapshot: other(&self.volume_snapshot),
            webhook: other(&self.webhook),
        }
    }

    /// Replaces the parameters of a path by the tenant's resources.
    fn fill(&self, path: &str) -> String {
        let part = |part: &str| match part {
            "{sandboxID}" => self.sandbox.clone(),
            "{snapshotID}" => self.snapshot.clone(),
            "{templateID}" => self.template.clone(),
            "{buildID}" => self.build.clone(),
            // No recipe has this name: a test must not build a stock template.
            "{alias}" | "{name}" | "{recipe}" => self.name.clone(),
            "{keyID}" => self.key.clone(),
            "{secretID}" => self.secret.clone(),
            "{volumeID}" => self.volume.clone(),
            "{volumeSnapshotID}" => self.volume_snapshot.clone(),
            "{webhookID}" => self.webhook.clone(),
            "{tag}" => "default".to_owned(),
            "{agent}" => "default".to_owned(),
            "{port}" => "80".to_owned(),
            "{pid}" => "7".to_owned(),
            "{host}" => "h1".to_owned(),
            "{hash}" => "ab".repeat(32),
            "{word}" => "0".repeat(40),
            part => {
                assert!(!part.starts_with('{'), "classify the parameter {part}");
                part.to_owned()
            }
        };
        path.split('/').map(part).collect::<Vec<_>>().join("/")
    }

    /// Returns the smallest valid body of a schema, with the tenant's resources as ids.
    fn body(&self, schema: &Value) -> Value {
        let mut schema = schema;
        if let Some(name) = schema["$ref"].as_str() {
            let name = name.rsplit('/').next().unwrap();
            schema = &DOCUMENT["components"]["schemas"][name];
        }
        let none = Map::new();
        let properties = schema["properties"].as_object().unwrap_or(&none);
        // The first alternative of a body that needs one of several fields.
        let required = [&schema["required"], &schema["anyOf"][0]["required"]];
        let required: Vec<&str> = required
            .into_iter()
            .filter_map(Value::as_array)
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let mut body = Map::new();
        for (name, schema) in properties {
            let resource = match name.as_str() {
                "snapshotID" => Some(&self.snapshot),
                "sandboxID" => Some(&self.sandbox),
                "templateID" | "fromTemplate" => Some(&self.template),
                "keyID" => Some(&self.key),
                "volumeSnapshotID" => Some(&self.volume_snapshot),
                "name" | "alias" | "target" => Some(&self.name),
                other => {
                    let id = other.ends_with("ID") || other.ends_with("IDs");
                    assert!(!id, "classify the property {other}");
                    None
                }
            };
            let value = match resource {
                Some(resource) => json!(resource),
                None if required.contains(&name.as_str()) => sample(schema),
                None => continue,
            };
            body.insert(name.clone(), value);
        }
        Value::Object(body)
    }

    /// Returns all values that identify the tenant's resources.
    fn marks(&self) -> [&str; 9] {
        [
            &self.key,
            &self.sandbox,
            &self.snapshot,
            &self.template,
            &self.build,
            &self.secret,
            &self.volume,
            &self.volume_snapshot,
            &self.webhook,
        ]
    }
}

/// Returns a valid value of a schema.
fn sample(schema: &Value) -> Value {
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.rsplit('/').next().unwrap();
        return sample(&DOCUMENT["components"]["schemas"][name]);
    }
    if let Some(values) = schema["enum"].as_array() {
        return values[0].clone();
    }
    let kind = match &schema["type"] {
        Value::Array(kinds) => kinds[0].clone(),
        kind => kind.clone(),
    };
    match kind.as_str() {
        Some("integer" | "number") => {
            json!(schema["minimum"].as_i64().unwrap_or(0).max(1))
        }
        Some("boolean") => json!(false),
        Some("array") => json!(["x"]),
        Some("string") => json!("x"),
        _ => json!({}),
    }
}

/// An operation of the document.
struct Call {
    method: String,
    path: String,
    query: String,
    body: Option<Value>,
}

impl Call {
    /// Returns all calls of the document. A call of [`BY_QUERY`] appears once for each of its
    /// queries.
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for (path, calls) in DOCUMENT["paths"].as_object().unwrap() {
            for (method, call) in calls.as_object().unwrap() {
                let schema = &call["requestBody"]["content"]["application/json"]["schema"];
                let needed = call["parameters"].as_array().unwrap().iter();
                let needed = needed.filter(|p| p["in"] == "query" && p["required"] == true);
                let query: Vec<String> = needed
                    .map(|p| (p["name"].as_str().unwrap(), sample(&p["schema"])))
                    .map(|(name, value)| match value {
                        Value::String(text) => format!("{name}={text}"),
                        value => format!("{name}={value}"),
                    })
                    .collect();
                let by_query = BY_QUERY.iter().find(|(named, _)| named == path);
                let queries = match by_query {
                    Some((_, queries)) => queries.iter().map(|q| (*q).to_owned()).collect(),
                    None => vec![query.join("&")],
                };
                all.extend(queries.into_iter().map(|query| Self {
                    method: method.to_uppercase(),
                    path: path.clone(),
                    query,
                    body: (!schema.is_null()).then(|| schema.clone()),
                }));
            }
        }
        assert!(all.len() > 50, "{}", all.len());
        // Last, because it creates a template of the tenant's name for the caller, which later
        // calls would find.
        all.sort_by_key(|call: &Self| (&*call.method, &*call.path) == ("POST", "/templates"));
        all
    }

    fn is_open(&self) -> bool {
        OPEN.contains(&self.path.as_str())
    }

    /// Returns whether a parameter names a resource that has an owner. Functions are excluded,
    /// because their runtime is not available in this test. `tests/functions` of `crates/jiffy`
    /// covers them.
    fn names_a_resource(&self) -> bool {
        if self.path.starts_with("/functions/") {
            return false;
        }
        let word = |part: &str| part.starts_with('{') && part != "{word}";
        self.path.split('/').any(word) || self.query.contains('{')
    }

    /// Sends the call as `caller`, with the resources of `of`.
    async fn sent_by(&self, api: &Api, caller: &TestCaller, of: &Tenant) -> Answer {
        let mut path = of.fill(&self.path);
        if !self.query.is_empty() {
            let query = self.query.replace("{sandboxID}", &of.sandbox);
            path = format!("{path}?{}", query.replace("{snapshotID}", &of.snapshot));
        }
        let body = self.body.as_ref().map_or(Value::Null, |s| of.body(s));
        api.call_as(caller, &self.method, &path, body).await
    }

    fn name(&self) -> String {
        format!("{} {}", self.method, self.path)
    }
}

/// Returns everything that the owner of the resources can read, without values that change by
/// themselves.
async fn view(api: &Api, tenant: &Tenant) -> String {
    let mut all = String::new();
    for path in [
        "/v2/sandboxes".to_owned(),
        format!("/sandboxes/{}", tenant.sandbox),
        "/snapshots".to_owned(),
        "/secrets".to_owned(),
        "/volumes".to_owned(),
        "/volumesnapshots".to_owned(),
        "/events/webhooks".to_owned(),
        format!("/templates/{}", tenant.template),
        format!("/templates/{}/tags", tenant.template),
        format!(
            "/templates/{}/builds/{}/status",
            tenant.template, tenant.build
        ),
    ] {
        let answer = api.call_as(&tenant.caller, "GET", &path, Value::Null).await;
        all += &answer.expect(200).body.to_string();
    }
    all
}

#[tokio::test]
async fn no_call_serves_a_request_without_a_valid_key() {
    let api = Api::with_builder().await;
    let alice = Tenant::new(&api).await;
    let (revoked, key) = api.key(Scope::Admin, Limits::default());
    api.keys.revoke(&key.key.id).unwrap();
    let before = view(&api, &alice).await;
    for call in Call::all().iter().filter(|call| !call.is_open()) {
        for caller in [&revoked, &TestCaller::Nobody] {
            let refused = call.sent_by(&api, caller, &alice).await;
            assert_eq!(
                refused.expect_error(401),
                "unauthenticated",
                "{}",
                call.name()
            );
        }
    }
    assert_eq!(view(&api, &alice).await, before);
}

#[tokio::test]
async fn resources_of_another_key_answer_every_call_as_if_they_did_not_exist() {
    let api = Api::with_builder().await;
    let alice = Tenant::new(&api).await;
    let (mallory, _) = api.key(Scope::Create, Limits::default());
    let unknown = alice.unknown();
    let before = view(&api, &alice).await;
    for call in Call::all() {
        let visible = call.sent_by(&api, &mallory, &alice).await;
        let text = visible.body.to_string();
        if call.names_a_resource() && !call.is_open() {
            assert!(
                matches!(visible.status, 403 | 404),
                "{}: {text}",
                call.name()
            );
            let nothing = call.sent_by(&api, &mallory, &unknown).await;
            let mut same = nothing.body.to_string();
            for (id, other) in alice.marks().iter().zip(unknown.marks()) {
                same = same.replace(other, id);
            }
            same = same.replace(&unknown.name, &alice.name);
            assert_eq!(
                (visible.status, text),
                (nothing.status, same),
                "{}",
                call.name()
            );
        } else if call.path != "/openapi.json" {
            // An error message may repeat parameters of the request.
            let reported = if visible.status < 400 {
                text
            } else {
                String::new()
            };
            let mark = alice
                .marks()
                .into_iter()
                .find(|mark| reported.contains(mark));
            assert_eq!(mark, None, "{}: {reported}", call.name());
            assert!(!reported.contains(SECRET), "{}: {reported}", call.name());
        }
        assert_eq!(view(&api, &alice).await, before, "{}", call.name());
    }
}

#[tokio::test]
async fn a_key_of_scope_read_changes_nothing_and_reads_no_secret_by_any_call() {
    let api = Api::with_builder().await;
    let alice = Tenant::new(&api).await;
    let (reader, _) = api.key(Scope::Read, Limits::default());
    let path = format!("/sandboxes/{}", alice.sandbox);
    let own = api.call_as(&alice.caller, "GET", &path, Value::Null).await;
    let token = own.expect(200).text("envdAccessToken");
    let before = view(&api, &alice).await;
    for call in Call::all().iter().filter(|call| !call.is_open()) {
        let visible = call.sent_by(&api, &reader, &alice).await;
        match call.method.as_str() {
            "GET" => {
                let text = visible.body.to_string();
                assert!(!text.contains(&token), "{}", call.name());
                assert!(!text.contains(SECRET), "{}", call.name());
            }
            _ => assert_eq!(visible.expect_error(403), "forbidden", "{}", call.name()),
        }
    }
    assert_eq!(view(&api, &alice).await, before);
}

/// Shows that the requests rejected for other keys are valid: the owner of the resource, or where
/// necessary the owner of the host, gets a different response.
#[tokio::test]
async fn calls_rejected_for_other_keys_succeed_for_the_owner() {
    for call in Call::all() {
        if !call.names_a_resource() || call.is_open() {
            continue;
        }
        let api = Api::with_builder().await;
        let alice = Tenant::new(&api).await;
        let (mallory, _) = api.key(Scope::Create, Limits::default());
        let refused = call.sent_by(&api, &mallory, &alice).await;
        let served = match refused.status {
            403 => call.sent_by(&api, &TestCaller::Owner, &alice).await,
            _ => call.sent_by(&api, &alice.caller, &alice).await,
        };
        let good = served.status != refused.status && served.status != 401 && served.status != 403;
        let text = served.body.to_string();
        assert!(good, "{}: {} {text}", call.name(), served.status);
    }
}
