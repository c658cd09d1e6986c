//! Snapshots, templates, builds, pools and functions of other members.

use super::lab::Lab;
use crate::function_keys::{granted, record};
use crate::support::{Answer, TestCaller};
use axum::body::Body;
use axum::http::Request;
use jiffy_api::{NamedTemplate, Scope, TemplateNames};
use jiffy_fleet_core::MemberId;
use jiffy_function_manager::SandboxKeyScope;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Three members. The second one has a template and a function of a key, and the third one a
/// template of the host. Also returns the key and its id.
async fn lab() -> (Lab, TestCaller, String) {
    let lab = Lab::start(3).await;
    let (caller, key) = lab.key(Scope::Create);
    let owner = key.key.id.clone();
    let function = record(
        Some(&owner),
        "agent",
        &granted(&key, SandboxKeyScope::Create),
    );
    let own = format!("{owner}/own");
    lab.add_objects(1, &["base"], Vec::new()).await;
    lab.add_objects(2, &["base", &own], vec![function]).await;
    lab.add_objects(3, &["base", "third"], Vec::new()).await;
    (lab, caller, owner)
}

/// Returns this field of each item of a list.
fn names(answer: &Answer, field: &str) -> Vec<String> {
    let name = |item: &Value| item[field].as_str().unwrap().to_owned();
    answer.items().iter().map(name).collect()
}

async fn get(lab: &Lab, host: u32, caller: &TestCaller, path: &str) -> Answer {
    lab.call(host, caller, "GET", path, Value::Null).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_is_requested_started_read_and_cancelled_through_every_member() {
    let (lab, key, _) = lab().await;
    let body = json!({ "name": "mine:v1", "cpuCount": 1, "memoryMB": 512 });
    let requested = lab
        .call(1, &key, "POST", "/v3/templates", body.clone())
        .await;
    let requested = requested.expect(202);
    let (template, build) = (requested.text("templateID"), requested.text("buildID"));
    let path = format!("/templates/{template}/builds/{build}");
    for host in 1..=3 {
        let status = get(&lab, host, &key, &format!("{path}/status")).await;
        assert_eq!(status.expect(200).text("status"), "waiting");
        get(&lab, host, &key, &format!("{path}/logs"))
            .await
            .expect(200);
        // A further build of the template is requested from the member that has it.
        let again = lab
            .call(host, &key, "POST", "/v3/templates", body.clone())
            .await;
        assert_eq!(again.expect(202).text("templateID"), template);
    }
    // An upload link is valid at the member that created it, and names its host.
    let hash = "ab".repeat(32);
    let link = get(
        &lab,
        3,
        &key,
        &format!("/templates/{template}/files/{hash}"),
    )
    .await;
    let url = link.expect(201).text("url");
    assert!(url.ends_with("?host=h1"), "{url}");
    let path_of_link = url.split_once("localhost").unwrap().1;
    let put = Request::put(path_of_link)
        .body(Body::from("no archive"))
        .unwrap();
    lab.send(2, put).await.expect(200);
    let path_of_files = format!("/templates/{template}/files/{hash}");
    for host in 1..=3 {
        let link = get(&lab, host, &key, &path_of_files).await.expect(201);
        assert_eq!(link.body["present"], true);
    }
    let start = json!({ "fromTemplate": "unknown-template", "steps": [] });
    let started = lab
        .call(3, &key, "POST", &format!("/v2{path}"), start.clone())
        .await;
    started.expect(202);
    let again = lab
        .call(2, &key, "POST", &format!("/v2{path}"), start)
        .await;
    assert_eq!(again.expect_error(409), "build_started");
    for host in 1..=3 {
        let cancel = format!("{path}/cancel");
        let cancelled = lab.call(host, &key, "POST", &cancel, Value::Null).await;
        cancelled.expect(204);
    }
    let removed_path = format!("/templates/{template}");
    let removed = lab.call(2, &key, "DELETE", &removed_path, Value::Null);
    removed.await.expect(204);
    for host in 1..=3 {
        let status = get(&lab, host, &key, &format!("{path}/status")).await;
        assert_eq!(status.expect_error(404), "template_not_found");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_pools_and_functions_are_used_through_every_member() {
    let (lab, key, _) = lab().await;
    let body = json!({ "templateID": "base" });
    let id = lab
        .call(2, &key, "POST", "/sandboxes", body)
        .await
        .expect(201)
        .id();
    lab.located(&id).await;
    let path = format!("/sandboxes/{id}/snapshots");
    let taken = lab
        .call(1, &key, "POST", &path, json!({ "name": "mine" }))
        .await;
    let snapshot = taken.expect(201).text("snapshotID");
    for host in 1..=3 {
        let shown = get(&lab, host, &key, &format!("/snapshots/{snapshot}")).await;
        assert_eq!(shown.expect(200).text("snapshotID"), snapshot);
        let listed = get(&lab, host, &key, "/snapshots").await.expect(200);
        assert_eq!(names(&listed, "snapshotID"), [&*snapshot]);
        assert_eq!(listed.header("jiffy-incomplete"), None);
        // A create from a snapshot runs on the member that has it.
        for origin in [&*snapshot, "mine"] {
            let body = json!({ "templateID": origin });
            let made = lab.call(host, &key, "POST", "/sandboxes", body).await;
            lab.located(&made.expect(201).id()).await;
        }
        let shown = get(&lab, host, &key, "/functions/agent").await.expect(200);
        assert_eq!(shown.text("name"), "agent");
        let listed = get(&lab, host, &key, "/functions").await.expect(200);
        assert_eq!(names(&listed, "name"), ["agent"]);
        let path = "/functions/agent/invoke/x";
        lab.call(host, &key, "POST", path, Value::Null)
            .await
            .expect(200);
        let called = lab.call_function(host, &key, &shown.text("label")).await;
        called.expect(200);
        let nobody = TestCaller::Nobody;
        for label in [&*shown.text("label"), "absent--0"] {
            let called = lab.call_function(host, &nobody, label).await;
            assert_eq!(called.expect_error(401), "unauthenticated", "{label}");
        }
    }
    let made = get(&lab, 2, &key, "/v2/sandboxes?host=h2")
        .await
        .expect(200);
    // The first sandbox, and two from the snapshot through each of three hosts.
    assert_eq!(made.items().len(), 7);
    for host in 1..=2 {
        let made = get(&lab, host, &key, "/v2/sandboxes?host=h1")
            .await
            .expect(200);
        assert!(made.items().is_empty());
    }
    let refused = get(&lab, 1, &key, "/v2/sandboxes?host=h9").await;
    assert_eq!(refused.expect_error(400), "invalid_request");
    // A pool belongs to the member that has its template.
    let admin = lab.admin();
    for (host, size) in [(1, 2), (3, 1)] {
        let set = lab.call(host, &admin, "PUT", "/pools/third", json!({ "size": size }));
        assert_eq!(set.await.expect(200).body["size"], size);
        let listed = get(&lab, 2, &admin, "/pools").await.expect(200);
        let pools = listed.items().iter();
        let of_third: Vec<_> = pools.filter(|pool| pool["templateID"] == "third").collect();
        assert_eq!(of_third.len(), 1);
        assert_eq!(of_third[0]["size"], size);
    }
    let removed = lab
        .call(3, &key, "DELETE", "/functions/agent", Value::Null)
        .await;
    removed.expect(204);
    let path = format!("/templates/{snapshot}");
    let removed = lab.call(1, &key, "DELETE", &path, Value::Null);
    removed.await.expect(204);
    for host in 1..=3 {
        let gone = get(&lab, host, &key, "/functions/agent").await;
        assert_eq!(gone.expect_error(404), "function_not_found");
        let gone = get(&lab, host, &key, &format!("/snapshots/{snapshot}")).await;
        assert_eq!(gone.expect_error(404), "snapshot_not_found");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn templates_of_all_members_are_listed_once_and_in_pages() {
    let (lab, key, owner) = lab().await;
    let admin = lab.admin();
    let own = format!("{owner}/own");
    for host in 1..=3 {
        let listed = get(&lab, host, &key, "/templates").await.expect(200);
        assert_eq!(names(&listed, "templateID"), ["base", "third", "own"]);
        let same = get(&lab, host, &key, "/v2/templates").await.expect(200);
        assert_eq!(same.body, listed.body);
        let (mut all, mut token) = (Vec::new(), String::new());
        loop {
            let path = format!("/templates?limit=1&nextToken={token}");
            let page = get(&lab, host, &admin, &path).await.expect(200);
            all.extend(names(&page, "templateID"));
            match page.header("x-next-token") {
                Some(next) => token = next.to_owned(),
                None => break,
            }
        }
        assert_eq!(all, ["base", "third", &*own]);
        for name in ["own", "third", "base"] {
            let shown = get(&lab, host, &key, &format!("/templates/{name}")).await;
            assert_eq!(shown.expect(200).body["aliases"][0], name);
            get(&lab, host, &key, &format!("/templates/{name}/tags"))
                .await
                .expect(200);
            get(&lab, host, &key, &format!("/templates/aliases/{name}"))
                .await
                .expect(200);
            let made = json!({ "templateID": name });
            lab.call(host, &key, "POST", "/sandboxes", made)
                .await
                .expect(201);
        }
    }
    // All copies are removed.
    let removed = lab
        .call(3, &admin, "DELETE", "/templates/base", Value::Null)
        .await;
    removed.expect(204);
    for host in 1..=3 {
        let listed = get(&lab, host, &key, "/templates").await.expect(200);
        assert_eq!(names(&listed, "templateID"), ["third", "own"]);
    }
    // A member that does not answer may have the object. The calls run at the same time, before the
    // member is declared dead.
    lab.freeze(2);
    let start = Instant::now();
    let body = json!({ "name": "new", "cpuCount": 1, "memoryMB": 512 });
    let (template, function, build, listed, refused) = tokio::join!(
        get(&lab, 1, &key, "/templates/own"),
        get(&lab, 1, &key, "/functions/agent"),
        lab.call(1, &key, "POST", "/v3/templates", body),
        get(&lab, 1, &key, "/templates"),
        get(&lab, 1, &key, "/templates?complete=true"),
    );
    let time = start.elapsed();
    // Each call waits at most 1 s for the frozen member. The limit leaves a margin.
    assert!(time < Duration::from_secs(6), "{time:?}");
    for unknown in [template, function, build, refused] {
        assert!(unknown.text("message").contains("h2"), "{}", unknown.body);
        assert!(unknown.header("retry-after").is_some());
        assert_eq!(unknown.expect_error(503), "fleet_unavailable");
    }
    let listed = listed.expect(200);
    assert_eq!(listed.header("jiffy-incomplete"), Some("h2"));
    assert_eq!(names(&listed, "templateID"), ["third"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_member_shows_or_changes_an_object_of_another_tenant() {
    let (lab, one, owner) = lab().await;
    let (two, _) = lab.key(Scope::Create);
    let (reader, _) = lab.key(Scope::Read);
    let body = json!({ "templateID": "own" });
    let id = lab
        .call(1, &one, "POST", "/sandboxes", body)
        .await
        .expect(201)
        .id();
    lab.located(&id).await;
    let path = format!("/sandboxes/{id}/snapshots");
    let taken = lab
        .call(2, &one, "POST", &path, json!({ "name": "mine" }))
        .await;
    let snapshot = taken.expect(201).text("snapshotID");
    let body = json!({ "name": "built", "cpuCount": 1, "memoryMB": 512 });
    let built = lab
        .call(3, &one, "POST", "/v3/templates", body)
        .await
        .expect(202);
    let (template, build) = (built.text("templateID"), built.text("buildID"));
    let own = format!("{owner}%2Fown");
    let new_id = || jiffy_engine_api::new_id().unwrap();
    let (no_snapshot, no_template) = (new_id(), new_id());
    let files = "ab".repeat(32);
    // Each foreign object and an object that does not exist.
    let objects = [
        ("snapshot", snapshot.clone(), no_snapshot.clone()),
        ("snapshot", "mine".to_owned(), "none".to_owned()),
        ("template", template.clone(), no_template.clone()),
        ("template", "built".to_owned(), "none".to_owned()),
        ("template", own, format!("{owner}%2Fnone")),
        ("function", "agent".to_owned(), "none".to_owned()),
    ];
    for (kind, foreign, absent) in &objects {
        let calls: Vec<(&str, String)> = match *kind {
            "snapshot" => vec![
                ("GET", "/snapshots/ID".to_owned()),
                ("DELETE", "/templates/ID".to_owned()),
            ],
            "template" => vec![
                ("GET", "/templates/ID".to_owned()),
                ("GET", "/templates/aliases/ID".to_owned()),
                ("GET", "/templates/ID/tags".to_owned()),
                ("GET", format!("/templates/ID/files/{files}")),
                ("GET", format!("/templates/ID/builds/{build}/status")),
                ("GET", format!("/templates/ID/builds/{build}/logs")),
                ("POST", format!("/v2/templates/ID/builds/{build}")),
                ("POST", format!("/templates/ID/builds/{build}/cancel")),
                ("PATCH", "/v2/templates/ID".to_owned()),
                ("POST", "/templates/tags".to_owned()),
                ("DELETE", "/templates/tags".to_owned()),
                ("POST", "/sandboxes".to_owned()),
                ("DELETE", "/templates/ID".to_owned()),
            ],
            _ => ["", "/versions", "/logs", "/metrics"]
                .map(|suffix| ("GET", format!("/functions/ID{suffix}")))
                .into_iter()
                .chain([
                    ("POST", "/functions/ID/rollback".to_owned()),
                    ("POST", "/functions/ID/enable".to_owned()),
                    ("POST", "/functions/ID/invoke/x".to_owned()),
                    ("DELETE", "/functions/ID".to_owned()),
                ])
                .collect(),
        };
        for (method, path) in calls {
            for host in 1..=3 {
                let call = async |caller: &TestCaller, id: &str| {
                    let named = id.replace("%2F", "/");
                    let body = match (method, &*path) {
                        ("POST", "/templates/tags") => json!({ "target": named, "tags": ["x"] }),
                        ("DELETE", "/templates/tags") => json!({ "name": named, "tags": ["x"] }),
                        ("POST", "/sandboxes") => json!({ "templateID": named }),
                        ("POST", path) if path.starts_with("/v2") => {
                            json!({ "fromTemplate": "base" })
                        }
                        ("PATCH", _) => json!({ "public": true }),
                        _ => Value::Null,
                    };
                    lab.call(host, caller, method, &path.replace("ID", id), body)
                        .await
                };
                let (shown, unknown) = (call(&two, foreign).await, call(&two, absent).await);
                assert_eq!(shown.status, 404, "{method} {path}: {}", shown.body);
                let text = |answer: &Answer, id: &str| {
                    let id = id.replace("%2F", "/");
                    answer.body.to_string().replace(&id, "ID")
                };
                assert_eq!(
                    text(&shown, foreign),
                    text(&unknown, absent),
                    "{method} {path}"
                );
                if method != "GET" {
                    let denied = call(&reader, foreign).await;
                    assert_eq!(denied.expect_error(403), "forbidden", "{method} {path}");
                }
                let anonymous = call(&TestCaller::Nobody, foreign).await;
                assert_eq!(anonymous.expect_error(401), "unauthenticated");
            }
        }
    }
    for host in 1..=3 {
        for path in [
            "/snapshots",
            "/snapshots?name=mine",
            "/functions",
            "/functions?all=true",
        ] {
            let listed = get(&lab, host, &two, path).await.expect(200);
            assert!(listed.items().is_empty(), "{path}: {}", listed.body);
        }
        let path = format!("/snapshots?sandboxID={id}");
        assert!(
            get(&lab, host, &two, &path)
                .await
                .expect(200)
                .items()
                .is_empty()
        );
        let listed = get(&lab, host, &two, "/templates").await.expect(200);
        assert_eq!(names(&listed, "templateID"), ["base", "third"]);
        let denied = get(&lab, host, &two, "/pools").await;
        assert_eq!(denied.expect_error(403), "forbidden");
        // The owner still has everything.
        get(&lab, host, &one, &format!("/snapshots/{snapshot}"))
            .await
            .expect(200);
        get(&lab, host, &one, "/functions/agent").await.expect(200);
        get(&lab, host, &one, "/templates/own").await.expect(200);
        let path = format!("/templates/{template}/builds/{build}/status");
        get(&lab, host, &one, &path).await.expect(200);
    }
    // Other owners may use the same names.
    let body = json!({ "name": "built", "cpuCount": 1, "memoryMB": 512 });
    let other = lab
        .call(1, &two, "POST", "/v3/templates", body)
        .await
        .expect(202);
    assert_ne!(other.text("templateID"), template);
}

/// Names of templates: `own` of a key at the second member, and of the host at the third one.
struct Names(String);

impl TemplateNames for Names {
    fn find(&self, owner: Option<&str>, name: &str, tag: &str) -> Option<NamedTemplate> {
        let home = match owner {
            Some(owner) if owner == self.0 => 2,
            Some(_) => return None,
            None => 3,
        };
        (name == "own" && tag == "default").then(|| NamedTemplate {
            owner: owner.map(str::to_owned),
            home: MemberId(home),
            version: "ef".repeat(32),
        })
    }

    fn contains(&self, owner: Option<&str>, name: &str) -> bool {
        self.find(owner, name, "default").is_some()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_denotes_the_same_template_on_all_members() {
    let mut lab = Lab::start(3).await;
    let (key, new_key) = lab.key(Scope::Create);
    let (other, _) = lab.key(Scope::Create);
    let owner = new_key.key.id;
    let own = format!("{owner}/own");
    lab.set_names(Arc::new(Names(owner)));
    // All members have a shared template of this name, which is older than the one in the table.
    for host in 1..=3 {
        let templates: &[&str] = if host == 2 { &["own", &own] } else { &["own"] };
        lab.add_objects(host, templates, Vec::new()).await;
    }
    for host in 1..=3 {
        for (caller, is_public, home) in [(&key, false, "h2"), (&other, true, "h3")] {
            for name in ["own", "own:latest"] {
                let shown = get(&lab, host, caller, &format!("/templates/{name}")).await;
                assert_eq!(shown.expect(200).body["public"], is_public, "{host} {name}");
            }
            let body = json!({ "templateID": "own" });
            let made = lab.call(host, caller, "POST", "/sandboxes", body).await;
            let id = made.expect(201).id();
            let of_home = get(&lab, 1, caller, &format!("/v2/sandboxes?host={home}")).await;
            assert!(of_home.ids().contains(&id), "{host}: {}", of_home.body);
        }
        // The template of the caller hides the shared one.
        let listed = get(&lab, host, &key, "/templates").await.expect(200);
        let is_public: Vec<_> = listed.items().iter().map(|t| &t["public"]).collect();
        assert_eq!(is_public, [false]);
        let listed = get(&lab, host, &other, "/templates").await.expect(200);
        assert_eq!(names(&listed, "templateID"), ["own"]);
    }
    // A template is not renamed to the name of a template of another member.
    let body = json!({ "name": "mine", "cpuCount": 1, "memoryMB": 512 });
    let requested = lab.call(1, &key, "POST", "/v3/templates", body).await;
    let path = format!(
        "/templates/{}/alias",
        requested.expect(202).text("templateID")
    );
    let body = json!({ "alias": "own" });
    let refused = lab.call(3, &key, "PUT", &path, body).await;
    assert_eq!(refused.expect_error(409), "name_taken");
    // The name never denotes another template because its host is dead.
    lab.stop(2).await;
    let body = json!({ "templateID": "own" });
    let lost = lab.call(1, &key, "POST", "/sandboxes", body).await;
    assert_eq!(lost.expect_error(503), "host_lost");
    let lost = get(&lab, 3, &key, "/templates/own").await;
    assert_eq!(lost.expect_error(503), "host_lost");
    // The owner of the name may request a new build of it on another host.
    let body = json!({ "name": "own", "cpuCount": 1, "memoryMB": 512 });
    lab.call(1, &key, "POST", "/v3/templates", body)
        .await
        .expect(202);
}
