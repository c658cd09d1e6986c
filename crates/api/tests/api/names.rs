//! Names: a key cannot find, select or shadow resources of another key by name.

use crate::support;

use jiffy_api::{Limits, Scope};
use jiffy_image::{Home, MANIFEST_FORMAT, Reference, Templates};
use jiffy_template_builder::{BuildRecords, Builder, BuilderSettings, MAX_WAITING_BUILDS};
use serde_json::{Value, json};
use std::fs;
use support::{Answer, Api, TestCaller};

/// Names of internal templates: of a build, and of an imported image.
pub const BUILD: &str = "build-01234567-89ab-4cde-8f01-23456789abcd";
const IMAGE: &str = "image-python-3.12-01234567";

/// Stores a template (`[owner/]name[:tag]`) in the image store with this visibility. `None` as in
/// manifests of older versions.
pub fn put(api: &Api, name: &str, visibility: Option<&str>) {
    put_at(&api.home(), name, visibility);
}

/// Like [`put`], in the image store of a data directory.
pub fn put_at(home: &Home, name: &str, visibility: Option<&str>) {
    let reference = Reference::parse(name).unwrap();
    let mut manifest = json!({
        "format": MANIFEST_FORMAT, "name": reference.name(), "tag": reference.tag(), "created": 1,
        "recipe_sha256": "", "images": [{ "sha256": "ab".repeat(32), "size": 1 }],
        "defaults": { "user": "user", "workdir": "/", "disk_mib": 512 },
    });
    if let Some(visibility) = visibility {
        manifest["visibility"] = json!(visibility);
        manifest["owner"] = json!(reference.owner());
    }
    let file = name.replace('/', "~").replace(':', "@");
    let directory = home.path().join("templates").join(file);
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("template.json"), manifest.to_string()).unwrap();
}

pub async fn create(api: &Api, caller: &TestCaller, template: &str) -> Answer {
    let body = json!({ "templateID": template });
    api.call_as(caller, "POST", "/v2/sandboxes", body).await
}

pub async fn get(api: &Api, caller: &TestCaller, path: &str) -> Answer {
    api.call_as(caller, "GET", path, Value::Null).await
}

/// Requests a build of a template, which is not started.
pub async fn request(api: &Api, caller: &TestCaller, name: &str) -> Answer {
    let body = json!({ "name": name, "cpuCount": 1, "memoryMB": 512 });
    api.call_as(caller, "POST", "/v3/templates", body).await
}

/// Returns the names in a list of templates.
async fn listed(api: &Api, caller: &TestCaller) -> Vec<String> {
    let all = get(api, caller, "/templates").await.expect(200);
    let mut names = Vec::new();
    for template in all.items() {
        let of_one = template["names"].as_array().unwrap();
        names.extend(of_one.iter().map(|n| n.as_str().unwrap().to_owned()));
    }
    names
}

fn quoted(name: &str) -> String {
    name.replace('/', "%2F")
}

#[tokio::test]
async fn internal_data_of_builds_is_hidden_from_all_callers() {
    let api = Api::with_builder().await;
    let (hers, key) = api.key(Scope::Create, Limits::default());
    let (other, _) = api.key(Scope::Create, Limits::default());
    let (reader, _) = api.key(Scope::Read, Limits::default());
    let (image, build) = (
        format!("{}/{IMAGE}", key.key.id),
        format!("{}/{BUILD}", key.key.id),
    );
    for name in [&image, &build, IMAGE, BUILD] {
        put(&api, name, Some("internal"));
    }
    put(&api, "base", Some("public"));
    for caller in [&hers, &other, &reader, &api.admin, &TestCaller::Owner] {
        assert_eq!(listed(&api, caller).await, ["base"]);
        for name in [image.as_str(), &build, IMAGE, BUILD] {
            let quoted = quoted(name);
            for path in [
                format!("/templates/{quoted}"),
                format!("/templates/{quoted}/tags"),
                format!("/templates/aliases/{quoted}"),
            ] {
                let refused = get(&api, caller, &path).await.expect_error(404);
                assert_eq!(refused, "template_not_found", "{path}");
            }
        }
    }
    for caller in [&hers, &other, &api.admin, &TestCaller::Owner] {
        for name in [image.as_str(), &build, IMAGE, BUILD] {
            assert_eq!(
                create(&api, caller, name).await.expect_error(404),
                "template_not_found"
            );
            let path = format!("/templates/{}", quoted(name));
            let removed = api.call_as(caller, "DELETE", &path, Value::Null).await;
            assert_eq!(removed.expect_error(404), "template_not_found");
            let path = format!("/v2/templates/{}", quoted(name));
            let public = json!({ "public": true });
            api.call_as(caller, "PATCH", &path, public)
                .await
                .expect(404);
            for (method, body) in [
                ("POST", json!({ "target": name, "tags": ["x"] })),
                ("DELETE", json!({ "name": name, "tags": ["x"] })),
            ] {
                let tagged = api.call_as(caller, method, "/templates/tags", body).await;
                assert_eq!(tagged.expect_error(404), "template_not_found");
            }
        }
    }
    let pool = format!("/pools/{IMAGE}");
    let pooled = api.call_as(&api.admin, "PUT", &pool, json!({ "size": 1 }));
    assert_eq!(pooled.await.expect_error(404), "template_not_found");
}

#[tokio::test]
async fn templates_of_others_are_found_by_their_owners_name_if_they_are_public() {
    let api = Api::with_builder().await;
    let (alice, a) = api.key(Scope::Create, Limits::default());
    let (mallory, m) = api.key(Scope::Create, Limits::default());
    let of_alice = |name: &str| format!("{}/{name}", a.key.id);
    let of_mallory = |name: &str| format!("{}/{name}", m.key.id);
    put(&api, &of_mallory("python"), Some("public"));
    put(&api, &of_mallory("secret"), Some("private"));
    put(&api, &of_alice("app"), Some("private"));
    put(&api, &of_alice("shared"), Some("private"));
    put(&api, "shared", Some("public"));
    put(&api, "hosts", Some("private"));

    for (caller, name, made_of) in [
        (&mallory, "python", of_mallory("python")),
        (&alice, &*of_mallory("python"), of_mallory("python")),
        (&alice, "app", of_alice("app")),
        (&alice, &of_alice("app"), of_alice("app")),
        (&alice, "shared", of_alice("shared")),
        (&mallory, "shared", "shared".to_owned()),
        (&TestCaller::Owner, "shared", "shared".to_owned()),
        (&TestCaller::Owner, &of_alice("shared"), of_alice("shared")),
        (&api.admin, &of_mallory("secret"), of_mallory("secret")),
        (&api.admin, "hosts", "hosts".to_owned()),
    ] {
        let created = create(&api, caller, name).await.expect(201);
        assert_eq!(created.body["jiffy"]["template"], made_of, "{name}");
    }
    for (caller, name) in [
        (&alice, "python"),
        (&TestCaller::Owner, "python"),
        (&api.admin, "app"),
        (&alice, &*of_mallory("secret")),
        (&mallory, &of_alice("app")),
        (&alice, "hosts"),
        (&alice, "secret"),
    ] {
        let refused = create(&api, caller, name).await.expect_error(404);
        assert_eq!(refused, "template_not_found", "{name}");
        let alias = format!("/templates/aliases/{}", quoted(name));
        let refused = get(&api, caller, &alias).await.expect_error(404);
        assert_eq!(refused, "template_not_found", "{name}");
        let path = format!("/templates/{}", quoted(name));
        let removed = api.call_as(caller, "DELETE", &path, Value::Null).await;
        assert_eq!(removed.expect_error(404), "template_not_found", "{name}");
    }
    let python = of_mallory("python");
    let mut visible = listed(&api, &alice).await;
    visible.sort();
    let mut expected = ["app", "shared", &python];
    expected.sort();
    assert_eq!(
        visible, expected,
        "of two templates with one name, the preferred one"
    );
    // Mallory sees her two templates and the shared one. The host's owner sees all six.
    assert_eq!(listed(&api, &mallory).await.len(), 3);
    assert_eq!(listed(&api, &TestCaller::Owner).await.len(), 6);
    // A visible template cannot be changed.
    for name in [python.as_str(), "shared"] {
        let path = format!("/templates/{}", quoted(name));
        if name != "shared" {
            let removed = api.call_as(&alice, "DELETE", &path, Value::Null).await;
            removed.expect(403);
        }
        let path = format!("/v2{path}");
        let private = json!({ "public": false });
        let caller = if name == "shared" { &mallory } else { &alice };
        api.call_as(caller, "PATCH", &path, private)
            .await
            .expect(403);
    }
    // The template `hosts`, which was created without the builder, is published.
    let public = json!({ "public": true });
    let path = "/v2/templates/hosts";
    api.call_as(&mallory, "PATCH", path, public.clone())
        .await
        .expect(404);
    api.call_as(&TestCaller::Owner, "PATCH", path, public)
        .await
        .expect(200);
    create(&api, &mallory, "hosts").await.expect(201);
    let private = json!({ "public": false });
    let path = "/v2/templates/app";
    api.call_as(&alice, "PATCH", path, private)
        .await
        .expect(200);
    let stock = api.call_as(
        &TestCaller::Owner,
        "PATCH",
        "/v2/templates/base",
        json!({ "public": false }),
    );
    assert_eq!(stock.await.expect_error(400), "invalid_request");
}

#[tokio::test]
async fn a_snapshot_is_not_shadowed_by_templates_or_snapshots_of_others() {
    let api = Api::with_builder().await;
    let (alice, _) = api.key(Scope::Create, Limits::default());
    let (mallory, m) = api.key(Scope::Create, Limits::default());
    let taken = async |caller: &TestCaller, name: &str| {
        let sandbox = api.sandbox_of(caller).await;
        let path = format!("/sandboxes/{sandbox}/snapshots");
        let taken = api
            .call_as(caller, "POST", &path, json!({ "name": name }))
            .await;
        taken.expect(201).text("snapshotID")
    };
    let golden = taken(&alice, "golden").await;
    let of_mallory = |name: &str| format!("{}/{name}", m.key.id);
    // Names that older versions accepted.
    put(&api, &of_mallory("golden"), Some("public"));
    put(&api, &of_mallory(&golden), Some("public"));
    put(&api, "golden", Some("public"));
    for name in ["golden", &golden] {
        let created = create(&api, &alice, name).await.expect(201);
        assert_eq!(created.text("snapshotID"), golden, "{name}");
    }
    // For callers that see all templates and snapshots, a name of a template hides a snapshot of
    // another key. An id always refers to its snapshot.
    for caller in [&api.admin, &TestCaller::Owner] {
        let stranger = taken(&mallory, "base").await;
        let created = create(&api, caller, "base").await.expect(201);
        assert_eq!(created.body["jiffy"]["template"], "base");
        let created = create(&api, caller, &stranger).await.expect(201);
        assert_eq!(created.text("snapshotID"), stranger);
        let created = create(&api, caller, &golden).await.expect(201);
        assert_eq!(created.text("snapshotID"), golden);
    }
    assert_eq!(
        get(&api, &mallory, &format!("/snapshots/{golden}"))
            .await
            .expect_error(404),
        "snapshot_not_found"
    );
    // A name must not look like an id.
    let sandbox = api.sandbox_of(&alice).await;
    let path = format!("/sandboxes/{sandbox}/snapshots");
    for name in [&golden, BUILD, "01234567-89ab-4cde-8f01-23456789abcd"] {
        let named = api.call_as(&alice, "POST", &path, json!({ "name": name }));
        assert_eq!(named.await.expect_error(400), "invalid_request", "{name}");
        let named = request(&api, &mallory, name).await.expect_error(400);
        assert_eq!(named, "invalid_request", "{name}");
    }
}

#[tokio::test]
async fn unstarted_builds_are_bounded_and_reserve_no_name() {
    let api = Api::with_builder().await;
    let (alice, _) = api.key(Scope::Create, Limits::default());
    let (mallory, _) = api.key(Scope::Create, Limits::default());
    let mut entered = Vec::new();
    for n in 0..400 {
        let requested = request(&api, &mallory, &format!("name{n}")).await;
        if requested.status == 202 {
            entered.push(requested);
            continue;
        }
        assert_eq!(requested.header("should-retry"), Some("false"));
        assert_eq!(requested.expect_error(429), "too_many_waiting_builds");
    }
    assert_eq!(entered.len(), MAX_WAITING_BUILDS);
    request(&api, &alice, "name0").await.expect(202);
    request(&api, &TestCaller::Owner, "name0").await.expect(202);
    // A cancelled build no longer counts toward the limit.
    let (template, build) = (entered[0].text("templateID"), entered[0].text("buildID"));
    let path = format!("/templates/{template}/builds/{build}/cancel");
    api.call_as(&mallory, "POST", &path, Value::Null)
        .await
        .expect(204);
    request(&api, &mallory, "another").await.expect(202);
    // A build that is not started expires.
    let records = rusqlite(&api);
    records
        .execute("UPDATE builds SET created_ms = 0", [])
        .unwrap();
    request(&api, &mallory, "again").await.expect(202);
    let (template, build) = (entered[1].text("templateID"), entered[1].text("buildID"));
    let path = format!("/templates/{template}/builds/{build}/status");
    let status = get(&api, &mallory, &path).await.expect(200);
    assert_eq!(status.text("status"), "error");
    // The number of retained failed builds is limited.
    for n in 0..300 {
        let requested = request(&api, &mallory, &format!("fails{n}"))
            .await
            .expect(202);
        let (template, build) = (requested.text("templateID"), requested.text("buildID"));
        let path = format!("/templates/{template}/builds/{build}/cancel");
        api.call_as(&mallory, "POST", &path, Value::Null)
            .await
            .expect(204);
    }
    let count = "SELECT count(*) FROM templates";
    let remaining: i64 = records.query_row(count, [], |row| row.get(0)).unwrap();
    // 200 failed builds are retained, and a few templates with other builds.
    assert!((200..250).contains(&remaining), "{remaining}");
}

/// Opens the database of the template builder.
fn rusqlite(api: &Api) -> rusqlite::Connection {
    rusqlite::Connection::open(api.home().path().join("builds.db")).unwrap()
}

#[tokio::test]
async fn admins_and_the_hosts_owner_share_names() {
    let api = Api::with_builder().await;
    let requested = request(&api, &api.admin, "mine").await.expect(202);
    let same = request(&api, &TestCaller::Owner, "mine").await.expect(202);
    assert_eq!(requested.body["templateID"], same.body["templateID"]);
    let (hers, key) = api.key(Scope::Create, Limits::default());
    let other = request(&api, &hers, "mine").await.expect(202);
    assert_ne!(requested.body["templateID"], other.body["templateID"]);
    // The owner may write its namespace explicitly; other callers may not.
    let sent = format!("{}/mine", key.key.id);
    let same = request(&api, &hers, &sent).await.expect(202);
    assert_eq!(same.body["templateID"], other.body["templateID"]);
    let refused = request(&api, &api.admin, &sent).await.expect_error(400);
    assert_eq!(refused, "invalid_request");
}

#[tokio::test]
async fn builds_of_an_admin_key_are_cancelled_with_the_key() {
    let api = Api::with_builder().await;
    let (second, created) = api.key(Scope::Admin, Limits::default());
    let ended = request(&api, &second, "mine").await.expect(202);
    let retained = request(&api, &api.admin, "mine").await.expect(202);
    let path = format!("/keys/{}/revoke", created.key.id);
    let revoked = api.call_as(&TestCaller::Owner, "POST", &path, json!({ "end": true }));
    assert_eq!(revoked.await.expect(200).body["builds"], 1);
    for (requested, status) in [(&ended, "error"), (&retained, "waiting")] {
        let (template, build) = (requested.text("templateID"), requested.text("buildID"));
        let path = format!("/templates/{template}/builds/{build}/status");
        let now = get(&api, &TestCaller::Owner, &path).await.expect(200);
        assert_eq!(now.text("status"), status);
    }
}

#[tokio::test]
async fn templates_of_an_earlier_data_directory_move_to_their_owners_once() {
    let api = Api::new();
    let (hers, key) = api.key(Scope::Create, Limits::default());
    let (his, _) = api.key(Scope::Create, Limits::default());
    let admin = api.key(Scope::Admin, Limits::default()).1.key.id;
    for name in [
        "app", "app:v1", "open", "admins", "hosts", "base", BUILD, IMAGE,
    ] {
        put(&api, name, None);
    }
    let id = &key.key.id;
    let rows = format!(
        "INSERT INTO templates (id, name, owner, public, created_ms) VALUES
            ('temptatetemptatetem2', 'app', '{id}', 0, 1), ('temptatetemptatetem3', 'open', '{id}', 1, 1), ('temptatetemptatetem4', 'admins', '{admin}', 1, 1);
         INSERT INTO builds (id, template, tags, size, status, created_ms, changed_ms) VALUES
            ('b1', 'temptatetemptatetem2', '[\"default\",\"v1\"]', '{{}}', 'ready', 1, 1),
            ('b2', 'temptatetemptatetem3', '[\"default\"]', '{{}}', 'ready', 1, 1),
            ('b3', 'temptatetemptatetem4', '[\"default\"]', '{{}}', 'ready', 1, 1);"
    );
    drop(BuildRecords::open(api.home().path()).unwrap());
    rusqlite(&api).execute_batch(&rows).unwrap();

    let settings = || BuilderSettings {
        host_keys: [admin.clone()].into(),
        ..BuilderSettings::default()
    };
    let home = api.home();
    let opened = Builder::open(&home, api.host.clone(), settings());
    let api = api.with_reopened_builder(opened.await.unwrap());
    let made_of = async |caller: &TestCaller, name: &str| {
        let created = create(&api, caller, name).await.expect(201);
        created.body["jiffy"]["template"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    assert_eq!(made_of(&hers, "app").await, format!("{id}/app"));
    assert_eq!(made_of(&hers, "app:v1").await, format!("{id}/app:v1"));
    assert_eq!(
        made_of(&hers, "temptatetemptatetem2").await,
        format!("{id}/app")
    );
    let open = format!("{id}/open");
    assert_eq!(made_of(&his, &open).await, open);
    assert_eq!(made_of(&TestCaller::Owner, "admins").await, "admins");
    assert_eq!(made_of(&api.admin, "hosts").await, "hosts");
    assert_eq!(made_of(&his, "admins").await, "admins");
    assert_eq!(made_of(&his, "base").await, "base");
    for (caller, name) in [
        (&his, "app"),
        (&his, "open"),
        (&his, "hosts"),
        (&hers, "hosts"),
        (&TestCaller::Owner, "app"),
        (&TestCaller::Owner, IMAGE),
        (&his, IMAGE),
    ] {
        let refused = create(&api, caller, name).await.expect_error(404);
        assert_eq!(refused, "template_not_found", "{name}");
    }
    let templates = Templates::new(&api.home());
    assert_eq!(
        templates.tags(BUILD).unwrap(),
        [],
        "an unfinished build remains"
    );
    // The migration runs once: later templates of the host's owner with the same name remain the
    // host's.
    put(&api, "app", None);
    let opened = Builder::open(&home, api.host.clone(), settings());
    let api = api.with_reopened_builder(opened.await.unwrap());
    let created = create(&api, &TestCaller::Owner, "app").await.expect(201);
    assert_eq!(created.body["jiffy"]["template"], "app");
    let created = create(&api, &hers, "app").await.expect(201);
    assert_eq!(created.body["jiffy"]["template"], format!("{id}/app"));
}
