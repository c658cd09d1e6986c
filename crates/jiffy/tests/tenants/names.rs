//! Tests that another key cannot see, select or shadow templates and images of a key.

use super::two_keys::TwoKeys;
use crate::support::wait_for;
use jiffy_image::{
    DiskBudget, Import, ImportSource, ImportStart, SignaturePolicy, Templates, UnpackLimits,
    Visibility, imported_image,
};
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};
use std::fs;

impl TwoKeys {
    /// Returns the id of the key created under this name.
    fn key_id(&self, name: &str) -> String {
        let keys = self.remote.test_home.json(&["key", "ls"]);
        let mut keys = keys.as_array().unwrap().iter();
        let found = keys.find(|k| k["name"] == name).unwrap();
        found["id"].as_str().unwrap().to_owned()
    }

    /// Requests a build and starts it. Returns the paths of the template and of the build.
    fn begin(&self, key: &str, name: &str, start: &Value) -> (String, String) {
        let body = json!({ "name": name, "cpuCount": 1, "memoryMB": 512 });
        let (status, request) = self.http(key, "POST", "/v3/templates", &body);
        assert_eq!(status, 202, "{request}");
        let (template, build) = (text(&request, "templateID"), text(&request, "buildID"));
        let path = format!("/templates/{template}/builds/{build}");
        let (status, response) = self.http(key, "POST", &format!("/v2{path}"), start);
        assert_eq!(status, 202, "{response}");
        (path, build)
    }

    /// Runs a build. Returns `ready`, or the reason of its failure.
    fn build(&self, key: &str, name: &str, start: &Value) -> String {
        let (path, _) = self.begin(key, name, start);
        wait_for("the build", || {
            let (_, now) = self.http(key, "GET", &format!("{path}/status"), &Value::Null);
            match now["status"].as_str().unwrap() {
                "ready" => Some("ready".to_owned()),
                "error" => Some(now["reason"]["message"].as_str().unwrap().to_owned()),
                _ => None,
            }
        })
    }

    /// Returns the content of `/tmp/who` in a new sandbox.
    fn owner_word(&self, key: &str, template: &str) -> String {
        let body = json!({ "templateID": template, "envVars": { "SECRET": "mine" } });
        let (status, created) = self.http(key, "POST", "/v2/sandboxes", &body);
        assert_eq!(status, 201, "{created}");
        let id = text(&created, "sandboxID");
        let output = self.ok(key, &["exec", &id, "--", "cat", "/tmp/who"]);
        self.ok(key, &["kill", &id]);
        output
    }

    /// Asserts that `name` does not exist for the holder of `key` in any call.
    fn assert_unknown(&self, key: &str, name: &str) {
        let quoted = name.replace('/', "%2F");
        let calls = [
            (
                "POST",
                "/v2/sandboxes".to_owned(),
                json!({ "templateID": name }),
            ),
            ("GET", format!("/templates/{quoted}"), Value::Null),
            ("GET", format!("/templates/{quoted}/tags"), Value::Null),
            ("GET", format!("/templates/aliases/{quoted}"), Value::Null),
            ("DELETE", format!("/templates/{quoted}"), Value::Null),
            (
                "PATCH",
                format!("/v2/templates/{quoted}"),
                json!({ "public": true }),
            ),
            (
                "POST",
                "/templates/tags".to_owned(),
                json!({ "target": name, "tags": ["x"] }),
            ),
        ];
        for (method, path, body) in calls {
            let (status, answer) = self.http(key, method, &path, &body);
            assert_eq!(status, 404, "{method} {path}: {answer}");
        }
        let (status, all) = self.http(key, "GET", "/templates", &Value::Null);
        assert_eq!(status, 200);
        let names = all.as_array().unwrap().iter().flat_map(|t| {
            let names = t["names"].as_array().unwrap();
            names.iter().map(|n| n.as_str().unwrap().to_owned())
        });
        assert!(!names.collect::<Vec<_>>().contains(&name.to_owned()));
    }
}

fn text(value: &Value, field: &str) -> String {
    value[field].as_str().unwrap().to_owned()
}

/// Returns a build whose template contains the name of its owner.
fn build_with_word(word: &str) -> Value {
    json!({
        "fromTemplate": "base",
        "steps": [{ "type": "RUN", "args": [format!("echo {word} > /tmp/who")] }],
    })
}

fn is_build_listed(templates: &Templates, build: &str) -> bool {
    let all = templates.list().unwrap();
    all.iter().any(|m| m.name.ends_with(build))
}

#[jiffy_test(root)]
fn templates_of_one_key_are_not_seen_chosen_or_shadowed_by_another() {
    let keys = TwoKeys::with_templates(&["--warm-pool", "0"]);
    let (alice, mallory) = (&keys.alice, &keys.mallory);
    // Alice's key has the name `test`.
    let (alice_id, mallory_id) = (keys.key_id("test"), keys.key_id("mallory"));
    let templates = keys.remote.test_home.templates();

    // Mallory publishes names that Alice may use later.
    for name in ["golden", "tools:1"] {
        assert_eq!(
            keys.build(mallory, name, &build_with_word("mallory")),
            "ready"
        );
        let (name, _) = name.split_once(':').unwrap_or((name, ""));
        let path = format!("/v2/templates/{name}");
        let (status, _) = keys.http(mallory, "PATCH", &path, &json!({ "public": true }));
        assert_eq!(status, 200);
    }
    // Alice reaches the public template by its whole name (`KEY/NAME:TAG`), but not by `tools:1`.
    let tools = format!("{mallory_id}/tools:1");
    assert_eq!(
        keys.owner_word(alice, &tools),
        "mallory",
        "public, and named"
    );
    keys.assert_unknown(alice, "tools:1");
    // A build of Alice cannot name Mallory's template `tools:1` without the key either.
    for start in [
        json!({ "fromTemplate": "tools:1" }),
        json!({ "fromImage": "tools:1" }),
    ] {
        let ended = keys.build(alice, "stands-on-tools", &start);
        assert_ne!(ended, "ready", "{start}");
    }
    let context = keys.remote.test_home.dir.path().join("context");
    fs::create_dir(&context).unwrap();
    fs::write(context.join("Dockerfile"), "FROM tools:1\n").unwrap();
    let args = [
        "template",
        "build",
        context.to_str().unwrap(),
        "--name",
        "stands",
    ];
    let refused = keys.call(alice, &args);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    fs::write(context.join("Dockerfile"), format!("FROM {tools}\n")).unwrap();
    let args = [
        "template",
        "build",
        context.to_str().unwrap(),
        "--name",
        "tools",
    ];
    // A Dockerfile may name the public template by its whole name.
    keys.ok(alice, &args);
    assert_eq!(
        keys.owner_word(alice, "tools"),
        "mallory",
        "by the whole name"
    );
    // The same name refers to different templates of both keys.
    assert_eq!(
        keys.build(alice, "tools:1", &build_with_word("alice")),
        "ready"
    );
    assert_eq!(keys.owner_word(alice, "tools:1"), "alice");
    assert_eq!(keys.owner_word(mallory, "tools:1"), "mallory");
    let stood = keys.build(alice, "stood", &json!({ "fromTemplate": "tools:1" }));
    assert_eq!(stood, "ready");
    assert_eq!(keys.owner_word(alice, "stood"), "alice");
    for name in ["stood".to_owned(), format!("{alice_id}/stood")] {
        keys.assert_unknown(mallory, &name);
    }

    // Alice's snapshot is found by its name and by its id, even if a template of Mallory has the
    // same name.
    let id = keys.ok(alice, &["create", "--template", "tools:1"]);
    let path = format!("/sandboxes/{id}/snapshots");
    let (status, taken) = keys.http(alice, "POST", &path, &json!({ "name": "golden" }));
    assert_eq!(status, 201, "{taken}");
    let snapshot = text(&taken, "snapshotID");
    let body = json!({ "name": snapshot, "cpuCount": 1, "memoryMB": 512 });
    let (status, refused) = keys.http(mallory, "POST", "/v3/templates", &body);
    assert_eq!(status, 400, "{refused}");
    // The API rejects the id of a snapshot as a name (above). A template with such a name, here
    // created on disk, must not hide Alice's snapshot either.
    let shadow = format!("{mallory_id}/{snapshot}");
    let directory = keys.remote.test_home.dir.path().join("templates");
    let from = directory.join(format!("{mallory_id}~golden"));
    let to = directory.join(format!("{mallory_id}~{snapshot}"));
    fs::create_dir(&to).unwrap();
    let manifest = fs::read_to_string(from.join("template.json")).unwrap();
    let mut manifest: Value = serde_json::from_str(&manifest).unwrap();
    manifest["name"] = json!(snapshot);
    fs::write(to.join("template.json"), manifest.to_string()).unwrap();
    assert_eq!(keys.owner_word(mallory, &shadow), "mallory");
    for word in ["golden", &snapshot] {
        assert_eq!(keys.owner_word(alice, word), "alice", "{word}");
    }

    // Templates of the operator are private until they are published.
    let root = keys.remote.test_home.dir.path().join("root");
    fs::create_dir(&root).unwrap();
    fs::write(root.join("file"), "of the host").unwrap();
    let root = root.to_str().unwrap();
    let test_home = &keys.remote.test_home;
    test_home.ok(&["template", "build", "--from-dir", root, "--name", "hosts"]);
    keys.assert_unknown(mallory, "hosts");
    test_home.ok(&["template", "publish", "hosts"]);
    let (status, _) = keys.http(mallory, "GET", "/templates/hosts", &Value::Null);
    assert_eq!(status, 200);
    let (status, _) = keys.http(mallory, "DELETE", "/templates/hosts", &Value::Null);
    assert_eq!(status, 403);

    test_home.ok(&["template", "publish", "--private", "hosts"]);
    keys.assert_unknown(mallory, "hosts");
    let args = ["template", "build", "--from-dir", root, "--name", "open"];
    test_home.ok(&[&args[..], &["--public"]].concat());
    let (status, open) = keys.http(mallory, "GET", "/templates/open", &Value::Null);
    assert_eq!((status, &open["public"]), (200, &json!(true)));

    // Templates that builds create from images are available to builds only.
    let name = imported_image(Some(&alice_id), "ghcr.io/alice/private:1");
    let image = format!("{alice_id}/{name}");
    let import = Import {
        name: image.clone(),
        visibility: Some(Visibility::Internal),
        source: ImportSource::Directory(root.into()),
        vcpus: None,
        memory_mib: None,
        disk_mib: None,
        start: ImportStart::Nothing,
        ready: None,
        limits: UnpackLimits::default(),
        disk: DiskBudget::default(),
        signatures: SignaturePolicy::default(),
    };
    import.run(&templates, &mut |_| ()).unwrap();
    let listed = test_home.ok(&["template", "ls"]);
    assert!(!listed.contains(&name), "{listed}");
    let listed = test_home.ok(&["template", "ls", "--all"]);
    assert!(listed.contains(&image), "{listed}");
    for key in [alice, mallory] {
        keys.assert_unknown(key, &image);
        keys.assert_unknown(key, &name);
        let start = json!({ "fromTemplate": image });
        let ended = keys.build(key, "taken", &start);
        assert!(ended.contains("does not exist"), "{ended}");
    }

    // The template of an unfinished build exists for no client, and is removed after the build,
    // whether the build is cancelled or the daemon is killed.
    let never = json!({
        "fromTemplate": "tools:1", "startCmd": "sleep infinity", "readyCmd": "false",
        "steps": [{ "type": "RUN", "args": ["echo never > /tmp/never"] }],
    });
    for how in ["cancelled", "killed"] {
        let (path, build) = keys.begin(alice, "never", &never);
        wait_for("the template of the unfinished build", || {
            is_build_listed(&templates, &build).then_some(())
        });
        let name = format!("build-{build}");
        let whole = format!("{alice_id}/{name}");
        for (key, name) in [(mallory, &name), (mallory, &whole), (alice, &name)] {
            keys.assert_unknown(key, name);
        }
        match how {
            "cancelled" => {
                let cancel = format!("{path}/cancel");
                assert_eq!(keys.http(alice, "POST", &cancel, &Value::Null).0, 204);
            }
            _ => {
                test_home.kill_daemon();
                test_home.ok(&["daemon", "start", "--no-listen"]);
            }
        }
        wait_for("the template to be removed", || {
            (!is_build_listed(&templates, &build)).then_some(())
        });
    }
}

#[jiffy_test]
fn builds_that_are_not_started_are_bounded_for_each_key() {
    let keys = TwoKeys::new(&["--warm-pool", "0"]);
    let mut entered = 0;
    for n in 0..400 {
        let body = json!({ "name": format!("name{n}"), "cpuCount": 1, "memoryMB": 512 });
        let (status, answer) = keys.http(&keys.mallory, "POST", "/v3/templates", &body);
        match status {
            202 => entered += 1,
            429 => assert_eq!(answer["error_code"], "too_many_waiting_builds"),
            status => panic!("{status}: {answer}"),
        }
    }
    assert_eq!(entered, jiffy_template_builder::MAX_WAITING_BUILDS);
    let body = json!({ "name": "name0", "cpuCount": 1, "memoryMB": 512 });
    let (status, answer) = keys.http(&keys.alice, "POST", "/v3/templates", &body);
    assert_eq!(status, 202, "{answer}");
}
