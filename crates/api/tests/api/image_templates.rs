//! Templates from images in the form of CubeSandbox's clients, and their names.

use crate::builds::{build_id_of, built, id_of};
use crate::names::{create, get, request};
use crate::support::{Api, TestCaller};
use jiffy_api::{Limits, Scope};
use serde_json::{Value, json};

/// Waits until the build of a response ends.
async fn ended(api: &Api, started: &Value) -> Value {
    let text = |field: &str| started[field].as_str().unwrap().to_owned();
    let path = format!(
        "/templates/{}/builds/{}/status",
        text("templateID"),
        text("jobID")
    );
    loop {
        let now = api.get(&path).await.expect(200);
        if ["ready", "error"].contains(&now.text("status").as_str()) {
            return now.body;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_template_from_an_image_is_built_at_once_and_again_from_the_same_request() {
    let api = Api::with_builder().await;
    let new = json!({
        "image": "no.such.registry.invalid/x:1", "name": "cube", "memory": 640,
        "registryUsername": "u", "registryPassword": "not-to-be-stored",
    });
    let started = api.post("/templates", new).await.expect(202).body;
    assert_eq!(
        (&started["name"], &started["jobID"]),
        (&json!("cube"), &started["buildID"])
    );
    assert_eq!(ended(&api, &started).await["status"], "error");
    let id = started["templateID"].as_str().unwrap();
    let again = api.post(&format!("/templates/{id}"), json!({})).await;
    let again = again.expect(202).body;
    assert_eq!(again["templateID"], started["templateID"]);
    assert_ne!(again["jobID"], started["jobID"]);
    ended(&api, &again).await;
    let home = api.home();
    let database = std::fs::read(home.path().join("builds.db")).unwrap();
    let log = std::fs::read(home.path().join("builds.db-wal")).unwrap_or_default();
    let text = String::from_utf8_lossy(&[database, log].concat()).into_owned();
    assert!(text.contains("no.such.registry.invalid") && !text.contains("not-to-be-stored"));

    let unnamed = json!({ "image": "no.such.registry.invalid/x:1" });
    let unnamed = api.post("/templates", unnamed).await.expect(202).body;
    assert!(unnamed["name"].as_str().unwrap().starts_with("tpl-"));
    for bad in [
        json!({ "image": "x", "denyOut": ["a.example"] }),
        json!({ "image": "x", "nodes": ["a"] }),
        json!({ "image": "x", "cpu": 900_000 }),
        json!({ "image": " " }),
        json!({}),
    ] {
        api.post("/templates", bad).await.expect(400);
    }
    let requested = api.post("/v3/templates", json!({ "name": "other" })).await;
    let other = requested.expect(202).text("templateID");
    api.post(&format!("/templates/{other}"), json!({}))
        .await
        .expect(400);
    api.post("/templates/none", json!({})).await.expect(404);
}

#[tokio::test]
async fn sandboxes_have_the_network_rules_of_their_template() {
    let api = Api::new();
    // Access to the internet is denied by the template `large`.
    let shown = api.get("/templates/large").await.expect(200).body;
    assert_eq!(shown["allowInternetAccess"], false);
    assert_eq!(shown["network"], json!({ "allowInternetAccess": false }));
    let create = json!({
        "templateID": "large", "allow_internet_access": true,
        "network": { "allowOut": ["a.example"] },
    });
    let id = api.post("/v2/sandboxes", create).await.expect(201).id();
    let detail = api.get(&format!("/sandboxes/{id}")).await.expect(200).body;
    assert_eq!(detail["allowInternetAccess"], false);
    assert_eq!(detail["network"]["allowOut"], json!(["a.example"]));
    let shown = api.get("/templates/base").await.expect(200).body;
    assert!(shown.get("network").is_none() && shown.get("allowInternetAccess").is_none());
}

#[tokio::test]
async fn a_renamed_template_has_its_former_tags_and_id_and_its_former_name_is_free() {
    let api = Api::with_builder().await;
    let (hers, key) = api.key(Scope::Create, Limits::default());
    let (his, _) = api.key(Scope::Create, Limits::default());
    built(&api, "app", &key.key.id, &["default", "v1"]);
    let rename = async |who: &TestCaller, template: &str, name: &str| {
        let path = format!("/templates/{template}/alias");
        api.call_as(who, "PUT", &path, json!({ "alias": name }))
            .await
    };
    let before = get(&api, &hers, "/templates/app/tags").await.expect(200);
    assert_eq!(
        rename(&his, "app", "mine").await.expect_error(404),
        "template_not_found"
    );
    let renamed = rename(&hers, "app", "App-2").await.expect(200);
    assert_eq!(renamed.text("templateID"), id_of("app"));
    assert_eq!(renamed.body["aliases"], json!(["app-2"]));
    let after = get(&api, &hers, "/templates/app-2/tags").await.expect(200);
    assert_eq!((after.items().len(), &after.body), (2, &before.body));
    create(&api, &hers, "app-2:v1").await.expect(201);
    for path in ["/templates/app", "/templates/aliases/app"] {
        get(&api, &hers, path).await.expect(404);
    }
    let refused = create(&api, &hers, "app").await.expect_error(404);
    assert_eq!(refused, "template_not_found");
    // The same name, a generated name, and the former name.
    rename(&hers, "app-2", "app-2").await.expect(200);
    let generated = rename(&hers, "app-2", "").await.expect(200);
    let generated = generated.body["aliases"][0].as_str().unwrap().to_owned();
    assert!(generated.starts_with("tpl-"), "{generated}");
    rename(&hers, &generated, "app").await.expect(200);
    get(&api, &hers, "/templates/app").await.expect(200);
}

#[tokio::test]
async fn a_template_is_not_renamed_during_a_build_or_to_a_name_in_use() {
    let api = Api::with_builder().await;
    let (hers, key) = api.key(Scope::Create, Limits::default());
    for name in ["first", "second"] {
        built(&api, name, &key.key.id, &["default"]);
    }
    let rename = async |template: &str, name: &str| {
        let path = format!("/templates/{template}/alias");
        api.call_as(&hers, "PUT", &path, json!({ "alias": name }))
            .await
    };
    for (name, status, code) in [
        ("second", 409, "name_taken"),
        ("base", 409, "name_taken"),
        ("a/b", 400, "invalid_request"),
        ("a:b", 400, "invalid_request"),
        ("abcdefghijkmnpqrstuv", 400, "invalid_request"),
    ] {
        let refused = rename("first", name).await;
        assert_eq!(refused.expect_error(status), code, "{name}");
    }
    let building = request(&api, &hers, "first").await.expect(202);
    assert_eq!(
        rename("first", "third").await.expect_error(409),
        "build_started"
    );
    let path = format!(
        "/templates/first/builds/{}/cancel",
        building.text("buildID")
    );
    api.call_as(&hers, "POST", &path, json!({}))
        .await
        .expect(204);
    rename("first", "third").await.expect(200);
    // A template without a successful build has no tag to rename.
    let unbuilt = request(&api, &hers, "unbuilt").await.expect(202);
    let path = format!(
        "/templates/unbuilt/builds/{}/cancel",
        unbuilt.text("buildID")
    );
    api.call_as(&hers, "POST", &path, json!({}))
        .await
        .expect(204);
    for name in ["unbuilt", "none"] {
        let refused = rename(name, "fourth").await;
        assert_eq!(refused.expect_error(404), "template_not_found", "{name}");
    }
}

#[tokio::test]
async fn calls_of_tags_and_stock_templates_answer_in_the_form_of_e2b() {
    let api = Api::new();
    let path = |rest: &str| format!("/templates/base/tags{rest}");
    assert_eq!(
        api.get(&path("/count")).await.expect(200).body,
        json!({ "total": 1 })
    );
    for (tag, exists) in [("default", true), ("none", false)] {
        let answer = api
            .get(&path(&format!("/exists?tag={tag}")))
            .await
            .expect(200);
        assert_eq!(
            answer.body,
            json!({ "exists": exists, "normalizedTag": tag })
        );
    }
    api.get(&path("/exists")).await.expect(400);
    let groups = api
        .get(&path("/groups?sort=name_asc&tagsLimit=1"))
        .await
        .expect(200)
        .body;
    assert_eq!(groups["tags"][0]["tag"], "default");
    assert_eq!(groups["nextCursor"], Value::Null);
    let build = &groups["tags"][0]["assignments"][0]["buildId"];
    let assigned = api
        .get(&path("/default/assignments"))
        .await
        .expect(200)
        .body;
    assert_eq!(&assigned["data"][0]["buildId"], build);
    api.get(&path("/none/assignments")).await.expect(404);
    for bad in [
        "sort=x",
        "tagsLimit=0",
        "assignmentLimit=0",
        "tagsCursor=none",
    ] {
        api.get(&path(&format!("/groups?{bad}"))).await.expect(400);
    }
    for bad in ["limit=0", "cursor=none"] {
        let path = path(&format!("/default/assignments?{bad}"));
        api.get(&path).await.expect(400);
    }
    let listed = api.get("/v2/templates").await.expect(200).body;
    assert_eq!(listed, api.get("/templates").await.expect(200).body);
    // `large` is no stock template.
    let is_default = listed.as_array().unwrap().iter();
    let is_default: Vec<_> = is_default.map(|t| &t["isDefault"]).collect();
    assert_eq!(is_default, [true, false]);
    let stock = api.get("/default-templates").await.expect(200).body;
    assert_eq!(stock, json!([listed[0]]));
}

#[tokio::test]
async fn tags_are_paged_searched_and_sorted() {
    let api = Api::with_builder().await;
    let (hers, key) = api.key(Scope::Create, Limits::default());
    let (his, _) = api.key(Scope::Create, Limits::default());
    built(&api, "app", &key.key.id, &["default", "v1", "v2"]);
    let groups = async |query: &str| {
        let path = format!("/templates/app/tags/groups?{query}");
        get(&api, &hers, &path).await.expect(200).body
    };
    let tags = |groups: &Value| -> Vec<String> {
        let tags = groups["tags"].as_array().unwrap().iter();
        tags.map(|t| t["tag"].as_str().unwrap().to_owned())
            .collect()
    };
    for (query, expected) in [
        ("sort=name_asc", vec!["default", "v1", "v2"]),
        ("sort=name_desc&tagsLimit=2", vec!["v2", "v1"]),
        ("sort=name_desc&tagsLimit=2&tagsCursor=v1", vec!["default"]),
        ("sort=latest_asc&search=v", vec!["v1", "v2"]),
        ("search=none", vec![]),
    ] {
        assert_eq!(tags(&groups(query).await), expected, "{query}");
    }
    let page = groups("sort=name_desc&tagsLimit=2").await;
    assert_eq!(page["nextCursor"], "v1");
    assert_eq!(groups("sort=name_desc").await["nextCursor"], Value::Null);
    let assignment = &page["tags"][0]["assignments"][0];
    assert_eq!(assignment["buildId"], build_id_of("app"));
    assert_eq!(assignment["buildCreatedAt"], "1970-01-01T00:00:00.001Z");
    assert_ne!(assignment["buildFinishedAt"], assignment["buildCreatedAt"]);
    for rest in ["count", "exists?tag=v1", "groups", "v1/assignments"] {
        let path = format!("/templates/app/tags/{rest}");
        get(&api, &hers, &path).await.expect(200);
        get(&api, &his, &path).await.expect(404);
    }
}
