//! Requests, permissions and results of builds. Tests with real guests are in `crates/jiffy`.

use crate::support;

use axum::body::Body;
use axum::http::Request;
use jiffy_api::{Limits, Scope};
use jiffy_api_types::SnapshotContent;
use jiffy_engine_api::now_ms;
use jiffy_image::{Home, MANIFEST_FORMAT, Templates};
use jiffy_template_builder::{
    BuildRecord, BuildRecords, BuildStatus, Builder, BuilderSettings, TemplateRecord, WantedSize,
};
use serde_json::{Value, json};
use std::fs;
use std::time::Duration;
use support::{Answer, Api, TestCaller};

/// Requests a build of a template with this name.
async fn request(api: &Api, who: &TestCaller, name: &str) -> Answer {
    let body = json!({ "name": name, "tags": [], "cpuCount": 1, "memoryMB": 512 });
    api.call_as(who, "POST", "/v3/templates", body).await
}

#[tokio::test]
async fn a_build_waits_for_its_start_and_reports_its_result() {
    let api = Api::with_builder().await;
    let requested = request(&api, &api.admin, "mine:v1").await.expect(202);
    assert_eq!(requested.body["tags"], json!(["v1"]));
    assert_eq!(requested.body["names"], json!(["mine"]));
    let (template, build) = (requested.text("templateID"), requested.text("buildID"));
    let path = format!("/templates/{template}/builds/{build}");
    let status = format!("{path}/status");
    assert_eq!(api.get(&status).await.expect(200).text("status"), "waiting");
    // The template's name refers to the same build.
    let by_name = format!("/templates/mine/builds/{build}/status");
    assert_eq!(api.get(&by_name).await.expect(200).text("buildID"), build);

    let steps =
        json!({ "fromTemplate": "unknown-template", "steps": [{ "type": "RUN", "args": ["x"] }] });
    let start = format!("/v2{path}");
    api.post(&start, steps.clone()).await.expect(202);
    let ended = loop {
        let now = api.get(&status).await.expect(200);
        if ["ready", "error"].contains(&now.text("status").as_str()) {
            break now;
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(ended.text("status"), "error");
    assert_eq!(ended.body["reason"]["step"], "base");
    let why = ended.body["reason"]["message"].as_str().unwrap();
    assert!(why.contains("unknown-template"), "{why}");
    let again = api.post(&start, steps).await.expect_error(409);
    assert_eq!(again, "build_started");
    let logs = api
        .get(&format!("{path}/logs?level=error"))
        .await
        .expect(200);
    let lines = logs.body["logs"].as_array().unwrap();
    assert_eq!(lines.len(), 1);
    let at: jiff::Timestamp = lines[0]["timestamp"].as_str().unwrap().parse().unwrap();
    let at = at.as_millisecond();
    for (query, count) in [
        (format!("cursor={at}&source=temporary"), 1),
        (format!("cursor={}&source=persistent", at + 1), 0),
        (format!("cursor={at}&direction=backward"), 1),
        (format!("cursor={}&direction=backward", at - 1), 0),
    ] {
        let path = format!("{path}/logs?level=error&{query}");
        let some = api.get(&path).await.expect(200);
        assert_eq!(
            some.body["logs"].as_array().unwrap().len(),
            count,
            "{query}"
        );
    }
    api.get(&format!("{path}/logs?source=elsewhere"))
        .await
        .expect(400);
}

#[tokio::test]
async fn a_build_cancelled_before_its_start_is_final() {
    let api = Api::with_builder().await;
    let requested = request(&api, &api.admin, "mine").await.expect(202);
    let (template, build) = (requested.text("templateID"), requested.text("buildID"));
    let path = format!("/templates/{template}/builds/{build}");
    api.post(&format!("{path}/cancel"), Value::Null)
        .await
        .expect(204);
    let status = api.get(&format!("{path}/status")).await.expect(200);
    assert_eq!(status.text("status"), "error");
    let start = json!({ "fromTemplate": "base" });
    api.post(&format!("/v2{path}"), start).await.expect(409);
}

#[tokio::test]
async fn a_template_belongs_to_the_requesting_key_and_is_invisible_to_others() {
    let api = Api::with_builder().await;
    let (hers, _) = api.key(Scope::Create, Limits::default());
    let (his, _) = api.key(Scope::Create, Limits::default());
    let requested = request(&api, &hers, "hers").await.expect(202);
    let (template, build) = (requested.text("templateID"), requested.text("buildID"));
    let status = format!("/templates/{template}/builds/{build}/status");
    api.call_as(&hers, "GET", &status, Value::Null)
        .await
        .expect(200);
    api.call_as(&his, "GET", &status, Value::Null)
        .await
        .expect(404);
    api.get(&status).await.expect(200);
    for (method, path, body) in [
        (
            "POST",
            format!("/v2/templates/{template}/builds/{build}"),
            json!({ "fromTemplate": "base" }),
        ),
        (
            "POST",
            format!("/templates/{template}/builds/{build}/cancel"),
            Value::Null,
        ),
        (
            "GET",
            format!("/templates/{template}/files/{}", "ab".repeat(32)),
            Value::Null,
        ),
        (
            "PATCH",
            format!("/v2/templates/{template}"),
            json!({ "public": true }),
        ),
        (
            "POST",
            "/templates/tags".to_owned(),
            json!({ "target": "hers", "tags": ["x"] }),
        ),
        (
            "DELETE",
            "/templates/tags".to_owned(),
            json!({ "name": "hers", "tags": ["x"] }),
        ),
        ("DELETE", format!("/templates/{template}"), Value::Null),
    ] {
        let refused = api.call_as(&his, method, &path, body).await;
        assert_eq!(
            refused.expect_error(404),
            "template_not_found",
            "{method} {path}"
        );
    }
    let alias = "/templates/aliases/hers";
    api.call_as(&his, "GET", alias, Value::Null)
        .await
        .expect(404);
    // Another key may use the same name.
    let his_own = request(&api, &his, "hers").await.expect(202);
    assert_ne!(his_own.text("templateID"), template);
    let public = json!({ "public": true });
    api.call_as(&hers, "PATCH", "/v2/templates/hers", public)
        .await
        .expect(200);
    let shown = api
        .call_as(&hers, "GET", alias, Value::Null)
        .await
        .expect(200);
    assert_eq!(
        shown.body,
        json!({ "templateID": template, "public": true })
    );
    let shown = api
        .call_as(&his, "GET", alias, Value::Null)
        .await
        .expect(200);
    assert_eq!(shown.body["templateID"], his_own.body["templateID"]);
    api.call_as(&hers, "DELETE", "/templates/hers", Value::Null)
        .await
        .expect(204);
    api.call_as(&hers, "GET", &status, Value::Null)
        .await
        .expect(404);
}

/// Returns the id of the template that [`built`] registers, in the form of a generated id.
pub fn id_of(name: &str) -> String {
    format!("{name:t<20}")
}

/// Returns the id of the build that [`built`] registers. The id contains only the first six bytes
/// of the name, so the names of one test must differ in these bytes.
pub fn build_id_of(name: &str) -> String {
    let digits: String = name.bytes().map(|b| format!("{b:02x}")).collect();
    format!("01234567-0000-4000-8000-{digits:0<12.12}")
}

/// Registers a build of `name` for a key, and stores its template.
pub fn built(api: &Api, name: &str, owner: &str, tags: &[&str]) {
    let home = Home::at(api.bench.dir.path().join("home")).unwrap();
    let records = BuildRecords::open(home.path()).unwrap();
    let template = TemplateRecord {
        id: id_of(name),
        name: name.to_owned(),
        owner: Some(owner.to_owned()),
        public: false,
        created_ms: 1,
    };
    records.insert_template(&template).unwrap();
    let (called, owner) = (template.clone(), template.owner.clone());
    let build = BuildRecord {
        id: build_id_of(name),
        template: template.id,
        caller: owner.clone(),
        tags: tags.iter().map(|t| (*t).to_owned()).collect(),
        size: WantedSize::default(),
        status: BuildStatus::Building,
        reason: None,
        steps: Vec::new(),
        version: None,
        created_ms: 1,
        changed_ms: 1,
    };
    records.insert_build(&build).unwrap();
    records.set_ready(&build.id, &[], "v").unwrap();
    for tag in tags {
        let manifest = json!({
            "format": MANIFEST_FORMAT, "name": name, "tag": tag, "created": 1, "recipe_sha256": "",
            "owner": owner,
            "images": [{ "sha256": "ab".repeat(32), "size": 1 }],
            "defaults": { "user": "user", "workdir": "/", "disk_mib": 512 },
        });
        let file = called.reference(tag).replace('/', "~").replace(':', "@");
        let directory = home.path().join("templates").join(file);
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("template.json"), manifest.to_string()).unwrap();
    }
}

#[tokio::test]
async fn a_template_removed_without_the_builder_is_unknown_to_the_builder() {
    let api = Api::with_builder().await;
    let (hers, key) = api.key(Scope::Create, Limits::default());
    let (his, _) = api.key(Scope::Create, Limits::default());
    built(&api, "app", &key.key.id, &["default", "v1"]);
    let alias = "/templates/aliases/app";
    let get = async |who: &TestCaller, path: &str| api.call_as(who, "GET", path, Value::Null).await;
    get(&hers, alias).await.expect(200);
    get(&his, alias).await.expect(404);
    let home = Home::at(api.bench.dir.path().join("home")).unwrap();
    let templates = Templates::new(&home);
    templates.remove(&format!("{}/app:v1", key.key.id)).unwrap();
    let tags = get(&hers, "/templates/app/tags").await.expect(200);
    assert_eq!(tags.items().len(), 1, "{}", tags.body);
    get(&hers, alias).await.expect(200);
    // Removed directly, as by `jiffy template rm`.
    templates.remove(&format!("{}/app", key.key.id)).unwrap();
    for who in [&hers, &his, &api.admin] {
        assert_eq!(
            get(who, alias).await.expect_error(404),
            "template_not_found"
        );
    }
    let again = api.call_as(&hers, "DELETE", "/templates/app", Value::Null);
    assert_eq!(again.await.expect_error(404), "template_not_found");
    // The name can be used again.
    let requested = request(&api, &his, "app").await.expect(202);
    get(&his, alias).await.expect(200);
    get(&hers, alias).await.expect(404);
    // A failed build does not occupy the name, and its status contains the reason.
    let (template, build) = (requested.text("templateID"), requested.text("buildID"));
    let path = format!("/templates/{template}/builds/{build}");
    api.post(&format!("{path}/cancel"), Value::Null)
        .await
        .expect(204);
    get(&his, alias).await.expect(404);
    let status = get(&his, &format!("{path}/status")).await.expect(200);
    assert_eq!(status.text("status"), "error");
}

#[tokio::test]
async fn a_build_beyond_the_keys_budget_is_refused_before_it_begins() {
    let api = Api::with_builder().await;
    let limits = Limits {
        max_sandboxes: Some(1),
        max_memory_mib: Some(1024),
        ..Limits::default()
    };
    let (hers, _) = api.key(Scope::Create, limits);
    let requested = request(&api, &hers, "mine").await.expect(202);
    let (template, build) = (requested.text("templateID"), requested.text("buildID"));
    let path = format!("/templates/{template}/builds/{build}");
    let start = async || {
        let body = json!({ "fromTemplate": "unknown-template" });
        let path = format!("/v2{path}");
        api.call_as(&hers, "POST", &path, body).await
    };
    let sandbox = api.sandbox_of(&hers).await;
    assert_eq!(start().await.expect_error(429), "max_sandboxes");
    // The build is still waiting.
    let status = api.get(&format!("{path}/status")).await.expect(200);
    assert_eq!(status.text("status"), "waiting");
    let removed = format!("/sandboxes/{sandbox}");
    api.call_as(&hers, "DELETE", &removed, Value::Null)
        .await
        .expect(204);
    start().await.expect(202);

    let body = json!({ "name": "large", "cpuCount": 1, "memoryMB": 2048 });
    let requested = api.call_as(&hers, "POST", "/v3/templates", body).await;
    let (template, build) = (requested.text("templateID"), requested.text("buildID"));
    let path = format!("/v2/templates/{template}/builds/{build}");
    let body = json!({ "fromTemplate": "base" });
    let refused = api.call_as(&hers, "POST", &path, body).await;
    assert_eq!(refused.expect_error(429), "max_memory");
}

#[tokio::test]
async fn unused_build_data_expires() {
    const DAY_MS: u64 = 24 * 3600 * 1000;
    let api = Api::with_builder().await;
    let home = Home::at(api.bench.dir.path().join("home")).unwrap();
    let records = BuildRecords::open(home.path()).unwrap();
    let id = api.sandbox().await;
    for (key, days) in [("used", 2), ("unused", 8), ("forgotten", 15)] {
        api.host
            .build_steps()
            .snapshot(&id, key, SnapshotContent::Full)
            .await
            .unwrap();
        records.touch_step(key, now_ms() - days * DAY_MS).unwrap();
    }
    // Created without recording its use.
    api.host
        .build_steps()
        .snapshot(&id, "new", SnapshotContent::Full)
        .await
        .unwrap();
    let keys = || -> Vec<String> {
        let steps = api.host.build_steps().list().into_iter();
        let mut keys: Vec<String> = steps.map(|s| s.fingerprint().to_owned()).collect();
        // Several may have been created in the same millisecond.
        keys.sort();
        keys
    };
    // A builder prunes immediately after it is opened: it removes steps unused for 14 days.
    let builder = Builder::open(&home, api.host.clone(), BuilderSettings::default());
    let builder = builder.await.unwrap();
    while keys().len() > 3 {
        tokio::task::yield_now().await;
    }
    assert_eq!(keys(), ["new", "unused", "used"]);
    let week = json!({ "unusedSeconds": 7 * 24 * 3600 });
    let pruned = api.post("/templates/prune", week).await.expect(200);
    assert_eq!(pruned.body["steps"], 1);
    assert_eq!(keys(), ["new", "used"]);
    let pruned = builder.prune(Duration::ZERO, None).unwrap();
    assert_eq!(pruned.steps, 2);
}

#[tokio::test]
async fn invalid_and_occupied_names_are_rejected() {
    let api = Api::with_builder().await;
    for name in [
        "",
        "a/b",
        "../x",
        "A b",
        "x:",
        ":y",
        "-x",
        &"a".repeat(129),
        // Ids of sandboxes, snapshots, templates and builds, and internal names of builds.
        "abcdefghijkmnpqrstuv",
        "01234567-89ab-4cde-8f01-23456789abcd",
        "build-01234567-89ab-4cde-8f01-23456789abcd",
        "image-python-3.12-01234567",
    ] {
        assert_eq!(
            request(&api, &api.admin, name).await.expect_error(400),
            "invalid_request",
            "{name}"
        );
    }
    // Stock templates belong to the host.
    assert_eq!(
        request(&api, &api.admin, "base").await.expect_error(409),
        "name_taken"
    );
    request(&api, &api.admin, "mine").await.expect(202);
    let body = json!({ "name": "mine", "tags": ["\u{1}%"] });
    let taken = api
        .call_as(&api.admin, "DELETE", "/templates/tags", body)
        .await;
    assert_eq!(taken.expect_error(400), "invalid_request");
    let large = json!({ "name": "x", "cpuCount": 200 });
    api.post("/v3/templates", large).await.expect(400);
}

#[tokio::test]
async fn files_can_be_uploaded_only_with_their_link() {
    let api = Api::with_builder().await;
    let requested = request(&api, &api.admin, "mine").await.expect(202);
    let hash = "0f".repeat(32);
    let path = format!("/templates/{}/files/{hash}", requested.text("templateID"));
    let link = api.get(&path).await.expect(201);
    assert_eq!(link.body["present"], false);
    let url = link.text("url");
    let at = url.find("/templates/uploads/").unwrap();
    assert!(url.starts_with("http://"), "{url}");
    let put = |path: &str| {
        let request = Request::builder().method("PUT").uri(path);
        request.body(Body::from("files")).unwrap()
    };
    api.send(put(&url[at..])).await.expect(200);
    assert_eq!(api.get(&path).await.expect(201).body["present"], true);
    // A link with another secret.
    let elsewhere = api.send(put("/templates/uploads/0123")).await;
    assert_eq!(elsewhere.expect_error(404), "upload_not_found");
    let (reader, _) = api.key(Scope::Read, Limits::default());
    api.call_as(&reader, "GET", &path, Value::Null)
        .await
        .expect(403);
    let bad = format!(
        "/templates/{}/files/..%2f..%2fetc",
        requested.text("templateID")
    );
    api.get(&bad).await.expect(400);
}

#[tokio::test]
async fn ssh_agents_are_offered_by_the_owner_of_a_running_build_only() {
    let api = Api::with_builder().await;
    let (hers, new) = api.key(Scope::Create, Limits::default());
    let (his, _) = api.key(Scope::Create, Limits::default());
    let requested = request(&api, &hers, "mine").await.expect(202);
    let (template, build) = (requested.text("templateID"), requested.text("buildID"));
    let path = format!("/templates/{template}/builds/{build}");
    let agent = format!("{path}/ssh/default");
    let get = |who| api.call_as(who, "GET", &agent, Value::Null);
    assert_eq!(get(&his).await.expect_error(404), "template_not_found");
    assert_eq!(get(&hers).await.expect_error(426), "upgrade_required");
    // The build waits for its start.
    let upgrade = Request::builder()
        .uri(&agent)
        .header("x-api-key", &new.secret)
        .header("connection", "upgrade")
        .header("upgrade", "ssh-agent");
    let waiting = api.send(upgrade.body(Body::empty()).unwrap()).await;
    assert_eq!(waiting.expect_error(409), "not_running");
    let spec = json!({ "stages": [{ "from": { "template": "base" }, "steps": [] }] });
    let many: Vec<String> = (0..17).map(|number| number.to_string()).collect();
    for (body, reason) in [
        (json!({ "ssh": ["default"] }), "`ssh` requires `spec`"),
        (json!({ "spec": spec, "ssh": ["a/b"] }), "letters, digits"),
        (json!({ "spec": spec, "ssh": ["a", "a"] }), "given twice"),
        (json!({ "spec": spec, "ssh": many }), "too many SSH agents"),
    ] {
        let start = format!("/v2{path}");
        let refused = api.call_as(&hers, "POST", &start, body).await;
        assert!(
            refused.body.to_string().contains(reason),
            "{}",
            refused.body
        );
        assert_eq!(refused.expect_error(400), "invalid_request");
    }
}
